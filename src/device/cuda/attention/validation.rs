//! Mode `validate` on the card: sums per layer that only grow there, read when the engine asks. Same figures as cpu/validate.rs.

use std::cell::RefCell;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};

use crate::device::cuda::error::{CudaError, During};
use crate::device::cuda::gpu::Gpu;
use crate::engine::contract::LayerDiff;

/// Words of 8 bytes of a layer's `Sums` in kernels/attention/validate.cu: dot, own, other (f64), argmax_equal, rows (u64), then
/// max_abs (f32 bits) and max_ulp (u32).
const WORDS: usize = 6;

#[derive(Default)]
pub struct Validation {
    sums: RefCell<Option<CudaSlice<u64>>>,
}

impl Validation {
    /// Makes room for `layers` layers, once; called before anything is captured.
    pub fn prepare(&self, gpu: &Gpu, layers: usize) -> Result<(), CudaError> {
        let mut sums = self.sums.borrow_mut();
        if sums.as_ref().is_none_or(|sums| sums.len() < layers * WORDS) {
            *sums = Some(gpu.stream.alloc_zeros(layers * WORDS).during("allocating the sums of mode validate")?);
        }
        Ok(())
    }

    /// Address of a layer's sums.
    pub fn layer(&self, gpu: &Gpu, layer: usize) -> CUdeviceptr {
        self.sums.borrow().as_ref().map_or(0, |sums| sums.device_ptr(&gpu.stream).0 + (layer * WORDS * 8) as u64)
    }

    /// Per layer up to the last one compared, and starts anew. A card that cannot answer reports nothing here; the round that
    /// follows says why.
    pub fn take(&self, gpu: &Gpu) -> Vec<LayerDiff> {
        let mut sums = self.sums.borrow_mut();
        let Some(sums) = sums.as_mut() else { return Vec::new() };
        let read = |sums: &CudaSlice<u64>| -> Result<Vec<u64>, CudaError> {
            let words = gpu.stream.clone_dtoh(sums).during("reading the sums of mode validate")?;
            gpu.synchronize()?;
            Ok(words)
        };
        let Ok(words) = read(sums) else { return Vec::new() };
        if gpu.stream.memset_zeros(sums).is_err() {
            return Vec::new();
        }
        let mut layers: Vec<LayerDiff> = words.chunks_exact(WORDS).map(finish).collect();
        let used = layers.iter().rposition(|layer| layer.rows > 0).map_or(0, |last| last + 1);
        layers.truncate(used);
        layers
    }
}

fn finish(words: &[u64]) -> LayerDiff {
    let (dot, own, other) = (f64::from_bits(words[0]), f64::from_bits(words[1]), f64::from_bits(words[2]));
    let norm = (own * other).sqrt();
    let cosine = if norm > 0.0 {
        dot / norm
    } else if own == other {
        1.0
    } else {
        0.0
    };
    LayerDiff {
        max_abs: f32::from_bits(words[5] as u32),
        max_ulp: (words[5] >> 32) as u32,
        cosine: if cosine.is_nan() { 0.0 } else { cosine },
        argmax_equal: words[3],
        rows: words[4],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layers_words_become_its_differences() {
        let tail = u64::from(0.5f32.to_bits()) | 3 << 32;
        let found = finish(&[3f64.to_bits(), 4f64.to_bits(), 4f64.to_bits(), 7, 8, tail]);
        assert_eq!(found, LayerDiff { max_abs: 0.5, max_ulp: 3, cosine: 0.75, argmax_equal: 7, rows: 8 });
        assert_eq!(finish(&[0, 0, 0, 0, 0, 0]).cosine, 1.0);
        assert_eq!(finish(&[f64::NAN.to_bits(), f64::NAN.to_bits(), 0, 0, 1, 0]).cosine, 0.0);
    }
}
