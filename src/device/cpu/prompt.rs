//! Direct attention of prompt rows on the CPU: keys and values are expanded from the latents, once per prompt token, and kept from
//! chunk to chunk while the same prompt is being read. Called by the device's `prompt_attention`.
//!
//! Scores and weighted sums are the dense products of [`super::gemm`]: keys lie in panels of 16 tokens, values in panels of 16
//! columns. A score is one chain over the key's values, an output one chain over the tokens in order, so what a row computes
//! depends on the tokens up to itself alone: not on chunks, on tiles or on what is kept.

use std::cell::Cell;
use std::ops::Range;

use super::attend::softmax;
use super::gemm::{Panels, Start, Target, scattered_product};
use super::mla::{CpuAbsorbed, CpuLatents};
use super::parallel::{SharedMut, split, split_fine};
use super::rows::CpuRows;
use super::simd::{Isa, Lanes, WIDTH, dispatch};
use super::tiles::{panel_product, widen};
use crate::device::MlaShape;

/// Query rows that one task carries.
const TILE: usize = 24;

/// Tokens that one task expands, and whose values lie together; a multiple of [`WIDTH`].
const BLOCK: usize = 128;

/// Most bytes of expanded keys and values that are kept between chunks. What does not fit is expanded anew for every chunk, the
/// last layers first.
const KEPT_BYTES: usize = 512 << 20;

/// Keys and values of one layer's prompt tokens.
#[derive(Default)]
struct Expanded {
    /// The slots they were expanded from, by position.
    slots: Vec<u32>,
    /// Per head panels of 16 tokens: `[tokens / 16][nope + rope][16]`.
    keys: Vec<Vec<f32>>,
    /// Per head blocks of [`BLOCK`] tokens in panels of 16 columns: `[tokens / BLOCK][value / 16][BLOCK][16]`.
    values: Vec<Vec<f32>>,
}

/// What is expanded of the prompt in hand.
pub struct PromptCache {
    /// Index of the request that the kept layers belong to.
    request: Option<usize>,
    kept: Vec<Expanded>,
    /// One layer's, where there is no room to keep it.
    passing: Expanded,
    /// Latents in panels, while they are expanded.
    panels: Vec<f32>,
    limit: usize,
}

impl Default for PromptCache {
    fn default() -> Self {
        Self::with_limit(KEPT_BYTES)
    }
}

impl PromptCache {
    /// Keeps at most `limit` bytes between chunks.
    fn with_limit(limit: usize) -> Self {
        Self { request: None, kept: Vec::new(), passing: Expanded::default(), panels: Vec::new(), limit }
    }

    /// The request begins or ends, or its prompt is read: nothing of it is of use any more.
    pub fn forget(&mut self, request: usize) {
        if self.request == Some(request) {
            self.request = None;
            self.kept.iter_mut().for_each(|layer| layer.slots.clear());
        }
    }

    /// Expanded keys and values of `slots`, of which the first `prefix` may be kept from the chunk before.
    #[allow(clippy::too_many_arguments)]
    fn expanded(
        &mut self,
        isa: Isa,
        weights: &CpuAbsorbed,
        shape: MlaShape,
        request: usize,
        slots: &[u32],
        prefix: usize,
        cache: &CpuLatents,
        layer: usize,
    ) -> &Expanded {
        if self.request != Some(request) {
            self.kept.iter_mut().for_each(|layer| layer.slots.clear());
            self.request = Some(request);
        }
        let bytes = slots.len() * shape.heads * (shape.query_width() + shape.value) * size_of::<f32>();
        let expanded = if (layer + 1) * bytes <= self.limit {
            self.kept.resize_with(self.kept.len().max(layer + 1), Expanded::default);
            &mut self.kept[layer]
        } else {
            self.kept.truncate(layer);
            self.passing.slots.clear();
            &mut self.passing
        };
        if expanded.slots.get(..prefix) != Some(&slots[..prefix]) {
            expanded.slots.clear();
        }
        expanded.slots.truncate(prefix);
        expanded.append(isa, weights, shape, &slots[expanded.slots.len()..], cache, layer, &mut self.panels);
        expanded
    }
}

