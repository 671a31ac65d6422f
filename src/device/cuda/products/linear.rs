//! Dense products and the SwiGLU block made of them (kernels/products/dense.cu).

use cudarc::driver::DevicePtr;
use cudarc::driver::sys::CUdeviceptr;

use super::super::buffers::{CudaMatrix, View};
use super::super::device::CudaDevice;
use super::super::rows::CudaRows;
use super::super::scratch::Use;
use super::{ARRIVALS, EXACT_ROWS, enqueue_struct, int, tile_of};
use crate::device::{DeviceError, Mlp, Result};

/// What becomes of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Store = 0,
    /// Rows of the matrix are gates above ups: `silu(gate) * up`.
    SwiGlu = 1,
    /// Activations in two bf16 terms: sums almost as good as f32 (router).
    Precise = 2,
}

/// One matrix of a launch and where its product goes.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub weights: &'a CudaMatrix,
    pub out: View,
    pub mode: Mode,
}

/// Mirror of `struct Job` in dense.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Job {
    weights: CUdeviceptr,
    out: CUdeviceptr,
    out_stride: i64,
    n: i32,
    mode: i32,
    first_group: i32,
    tiles: i32,
}

/// Mirror of `struct Dense` in dense.cu.
#[repr(C)]
struct Dense {
    x: CUdeviceptr,
    x_stride: i64,
    partial: CUdeviceptr,
    arrived: CUdeviceptr,
    rows: i32,
    units: i32,
    slice: i32,
    piece: i32,
    terms: i32,
    jobs: i32,
    job: [Job; 2],
}

/// Tiles of 16 weight rows that a block works on.
const TILES: usize = 4;
/// Warps that share a block's stretch of k.
const HALVES: usize = 2;
/// Units in flight per warp.
const DEPTH: usize = 4;
/// Blocks that fill the largest card two to a multiprocessor.
const WANTED_BLOCKS: usize = 264;
/// Bytes of activations that a block holds.
const STAGED: usize = 64 * 1024;

/// How a launch over `groups` groups of 4 tiles cuts `units` units of k: `(stretches, units of a warp's slice)`. Depends on the
/// matrices alone, never on the rows.
fn cut(groups: usize, units: usize) -> (usize, usize) {
    let most = (units / (HALVES * DEPTH)).clamp(1, 28);
    let wanted = WANTED_BLOCKS.div_ceil(groups).min(most);
    let even = (wanted..=(wanted * 3 / 2).min(most)).find(|s| units.is_multiple_of(HALVES * s));
    let stretches = even.unwrap_or(wanted);
    let slice = units.div_ceil(HALVES * stretches);
    (units.div_ceil(HALVES * slice), slice)
}

impl CudaDevice {
    /// `out[row] = x[row] W^T` for every row of the bound. Used by all other operations.
    pub(in crate::device::cuda) fn product(&self, x: View, weight: &CudaMatrix, rows: &CudaRows, out: View) -> Result<()> {
        self.products_of(x, &[Part { weights: weight, out, mode: Mode::Store }], rows.bound)
    }

    /// Two products with the same activations in one launch: faster than one after the other.
    pub fn product_pair(&self, x: View, parts: [(&CudaMatrix, View); 2], rows: &CudaRows) -> Result<()> {
        self.products_of(x, &parts.map(|(weights, out)| Part { weights, out, mode: Mode::Store }), rows.bound)
    }

