//! Attention on the card: projections into queries and the latent cache, absorbed and direct attention, the drafter's.

use super::buffers::CudaAct;
use super::device::CudaDevice;
use super::error::CudaError;
use super::gpu::Gpu;
use super::rows::CudaRows;
use crate::device::{DeviceError, DraftAttention, DraftMask, GqaShape, MlaProjection, MlaShape, Result, RopeTable};
use crate::engine::contract::LayerDiff;
use crate::model::tensor::Matrix;

use cudarc::driver::CudaSlice;
use half::bf16;

use super::kv::KvRows;

pub struct Attention {}

pub struct CudaAbsorbed {}

pub struct CudaContexts {}

/// Latent cache of every layer, `[layers][slots][576]` bf16.
pub struct CudaLatents {
    pub data: CudaSlice<bf16>,
    pub layers: usize,
    pub slots: usize,
    /// Each layer as the verify kernels see it.
    pub kv: Vec<KvRows>,
}

fn missing<T>() -> Result<T> {
    Err(DeviceError("this operation has no kernel yet".into()))
}

#[allow(unused_variables)]
impl Attention {
    pub fn load(gpu: &Gpu) -> std::result::Result<Self, CudaError> {
        Ok(Self {})
    }
    pub fn set_rope(&mut self, gpu: &Gpu, target: &RopeTable, drafter: Option<&RopeTable>) -> Result<()> {
        missing()
    }
    pub fn take_validation(&self, gpu: &Gpu) -> Vec<LayerDiff> {
        Vec::new()
    }
}

#[allow(unused_variables, clippy::too_many_arguments)]
impl CudaDevice {
    pub(super) fn upload_absorbed(&self, kv_b: &Matrix<'_>, shape: MlaShape) -> Result<CudaAbsorbed> {
        missing()
    }
    pub(super) fn new_latents(&self, layers: usize, slots: usize, shape: MlaShape) -> Result<CudaLatents> {
        missing()
    }
    pub(super) fn new_contexts(&self, layers: usize, slots: usize, shape: GqaShape) -> Result<CudaContexts> {
        missing()
    }
    pub(super) fn project_latents(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        h: &CudaAct,
        rows: &CudaRows,
        latents: &mut CudaLatents,
        layer: usize,
        q: &mut CudaAct,
    ) -> Result<()> {
        missing()
    }
    pub(super) fn attend_absorbed(
        &self,
        weights: &CudaAbsorbed,
        shape: MlaShape,
        q: &CudaAct,
        rows: &CudaRows,
        latents: &CudaLatents,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        missing()
    }
    pub(super) fn attend_direct(
        &self,
        weights: &CudaAbsorbed,
        shape: MlaShape,
        q: &CudaAct,
        rows: &CudaRows,
        latents: &CudaLatents,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        missing()
    }
    pub(super) fn store_context(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        c: &CudaAct,
        rows: &CudaRows,
        contexts: &mut CudaContexts,
        layer: usize,
    ) -> Result<()> {
        missing()
    }
    pub(super) fn attend_block(
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
        missing()
    }
}
