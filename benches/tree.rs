//! What the host pays per request and round for drafting: growing a tree, reducing draft logits to marginals, the walk, a sampled
//! token, and choosing a budget. `cargo bench --bench tree`.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use std::hint::black_box;

use kdtree::engine::contract::Sampling;
use kdtree::speculate::auto::AutoBudget;
use kdtree::speculate::budget::MAX_ROWS;
use kdtree::speculate::cost::Prior;
use kdtree::speculate::joint::Load;
use kdtree::speculate::round_cost::{RoundCost, Size};
use kdtree::speculate::sampling::{RowLimits, SamplerScratch, pick, uniform};
use kdtree::speculate::tree::{Marginals, Tree, marginals_from_logits};
use kdtree::speculate::walk::walk;

const DEPTHS: usize = 7;
const SMALL_VOCAB: usize = 4096;
const KIMI_VOCAB: usize = 163_840;

/// Logits shaped like a language model's: a few likely tokens scattered over a wide bell.
fn logits(rows: usize, vocab: usize) -> Vec<f32> {
    let at = |n: u64| {
        let bell = (0..4).map(|part| uniform(part, n)).sum::<f64>() * 4.0 - 8.0;
        if uniform(9, n) < 20.0 / vocab as f64 { bell + 12.0 } else { bell }
    };
    (0..(rows * vocab) as u64).map(|n| at(n) as f32).collect()
}

fn growth(c: &mut Criterion) {
    let logits = logits(DEPTHS, SMALL_VOCAB);
    let (mut ids, mut logprobs) = (vec![0; DEPTHS * 63], vec![0.0; DEPTHS * 63]);
    let marginals = marginals_from_logits(&logits, SMALL_VOCAB, 63, &mut ids, &mut logprobs);
    let mut tree = Tree::new(0);
    let mut group = c.benchmark_group("grow");
    for rows in [8, 16, 24, 32, 48, 64] {
        group.bench_with_input(BenchmarkId::from_parameter(rows), &rows, |b, &rows| {
            b.iter(|| tree.grow(1, black_box(&marginals), rows));
        });
    }
    group.finish();
}

fn marginals(c: &mut Criterion) {
    let mut group = c.benchmark_group("marginals");
    for vocab in [SMALL_VOCAB, KIMI_VOCAB] {
        let logits = logits(DEPTHS, vocab);
        let (mut ids, mut logprobs) = (vec![0; DEPTHS * 63], vec![0.0; DEPTHS * 63]);
        group.bench_function(BenchmarkId::from_parameter(vocab), |b| {
            b.iter(|| marginals_from_logits(black_box(&logits), vocab, 63, &mut ids, &mut logprobs).depths);
        });
    }
    group.finish();
}

fn walking(c: &mut Criterion) {
    let (ids, logprobs): (Vec<u32>, Vec<f32>) = (0..DEPTHS * 63).map(|at| ((at % 63) as u32, -((1 + at % 63) as f32).ln() - 1.0)).unzip();
    let mut tree = Tree::new(0);
    tree.grow(1, &Marginals { depths: DEPTHS, k: 63, ids: &ids, logprobs: &logprobs }, MAX_ROWS);
    let mut path = [0; MAX_ROWS];
    c.bench_function("walk/64", |b| b.iter(|| walk(black_box(&tree), black_box(&[0; MAX_ROWS]), &mut path)));
}

fn sampling(c: &mut Criterion) {
    let mut group = c.benchmark_group("pick");
    for vocab in [SMALL_VOCAB, KIMI_VOCAB] {
        let (logits, mut scratch) = (logits(1, vocab), SamplerScratch::new(vocab));
        let whole = Sampling { temperature: 1.0, ..Sampling::greedy() };
        let nucleus = Sampling { top_p: 0.95, ..whole.clone() };
        let top_k = Sampling { top_k: 50, ..whole.clone() };
        for (name, params) in [("greedy", Sampling::greedy()), ("whole", whole), ("top_p", nucleus), ("top_k", top_k)] {
            group.bench_function(BenchmarkId::new(name, vocab), |b| {
                b.iter(|| pick(black_box(&logits), &params, &RowLimits::default(), 0.5, &mut scratch));
            });
        }
    }
    group.finish();
}

fn budget(c: &mut Criterion) {
    let prior = Prior { fixed_us: 3_000.0, experts_us: 30_000.0, experts: 384, active: 8, row_us: 0.0, token_us: 0.0 };
    let (mut cost, mut auto) = (RoundCost::new(prior, false), AutoBudget::new(DEPTHS + 1, MAX_ROWS));
    (1..65).for_each(|rows| cost.observe(Size { requests: 1, drafting: usize::from(rows > 1), rows }, 1000, 9_000.0 + 100.0 * rows as f64));
    c.bench_function("choose", |b| b.iter(|| auto.choose(black_box(&cost), 1000, Load::default())));
}

criterion_group!(benches, growth, marginals, walking, sampling, budget);
criterion_main!(benches);
