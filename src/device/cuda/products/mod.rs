//! Products with weights and what stands between them: embeddings, norms, dense layers, experts. Kernels in kernels/products.
//!
//! Every operation only enqueues, with launches sized by the rows' bound, so it can be recorded into a graph. Kernels are launched
//! as programmatic dependents: a kernel's first weights are on their way while its predecessor still drains.
//!
//! Whatever `Numerics` says, a row's sums are taken in an order that depends on the matrices alone, never on the other rows.

pub mod experts;
mod linear;
pub mod moe;
pub mod routing;
mod rows;
mod upload;

use std::ffi::c_void;

use cudarc::driver::{CudaFunction, CudaSlice, sys};

use super::error::{CudaError, During};
use super::gpu::Gpu;

pub use experts::CudaExperts;
pub use routing::HostRoutes;

/// The kernels of this module.
pub struct Products {
    dense: [CudaFunction; 3],
    dense_two: CudaFunction,
    dense_wide: CudaFunction,
    gate_up: [CudaFunction; 3],
    down: [CudaFunction; 3],
    tile_int4: CudaFunction,
    unpack_int4: CudaFunction,
    random_int4: CudaFunction,
    route: CudaFunction,
    embed: CudaFunction,
    rms_norm: CudaFunction,
    add_rows: CudaFunction,
    copy_rows: CudaFunction,
    keep_last: CudaFunction,
    tile_weights: CudaFunction,
    untile_weights: CudaFunction,
    random_weights: CudaFunction,
    /// Blocks of the routing kernel that are done; zero between launches.
    arrived: CudaSlice<u32>,
    /// Benches: experts are chosen uniformly, by a hash of layer and row.
    uniform_routing: std::cell::Cell<bool>,
}

impl Products {
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let (dense, experts) = (gpu.module("products_dense")?, gpu.module("products_experts")?);
        let (routing, rows) = (gpu.module("products_routing")?, gpu.module("products_rows")?);
        let by_tiles = |module, name: &str, shared| -> Result<[CudaFunction; 3], CudaError> {
            let one = |rows: usize| gpu.function(module, &format!("{name}_{rows}"), shared);
            Ok([one(8)?, one(16)?, one(32)?])
        };
        Ok(Self {
            dense: by_tiles(&dense, "dense", MAX_SHARED)?,
            dense_two: gpu.function(&dense, "dense_32_two", MAX_SHARED)?,
            dense_wide: gpu.function(&gpu.module("products_wide")?, "dense_wide", MAX_SHARED)?,
            gate_up: by_tiles(&experts, "gate_up", MAX_SHARED)?,
            down: by_tiles(&experts, "down", MAX_SHARED)?,
            tile_int4: gpu.function(&experts, "tile_int4", 0)?,
            unpack_int4: gpu.function(&experts, "unpack_int4", 0)?,
            random_int4: gpu.function(&experts, "random_int4", 0)?,
            route: gpu.function(&routing, "route", 0)?,
            embed: gpu.function(&rows, "embed", 0)?,
            rms_norm: gpu.function(&rows, "rms_norm", 0)?,
            add_rows: gpu.function(&rows, "add_rows", 0)?,
            copy_rows: gpu.function(&rows, "copy_rows", 0)?,
            keep_last: gpu.function(&rows, "keep_last", 0)?,
            tile_weights: gpu.function(&rows, "tile_weights", 0)?,
            untile_weights: gpu.function(&rows, "untile_weights", 0)?,
            random_weights: gpu.function(&rows, "random_weights", 0)?,
            arrived: gpu.stream.alloc_zeros(1).during("allocating a counter")?,
            uniform_routing: std::cell::Cell::new(false),
        })
    }
}

impl super::device::CudaDevice {
    /// Benches: from now on experts are chosen uniformly at random (by a hash of layer and row), whatever the router says.
    pub fn set_uniform_routing(&self, uniform: bool) {
        self.products.uniform_routing.set(uniform);
    }
}

/// Dynamic shared memory that a block may use: what every supported card has.
const MAX_SHARED: u32 = 99 * 1024 - 256;

/// Which of the three kernels (8, 16 or 32 rows a tile) and how many rows its tile has.
fn tile_of(rows: usize) -> (usize, usize) {
    match rows {
        0..=8 => (0, 8),
        9..=16 => (1, 16),
        _ => (2, 32),
    }
}

/// Enqueues one kernel as a programmatic dependent of the one before it, in clusters of `cluster` blocks along x. May be captured.
///
/// # Safety
/// `arguments` point at the kernel's parameters in order; device pointers in them stay valid until it (or the last replay of a
/// graph that holds it) has run. The kernel waits for its predecessor before it touches what others write.
unsafe fn enqueue(
    gpu: &Gpu,
    function: &CudaFunction,
    grid: (u32, u32, u32),
    threads: u32,
    shared: u32,
    cluster: u32,
    arguments: &mut [*mut c_void],
) -> Result<(), CudaError> {
    gpu.context.bind_to_thread().during("binding the context")?;
    use sys::CUlaunchAttributeID::{
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as DEPENDENT,
    };
    let dims = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
    let mut attributes = [
        (DEPENDENT, sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 }),
        (CLUSTER, sys::CUlaunchAttributeValue { clusterDim: dims }),
    ]
    .map(|(id, value)| sys::CUlaunchAttribute { id, pad: [0; 4], value });
    let config = sys::CUlaunchConfig {
        gridDimX: grid.0,
        gridDimY: grid.1,
        gridDimZ: grid.2,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: gpu.stream.cu_stream(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: if cluster > 1 { 2 } else { 1 },
    };
    // SAFETY: `config` and its attributes outlive the call; the rest is promised by the caller.
    unsafe { sys::cuLaunchKernelEx(&config, function.cu_function(), arguments.as_mut_ptr(), std::ptr::null_mut()) }
        .result()
        .during("launching a kernel")
}

/// The same for kernels whose parameters take 8 bytes or less each ([`super::buffers::Argument::bits`]).
///
/// # Safety
/// As for [`enqueue`].
unsafe fn enqueue_values(
    gpu: &Gpu,
    function: &CudaFunction,
    grid: (u32, u32, u32),
    threads: u32,
    values: &mut [u64],
) -> Result<(), CudaError> {
    let mut pointers = [std::ptr::null_mut(); 16];
    for (pointer, value) in pointers.iter_mut().zip(values.iter_mut()) {
        *pointer = (&raw mut *value).cast();
    }
    // SAFETY: promised by the caller.
    unsafe { enqueue(gpu, function, grid, threads, 0, 1, &mut pointers[..values.len()]) }
}

/// The same for a kernel with one struct as its parameter.
///
/// # Safety
/// As for [`enqueue`]; `T` mirrors the kernel's struct.
unsafe fn enqueue_struct<T>(
    gpu: &Gpu,
    function: &CudaFunction,
    grid: (u32, u32, u32),
    threads: u32,
    shared: usize,
    cluster: u32,
    parameters: &mut T,
) -> Result<(), CudaError> {
    // SAFETY: promised by the caller.
    unsafe { enqueue(gpu, function, grid, threads, shared as u32, cluster, &mut [(&raw mut *parameters).cast()]) }
}

/// A number that the kernels count in 32 bits.
fn int(value: usize) -> i32 {
    i32::try_from(value).expect("sizes of a model fit 32 bits")
}
