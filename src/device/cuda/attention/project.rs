//! Projections into queries and the latent cache: three products (two of them in one launch), a norm between them, and one kernel
//! that rotates the queries, norms and rotates the latents and writes them to their slots.

use cudarc::driver::DevicePtr;

use super::{CudaLatents, LATENT, QUERY, ROPE, check_shape, rope, scratch};
use crate::device::cuda::buffers::{Argument, CudaAct, View};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::kv::{ROW, ROW_BYTES};
use crate::device::cuda::rows::CudaRows;
use crate::device::cuda::scratch::Use;
use crate::device::{DeviceError, MlaProjection, MlaShape, Result};

const THREADS: u32 = 256;
/// Values a row that norm_low_rank holds in registers.
const MOST_LOW_RANK: usize = 2048;

impl CudaDevice {
    #[allow(clippy::too_many_arguments)]
    pub(in crate::device::cuda) fn project_latents(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        h: &CudaAct,
        rows: &CudaRows,
        latents: &mut CudaLatents,
        layer: usize,
        q: &mut CudaAct,
    ) -> Result<()> {
        check_shape(shape)?;
        if q.width != shape.heads * QUERY || weights.kv_a.n != ROW || weights.kv_a_norm.data.len() != LATENT {
            let (width, outputs) = (q.width, weights.kv_a.n);
            return Err(DeviceError(format!("queries of {width} and latents of {outputs} columns do not fit {} heads", shape.heads)));
        }
        if !weights.q_a.n.is_multiple_of(4) || weights.q_a.n > MOST_LOW_RANK {
            let rank = weights.q_a.n;
            return Err(DeviceError(format!("q_lora_rank is {rank}, the CUDA kernels want a multiple of 4 up to {MOST_LOW_RANK}")));
        }
        if rows.bound == 0 {
            return Ok(());
        }
        let (gpu, rank) = (&self.gpu, weights.q_a.n);
        let low = View { at: scratch(self, Use::Wide, rows.bound * rank * 4)?, stride: rank };
        let normed = View { at: scratch(self, Use::Normed, rows.bound * rank * 4)?, stride: rank };
        let latent = View { at: scratch(self, Use::Latent, rows.bound * ROW * 4)?, stride: ROW };
        let queries = q.view(gpu);
        let counts = rows.counts.device_ptr(&gpu.stream).0;
        let grid = (rows.bound as u32, 1, 1);

        self.product_pair(h.view(gpu), [(&weights.q_a, low), (&weights.kv_a, latent)], rows)?;
        let norm = &mut [low.at, weights.q_a_norm.at(gpu), weights.eps.bits(), (rank as i32).bits(), counts, normed.at];
        // SAFETY: argument types as in project.cu; both buffers hold `bound` rows of `rank` values.
        unsafe { gpu.enqueue_dependent(&self.attention.kernels.norm_low_rank, grid, THREADS, 0, norm)? };
        self.product(normed, &weights.q_b, rows, queries)?;

        let (cos, sin) = rope(&self.attention.target_rope, "target", ROPE / 2)?.at(gpu);
        let cache = latents.data.device_ptr(&gpu.stream).0 + (layer * latents.slots * ROW_BYTES) as u64;
        let pointers = rows.pointers(gpu);
        let store = &mut [
            queries.at,
            (shape.heads as i32).bits(),
            latent.at,
            weights.kv_a_norm.at(gpu),
            weights.eps.bits(),
            cos,
            sin,
            counts,
            pointers.positions,
            pointers.slots,
            cache,
        ];
        // SAFETY: argument types as in project.cu; live rows have positions within the rotary table and slots within the cache.
        unsafe { gpu.enqueue_dependent(&self.attention.kernels.rotate_and_store, grid, THREADS, 0, store)? };
        Ok(())
    }
}
