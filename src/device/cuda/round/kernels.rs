//! The loaded kernels of rounds, and how they are launched.

use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::CudaFunction;

use super::super::error::CudaError;
use super::super::gpu::Gpu;

/// kernels/round/*.cu.
pub struct RoundKernels {
    pub(super) admit: CudaFunction,
    pub(super) place_chunk: CudaFunction,
    pub(super) open_prompt: CudaFunction,
    pub(super) place_blocks: CudaFunction,
    pub(super) place_trees: CudaFunction,
    pub(super) marginals: CudaFunction,
    pub(super) report: CudaFunction,
    pub(super) report_prompt: CudaFunction,
    pub(super) grow: CudaFunction,
    pub(super) scan: CudaFunction,
    pub(super) draw: CudaFunction,
    pub(super) walk: CudaFunction,
    pub(super) shift: CudaFunction,
}

impl RoundKernels {
    /// Looks every kernel of a round up.
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let (place, top, walk) = (gpu.module("round_place")?, gpu.module("round_top")?, gpu.module("round_walk")?);
        Ok(Self {
            admit: gpu.function(&gpu.module("round_admit")?, "round_admit", 0)?,
            place_chunk: gpu.function(&place, "round_place_chunk", 0)?,
            open_prompt: gpu.function(&place, "round_open_prompt", 0)?,
            place_blocks: gpu.function(&place, "round_place_blocks", 0)?,
            place_trees: gpu.function(&place, "round_place_trees", 0)?,
            marginals: gpu.function(&top, "round_marginals", 0)?,
            report: gpu.function(&top, "round_report", 0)?,
            report_prompt: gpu.function(&top, "round_report_prompt", 0)?,
            grow: gpu.function(&gpu.module("round_grow")?, "round_grow", 0)?,
            scan: gpu.function(&gpu.module("round_sample")?, "round_scan", 0)?,
            draw: gpu.function(&gpu.module("round_draw")?, "round_draw", 0)?,
            walk: gpu.function(&walk, "round_walk", 0)?,
            shift: gpu.function(&walk, "round_move", 0)?,
        })
    }
}

/// A grid of blocks.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub x: usize,
    pub y: usize,
    pub threads: u32,
    pub shared: u32,
}

impl Grid {
    /// A grid of `x` times `y` blocks without dynamic shared memory.
    pub fn new(x: usize, y: usize, threads: u32) -> Self {
        Self { x, y, threads, shared: 0 }
    }
}

/// A structure that a launch passes by value: where it lies, for as long as it lives.
#[derive(Clone, Copy)]
pub(super) struct ByValue<'a> {
    at: *mut c_void,
    of: PhantomData<&'a ()>,
}

/// The launch that follows reads `value`.
pub(super) fn by_value<T>(value: &T) -> ByValue<'_> {
    ByValue { at: std::ptr::from_ref(value).cast_mut().cast(), of: PhantomData }
}

/// Enqueues a kernel that takes `structs` by value and then `values` of 8 bytes or less each.
///
/// # Safety
/// As for [`Gpu::launch`]: `structs` and `values` must match the kernel's parameters in order and type.
pub(super) unsafe fn launch(
    gpu: &Gpu,
    function: &CudaFunction,
    grid: Grid,
    structs: &[ByValue<'_>],
    values: &mut [u64],
) -> Result<(), CudaError> {
    let mut arguments = [std::ptr::null_mut(); 12];
    let pointers = structs.iter().map(|value| value.at).chain(values.iter_mut().map(|value| (&raw mut *value).cast()));
    let count = arguments.iter_mut().zip(pointers).map(|(argument, pointer)| *argument = pointer).count();
    debug_assert_eq!(count, structs.len() + values.len());
    // SAFETY: promised by the caller; the driver copies the parameters before it returns.
    unsafe { gpu.launch(function, (grid.x as u32, grid.y as u32, 1), grid.threads, grid.shared, &mut arguments[..count]) }
}
