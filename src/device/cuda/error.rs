//! What can go wrong between this program and a card, each with what to do about it.

/// A reason why CUDA is not used or a launch was refused.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "this kdtree was built without CUDA kernels; build it with nvcc 13.0 on PATH or named by KDTREE_NVCC (scripts/install-nvcc.sh)"
    )]
    BuiltWithout,
    #[error("no CUDA driver library (libcuda.so.1) found; install the NVIDIA driver, or put its folder on LD_LIBRARY_PATH")]
    NoDriver,
    #[error("the CUDA driver supports CUDA {}.{}, but the kernels need 13.0; update the NVIDIA driver to 580 or newer", .found / 1000, .found % 1000 / 10)]
    OldDriver { found: i32 },
    #[error("the CUDA driver sees no card; check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoCard,
    #[error("card {ordinal} asked for, but the driver sees {count}; choose 0 to {}", .count - 1)]
    NoSuchCard { ordinal: usize, count: usize },
    #[error("{name} has compute capability {}.{}; this build holds kernels for 9.0 (sm_90a) and 12.0 (sm_120a) only", .capability.0, .capability.1)]
    Unsupported { name: String, capability: (i32, i32) },
    #[error("{what}: found {found}, wanted {wanted}")]
    Limit { what: &'static str, found: u64, wanted: String },
    #[error("a rank of this process has ended")]
    RankLost,
    #[error("{what}: {source}")]
    Driver { what: &'static str, source: cudarc::driver::DriverError },
}

/// Names the step that a driver call belongs to.
pub trait During<T> {
    fn during(self, what: &'static str) -> Result<T, CudaError>;
}

impl<T> During<T> for Result<T, cudarc::driver::DriverError> {
    fn during(self, what: &'static str) -> Result<T, CudaError> {
        self.map_err(|source| CudaError::Driver { what, source })
    }
}
