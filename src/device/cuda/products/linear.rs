//! Dense products and the SwiGLU block made of them (kernels/products/few.cu for up to four rows, dense.cu for more; wide.rs for many),
//! with the norm in front of them where there is one.

use cudarc::driver::sys::CUdeviceptr;
use half::bf16;

use super::super::buffers::{CudaAct, CudaMatrix, View};
use super::super::device::CudaDevice;
use super::super::rows::CudaRows;
use super::super::scratch::Use;
use super::norm::{Latents, Norm, Normed};
use super::{enqueue_struct, int, tile_of, wide};
use crate::device::{DeviceError, Mlp, Residual, Result};

/// What becomes of a product's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::device::cuda) enum Mode {
    Store = 0,
    /// Rows of the matrix are gates above ups: `silu(gate) * up`.
    SwiGlu = 1,
    /// Activations in two bf16 terms: sums almost as good as f32 (router).
    Precise = 2,
    /// On top of the sum, in the order of a row's choices, weight times each expert's output.
    Combine = 3,
    /// Queries whose rotary columns are rotated.
    Rotate = 4,
}

/// What a product multiplies.
#[derive(Clone, Copy)]
pub(in crate::device::cuda) enum Input<'a> {
    Rows(View),
    Normed(Normed<'a>),
}

impl Input<'_> {
    fn view(&self) -> View {
        match self {
            Self::Rows(x) => *x,
            Self::Normed(normed) => normed.x,
        }
    }
}

/// What else a launch reads or writes.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::device::cuda) struct With {
    /// Where the activations go as bf16 `[rows, k]`, or 0.
    pub rounded: CUdeviceptr,
    /// `Mode::Combine`: the work list, its room, choices of a row, and the experts' outputs `[places, n]`.
    pub list: CUdeviceptr,
    pub places: usize,
    pub top_k: usize,
    pub outer: CUdeviceptr,
    /// `Mode::Rotate`: by which angles; its latents are stored by the launch, or by the one before it.
    pub latents: Latents,
}

/// One matrix of a launch and where its product goes.
#[derive(Clone, Copy)]
pub(in crate::device::cuda) struct Part<'a> {
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
    half: CUdeviceptr,
    rest: CUdeviceptr,
    factors: CUdeviceptr,
    norm: Norm,
    latents: Latents,
    job: [Job; 2],
}

/// Slices of k that one block sums.
pub(super) const SLICES: usize = 8;
/// Blocks that keep the largest card busy.
const WANTED_BLOCKS: usize = 192;
/// Rows up to which few.cu is the faster one.
pub(super) const FEW_ROWS: usize = 4;
/// Bytes of shared memory of a block of dense.cu, beside what the others of a cluster send: rings of weights, in whose place its sums go. The
/// rings take half; with less, blocks of later launches come in sooner, and the weights they send for stand in the way (drafter 4 % slower).
const RINGS: usize = SLICES * 8 * 1024;
/// Units of k that a warp's ring holds in few.cu, and most bytes of its rows there.
const FEW_RING: usize = 4;
const FEW_BYTES: usize = 4096;

/// How a launch over `tiles` tiles of 16 weight rows cuts `units` units of k: `(groups of eight slices, units of a slice)`. Depends
/// on the matrices alone, never on the rows: it fixes the order of every sum.
pub(super) fn cut(tiles: usize, units: usize) -> (usize, usize) {
    let mut groups = [1, 2].into_iter().find(|groups| tiles * groups >= WANTED_BLOCKS).unwrap_or(4);
    while groups > 1 && units < 2 * SLICES * groups {
        groups /= 2;
    }
    (groups, units.div_ceil(SLICES * groups))
}

/// Bytes of bf16 rows, in one or two terms, that a warp of few.cu keeps.
fn few_bytes(slice: usize, terms: usize, rows: usize) -> usize {
    terms * rows * (slice | 1) * 64
}

/// Dynamic shared memory of few.cu: weights, bf16 rows in one or two terms, and what the other blocks of a cluster send.
fn few_shared(slice: usize, groups: usize, terms: usize, rows: usize) -> usize {
    SLICES * (slice.min(FEW_RING) * 1024 + few_bytes(slice, terms, rows)) + (groups - 1) * (512 + FEW_ROWS * 4)
}

impl CudaDevice {
    /// `out[row] = x[row] W^T` for every row of the bound. Used by all other operations.
    pub(in crate::device::cuda) fn product(&self, x: View, weight: &CudaMatrix, rows: &CudaRows, out: View) -> Result<()> {
        let part = Part { weights: weight, out, mode: Mode::Store };
        self.products_of(Input::Rows(x), &[part], rows.bound, &With::default()).map(drop)
    }

