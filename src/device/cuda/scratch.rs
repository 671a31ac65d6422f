//! Buffers inside fused operations. They grow while the engine warms up with its largest passes and are frozen afterwards: graphs
//! hold their addresses, and a round must not allocate.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};

use super::error::{CudaError, During};
use super::gpu::Gpu;

/// What a buffer is for. Operations run one after another on one stream, so one buffer of each kind is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Inner activations of an MLP or a projection.
    Wide,
    /// Normed inner activations.
    Normed,
    /// Latents before norm and rotation.
    Latent,
    /// Absorbed queries, bf16.
    Queries,
    /// Latent outputs of a verify kernel, bf16.
    Outputs,
    /// Those of the other kernel in mode `validate`.
    Second,
    /// Log-sum-exps of the verify kernels.
    Lse,
    /// Router logits.
    Gates,
    /// Chosen experts, weights and the sorted places.
    Routes,
    /// Expert activations.
    Inner,
    /// Expert outputs.
    Outer,
    /// Expanded keys and values of a prompt segment.
    Expanded,
    /// Running sums of the direct attention.
    Running,
    /// Sampler and marginals.
    Sampler,
    /// Inputs rounded to bf16.
    Rounded,
    /// Inputs of a product of many rows, rounded and in its order.
    Packed,
    /// Normed rows as bf16, but for their factors.
    Half,
    /// What rounding took away from them.
    Rest,
    /// Factors of the rows' norm.
    Factors,
    /// Partial sums of split products.
    Partial,
    /// What ranks gathered from each other.
    Gathered,
}

const USES: usize = Use::Gathered as usize + 1;

/// See the module.
#[derive(Default)]
pub struct Scratch {
    buffers: [Option<CudaSlice<u8>>; USES],
    frozen: bool,
    /// Allocations made so far.
    pub allocations: u64,
}

impl Scratch {
    /// Address of at least `bytes` bytes, aligned to 256. Contents are undefined.
    pub fn get(&mut self, gpu: &Gpu, what: Use, bytes: usize) -> Result<CUdeviceptr, CudaError> {
        let place = &mut self.buffers[what as usize];
        if place.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
            let found = place.as_ref().map_or(0, CudaSlice::len);
            if self.frozen {
                let wanted = format!("at most the {found} bytes of warm-up ({what:?})");
                return Err(CudaError::Limit { what: "bytes of scratch in a round", found: bytes as u64, wanted });
            }
            *place = None;
            self.allocations += 1;
            // SAFETY: every operation writes what it reads from scratch.
            *place = Some(unsafe { gpu.stream.alloc(bytes.max(256)) }.during("allocating scratch")?);
        }
        Ok(place.as_ref().map_or(0, |buffer| buffer.device_ptr(&gpu.stream).0))
    }

    /// From now on a larger request is an error.
    pub fn freeze(&mut self) {
        self.frozen = true;
    }
}
