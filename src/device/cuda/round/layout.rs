//! The structures of kernels/round/state.cuh, field by field; that header says what each is.

use cudarc::driver::sys::CUdeviceptr;

/// Requests one round may hold: the small kernels run in one block.
pub const MAX_SHARES: usize = 128;
/// Ids one row may have: eight runs of a draw, thirty-two chunks of a selection.
pub const MAX_VOCAB: usize = 1 << 18;
/// Rows of a drafter block: its marginals lie in the shared memory of one block.
pub const MAX_BLOCK: usize = 64;
/// "No token".
pub const NONE: u32 = u32::MAX;
/// Logits a block of `round_scan` looks at.
pub const SCAN_CHUNK: usize = 4096;
/// Logits a block of the selections in top.cu looks at, and candidates it may keep.
pub const TOP_CHUNK: usize = 8192;
pub const TOP_CAP: usize = 128;

/// Ids one request may suppress without a vector of its own.
pub const INLINE_SUPPRESSED: usize = 64;

/// A request's lengths and sampling.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RequestData {
    pub length: i32,
    pub anchor: u32,
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub top_k: u32,
    pub seed: u64,
    pub frequency: f32,
    pub presence: f32,
    pub repetition: f32,
    pub reported: i32,
    pub free_from: u32,
    pub suppressed_count: u32,
    pub drafts: u32,
    pub bias_outside: u32,
    pub seen: CUdeviceptr,
    pub bias: CUdeviceptr,
    pub suppressed: CUdeviceptr,
}

/// `Lists` of kernels/round/admit.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AdmitLists {
    pub slots: CUdeviceptr,
    pub suppressed: CUdeviceptr,
    pub bias_ids: CUdeviceptr,
    pub bias_values: CUdeviceptr,
    pub prompt: CUdeviceptr,
    pub slots_count: u32,
    pub suppressed_count: u32,
    pub bias_count: u32,
    pub prompt_count: u32,
}

/// Words of a plan before its shares: eight of the head, one share index per block.
pub const PLAN_HEAD: usize = 8 + MAX_SHARES;
/// Words of a share, and which of them counts its masked rows.
pub const SHARE_WORDS: usize = 8;
pub const SHARE_MASKED: usize = 4;

/// Bytes of `Plan`, `RowInfo`, `Live`, `Pick`, `ScanPart`, `Walked`, `TopPart`.
pub const PLAN_BYTES: usize = 4 * (PLAN_HEAD + SHARE_WORDS * MAX_SHARES);
pub const INFO_BYTES: usize = 16;
pub const LIVE_BYTES: usize = 4 * (1 + MAX_SHARES);
pub const PICK_BYTES: usize = 20;
pub const SCAN_BYTES: usize = 16;
pub const WALKED_BYTES: usize = 76;
pub const TOP_PART_BYTES: usize = 24;

/// A draft tree: tokens, parents, depths, masks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TreeData {
    pub rows: u32,
    pub pad: u32,
    pub token: [u32; 64],
    pub parent: [u8; 64],
    pub depth: [u8; 64],
    pub ancestors: [u64; 64],
    pub logprob: [f64; 64],
}

/// What the host reads of a share.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct ShareResult {
    pub accepted: u32,
    pub fault: u32,
    pub fault_token: u32,
    pub fault_value: f32,
    pub tree_rows: u32,
    pub first: u32,
    pub pad: [u32; 2],
}

/// What the host reads of a planned row.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct RowResult {
    pub logprob: f64,
    pub tree_token: u32,
    pub token: u32,
    pub parent: u8,
    pub path: u8,
    pub pad: [u8; 6],
}

/// What the host reads of a row's log-probabilities.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Report {
    pub token: u32,
    pub logprob: f32,
    pub rank: u32,
    pub found: u32,
    pub ids: [u32; 20],
    pub logprobs: [f32; 20],
}

/// `Round`: where everything lies.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundPointers {
    pub requests: CUdeviceptr,
    pub tables: CUdeviceptr,
    pub plan: CUdeviceptr,
    pub trees: CUdeviceptr,
    pub ids: CUdeviceptr,
    pub logprobs: CUdeviceptr,
    pub live: CUdeviceptr,
    pub infos: CUdeviceptr,
    pub masks: CUdeviceptr,
    pub scans: CUdeviceptr,
    pub picks: CUdeviceptr,
    pub walked: CUdeviceptr,
    pub result: CUdeviceptr,
    pub top_parts: CUdeviceptr,
    pub candidates: CUdeviceptr,
    pub arrivals: CUdeviceptr,
    pub table_stride: i32,
    pub vocab: i32,
    pub words: i32,
    pub block: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirrors_have_the_sizes_that_the_headers_assert() {
        let header = include_str!("../../../../kernels/round/state.cuh");
        let admit = include_str!("../../../../kernels/round/admit.cu");
        for (name, size) in [
            ("Request", size_of::<RequestData>()),
            ("Share", 4 * SHARE_WORDS),
            ("Tree", size_of::<TreeData>()),
            ("Pick", PICK_BYTES),
            ("Walked", WALKED_BYTES),
            ("ScanPart", SCAN_BYTES),
            ("RowInfo", INFO_BYTES),
            ("Live", LIVE_BYTES),
            ("TopPart", TOP_PART_BYTES),
            ("ShareResult", size_of::<ShareResult>()),
            ("RowResult", size_of::<RowResult>()),
            ("Report", size_of::<Report>()),
            ("Round", size_of::<RoundPointers>()),
        ] {
            assert!(header.contains(&format!("static_assert(sizeof({name}) == {size},")), "{name} is {size} bytes in Rust");
        }
        assert!(admit.contains(&format!("static_assert(sizeof(Lists) == {},", size_of::<AdmitLists>())));
        assert_eq!(PLAN_BYTES, 32 + 36 * MAX_SHARES);
        assert!(header.contains(&format!("kMaxShares = {MAX_SHARES};")));
    }

    #[test]
    fn chunks_are_those_of_the_kernels() {
        let scan = include_str!("../../../../kernels/round/sample.cu");
        let top = include_str!("../../../../kernels/round/top.cu");
        let draw = include_str!("../../../../kernels/round/draw.cu");
        assert!(scan.contains("kThreads = 256, kLoads = 4, kChunk = kThreads * kLoads * 4;"));
        assert_eq!(SCAN_CHUNK, 256 * 4 * 4);
        assert!(top.contains("kThreads = 256, kLoads = 8, kEach = kLoads * 4, kChunk = kThreads * kEach;"));
        assert_eq!(TOP_CHUNK, 256 * 8 * 4);
        assert!(top.contains(&format!("kCap = {TOP_CAP}, kMaxChunks = {},", MAX_VOCAB / TOP_CHUNK)));
        assert!(draw.contains(&format!("kMaxTiles = {};", MAX_VOCAB / 8 / (512 * 4))));
    }
}