thread_local! {
    /// This thread's attention weights and outputs of a tile.
    static TILES: Cell<(Vec<f32>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
    /// The W_UK and W_UV of the head that this thread expands.
    static WEIGHTS: Cell<(Vec<f32>, Vec<f32>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// Latents of consecutive tokens from a panel's border on, as the weights of a product that gives keys.
struct Latents<'a> {
    shape: MlaShape,
    first: usize,
    rows: Vec<&'a [f32]>,
    /// `[tokens / 16][latent + rope][16]`.
    panels: &'a [f32],
}

impl Expanded {
    /// Keys `[W_UK c ; k_rope]` and values `W_UV c` of further slots.
    #[allow(clippy::too_many_arguments)]
    fn append(
        &mut self,
        isa: Isa,
        weights: &CpuAbsorbed,
        shape: MlaShape,
        slots: &[u32],
        cache: &CpuLatents,
        layer: usize,
        panels: &mut Vec<f32>,
    ) {
        // A panel begun by the chunk before is expanded again as a whole, to the same bits.
        let first = self.slots.len() / WIDTH * WIDTH;
        self.slots.extend_from_slice(slots);
        self.grow(shape);
        let tokens = self.slots.len();
        let rows: Vec<&[f32]> = self.slots[first..].iter().map(|&slot| cache.row(layer, slot)).collect();
        let latents = Latents { shape, first, panels: into_panels(isa, &rows, shape.cache_width(), panels), rows };
        let keys: Vec<SharedMut<'_, f32>> = self.keys.iter_mut().map(|keys| SharedMut::new(keys)).collect();
        let values: Vec<SharedMut<'_, f32>> = self.values.iter_mut().map(|values| SharedMut::new(values)).collect();
        let (first, blocks) = (first / BLOCK, tokens.div_ceil(BLOCK) - first / BLOCK);
        split_fine(shape.heads * blocks, 1, &|range| {
            let (mut w_uk, mut w_uv) = WEIGHTS.take();
            for item in range.clone() {
                let (head, block) = (item / blocks, first + item % blocks);
                if item == range.start || block == first {
                    widened(isa, &weights.into_keys[head], &mut w_uk);
                    widened(isa, weights.from_latent[head].raw(), &mut w_uv);
                }
                latents.keys_of_block(isa, &w_uk, block, keys[head]);
                latents.values_of_block(isa, &w_uv, block, values[head]);
            }
            WEIGHTS.set((w_uk, w_uv));
        });
    }

    /// Room for all slots. Never shrinks: what is written before it is read need not be cleared again.
    fn grow(&mut self, shape: MlaShape) {
        let tokens = self.slots.len().next_multiple_of(BLOCK);
        for (all, width) in [(&mut self.keys, shape.query_width()), (&mut self.values, shape.value)] {
            all.resize_with(shape.heads, Vec::new);
            all.iter_mut().for_each(|head| head.resize(head.len().max(tokens * width), 0.0));
        }
    }
}

/// bf16 weights in f32.
fn widened(isa: Isa, from: &[u16], to: &mut Vec<f32>) {
    to.resize(to.len().max(from.len()), 0.0);
    widen(isa, from, to);
}

/// Rows as panels of 16 of them, `[rows / 16][width][16]`. The last panel is filled up with its last row: what becomes of that row's
/// likes stands beyond the last token, where nobody looks.
fn into_panels<'a>(isa: Isa, rows: &[&[f32]], width: usize, panels: &'a mut Vec<f32>) -> &'a [f32] {
    let size = rows.len().next_multiple_of(WIDTH) * width;
    panels.resize(panels.len().max(size), 0.0);
    let shared = SharedMut::new(&mut panels[..size]);
    split(rows.len().div_ceil(WIDTH), 2, &|range| {
        for panel in range {
            let rows = std::array::from_fn(|lane| rows[rows.len().min(panel * WIDTH + lane + 1) - 1]);
            // SAFETY: panels are disjoint.
            interleave(isa, &rows, width, unsafe { shared.range(panel * width * WIDTH, width * WIDTH) });
        }
    });
    &panels[..size]
}

dispatch! {
    /// `out[i][lane] = rows[lane][i]` for `i < width`.
    fn interleave = interleave_kernel(rows: &[&[f32]; WIDTH], width: usize, out: &mut [f32])
}

