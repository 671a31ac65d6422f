//! Weights and activations on the card. Weights are bf16, activations f32 (products round them to bf16 on the way into the tensor
//! cores and sum in f32).

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;

use super::gpu::Gpu;

/// Where f32 rows lie: `stride` values from one row to the next.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub at: CUdeviceptr,
    pub stride: usize,
}

/// Activations `[rows, width]`.
pub struct CudaAct {
    pub data: CudaSlice<f32>,
    pub rows: usize,
    pub width: usize,
}

impl CudaAct {
    /// Where the rows lie, and how far apart.
    pub fn view(&self, gpu: &Gpu) -> View {
        View { at: self.data.device_ptr(&gpu.stream).0, stride: self.width }
    }
}

/// A weight matrix `[n, k]` in half tiles of 8 rows (kernels/products/fragments.cuh), rows rounded up to a multiple of 16.
pub struct CudaMatrix {
    pub data: CudaSlice<bf16>,
    pub n: usize,
    pub k: usize,
}

impl CudaMatrix {
    /// Where the weights begin.
    pub fn at(&self, gpu: &Gpu) -> CUdeviceptr {
        self.data.device_ptr(&gpu.stream).0
    }
}

/// A vector of weights.
pub struct CudaVector {
    pub data: CudaSlice<f32>,
}

impl CudaVector {
    /// Where the values begin.
    pub fn at(&self, gpu: &Gpu) -> CUdeviceptr {
        self.data.device_ptr(&gpu.stream).0
    }
}

/// A kernel argument as the 8 bytes the launch reads it from.
pub trait Argument {
    fn bits(self) -> u64;
}

impl Argument for u64 {
    fn bits(self) -> u64 {
        self
    }
}

impl Argument for i32 {
    fn bits(self) -> u64 {
        u64::from(self as u32)
    }
}

impl Argument for u32 {
    fn bits(self) -> u64 {
        u64::from(self)
    }
}

impl Argument for f32 {
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }
}
