//! Verify attention of one layer on the CPU, baseline beside custom, by rows and prefix.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use half::bf16;
use kdtree::device::MlaShape;
use kdtree::device::cpu::mla::{CpuAbsorbed, CpuLatents};
use kdtree::device::cpu::rows::CpuRows;
use kdtree::device::cpu::simd::Isa;
use kdtree::device::cpu::verify::{VerifyArgs, baseline, custom};
use kdtree::model::tensor::Matrix;

/// k26-mini's shape.
const SHAPE: MlaShape = MlaShape { heads: 8, nope: 128, rope: 64, value: 128, latent: 512, scale: 0.144_68 };

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 1000.0 - 0.5).collect()
}

/// `rows` rows of a chain after `prefix` tokens.
fn chain(rows: usize, prefix: usize) -> CpuRows {
    let mut out = CpuRows::with_capacity(rows);
    let slots: Vec<u32> = (0..prefix as u32).collect();
    out.open_group(0, &slots);
    for row in 0..rows {
        out.push(0, prefix + row, (prefix + row) as u32);
        out.ancestors.push(u64::MAX >> (63 - row));
    }
    out.close_group();
    out
}

fn verify(c: &mut Criterion) {
    let kv_b: Vec<bf16> = numbers(8 * 256 * 512).into_iter().map(bf16::from_f32).collect();
    let weights = CpuAbsorbed::pack(&Matrix { rows: 8 * 256, columns: 512, data: kv_b.into() }, SHAPE);
    let mut group = c.benchmark_group("verify");
    group.sample_size(20);
    for (rows, prefix) in [(1, 256), (1, 2048), (8, 1024), (32, 1024), (64, 1024)] {
        let mut cache = CpuLatents::new(1, prefix + 64, SHAPE.cache_width());
        cache.layers[0] = numbers((prefix + 64) * SHAPE.cache_width());
        let (queries, rows_of) = (numbers(rows * 8 * SHAPE.cache_width()), chain(rows, prefix));
        let args = VerifyArgs {
            isa: Isa::detect(),
            weights: &weights,
            shape: SHAPE,
            rows: &rows_of,
            cache: &cache,
            layer: 0,
            queries: &queries,
            fault: None,
        };
        let mut out = vec![0f32; rows * 8 * SHAPE.latent];
        let name = format!("{rows} rows, prefix {prefix}");
        group.bench_function(BenchmarkId::new("baseline", &name), |b| b.iter(|| baseline(&args, &mut out)));
        group.bench_function(BenchmarkId::new("custom", &name), |b| b.iter(|| custom(&args, &mut out)));
    }
    group.finish();
}

criterion_group!(benches, verify);
criterion_main!(benches);