#[inline(always)]
#[allow(clippy::extra_unused_type_parameters, reason = "it names the instruction set")]
unsafe fn interleave_kernel<V: Lanes>(rows: &[&[f32]; WIDTH], width: usize, out: &mut [f32]) {
    assert!(rows.iter().all(|row| row.len() >= width));
    for (i, out) in out.chunks_exact_mut(WIDTH).take(width).enumerate() {
        for (out, row) in out.iter_mut().zip(rows) {
            // SAFETY: every row holds `width` values.
            *out = unsafe { *row.get_unchecked(i) };
        }
    }
}

impl Latents<'_> {
    /// The tokens of a block that are here, counted from the first.
    fn of_block(&self, block: usize) -> Range<usize> {
        let (from, until) = (self.first.max(block * BLOCK), (self.first + self.rows.len()).min((block + 1) * BLOCK));
        from - self.first..until - self.first
    }

    /// Keys of one head: W_UK times the latents, panels of 16 tokens wide; below them the rotated part, which all heads share.
    fn keys_of_block(&self, isa: Isa, w_uk: &[f32], block: usize, keys: SharedMut<'_, f32>) {
        let MlaShape { nope, latent, .. } = self.shape;
        let (tokens, key, width) = (self.of_block(block), self.shape.query_width(), self.shape.cache_width());
        let first = tokens.start / WIDTH;
        let panels = tokens.end.div_ceil(WIDTH) - first;
        let panel = |at: usize| &self.panels[(first + at) * width * WIDTH..(first + at + 1) * width * WIDTH];
        let rows: Vec<&[f32]> = w_uk.chunks_exact(latent).take(nope).collect();
        let at = (self.first / WIDTH + first) * key * WIDTH;
        let target = Target { out: keys, at, row: WIDTH, panel: key * WIDTH, start: Start::Zero };
        scattered_product(isa, &rows, panels, &|at| Panels::F32(&panel(at)[..latent * WIDTH]), latent, target);
        for n in 0..panels {
            // SAFETY: this panel belongs to this block alone.
            let rotated = unsafe { keys.range(at + (n * key + nope) * WIDTH, (key - nope) * WIDTH) };
            rotated.copy_from_slice(&panel(n)[latent * WIDTH..]);
        }
    }

    /// Values of one head: W_UV of each latent.
    fn values_of_block(&self, isa: Isa, w_uv: &[f32], block: usize, values: SharedMut<'_, f32>) {
        let tokens = self.of_block(block);
        let rows: Vec<&[f32]> = self.rows[tokens.clone()].iter().map(|row| &row[..self.shape.latent]).collect();
        let at = block * BLOCK * self.shape.value + (self.first + tokens.start) % BLOCK * WIDTH;
        let target = Target { out: values, at, row: WIDTH, panel: BLOCK * WIDTH, start: Start::Zero };
        panel_product(isa, &rows, Panels::F32(w_uv), self.shape.latent, self.shape.value / WIDTH, target, self.shape.value);
    }
}

/// Direct attention of each group's chunk over everything up to each row: `out[row] = [head][value]`.
#[allow(clippy::too_many_arguments)]
pub fn prompt_attention(
    isa: Isa,
    weights: &CpuAbsorbed,
    shape: MlaShape,
    q: &[f32],
    rows: &CpuRows,
    cache: &CpuLatents,
    layer: usize,
    kept: &mut PromptCache,
    out: &mut [f32],
) {
    for (index, group) in rows.groups.iter().enumerate() {
        let own = &rows.slots[group.first..group.first + group.rows];
        let slots: Vec<u32> = rows.prefix(index).iter().chain(own).copied().collect();
        let expanded = kept.expanded(isa, weights, shape, group.request, &slots, group.prefix, cache, layer);
        let (q_width, out_width) = (shape.heads * shape.query_width(), shape.heads * shape.value);
        let q = &q[group.first * q_width..(group.first + group.rows) * q_width];
        let out = &mut out[group.first * out_width..(group.first + group.rows) * out_width];
        attend_chunk(isa, shape, q, group.prefix, group.rows, expanded, out);
    }
}

fn attend_chunk(isa: Isa, shape: MlaShape, q: &[f32], prefix: usize, rows: usize, expanded: &Expanded, out: &mut [f32]) {
    let tiles = rows.div_ceil(TILE);
    let shared = SharedMut::new(out);
    split_fine(tiles * shape.heads, 1, &|range| {
        let (mut weights, mut sums) = TILES.take();
        for task in range {
            // Head by head, so that its keys and values stay close to the core.
            let (head, tile) = (task / tiles, task % tiles);
            let first = tile * TILE;
            let rows = first..rows.min(first + TILE);
            attend_tile(isa, shape, q, prefix, rows, head, expanded, &mut weights, &mut sums, shared);
        }
        TILES.set((weights, sums));
    });
}

