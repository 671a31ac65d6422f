//! INT4 experts of one layer on the card, and the grouped products over the rows that chose them (kernels/products/experts.cu).

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;

use super::super::buffers::{Argument, CudaMatrix, View};
use super::super::device::CudaDevice;
use super::super::error::During;
use super::super::gpu::Gpu;
use super::super::scratch::Use;
use super::linear::cut;
use super::routing::{WorkList, rows_per_entry};
use super::{Products, enqueue_struct, experts_many, int};
use crate::device::host::HostExpert;
use crate::device::{DeviceError, Result};
use crate::model::tensor::Int4Matrix;

/// Columns of one step of INT4 weights and its bytes: nibbles and scales of 16 rows.
pub(super) const STEP: usize = 128;
pub(super) const STEP_BYTES: usize = 1152;
const GROUP: usize = 32;
/// Experts that go up in one array.
const TOGETHER: usize = 64;
/// Warps of a block, each with its slice of k.
pub(super) const WARPS: usize = 8;
/// Bytes of the weight rings of one block, first and second product.
const UP_RINGS: usize = WARPS * 3 * STEP_BYTES;
/// The same of the first product for a row alone.
const ALONE_RINGS: usize = WARPS * 2 * STEP_BYTES;
const DOWN_RINGS: usize = WARPS * 6 * STEP_BYTES;
/// The same of the second product where it sums up by itself, and the rows that its kernels take, with eight choices each.
const SUM_RINGS: usize = WARPS * 4 * STEP_BYTES;
const SUMMING: [usize; 3] = [8, 16, 32];

/// Routed experts of one layer. Gate and up rows are interleaved 8 by 8 in tiles of 16 rows.
pub struct CudaExperts {
    pub(super) gate_up: CudaSlice<u8>,
    pub(super) down: CudaSlice<u8>,
    pub experts: usize,
    pub inner: usize,
    pub hidden: usize,
}

/// Mirror of `struct GateUp` in experts.cuh.
#[repr(C)]
pub(super) struct GateUp {
    weights: CUdeviceptr,
    x: CUdeviceptr,
    factors: CUdeviceptr,
    inner: CUdeviceptr,
    list: CUdeviceptr,
    places: i32,
    k: i32,
    tiles: i32,
    steps: i32,
    slice: i32,
    top_k: i32,
    rows: i32,
    unused: i32,
}

/// Mirror of `struct DownSum` in experts.cu.
#[repr(C)]
struct DownSum {
    down: Down,
    shared: CUdeviceptr,
    x: CUdeviceptr,
    x_stride: i64,
    out: CUdeviceptr,
    out_stride: i64,
    units: i32,
    slice: i32,
    rows: i32,
    top_k: i32,
}

/// Mirror of `struct Down` in experts.cuh.
#[repr(C)]
pub(super) struct Down {
    weights: CUdeviceptr,
    inner: CUdeviceptr,
    outer: CUdeviceptr,
    list: CUdeviceptr,
    places: i32,
    k: i32,
    tiles: i32,
    steps: i32,
}

fn gate_up_bytes(inner: usize, hidden: usize) -> usize {
    inner / 8 * hidden.div_ceil(STEP) * STEP_BYTES
}

fn down_bytes(inner: usize, hidden: usize) -> usize {
    hidden / 16 * inner.div_ceil(STEP) * STEP_BYTES
}

impl CudaExperts {
    /// Random experts made on the card, weights around `scale`: for benches without a checkpoint.
    pub fn random(device: &CudaDevice, experts: usize, inner: usize, hidden: usize, scale: f32, seed: u64) -> Result<Self> {
        let new = Self::empty(&device.gpu, experts, inner, hidden)?;
        for (data, seed) in [(&new.gate_up, 2 * seed), (&new.down, 2 * seed + 1)] {
            let steps = (data.len() / STEP_BYTES) as u64;
            let mut values = [data.device_ptr(&device.gpu.stream).0.bits(), steps.bits(), scale.bits(), seed.bits()];
            let grid = (8 * device.gpu.sms, 1, 1);
            // SAFETY: the parameters of random_int4; the buffers outlive the launch.
            unsafe { device.gpu.enqueue(&device.products.random_int4, grid, 256, 0, &mut values)? };
        }
        Ok(new)
    }

