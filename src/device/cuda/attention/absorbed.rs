//! Absorbed attention of draft rows: queries into the latent space, a verify kernel over the latent cache, latent outputs to values.
//! The verify mode chooses the kernel; `validate` runs both and sums their differences on the card.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;

use super::{CudaLatents, LATENT, NOPE, QUERY, VALUE, check_shape, scratch};
use crate::device::cuda::buffers::{Argument, CudaAct};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::error::{CudaError, During};
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::kv::ROW;
use crate::device::cuda::params::MAX_ROWS;
use crate::device::cuda::rows::CudaRows;
use crate::device::cuda::scratch::Use;
use crate::device::cuda::verify::{self, Call, Kernel, Numerics, TREE_SHARED, Tuning};
use crate::device::{DeviceError, KernelFault, MlaShape, Result, Verify};
use crate::model::tensor::Matrix;

/// Rows beyond which a block absorbs or expands 64 rows at once instead of 16: faster from there on, with the same bits.
const MANY_ROWS: usize = 128;
/// Shared memory of expand_outputs_many; absorbed.cu asserts the same.
pub const EXPAND_MANY_SHARED: u32 = 69_632;

/// `kv_b_proj` of this rank's heads as it is stored: `[heads][128 W_UK | 128 W_UV][512]`. Every form of attention reads it so.
pub struct CudaAbsorbed {
    pub kv_b: CudaSlice<bf16>,
    pub heads: usize,
}

/// The verify kernels with their scratch, one for each size of row tile, and room for the inputs of a planted fault.
pub struct Launchers {
    heads: usize,
    /// Tiles of 16, 32 and 64 query rows, as far as a head count allows; `exact` has one, so that bits depend on no batch.
    by_tile: Vec<verify::Verify>,
    planted: Planted,
}

impl Launchers {
    fn new(device: &CudaDevice, heads: usize) -> Result<Self> {
        let (gpu, limits, exact) = (&device.gpu, &device.limits, device.numerics == Numerics::Exact);
        let largest = MAX_ROWS.min(limits.verify_rows);
        let of_tile = |tile: usize| -> Result<verify::Verify> {
            let rows_per_request = (tile / heads).clamp(1, largest);
            // A draft may reach beyond the longest context by its own rows.
            let prefix = limits.context + MAX_ROWS;
            let limits = verify::Limits { batch: limits.requests, rows: limits.verify_rows, rows_per_request, heads, prefix, exact };
            Ok(verify::Verify::with_blocks(gpu, limits, Tuning::default(), tile)?)
        };
        // Tiles that hold a draft row's heads, up to the first that holds a whole request.
        let holding: Vec<usize> = TREE_SHARED.iter().map(|&(tile, _)| tile).filter(|&tile| tile >= heads).collect();
        let count = holding.iter().position(|&tile| tile >= largest * heads).map_or(holding.len(), |at| at + 1);
        let tiles = if exact { &holding[count - 1..count] } else { &holding[..count] };
        let by_tile = tiles.iter().map(|&tile| of_tile(tile)).collect::<Result<_>>()?;
        Ok(Self { heads, by_tile, planted: Planted::new(gpu, limits.requests, limits.verify_rows)? })
    }

    /// The launcher whose tile holds an average request of the bucket, or less where its requests are few and short.
    fn of(&self, rows: &CudaRows) -> &verify::Verify {
        let average = (rows.bound * self.heads).div_ceil(rows.group_bound.max(1));
        let wanted = verify::block_rows(rows.group_bound, average, rows.long);
        let fitting = self.by_tile.iter().find(|launcher| launcher.tile_rows() >= wanted);
        fitting.unwrap_or(&self.by_tile[self.by_tile.len() - 1])
    }
}

/// Inputs of the custom kernel with a fault in them.
struct Planted {
    masks: CudaSlice<u64>,
    begins: CudaSlice<i32>,
    prefixes: CudaSlice<i32>,
}

impl Planted {
    fn new(gpu: &Gpu, requests: usize, rows: usize) -> std::result::Result<Self, CudaError> {
        let what = "allocating the inputs of planted faults";
        Ok(Self {
            masks: gpu.stream.alloc_zeros(rows).during(what)?,
            begins: gpu.stream.alloc_zeros(requests).during(what)?,
            prefixes: gpu.stream.alloc_zeros(requests).during(what)?,
        })
    }
}

