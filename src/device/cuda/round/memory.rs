//! Device memory of rounds: one allocation, cut into the arrays that the kernels see, and vectors of the vocabulary's length for
//! the few requests that need them.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};

use super::super::error::{CudaError, During};
use super::super::gpu::Gpu;
use super::layout::*;
use crate::device::Limits;
use crate::speculate::budget::MAX_ROWS;

/// See the module.
pub struct RoundMemory {
    /// Owns what `pointers` points into.
    _arena: CudaSlice<u8>,
    pub pointers: RoundPointers,
    /// `[requests][INLINE_SUPPRESSED]` ids.
    pub suppressed: CUdeviceptr,
    /// Bytes of the largest result.
    pub result_bytes: usize,
    /// Slots of one request's table.
    pub stride: usize,
}

impl RoundMemory {
    /// Allocates everything that `limits` allows.
    pub fn new(gpu: &Gpu, limits: &Limits) -> Result<Self, CudaError> {
        check(limits)?;
        let (requests, rows) = (limits.requests, limits.verify_rows);
        let slots = limits.block.max(1) - 1;
        let stride = crate::engine::options::slots_of_request(limits.context);
        let words = limits.vocab.div_ceil(32);
        let items = rows.max(requests * slots);
        let chunks = limits.vocab.div_ceil(TOP_CHUNK);
        let result_bytes = result_bytes(requests, rows, rows);
        let sizes = [
            requests * size_of::<RequestData>(),
            requests * stride * 4,
            PLAN_BYTES,
            requests * size_of::<TreeData>(),
            requests * slots * MAX_ROWS * 4,
            requests * slots * MAX_ROWS * 4,
            LIVE_BYTES,
            rows * INFO_BYTES,
            rows * words * 4,
            rows * limits.vocab.div_ceil(SCAN_CHUNK) * SCAN_BYTES,
            rows * PICK_BYTES,
            requests * WALKED_BYTES,
            result_bytes,
            items * chunks * TOP_PART_BYTES,
            items * chunks * TOP_CAP * 8,
            items * 4,
            requests * INLINE_SUPPRESSED * 4,
        ];
        let bytes: usize = sizes.iter().map(|size| size.next_multiple_of(256)).sum();
        let arena = gpu.stream.alloc_zeros::<u8>(bytes).during("allocating the state of rounds")?;
        let mut next = arena.device_ptr(&gpu.stream).0;
        let at = sizes.map(|size| {
            let here = next;
            next += size.next_multiple_of(256) as u64;
            here
        });
        let [
            requests,
            tables,
            plan,
            trees,
            ids,
            logprobs,
            live,
            infos,
            masks,
            scans,
            picks,
            walked,
            result,
            top_parts,
            candidates,
            arrivals,
            suppressed,
        ] = at;
        let pointers = RoundPointers {
            requests,
            tables,
            plan,
            trees,
            ids,
            logprobs,
            live,
            infos,
            masks,
            scans,
            picks,
            walked,
            result,
            top_parts,
            candidates,
            arrivals,
            table_stride: stride as i32,
            vocab: limits.vocab as i32,
            words: words as i32,
            block: limits.block.max(1) as i32,
        };
        Ok(Self { _arena: arena, pointers, suppressed, result_bytes, stride })
    }
}

/// Where the rows' records and the reports begin in a result of `shares` shares and `rows` planned rows.
pub fn result_places(shares: usize, rows: usize) -> (usize, usize) {
    let records = shares * size_of::<ShareResult>();
    (records, (records + rows * size_of::<RowResult>()).next_multiple_of(16))
}

/// Bytes of a result that holds `reports` reports.
pub fn result_bytes(shares: usize, rows: usize, reports: usize) -> usize {
    result_places(shares, rows).1 + reports * size_of::<Report>()
}

fn check(limits: &Limits) -> Result<(), CudaError> {
    let bounds = [
        ("requests at once", limits.requests, 1, MAX_SHARES),
        ("rows of a verify pass", limits.verify_rows, 1, 1 << 15),
        ("tokens of the vocabulary", limits.vocab, 1, MAX_VOCAB),
        ("rows of a drafter block", limits.block, 0, MAX_BLOCK),
        ("tokens of a context", limits.context, 1, (i32::MAX as usize - MAX_ROWS) / limits.requests.max(1) - 16),
    ];
    for (what, found, low, high) in bounds {
        if !(low..=high).contains(&found) {
            return Err(CudaError::Limit { what, found: found as u64, wanted: format!("{low} to {high}") });
        }
    }
    Ok(())
}

/// Vectors `[vocab]` of 4-byte values, lent to requests with biases or penalties and taken back when they end.
pub struct Pool {
    free: Vec<CudaSlice<u32>>,
    vocab: usize,
    /// Vectors made after start-up: the few set aside were all lent.
    pub allocations: u64,
}

impl Pool {
    /// A pool with `ready` vectors of `vocab` counts.
    pub fn new(gpu: &Gpu, vocab: usize, ready: usize) -> Result<Self, CudaError> {
        let free = (0..ready).map(|_| gpu.stream.alloc_zeros(vocab)).collect::<Result<_, _>>().during("allocating counts of tokens")?;
        Ok(Self { free, vocab, allocations: 0 })
    }

    /// A vector with undefined contents.
    pub fn take(&mut self, gpu: &Gpu) -> Result<CudaSlice<u32>, CudaError> {
        if let Some(vector) = self.free.pop() {
            return Ok(vector);
        }
        self.allocations += 1;
        gpu.alone(|| gpu.stream.alloc_zeros(self.vocab).during("allocating counts of tokens"))
    }

    /// Takes vectors back for the next request.
    pub fn give(&mut self, vectors: impl IntoIterator<Item = CudaSlice<u32>>) {
        self.free.extend(vectors);
    }
}
