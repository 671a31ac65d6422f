//! Row-wise operations: embeddings, norms, sums, copies and gathers of rows.

use cudarc::driver::DevicePtr;
use cudarc::driver::sys::CUdeviceptr;

use super::super::buffers::{Argument, CudaAct, CudaMatrix, CudaVector, View};
use super::super::device::CudaDevice;
use super::super::rows::CudaRows;
use super::int;
use crate::device::{DeviceError, Result};

/// The kernels take four columns at a time.
fn check_width(what: &str, width: usize) -> Result<()> {
    if width.is_multiple_of(4) {
        Ok(())
    } else {
        Err(DeviceError(format!("{what} of {width} columns: the CUDA device wants a multiple of 4")))
    }
}

fn pointer<T>(value: &mut T) -> *mut std::ffi::c_void {
    (&raw mut *value).cast()
}

/// Rows that one launch of scatter_rows moves at most.
pub const MOVES: usize = 128;

/// Mirror of `struct Moves` in rows.cu.
#[repr(C)]
struct Moves {
    from: [u32; MOVES],
    to: [u32; MOVES],
}

impl CudaDevice {
    pub(in crate::device::cuda) fn embed_rows(&self, table: &CudaMatrix, first: u32, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        let (gpu, to) = (&self.gpu, out.view(&self.gpu));
        let (mut at, mut held, mut width, mut first) = (table.at(gpu), table.n as i64, int(table.k), first);
        let (mut rows_at, mut out_at, mut stride) = (rows.pointers(gpu), to.at, to.stride as i64);
        let mut arguments = [
            pointer(&mut at),
            pointer(&mut held),
            pointer(&mut width),
            pointer(&mut first),
            pointer(&mut rows_at),
            pointer(&mut out_at),
            pointer(&mut stride),
        ];
        if rows.bound == 0 {
            return Ok(());
        }
        // SAFETY: the parameters of embed, whose buffers belong to the model and the round.
        unsafe { gpu.launch_dependent(&self.products.embed, (rows.bound as u32, 1, 1), 256, 0, &mut arguments)? };
        Ok(())
    }

    pub(in crate::device::cuda) fn rms_norm_rows(
        &self,
        x: &CudaAct,
        weight: &CudaVector,
        eps: f32,
        rows: &CudaRows,
        out: &mut CudaAct,
    ) -> Result<()> {
        self.norm_views(x.view(&self.gpu), weight, eps, x.width, rows.bound, out.view(&self.gpu))
    }

    /// `out = x / sqrt(mean(x^2) + eps) * weight` over `width` columns of `rows` rows; x and out may be the same.
    pub(in crate::device::cuda) fn norm_views(
        &self,
        x: View,
        weight: &CudaVector,
        eps: f32,
        width: usize,
        rows: usize,
        out: View,
    ) -> Result<()> {
        check_width("a norm", width)?;
        if rows == 0 {
            return Ok(());
        }
        let threads = (width / 4).next_multiple_of(32).clamp(32, 1024) as u32;
        let mut values = [
            x.at.bits(),
            (x.stride as u64).bits(),
            weight.at(&self.gpu).bits(),
            eps.bits(),
            int(width).bits(),
            out.at.bits(),
            (out.stride as u64).bits(),
        ];
        // SAFETY: the parameters of rms_norm.
        unsafe { self.gpu.enqueue_dependent(&self.products.rms_norm, (rows as u32, 1, 1), threads, 0, &mut values)? };
        Ok(())
    }

    pub(in crate::device::cuda) fn add_rows(&self, x: &mut CudaAct, y: &CudaAct, rows: &CudaRows) -> Result<()> {
        check_width("a sum", x.width)?;
        if rows.bound == 0 {
            return Ok(());
        }
        let (to, from) = (x.view(&self.gpu), y.view(&self.gpu));
        let grid = ((x.width / 4).div_ceil(256) as u32, rows.bound as u32, 1);
        let mut values = [to.at.bits(), (to.stride as u64).bits(), from.at.bits(), (from.stride as u64).bits(), int(x.width).bits()];
        // SAFETY: the parameters of add_rows.
        unsafe { self.gpu.enqueue_dependent(&self.products.add_rows, grid, 256, 0, &mut values)? };
        Ok(())
    }

    pub(in crate::device::cuda) fn copy_rows(&self, x: &CudaAct, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        self.copy(x.view(&self.gpu), x.rows, 0, x.width, rows.bound, out.view(&self.gpu))
    }

    /// `out[to + i] = x[from + i]`, `rows` rows.
    pub(in crate::device::cuda) fn copy_span(&self, x: &CudaAct, from: usize, rows: usize, out: &mut CudaAct, to: usize) -> Result<()> {
        if from + rows > x.rows || to + rows > out.rows || x.width > out.width {
            let (held, room) = ((x.rows, x.width), (out.rows, out.width));
            return Err(DeviceError(format!("{rows} rows from {from} of {held:?} do not fit at {to} of {room:?}")));
        }
        let (source, target) = (x.view(&self.gpu), out.view(&self.gpu));
        let at = |view: View, row: usize| View { at: view.at + (row * view.stride * size_of::<f32>()) as u64, ..view };
        self.copy(at(source, from), x.rows - from, 0, x.width, rows, at(target, to))
    }