    /// Two products with the same activations in one launch: faster than one after the other.
    pub fn product_pair(&self, x: View, parts: [(&CudaMatrix, View); 2], rows: &CudaRows) -> Result<()> {
        let parts = parts.map(|(weights, out)| Part { weights, out, mode: Mode::Store });
        self.products_of(Input::Rows(x), &parts, rows.bound, &With::default()).map(drop)
    }

    /// The products of one or two matrices with the same activations. Returns where the factors of the rows' norm lie, which are in the
    /// products but not in `with.rounded`; 0 without a norm.
    pub(in crate::device::cuda) fn products_of(
        &self,
        input: Input<'_>,
        parts: &[Part<'_>],
        rows: usize,
        with: &With,
    ) -> Result<CUdeviceptr> {
        if rows == 0 {
            return Ok(0);
        }
        let x = input.view();
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
            half: 0,
            rest: 0,
            factors: 0,
            norm: Norm::default(),
            latents: with.latents,
            job: jobs,
        };
        let [pairs, combines] = [Mode::Precise, Mode::Combine].map(|mode| parts.iter().any(|part| part.mode == mode));
        if let Input::Normed(_) = input {
            self.reserve(rows, k, pairs)?;
        }
        let terms = if pairs { 2 } else { 1 };
        if rows <= FEW_ROWS && few_bytes(slice, terms, rows) <= FEW_BYTES {
            let shared = few_shared(slice, groups, terms, rows);
            if let Input::Normed(normed) = input {
                dense.norm = normed.on_the_way(gpu, self.factors(rows)?);
            }
            let kernels = &self.products.few[usize::from(rows > 1)];
            let (kernel, storing) = match input {
                Input::Normed(_) if with.latents.cache != 0 => (&kernels.latents, rows.div_ceil(groups)),
                Input::Normed(_) => (&kernels.norm, 0),
                Input::Rows(_) if combines => (&kernels.combine, 0),
                Input::Rows(_) => (&kernels.plain, 0),
            };
            let grid = (groups as u32, 1, (tiles + storing) as u32);
            // SAFETY: `Dense` mirrors the kernels' struct; weights, activations and scratch live as long as graphs of them.
            unsafe { enqueue_struct(gpu, kernel, grid, 256, shared, groups as u32, &mut dense)? };
            return Ok(dense.norm.factors);
        }
        let heights = [parts[0].weights.n, parts.get(1).map_or(0, |part| part.weights.n)];
        let many = wide::takes(rows, heights.iter().sum::<usize>() * k, pairs);
        if let Input::Normed(normed) = input {
            self.prepare_input(normed, &mut dense, many, pairs, with)?;
        }
        let factors = dense.factors;
        if many {
            let x = View { at: dense.x, stride: dense.x_stride as usize };
            self.wide_products(x, dense, &heights[..parts.len()], rows, pairs)?;
            return Ok(factors);
        }
        let (kernel, tile) = tile_of(rows);
        let blocks = |together: usize| parts.iter().map(|part| part.weights.n.div_ceil(16 * together)).sum::<usize>();
        // Two tiles of weights a block halve the traffic of activations, where enough blocks are left; and they make one wave of blocks
        // of what would be a whole one and a part.
        let (wave, waiting) = (2 * gpu.sms as usize, groups * rows.div_ceil(tile));
        let halves_waves = blocks(1) * waiting > wave && blocks(2) * waiting <= wave;
        let together = if !combines && (halves_waves || (tile == 32 && blocks(2) * groups >= wave)) { 2 } else { 1 };
        let kernels = &self.products.dense[usize::from(dense.half != 0) + usize::from(dense.rest != 0)];
        let function = match together {
            2 => &kernels.two[kernel],
            _ if combines => &self.products.dense_combine[kernel],
            _ => &kernels.one[kernel],
        };
        let blocks = blocks(together);
        let grid = (groups as u32, rows.div_ceil(tile) as u32, blocks as u32);
        let shared = RINGS + (groups - 1) * together * (tile / 8) * 512;
        // SAFETY: as above.
        unsafe { enqueue_struct(gpu, function, grid, 256, shared, groups as u32, &mut dense)? };
        Ok(factors)
    }

    /// Scratch for what fewer rows need and more rows do not: no round after the largest may ask for more.
    fn reserve(&self, rows: usize, k: usize, pairs: bool) -> Result<()> {
        let bytes = rows.min(wide::MOST_NARROW) * k * size_of::<bf16>();
        for what in [Use::Half, Use::Rest].into_iter().take(if pairs { 2 } else { 1 }) {
            self.scratch.borrow_mut().get(&self.gpu, what, bytes)?;
        }
        Ok(())
    }

