//! Multi-head latent attention on the CPU: the latent cache, `kv_b_proj` in the forms that absorbed and direct attention need, and
//! the direct attention of prompt rows. The absorbed attention of draft rows is in [`super::verify`].

use half::bf16;

use super::attend::{scores, softmax, weighted_sum};
use super::gemm::{Into, PanelMatrix, linear};
use super::parallel::{SharedMut, split, split_fine};
use super::rows::CpuRows;
use super::simd::Isa;
use crate::device::MlaShape;
use crate::model::tensor::Matrix;

/// Latents of every layer, f32 rows of `latent + rope` values, by slot.
pub struct CpuLatents {
    pub width: usize,
    pub layers: Vec<Vec<f32>>,
}

impl CpuLatents {
    pub fn new(layers: usize, slots: usize, width: usize) -> Self {
        Self { width, layers: (0..layers).map(|_| vec![0.0; slots * width]).collect() }
    }

    pub fn row(&self, layer: usize, slot: u32) -> &[f32] {
        &self.layers[layer][slot as usize * self.width..(slot as usize + 1) * self.width]
    }

    pub fn row_mut(&mut self, layer: usize, slot: u32) -> &mut [f32] {
        &mut self.layers[layer][slot as usize * self.width..(slot as usize + 1) * self.width]
    }

    /// Copies a row of every layer from one slot to another.
    pub fn move_row(&mut self, from: u32, to: u32) {
        if from == to {
            return;
        }
        let width = self.width;
        for layer in &mut self.layers {
            layer.copy_within(from as usize * width..(from as usize + 1) * width, to as usize * width);
        }
    }
}

/// `kv_b_proj` of this rank's heads.
pub struct CpuAbsorbed {
    /// Per head `[latent, nope]`: takes a query's plain part into the latent space (W_UK transposed).
    pub into_latent: Vec<PanelMatrix>,
    /// Per head `[value, latent]`: takes a latent output to the head's value (W_UV).
    pub from_latent: Vec<PanelMatrix>,
    /// All heads `[heads * (nope + value), latent]`: expands latents into keys and values.
    pub expand: PanelMatrix,
}

impl CpuAbsorbed {
    pub fn pack(kv_b: &Matrix<'_>, shape: MlaShape) -> Self {
        let per_head = shape.nope + shape.value;
        assert!(kv_b.rows == shape.heads * per_head && kv_b.columns == shape.latent, "kv_b_proj is {} x {}", kv_b.rows, kv_b.columns);
        let at = |row: usize, column: usize| -> bf16 { kv_b.data[row * kv_b.columns + column] };
        let heads = 0..shape.heads;
        Self {
            into_latent: heads.clone().map(|h| PanelMatrix::pack_with(shape.latent, shape.nope, |c, i| at(h * per_head + i, c))).collect(),
            from_latent: heads
                .map(|h| PanelMatrix::pack_with(shape.value, shape.latent, |v, c| at(h * per_head + shape.nope + v, c)))
                .collect(),
            expand: PanelMatrix::pack(&kv_b.data, kv_b.rows, kv_b.columns),
        }
    }
}

/// Buffers of the direct attention, grown to the longest prompt seen.
#[derive(Default)]
pub struct PromptScratch {
    latents: Vec<f32>,
    expanded: Vec<f32>,
    /// `[heads][tokens][nope + rope]`.
    keys: Vec<f32>,
    weights: Vec<Vec<f32>>,
}

/// Query rows that one task of the direct attention carries.
const PROMPT_TILE: usize = 12;

/// Direct attention of one request's chunk over everything up to each row: `out[row] = [head][value]`.
#[allow(clippy::too_many_arguments)]
pub fn prompt_attention(
    isa: Isa,
    weights: &CpuAbsorbed,
    shape: MlaShape,
    q: &[f32],
    rows: &CpuRows,
    cache: &CpuLatents,
    layer: usize,
    scratch: &mut PromptScratch,
    out: &mut [f32],
) {
    for (index, group) in rows.groups.iter().enumerate() {
        let own = &rows.slots[group.first..group.first + group.rows];
        let slots: Vec<u32> = rows.prefix(index).iter().chain(own).copied().collect();
        expand(isa, weights, shape, &slots, cache, layer, scratch);
        let (q_width, out_width) = (shape.heads * shape.query_width(), shape.heads * shape.value);
        let q = &q[group.first * q_width..(group.first + group.rows) * q_width];
        let out = &mut out[group.first * out_width..(group.first + group.rows) * out_width];
        attend_chunk(isa, shape, q, group.prefix, group.rows, slots.len(), scratch, out);
    }
}