/// One head of the chunk's rows `rows`.
#[allow(clippy::too_many_arguments)]
fn attend_tile(
    isa: Isa,
    shape: MlaShape,
    q: &[f32],
    prefix: usize,
    rows: std::ops::Range<usize>,
    head: usize,
    expanded: &Expanded,
    weights: &mut Vec<f32>,
    sums: &mut Vec<f32>,
    out: SharedMut<'_, f32>,
) {
    let (key, value) = (shape.query_width(), shape.value);
    let (q_width, out_width) = (shape.heads * key, shape.heads * value);
    // The last row of the tile sees the most; earlier rows get weight 0 beyond themselves, which adds exactly nothing.
    let visible = prefix + rows.end;
    let panels = visible.div_ceil(WIDTH);
    // Not a power of two: rows of equal places would share cache sets.
    let stride = panels * WIDTH + WIDTH;
    weights.resize(weights.len().max(rows.len() * stride), 0.0);
    sums.resize(sums.len().max(rows.len() * value), 0.0);
    let queries: Vec<&[f32]> = rows.clone().map(|row| &q[row * q_width + head * key..][..key]).collect();
    let target = Target::rows(SharedMut::new(weights), stride);
    panel_product(isa, &queries, Panels::F32(&expanded.keys[head]), key, panels, target, panels * WIDTH);
    let mut factors = [0f32; TILE];
    for ((row, weights), factor) in rows.clone().zip(weights.chunks_exact_mut(stride)).zip(&mut factors) {
        let (seen, hidden) = weights.split_at_mut(prefix + row + 1);
        *factor = 1.0 / softmax(isa, seen, shape.scale).sum;
        hidden.fill(0.0);
    }
    let mut target = Target::rows(SharedMut::new(sums), value);
    for (values, from) in expanded.values[head].chunks(BLOCK * value).zip((0..visible).step_by(BLOCK)) {
        let until = visible.min(from + BLOCK);
        let weights: Vec<&[f32]> = weights.chunks_exact(stride).take(rows.len()).map(|weights| &weights[from..until]).collect();
        let panel = |at: usize| Panels::F32(&values[at * BLOCK * WIDTH..(at + 1) * BLOCK * WIDTH]);
        scattered_product(isa, &weights, value / WIDTH, &panel, until - from, target);
        target.start = Start::Standing;
    }
    for ((row, sums), factor) in rows.zip(sums.chunks_exact(value)).zip(factors) {
        // SAFETY: this task alone writes this head of these rows.
        let to = unsafe { out.range(row * out_width + head * value, value) };
        for (to, sum) in to.iter_mut().zip(sums) {
            *to = sum * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::super::testing::numbers;
    use super::*;
    use crate::model::tensor::Matrix;

    const SHAPE: MlaShape = MlaShape { heads: 2, nope: 24, rope: 8, value: 48, latent: 32, scale: 0.2 };
    const TOKENS: usize = 70;

    struct Case {
        kv_b: Vec<bf16>,
        weights: CpuAbsorbed,
        cache: CpuLatents,
        q: Vec<f32>,
    }

    impl Case {
        fn new(layers: usize) -> Self {
            let kv_b: Vec<bf16> = numbers(2 * 72 * 32, 1).into_iter().map(bf16::from_f32).collect();
            let weights = CpuAbsorbed::pack(&Matrix { rows: 2 * 72, columns: 32, data: kv_b.clone().into() }, SHAPE);
            let mut cache = CpuLatents::new(layers, 2 * TOKENS, SHAPE.cache_width());
            cache.layers.iter_mut().enumerate().for_each(|(at, layer)| *layer = numbers(layer.len(), 2 + at as u32));
            Self { kv_b, weights, cache, q: numbers(TOKENS * 2 * SHAPE.query_width(), 9) }
        }

        /// Token t lies in slot 2 t.
        fn rows(request: usize, start: usize, end: usize) -> CpuRows {
            let mut rows = CpuRows::default();
            let slots: Vec<u32> = (0..start as u32).map(|t| 2 * t).collect();
            rows.open_group(request, &slots);
            (start..end).for_each(|t| rows.push(0, t, 2 * t as u32));
            rows.close_group();
            rows
        }

        fn chunk(&self, kept: &mut PromptCache, request: usize, range: std::ops::Range<usize>, layer: usize) -> Vec<f32> {
            let q_width = SHAPE.heads * SHAPE.query_width();
            let mut out = vec![f32::NAN; range.len() * SHAPE.heads * SHAPE.value];
            let q = &self.q[range.start * q_width..range.end * q_width];
            let rows = Self::rows(request, range.start, range.end);
            prompt_attention(Isa::detect(), &self.weights, SHAPE, q, &rows, &self.cache, layer, kept, &mut out);
            out
        }

        /// Attention of one head of one row in f64.
        fn reference(&self, row: usize, head: usize) -> Vec<f64> {
            let latent = |t: usize| self.cache.row(0, 2 * t as u32);
            let w = |i: usize, c: usize| self.kv_b[(head * 72 + i) * 32 + c].to_f64();
            let expand = |t: usize, i: usize| (0..32).map(|c| w(i, c) * f64::from(latent(t)[c])).sum::<f64>();
            let q = &self.q[(row * 2 + head) * 32..][..32];
            let score = |t: usize| {
                let plain: f64 = (0..24).map(|i| f64::from(q[i]) * expand(t, i)).sum();
                let rotated: f64 = (0..8).map(|i| f64::from(q[24 + i]) * f64::from(latent(t)[32 + i])).sum();
                ((plain + rotated) * f64::from(SHAPE.scale)).exp()
            };
            let weights: Vec<f64> = (0..=row).map(score).collect();
            let total: f64 = weights.iter().sum();
            (0..48).map(|v| weights.iter().enumerate().map(|(t, weight)| weight * expand(t, 24 + v)).sum::<f64>() / total).collect()
        }
    }

    #[test]
    fn attends_like_the_definition() {
        let case = Case::new(1);
        let out = case.chunk(&mut PromptCache::default(), 0, 0..TOKENS, 0);
        for (row, head) in [(0, 0), (1, 1), (17, 0), (48, 1), (69, 0)] {
            let found = &out[(row * 2 + head) * 48..][..48];
            for (found, want) in found.iter().zip(case.reference(row, head)) {
                assert!((f64::from(*found) - want).abs() < 1e-6, "row {row} head {head}: {found}, want {want}");
            }
        }
    }

    #[test]
    fn what_was_kept_of_another_request_or_place_is_not_used() {
        let mut case = Case::new(1);
        let mut kept = PromptCache::default();
        case.chunk(&mut kept, 0, 0..40, 0);
        case.cache.layers[0] = numbers(case.cache.layers[0].len(), 77);
        let fresh = case.chunk(&mut PromptCache::default(), 1, 30..50, 0);
        assert_eq!(case.chunk(&mut kept, 1, 30..50, 0), fresh, "another request");
        case.cache.layers[0] = numbers(case.cache.layers[0].len(), 78);
        kept.forget(1);
        let fresh = case.chunk(&mut PromptCache::default(), 1, 30..50, 0);
        assert_eq!(case.chunk(&mut kept, 1, 30..50, 0), fresh, "the same index after it was forgotten");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn rows_have_the_same_bits_however_the_prompt_is_cut_and_whatever_is_kept(
            cuts in prop::collection::btree_set(1..TOKENS, 0..5),
            limit in prop::sample::select(vec![0, 40_000, 60_000, usize::MAX >> 8]),
            threads in 1usize..4,
        ) {
            let case = Case::new(2);
            let whole: Vec<Vec<f32>> = (0..2).map(|layer| case.chunk(&mut PromptCache::default(), 0, 0..TOKENS, layer)).collect();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut kept = PromptCache::with_limit(limit);
            let ends: Vec<usize> = cuts.iter().copied().chain([TOKENS]).collect();
            let mut start = 0;
            for end in ends {
                for (layer, whole) in whole.iter().enumerate() {
                    let part = pool.install(|| case.chunk(&mut kept, 0, start..end, layer));
                    let width = SHAPE.heads * SHAPE.value;
                    prop_assert_eq!(&part[..], &whole[start * width..end * width], "rows {} to {} of layer {}", start, end, layer);
                }
                start = end;
            }
        }
    }
}
