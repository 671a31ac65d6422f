//! What was measured on a card must speak of the kernels in this tree: rebuilds them (build.rs does) and compares the hash of their
//! sm_90a machine code with the one in tests/evidence/. A line in tests/evidence/STALE.md naming the file and a reason lets an old
//! measurement pass until a card is at hand.

use kdtree::bench::kernel::{Report, cell_bytes, cell_flops};
use kdtree::bench::rank::{self, Part};
use kdtree::device::cuda::{Kernel, Numerics, image};

const FILE: &str = "kernel-h200.json";
const RANK_FILE: &str = "rank-h200.json";
/// The compiler whose machine code evidence is about; another one gives other code without the kernels having changed.
const PINNED_NVCC: &str = "13.0.88";

fn evidence(name: &str) -> Option<String> {
    std::fs::read_to_string(format!("{}/tests/evidence/{name}", env!("CARGO_MANIFEST_DIR"))).ok()
}

/// Whether STALE.md has a line that names `file` and gives a reason of some words.
fn excused(stale: &str, file: &str) -> bool {
    stale.lines().any(|line| line.contains(file) && line.split_whitespace().count() >= 4 && !line.starts_with('#'))
}

#[test]
fn kernel_evidence_is_of_the_kernels_in_this_tree() {
    let report: Report = serde_json::from_str(&evidence(FILE).expect("tests/evidence/kernel-h200.json")).expect("evidence parses");
    if image::NVCC_VERSION != PINNED_NVCC {
        eprintln!("skipped: built by nvcc {:?}, evidence is about nvcc {PINNED_NVCC}", image::NVCC_VERSION);
        return;
    }
    let fresh = report.kernel_sha256 == image::KERNEL_SHA256;
    let excuse = evidence("STALE.md").is_some_and(|stale| excused(&stale, FILE));
    assert!(
        fresh || excuse,
        "{FILE} was measured on kernels {}, this tree builds {}: measure again (kdtree bench kernel --json), or say why not in tests/evidence/STALE.md",
        report.kernel_sha256,
        image::KERNEL_SHA256
    );
}

#[test]
fn kernel_evidence_is_complete_and_consistent() {
    let report: Report = serde_json::from_str(&evidence(FILE).expect("tests/evidence/kernel-h200.json")).expect("evidence parses");
    assert!(report.read_gbps > 1000.0 && report.mma_tflops > 100.0 && !report.device.is_empty() && !report.driver.is_empty());
    for (kernel, numerics) in [(Kernel::Tree, Numerics::Fast), (Kernel::Tree, Numerics::Exact), (Kernel::Baseline, Numerics::Exact)] {
        for q in [1, 4, 8, 16, 32, 64] {
            for b in [1, 8, 32] {
                let cells = report.rows.iter().filter(|r| (r.kernel, r.numerics, r.q, r.b) == (kernel, numerics, q, b)).count();
                assert!(cells >= 2, "{kernel:?} {numerics:?} q {q} B {b}: {cells} cells");
            }
        }
    }
    for row in &report.rows {
        assert_eq!((row.bytes, row.flops), (cell_bytes(row.q, row.b, row.l, 8), cell_flops(row.q, row.b, row.l, 8)), "{row:?}");
        let floor = (row.bytes as f64 / report.read_gbps / 1e3).max(row.flops as f64 / report.mma_tflops / 1e6);
        assert!((row.floor_us - floor).abs() <= 0.01 * floor && row.us >= floor, "faster than its floor: {row:?}");
    }
}

#[test]
fn rank_evidence_is_of_the_kernels_in_this_tree_and_consistent() {
    let text = evidence(RANK_FILE).expect("tests/evidence/rank-h200.json");
    let report: rank::Report = serde_json::from_str(&text).expect("evidence parses");
    assert!(report.read_gbps > 1000.0 && !report.device.is_empty() && !report.driver.is_empty());
    assert_eq!((report.ranks, report.layers), (8, 61), "a rank of the full model");
    for draft_rows in [1, 4, 8, 16, 32, 64] {
        for part in [Part::Total, Part::Projections, Part::Attention, Part::Experts, Part::Shared, Part::Head, Part::Tree] {
            for prefix in [1024, 16384, 131_072] {
                let cell = |row: &&rank::Row| (row.draft_rows, row.part, row.prefix, row.batch) == (draft_rows, part, prefix, 1);
                let found = report.rows.iter().find(cell).unwrap_or_else(|| panic!("{draft_rows} rows at {prefix}: no {part:?}"));
                assert!((found.floor_us - found.bytes as f64 / report.read_gbps / 1e3).abs() <= 0.01 * found.floor_us.max(1.0));
            }
        }
    }
    assert!(report.rows.iter().all(|row| row.us >= row.floor_us), "nothing is faster than its floor");
    if image::NVCC_VERSION == PINNED_NVCC {
        let fresh = report.kernel_sha256 == image::all_sha256();
        let excuse = evidence("STALE.md").is_some_and(|stale| excused(&stale, RANK_FILE));
        assert!(fresh || excuse, "{RANK_FILE} was measured on other kernels: measure again (kdtree bench rank --json), or say why not");
    }
}

/// `KDTREE_REDRAW=1 cargo test --test kernel_evidence` draws it again.
#[test]
fn the_plot_in_the_docs_is_drawn_from_the_evidence() {
    let report: rank::Report = serde_json::from_str(&evidence(RANK_FILE).expect("tests/evidence/rank-h200.json")).expect("evidence parses");
    let (drawn, file) = (rank::plot::bars(&report, 1024).unwrap(), format!("{}/docs/rank-h200.svg", env!("CARGO_MANIFEST_DIR")));
    if std::env::var_os("KDTREE_REDRAW").is_some() {
        std::fs::write(&file, &drawn).unwrap();
    }
    assert!(std::fs::read_to_string(file).is_ok_and(|shown| shown == drawn), "docs/rank-h200.svg shows other figures");
}

#[test]
fn only_a_line_with_file_and_reason_excuses_stale_evidence() {
    assert!(excused("kernel-h200.json: comment in the scheduler moved, no card at hand", "kernel-h200.json"));
    assert!(!excused("# kernel-h200.json is described here in many words", "kernel-h200.json"));
    assert!(!excused("kernel-h200.json", "kernel-h200.json"));
    assert!(!excused("other.json: no card at hand today", "kernel-h200.json"));
}
