//! Products with weights and what stands between them: embeddings, norms, dense layers, experts.

use super::buffers::{CudaAct, CudaMatrix, CudaVector, View};
use super::device::CudaDevice;
use super::error::CudaError;
use super::gpu::Gpu;
use super::rows::CudaRows;
use crate::device::host::HostExpert;
use crate::device::{DeviceError, Mlp, Moe, Result};
use crate::model::tensor::Matrix;

pub struct Products {}

pub struct CudaExperts {}

impl Products {
    pub fn load(_gpu: &Gpu) -> std::result::Result<Self, CudaError> {
        Ok(Self {})
    }
}

fn missing<T>() -> Result<T> {
    Err(DeviceError("this operation has no kernel yet".into()))
}

#[allow(unused_variables)]
impl CudaDevice {
    pub(super) fn upload_matrix(&self, weights: &Matrix<'_>) -> Result<CudaMatrix> {
        missing()
    }
    pub(super) fn upload_vector(&self, values: &[f32]) -> Result<CudaVector> {
        missing()
    }
    pub(super) fn upload_experts(&self, weights: &[HostExpert<'_>]) -> Result<CudaExperts> {
        missing()
    }
    pub(super) fn new_act(&self, rows: usize, width: usize) -> Result<CudaAct> {
        missing()
    }
    pub(super) fn embed_rows(&self, table: &CudaMatrix, first: u32, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        missing()
    }
    pub(super) fn rms_norm_rows(&self, x: &CudaAct, weight: &CudaVector, eps: f32, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        missing()
    }
    /// `out[row] = x[row] W^T` for every row of the bound. Used by all other operations.
    pub(super) fn product(&self, x: View, weight: &CudaMatrix, rows: &CudaRows, out: View) -> Result<()> {
        missing()
    }
    pub(super) fn add_rows(&self, x: &mut CudaAct, y: &CudaAct, rows: &CudaRows) -> Result<()> {
        missing()
    }
    pub(super) fn copy_rows(&self, x: &CudaAct, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        missing()
    }
    pub(super) fn mlp_rows(&self, weights: &Mlp<Self>, h: &CudaAct, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        missing()
    }
    pub(super) fn moe_rows(&self, weights: &Moe<Self>, h: &CudaAct, rows: &CudaRows, layer: usize, out: &mut CudaAct) -> Result<()> {
        missing()
    }
    pub(super) fn tap_rows(&self, x: &CudaAct, rows: &CudaRows, index: usize, taps: &mut CudaAct) -> Result<()> {
        missing()
    }
    pub(super) fn gather_rows(&self, taps: &CudaAct, accepted: &CudaRows, out: &mut CudaAct) -> Result<()> {
        missing()
    }
    pub(super) fn keep_last_row(&self, h: &CudaAct, rows: &CudaRows, out: &mut CudaAct, last: &mut CudaRows) -> Result<()> {
        missing()
    }
    pub(super) fn read_act(&self, x: &CudaAct, rows: usize) -> Result<Vec<f32>> {
        missing()
    }
}
