//! INT4 expert weights on the CPU: panels of 16 output columns as in [`super::gemm`], unpacked panel by panel just before use.
//!
//! A weight is bf16(value * scale), rounded to bf16 as the checkpoint's own unpacker does, then widened.

use super::simd::{Isa, Lanes, WIDTH, dispatch};
use crate::model::tensor;

/// An INT4 matrix `[n, k]` in panels: 8 bytes (16 nibbles) per k, 16 scales per group.
pub struct Int4Matrix {
    pub n: usize,
    pub k: usize,
    group: usize,
    /// `[panels][k][8]`: byte j of a k holds columns j (low nibble) and j + 8 (high nibble).
    nibbles: Vec<u8>,
    /// `[panels][k / group][16]`.
    scales: Vec<f32>,
}

impl Int4Matrix {
    /// Matrices of one width, one under the other (gate above up).
    pub fn stack(parts: &[&tensor::Int4Matrix<'_>]) -> Self {
        let (k, group) = (parts[0].columns, parts[0].group);
        assert!(parts.iter().all(|part| part.columns == k && part.group == group && part.rows.is_multiple_of(WIDTH)));
        let n: usize = parts.iter().map(|part| part.rows).sum();
        let (mut nibbles, mut scales) = (vec![0u8; n / 2 * k], vec![0f32; n * (k / group)]);
        let mut block = 0;
        for part in parts {
            for first in (0..part.rows).step_by(WIDTH) {
                pack_panel(part, first, &mut nibbles[block * k * 8..][..k * 8], &mut scales[block * (k / group) * WIDTH..]);
                block += 1;
            }
        }
        Self { n, k, group, nibbles, scales }
    }

    /// Panels of `WIDTH` outputs.
    pub fn panels(&self) -> usize {
        self.n / WIDTH
    }

    /// Memory of nibbles and scales.
    pub fn bytes(&self) -> usize {
        self.nibbles.len() + self.scales.len() * 2
    }

    /// Panel `block` as f32 `[k][16]`.
    pub fn unpack(&self, isa: Isa, block: usize, panel: &mut [f32]) {
        let groups = self.k / self.group;
        let nibbles = &self.nibbles[block * self.k * 8..(block + 1) * self.k * 8];
        let scales = &self.scales[block * groups * WIDTH..(block + 1) * groups * WIDTH];
        unpack_panel(isa, nibbles, scales, self.group, panel);
    }
}

dispatch! {
    fn unpack_panel = unpack_kernel(nibbles: &[u8], scales: &[f32], group: usize, panel: &mut [f32])
}

#[inline(always)]
unsafe fn unpack_kernel<V: Lanes>(nibbles: &[u8], scales: &[f32], group: usize, panel: &mut [f32]) {
    let groups = nibbles.chunks_exact(group * 8).zip(scales.chunks_exact(WIDTH)).zip(panel.chunks_exact_mut(group * WIDTH));
    for ((bytes, scale), out) in groups {
        // SAFETY: 16 scales, 8 bytes and 16 outputs each.
        unsafe {
            let (scale, eight) = (V::load(scale.as_ptr()), V::splat(8.0));
            for (bytes, out) in bytes.chunks_exact(8).zip(out.chunks_exact_mut(WIDTH)) {
                V::from_nibbles(bytes.as_ptr()).sub(eight).mul(scale).round_bf16().store(out.as_mut_ptr());
            }
        }
    }
}

fn pack_panel(part: &tensor::Int4Matrix<'_>, first: usize, nibbles: &mut [u8], scales: &mut [f32]) {
    let (row_bytes, groups) = (part.columns / 2, part.columns / part.group);
    for lane in 0..WIDTH {
        let row = &part.packed[(first + lane) * row_bytes..(first + lane + 1) * row_bytes];
        for k in 0..part.columns {
            let nibble = (row[k / 2] >> (4 * (k % 2))) & 15;
            nibbles[k * 8 + lane % 8] |= nibble << (4 * (lane / 8));
        }
        for g in 0..groups {
            scales[g * WIDTH + lane] = part.scales[(first + lane) * groups + g].to_f32();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn a_panel_holds_what_the_checkpoint_means() {
        let (n, k, group) = (32, 64, 32);
        let packed: Vec<u8> = (0..n * k / 2).map(|i| (i * 37 % 256) as u8).collect();
        let scales: Vec<bf16> = (0..n * k / group).map(|i| bf16::from_f32(0.001 + i as f32 * 0.000_37)).collect();
        let host = tensor::Int4Matrix { packed: packed.into(), scales: scales.into(), rows: n, columns: k, group };
        let all = host.unpack();
        let matrix = Int4Matrix::stack(&[&host, &host]);
        let mut panel = vec![0f32; k * WIDTH];
        for block in 0..matrix.panels() {
            matrix.unpack(Isa::detect(), block, &mut panel);
            for (at, &value) in panel.iter().enumerate() {
                let (column, row) = (at / WIDTH, (block * WIDTH + at % WIDTH) % n);
                assert_eq!(value, all[row * k + column].to_f32(), "row {row} column {column}");
            }
        }
    }
}