    /// `out[to] = x[from]` for every `(from, to)`, in one launch for up to [`MOVES`] of them.
    pub(in crate::device::cuda) fn scatter(&self, x: &CudaAct, places: &[(usize, usize)], out: &mut CudaAct) -> Result<()> {
        check_width("a copy", x.width)?;
        if let Some((from, to)) = places.iter().find(|&&(from, to)| from >= x.rows || to >= out.rows || x.width > out.width) {
            let (held, room) = ((x.rows, x.width), (out.rows, out.width));
            return Err(DeviceError(format!("row {from} of {held:?} does not fit at {to} of {room:?}")));
        }
        let (source, target) = (x.view(&self.gpu), out.view(&self.gpu));
        let (mut x_at, mut x_stride, mut width) = (source.at, source.stride as i64, int(x.width));
        let (mut out_at, mut stride) = (target.at, target.stride as i64);
        for places in places.chunks(MOVES) {
            let mut moves = Moves { from: [0; MOVES], to: [0; MOVES] };
            for (i, &(from, to)) in places.iter().enumerate() {
                (moves.from[i], moves.to[i]) = (from as u32, to as u32);
            }
            let mut arguments = [
                pointer(&mut x_at),
                pointer(&mut x_stride),
                pointer(&mut width),
                pointer(&mut moves),
                pointer(&mut out_at),
                pointer(&mut stride),
            ];
            let grid = ((x.width / 4).div_ceil(256) as u32, places.len() as u32, 1);
            // SAFETY: the parameters of scatter_rows; every row lies inside its buffer.
            unsafe { self.gpu.launch_dependent(&self.products.scatter_rows, grid, 256, 0, &mut arguments)? };
        }
        Ok(())
    }

    pub(in crate::device::cuda) fn tap_rows(&self, x: &CudaAct, rows: &CudaRows, index: usize, taps: &mut CudaAct) -> Result<()> {
        let to = taps.view(&self.gpu);
        let at = to.at + (index * x.width * size_of::<f32>()) as u64;
        self.copy(x.view(&self.gpu), x.rows, 0, x.width, rows.bound, View { at, stride: to.stride })
    }

    pub(in crate::device::cuda) fn gather_rows(&self, taps: &CudaAct, accepted: &CudaRows, out: &mut CudaAct) -> Result<()> {
        let sources = accepted.sources.device_ptr(&self.gpu.stream).0;
        self.copy(taps.view(&self.gpu), taps.rows, sources, taps.width, accepted.bound, out.view(&self.gpu))
    }

    /// `out[row] = x[sources[row]]`, or `x[row]` where `sources` is 0; x has `held` rows.
    fn copy(&self, x: View, held: usize, sources: CUdeviceptr, width: usize, rows: usize, out: View) -> Result<()> {
        check_width("a copy", width)?;
        if rows == 0 {
            return Ok(());
        }
        let mut values = [
            x.at.bits(),
            (x.stride as u64).bits(),
            int(held).bits(),
            sources.bits(),
            int(width).bits(),
            out.at.bits(),
            (out.stride as u64).bits(),
        ];
        let grid = ((width / 4).div_ceil(256) as u32, rows as u32, 1);
        // SAFETY: the parameters of copy_rows.
        unsafe { self.gpu.enqueue_dependent(&self.products.copy_rows, grid, 256, 0, &mut values)? };
        Ok(())
    }

    pub(in crate::device::cuda) fn keep_last_row(
        &self,
        h: &CudaAct,
        rows: &CudaRows,
        out: &mut CudaAct,
        last: &mut CudaRows,
    ) -> Result<()> {
        if rows.bound == 0 {
            return Err(DeviceError("no last row of an empty pass".into()));
        }
        let (gpu, from) = (&self.gpu, h.view(&self.gpu));
        (last.bound, last.group_bound, last.reach) = (1, 0, rows.reach);
        let (mut x, mut stride, mut width) = (from.at, from.stride as i64, int(h.width));
        let (mut rows_at, mut out_at, mut last_at) = (rows.pointers(gpu), out.view(gpu).at, last.pointers(gpu));
        let mut arguments = [
            pointer(&mut x),
            pointer(&mut stride),
            pointer(&mut width),
            pointer(&mut rows_at),
            pointer(&mut out_at),
            pointer(&mut last_at),
        ];
        // SAFETY: the parameters of keep_last.
        unsafe { gpu.launch_dependent(&self.products.keep_last, (1, 1, 1), 1024, 0, &mut arguments)? };
        Ok(())
    }
}
