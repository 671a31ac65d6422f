//! Which experts each row takes (kernels/products/routing.cu): router logits in, a work list grouped by expert out, all on the card.

use cudarc::driver::DevicePtr;
use cudarc::driver::sys::CUdeviceptr;

use super::super::buffers::CudaVector;
use super::super::device::CudaDevice;
use super::super::rows::CudaRows;
use super::super::scratch::Use;
use super::{enqueue_struct, experts_many, int};
use crate::device::{DeviceError, Result};

/// Mirror of `struct Routing` in routing.cu.
#[repr(C)]
struct Routing {
    gates: CUdeviceptr,
    bias: CUdeviceptr,
    list: CUdeviceptr,
    counts: CUdeviceptr,
    arrived: CUdeviceptr,
    places: i32,
    rows: i32,
    experts: i32,
    top_k: i32,
    rows_per_entry: i32,
    scaling: f32,
    uniform: i32,
    layer: i32,
    built: i32,
    unused: i32,
}

/// What a router chooses by.
pub(super) struct Router<'a> {
    pub gates: CUdeviceptr,
    pub bias: &'a CudaVector,
    pub experts: usize,
    pub top_k: usize,
    pub scaling: f32,
    pub layer: usize,
    /// The kernels of experts_many.rs take the experts.
    pub many: bool,
    /// Whoever needs the list builds it.
    pub built: bool,
}

/// The work list of the layer enqueued last.
#[derive(Clone, Copy, Debug)]
pub struct WorkList {
    pub at: CUdeviceptr,
    /// Room: `rows * top_k`, rounded up.
    pub places: usize,
    /// Rows of the pass.
    pub rows: usize,
    /// Rows that one entry holds at most: 8, 16, 32 or 64.
    pub rows_per_entry: usize,
    /// Most entries the list can have.
    pub entries: usize,
    /// Only the choices are there: whoever needs the rest of the list builds it.
    pub built: bool,
}

impl WorkList {
    /// Blocks of the grouped products that fit a multiprocessor: their kernels are bounded in registers for it.
    pub(super) fn blocks_per_multiprocessor(&self) -> u32 {
        if self.rows_per_entry == 8 { 3 } else { 2 }
    }
}

/// Routes read back: for tests.
#[derive(Clone, Debug, PartialEq)]
pub struct HostRoutes {
    /// `top_k` experts per row, best first.
    pub ids: Vec<i32>,
    pub weights: Vec<f32>,
    /// Experts that have rows, ascending, with how many.
    pub experts: Vec<(i32, i32)>,
}

const HEADER: usize = 256;
const ENTRY: usize = 16;
const MAX_EXPERTS: usize = 512;
/// Up to so many rows the kernels for few rows of an expert are as fast.
const MOST_IN_A_ROUND: usize = 512;
/// Choices of one row.
const MAX_TOP: usize = 32;

/// Rows of one entry: enough that an expert's weights are unpacked once for most of its rows. `many`: the kernels of
/// experts_many.rs take these experts.
pub(super) fn rows_per_entry(rows: usize, top_k: usize, experts: usize, many: bool) -> usize {
    match rows * top_k / experts {
        0..=4 => 8,
        5..=10 => 16,
        16.. if many && rows > MOST_IN_A_ROUND => experts_many::ROWS,
        _ => 32,
    }
}

impl CudaDevice {
    pub(super) fn route(&self, router: &Router<'_>, rows: &CudaRows) -> Result<WorkList> {
        let (bound, experts, top_k) = (rows.bound, router.experts, router.top_k);
        let places = (bound * top_k).next_multiple_of(64);
        if experts > MAX_EXPERTS || top_k > MAX_TOP || places > usize::from(u16::MAX) {
            return Err(DeviceError(format!(
                "{bound} rows with {top_k} of {experts} experts: the CUDA device takes {MAX_EXPERTS} experts, {MAX_TOP} of them, and 65535 choices a pass; use smaller prompt chunks"
            )));
        }
        let bytes = HEADER + places * (4 + 4 + 4) + (places + 1) * ENTRY;
        let at = self.scratch.borrow_mut().get(&self.gpu, Use::Routes, bytes)?;
        let rows_per_entry = rows_per_entry(bound, top_k, experts, router.many);
        let mut routing = Routing {
            gates: router.gates,
            bias: router.bias.at(&self.gpu),
            list: at,
            counts: rows.counts.device_ptr(&self.gpu.stream).0,
            arrived: self.products.arrived.device_ptr(&self.gpu.stream).0,
            places: int(places),
            rows: int(bound),
            experts: int(experts),
            top_k: int(top_k),
            rows_per_entry: int(rows_per_entry),
            scaling: router.scaling,
            uniform: i32::from(self.products.uniform_routing.get()),
            layer: int(router.layer),
            built: i32::from(router.built),
            unused: 0,
        };
        // SAFETY: `Routing` mirrors the kernel's struct; the list has room for every choice of the bound.
        unsafe { enqueue_struct(&self.gpu, &self.products.route, (bound as u32, 1, 1), MAX_EXPERTS as u32, 0, 1, &mut routing)? };
        let entries = (bound * top_k).min(experts + bound * top_k / rows_per_entry);
        Ok(WorkList { at, places, rows: bound, rows_per_entry, entries, built: router.built })
    }

    /// Routes of the first `rows` rows of the layer run last, whose pass had `bound` rows: for tests.
    pub fn read_routes(&self, bound: usize, rows: usize, top_k: usize) -> Result<HostRoutes> {
        let places = (bound * top_k).next_multiple_of(64);
        let bytes = HEADER + places * 12 + (places + 1) * ENTRY;
        let at = self.scratch.borrow_mut().get(&self.gpu, Use::Routes, bytes)?;
        let mut raw = vec![0u8; bytes];
        self.gpu.synchronize()?;
        // SAFETY: scratch of at least this many bytes, and nothing runs.
        unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut raw, at) }
            .map_err(|source| super::super::error::CudaError::Driver { what: "reading routes", source })?;
        let word = |at: usize| i32::from_le_bytes(raw[at..at + 4].try_into().expect("four bytes"));
        let ids: Vec<i32> = (0..rows * top_k).map(|i| word(HEADER + 4 * i)).collect();
        let mut counts = std::collections::BTreeMap::new();
        for &id in ids.iter().filter(|&&id| id >= 0) {
            *counts.entry(id).or_insert(0) += 1;
        }
        Ok(HostRoutes {
            ids,
            weights: (0..rows * top_k).map(|i| f32::from_bits(word(HEADER + 4 * (places + i)) as u32)).collect(),
            experts: counts.into_iter().collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_has_the_size_the_kernel_asserts() {
        assert_eq!(size_of::<Routing>(), 80);
    }
}
