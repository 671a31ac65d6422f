//! Host memory to the card at load: pieces are copied by all threads into two page-locked buffers in turn, so that reading one piece
//! of a memory-mapped shard overlaps with sending the one before.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaEvent, CudaSlice, DevicePtr, DeviceRepr, PinnedHostSlice, result};
use rayon::prelude::*;

use super::error::{CudaError, During};
use super::gpu::Gpu;

/// Bytes of one page-locked buffer.
const PIECE: usize = 16 << 20;

/// Bytes one thread copies at a time.
const SHARE: usize = 1 << 20;

/// See the module. Made at the first upload.
pub struct Staging {
    buffers: [PinnedHostSlice<u8>; 2],
    /// The last copy out of each buffer.
    sent: [Option<CudaEvent>; 2],
    next: usize,
}

impl Staging {
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        // SAFETY: every byte that is sent was written before.
        let buffer = || unsafe { gpu.context.alloc_pinned(PIECE) }.during("allocating page-locked memory");
        Ok(Self { buffers: [buffer()?, buffer()?], sent: [None, None], next: 0 })
    }

    /// A new device array with these values. Returns once the last piece is on its way; the stream orders it before any use.
    pub fn upload<T: DeviceRepr + bytemuck::Pod + Sync>(&mut self, gpu: &Gpu, values: &[T]) -> Result<CudaSlice<T>, CudaError> {
        // SAFETY: all of it is written below.
        let slice = unsafe { gpu.stream.alloc::<T>(values.len().max(1)) }.during("allocating device memory")?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let to = slice.device_ptr(&gpu.stream).0;
        for (at, piece) in bytes.chunks(PIECE).enumerate() {
            self.send(gpu, piece, to + (at * PIECE) as CUdeviceptr)?;
        }
        Ok(slice)
    }

    fn send(&mut self, gpu: &Gpu, piece: &[u8], to: CUdeviceptr) -> Result<(), CudaError> {
        let at = self.next;
        self.next = 1 - at;
        if let Some(sent) = self.sent[at].take() {
            sent.synchronize().during("waiting for a copy to the card")?;
        }
        let buffer = self.buffers[at].as_mut_slice().during("page-locked memory")?;
        buffer[..piece.len()].par_chunks_mut(SHARE).zip(piece.par_chunks(SHARE)).for_each(|(to, from)| to.copy_from_slice(from));
        // SAFETY: the destination holds the piece, and the buffer is not written again before the event below has passed.
        unsafe { result::memcpy_htod_async(to, &buffer[..piece.len()], gpu.stream.cu_stream()) }.during("copying to the card")?;
        self.sent[at] = Some(gpu.stream.record_event(None).during("recording an event")?);
        Ok(())
    }
}
