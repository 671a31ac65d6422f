//! Verify attention on the CPU, twice: the baseline (one softmax over a row's whole key list) and the custom kernel (KV split,
//! partial results, log-sum-exp merge). Both read the prefix by slot, the draft rows' keys from their own slots, and the tree mask.
//!
//! A row's keys are taken in the order of their positions, committed ones first, then its ancestors. Splits are cut at multiples of
//! [`SPLIT`] positions. So what a row computes depends only on its own path: alone, in a batch, in a chain or in any tree.

use std::cell::RefCell;

use super::attend::{Partial, RowStats, scores, softmax, weighted_sum};
use super::gemm::{Target, matrix_blocks};
use super::mla::{CpuAbsorbed, CpuLatents};
use super::parallel::{SharedMut, split_fine};
use super::rows::{CpuRows, Group};
use super::simd::Isa;
use crate::device::{KernelFault, MlaShape};

/// Positions per split of the custom kernel.
pub const SPLIT: usize = 256;

/// Rows that one task of the custom kernel carries, so that a key is read once for all of them.
const TILE: usize = 8;

/// One layer's verify attention.
pub struct VerifyArgs<'a> {
    pub isa: Isa,
    pub weights: &'a CpuAbsorbed,
    pub shape: MlaShape,
    pub rows: &'a CpuRows,
    pub cache: &'a CpuLatents,
    pub layer: usize,
    /// Absorbed queries `[rows][heads][latent + rope]`.
    pub queries: &'a [f32],
    pub fault: Option<KernelFault>,
}

impl<'a> VerifyArgs<'a> {
    fn query(&self, row: usize, head: usize) -> &'a [f32] {
        let width = self.shape.cache_width();
        &self.queries[(row * self.shape.heads + head) * width..][..width]
    }

    fn key(&self, slot: u32) -> &'a [f32] {
        self.cache.row(self.layer, slot)
    }

    /// Keys of the draft rows that row `row` (counted in its group) sees, root first.
    fn draft_keys(&self, group: &Group, row: usize) -> Vec<&'a [f32]> {
        let row = if self.fault == Some(KernelFault::MaskStride) { (row + 1) % group.rows } else { row };
        let mut seen = self.rows.ancestors[group.first + row];
        if self.fault == Some(KernelFault::MissingDraftKeys) {
            seen &= 1 << row;
        }
        let mut keys = Vec::with_capacity(seen.count_ones() as usize);
        while seen != 0 {
            let ancestor = seen.trailing_zeros() as usize;
            keys.push(self.key(self.rows.slots[group.first + ancestor]));
            seen &= seen - 1;
        }
        keys
    }
}

/// `[W_UK^T q_nope ; q_rope]` for every row and head.
pub fn absorb_queries(isa: Isa, weights: &CpuAbsorbed, shape: MlaShape, q: &[f32], rows: usize, out: &mut [f32]) {
    let (from, to) = (shape.query_width(), shape.cache_width());
    let panels = weights.into_latent[0].panels();
    let shared = SharedMut::new(out);
    // Items are (head, panel); the rotated part rides with the last panel.
    split_fine(shape.heads * panels, 8, &|range| {
        let mut item = range.start;
        while item < range.end {
            let (head, first) = (item / panels, item % panels);
            let last = panels.min(first + range.end - item);
            let x: Vec<&[f32]> = (0..rows).map(|row| &q[(row * shape.heads + head) * from..][..shape.nope]).collect();
            let target = Target::rows(shared, shape.heads * to).from(head * to).from_panel(first);
            matrix_blocks(isa, &x, &weights.into_latent[head], first, last, target);
            if last == panels {
                for row in 0..rows {
                    let rope = &q[(row * shape.heads + head) * from + shape.nope..][..shape.rope];
                    // SAFETY: the rotated part of this head belongs to the item with its last panel.
                    unsafe { shared.range((row * shape.heads + head) * to + shape.latent, shape.rope) }.copy_from_slice(rope);
                }
            }
            item += last - first;
        }
    });
}