    /// Where the factors of a norm go.
    fn factors(&self, rows: usize) -> Result<CUdeviceptr> {
        Ok(self.scratch.borrow_mut().get(&self.gpu, Use::Factors, rows * size_of::<f32>())?)
    }

    /// A launch that adds, multiplies by the norm's weight and rounds, for more rows than do so on the way; `dense` reads what it leaves.
    fn prepare_input(&self, normed: Normed<'_>, dense: &mut Dense, many: bool, pairs: bool, with: &With) -> Result<()> {
        let (rows, k) = (dense.rows as usize, dense.units as usize * 32);
        let room = |what, bytes: usize| self.scratch.borrow_mut().get(&self.gpu, what, rows * k * bytes);
        let mut rows_of_f32 = 0;
        if many {
            rows_of_f32 = room(Use::Normed, 4)?;
            (dense.x, dense.x_stride) = (rows_of_f32, k as i64);
        } else {
            dense.half = if with.rounded != 0 { with.rounded } else { room(Use::Half, 2)? };
            dense.rest = if pairs { room(Use::Rest, 2)? } else { 0 };
            dense.rounded = 0;
        }
        dense.factors = self.factors(rows)?;
        let cut = (dense.units, dense.slice, dense.groups);
        self.prepare_rows(normed, rows, cut, rows_of_f32, (dense.half, dense.rest), dense.factors, with.latents)
    }

    /// `silu(gate) * up` of a SwiGLU block into scratch `[rows, inner]`; beside it, in the same launch, another product of the same
    /// input and the input itself as bf16. Also returns what [`Self::products_of`] does.
    pub(super) fn gated(
        &self,
        input: Input<'_>,
        gate_up: &CudaMatrix,
        beside: Option<(Part<'_>, CUdeviceptr)>,
        rows: usize,
    ) -> Result<(View, CUdeviceptr)> {
        let inner = gate_up.n / 2;
        if !inner.is_multiple_of(8) {
            return Err(DeviceError(format!("a SwiGLU block of {inner} inner columns: the CUDA device wants a multiple of 8")));
        }
        let at = self.scratch.borrow_mut().get(&self.gpu, Use::Wide, rows * inner * size_of::<f32>())?;
        let out = View { at, stride: inner };
        let gated = Part { weights: gate_up, out, mode: Mode::SwiGlu };
        let factors = match beside {
            Some((part, rounded)) => self.products_of(input, &[part, gated], rows, &With { rounded, ..With::default() })?,
            None => self.products_of(input, &[gated], rows, &With::default())?,
        };
        Ok((out, factors))
    }

    /// The stream with what is to be added summed over ranks.
    pub(in crate::device::cuda) fn reduced<'a>(&self, input: Residual<'a, Self>, rows: &CudaRows) -> Result<Input<'a>> {
        let added = match input.added {
            Some(added) => {
                self.sum_over_ranks(added, rows.bound)?;
                Some(added.view(&self.gpu))
            }
            None => None,
        };
        let (x, sum) = (input.x.view(&self.gpu), Some(input.sum.view(&self.gpu)));
        Ok(Input::Normed(Normed { x, added, sum, weight: input.norm, eps: input.eps }))
    }

    pub(in crate::device::cuda) fn mlp_rows(
        &self,
        weights: &Mlp<Self>,
        input: Input<'_>,
        rows: &CudaRows,
        out: &mut CudaAct,
    ) -> Result<()> {
        let (inner, _) = self.gated(input, &weights.gate_up, None, rows.bound)?;
        self.product(inner, &weights.down, rows, out.view(&self.gpu))
    }
}

#[cfg(test)]
mod tests {
    use super::super::MAX_SHARED;
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
        assert!(few_bytes(14, 1, 4) <= FEW_BYTES && few_bytes(7, 2, 4) <= FEW_BYTES, "the layers of K2.6 take few.cu");
        assert!(SLICES * (FEW_RING * 1024 + FEW_BYTES) + 3 * (512 + FEW_ROWS * 4) <= MAX_SHARED as usize, "whatever takes it fits");
        assert_eq!(cut(132, 224), (2, 14), "q_a and kv_a: two blocks a multiprocessor");
    }

    #[test]
    fn the_mirrors_have_the_size_the_kernels_assert() {
        assert_eq!((size_of::<Job>(), size_of::<Dense>()), (40, 304));
    }
}
