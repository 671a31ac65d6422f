//! Multi-head latent attention on the CPU: the latent cache, the projections in front of attention, and `kv_b_proj` in the forms that
//! attention needs.
//! The direct attention of prompt rows is in [`super::prompt`], the absorbed one of draft rows in [`super::verify`].

use half::bf16;

use super::gemm::PanelMatrix;
use super::parallel::{SharedMut, split};
use super::rows::CpuRows;
use super::{CpuAct, CpuDevice, layers, norm_rows, sized};
use crate::device::{MlaProjection, MlaShape};
use crate::model::tensor::Matrix;

/// Latents of every layer, f32 rows of `latent + rope` values, by slot.
pub struct CpuLatents {
    pub width: usize,
    pub layers: Vec<Vec<f32>>,
}

impl CpuLatents {
    /// Zeroed rows of `width` values for `slots` slots of each layer.
    pub fn new(layers: usize, slots: usize, width: usize) -> Self {
        Self { width, layers: (0..layers).map(|_| vec![0.0; slots * width]).collect() }
    }

    /// The row of a slot: latent, then rope columns.
    pub fn row(&self, layer: usize, slot: u32) -> &[f32] {
        &self.layers[layer][slot as usize * self.width..(slot as usize + 1) * self.width]
    }

    /// The same, to be written.
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
    /// Per head `[value, latent]`: takes a latent output, or a latent, to the head's value (W_UV).
    pub from_latent: Vec<PanelMatrix>,
    /// Per head `[nope, latent]`, row-major bf16: makes keys of latents (W_UK).
    pub into_keys: Vec<Vec<u16>>,
}

impl CpuAbsorbed {
    /// Takes `kv_b_proj` `[heads x (nope + value), latent]` apart into what absorbs queries and what expands outputs.
    pub fn pack(kv_b: &Matrix<'_>, shape: MlaShape) -> Self {
        let per_head = shape.nope + shape.value;
        assert!(kv_b.rows == shape.heads * per_head && kv_b.columns == shape.latent, "kv_b_proj is {} x {}", kv_b.rows, kv_b.columns);
        let at = |row: usize, column: usize| -> bf16 { kv_b.data[row * kv_b.columns + column] };
        let heads = 0..shape.heads;
        Self {
            into_latent: heads.clone().map(|h| PanelMatrix::pack_with(shape.latent, shape.nope, |c, i| at(h * per_head + i, c))).collect(),
            from_latent: heads
                .clone()
                .map(|h| PanelMatrix::pack_with(shape.value, shape.latent, |v, c| at(h * per_head + shape.nope + v, c)))
                .collect(),
            into_keys: heads
                .map(|h| kv_b.data[h * per_head * shape.latent..][..shape.nope * shape.latent].iter().map(|w| w.to_bits()).collect())
                .collect(),
        }
    }
}

impl CpuDevice {
    /// Queries of every row, rotated.
    pub(super) fn queries(&self, weights: &MlaProjection<Self>, shape: MlaShape, h: &CpuAct, rows: &CpuRows, q: &mut CpuAct) {
        let scratch = &mut *self.scratch.borrow_mut();
        let (n, rank, width) = (rows.len(), weights.q_a.n, q.width);
        let low = sized(&mut scratch.wide, n * rank);
        self.linear_rows(&h.data, h.width, n, &weights.q_a, low, rank);
        let normed = sized(&mut scratch.normed, n * rank);
        norm_rows(self.isa, low, &weights.q_a_norm, weights.eps, normed);
        self.linear_rows(normed, rank, n, &weights.q_b, &mut q.data, width);
        let (isa, rope, queries) = (self.isa, &self.rope, SharedMut::new(&mut q.data));
        split(n, 32, &|range| {
            for row in range {
                let (cos, sin) = rope.at(rows.positions[row]);
                // SAFETY: rows are disjoint.
                let q = unsafe { queries.range(row * width, width) };
                for head in q.chunks_exact_mut(shape.query_width()) {
                    layers::rope_interleaved(isa, &mut head[shape.nope..], cos, sin);
                }
            }
        });
    }

    /// The rows' latents into the cache: `[normed latent ; rotated key]`.
    pub(super) fn store_latents(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        h: &CpuAct,
        rows: &CpuRows,
        latents: &mut CpuLatents,
        layer: usize,
    ) {
        let scratch = &mut *self.scratch.borrow_mut();
        let (n, wide) = (rows.len(), shape.cache_width());
        let latent = sized(&mut scratch.latent, n * wide);
        self.linear_rows(&h.data, h.width, n, &weights.kv_a, latent, wide);
        let (isa, rope, latent, cache) = (self.isa, &self.rope, &*latent, SharedMut::new(&mut latents.layers[layer]));
        split(n, 32, &|range| {
            for row in range {
                let (cos, sin) = rope.at(rows.positions[row]);
                let latent = &latent[row * wide..(row + 1) * wide];
                // SAFETY: rows have slots of their own.
                let to = unsafe { cache.range(rows.slots[row] as usize * wide, wide) };
                layers::rms_norm(isa, &latent[..shape.latent], &weights.kv_a_norm, weights.eps, &mut to[..shape.latent]);
                to[shape.latent..].copy_from_slice(&latent[shape.latent..]);
                layers::rope_interleaved(isa, &mut to[shape.latent..], cos, sin);
            }
        });
    }
}
