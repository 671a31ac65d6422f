//! The drafter's attention: context rows into its cache, and attention of block rows over the context (all of it or a window) and
//! their own block.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;

use super::kernels::DraftKernels;
use super::{rope, scratch};
use crate::device::cuda::buffers::{Argument, CudaAct, View};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::error::During;
use crate::device::cuda::rows::CudaRows;
use crate::device::cuda::scratch::Use;
use crate::device::cuda::verify::Numerics;
use crate::device::{DeviceError, DraftAttention, DraftMask, GqaShape, Result};

/// Shared memory of attend_block for heads of 64 and of 128; drafter.cu asserts the same.
pub const SHARED: [u32; 2] = [37_888, 70_656];
const THREADS: u32 = 128;
/// Query rows of a block of attend_block.
const QUERY_TILE: usize = 64;
/// Pieces that a request's context is cut into at most: by the card in `fast`, fixed in `exact`.
const MOST_PIECES: usize = 128;
const FEWEST_PIECES: usize = 4;
const EXACT_PIECES: usize = 32;

/// Drafter context of every drafter layer, `[layers][slots][keys | values]` bf16.
pub struct CudaContexts {
    pub data: CudaSlice<bf16>,
    pub layers: usize,
    pub slots: usize,
    /// Values of a row: keys and values of all key heads.
    pub width: usize,
}

/// Mirror of `Shape` in kernels/attention/drafter.cu, which says what each field is.
#[repr(C)]
struct Shape {
    block: CUdeviceptr,
    cache: CUdeviceptr,
    counts: CUdeviceptr,
    groups: CUdeviceptr,
    firsts: CUdeviceptr,
    begins: CUdeviceptr,
    prefixes: CUdeviceptr,
    tables: CUdeviceptr,
    outputs: CUdeviceptr,
    sums: CUdeviceptr,
    heads: i32,
    kv_heads: i32,
    window: i32,
    causal: i32,
    most_pieces: i32,
    query_rows: i32,
}
const _: () = assert!(size_of::<Shape>() == 104);

impl CudaDevice {
    pub(in crate::device::cuda) fn new_contexts(&self, layers: usize, slots: usize, shape: GqaShape) -> Result<CudaContexts> {
        check(shape)?;
        let width = 2 * shape.kv_heads * shape.head;
        let data = self.gpu.stream.alloc_zeros(layers * slots * width).during("allocating the drafter's context")?;
        Ok(CudaContexts { data, layers, slots, width })
    }

    pub(in crate::device::cuda) fn store_context(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        c: &CudaAct,
        rows: &CudaRows,
        contexts: &mut CudaContexts,
        layer: usize,
    ) -> Result<()> {
        check(shape)?;
        if rows.bound == 0 {
            return Ok(());
        }
        let kv = View { at: scratch(self, Use::Wide, rows.bound * contexts.width * 4)?, stride: contexts.width };
        self.product(c.view(&self.gpu), &weights.kv, rows, kv)?;
        self.prepare(weights, shape, 0, kv, rows, rows.slots.device_ptr(&self.gpu.stream).0, contexts.layer(self, layer))
    }

    #[allow(clippy::too_many_arguments)]
    pub(in crate::device::cuda) fn attend_block(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        mask: DraftMask,
        h: &CudaAct,
        rows: &CudaRows,
        contexts: &CudaContexts,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        let kernels = &self.attention.kernels.draft[check(shape)?];
        if rows.bound == 0 || rows.group_bound == 0 {
            return Ok(());
        }
        let width = (shape.heads + 2 * shape.kv_heads) * shape.head;
        let qkv = View { at: scratch(self, Use::Wide, rows.bound * width * 4)?, stride: width };
        let block = scratch(self, Use::Queries, rows.bound * width * 2)?;
        self.product(h.view(&self.gpu), &weights.qkv, rows, qkv)?;
        self.prepare(weights, shape, shape.heads, qkv, rows, 0, block)?;
        self.attend(kernels, shape, mask, rows, block, contexts.layer(self, layer), out)
    }

