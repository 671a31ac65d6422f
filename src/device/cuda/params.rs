//! The launch parameters, mirror of `kernels/verify/params.h`, and the numbers both sides must agree on.

use cudarc::driver::sys::CUdeviceptr;

/// Requests a launch may hold.
pub const MAX_BATCH: usize = 128;
/// Draft rows a request may have: bits of a mask word.
pub const MAX_ROWS: usize = 64;
/// Shared memory a block may have on sm_120.
pub const SHARED_LIMIT: u32 = 101_376;

/// Field by field `VerifyParams` of the header, which says what each is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyParams {
    pub q: CUdeviceptr,
    pub kv: CUdeviceptr,
    pub out: CUdeviceptr,
    pub lse: CUdeviceptr,
    pub qo_indptr: CUdeviceptr,
    pub kv_begin: CUdeviceptr,
    pub kv_len: CUdeviceptr,
    pub kv_indices: CUdeviceptr,
    pub draft_slots: CUdeviceptr,
    pub mask: CUdeviceptr,
    pub partial_o: CUdeviceptr,
    pub partial_ml: CUdeviceptr,
    pub pieces: CUdeviceptr,
    pub batch: i32,
    pub rows: i32,
    pub slots: i32,
    pub heads_log2: i32,
    pub scale_log2: f32,
    pub exact: i32,
    pub item_cost: i32,
    pub min_tiles: i32,
    pub split_root: f32,
    pub partials: i32,
    pub ticket: CUdeviceptr,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_has_the_size_that_the_header_asserts() {
        assert_eq!(size_of::<VerifyParams>(), 152);
        let header = include_str!("../../../kernels/verify/params.h");
        assert!(header.contains("static_assert(sizeof(VerifyParams) == 152"));
        assert!(header.contains(&format!("kSmemLimit = {SHARED_LIMIT};")));
        assert!(header.contains(&format!("kMaxBatch = {MAX_BATCH};")));
        assert!(header.contains(&format!("kMaxRows = {MAX_ROWS};")));
    }

    #[test]
    fn the_mirror_names_the_fields_in_the_headers_order() {
        let header = include_str!("../../../kernels/verify/params.h");
        let mirror = include_str!("params.rs");
        let fields = |text: &str, open: &str, name: fn(&str) -> Option<String>| -> Vec<String> {
            text.split_once(open).unwrap().1.split_once("\n}").unwrap().0.lines().filter_map(name).collect()
        };
        let cpp = fields(header, "struct VerifyParams {", |line| line.split(';').next()?.split_whitespace().last().map(str::to_owned));
        let rust =
            fields(mirror, "pub struct VerifyParams {", |line| Some(line.trim().strip_prefix("pub ")?.split(':').next()?.to_owned()));
        assert_eq!(cpp, rust);
        assert_eq!(rust.len(), 24);
    }
}