impl CudaDevice {
    pub(in crate::device::cuda) fn upload_absorbed(&self, kv_b: &Matrix<'_>, shape: MlaShape) -> Result<CudaAbsorbed> {
        check_shape(shape)?;
        let wanted = (shape.heads * (NOPE + VALUE), LATENT);
        if (kv_b.rows, kv_b.columns) != wanted {
            let (rows, columns) = (kv_b.rows, kv_b.columns);
            return Err(DeviceError(format!("kv_b_proj is {rows} x {columns}, {} heads want {} x {}", shape.heads, wanted.0, wanted.1)));
        }
        Ok(CudaAbsorbed { kv_b: self.upload(&kv_b.data)?, heads: shape.heads })
    }

    #[allow(clippy::too_many_arguments)]
    pub(in crate::device::cuda) fn attend_absorbed(
        &self,
        weights: &CudaAbsorbed,
        shape: MlaShape,
        q: &CudaAct,
        rows: &CudaRows,
        latents: &CudaLatents,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        check_shape(shape)?;
        check_widths(weights.heads, shape, q, out)?;
        let launchers = self.launchers(shape.heads)?;
        self.attention.validation.prepare(&self.gpu, latents.layers)?;
        if rows.bound == 0 || rows.group_bound == 0 {
            return Ok(());
        }
        let items = rows.bound * shape.heads;
        let queries = scratch(self, Use::Queries, items * ROW * 2)?;
        let outputs = scratch(self, Use::Outputs, items * LATENT * 2)?;
        // Reserved in every mode, because the mode may change once scratch is frozen.
        let second = scratch(self, Use::Second, items * LATENT * 2)?;
        let lse = scratch(self, Use::Lse, items * 4)?;
        self.absorb(weights, q, rows, queries)?;
        let pointers = rows.pointers(&self.gpu);
        let call = Call {
            q: queries,
            kv: &latents.kv[layer],
            out: outputs,
            lse,
            qo_indptr: pointers.firsts,
            kv_begin: pointers.table_begins,
            kv_len: pointers.prefixes,
            kv_indices: pointers.tables,
            draft_slots: pointers.slots,
            mask: pointers.ancestors,
            batch: rows.group_bound,
            rows: rows.bound,
            scale: shape.scale,
        };
        let launcher = launchers.of(rows);
        let launch = |kernel, call: &Call<'_>| {
            // SAFETY: queries and outputs hold `bound` rows; the lists are those of live rows, whose slots lie in the cache.
            unsafe { launcher.launch(&self.gpu, kernel, self.numerics, call) }
        };
        match self.verify {
            Verify::Off => launch(Kernel::Baseline, &call)?,
            Verify::On => launch(Kernel::Tree, &self.with_fault(launchers, rows, call)?)?,
            Verify::Validate => {
                launch(Kernel::Tree, &Call { out: second, ..self.with_fault(launchers, rows, call)? })?;
                launch(Kernel::Baseline, &call)?;
                self.compare(shape, rows, outputs, second, layer)?;
            }
        }
        self.expand(weights, outputs, rows, out)
    }

    fn launchers(&self, heads: usize) -> Result<&Launchers> {
        let cell = &self.attention.launchers;
        if cell.get().is_none() {
            let made = Launchers::new(self, heads)?;
            cell.get_or_init(|| made);
        }
        match cell.get() {
            Some(launchers) if launchers.heads == heads => Ok(launchers),
            _ => Err(DeviceError(format!("the verify kernels were set up for another number of heads than {heads}"))),
        }
    }

    /// `[W_UK^T q_nope ; q_rope]` of every row and head, rounded to bf16.
    fn absorb(&self, weights: &CudaAbsorbed, q: &CudaAct, rows: &CudaRows, queries: CUdeviceptr) -> Result<()> {
        let (gpu, kernels) = (&self.gpu, &self.attention.kernels);
        let (kernel, tile) = if rows.bound > MANY_ROWS { (&kernels.absorb_many, 64) } else { (&kernels.absorb_few, 16) };
        let arguments = &mut [
            q.view(gpu).at,
            weights.kv_b.device_ptr(&gpu.stream).0,
            rows.counts.device_ptr(&gpu.stream).0,
            (rows.bound as i32).bits(),
            (weights.heads as i32).bits(),
            queries,
        ];
        let grid = (8, weights.heads as u32, rows.bound.div_ceil(tile) as u32);
        // SAFETY: argument types as in absorbed.cu; every buffer holds `bound` rows.
        unsafe { gpu.enqueue_dependent(kernel, grid, 128, 0, arguments)? };
        Ok(())
    }

    /// `W_UV` times the latent outputs.
    fn expand(&self, weights: &CudaAbsorbed, outputs: CUdeviceptr, rows: &CudaRows, out: &CudaAct) -> Result<()> {
        let (gpu, kernels) = (&self.gpu, &self.attention.kernels);
        let (kernel, columns, tile, shared) = match rows.bound > MANY_ROWS {
            true => (&kernels.expand_outputs_many, 2, 64, EXPAND_MANY_SHARED),
            false => (&kernels.expand_outputs, 8, 16, 0),
        };
        let arguments = &mut [
            outputs,
            weights.kv_b.device_ptr(&gpu.stream).0,
            rows.counts.device_ptr(&gpu.stream).0,
            (rows.bound as i32).bits(),
            (weights.heads as i32).bits(),
            out.view(gpu).at,
        ];
        let grid = (columns, weights.heads as u32, rows.bound.div_ceil(tile) as u32);
        // SAFETY: as above.
        unsafe { gpu.enqueue_dependent(kernel, grid, 128, shared, arguments)? };
        Ok(())
    }

    fn compare(&self, shape: MlaShape, rows: &CudaRows, baseline: CUdeviceptr, custom: CUdeviceptr, layer: usize) -> Result<()> {
        let gpu = &self.gpu;
        let arguments = &mut [
            baseline,
            custom,
            rows.counts.device_ptr(&gpu.stream).0,
            (rows.bound as i32).bits(),
            (shape.heads as i32).bits(),
            self.attention.validation.layer(gpu, layer),
        ];
        let grid = ((rows.bound * shape.heads).div_ceil(8) as u32, 1, 1);
        // SAFETY: argument types as in validate.cu; `prepare` made room for this layer.
        unsafe { gpu.enqueue(&self.attention.kernels.compare_outputs, grid, 256, 0, arguments)? };
        Ok(())
    }

    /// The custom kernel's call, with the planted fault if there is one.
    fn with_fault<'a>(&self, launchers: &Launchers, rows: &CudaRows, call: Call<'a>) -> Result<Call<'a>> {
        let Some(fault) = self.fault else { return Ok(call) };
        let kind: i32 = match fault {
            KernelFault::MaskStride => 0,
            KernelFault::MissingDraftKeys => 1,
            KernelFault::DroppedSplit => 2,
        };
        let (gpu, planted) = (&self.gpu, &launchers.planted);
        let at = |slice: &CudaSlice<i32>| slice.device_ptr(&gpu.stream).0;
        let (masks, begins, prefixes) = (planted.masks.device_ptr(&gpu.stream).0, at(&planted.begins), at(&planted.prefixes));
        let arguments = &mut [kind.bits(), call.qo_indptr, call.mask, call.kv_begin, call.kv_len, masks, begins, prefixes];
        // SAFETY: argument types as in validate.cu; there is room for every request and row of the limits.
        unsafe { gpu.enqueue(&self.attention.kernels.plant_fault, (rows.group_bound as u32, 1, 1), MAX_ROWS as u32, 0, arguments)? };
        Ok(Call { mask: masks, kv_begin: begins, kv_len: prefixes, ..call })
    }
}

/// Activations that a pass of attention reads and writes must be as wide as its heads.
pub(super) fn check_widths(heads: usize, shape: MlaShape, q: &CudaAct, out: &CudaAct) -> Result<()> {
    if heads == shape.heads && q.width == heads * QUERY && out.width == heads * VALUE {
        return Ok(());
    }
    Err(DeviceError(format!(
        "attention with {} heads: weights of {heads} heads, queries of {} and outputs of {} columns",
        shape.heads, q.width, out.width
    )))
}
