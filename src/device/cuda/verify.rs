//! Typed launch of the verify kernels.
//!
//! [`Verify::new`] loads the machine code and allocates the scratch once, for the largest launch; [`Verify::launch`] only enqueues
//! one or two kernels: a tree kernel that joins its pieces itself (`fast`, 16 or 32 rows a block) needs no merge. Lengths, lists and
//! masks are read on the device, so a captured launch serves every later round of the same bucket (batch, rows).

use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, sys::CUdeviceptr};

use super::error::{CudaError, During};
use super::gpu::Gpu;
use super::kv::{KvRows, TILE};
use super::params::{MAX_BATCH, MAX_ROWS, SHARED_LIMIT, VerifyParams};

/// Row x head products up to which the merge gives each four blocks of 16 warps, and of 4 warps; beyond, one warp.
const WIDE_MERGE: usize = 32;
const MID_MERGE: usize = 1024;

/// Tokens of all requests' prefixes from which on a launch is no longer a matter of latency, however few its rows.
const LONG: usize = 1 << 16;

/// Whether a launch is no longer a matter of latency: `rows` draft rows of `requests` requests, whose prefixes have `tokens` tokens
/// together. The more rows each has, the sooner; but short prefixes stay one (measured with a rank's 8 heads, docs/kernel.md).
pub fn is_long(requests: usize, rows: usize, tokens: usize) -> bool {
    let enough = match rows.div_ceil(requests.max(1)) {
        0..=8 => LONG,
        9..=16 => LONG / 4,
        _ => LONG / 8,
    };
    tokens >= LONG || tokens >= enough.max(requests * LONG / 8)
}

/// Query rows a request takes in a block of `fast`, at most: few requests with short prefixes are a matter of latency, so they take
/// small blocks, and as many of them as there are (measured, docs/kernel.md).
pub fn block_rows(requests: usize, rows_and_heads: usize, long: bool) -> usize {
    const SMALL: usize = 32;
    let few = requests == 1 || requests <= 8 && rows_and_heads <= 128;
    if few && !long { rows_and_heads.min(SMALL) } else { rows_and_heads }
}

/// Number of a `Verify`'s first launch, so near the largest that every run comes past it and not only a server after days; fresh memory
/// bears 0, which the count leaves out.
const FIRST_LAUNCH: u64 = u32::MAX as u64 - 999;

/// Which verify kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Kernel {
    /// One pass, no split; simple on purpose.
    Baseline,
    /// KV split over the card, partial + merge.
    Tree,
}

/// What the tree kernel's bits depend on. The baseline is exact either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Numerics {
    /// Splits chosen for the whole batch.
    #[default]
    Fast,
    /// Splits fixed by a row's own positions: the same request gives the same bits alone, batched, in a chain or in a tree.
    Exact,
}

/// The largest launch that scratch is allocated for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests, 1 to 128.
    pub batch: usize,
    /// Draft rows of all requests together.
    pub rows: usize,
    /// Draft rows of one request, 1 to 64.
    pub rows_per_request: usize,
    /// Query heads per rank: 4, 8, 16, 32 or 64.
    pub heads: usize,
    /// Longest prefix, in tokens. Bounds the splits of `exact`; `fast` takes any length.
    pub prefix: usize,
    /// Whether `exact` launches will be made: they need more scratch.
    pub exact: bool,
}

/// How the `fast` scheduler cuts; the defaults are what the ladder in docs/kernel.md arrived at.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// What starting a piece costs, in tiles of 16 tokens.
    pub item_cost: i32,
    /// No piece shorter than this many tiles.
    pub min_tiles: i32,
    /// At most this x sqrt(prefix) pieces a request.
    pub split_root: f32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { item_cost: 5, min_tiles: 1, split_root: 2.5 }
    }
}

