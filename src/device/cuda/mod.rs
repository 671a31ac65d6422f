//! NVIDIA cards: finding one, choosing the machine code for it, and launching the verify kernels.
//!
//! Everything goes through the driver API, loaded at run time: the same binary starts where there is no CUDA at all and says why
//! it does not use it. Called by the CUDA device, `kdtree doctor`, `kdtree bench kernel` and the GPU tests.

pub mod attention;
pub mod buffers;
pub mod collective;
pub mod device;
pub mod error;
pub mod gpu;
pub mod graphs;
pub mod image;
pub mod kv;
pub mod params;
pub mod products;
pub mod round;
pub mod rows;
pub mod scratch;
pub mod upload;
pub mod verify;

pub use device::CudaDevice;
pub use error::CudaError;
pub use gpu::Gpu;
pub use kv::KvRows;
pub use verify::{Call, Kernel, Limits, Numerics, Tuning, Verify};
