//! Both targets of every kernel are compiled without a card being there; this reads the compiler's resource report and the machine
//! code and fails on what would make a kernel slow or unable to start: spills, too much shared memory, a tree kernel without tensor
//! cores or with narrow KV loads. In a build without nvcc there is nothing to read, which is said.

use std::path::{Path, PathBuf};
use std::process::Command;

use kdtree::device::cuda::image;
use kdtree::device::cuda::params::SHARED_LIMIT;
use kdtree::device::cuda::products::{MAX_SHARED, MAX_SHARED_SUM};
use kdtree::device::cuda::verify::TREE_SHARED;

/// Where build.rs left cubins and reports; absent in a build without kernels.
fn build() -> Option<PathBuf> {
    let folder = option_env!("KDTREE_KERNEL_BUILD").map(PathBuf::from).filter(|_| image::built());
    if folder.is_none() {
        eprintln!("skipped: built without nvcc, so there is no machine code to read");
    }
    folder
}

const UNITS: [&str; 3] = ["verify_baseline", "verify_tree", "verify_merge"];
const TARGETS: [&str; 2] = ["sm_90a", "sm_120a"];

/// Bytes that may be spilled: none but for two known cases. The direct attention holds two tiles of scores at once, which gains more
/// than a few words cost; and two blocks of the draw share a multiprocessor, without which it takes 1.7 times as long for many rows.
fn spills_allowed(target: &str, kernel: &str) -> u32 {
    match (target, kernel) {
        ("sm_90a", "attend_segment") => 40,
        (_, "round_draw") => 300,
        _ => 0,
    }
}

/// Most dynamic shared memory that a kernel of kernels/products asks for; the rings of `wide` and of `*_many` take what the card has left.
fn dynamic_of_product(kernel: &str) -> u32 {
    let starts = |names: &[&str]| names.iter().any(|name| kernel.starts_with(name));
    match kernel {
        _ if starts(&["gate_up_built", "gate_up_alone"]) || starts(&["down_sum_"]) => MAX_SHARED_SUM,
        _ if starts(&["wide_", "gate_up_many_", "down_many"]) => 0,
        _ if starts(&["dense_", "one_", "few_", "gate_up_", "down_"]) => MAX_SHARED,
        _ => 0,
    }
}

/// What ptxas says about one kernel.
#[derive(Debug)]
struct Usage {
    kernel: String,
    spill_bytes: u32,
    static_shared: u32,
    registers: u32,
}

fn number_before(line: &str, word: &str) -> Option<u32> {
    line.split_once(word)?.0.split_whitespace().next_back()?.parse().ok()
}

/// Every kernel of a report of `ptxas -v`, which names the kernel, then its spills, then its registers and shared memory.
fn usages(report: &str) -> Vec<Usage> {
    let mut found: Vec<Usage> = Vec::new();
    for line in report.lines() {
        if let Some(name) = line.split_once("Compiling entry function '").and_then(|(_, rest)| rest.split('\'').next()) {
            found.push(Usage { kernel: name.to_owned(), spill_bytes: u32::MAX, static_shared: 0, registers: 0 });
        } else if let (Some(last), Some(stores), Some(loads)) =
            (found.last_mut(), number_before(line, " bytes spill stores"), number_before(line, " bytes spill loads"))
        {
            last.spill_bytes = stores + loads;
        } else if let (Some(last), Some((_, rest))) = (found.last_mut(), line.split_once("Used ")) {
            last.registers = number_before(rest, " registers").expect("registers in the report");
            last.static_shared = number_before(rest, " bytes smem").unwrap_or(0);
        }
    }
    found
}

