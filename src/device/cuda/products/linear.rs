//! Dense products and the SwiGLU block made of them (kernels/products/dense.cu for few rows; wide.rs for many).

use cudarc::driver::sys::CUdeviceptr;

use super::super::buffers::{CudaMatrix, View};
use super::super::device::CudaDevice;
use super::super::rows::CudaRows;
use super::super::scratch::Use;
use super::{enqueue_struct, int, tile_of, wide};
use crate::device::{DeviceError, Mlp, Result};

/// What becomes of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Store = 0,
    /// Rows of the matrix are gates above ups: `silu(gate) * up`.
    SwiGlu = 1,
    /// Activations in two bf16 terms: sums almost as good as f32 (router).
    Precise = 2,
    /// On top of the sum, in the order of a row's choices, weight times each expert's output.
    Combine = 3,
}

/// What else a launch reads or writes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct With {
    /// Where the activations go as bf16 `[rows, k]`, or 0.
    pub rounded: CUdeviceptr,
    /// `Mode::Combine`: the work list, its room, choices of a row, and the experts' outputs `[places, n]`.
    pub list: CUdeviceptr,
    pub places: usize,
    pub top_k: usize,
    pub outer: CUdeviceptr,
}

/// One matrix of a launch and where its product goes.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub weights: &'a CudaMatrix,
    pub out: View,
    pub mode: Mode,
}

/// Mirror of `struct Job` in dense.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Job {
    weights: CUdeviceptr,
    out: CUdeviceptr,
    out_stride: i64,
    n: i32,
    mode: i32,
    first_tile: i32,
    tiles: i32,
}

/// Mirror of `struct Dense` in dense.cuh.
#[repr(C)]
pub(super) struct Dense {
    x: CUdeviceptr,
    x_stride: i64,
    pub rounded: CUdeviceptr,
    rows: i32,
    pub units: i32,
    pub slice: i32,
    pub groups: i32,
    jobs: i32,
    places: i32,
    list: CUdeviceptr,
    outer: CUdeviceptr,
    top_k: i64,
    job: [Job; 2],
}

/// Slices of k that one block sums.
pub(super) const SLICES: usize = 8;
/// Blocks that keep the largest card busy.
const WANTED_BLOCKS: usize = 192;
/// Bytes of the weight rings of one block.
const RINGS: usize = SLICES * 8 * 1024;

/// How a launch over `tiles` tiles of 16 weight rows cuts `units` units of k: `(groups of eight slices, units of a slice)`. Depends
/// on the matrices alone, never on the rows: it fixes the order of every sum.
fn cut(tiles: usize, units: usize) -> (usize, usize) {
    let mut groups = [1, 2].into_iter().find(|groups| tiles * groups >= WANTED_BLOCKS).unwrap_or(4);
    while groups > 1 && units < 2 * SLICES * groups {
        groups /= 2;
    }
    (groups, units.div_ceil(SLICES * groups))
}

impl CudaDevice {
    /// `out[row] = x[row] W^T` for every row of the bound. Used by all other operations.
    pub(in crate::device::cuda) fn product(&self, x: View, weight: &CudaMatrix, rows: &CudaRows, out: View) -> Result<()> {
        self.products_of(x, &[Part { weights: weight, out, mode: Mode::Store }], rows.bound, &With::default())
    }

    /// Two products with the same activations in one launch: faster than one after the other.
    pub fn product_pair(&self, x: View, parts: [(&CudaMatrix, View); 2], rows: &CudaRows) -> Result<()> {
        self.products_of(x, &parts.map(|(weights, out)| Part { weights, out, mode: Mode::Store }), rows.bound, &With::default())
    }

