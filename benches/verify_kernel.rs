//! The verify kernels under criterion: the same cells as `kdtree bench kernel`, timed by CUDA events through graph replay. Without a
//! card it says so and measures nothing.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kdtree::bench::kernel::{Cell, Grid, cell_bytes};
use kdtree::bench::kernel_inputs::{Cache, Random, Slots};
use kdtree::device::cuda::{Gpu, Kernel, Numerics};

/// Launches a graph replay holds.
const LAUNCHES: usize = 16;

fn verify(c: &mut Criterion) {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(e) => {
            eprintln!("verify kernel bench skipped: {e}");
            return;
        }
    };
    let mut random = Random(1);
    let cache = Cache::new(&gpu, 1_200_000, &mut random).expect("room for the KV rows");
    cache.fill(&gpu, 1.0, 1).expect("filling the cache");
    let grid = Grid { kernels: vec![(Kernel::Tree, Numerics::Fast), (Kernel::Tree, Numerics::Exact)], ..Grid::full() };
    let mut group = c.benchmark_group("verify");
    for (q, b, l) in [(1, 1, 4096), (4, 8, 16384), (8, 8, 16384), (16, 1, 16384), (16, 8, 16384), (64, 8, 4096)] {
        for slots in [Slots::Random, Slots::Blocks] {
            let cell = Cell::new(&gpu, &cache, &grid, (q, b, l), slots, &mut random).expect("inputs of a cell");
            for &(kernel, numerics) in &grid.kernels {
                let graph = cell.graph(&gpu, kernel, numerics, LAUNCHES).expect("capturing the launches");
                group.throughput(Throughput::Bytes(cell_bytes(q, b, l, grid.heads)));
                let id = BenchmarkId::new(format!("{numerics:?}_{slots:?}").to_lowercase(), format!("q{q}_b{b}_l{l}"));
                group.bench_function(id, |bencher| {
                    bencher.iter_custom(|iterations| {
                        let us: f64 = (0..iterations).map(|_| cell.replay_us(&gpu, &graph).expect("a replay")).sum();
                        Duration::from_secs_f64(us / 1e6 / LAUNCHES as f64)
                    });
                });
            }
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = verify
}
criterion_main!(benches);