    pub(super) fn products_of(&self, x: View, parts: &[Part<'_>], rows: usize) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let (gpu, k) = (&self.gpu, parts[0].weights.k);
        let mut jobs = [Job::default(); 2];
        let mut groups = 0;
        for (job, part) in jobs.iter_mut().zip(parts) {
            let matrix = part.weights;
            assert_eq!(matrix.k, k, "products of one launch share their input");
            let tiles = matrix.n.div_ceil(16);
            *job = Job {
                weights: matrix.at(gpu),
                out: part.out.at,
                out_stride: part.out.stride as i64,
                n: int(matrix.n),
                mode: part.mode as i32,
                first_group: int(groups),
                tiles: int(tiles),
            };
            groups += tiles.div_ceil(TILES);
        }
        if !x.stride.is_multiple_of(4) || x.at % 16 != 0 {
            return Err(DeviceError(format!("activations at a stride of {}: the CUDA device wants a multiple of 4", x.stride)));
        }
        let units = k / 32;
        let (stretches, slice) = if rows > EXACT_ROWS { (1, units.div_ceil(HALVES)) } else { cut(groups, units) };
        let (kernel, tile) = tile_of(rows);
        let (chunks, activation_tiles) = (rows.div_ceil(tile), tile / 8);
        let terms = 1 + usize::from(parts.iter().any(|part| part.mode == Mode::Precise));
        let piece = (STAGED / (HALVES * activation_tiles * 512 * terms)).min(slice.next_multiple_of(DEPTH));
        let mut scratch = self.scratch.borrow_mut();
        let sums = TILES * 32 * 16 * activation_tiles;
        let partial = if stretches == 1 { 0 } else { scratch.get(gpu, Use::Partial, groups * chunks * stretches * sums)? };
        if stretches > 1 && groups * chunks > ARRIVALS {
            return Err(DeviceError(format!("a product of {groups} x {chunks} parts, at most {ARRIVALS}")));
        }
        let shared = (HALVES * piece * activation_tiles * 512 * terms).max(sums);
        let mut dense = Dense {
            x: x.at,
            x_stride: x.stride as i64,
            partial,
            arrived: self.products.arrivals.device_ptr(&gpu.stream).0,
            rows: int(rows),
            units: int(units),
            slice: int(slice),
            piece: int(piece),
            terms: int(terms),
            jobs: int(parts.len()),
            job: jobs,
        };
        let grid = (chunks as u32, groups as u32, stretches as u32);
        // SAFETY: `Dense` mirrors the kernel's struct; weights, activations and scratch stay alive as long as graphs of them.
        unsafe { enqueue_struct(gpu, &self.products.dense[kernel], grid, 256, shared, &mut dense)? };
        Ok(())
    }

    /// `silu(gate) * up` of a SwiGLU block into scratch `[rows, inner]`, with another product of the same input beside it.
    pub(super) fn gated(&self, x: View, gate_up: &CudaMatrix, beside: Option<Part<'_>>, rows: usize) -> Result<View> {
        let inner = gate_up.n / 2;
        if !inner.is_multiple_of(8) {
            return Err(DeviceError(format!("a SwiGLU block of {inner} inner columns: the CUDA device wants a multiple of 8")));
        }
        let at = self.scratch.borrow_mut().get(&self.gpu, Use::Wide, rows * inner * size_of::<f32>())?;
        let out = View { at, stride: inner };
        let gated = Part { weights: gate_up, out, mode: Mode::SwiGlu };
        match beside {
            Some(part) => self.products_of(x, &[part, gated], rows)?,
            None => self.products_of(x, &[gated], rows)?,
        }
        Ok(out)
    }

    pub(in crate::device::cuda) fn mlp_rows(
        &self,
        weights: &Mlp<Self>,
        h: &super::super::buffers::CudaAct,
        rows: &CudaRows,
        out: &mut super::super::buffers::CudaAct,
    ) -> Result<()> {
        let inner = self.gated(h.view(&self.gpu), &weights.gate_up, None, rows.bound)?;
        self.product(inner, &weights.down, rows, out.view(&self.gpu))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_of_k_belongs_to_one_slice() {
        for (n, k) in [
            (2112, 7168),
            (1536, 7168),
            (576, 7168),
            (1536, 1536),
            (7168, 1024),
            (896, 7168),
            (7168, 256),
            (20480, 7168),
            (256, 128),
            (16, 32),
        ] {
            let (groups, units) = (usize::div_ceil(n, 64), k / 32);
            let (stretches, slice) = cut(groups, units);
            assert!(stretches * HALVES * slice >= units, "{n} x {k}: {stretches} stretches of 2 x {slice} cover {units}");
            assert!((stretches - 1) * HALVES * slice < units, "{n} x {k}: the last stretch is empty");
        }
        assert_eq!(cut(33, 224), (8, 14), "q_a and kv_a fill 132 multiprocessors twice");
    }

    #[test]
    fn the_mirrors_have_the_size_the_kernels_assert() {
        assert_eq!((size_of::<Job>(), size_of::<Dense>()), (40, 136));
    }
}
