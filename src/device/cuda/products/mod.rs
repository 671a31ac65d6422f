//! Products with weights and what stands between them: embeddings, norms, dense layers, experts. Kernels in kernels/products.
//!
//! Every operation only enqueues, with launches sized by the rows' bound, so it can be recorded into a graph. Kernels are launched
//! as programmatic dependents: a kernel's first weights are on their way while its predecessor still drains.
//!
//! Whatever `Numerics` says, a row's sums are taken in an order that depends on the matrices alone, never on the other rows.

pub mod experts;
mod experts_many;
mod linear;
pub mod moe;
mod norm;
pub mod routing;
mod rows;
mod upload;
mod wide;

use cudarc::driver::{CudaFunction, CudaSlice};

use super::error::{CudaError, During};
use super::gpu::Gpu;

pub use experts::CudaExperts;
pub(in crate::device::cuda) use linear::{Input, Mode, Part, With};
pub(in crate::device::cuda) use norm::{Latents, Normed};
pub use routing::HostRoutes;

/// The kernels of this module.
pub struct Products {
    /// For f32 activations, for bf16 ones, and for those in two terms.
    dense: [DenseKernels; 3],
    dense_combine: [CudaFunction; 3],
    wide: wide::WideKernels,
    many: experts_many::ManyKernels,
    /// For one row, and for more.
    few: [FewKernels; 2],
    prepare_rows: CudaFunction,
    prepare_and_store: CudaFunction,
    gate_up: [CudaFunction; 3],
    gate_up_built: CudaFunction,
    gate_up_alone: CudaFunction,
    down: [CudaFunction; 3],
    down_sum: [CudaFunction; 3],
    tile_int4: CudaFunction,
    unpack_int4: CudaFunction,
    random_int4: CudaFunction,
    route: CudaFunction,
    embed: CudaFunction,
    rms_norm: CudaFunction,
    add_rows: CudaFunction,
    copy_rows: CudaFunction,
    scatter_rows: CudaFunction,
    keep_last: CudaFunction,
    tile_weights: CudaFunction,
    untile_weights: CudaFunction,
    random_weights: CudaFunction,
    /// Blocks of the routing kernel that are done; zero between launches.
    arrived: CudaSlice<u32>,
    /// Benches: experts are chosen uniformly, by a hash of layer and row.
    uniform_routing: std::cell::Cell<bool>,
}

/// Tiles of 8, 16 and 32 rows, with one and with two tiles of weights.
struct DenseKernels {
    one: [CudaFunction; 3],
    two: [CudaFunction; 3],
}

/// Without a norm in front, the same that combines; with a norm, and with one and latents to store.
struct FewKernels {
    plain: CudaFunction,
    combine: CudaFunction,
    norm: CudaFunction,
    latents: CudaFunction,
}

impl Products {
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let (dense, experts) = (gpu.module("products_dense")?, gpu.module("products_experts")?);
        let (routing, rows) = (gpu.module("products_routing")?, gpu.module("products_rows")?);
        let named = |module, name: &str, more: &str, shared| -> Result<[CudaFunction; 3], CudaError> {
            let one = |rows: usize| gpu.function(module, &format!("{name}_{rows}{more}"), shared);
            Ok([one(8)?, one(16)?, one(32)?])
        };
        let by_tiles = |module, name: &str, shared| named(module, name, "", shared);
        let (few, norm) = (gpu.module("products_few")?, gpu.module("products_norm")?);
        let of_dense = |name: &str| -> Result<DenseKernels, CudaError> {
            Ok(DenseKernels { one: by_tiles(&dense, name, MAX_SHARED)?, two: named(&dense, name, "_two", MAX_SHARED)? })
        };
        let of_few = |name: &str| -> Result<FewKernels, CudaError> {
            let one = |what: &str| gpu.function(&few, &format!("{name}_{what}"), MAX_SHARED);
            Ok(FewKernels { plain: one("plain")?, combine: one("combine")?, norm: one("norm")?, latents: one("latents")? })
        };
        Ok(Self {
            dense: [of_dense("dense")?, of_dense("dense_half")?, of_dense("dense_pairs")?],
            dense_combine: by_tiles(&dense, "dense_combine", MAX_SHARED)?,
            few: [of_few("one")?, of_few("few")?],
            prepare_rows: gpu.function(&norm, "prepare_rows", 0)?,
            prepare_and_store: gpu.function(&norm, "prepare_and_store", 0)?,
            wide: wide::WideKernels::load(gpu)?,
            many: experts_many::ManyKernels::load(gpu)?,
            gate_up: by_tiles(&experts, "gate_up", MAX_SHARED)?,
            gate_up_built: gpu.function(&experts, "gate_up_built", MAX_SHARED_SUM)?,
            gate_up_alone: gpu.function(&experts, "gate_up_alone", MAX_SHARED_SUM)?,
            down: by_tiles(&experts, "down", MAX_SHARED)?,
            down_sum: by_tiles(&experts, "down_sum", MAX_SHARED_SUM)?,
            tile_int4: gpu.function(&experts, "tile_int4", 0)?,
            unpack_int4: gpu.function(&experts, "unpack_int4", 0)?,
            random_int4: gpu.function(&experts, "random_int4", 0)?,
            route: gpu.function(&routing, "route", 0)?,
            embed: gpu.function(&rows, "embed", 0)?,
            rms_norm: gpu.function(&rows, "rms_norm", 0)?,
            add_rows: gpu.function(&rows, "add_rows", 0)?,
            copy_rows: gpu.function(&rows, "copy_rows", 0)?,
            scatter_rows: gpu.function(&rows, "scatter_rows", 0)?,
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

/// Dynamic shared memory that a block may use: what every supported card has, but for a little that is static.
pub const MAX_SHARED: u32 = 99 * 1024 - 256;
/// The same of `gate_up_built` and `down_sum`, whose blocks also keep a list of up to 32 rows.
pub const MAX_SHARED_SUM: u32 = 94 * 1024;

/// Which of the three kernels (8, 16 or 32 rows a tile) and how many rows its tile has.
fn tile_of(rows: usize) -> (usize, usize) {
    match rows {
        0..=8 => (0, 8),
        9..=16 => (1, 16),
        _ => (2, 32),
    }
}

/// Enqueues a kernel with one struct as its parameter as a programmatic dependent, in clusters of `cluster` blocks along x.
///
/// # Safety
/// As for [`Gpu::launch_clusters`]; `T` mirrors the kernel's struct.
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
    unsafe { gpu.launch_clusters(function, grid, threads, shared as u32, cluster, &mut [(&raw mut *parameters).cast()]) }
}

/// A number that the kernels count in 32 bits.
fn int(value: usize) -> i32 {
    i32::try_from(value).expect("sizes of a model fit 32 bits")
}
