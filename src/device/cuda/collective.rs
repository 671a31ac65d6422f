//! Sums and gathers over the cards of one machine, by NCCL. The library is opened at run time, only when there is more than one rank.
//!
//! All ranks live in one process. A collective of one card waits on the card for the others'; what makes the driver wait for a whole
//! card (page-locked memory, new device memory, graphs becoming executable) can then wait for ever, as it may hold a lock that
//! another rank needs to enqueue its part. So whatever may do that runs in [`Gpu::alone`], while no card has a collective in flight; and
//! until a device has settled, when any operation may allocate, each collective is waited for.

use std::cell::Cell;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaFunction, DevicePtr};
use cudarc::nccl::{result, sys};

use super::buffers::{Argument, CudaAct};
use super::device::CudaDevice;
use super::gpu::Gpu;
use super::scratch::Use;
use super::verify::Numerics;
use crate::device::{DeviceError, Result};
use crate::parallel::collective::Gate;

/// By what ranks find each other; made once and handed to every rank.
#[derive(Clone)]
pub struct Meeting {
    id: sys::ncclUniqueId,
    size: usize,
    gate: Arc<Gate>,
}

impl Meeting {
    /// # Errors
    /// NCCL is not installed, or cannot start.
    pub fn new(size: usize) -> Result<Self> {
        // SAFETY: only tries to open the library by name.
        if !unsafe { sys::is_culib_present() } {
            let what =
                "more than one rank on CUDA needs NCCL (libnccl.so), which was not found; install it or add its folder to LD_LIBRARY_PATH";
            return Err(DeviceError(what.into()));
        }
        let id = result::get_uniqueid().map_err(|error| failed("starting", &error))?;
        Ok(Self { id, size, gate: Arc::new(Gate::new(size)) })
    }
}

/// One rank's end.
pub struct Collective {
    comm: sys::ncclComm_t,
    size: usize,
    sum: CudaFunction,
    columns: CudaFunction,
    gate: Arc<Gate>,
    /// Every collective is waited for; see the module.
    careful: Cell<bool>,
}

impl Collective {
    /// Waits for all ranks of the meeting. Call it on the rank's own thread.
    pub fn join(meeting: &Meeting, rank: usize, gpu: &mut Gpu) -> Result<Self> {
        let module = gpu.module("ranks_gathered")?;
        let (sum, columns) = (gpu.function(&module, "ranks_sum", 0)?, gpu.function(&module, "ranks_columns", 0)?);
        let mut comm = std::ptr::null_mut();
        // SAFETY: `comm` outlives the call; the card's context is current on this thread.
        unsafe { result::comm_init_rank(&mut comm, meeting.size as i32, meeting.id, rank as i32) }
            .map_err(|error| failed("joining the ranks", &error))?;
        let gate = meeting.gate.clone();
        gpu.peers = Some(gate.clone());
        Ok(Self { comm, size: meeting.size, sum, columns, gate, careful: Cell::new(true) })
    }

    /// From now on no operation allocates outside [`Gpu::alone`].
    pub fn settle(&self) {
        self.careful.set(false);
    }

    /// Enqueues a collective.
    fn call(
        &self,
        gpu: &Gpu,
        what: &str,
        enqueue: impl FnOnce() -> std::result::Result<result::NcclStatus, result::NcclError>,
    ) -> Result<()> {
        if self.careful.get() {
            gpu.meet()?;
        }
        enqueue().map_err(|error| failed(what, &error))?;
        if self.careful.get() {
            gpu.synchronize()?;
        }
        Ok(())
    }

    /// Values of every rank one after the other at `to`.
    fn gather(&self, gpu: &Gpu, from: CUdeviceptr, count: usize, to: CUdeviceptr) -> Result<()> {
        let (kind, stream) = (sys::ncclDataType_t::ncclFloat32, gpu.stream.cu_stream().cast());
        // SAFETY: both buffers hold what the callers size them for; the stream orders this with their other uses.
        let enqueue = || unsafe { result::all_gather(from as *const _, to as *mut _, count, kind, self.comm, stream) };
        self.call(gpu, "gathering over ranks", enqueue)
    }

    fn reduce(&self, gpu: &Gpu, x: CUdeviceptr, count: usize) -> Result<()> {
        let (kind, stream) = (sys::ncclDataType_t::ncclFloat32, gpu.stream.cu_stream().cast());
        // SAFETY: as above; NCCL allows the sum in place.
        let enqueue =
            || unsafe { result::all_reduce(x as *const _, x as *mut _, count, kind, sys::ncclRedOp_t::ncclSum, self.comm, stream) };
        self.call(gpu, "summing over ranks", enqueue)
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        self.gate.lose();
        // SAFETY: the communicator was made by `join` and is used by nobody else.
        if let Err(error) = unsafe { result::comm_destroy(self.comm) } {
            tracing::warn!(?error, "a communicator could not be closed");
        }
    }
}

impl CudaDevice {
    /// Sums the rows of a pass over ranks, in place. `fast` leaves the order to NCCL, which may change with the number of rows;
    /// `exact` gathers and sums in rank order.
    pub(super) fn sum_over_ranks(&self, x: &mut CudaAct, rows: usize) -> Result<()> {
        let Some(collective) = &self.collective else { return Ok(()) };
        let (at, count) = (x.data.device_ptr(&self.gpu.stream).0, rows * x.width);
        if self.numerics == Numerics::Fast {
            return collective.reduce(&self.gpu, at, count);
        }
        let gathered = self.scratch.borrow_mut().get(&self.gpu, Use::Gathered, 4 * count * collective.size)?;
        collective.gather(&self.gpu, at, count, gathered)?;
        let mut values = [gathered.bits(), at.bits(), (count as u32).bits(), (collective.size as u32).bits()];
        let blocks = count.div_ceil(256).clamp(1, 1024) as u32;
        // SAFETY: the values are the parameters of `ranks_sum`.
        unsafe { self.gpu.enqueue(&collective.sum, (blocks, 1, 1), 256, 0, &mut values)? };
        Ok(())
    }

    /// `out[row] = ` the rows of all ranks side by side.
    pub(super) fn columns_of_ranks(&self, x: &CudaAct, rows: usize, out: &mut CudaAct) -> Result<()> {
        let Some(collective) = &self.collective else { return Ok(()) };
        let count = rows * x.width;
        let (from, to) = (x.data.device_ptr(&self.gpu.stream).0, out.data.device_ptr(&self.gpu.stream).0);
        let gathered = self.scratch.borrow_mut().get(&self.gpu, Use::Gathered, 4 * count * collective.size)?;
        collective.gather(&self.gpu, from, count, gathered)?;
        let mut values = [gathered.bits(), to.bits(), (rows as u32).bits(), (x.width as u32).bits(), (collective.size as u32).bits()];
        let blocks = (count * collective.size).div_ceil(256).clamp(1, 4096) as u32;
        // SAFETY: the values are the parameters of `ranks_columns`.
        unsafe { self.gpu.enqueue(&collective.columns, (blocks, 1, 1), 256, 0, &mut values)? };
        Ok(())
    }
}

fn failed(what: &str, error: &result::NcclError) -> DeviceError {
    DeviceError(format!("{what}: NCCL says {error:?}"))
}
