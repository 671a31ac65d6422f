//! Attention on the card: projections into queries and the latent cache, absorbed and direct attention, the drafter's.
//!
//! Called through the `Device` trait only. Every operation just enqueues kernels (kernels/attention/, and the verify kernels); how
//! many rows are live, where prefixes lie and how long they are is read on the card.

mod absorbed;
mod drafter;
mod kernels;
mod project;
mod prompt;
mod validation;

use std::cell::OnceCell;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;

use super::device::CudaDevice;
use super::error::{CudaError, During};
use super::gpu::Gpu;
use super::kv::{KvRows, ROW, ROW_BYTES};
use super::scratch::Use;
use crate::device::{DeviceError, MlaShape, Result, RopeTable};
use crate::engine::contract::LayerDiff;

pub use absorbed::CudaAbsorbed;
pub use drafter::CudaContexts;

/// Kernels, rotary tables and what the verify launchers need.
pub struct Attention {
    kernels: kernels::Kernels,
    target_rope: Option<Rope>,
    draft_rope: Option<Rope>,
    launchers: OnceCell<absorbed::Launchers>,
    validation: validation::Validation,
}

/// cos and sin on the card, `[positions][half]` each.
struct Rope {
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
    half: usize,
}

impl Rope {
    fn upload(gpu: &Gpu, table: &RopeTable) -> Result<Self> {
        let copy = |values: &[f32]| gpu.stream.clone_htod(values).during("uploading rotary tables");
        Ok(Self { cos: copy(&table.cos)?, sin: copy(&table.sin)?, half: table.half })
    }

    fn at(&self, gpu: &Gpu) -> (CUdeviceptr, CUdeviceptr) {
        (self.cos.device_ptr(&gpu.stream).0, self.sin.device_ptr(&gpu.stream).0)
    }
}

impl Attention {
    pub fn load(gpu: &Gpu) -> std::result::Result<Self, CudaError> {
        Ok(Self {
            kernels: kernels::Kernels::load(gpu)?,
            target_rope: None,
            draft_rope: None,
            launchers: OnceCell::new(),
            validation: validation::Validation::default(),
        })
    }

    pub fn set_rope(&mut self, gpu: &Gpu, target: &RopeTable, drafter: Option<&RopeTable>) -> Result<()> {
        self.target_rope = Some(Rope::upload(gpu, target)?);
        self.draft_rope = drafter.map(|table| Rope::upload(gpu, table)).transpose()?;
        Ok(())
    }

    /// Differences per layer since the last call. Waits for the card.
    pub fn take_validation(&self, gpu: &Gpu) -> Vec<LayerDiff> {
        self.validation.take(gpu)
    }
}

/// Latent cache of every layer, `[layers][slots][576]` bf16.
pub struct CudaLatents {
    pub data: CudaSlice<bf16>,
    pub layers: usize,
    pub slots: usize,
    /// Each layer as the verify kernels see it.
    pub kv: Vec<KvRows>,
}

impl CudaDevice {
    pub(super) fn new_latents(&self, layers: usize, slots: usize, shape: MlaShape) -> Result<CudaLatents> {
        check_shape(shape)?;
        let data = self.gpu.stream.alloc_zeros(layers * slots * ROW).during("allocating the latent cache")?;
        let base = data.device_ptr(&self.gpu.stream).0;
        let kv = (0..layers).map(|layer| KvRows::new(base + (layer * slots * ROW_BYTES) as u64, slots));
        Ok(CudaLatents { kv: kv.collect::<std::result::Result<_, _>>()?, data, layers, slots })
    }
}

/// The kernels are compiled for the shapes of K2 (and DeepSeek-V3): mirror of kernels/attention/shape.cuh.
const NOPE: usize = 128;
const ROPE: usize = 64;
const QUERY: usize = NOPE + ROPE;
const VALUE: usize = 128;
const LATENT: usize = 512;

fn check_shape(shape: MlaShape) -> Result<()> {
    let found = (shape.nope, shape.rope, shape.value, shape.latent);
    if found == (NOPE, ROPE, VALUE, LATENT) && shape.heads.is_power_of_two() && (4..=64).contains(&shape.heads) {
        return Ok(());
    }
    Err(DeviceError(format!(
        "attention shape {found:?} with {} heads per rank: the CUDA kernels are for nope 128, rope 64, value 128, latent 512 and 4, 8, \
         16, 32 or 64 heads; use the CPU device or another number of ranks",
        shape.heads
    )))
}

/// A table of rotary embeddings, or what to do about its absence.
fn rope<'a>(table: &'a Option<Rope>, whose: &str, half: usize) -> Result<&'a Rope> {
    match table {
        Some(rope) if rope.half == half => Ok(rope),
        Some(rope) => Err(DeviceError(format!("the {whose}'s rotary table has {} pairs, its heads want {half}", rope.half))),
        None => Err(DeviceError(format!("the {whose}'s rotary table is not set; call set_rope before the first pass"))),
    }
}

/// Address of scratch for `what`.
fn scratch(device: &CudaDevice, what: Use, bytes: usize) -> Result<CUdeviceptr> {
    Ok(device.scratch.borrow_mut().get(&device.gpu, what, bytes)?)
}
