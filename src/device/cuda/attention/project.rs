//! Projections into queries and the latent cache: two launches for few rows. The first makes low-rank queries and latents; the second,
//! behind the norm of the low-rank queries, makes the queries, rotates them, and norms, rotates and stores the latents beside it.

use cudarc::driver::DevicePtr;

use super::{CudaLatents, LATENT, QUERY, ROPE, check_shape, rope, scratch};
use crate::device::cuda::buffers::{CudaAct, View};
use crate::device::cuda::device::CudaDevice;
use crate::device::cuda::kv::{ROW, ROW_BYTES};
use crate::device::cuda::products::{Input, Latents, Mode, Normed, Part, With};
use crate::device::cuda::rows::CudaRows;
use crate::device::cuda::scratch::Use;
use crate::device::{DeviceError, MlaProjection, MlaShape, Result};

impl CudaDevice {
    #[allow(clippy::too_many_arguments)]
    pub(in crate::device::cuda) fn project_latents(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        input: Input<'_>,
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
        if !weights.q_a.n.is_multiple_of(32) {
            let rank = weights.q_a.n;
            return Err(DeviceError(format!("q_lora_rank is {rank}, the CUDA kernels want a multiple of 32")));
        }
        if rows.bound == 0 {
            return Ok(());
        }
        let (gpu, rank) = (&self.gpu, weights.q_a.n);
        let low = View { at: scratch(self, Use::Wide, rows.bound * rank * 4)?, stride: rank };
        let latent = View { at: scratch(self, Use::Latent, rows.bound * ROW * 4)?, stride: ROW };
        let store = |weights, out| Part { weights, out, mode: Mode::Store };
        self.products_of(input, &[store(&weights.q_a, low), store(&weights.kv_a, latent)], rows.bound, &With::default())?;

        let (cos, sin) = rope(&self.attention.target_rope, "target", ROPE / 2)?.at(gpu);
        let pointers = rows.pointers(gpu);
        let stored = Latents {
            rows: latent.at,
            weight: weights.kv_a_norm.at(gpu),
            cos,
            sin,
            counts: pointers.counts,
            positions: pointers.positions,
            slots: pointers.slots,
            cache: latents.data.device_ptr(&gpu.stream).0 + (layer * latents.slots * ROW_BYTES) as u64,
            eps: weights.eps,
            unused: 0,
        };
        let input = Input::Normed(Normed { x: low, added: None, sum: None, weight: &weights.q_a_norm, eps: weights.eps });
        let queries = Part { weights: &weights.q_b, out: q.view(gpu), mode: Mode::Rotate };
        self.products_of(input, &[queries], rows.bound, &With { latents: stored, ..With::default() }).map(drop)
    }
}
