//! Dense products for many rows: activations rounded once (kernels/products/pack.cu), then tiles of weight rows x activation rows
//! (kernels/products/wide.cu). Same sums, bit for bit, as the kernels for few rows.

use cudarc::driver::CudaFunction;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr};

use super::super::buffers::View;
use super::super::device::CudaDevice;
use super::super::error::{CudaError, During};
use super::super::gpu::Gpu;
use super::super::scratch::Use;
use super::linear::{Dense, SLICES};
use super::{enqueue_struct, int};
use crate::device::Result;

/// Rows of one block of packed activations.
const PACKED_ROWS: usize = 32;
/// Bytes of a unit of k (32 weights) of one row.
const ROW_UNIT: usize = 64;
/// More stages than this are of no use.
const MAX_STAGES: usize = 16;
/// Shared memory that the driver and the barriers take of each block.
const RESERVED: usize = 1536;

/// A kernel whose block works on a tile of `weights x rows`.
#[derive(Debug)]
struct Tile {
    name: &'static str,
    weights: usize,
    rows: usize,
    threads: u32,
    /// Units of a stage of its ring.
    stage: usize,
    /// Takes `Mode::Precise`.
    pairs: bool,
    /// Microseconds of a launch beside the units, and of a unit where 1, 2, ... blocks share a multiprocessor: as many as registers
    /// allow. Measured on an H200; only their ratios matter.
    start: f32,
    unit: &'static [f32],
}

const TILES: [Tile; 6] = [
    tile("wide_64x128", [64, 128], 128, 4, false, 6.8, &[0.35, 0.49]),
    tile("wide_64x64", [64, 64], 128, 4, false, 4.5, &[0.24, 0.31, 0.42]),
    tile("wide_32x64", [32, 64], 128, 4, false, 3.4, &[0.20, 0.24, 0.32, 0.40]),
    tile("wide_32x32", [32, 32], 64, 4, false, 3.5, &[0.20, 0.22, 0.24, 0.25, 0.31, 0.37]),
    tile("wide_64x64_pairs", [64, 64], 128, 2, true, 5.0, &[0.34, 0.50]),
    tile("wide_32x32_pairs", [32, 32], 64, 4, true, 4.0, &[0.26, 0.28, 0.32, 0.36, 0.50, 0.60]),
];

const fn tile(
    name: &'static str,
    [weights, rows]: [usize; 2],
    threads: u32,
    stage: usize,
    pairs: bool,
    start: f32,
    unit: &'static [f32],
) -> Tile {
    Tile { name, weights, rows, threads, stage, pairs, start, unit }
}

impl Tile {
    fn stage_bytes(&self) -> usize {
        self.stage * ROW_UNIT * (self.weights + self.rows * if self.pairs { 2 } else { 1 })
    }

    /// What it takes at least: two stages, and room for the sums of the tile afterwards.
    fn least_bytes(&self) -> usize {
        (2 * self.stage_bytes()).max(self.sums_bytes())
    }

    fn sums_bytes(&self) -> usize {
        self.rows * (self.weights + 4) * size_of::<f32>()
    }

    /// Blocks of a multiprocessor with `shared` bytes, by registers and by its least ring.
    fn together(&self, shared: usize) -> usize {
        (shared / (self.least_bytes() + RESERVED)).min(self.unit.len())
    }

    /// Blocks for matrices of `heights` rows.
    fn places(&self, heights: &[usize]) -> usize {
        heights.iter().map(|n| n.next_multiple_of(16).div_ceil(self.weights)).sum()
    }
}

/// A multiprocessor's and a block's most shared memory, and how many multiprocessors there are.
#[derive(Clone, Copy, Debug)]
struct Room {
    shared: usize,
    block: usize,
    count: usize,
}

/// A launch: which tile, its ring, its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    tile: usize,
    ring: usize,
    grid: (u32, u32, u32),
}

/// The launch that is expected to take the shortest time: full waves of blocks, then a last one that shares multiprocessors less.
fn plan(room: Room, heights: &[usize], rows: usize, groups: usize, units: usize, pairs: bool) -> Option<Plan> {
    let fits = |tile: &Tile| tile.pairs == pairs && tile.least_bytes() <= room.block && tile.together(room.shared) > 0;
    let time = |tile: &Tile| {
        let blocks = groups * rows.div_ceil(tile.rows) * tile.places(heights);
        let most = tile.together(room.shared);
        let (waves, rest) = (blocks / (most * room.count), blocks % (most * room.count));
        let last = if rest == 0 { 0.0 } else { tile.unit[rest.div_ceil(room.count) - 1] };
        tile.start + (waves as f32 * tile.unit[most - 1] + last) * units.div_ceil(groups) as f32
    };
    let (index, tile) = TILES.iter().enumerate().filter(|(_, tile)| fits(tile)).min_by(|a, b| time(a.1).total_cmp(&time(b.1)))?;
    let (chunks, places) = (rows.div_ceil(tile.rows), tile.places(heights));
    // Blocks that share a multiprocessor share its memory; the deeper the ring, the better it hides the way of weights.
    let together = (groups * chunks * places).div_ceil(room.count).min(tile.together(room.shared));
    let stages = ((room.shared / together - RESERVED).min(room.block) / tile.stage_bytes()).clamp(2, MAX_STAGES);
    let ring = (stages * tile.stage_bytes()).max(tile.sums_bytes());
    Some(Plan { tile: index, ring, grid: (groups as u32, chunks as u32, places as u32) })
}

/// Mirror of `struct Pack` in packed.cuh.
#[repr(C)]
struct Pack {
    x: CUdeviceptr,
    x_stride: i64,
    packed: CUdeviceptr,
    rest: CUdeviceptr,
    rounded: CUdeviceptr,
    rows: i32,
    units: i32,
}

