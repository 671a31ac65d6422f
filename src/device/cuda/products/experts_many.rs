//! The grouped products where experts have many rows each (kernels/products/experts_many.cu). Same bits as those of experts.rs.

use cudarc::driver::CudaFunction;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr};

use super::super::device::CudaDevice;
use super::super::error::{CudaError, During};
use super::super::gpu::Gpu;
use super::enqueue_struct;
use super::experts::{CudaExperts, STEP, STEP_BYTES, WARPS};
use super::routing::WorkList;
use crate::device::Result;

/// Rows of an entry of the list that these kernels read.
pub(super) const ROWS: usize = 64;
/// Tiles of 16 weight rows that a warp works on together.
const TILES: usize = 2;
/// Bytes of a unit of 32 columns of an entry's rows.
const UNIT_BYTES: usize = ROWS * 64;
/// Bytes of a step of a block's tiles and of its rows.
const STAGE_BYTES: usize = WARPS * TILES * STEP_BYTES + STEP / 32 * UNIT_BYTES;
/// Stages of the first product: where shared memory is plenty, and elsewhere.
const STAGES: [usize; 2] = [5, 2];
/// Bytes of the weight rings of the second product.
const DOWN_RINGS: usize = WARPS * 3 * TILES * STEP_BYTES;
/// Blocks that share an entry in the second product.
const DOWN_PARTS: u32 = 2;

/// The kernels of this file.
pub(super) struct ManyKernels {
    up: CudaFunction,
    down: CudaFunction,
    stages: usize,
    /// Most dynamic shared memory of a block.
    room: usize,
}

fn down_bytes(steps: usize) -> usize {
    DOWN_RINGS + steps * (STEP / 32) * UNIT_BYTES
}

impl ManyKernels {
    pub fn load(gpu: &Gpu) -> std::result::Result<Self, CudaError> {
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let room = gpu.context.attribute(attribute).during("asking for a card's shared memory")? as usize;
        let stages = if STAGES[0] * STAGE_BYTES <= room { STAGES[0] } else { STAGES[1] };
        let module = gpu.module("products_experts_many")?;
        let up = gpu.function(&module, &format!("gate_up_many_{stages}"), (stages * STAGE_BYTES) as u32)?;
        let down = gpu.function(&module, "down_many", room as u32)?;
        Ok(Self { up, down, stages, room })
    }

    /// Whether they take experts of this shape: whole steps only, and rows that fit a block of the second product.
    pub fn take(&self, experts: &CudaExperts) -> bool {
        experts.inner.is_multiple_of(STEP) && experts.hidden.is_multiple_of(STEP) && down_bytes(experts.inner / STEP) <= self.room
    }
}

impl CudaDevice {
    /// [`CudaDevice::experts_up`] over entries of [`ROWS`] rows; `inner` has room for every place of the list.
    pub(super) fn experts_up_many(
        &self,
        experts: &CudaExperts,
        [x, factors]: [CUdeviceptr; 2],
        inner: CUdeviceptr,
        list: &WorkList,
        top_k: usize,
    ) -> Result<()> {
        let (gpu, kernels) = (&self.gpu, &self.products.many);
        let tiles = experts.inner / 8;
        let mut parameters = self.gate_up(experts, [x, factors], inner, list, top_k);
        let grid = (tiles.div_ceil(WARPS * TILES) as u32, list.entries as u32, 1);
        // SAFETY: `GateUp` mirrors the kernel's struct; buffers have room for every place the list can have.
        unsafe { enqueue_struct(gpu, &kernels.up, grid, 256, kernels.stages * STAGE_BYTES, 1, &mut parameters)? };
        Ok(())
    }

    /// [`CudaDevice::experts_down`] over the same entries; `outer` has room for every place.
    pub(super) fn experts_down_many(&self, experts: &CudaExperts, inner: CUdeviceptr, outer: CUdeviceptr, list: &WorkList) -> Result<()> {
        let gpu = &self.gpu;
        let steps = experts.inner.div_ceil(STEP);
        let mut parameters = self.down(experts, inner, outer, list);
        let grid = (DOWN_PARTS, list.entries as u32, 1);
        // SAFETY: `Down` mirrors the kernel's struct; buffers as above.
        unsafe { enqueue_struct(gpu, &self.products.many.down, grid, 256, down_bytes(steps), 1, &mut parameters)? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_of_k26_fits_every_supported_card() {
        assert!(STAGES[1] * STAGE_BYTES <= 99 << 10 && down_bytes(2) <= 99 << 10);
    }
}