/// One launch. All pointers are device memory, laid out as `kernels/verify/params.h` says.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// Queries, bf16 \[rows\]\[heads\]\[576\], latent part first.
    pub q: CUdeviceptr,
    pub kv: &'a KvRows,
    /// Outputs, bf16 \[rows\]\[heads\]\[512\].
    pub out: CUdeviceptr,
    /// Natural log-sum-exp, f32 \[rows\]\[heads\]; -inf where a row sees no key.
    pub lse: CUdeviceptr,
    /// i32 \[batch + 1\]: draft rows of request r are `qo_indptr[r] .. qo_indptr[r + 1]`.
    pub qo_indptr: CUdeviceptr,
    /// i32 \[batch\]: its prefix starts at `kv_begin[r]` in `kv_indices`; prefixes may lie anywhere in it, in any order.
    pub kv_begin: CUdeviceptr,
    /// i32 \[batch\]: tokens of its prefix.
    pub kv_len: CUdeviceptr,
    /// i32: slots of the prefixes.
    pub kv_indices: CUdeviceptr,
    /// i32 \[rows\]: slots of the draft rows.
    pub draft_slots: CUdeviceptr,
    /// u64 \[rows\]: bit j = row j of this request is me or my ancestor. Ancestors come before their descendants.
    pub mask: CUdeviceptr,
    /// Requests in this bucket; unused ones have no rows (and are then skipped whatever their prefix).
    pub batch: usize,
    /// Draft rows in this bucket, padding included.
    pub rows: usize,
    /// Softmax scale, natural units.
    pub scale: f32,
}

/// A tree kernel.
struct Tree {
    function: CudaFunction,
    /// Query rows a block, at most.
    rows: usize,
    /// Threads a block, as the kernel was compiled for.
    threads: u32,
    shared: u32,
    /// Blocks that fill the card.
    grid: u32,
    /// Whether its blocks add their pieces up themselves, with no merge after them (`joins` in layout.cuh).
    joins: bool,
}

impl Tree {
    fn load(gpu: &Gpu, (rows, shared): (usize, u32), numerics: Numerics) -> Result<Self, CudaError> {
        let name = if numerics == Numerics::Exact { "exact" } else { "fast" };
        let function = gpu.function(&gpu.module("verify_tree")?, &format!("verify_tree_{rows}_{name}"), shared)?;
        let attribute = cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        let threads = function.get_attribute(attribute).during("asking for a kernel's block size")? as u32;
        let fit = function.occupancy_max_active_blocks_per_multiprocessor(threads, shared as usize, None);
        let grid = gpu.sms * fit.during("asking how many blocks fit")?.max(1);
        Ok(Self { function, rows, threads, shared, grid, joins: numerics == Numerics::Fast && rows < 64 })
    }
}

/// Shared memory of the tree kernel by rows a block; `tests/kernel_machine_code.rs` holds it against the machine code.
pub const TREE_SHARED: [(usize, u32); 3] = [(16, 98_304), (32, 98_304), (64, 101_376)];

/// Where blocks leave their pieces of a row tile: as many row tiles as a launch may write.
struct Partials {
    count: usize,
    o: CudaSlice<f32>,
    ml: CudaSlice<f32>,
}

impl Partials {
    /// Zeroed: a kernel that joins waits for what is not zero and leaves zeros behind; every element that the merge reads was written
    /// by the tree kernel before it.
    fn new(gpu: &Gpu, count: usize, rows: usize) -> Result<Self, CudaError> {
        let o = gpu.stream.alloc_zeros((count * rows * 512).max(1)).during("allocating partial outputs")?;
        let ml = gpu.stream.alloc_zeros((count * rows * 4).max(1)).during("allocating partial sums")?;
        Ok(Self { count, o, ml })
    }
}

/// Loaded kernels and their scratch.
pub struct Verify {
    limits: Limits,
    tuning: Tuning,
    heads_log2: u32,
    baseline: CudaFunction,
    fast: Tree,
    exact: Tree,
    merge_wide: CudaFunction,
    merge_mid: CudaFunction,
    merge_narrow: CudaFunction,
    /// Of `fast` where it joins.
    joined: Partials,
    /// Of whatever the merge comes after.
    merged: Partials,
    pieces: CudaSlice<i32>,
    ticket: CudaSlice<u64>,
}