/// Mirror of `struct Wide` in packed.cuh.
#[repr(C)]
struct Wide {
    dense: Dense,
    packed: CUdeviceptr,
    rest: CUdeviceptr,
    ring: i64,
}

/// The kernels of this file and the card's room for them.
pub(super) struct WideKernels {
    pack: CudaFunction,
    /// As in `TILES`.
    tiles: Vec<CudaFunction>,
    room: Room,
}

impl WideKernels {
    pub fn load(gpu: &Gpu) -> std::result::Result<Self, CudaError> {
        let attribute = |which| gpu.context.attribute(which).during("asking for a card's shared memory").map(|bytes| bytes as usize);
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?;
        let block = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? - RESERVED;
        let module = gpu.module("products_wide")?;
        let tiles = TILES.iter().map(|tile| gpu.function(&module, tile.name, block as u32)).collect::<std::result::Result<_, _>>()?;
        let pack = gpu.function(&gpu.module("products_pack")?, "pack", 0)?;
        Ok(Self { pack, tiles, room: Room { shared, block, count: gpu.sms as usize } })
    }
}

/// Rows beyond which every product goes here.
pub(super) const MOST_NARROW: usize = 384;

/// Whether a product with `weights` weights and so many rows goes here. Small matrices are cheaper read again for every 32 rows;
/// in two terms (`pairs`) that holds longer.
pub(super) fn takes(rows: usize, weights: usize, pairs: bool) -> bool {
    rows > MOST_NARROW || weights >= 1 << 20 && rows > if pairs { 64 } else { 32 }
}

impl CudaDevice {
    /// The products that `dense` describes, of matrices of `heights` rows. `pairs`: one of them is precise.
    pub(super) fn wide_products(&self, x: View, mut dense: Dense, heights: &[usize], rows: usize, pairs: bool) -> Result<()> {
        let (gpu, kernels) = (&self.gpu, &self.products.wide);
        let (units, groups) = (dense.units as usize, dense.groups as usize);
        let plan = plan(kernels.room, heights, rows, groups, units, pairs).ok_or_else(|| {
            crate::device::DeviceError(format!(
                "{} bytes of shared memory a block are too few for products of many rows",
                kernels.room.block
            ))
        })?;
        let term = rows.next_multiple_of(PACKED_ROWS) * units * ROW_UNIT;
        let packed = self.scratch.borrow_mut().get(gpu, Use::Packed, if pairs { 2 * term } else { term })?;
        let rest = if pairs { packed + term as u64 } else { 0 };
        let mut pack =
            Pack { x: x.at, x_stride: x.stride as i64, packed, rest, rounded: dense.rounded, rows: int(rows), units: int(units) };
        let grid = (units.div_ceil(8) as u32, (rows.div_ceil(PACKED_ROWS) * 4) as u32, 1);
        // SAFETY: `Pack` mirrors the kernel's struct; scratch has room for the rows, rounded up.
        unsafe { enqueue_struct(gpu, &kernels.pack, grid, 256, 0, 1, &mut pack)? };
        debug_assert_eq!(units.div_ceil(groups * SLICES), dense.slice as usize);
        dense.rounded = 0;
        let mut wide = Wide { dense, packed, rest, ring: plan.ring as i64 };
        let tile = &TILES[plan.tile];
        // SAFETY: `Wide` mirrors the kernel's struct; weights, activations and scratch live as long as graphs of them.
        unsafe { enqueue_struct(gpu, &kernels.tiles[plan.tile], plan.grid, tile.threads, plan.ring, groups as u32, &mut wide)? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Room = Room { shared: 228 << 10, block: (227 << 10) - RESERVED, count: 132 };
    const RTX: Room = Room { shared: 100 << 10, block: (99 << 10) - RESERVED, count: 188 };

    #[test]
    fn every_launch_fits_its_card_and_covers_the_matrices() {
        for room in [H200, RTX] {
            for (heights, k, groups) in
                [(&[1536, 576][..], 7168, 2), (&[7168], 1024, 1), (&[384, 512], 7168, 4), (&[40], 64, 1), (&[163_840], 7168, 1)]
            {
                for rows in [33, 64, 65, 100, 128, 300, 512, 2048, 4096] {
                    for pairs in [false, true] {
                        let plan = plan(room, heights, rows, groups, k / 32, pairs).unwrap();
                        let tile = &TILES[plan.tile];
                        assert!(plan.ring <= room.block && plan.ring >= tile.least_bytes(), "{plan:?}");
                        assert!(plan.grid.1 as usize * tile.rows >= rows && tile.pairs == pairs);
                        assert!(plan.grid.2 as usize * tile.weights >= heights.iter().sum::<usize>());
                        assert!(tile.rows.is_multiple_of(PACKED_ROWS) && (tile.rows / groups).is_multiple_of(8));
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_get_small_tiles_and_many_rows_large_ones() {
        let of = |rows, heights: &[usize], groups| TILES[plan(H200, heights, rows, groups, 224, false).unwrap().tile].name;
        assert_eq!(of(64, &[1536, 576], 2), "wide_32x64");
        assert_eq!(of(512, &[1536, 576], 2), "wide_64x128");
        assert_eq!(of(2048, &[1536, 576], 2), "wide_64x128");
        assert_eq!(of(64, &[20_480], 1), "wide_64x64");
    }

    #[test]
    fn the_mirrors_have_the_size_the_kernels_assert() {
        assert_eq!((size_of::<Pack>(), size_of::<Wide>()), (48, 328));
    }
}