    /// Norms, rotates and rounds head vectors of `x` (`queries` of them, then keys, then values): to the rows' slots, or, where there
    /// are none, to their own places.
    #[allow(clippy::too_many_arguments)]
    fn prepare(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        queries: usize,
        x: View,
        rows: &CudaRows,
        slots: CUdeviceptr,
        to: CUdeviceptr,
    ) -> Result<()> {
        let gpu = &self.gpu;
        let (cos, sin) = rope(&self.attention.draft_rope, "drafter", shape.head / 2)?.at(gpu);
        let arguments = &mut [
            x.at,
            (queries as i32).bits(),
            (shape.kv_heads as i32).bits(),
            weights.q_norm.at(gpu),
            weights.k_norm.at(gpu),
            shape.eps.bits(),
            cos,
            sin,
            rows.counts.device_ptr(&gpu.stream).0,
            rows.positions.device_ptr(&gpu.stream).0,
            slots,
            to,
        ];
        let vectors = queries + 2 * shape.kv_heads;
        let grid = (rows.bound as u32, (vectors as u32).div_ceil(THREADS / 32), 1);
        // SAFETY: argument types as in drafter.cu; `x` holds `bound` rows, live rows have slots within the cache.
        unsafe { gpu.enqueue_dependent(&self.attention.kernels.draft[check(shape)?].prepare, grid, THREADS, 0, arguments)? };
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn attend(
        &self,
        kernels: &DraftKernels,
        shape: GqaShape,
        mask: DraftMask,
        rows: &CudaRows,
        block: CUdeviceptr,
        cache: CUdeviceptr,
        out: &CudaAct,
    ) -> Result<()> {
        let (gpu, index) = (&self.gpu, check(shape)?);
        let tiles = (self.limits.block * shape.heads / shape.kv_heads).div_ceil(QUERY_TILE);
        let fill = 2 * gpu.sms as usize / (shape.kv_heads * tiles);
        let (most_pieces, pieces) = match self.numerics {
            Numerics::Exact => (EXACT_PIECES, EXACT_PIECES * self.limits.requests),
            Numerics::Fast => {
                let most = (fill / rows.group_bound).clamp(FEWEST_PIECES, MOST_PIECES);
                (most, fill.max(FEWEST_PIECES * self.limits.requests).max(MOST_PIECES))
            }
        };
        let states = pieces * shape.kv_heads * tiles * QUERY_TILE;
        let sums = scratch(self, Use::Partial, states * (shape.head + 2) * 4)?;
        let pointers = rows.pointers(gpu);
        let mut shape_argument = Shape {
            block,
            cache,
            counts: pointers.counts,
            groups: pointers.groups,
            firsts: pointers.firsts,
            begins: pointers.table_begins,
            prefixes: pointers.prefixes,
            tables: pointers.tables,
            outputs: sums + (states * 8) as u64,
            sums,
            heads: shape.heads as i32,
            kv_heads: shape.kv_heads as i32,
            window: mask.window.map_or(0, |window| window.min(i32::MAX as u32) as i32),
            causal: mask.causal.into(),
            most_pieces: most_pieces as i32,
            query_rows: (tiles * QUERY_TILE) as i32,
        };
        let shape_at = (&raw mut shape_argument).cast();
        let grid = (tiles as u32, (rows.group_bound * shape.kv_heads) as u32, most_pieces as u32);
        // SAFETY: the kernel takes one `Shape`; blocks have at most `limits.block` rows, so the partials have room.
        unsafe { gpu.launch_dependent(&kernels.attend, grid, THREADS, SHARED[index], &mut [shape_at])? };
        let mut to = out.view(gpu).at;
        let arguments = &mut [shape_at, (&raw mut to).cast()];
        // SAFETY: the kernel takes one `Shape` and the address of `bound` rows.
        unsafe { gpu.launch_dependent(&kernels.merge, (rows.bound as u32, shape.heads as u32, 1), shape.head as u32, 0, arguments)? };
        Ok(())
    }
}

impl CudaContexts {
    fn layer(&self, device: &CudaDevice, layer: usize) -> CUdeviceptr {
        self.data.device_ptr(&device.gpu.stream).0 + (layer * self.slots * self.width * 2) as u64
    }
}

/// Index of the kernels for this shape.
fn check(shape: GqaShape) -> Result<usize> {
    let index = [64, 128].iter().position(|&head| head == shape.head);
    match index {
        Some(index) if shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads) => Ok(index),
        _ => Err(DeviceError(format!(
            "drafter heads of {} ({} query, {} key heads): the CUDA kernels are for heads of 64 or 128 and query heads that are a \
             multiple of the key heads; use the CPU device",
            shape.head, shape.heads, shape.kv_heads
        ))),
    }
}
