//! The state of rounds on the card: requests, trees, samples, and what they turn into.

use super::attention::CudaLatents;
use super::buffers::CudaAct;
use super::device::CudaDevice;
use super::error::CudaError;
use super::gpu::Gpu;
use super::rows::CudaRows;
use crate::device::{Admission, Bucket, DeviceError, HostTree, Limits, Outcome, Phase, Result, Share};
use crate::engine::contract::TokenLogprob;

pub struct RoundKernels {}

pub struct CudaRound {}

impl RoundKernels {
    pub fn load(_gpu: &Gpu) -> std::result::Result<Self, CudaError> {
        Ok(Self {})
    }
}

fn missing<T>() -> Result<T> {
    Err(DeviceError("this operation has no kernel yet".into()))
}

#[allow(unused_variables)]
impl CudaDevice {
    pub(super) fn new_round(&self, limits: &Limits) -> Result<CudaRound> {
        missing()
    }
    pub(super) fn report_prompt(&self, logits: &CudaAct, rows: &CudaRows, next: &[u32], top: u32) -> Result<Vec<TokenLogprob>> {
        missing()
    }
}

#[allow(unused_variables)]
impl CudaRound {
    pub fn admit(&mut self, device: &CudaDevice, request: usize, admission: Admission) -> Result<()> {
        missing()
    }
    pub fn retire(&mut self, device: &CudaDevice, request: usize) -> Result<()> {
        missing()
    }
    pub fn place_chunk(&self, device: &CudaDevice, request: usize, start: usize, tokens: &[u32], rows: &mut CudaRows) -> Result<()> {
        missing()
    }
    pub fn begin(&mut self, device: &CudaDevice, request: usize, prompt: usize, logits: &CudaAct, mask: Option<&[u32]>) -> Result<()> {
        missing()
    }
    pub fn bucket(&self, phase: Phase) -> Option<Bucket> {
        None
    }
    pub fn plan(&mut self, device: &CudaDevice, shares: &[Share]) -> Result<()> {
        missing()
    }
    pub fn place_blocks(&self, device: &CudaDevice, mask_token: u32, rows: &mut CudaRows) -> Result<()> {
        missing()
    }
    pub fn marginals(&mut self, device: &CudaDevice, logits: &CudaAct) -> Result<()> {
        missing()
    }
    pub fn grow(&mut self, device: &CudaDevice) -> Result<()> {
        missing()
    }
    pub fn place_trees(&self, device: &CudaDevice, rows: &mut CudaRows) -> Result<()> {
        missing()
    }
    pub fn read_trees(&self, device: &CudaDevice) -> Result<Vec<HostTree>> {
        missing()
    }
    pub fn set_masks(&mut self, device: &CudaDevice, share: usize, masks: &[u32]) -> Result<()> {
        missing()
    }
    pub fn sample(&mut self, device: &CudaDevice, logits: &CudaAct) -> Result<()> {
        missing()
    }
    pub fn walk_and_commit(&mut self, device: &CudaDevice, latents: &mut CudaLatents, accepted: &mut CudaRows) -> Result<()> {
        missing()
    }
    pub fn read(&mut self, device: &CudaDevice) -> Result<Vec<Outcome>> {
        missing()
    }
}
