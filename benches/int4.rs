//! Unpacking INT4 rows on the host, and the scan of values at load: both must outrun the disk.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use kdtree::model::checkpoint::Checkpoint;
use kdtree::model::config::TargetConfig;
use kdtree::model::int4;
use kdtree::model::progress::Silent;
use kdtree::model::source::ModelSource;

/// A row of K2.6's gate projection.
const COLUMNS: usize = 7168;
const GROUP: usize = 32;

fn unpack(criterion: &mut Criterion) {
    let values: Vec<i8> = (0..COLUMNS).map(|i| (i * 7 % 16) as i8 - 8).collect();
    let packed = int4::pack_row(&values);
    let scales: Vec<bf16> = (0..COLUMNS / GROUP).map(|i| bf16::from_f32(0.001 + i as f32 * 1e-5)).collect();
    let mut group = criterion.benchmark_group("int4");
    group.throughput(Throughput::Elements(COLUMNS as u64));
    let mut narrow = vec![bf16::ZERO; COLUMNS];
    group.bench_function("unpack_row", |b| b.iter(|| int4::unpack_row(black_box(&packed), black_box(&scales), GROUP, &mut narrow)));
    let mut wide = vec![0.0; COLUMNS];
    group.bench_function("unpack_row_f32", |b| b.iter(|| int4::unpack_row_f32(black_box(&packed), black_box(&scales), GROUP, &mut wide)));
    group.finish();
}

fn scan(criterion: &mut Criterion) {
    let source = ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"));
    let config = TargetConfig::load(&source).expect("the model in the repository");
    let checkpoint = Checkpoint::open_target(&source, &config).expect("the model in the repository");
    let mut group = criterion.benchmark_group("checkpoint");
    group.throughput(Throughput::Bytes(checkpoint.bytes()));
    group.bench_function("open", |b| b.iter(|| Checkpoint::open_target(black_box(&source), &config).is_ok()));
    group.bench_function("scan_values", |b| b.iter(|| checkpoint.scan_values(&Silent).is_ok()));
    group.finish();
}

criterion_group!(benches, unpack, scan);
criterion_main!(benches);