    fn empty(gpu: &Gpu, experts: usize, inner: usize, hidden: usize) -> Result<Self> {
        if experts == 0 || inner == 0 || hidden == 0 || !inner.is_multiple_of(GROUP) || !hidden.is_multiple_of(GROUP) {
            return Err(DeviceError(format!(
                "{experts} experts of {inner} x {hidden}: the CUDA device wants both widths to be multiples of {GROUP}; use fewer ranks"
            )));
        }
        // SAFETY: the callers' kernels write all of them.
        let (gate_up, down) = unsafe {
            let of = |bytes: usize| gpu.stream.alloc::<u8>(experts * bytes).during("allocating experts");
            (of(gate_up_bytes(inner, hidden))?, of(down_bytes(inner, hidden))?)
        };
        Ok(Self { gate_up, down, experts, inner, hidden })
    }

    /// Bytes of one expert that a pass reads when it has rows: nibbles and scales of its three matrices.
    pub fn bytes_per_expert(&self) -> usize {
        let weights = 3 * self.inner * self.hidden;
        weights / 2 + weights / GROUP * 2
    }

    pub fn bytes(&self) -> usize {
        self.experts * self.bytes_per_expert()
    }

    /// Gate, up and down of one expert as the kernels unpack them, row-major: for tests.
    pub fn unpack(&self, device: &CudaDevice, expert: usize) -> Result<[Vec<bf16>; 3]> {
        let (inner, hidden) = (self.inner, self.hidden);
        let gate_up = self.unpack_tiles(device, &self.gate_up, expert * gate_up_bytes(inner, hidden), inner / 8, hidden)?;
        let down = self.unpack_tiles(device, &self.down, expert * down_bytes(inner, hidden), hidden / 16, inner)?;
        let half = |upper: usize| -> Vec<bf16> {
            (0..inner).flat_map(|row| gate_up[(row / 8 * 16 + upper * 8 + row % 8) * hidden..][..hidden].to_vec()).collect()
        };
        Ok([half(0), half(1), down])
    }

    fn unpack_tiles(&self, device: &CudaDevice, data: &CudaSlice<u8>, at: usize, tiles: usize, k: usize) -> Result<Vec<bf16>> {
        let (gpu, steps) = (&device.gpu, k.div_ceil(STEP));
        let out = gpu.stream.alloc_zeros::<bf16>(tiles * 16 * steps * STEP).during("allocating unpacked experts")?;
        let from = data.device_ptr(&gpu.stream).0 + at as u64;
        let mut values = [from.bits(), int(tiles).bits(), int(steps).bits(), out.device_ptr(&gpu.stream).0.bits()];
        // SAFETY: the parameters of unpack_int4; `out` lives until the copy below has waited.
        unsafe { gpu.enqueue(&device.products.unpack_int4, (gpu.sms, 1, 1), 256, 0, &mut values)? };
        let all = gpu.stream.clone_dtoh(&out).during("reading unpacked experts")?;
        Ok(all.chunks_exact(steps * STEP).flat_map(|row| row[..k].to_vec()).collect())
    }
}

/// A raw INT4 matrix on the card: where its nibbles and its scales lie.
#[derive(Clone, Copy)]
struct Raw {
    packed: CUdeviceptr,
    scales: CUdeviceptr,
}

/// Where a matrix in tiles goes, and where its refused scales are told.
#[derive(Clone, Copy)]
struct Place {
    to: CUdeviceptr,
    refused: CUdeviceptr,
}

fn tile(gpu: &Gpu, products: &Products, raw: Raw, pair: Option<Raw>, tiles: usize, k: usize, place: Place) -> Result<()> {
    let pair = pair.unwrap_or(Raw { packed: 0, scales: 0 });
    let steps = k.div_ceil(STEP);
    let raw = [raw.packed, raw.scales, pair.packed, pair.scales].map(Argument::bits);
    let Place { to, refused } = place;
    let mut values = [raw[0], raw[1], raw[2], raw[3], int(tiles).bits(), int(k).bits(), int(steps).bits(), to.bits(), refused.bits()];
    // SAFETY: the parameters of tile_int4; the raw matrices are freed in stream order, after it.
    unsafe { gpu.enqueue(&products.tile_int4, ((tiles * steps).div_ceil(8) as u32, 1, 1), 256, 0, &mut values)? };
    Ok(())
}