fn report(folder: &Path, unit: &str, target: &str) -> Vec<Usage> {
    let path = folder.join(format!("{unit}.{target}.txt"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let found = usages(&text);
    assert!(!found.is_empty(), "{}: no kernel in the report", path.display());
    found
}

#[test]
fn no_kernel_spills_and_every_kernel_fits_the_shared_memory_of_sm_120() {
    let Some(folder) = build() else { return };
    for unit in UNITS {
        for target in TARGETS {
            for usage in report(&folder, unit, target) {
                assert!(usage.spill_bytes <= spills_allowed(target, &usage.kernel), "{target} spills: {usage:?}");
                let dynamic =
                    TREE_SHARED.iter().find(|(rows, _)| usage.kernel.starts_with(&format!("verify_tree_{rows}_"))).map_or(0, |t| t.1);
                assert!(usage.static_shared + dynamic <= SHARED_LIMIT, "{target}: {usage:?} with {dynamic} bytes dynamic");
            }
        }
    }
}

/// Every kernel of `kernels/FOLDER` for both targets.
fn all_of(build: &Path, folder: &str) -> Vec<(&'static str, Usage)> {
    let sources = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(folder)).unwrap();
    let units = sources.map(|file| file.unwrap().path()).filter(|path| path.extension().is_some_and(|extension| extension == "cu"));
    let units: Vec<String> = units.map(|path| format!("{folder}_{}", path.file_stem().unwrap().to_string_lossy())).collect();
    assert!(units.len() >= 4, "{units:?}");
    let of = |unit: &String, target: &'static str| report(build, unit, target).into_iter().map(move |usage| (target, usage));
    units.iter().flat_map(|unit| TARGETS.into_iter().flat_map(move |target| of(unit, target))).collect()
}

#[test]
fn no_other_kernel_spills_more_than_allowed() {
    let Some(build) = build() else { return };
    for (target, usage) in ["attention", "products", "round"].into_iter().flat_map(|folder| all_of(&build, folder)) {
        assert!(usage.spill_bytes <= spills_allowed(target, &usage.kernel), "{target} spills: {usage:?}");
    }
}

#[test]
fn every_product_and_round_kernel_fits_the_shared_memory_of_sm_120() {
    let Some(build) = build() else { return };
    for (target, usage) in ["products", "round"].into_iter().flat_map(|folder| all_of(&build, folder)) {
        let dynamic = dynamic_of_product(&usage.kernel);
        // Dynamic memory begins at a multiple of 128.
        let all = if dynamic > 0 { usage.static_shared.next_multiple_of(128) + dynamic } else { usage.static_shared };
        assert!(all <= SHARED_LIMIT, "{target}: {usage:?} with {dynamic} bytes dynamic");
    }
}

#[test]
fn the_tree_kernel_is_built_for_every_row_tile_and_both_numerics() {
    let Some(folder) = build() else { return };
    for target in TARGETS {
        let mut names: Vec<String> = report(&folder, "verify_tree", target).into_iter().map(|u| u.kernel).collect();
        names.sort();
        let mut wanted: Vec<String> =
            TREE_SHARED.iter().flat_map(|(rows, _)| ["exact", "fast"].map(|n| format!("verify_tree_{rows}_{n}"))).collect();
        wanted.sort();
        assert_eq!(names, wanted, "{target}");
    }
}

/// The disassembler: beside nvcc's own folder, else on PATH.
fn disassemble(cubin: &Path) -> Option<String> {
    let beside = option_env!("KDTREE_NVCC").map(|nvcc| Path::new(nvcc).with_file_name("cuobjdump"));
    let found = std::env::var_os("KDTREE_NVCC").map(|nvcc| Path::new(&nvcc).with_file_name("cuobjdump"));
    let tool = beside.or(found).filter(|tool| tool.is_file()).unwrap_or_else(|| PathBuf::from("cuobjdump"));
    match Command::new(&tool).arg("-sass").arg(cubin).output() {
        Ok(output) if output.status.success() => Some(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => panic!("{}: {}", tool.display(), String::from_utf8_lossy(&output.stderr)),
        Err(e) => {
            assert!(std::env::var_os("CI").is_none(), "{}: {e}; scripts/install-nvcc.sh installs it", tool.display());
            eprintln!("skipped: no cuobjdump ({e})");
            None
        }
    }
}

/// Instructions of every kernel in a listing of `cuobjdump -sass`.
fn kernels(listing: &str) -> Vec<(String, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for line in listing.lines() {
        if let Some((_, name)) = line.split_once("Function : ") {
            found.push((name.trim().to_owned(), Vec::new()));
        } else if let (Some(last), Some((_, rest))) = (found.last_mut(), line.split_once("*/")) {
            let text = rest.split("/*").next().unwrap_or("").trim();
            if !text.is_empty() && line.trim_start().starts_with("/*") {
                last.1.push(text.to_owned());
            }
        }
    }
    found
}

#[test]
fn the_tree_kernel_multiplies_on_tensor_cores_and_fetches_kv_by_bulk_copies_only() {
    let Some(folder) = build() else { return };
    for target in TARGETS {
        let Some(listing) = disassemble(&folder.join(format!("verify_tree.{target}.cubin"))) else { return };
        let found = kernels(&listing);
        assert_eq!(found.len(), 2 * TREE_SHARED.len(), "{target}");
        for (name, code) in found {
            let count = |word: &str| code.iter().filter(|line| line.contains(word)).count();
            assert!(count("HMMA.16816.F32.BF16") >= 16, "{target} {name}: {} HMMA", count("HMMA.16816.F32.BF16"));
            assert_eq!(count("HGMMA"), 0, "{target} {name}: wgmma does not exist on sm_120");
            // KV rows arrive by the copy engine, whole rows of 1152 bytes; nothing else may fetch bf16 from global memory but the
            // 4-byte query loads, which happen once a piece, outside the loop over tiles.
            assert!(count("UTMALDG") >= 1, "{target} {name}: no bulk copy");
            assert!(count("LDSM.16") >= 8, "{target} {name}: {} ldmatrix", count("LDSM.16"));
            let narrow = code.iter().filter(|l| l.contains("LDG.E.U16") || l.contains("LDG.E.S16") || l.contains("LDG.E.U8")).count();
            assert!(narrow <= 4, "{target} {name}: {narrow} narrow global loads");
            assert_eq!(count("LDGSTS.E.BYPASS"), 0, "{target} {name}: KV through 16-byte cp.async");
            // Stores of RZ belong to a check of the compiler's, not to a spill.
            let spills = code.iter().filter(|l| (l.contains("STL") || l.contains("LDL")) && !l.contains("RZ")).count();
            let allowed = spills_allowed(target, &name) as usize / 4;
            assert!(spills <= allowed, "{target} {name}: {spills} uses of local memory");
        }
    }
}

#[test]
fn the_baseline_uses_tensor_cores_and_16_byte_kv_loads() {
    let Some(folder) = build() else { return };
    for target in TARGETS {
        let Some(listing) = disassemble(&folder.join(format!("verify_baseline.{target}.cubin"))) else { return };
        let found = kernels(&listing);
        let code = &found.iter().find(|(name, _)| name == "verify_baseline").expect("the baseline kernel").1;
        assert!(code.iter().any(|l| l.contains("HMMA.16816.F32.BF16")), "{target}");
        assert!(code.iter().any(|l| l.contains("LDG.E.128")), "{target}: KV loads narrower than 16 bytes");
    }
}

#[test]
fn a_report_with_spills_is_noticed() {
    let text = "ptxas info    : Compiling entry function 'k' for 'sm_120a'\nptxas info    : Function properties for k\n    \
                8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\nptxas info    : Used 255 registers, used 1 barriers, 23680 bytes smem\n";
    let found = usages(text);
    assert_eq!((found.len(), found[0].spill_bytes, found[0].static_shared, found[0].registers), (1, 12, 23680, 255));
}