impl Verify {
    /// Loads the kernels for launches like the largest one in `limits`, and allocates their scratch.
    pub fn new(gpu: &Gpu, limits: Limits, tuning: Tuning) -> Result<Self, CudaError> {
        let long = is_long(limits.batch, limits.batch * limits.rows_per_request, limits.batch * limits.prefix);
        Self::with_blocks(gpu, limits, tuning, block_rows(limits.batch, limits.rows_per_request * limits.heads, long))
    }

    /// The same, with blocks of `fast` that hold `fast_rows` query rows (or 64, the most).
    pub fn with_blocks(gpu: &Gpu, limits: Limits, tuning: Tuning, fast_rows: usize) -> Result<Self, CudaError> {
        check(&limits)?;
        let of_rows = |wanted: usize| *TREE_SHARED.iter().find(|(rows, _)| *rows >= wanted).unwrap_or(&TREE_SHARED[2]);
        let rows_wanted = limits.rows_per_request * limits.heads;
        let (fast, exact) = (Tree::load(gpu, of_rows(fast_rows), Numerics::Fast)?, Tree::load(gpu, of_rows(rows_wanted), Numerics::Exact)?);
        let merge_module = gpu.module("verify_merge")?;
        let of_fast = fast_partials(&limits, &fast);
        let of_exact = if limits.exact { exact_partials(&limits, &exact) } else { 0 };
        let (joined, merged) = if fast.joins { (of_fast, of_exact) } else { (0, of_exact.max(of_fast)) };
        Ok(Self {
            heads_log2: limits.heads.ilog2(),
            baseline: gpu.function(&gpu.module("verify_baseline")?, "verify_baseline", 0)?,
            merge_wide: gpu.function(&merge_module, "verify_merge_wide", 0)?,
            merge_mid: gpu.function(&merge_module, "verify_merge_mid", 0)?,
            merge_narrow: gpu.function(&merge_module, "verify_merge_narrow", 0)?,
            joined: Partials::new(gpu, joined, fast.rows)?,
            merged: Partials::new(gpu, merged, exact.rows)?,
            pieces: gpu.stream.alloc_zeros(limits.rows * 4).during("allocating the merge list")?,
            ticket: gpu.stream.clone_htod(&[FIRST_LAUNCH << 32]).during("numbering the launches")?,
            limits,
            tuning,
            fast,
            exact,
        })
    }

    /// Query rows (draft rows x heads) a block of `fast` works on.
    pub fn tile_rows(&self) -> usize {
        self.fast.rows
    }

    /// Enqueues one verify pass on the card's stream: one kernel for the baseline, one or two for the tree. Does not wait, copy or
    /// allocate. Refuses a call beyond the limits.
    ///
    /// # Safety
    /// The pointers of `call` must be valid for the shapes that its lengths on the device imply, until the work (or the last
    /// replay of a graph that captured it) is done.
    pub unsafe fn launch(&self, gpu: &Gpu, kernel: Kernel, numerics: Numerics, call: &Call<'_>) -> Result<(), CudaError> {
        self.check_call(numerics, call)?;
        let mut params = self.params(gpu, numerics, call);
        let heads = self.limits.heads as u32;
        let params_ptr = (&raw mut params).cast();
        match kernel {
            Kernel::Baseline => {
                let grid = (call.rows as u32, heads.div_ceil(16), 1);
                // SAFETY: the kernel takes one `VerifyParams`; the pointers in it are promised by the caller.
                unsafe { gpu.launch(&self.baseline, grid, 128, 0, &mut [params_ptr]) }
            }
            Kernel::Tree => {
                let tree = self.tree(numerics);
                let (mut row_map, mut tile_map) = (call.kv.row_map, call.kv.tile_map);
                let arguments = &mut [params_ptr, (&raw mut row_map).cast(), (&raw mut tile_map).cast()];
                // SAFETY: the kernel takes one `VerifyParams` and two tensor maps, and waits for what came before it.
                unsafe { gpu.launch_dependent(&tree.function, (tree.grid, 1, 1), tree.threads, tree.shared, arguments)? };
                if tree.joins {
                    return Ok(());
                }
                let mut tile_rows = tree.rows as i32;
                let arguments = &mut [params_ptr, (&raw mut tile_rows).cast()];
                let products = call.rows as u32 * heads;
                let (merge, grid, threads) = match products as usize {
                    _ if numerics == Numerics::Exact => (&self.merge_mid, (products, 4, 1), 128),
                    few if few <= WIDE_MERGE => (&self.merge_wide, (products, 4, 1), 512),
                    some if some <= MID_MERGE => (&self.merge_mid, (products, 4, 1), 128),
                    _ => (&self.merge_narrow, (products, 1, 1), 32),
                };
                // SAFETY: all merge kernels take one `VerifyParams` and one int, and wait for the tree kernel first.
                unsafe { gpu.launch_dependent(merge, grid, threads, 0, arguments) }
            }
        }
    }

