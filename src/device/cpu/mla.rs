//! Multi-head latent attention on the CPU: the latent cache, and `kv_b_proj` in the forms that attention needs.
//! The direct attention of prompt rows is in [`super::prompt`], the absorbed one of draft rows in [`super::verify`].

use half::bf16;

use super::gemm::PanelMatrix;
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
    /// Per head `[value, latent]`: takes a latent output, or a latent, to the head's value (W_UV).
    pub from_latent: Vec<PanelMatrix>,
    /// Per head `[nope, latent]`, row-major bf16: makes keys of latents (W_UK).
    pub into_keys: Vec<Vec<u16>>,
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
                .clone()
                .map(|h| PanelMatrix::pack_with(shape.value, shape.latent, |v, c| at(h * per_head + shape.nope + v, c)))
                .collect(),
            into_keys: heads
                .map(|h| kv_b.data[h * per_head * shape.latent..][..shape.nope * shape.latent].iter().map(|w| w.to_bits()).collect())
                .collect(),
        }
    }
}