impl CudaDevice {
    pub(in crate::device::cuda) fn upload_experts(&self, weights: &[HostExpert<'_>]) -> Result<CudaExperts> {
        let first = weights.first().ok_or_else(|| DeviceError("a layer without experts".into()))?;
        let (inner, hidden) = (first.gate.rows, first.gate.columns);
        let fits = |m: &Int4Matrix<'_>, rows, columns| m.rows == rows && m.columns == columns && m.group == GROUP;
        if !weights.iter().all(|e| fits(&e.gate, inner, hidden) && fits(&e.up, inner, hidden) && fits(&e.down, hidden, inner)) {
            return Err(DeviceError(format!("experts of one layer differ in shape, or their groups are not of {GROUP} weights")));
        }
        let experts = CudaExperts::empty(&self.gpu, weights.len(), inner, hidden)?;
        let (gate_up, down_at) = (experts.gate_up.device_ptr(&self.gpu.stream).0, experts.down.device_ptr(&self.gpu.stream).0);
        let refused = self.gpu.stream.alloc_zeros::<u32>(1).during("allocating a flag")?;
        let place = |to: u64| Place { to, refused: refused.device_ptr(&self.gpu.stream).0 };
        for (batch, chunk) in weights.chunks(TOGETHER).enumerate() {
            let parts: Vec<&[u8]> = chunk
                .iter()
                .flat_map(|expert| [&expert.gate, &expert.up, &expert.down])
                .flat_map(|matrix| [&matrix.packed[..], bytemuck::cast_slice(&matrix.scales)])
                .collect();
            let (_raw, places) = self.upload_parts(&parts)?;
            for (j, at) in places.chunks_exact(6).enumerate() {
                let [gate, up, down] = [0, 2, 4].map(|part| Raw { packed: at[part], scales: at[part + 1] });
                let i = (batch * TOGETHER + j) as u64;
                let to = gate_up + i * gate_up_bytes(inner, hidden) as u64;
                tile(&self.gpu, &self.products, gate, Some(up), inner / 8, hidden, place(to))?;
                let to = down_at + i * down_bytes(inner, hidden) as u64;
                tile(&self.gpu, &self.products, down, None, hidden / 16, inner, place(to))?;
            }
        }
        match self.gpu.stream.clone_dtoh(&refused).during("reading a flag")?[0] {
            0 => Ok(experts),
            bits => Err(DeviceError(format!(
                "a scale of an expert's weights is {:e}, the CUDA kernels want 0 or 2^-110 to 2^10; check the checkpoint",
                f32::from_bits(bits)
            ))),
        }
    }

    /// `silu(gate x) * up x` of every choice in the list, bf16 in sorted order, from bf16 rows `x` times `factors` (0 = none). Returns
    /// where it lies.
    pub(super) fn experts_up(
        &self,
        experts: &CudaExperts,
        x: CUdeviceptr,
        factors: CUdeviceptr,
        list: &WorkList,
        top_k: usize,
    ) -> Result<CUdeviceptr> {
        let gpu = &self.gpu;
        let tiles = experts.inner / 8;
        let inner = self.scratch.borrow_mut().get(gpu, Use::Inner, list.places * experts.inner * size_of::<bf16>())?;
        if list.rows_per_entry == experts_many::ROWS {
            self.experts_up_many(experts, [x, factors], inner, list, top_k)?;
            return Ok(inner);
        }
        let mut parameters = self.gate_up(experts, [x, factors], inner, list, top_k);
        let (kernel, rings) = match (list.built, list.rows) {
            (true, 1) => (&self.products.gate_up_alone, ALONE_RINGS),
            (true, _) => (&self.products.gate_up_built, UP_RINGS),
            (false, _) => (&self.products.gate_up[list.rows_per_entry.ilog2() as usize - 3], UP_RINGS),
        };
        let grid = (list.blocks_per_multiprocessor() * gpu.sms).min((list.entries * tiles) as u32);
        let shared = rings + 2 * WARPS * (list.rows_per_entry / 8) * 512;
        // SAFETY: `GateUp` mirrors the kernel's struct; scratch has room for every place the list can have.
        unsafe { enqueue_struct(gpu, kernel, (grid, 1, 1), 256, shared, 1, &mut parameters)? };
        Ok(inner)
    }

    /// The weighted outputs of the choices on top of the shared expert's, a matrix and its input, into `out`: the second step where
    /// [`sums_by_itself`] says so.
    /// Must follow [`Self::experts_up`] directly.
    pub(super) fn experts_down_sum(
        &self,
        experts: &CudaExperts,
        inner: CUdeviceptr,
        list: &WorkList,
        top_k: usize,
        (shared, x): (&CudaMatrix, View),
        out: View,
    ) -> Result<()> {
        let gpu = &self.gpu;
        let (tiles, units) = (experts.hidden / 16, shared.k / 32);
        let (_, slice) = cut(tiles, units);
        let mut sum = DownSum {
            down: self.down(experts, inner, 0, list),
            shared: shared.at(gpu),
            x: x.at,
            x_stride: x.stride as i64,
            out: out.at,
            out_stride: out.stride as i64,
            units: int(units),
            slice: int(slice),
            rows: int(list.rows),
            top_k: int(top_k),
        };
        let kernel = summing_kernel(list.rows, top_k).ok_or_else(|| DeviceError(format!("{} rows: too many to sum", list.rows)))?;
        let words = WARPS * (slice * 1024).max(SUMMING[kernel] / 8 * 512);
        let bytes = SUM_RINGS + words.max(list.places * 16 * size_of::<f32>());
        // SAFETY: `DownSum` mirrors the kernel's struct; `out` has a row for every row of the bound.
        unsafe { enqueue_struct(gpu, &self.products.down_sum[kernel], (tiles as u32, 1, 1), 256, bytes, 1, &mut sum)? };
        Ok(())
    }

    pub(super) fn gate_up(
        &self,
        experts: &CudaExperts,
        [x, factors]: [CUdeviceptr; 2],
        inner: CUdeviceptr,
        list: &WorkList,
        top_k: usize,
    ) -> GateUp {
        let steps = experts.hidden.div_ceil(STEP);
        GateUp {
            weights: experts.gate_up.device_ptr(&self.gpu.stream).0,
            x,
            factors,
            inner,
            list: list.at,
            places: int(list.places),
            k: int(experts.hidden),
            tiles: int(experts.inner / 8),
            steps: int(steps),
            slice: int(steps.div_ceil(WARPS)),
            top_k: int(top_k),
            rows: int(list.rows),
            unused: 0,
        }
    }

    pub(super) fn down(&self, experts: &CudaExperts, inner: CUdeviceptr, outer: CUdeviceptr, list: &WorkList) -> Down {
        Down {
            weights: experts.down.device_ptr(&self.gpu.stream).0,
            inner,
            outer,
            list: list.at,
            places: int(list.places),
            k: int(experts.inner),
            tiles: int(experts.hidden / 16),
            steps: int(experts.inner.div_ceil(STEP)),
        }
    }

    /// Each choice's output `[places, hidden]` f32, unweighted. Returns where it lies. Must follow [`Self::experts_up`] directly: the
    /// kernel reads the list before its predecessor has ended.
    pub(super) fn experts_down(&self, experts: &CudaExperts, inner: CUdeviceptr, list: &WorkList) -> Result<CUdeviceptr> {
        let gpu = &self.gpu;
        let tiles = experts.hidden / 16;
        let outer = self.scratch.borrow_mut().get(gpu, Use::Outer, list.places * experts.hidden * size_of::<f32>())?;
        if list.rows_per_entry == experts_many::ROWS {
            self.experts_down_many(experts, inner, outer, list)?;
            return Ok(outer);
        }
        let mut parameters = self.down(experts, inner, outer, list);
        let grid = (list.blocks_per_multiprocessor() * gpu.sms).min((list.entries * tiles).div_ceil(WARPS) as u32);
        let kernel = &self.products.down[list.rows_per_entry.ilog2() as usize - 3];
        // SAFETY: `Down` mirrors the kernel's struct; scratch has room for every place.
        unsafe { enqueue_struct(gpu, kernel, (grid, 1, 1), 256, DOWN_RINGS, 1, &mut parameters)? };
        Ok(outer)
    }
}

/// Which kernel sums up that many rows; `None`: none does.
fn summing_kernel(rows: usize, top_k: usize) -> Option<usize> {
    SUMMING.into_iter().position(|most| rows <= most && rows * top_k <= 8 * most)
}

/// Whether the second grouped product can take the shared expert and the weighted sum along: up to 32 rows, and a shared down that is not
/// cut between blocks. Both grouped products then build their lists themselves.
pub(super) fn sums_by_itself(experts: &CudaExperts, shared: &CudaMatrix, rows: usize, top_k: usize) -> bool {
    let (groups, slice) = cut(shared.n.div_ceil(16), shared.k / 32);
    let shapes = groups == 1
        && slice <= 2
        && shared.n == experts.hidden
        && experts.hidden.is_multiple_of(STEP)
        && experts.inner.is_multiple_of(2 * STEP);
    shapes && rows_per_entry(rows, top_k, experts.experts, false) == 8 && summing_kernel(rows, top_k).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirrors_have_the_size_the_kernels_assert() {
        assert_eq!((size_of::<GateUp>(), size_of::<Down>(), size_of::<DownSum>()), (72, 48, 104));
    }

    #[test]
    fn an_expert_of_k26_takes_its_checkpoint_bytes() {
        assert_eq!(384 * (gate_up_bytes(256, 7168) + down_bytes(256, 7168)), 384 * (3 * 256 * 7168 / 2 + 3 * 256 * 7168 / 32 * 2));
    }
}
