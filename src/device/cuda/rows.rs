//! Which rows an operation works on, as device data. The host knows only upper bounds: the bucket that a graph was recorded for.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};

use super::error::{CudaError, During};
use super::gpu::Gpu;

/// Rows of one pass, in groups: consecutive rows of one request. Kernels compare with `counts`; rows from `counts[0]` up to `bound`
/// are padding: they must not be written to a cache, and nothing may be read through their slots.
pub struct CudaRows {
    pub capacity: usize,
    /// Most rows that are live in the pass enqueued next: launches are sized by it.
    pub bound: usize,
    /// Most groups.
    pub group_bound: usize,
    /// Keys that a row may see at most (a launch bound for direct attention; exact on the host for prompt chunks).
    pub reach: usize,
    /// Whether the groups' prefixes are long together (chooses the verify kernel's blocks).
    pub long: bool,
    pub tokens: CudaSlice<u32>,
    pub positions: CudaSlice<u32>,
    /// Cache slot that each row's latent (or context) is written to.
    pub slots: CudaSlice<i32>,
    /// Group of each row.
    pub groups: CudaSlice<u32>,
    /// Bit j = row j of the same group is this row or an ancestor (absorbed passes only).
    pub ancestors: CudaSlice<u64>,
    /// Rows of another buffer these rows came from (accepted rows).
    pub sources: CudaSlice<u32>,
    /// `[rows, groups]` live.
    pub counts: CudaSlice<u32>,
    /// `[groups + 1]`: rows of group g are `firsts[g] .. firsts[g + 1]`; groups beyond the live ones are empty.
    pub firsts: CudaSlice<i32>,
    /// Per group, where its request's slot table begins in `tables`: `request * table stride`.
    pub table_begins: CudaSlice<i32>,
    /// Per group, committed tokens before its rows: keys that every one of them sees. 0 for groups beyond the live ones.
    pub prefixes: CudaSlice<i32>,
    /// Slot tables of all requests, `[requests][table stride]` i32, owned by the round; slot of position p is `table[p]`.
    pub tables: CUdeviceptr,
}

impl CudaRows {
    /// Room for `capacity` rows.
    pub fn new(gpu: &Gpu, capacity: usize) -> Result<Self, CudaError> {
        let stream = &gpu.stream;
        let what = "allocating rows";
        Ok(Self {
            capacity,
            bound: 0,
            group_bound: 0,
            reach: 0,
            long: false,
            tokens: stream.alloc_zeros(capacity).during(what)?,
            positions: stream.alloc_zeros(capacity).during(what)?,
            slots: stream.alloc_zeros(capacity).during(what)?,
            groups: stream.alloc_zeros(capacity).during(what)?,
            ancestors: stream.alloc_zeros(capacity).during(what)?,
            sources: stream.alloc_zeros(capacity).during(what)?,
            counts: stream.alloc_zeros(2).during(what)?,
            firsts: stream.alloc_zeros(capacity + 1).during(what)?,
            table_begins: stream.alloc_zeros(capacity).during(what)?,
            prefixes: stream.alloc_zeros(capacity).during(what)?,
            tables: 0,
        })
    }

    /// What kernels are handed.
    pub fn pointers(&self, gpu: &Gpu) -> RowPointers {
        let stream = &gpu.stream;
        RowPointers {
            tokens: self.tokens.device_ptr(stream).0,
            positions: self.positions.device_ptr(stream).0,
            slots: self.slots.device_ptr(stream).0,
            groups: self.groups.device_ptr(stream).0,
            ancestors: self.ancestors.device_ptr(stream).0,
            sources: self.sources.device_ptr(stream).0,
            counts: self.counts.device_ptr(stream).0,
            firsts: self.firsts.device_ptr(stream).0,
            table_begins: self.table_begins.device_ptr(stream).0,
            prefixes: self.prefixes.device_ptr(stream).0,
            tables: self.tables,
        }
    }
}

/// Addresses of the fields of [`CudaRows`], in the order of `struct Rows` in kernels/common/rows.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RowPointers {
    pub tokens: CUdeviceptr,
    pub positions: CUdeviceptr,
    pub slots: CUdeviceptr,
    pub groups: CUdeviceptr,
    pub ancestors: CUdeviceptr,
    pub sources: CUdeviceptr,
    pub counts: CUdeviceptr,
    pub firsts: CUdeviceptr,
    pub table_begins: CUdeviceptr,
    pub prefixes: CUdeviceptr,
    pub tables: CUdeviceptr,
}