    /// The products of one or two matrices with the same activations.
    pub(super) fn products_of(&self, x: View, parts: &[Part<'_>], rows: usize, with: &With) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        if !x.stride.is_multiple_of(4) || !x.at.is_multiple_of(16) {
            return Err(DeviceError(format!("activations at a stride of {}: the CUDA device wants a multiple of 4", x.stride)));
        }
        let (gpu, k) = (&self.gpu, parts[0].weights.k);
        let mut jobs = [Job::default(); 2];
        let mut tiles = 0;
        for (job, part) in jobs.iter_mut().zip(parts) {
            let matrix = part.weights;
            assert_eq!(matrix.k, k, "products of one launch share their input");
            *job = Job {
                weights: matrix.at(gpu),
                out: part.out.at,
                out_stride: part.out.stride as i64,
                n: int(matrix.n),
                mode: part.mode as i32,
                first_tile: int(tiles),
                tiles: int(matrix.n.div_ceil(16)),
            };
            tiles += matrix.n.div_ceil(16);
        }
        let units = k / 32;
        let (groups, slice) = cut(tiles, units);
        let mut dense = Dense {
            x: x.at,
            x_stride: x.stride as i64,
            rounded: with.rounded,
            rows: int(rows),
            units: int(units),
            slice: int(slice),
            groups: int(groups),
            jobs: int(parts.len()),
            places: int(with.places),
            list: with.list,
            outer: with.outer,
            top_k: with.top_k as i64,
            job: jobs,
        };
        let pairs = parts.iter().any(|part| part.mode == Mode::Precise);
        let heights = [parts[0].weights.n, parts.get(1).map_or(0, |part| part.weights.n)];
        if wide::takes(rows, heights.iter().sum::<usize>() * k, pairs) {
            return self.wide_products(x, dense, &heights[..parts.len()], rows, pairs);
        }
        let (kernel, tile) = tile_of(rows);
        let blocks = |together: usize| parts.iter().map(|part| part.weights.n.div_ceil(16 * together)).sum::<usize>();
        // Two tiles of weights a block halve the traffic of activations, where enough blocks are left.
        let together = if tile == 32 && blocks(2) * groups >= 2 * gpu.sms as usize { 2 } else { 1 };
        let function = if together == 2 { &self.products.dense_two } else { &self.products.dense[kernel] };
        let blocks = blocks(together);
        let grid = (groups as u32, rows.div_ceil(tile) as u32, blocks as u32);
        let shared = RINGS + (groups - 1) * together * (tile / 8) * 512;
        // SAFETY: `Dense` mirrors the kernels' struct; weights, activations and scratch live as long as graphs of them.
        unsafe { enqueue_struct(gpu, function, grid, 256, shared, groups as u32, &mut dense)? };
        Ok(())
    }

    /// `silu(gate) * up` of a SwiGLU block into scratch `[rows, inner]`; beside it, in the same launch, another product of the same
    /// input and the input itself as bf16.
    pub(super) fn gated(&self, x: View, gate_up: &CudaMatrix, beside: Option<(Part<'_>, CUdeviceptr)>, rows: usize) -> Result<View> {
        let inner = gate_up.n / 2;
        if !inner.is_multiple_of(8) {
            return Err(DeviceError(format!("a SwiGLU block of {inner} inner columns: the CUDA device wants a multiple of 8")));
        }
        let at = self.scratch.borrow_mut().get(&self.gpu, Use::Wide, rows * inner * size_of::<f32>())?;
        let out = View { at, stride: inner };
        let gated = Part { weights: gate_up, out, mode: Mode::SwiGlu };
        match beside {
            Some((part, rounded)) => self.products_of(x, &[part, gated], rows, &With { rounded, ..With::default() })?,
            None => self.products_of(x, &[gated], rows, &With::default())?,
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
        let shapes = [(2112, 7168), (576, 7168), (1536, 1536), (7168, 1024), (896, 7168), (7168, 256), (20480, 7168), (256, 128), (16, 32)];
        for (n, k) in shapes {
            let (tiles, units) = (usize::div_ceil(n, 16), k / 32);
            let (groups, slice) = cut(tiles, units);
            assert!(groups * SLICES * slice >= units, "{n} x {k}: {groups} groups of 8 x {slice} cover {units}");
            assert!((groups - 1) * SLICES * slice < units, "{n} x {k}: the last group is empty");
        }
        assert_eq!(cut(132, 224), (2, 14), "q_a and kv_a: two blocks a multiprocessor");
    }

    #[test]
    fn the_mirrors_have_the_size_the_kernels_assert() {
        assert_eq!((size_of::<Job>(), size_of::<Dense>()), (40, 152));
    }
}