/// Keys `[W_UK c ; k_rope]` and values `W_UV c` of every slot.
fn expand(isa: Isa, weights: &CpuAbsorbed, shape: MlaShape, slots: &[u32], cache: &CpuLatents, layer: usize, scratch: &mut PromptScratch) {
    let (tokens, width, key, wide) = (slots.len(), shape.cache_width(), shape.query_width(), weights.expand.n);
    scratch.latents.resize(scratch.latents.len().max(tokens * width), 0.0);
    scratch.expanded.resize(scratch.expanded.len().max(tokens * wide), 0.0);
    scratch.keys.resize(scratch.keys.len().max(shape.heads * tokens * key), 0.0);
    for (to, &slot) in scratch.latents.chunks_exact_mut(width).zip(slots) {
        to.copy_from_slice(cache.row(layer, slot));
    }
    linear(isa, &scratch.latents, width, tokens, &weights.expand, &mut scratch.expanded, wide, Into::Overwrite);
    let keys = SharedMut::new(&mut scratch.keys);
    let (expanded, latents) = (&scratch.expanded, &scratch.latents);
    split(tokens, 64, &|range| {
        for t in range {
            for head in 0..shape.heads {
                // SAFETY: this token's key of this head.
                let to = unsafe { keys.range((head * tokens + t) * key, key) };
                let from = t * wide + head * (shape.nope + shape.value);
                to[..shape.nope].copy_from_slice(&expanded[from..from + shape.nope]);
                to[shape.nope..].copy_from_slice(&latents[t * width + shape.latent..(t + 1) * width]);
            }
        }
    });
}

#[allow(clippy::too_many_arguments)]
fn attend_chunk(
    isa: Isa,
    shape: MlaShape,
    q: &[f32],
    prefix: usize,
    rows: usize,
    tokens: usize,
    scratch: &mut PromptScratch,
    out: &mut [f32],
) {
    let (key, wide) = (shape.query_width(), shape.heads * (shape.nope + shape.value));
    let (q_width, out_width) = (shape.heads * key, shape.heads * shape.value);
    let (keys, expanded) = (&scratch.keys, &scratch.expanded);
    let tiles = rows.div_ceil(PROMPT_TILE);
    let out = SharedMut::new(out);
    scratch.weights.resize_with(rayon::current_num_threads().max(1), Vec::new);
    split_fine(tiles * shape.heads, 1, &|range| {
        let mut weights = vec![0f32; PROMPT_TILE * tokens];
        let mut sums = vec![0f32; PROMPT_TILE * shape.value];
        for task in range {
            let (tile, head) = (task / shape.heads, task % shape.heads);
            let first = tile * PROMPT_TILE;
            let count = PROMPT_TILE.min(rows - first);
            // The last row of the tile sees the most; earlier rows get weight 0 beyond themselves, which adds exactly nothing.
            let visible = prefix + first + count;
            let key_rows: Vec<&[f32]> = (0..visible).map(|t| &keys[(head * tokens + t) * key..][..key]).collect();
            let value_rows: Vec<&[f32]> =
                (0..visible).map(|t| &expanded[t * wide + head * (shape.nope + shape.value) + shape.nope..][..shape.value]).collect();
            let queries: Vec<&[f32]> = (first..first + count).map(|row| &q[row * q_width + head * key..][..key]).collect();
            scores(isa, &queries, &key_rows, key, &mut weights, visible);
            let mut totals = [0f32; PROMPT_TILE];
            for (i, row) in weights.chunks_exact_mut(visible).take(count).enumerate() {
                let (seen, hidden) = row.split_at_mut(prefix + first + i + 1);
                totals[i] = softmax(isa, seen, shape.scale).sum;
                hidden.fill(0.0);
            }
            sums[..count * shape.value].fill(0.0);
            weighted_sum(isa, &weights, visible, count, &value_rows, shape.value, &mut sums);
            for i in 0..count {
                // SAFETY: this task alone writes this head of these rows.
                let to = unsafe { out.range((first + i) * out_width + head * shape.value, shape.value) };
                for (to, sum) in to.iter_mut().zip(&sums[i * shape.value..(i + 1) * shape.value]) {
                    *to = sum / totals[i];
                }
            }
        }
    });
}