    fn tree(&self, numerics: Numerics) -> &Tree {
        if numerics == Numerics::Exact { &self.exact } else { &self.fast }
    }

    fn params(&self, gpu: &Gpu, numerics: Numerics, call: &Call<'_>) -> VerifyParams {
        let partials = if self.tree(numerics).joins { &self.joined } else { &self.merged };
        VerifyParams {
            q: call.q,
            kv: call.kv.base,
            out: call.out,
            lse: call.lse,
            qo_indptr: call.qo_indptr,
            kv_begin: call.kv_begin,
            kv_len: call.kv_len,
            kv_indices: call.kv_indices,
            draft_slots: call.draft_slots,
            mask: call.mask,
            partial_o: partials.o.device_ptr(&gpu.stream).0,
            partial_ml: partials.ml.device_ptr(&gpu.stream).0,
            pieces: self.pieces.device_ptr(&gpu.stream).0,
            batch: call.batch as i32,
            rows: call.rows as i32,
            slots: call.kv.slots as i32,
            heads_log2: self.heads_log2 as i32,
            scale_log2: call.scale * std::f32::consts::LOG2_E,
            exact: (numerics == Numerics::Exact).into(),
            item_cost: self.tuning.item_cost,
            min_tiles: self.tuning.min_tiles,
            split_root: self.tuning.split_root,
            partials: partials.count as i32,
            ticket: self.ticket.device_ptr(&gpu.stream).0,
        }
    }

    fn check_call(&self, numerics: Numerics, call: &Call<'_>) -> Result<(), CudaError> {
        let over = |what, found: usize, most: usize| {
            let wanted = format!("at most {most}, as allocated at start");
            (found > most).then_some(CudaError::Limit { what, found: found as u64, wanted })
        };
        let fault = over("requests in a verify launch", call.batch, self.limits.batch)
            .or_else(|| over("draft rows in a verify launch", call.rows, self.limits.rows))
            .or_else(|| over("exact numerics", usize::from(numerics == Numerics::Exact), usize::from(self.limits.exact)));
        fault.map_or(Ok(()), Err)
    }
}

fn check(limits: &Limits) -> Result<(), CudaError> {
    let between = |what, found: usize, low: usize, high: usize| {
        let wanted = format!("{low} to {high}");
        if (low..=high).contains(&found) { Ok(()) } else { Err(CudaError::Limit { what, found: found as u64, wanted }) }
    };
    between("requests", limits.batch, 1, MAX_BATCH)?;
    between("draft rows of a request", limits.rows_per_request, 1, MAX_ROWS)?;
    between("draft rows of all requests", limits.rows, limits.rows_per_request, MAX_BATCH * MAX_ROWS)?;
    between("longest prefix", limits.prefix, 0, 1 << 24)?;
    if !limits.heads.is_power_of_two() || !(4..=64).contains(&limits.heads) {
        return Err(CudaError::Limit { what: "heads per rank", found: limits.heads as u64, wanted: "4, 8, 16, 32 or 64".into() });
    }
    const { assert!(TREE_SHARED[0].1 <= SHARED_LIMIT && TREE_SHARED[1].1 <= SHARED_LIMIT && TREE_SHARED[2].1 <= SHARED_LIMIT) };
    Ok(())
}

