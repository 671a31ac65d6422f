//! The machine code of kernels/attention/, loaded once.

use cudarc::driver::CudaFunction;

use super::absorbed::EXPAND_MANY_SHARED;
use super::drafter::SHARED as DRAFT_SHARED;
use super::prompt::{ATTEND_SHARED, EXPAND_SHARED};
use crate::device::cuda::error::CudaError;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::params::SHARED_LIMIT;

const _: () = assert!(EXPAND_MANY_SHARED <= SHARED_LIMIT && EXPAND_SHARED <= SHARED_LIMIT && ATTEND_SHARED <= SHARED_LIMIT);
const _: () = assert!(DRAFT_SHARED[0] <= SHARED_LIMIT && DRAFT_SHARED[1] <= SHARED_LIMIT);

pub struct Kernels {
    pub absorb_few: CudaFunction,
    pub absorb_many: CudaFunction,
    pub expand_outputs: CudaFunction,
    pub expand_outputs_many: CudaFunction,
    pub compare_outputs: CudaFunction,
    pub plant_fault: CudaFunction,
    pub expand_segment: CudaFunction,
    pub attend_segment: CudaFunction,
    pub finish_prompt: CudaFunction,
    /// For drafter heads of 64 and of 128.
    pub draft: [DraftKernels; 2],
}

pub struct DraftKernels {
    pub prepare: CudaFunction,
    pub attend: CudaFunction,
    pub merge: CudaFunction,
}

impl Kernels {
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let absorbed = gpu.module("attention_absorbed")?;
        let (validate, prompt) = (gpu.module("attention_validate")?, gpu.module("attention_prompt")?);
        let drafter = gpu.module("attention_drafter")?;
        let draft = |head: usize, shared: u32| -> Result<DraftKernels, CudaError> {
            Ok(DraftKernels {
                prepare: gpu.function(&drafter, &format!("prepare_heads_{head}"), 0)?,
                attend: gpu.function(&drafter, &format!("attend_block_{head}"), shared)?,
                merge: gpu.function(&drafter, &format!("merge_block_{head}"), 0)?,
            })
        };
        Ok(Self {
            absorb_few: gpu.function(&absorbed, "absorb_few", 0)?,
            absorb_many: gpu.function(&absorbed, "absorb_many", 0)?,
            expand_outputs: gpu.function(&absorbed, "expand_outputs", 0)?,
            expand_outputs_many: gpu.function(&absorbed, "expand_outputs_many", EXPAND_MANY_SHARED)?,
            compare_outputs: gpu.function(&validate, "compare_outputs", 0)?,
            plant_fault: gpu.function(&validate, "plant_fault", 0)?,
            expand_segment: gpu.function(&prompt, "expand_segment", EXPAND_SHARED)?,
            attend_segment: gpu.function(&prompt, "attend_segment", ATTEND_SHARED)?,
            finish_prompt: gpu.function(&prompt, "finish_prompt", 0)?,
            draft: [draft(64, DRAFT_SHARED[0])?, draft(128, DRAFT_SHARED[1])?],
        })
    }
}