/// `W_UV` times the latent outputs `[rows][heads][latent]`, into `[rows][heads][value]`.
pub fn expand_outputs(isa: Isa, weights: &CpuAbsorbed, shape: MlaShape, latent_out: &[f32], rows: usize, out: &mut [f32]) {
    let panels = weights.from_latent[0].panels();
    let shared = SharedMut::new(out);
    split_fine(shape.heads * panels, 4, &|range| {
        let mut item = range.start;
        while item < range.end {
            let (head, first) = (item / panels, item % panels);
            let last = panels.min(first + range.end - item);
            let x: Vec<&[f32]> = (0..rows).map(|row| &latent_out[(row * shape.heads + head) * shape.latent..][..shape.latent]).collect();
            let target = Target::rows(shared, shape.heads * shape.value).from(head * shape.value).from_panel(first);
            matrix_blocks(isa, &x, &weights.from_latent[head], first, last, target);
            item += last - first;
        }
    });
}

/// Baseline: for every row and head one softmax over all its keys. Simple on purpose.
pub fn baseline(args: &VerifyArgs<'_>, out: &mut [f32]) {
    let (heads, latent) = (args.shape.heads, args.shape.latent);
    let places = row_places(args.rows);
    let shared = SharedMut::new(out);
    split_fine(places.len() * heads, 1, &|range| {
        let mut weights = Vec::new();
        for item in range {
            let ((index, row), head) = (places[item / heads], item % heads);
            let group = &args.rows.groups[index];
            let mut keys: Vec<&[f32]> = args.rows.prefix(index).iter().map(|&slot| args.key(slot)).collect();
            keys.extend(args.draft_keys(&Group { ..*group }, row));
            let row = group.first + row;
            weights.clear();
            weights.resize(keys.len(), 0.0);
            scores(args.isa, &[args.query(row, head)], &keys, args.shape.cache_width(), &mut weights, keys.len());
            let stats = softmax(args.isa, &mut weights, args.shape.scale);
            // SAFETY: this item alone writes this head of this row.
            let output = unsafe { shared.range((row * heads + head) * latent, latent) };
            output.fill(0.0);
            weighted_sum(args.isa, &weights, keys.len(), 1, &keys, latent, output);
            // By the reciprocal, as the custom kernel does: a row whose keys fit one split then has the same bits in both.
            let factor = 1.0 / stats.sum;
            output.iter_mut().for_each(|value| *value *= factor);
        }
    });
}

/// Every row as (group, row in the group).
fn row_places(rows: &CpuRows) -> Vec<(usize, usize)> {
    rows.groups.iter().enumerate().flat_map(|(index, group)| (0..group.rows).map(move |row| (index, row))).collect()
}

/// Scores, one split's output and the running output of a tile.
#[derive(Default)]
struct TileScratch {
    weights: Vec<f32>,
    part: Vec<f32>,
    stats: Vec<RowStats>,
    total: Vec<f32>,
    totals: Vec<RowStats>,
}

thread_local! {
    static SCRATCH: RefCell<TileScratch> = RefCell::new(TileScratch::default());
}

/// Custom: tiles of rows walk the splits of their prefix; each split gives a partial result per row and head, merged in order.
pub fn custom(args: &VerifyArgs<'_>, out: &mut [f32]) {
    let heads = args.shape.heads;
    let mut tiles = Vec::new();
    for (index, group) in args.rows.groups.iter().enumerate() {
        tiles.extend((0..group.rows).step_by(TILE).map(|first| (index, first, TILE.min(group.rows - first))));
    }
    // Where there are few rows, heads are spread over the threads too.
    let parts = if tiles.len() >= 2 * rayon::current_num_threads() || heads % 2 == 1 { 1 } else { 2 };
    let shared = SharedMut::new(out);
    split_fine(tiles.len() * parts, 1, &|range| {
        SCRATCH.with_borrow_mut(|scratch| {
            for item in range {
                let (index, first, count) = tiles[item / parts];
                let span = heads / parts;
                let head = item % parts * span;
                tile_attention(args, index, first, count, head, span, scratch, shared);
            }
        });
    });
}

