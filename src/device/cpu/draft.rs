//! The drafter's attention on the CPU: grouped queries over the context cache and the block's own keys.

use std::cell::RefCell;

use super::attend::{scores, softmax, weighted_sum};
use super::layers::{rms_norm, rope_halves};
use super::parallel::{SharedMut, split_fine};
use super::rows::CpuRows;
use super::simd::Isa;
use crate::device::{DraftMask, GqaShape, RopeTable};

/// Context keys and values of every drafter layer by slot, each `[slots][kv_heads * head]`.
pub struct CpuContexts {
    width: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl CpuContexts {
    /// Zeroed keys and values for `slots` slots of each layer.
    pub fn new(layers: usize, slots: usize, shape: GqaShape) -> Self {
        let width = shape.kv_heads * shape.head;
        let make = || (0..layers).map(|_| vec![0.0; slots * width]).collect();
        Self { width, keys: make(), values: make() }
    }

    fn key(&self, layer: usize, slot: u32, head: usize, width: usize) -> &[f32] {
        &self.keys[layer][slot as usize * self.width + head * width..][..width]
    }

    fn value(&self, layer: usize, slot: u32, head: usize, width: usize) -> &[f32] {
        &self.values[layer][slot as usize * self.width + head * width..][..width]
    }

    /// Stores projected rows `[rows][k | v]`, normed and rotated.
    #[allow(clippy::too_many_arguments)]
    pub fn store(&mut self, isa: Isa, shape: GqaShape, k_norm: &[f32], kv: &[f32], rows: &CpuRows, rope: &RopeTable, layer: usize) {
        let width = self.width;
        for (row, kv) in kv.chunks_exact(2 * width).take(rows.len()).enumerate() {
            let at = rows.slots[row] as usize * width;
            let key = &mut self.keys[layer][at..at + width];
            norm_and_rotate(isa, shape, &kv[..width], k_norm, rope, rows.positions[row], key);
            self.values[layer][at..at + width].copy_from_slice(&kv[width..]);
        }
    }
}

/// Per-head RMSNorm, then half-split rotation.
fn norm_and_rotate(isa: Isa, shape: GqaShape, x: &[f32], weight: &[f32], rope: &RopeTable, position: u32, out: &mut [f32]) {
    let (cos, sin) = rope.at(position);
    for (x, out) in x.chunks_exact(shape.head).zip(out.chunks_exact_mut(shape.head)) {
        rms_norm(isa, x, weight, shape.eps, out);
        rope_halves(out, cos, sin);
    }
}

/// Norms and rotates the queries and keys of block rows in place: `qkv` is `[rows][q | k | v]`.
pub fn prepare_block(isa: Isa, shape: GqaShape, q_norm: &[f32], k_norm: &[f32], rows: &CpuRows, rope: &RopeTable, qkv: &mut [f32]) {
    let (q_width, kv_width) = (shape.heads * shape.head, shape.kv_heads * shape.head);
    let mut scratch = vec![0f32; q_width.max(kv_width)];
    for (row, qkv) in qkv.chunks_exact_mut(q_width + 2 * kv_width).take(rows.len()).enumerate() {
        let (q, kv) = qkv.split_at_mut(q_width);
        for (x, norm) in [(q, q_norm), (&mut kv[..kv_width], k_norm)] {
            norm_and_rotate(isa, shape, x, norm, rope, rows.positions[row], &mut scratch[..x.len()]);
            x.copy_from_slice(&scratch[..x.len()]);
        }
    }
}

thread_local! {
    static WEIGHTS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// One draft layer's attention inputs.
pub struct DraftArgs<'a> {
    pub isa: Isa,
    pub shape: GqaShape,
    pub mask: DraftMask,
    pub rows: &'a CpuRows,
    pub contexts: &'a CpuContexts,
    pub layer: usize,
    /// Prepared `[rows][q | k | v]`.
    pub qkv: &'a [f32],
}

/// `out[row] = [head][head width]`.
pub fn draft_attention(args: &DraftArgs<'_>, out: &mut [f32]) {
    let kv_heads = args.shape.kv_heads;
    let shared = SharedMut::new(out);
    split_fine(args.rows.groups.len() * kv_heads, 1, &|range| {
        WEIGHTS.with_borrow_mut(|weights| {
            for item in range {
                block_attention(args, item / kv_heads, item % kv_heads, weights, shared);
            }
        });
    });
}

/// One block and key head: its rows' queries against the context they may see and the block itself.
fn block_attention(args: &DraftArgs<'_>, index: usize, kv_head: usize, weights: &mut Vec<f32>, out: SharedMut<'_, f32>) {
    let (shape, group) = (args.shape, args.rows.groups[index]);
    let (head, per_kv) = (shape.head, shape.heads / shape.kv_heads);
    let (q_width, kv_width) = (shape.heads * head, shape.kv_heads * head);
    let stride = q_width + 2 * kv_width;
    let prefix = args.rows.prefix(index);
    // Position p of the prefix is visible to a row at position q while q - p < window; the first row sees furthest back.
    let visible_from =
        |row: usize| args.mask.window.map_or(0, |window| (prefix.len() + row + 1).saturating_sub(window as usize).min(prefix.len()));
    let oldest = visible_from(0);
    let part = |row: usize, offset: usize| &args.qkv[(group.first + row) * stride + offset + kv_head * head..][..head];
    let keys: Vec<&[f32]> = prefix[oldest..]
        .iter()
        .map(|&slot| args.contexts.key(args.layer, slot, kv_head, head))
        .chain((0..group.rows).map(|row| part(row, q_width)))
        .collect();
    let values: Vec<&[f32]> = prefix[oldest..]
        .iter()
        .map(|&slot| args.contexts.value(args.layer, slot, kv_head, head))
        .chain((0..group.rows).map(|row| part(row, q_width + kv_width)))
        .collect();
    let queries: Vec<&[f32]> = (0..group.rows * per_kv)
        .map(|i| &args.qkv[(group.first + i / per_kv) * stride + (kv_head * per_kv + i % per_kv) * head..][..head])
        .collect();
    let context = prefix.len() - oldest;
    weights.resize(weights.len().max(queries.len() * keys.len()), 0.0);
    scores(args.isa, &queries, &keys, head, weights, keys.len());
    let scale = (head as f32).sqrt().recip();
    let mut sums = vec![0f32; queries.len() * head];
    let mut totals = Vec::with_capacity(queries.len());
    for (i, weights) in weights.chunks_exact_mut(keys.len()).take(queries.len()).enumerate() {
        let row = i / per_kv;
        let from = visible_from(row) - oldest;
        let until = if args.mask.causal { context + row + 1 } else { keys.len() };
        totals.push(softmax(args.isa, &mut weights[from..until], scale).sum);
        weights[..from].fill(0.0);
        weights[until..].fill(0.0);
    }
    weighted_sum(args.isa, weights, keys.len(), queries.len(), &values, head, &mut sums);
    for (i, sum) in sums.chunks_exact(head).enumerate() {
        let at = (group.first + i / per_kv) * q_width + (kv_head * per_kv + i % per_kv) * head;
        // SAFETY: this item alone writes these heads of these rows.
        let to = unsafe { out.range(at, head) };
        for (to, sum) in to.iter_mut().zip(sum) {
            *to = sum / totals[i];
        }
    }
}
