//! The CPU device: the reference for every other device. f32 arithmetic on bf16 and INT4 weights, fixed summation order, the same
//! bits alone or in a batch, speculated or not, on any number of threads.

pub mod attend;
mod device;
pub mod draft;
pub mod gemm;
pub mod int4;
pub mod layers;
pub mod mla;
pub mod moe;
pub mod parallel;
pub mod prompt;
pub mod round;
pub mod rows;
pub mod simd;
#[cfg(test)]
mod testing;
pub mod tiles;
pub mod validate;
pub mod verify;

use std::cell::RefCell;

use draft::{CpuContexts, DraftArgs};
use gemm::{PanelMatrix, linear};
use mla::{CpuAbsorbed, CpuLatents};
use moe::{CpuExperts, ExpertMatrix, MoeArgs, MoeScratch, Routes};
use parallel::{SharedMut, split};
use prompt::PromptCache;
use round::CpuRound;
use rows::CpuRows;
use simd::{Isa, WIDTH};
use validate::Validation;
use verify::VerifyArgs;

use super::host::HostExpert;
use super::*;
use crate::model::tensor::{Int4Matrix, Matrix};
use crate::parallel::collective::{Collective, RankLost};
use crate::speculate::sampling::logprobs;

impl From<RankLost> for DeviceError {
    fn from(lost: RankLost) -> Self {
        Self(lost.to_string())
    }
}

/// Activations `[rows, width]`.
pub struct CpuAct {
    pub data: Vec<f32>,
    pub width: usize,
}

impl CpuAct {
    fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..(row + 1) * self.width]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.width..(row + 1) * self.width]
    }
}

/// An embedding table, row-major bf16.
pub struct CpuTable {
    data: Vec<half::bf16>,
    n: usize,
    width: usize,
}

/// Buffers of the fused operations, sized by the largest batch they saw.
#[derive(Default)]
struct Scratch {
    wide: Vec<f32>,
    normed: Vec<f32>,
    latent: Vec<f32>,
    queries: Vec<f32>,
    outputs: Vec<f32>,
    second: Vec<f32>,
    prompt: PromptCache,
    moe: MoeScratch,
}

/// One CPU rank. Lives on the thread that owns its rayon pool.
pub struct CpuDevice {
    isa: Isa,
    verify: Verify,
    fault: Option<KernelFault>,
    rope: RopeTable,
    draft_rope: RopeTable,
    collective: Option<Collective>,
    scratch: RefCell<Scratch>,
    validation: RefCell<Validation>,
    /// Kept per layer when asked for: tests compare them with the reference.
    routes: RefCell<Option<Vec<(usize, Routes)>>>,
}

impl CpuDevice {
    /// `collective` joins this rank to the others; `None` = it is alone.
    pub fn new(verify: Verify, collective: Option<Collective>) -> Self {
        Self {
            isa: Isa::detect(),
            verify,
            fault: None,
            rope: RopeTable::default(),
            draft_rope: RopeTable::default(),
            collective,
            scratch: RefCell::default(),
            validation: RefCell::default(),
            routes: RefCell::new(None),
        }
    }

    /// Plants a fault in the custom verify kernel.
    pub fn plant(&mut self, fault: Option<KernelFault>) {
        self.fault = fault;
    }

    /// Starts keeping the routes of every MoE layer; `take_routes` returns and clears them.
    pub fn record_routes(&self) {
        *self.routes.borrow_mut() = Some(Vec::new());
    }

    /// The routes recorded since the last call, with their layers; empty unless `record_routes` was called.
    pub fn take_routes(&self) -> Vec<(usize, Routes)> {
        self.routes.borrow_mut().as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn linear_rows(&self, x: &[f32], stride: usize, rows: usize, w: &PanelMatrix, out: &mut [f32], out_stride: usize) {
        linear(self.isa, x, stride, rows, w, out, out_stride);
    }
}

/// Most bytes of bf16 that the experts of one layer may take to be unpacked at load.
const UNPACKED_EXPERTS: usize = 64 << 20;

/// Matrices of one expert, one under the other.
fn expert_matrix(parts: &[&Int4Matrix<'_>], unpacked: bool) -> ExpertMatrix {
    if !unpacked {
        return ExpertMatrix::Int4(int4::Int4Matrix::stack(parts));
    }
    let weights: Vec<half::bf16> = parts.iter().flat_map(|part| part.unpack()).collect();
    ExpertMatrix::Bf16(PanelMatrix::pack(&weights, parts.iter().map(|part| part.rows).sum(), parts[0].columns))
}

/// RMSNorm of every row of `x`, as wide as `weight`.
fn norm_rows(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    let shared = SharedMut::new(out);
    split(x.len() / width, 32, &|range| {
        for row in range {
            // SAFETY: rows are disjoint.
            layers::rms_norm(isa, &x[row * width..(row + 1) * width], weight, eps, unsafe { shared.range(row * width, width) });
        }
    });
}

/// Grows a buffer to `len` and gives it out.
fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

fn multiple_of_lanes(what: &str, width: usize) -> Result<()> {
    if width.is_multiple_of(WIDTH) {
        Ok(())
    } else {
        Err(DeviceError(format!("{what} is {width}, the CPU device wants a multiple of {WIDTH}")))
    }
}