#[allow(clippy::too_many_arguments)]
fn tile_attention(
    args: &VerifyArgs<'_>,
    index: usize,
    first: usize,
    count: usize,
    head: usize,
    span: usize,
    scratch: &mut TileScratch,
    out: SharedMut<'_, f32>,
) {
    let (group, latent) = (args.rows.groups[index], args.shape.latent);
    let queries: Vec<&[f32]> = (first..first + count)
        .flat_map(|row| (head..head + span).map(move |head| (row, head)))
        .map(|(row, head)| args.query(group.first + row, head))
        .collect();
    let tails: Vec<Vec<&[f32]>> = (first..first + count).map(|row| args.draft_keys(&group, row)).collect();
    let deepest = tails.iter().map(Vec::len).max().unwrap_or(0);
    scratch.total.clear();
    scratch.total.resize(queries.len() * latent, 0.0);
    scratch.totals.clear();
    scratch.totals.resize(queries.len(), RowStats { max: f32::NEG_INFINITY, sum: 0.0 });
    let mut start = 0;
    while start < group.prefix + deepest {
        if !(args.fault == Some(KernelFault::DroppedSplit) && start == 0) {
            split_attention(args, index, &queries, &tails, span, start, scratch);
            let parts = scratch.part.chunks_exact(latent).zip(&scratch.stats);
            for ((total, stats), (part, part_stats)) in scratch.total.chunks_exact_mut(latent).zip(&mut scratch.totals).zip(parts) {
                let mut partial = Partial { stats: *stats, output: total };
                partial.merge(*part_stats, part);
                *stats = partial.stats;
            }
        }
        start += SPLIT;
    }
    for (i, (total, stats)) in scratch.total.chunks_exact_mut(latent).zip(&scratch.totals).enumerate() {
        let row = group.first + first + i / span;
        Partial { stats: *stats, output: total }.finish();
        // SAFETY: this tile alone writes these heads of these rows.
        unsafe { out.range((row * args.shape.heads + head + i % span) * latent, latent) }.copy_from_slice(total);
    }
}

/// Keys at positions `start .. start + SPLIT` of every row of a tile: the committed ones together, then each row's ancestors.
fn split_attention(
    args: &VerifyArgs<'_>,
    index: usize,
    queries: &[&[f32]],
    tails: &[Vec<&[f32]>],
    span: usize,
    start: usize,
    scratch: &mut TileScratch,
) {
    let (prefix, latent, width) = (args.rows.prefix(index), args.shape.latent, args.shape.cache_width());
    let common = prefix.len().saturating_sub(start).min(SPLIT);
    let keys: Vec<&[f32]> = prefix[prefix.len().min(start)..][..common].iter().map(|&slot| args.key(slot)).collect();
    // Ancestor j stands at position prefix + j.
    let from = start.saturating_sub(prefix.len());
    let until = (start + SPLIT).saturating_sub(prefix.len());
    scratch.weights.resize(queries.len() * SPLIT, 0.0);
    scratch.part.clear();
    scratch.part.resize(queries.len() * latent, 0.0);
    scratch.stats.clear();
    scores(args.isa, queries, &keys, width, &mut scratch.weights, SPLIT);
    for (row, tail) in tails.iter().enumerate() {
        let own = &tail[tail.len().min(from)..tail.len().min(until)];
        let rows = row * span..(row + 1) * span;
        scores(args.isa, &queries[rows.clone()], own, width, &mut scratch.weights[rows.start * SPLIT + common..], SPLIT);
        for query in rows {
            let weights = &mut scratch.weights[query * SPLIT..query * SPLIT + common + own.len()];
            scratch.stats.push(softmax(args.isa, weights, args.shape.scale));
        }
    }
    weighted_sum(args.isa, &scratch.weights, SPLIT, queries.len(), &keys, latent, &mut scratch.part);
    for (row, tail) in tails.iter().enumerate() {
        let own = &tail[tail.len().min(from)..tail.len().min(until)];
        let rows = row * span..(row + 1) * span;
        let weights = &scratch.weights[rows.start * SPLIT + common..];
        weighted_sum(args.isa, weights, SPLIT, span, own, latent, &mut scratch.part[rows.start * latent..rows.end * latent]);
    }
}