/// Row tiles of a launch, at most; a joining kernel may choose tiles of 16.
fn row_tiles(limits: &Limits, rows: usize) -> usize {
    limits.rows * limits.heads / rows + limits.batch
}

/// Row tiles of partials that any `fast` launch within `limits` may write: at most one piece a block and one more a stream.
fn fast_partials(limits: &Limits, tree: &Tree) -> usize {
    tree.grid as usize + row_tiles(limits, if tree.joins { TREE_SHARED[0].0 } else { tree.rows })
}

/// The same for `exact`: one for every split of every stream.
fn exact_partials(limits: &Limits, tree: &Tree) -> usize {
    row_tiles(limits, tree.rows) * exact_splits(limits.prefix + limits.rows_per_request)
}

/// Splits of a row at position `tokens - 1`: 128 tokens each up to 8192, then 32 an octave. Mirror of `split_of` in schedule.cuh.
pub fn exact_splits(tokens: usize) -> usize {
    const BASE: usize = 512;
    let tile = tokens.saturating_sub(1) / TILE;
    if tile < BASE {
        return tile / 8 + 1;
    }
    let octave = tile.ilog2() as usize - 9;
    64 + 32 * octave + (tile - (BASE << octave)) / ((BASE / 32) << octave) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { batch: 8, rows: 128, rows_per_request: 16, heads: 8, prefix: 4096, exact: true };

    #[test]
    fn splits_cover_positions_in_order_and_grow_by_octave() {
        assert_eq!(exact_splits(1), 1);
        assert_eq!(exact_splits(128), 1);
        assert_eq!(exact_splits(129), 2);
        assert_eq!(exact_splits(8192), 64);
        assert_eq!(exact_splits(8193), 65);
        assert_eq!(exact_splits(16384), 96);
        assert_eq!(exact_splits(262144), 224);
        assert!((1..300_000).step_by(16).is_sorted_by_key(exact_splits));
    }

    #[test]
    fn few_requests_take_small_blocks_and_many_take_blocks_that_hold_them() {
        assert_eq!(block_rows(1, 8, false), 8);
        assert_eq!(block_rows(1, 512, false), 32);
        assert_eq!(block_rows(1, 512, true), 512);
        assert_eq!(block_rows(8, 128, false), 32);
        assert_eq!(block_rows(8, 128, true), 128);
        assert_eq!(block_rows(8, 256, false), 256);
        assert_eq!(block_rows(9, 128, false), 128);
    }

    #[test]
    fn a_launch_of_many_rows_is_long_sooner() {
        assert!(is_long(1, 8, 65536) && !is_long(1, 8, 32768));
        assert!(is_long(1, 16, 16384) && !is_long(1, 16, 8192));
        assert!(is_long(1, 64, 8192) && !is_long(1, 64, 4096));
        assert!(is_long(4, 64, 4 * 8192) && !is_long(8, 128, 8 * 4096));
        assert!(is_long(8, 8, 65536) && !is_long(0, 0, 0));
    }

    #[test]
    fn limits_outside_what_the_kernels_take_are_refused_by_name() {
        assert!(check(&LIMITS).is_ok());
        for (bad, word) in [
            (Limits { batch: 129, ..LIMITS }, "requests: found 129"),
            (Limits { rows_per_request: 65, ..LIMITS }, "draft rows of a request: found 65"),
            (Limits { heads: 12, ..LIMITS }, "heads per rank: found 12, wanted 4, 8, 16, 32 or 64"),
            (Limits { heads: 2, ..LIMITS }, "heads per rank: found 2"),
            (Limits { rows: 8, ..LIMITS }, "draft rows of all requests: found 8"),
        ] {
            assert!(check(&bad).unwrap_err().to_string().contains(word), "{word}");
        }
    }
}
