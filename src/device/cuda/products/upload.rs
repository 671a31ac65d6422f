//! Weights onto the card and activations back: matrices are brought into half tiles (kernels/products/fragments.cuh) on the card.

use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;

use super::super::buffers::{Argument, CudaAct, CudaMatrix, CudaVector};
use super::super::device::CudaDevice;
use super::super::error::{CudaError, During};
use super::super::gpu::Gpu;
use crate::device::{DeviceError, Result};
use crate::model::tensor::Matrix;

/// Weights that one unit of a product spans.
const UNIT: usize = 32;

/// Elements that an `[n, k]` matrix takes in half tiles: rows rounded up to 16.
fn tiled_len(n: usize, k: usize) -> usize {
    n.next_multiple_of(16) * k
}

fn check(n: usize, k: usize) -> Result<()> {
    if n == 0 || k == 0 || !k.is_multiple_of(UNIT) {
        return Err(DeviceError(format!(
            "a weight matrix of {n} x {k}: the CUDA device wants a width that is a multiple of {UNIT}; use fewer ranks or the CPU device"
        )));
    }
    Ok(())
}

impl CudaMatrix {
    /// A matrix of weights uniform in `-scale .. scale`, made on the card: for benches without a checkpoint.
    pub fn random(device: &CudaDevice, n: usize, k: usize, scale: f32, seed: u64) -> Result<Self> {
        check(n, k)?;
        let gpu = &device.gpu;
        // SAFETY: the kernel below writes all of it.
        let data = unsafe { gpu.stream.alloc::<bf16>(tiled_len(n, k)) }.during("allocating random weights")?;
        let mut values = [data.device_ptr(&gpu.stream).0.bits(), (data.len() as u64).bits(), scale.bits(), seed.bits()];
        // SAFETY: the parameters of random_weights; `data` is alive, and frees are ordered by the stream.
        unsafe { gpu.enqueue(&device.products.random_weights, (4 * gpu.sms, 1, 1), 256, 0, &mut values)? };
        Ok(Self { data, n, k })
    }

    /// Bytes that a product reads of it.
    pub fn bytes(&self) -> usize {
        2 * self.n * self.k
    }

    /// The weights, row-major, on the host: for tests.
    pub fn read(&self, device: &CudaDevice) -> Result<Vec<bf16>> {
        let gpu = &device.gpu;
        let out = gpu.stream.alloc_zeros::<bf16>(self.n * self.k).during("allocating a copy of weights")?;
        let mut values = [self.at(gpu).bits(), (self.n as u64).bits(), (self.k as u32).bits(), out.device_ptr(&gpu.stream).0.bits()];
        // SAFETY: the parameters of untile_weights; both buffers live until the copy below has waited.
        unsafe { gpu.enqueue(&device.products.untile_weights, (4 * gpu.sms, 1, 1), 256, 0, &mut values)? };
        Ok(gpu.stream.clone_dtoh(&out).during("reading weights")?)
    }
}

impl CudaVector {
    pub fn upload(gpu: &Gpu, values: &[f32]) -> std::result::Result<Self, CudaError> {
        Ok(Self { data: gpu.stream.clone_htod(values).during("uploading a vector")? })
    }
}

impl CudaDevice {
    pub(in crate::device::cuda) fn upload_matrix(&self, weights: &Matrix<'_>) -> Result<CudaMatrix> {
        let (n, k) = (weights.rows, weights.columns);
        check(n, k)?;
        let gpu = &self.gpu;
        let raw: CudaSlice<bf16> = self.upload(&weights.data)?;
        // SAFETY: the kernel below writes all of it.
        let data = unsafe { gpu.stream.alloc::<bf16>(tiled_len(n, k)) }.during("allocating weights")?;
        let mut values = [
            raw.device_ptr(&gpu.stream).0.bits(),
            (n as u64).bits(),
            (k as u32).bits(),
            data.device_ptr(&gpu.stream).0.bits(),
            (data.len() as u64 / 8).bits(),
        ];
        // SAFETY: the parameters of tile_weights; `raw` is freed in stream order, after the kernel.
        unsafe { gpu.enqueue(&self.products.tile_weights, (4 * gpu.sms, 1, 1), 256, 0, &mut values)? };
        Ok(CudaMatrix { data, n, k })
    }

    pub(in crate::device::cuda) fn upload_vector(&self, values: &[f32]) -> Result<CudaVector> {
        Ok(CudaVector::upload(&self.gpu, values)?)
    }

    pub(in crate::device::cuda) fn new_act(&self, rows: usize, width: usize) -> Result<CudaAct> {
        let data = self.gpu.stream.alloc_zeros(rows * width).during("allocating activations")?;
        Ok(CudaAct { data, rows, width })
    }

    pub(in crate::device::cuda) fn read_act(&self, x: &CudaAct, rows: usize) -> Result<Vec<f32>> {
        let part = x.data.try_slice(..rows * x.width);
        let part = part.ok_or_else(|| DeviceError(format!("{rows} rows asked for of an activation buffer of {}", x.rows)))?;
        let values = self.gpu.stream.clone_dtoh(&part).during("reading activations")?;
        self.gpu.synchronize()?;
        Ok(values)
    }
}
