//! The KV rows of one layer as the verify kernels see them: where they are, and the two tensor maps by which the copy engine
//! fetches one row or an aligned run of 16.

use cudarc::driver::sys;

use super::error::{CudaError, During};

/// Columns of a KV row: 512 latent, 64 rope.
pub const ROW: usize = 576;
/// Bytes of a KV row in bf16.
pub const ROW_BYTES: usize = ROW * 2;
/// KV tokens a tile, and slots a block of the cache.
pub const TILE: usize = 16;

/// `slots` rows of 576 bf16 from `base`.
#[derive(Clone, Copy)]
pub struct KvRows {
    pub base: sys::CUdeviceptr,
    pub slots: u32,
    pub(super) row_map: sys::CUtensorMap,
    pub(super) tile_map: sys::CUtensorMap,
}

impl KvRows {
    /// Describes device memory; nothing is copied. `base` must be aligned to 16 bytes.
    pub fn new(base: sys::CUdeviceptr, slots: usize) -> Result<Self, CudaError> {
        if slots == 0 || slots > i32::MAX as usize || !base.is_multiple_of(16) {
            let wanted = format!("1 to {} slots at an address divisible by 16", i32::MAX);
            return Err(CudaError::Limit { what: "KV rows", found: slots as u64, wanted });
        }
        Ok(Self { base, slots: slots as u32, row_map: map(base, slots, 1)?, tile_map: map(base, slots, TILE as u32)? })
    }
}

/// A map of shape (64 columns, 9 column groups, slots) with a box of `rows` whole rows and the 128-byte swizzle.
fn map(base: sys::CUdeviceptr, slots: usize, rows: u32) -> Result<sys::CUtensorMap, CudaError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let (shape, strides) = ([64u64, 9, slots as u64], [128u64, ROW_BYTES as u64]);
    let (window, step) = ([64u32, 9, rows], [1u32; 3]);
    // SAFETY: all arrays outlive the call and have rank (or rank - 1) elements; the driver checks the values.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            base as *mut _,
            shape.as_ptr(),
            strides.as_ptr(),
            window.as_ptr(),
            step.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .during("describing KV rows to the copy engine")?;
    Ok(map)
}
