//! Pinned host memory: small things on their way to the card, and results on their way back. Kernels read what was staged straight
//! from here, so it must stay untouched until they have run.

use std::cell::Cell;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, result};

use super::super::error::{CudaError, During};
use super::super::gpu::Gpu;

/// Page-locked bytes, visible to the card at the same address.
pub struct Pinned {
    context: Arc<CudaContext>,
    at: *mut u8,
    len: usize,
}

impl Pinned {
    /// Page-locked memory of `len` bytes.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self, CudaError> {
        gpu.context.bind_to_thread().during("binding the context")?;
        // SAFETY: freed once, in `drop`.
        let at = unsafe { result::malloc_host(len, 0) }.during("allocating pinned memory")?.cast();
        Ok(Self { context: gpu.context.clone(), at, len })
    }

    /// What the card wrote, after a synchronisation.
    pub fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.len);
        // SAFETY: inside the allocation; the caller has waited for the copy into it.
        unsafe { std::slice::from_raw_parts(self.at, len) }
    }

    /// Where a copy from the card may go.
    pub fn target(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.len);
        // SAFETY: inside the allocation, and nothing else holds it.
        unsafe { std::slice::from_raw_parts_mut(self.at, len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `new`. An error here has nobody to go to.
            let _ = unsafe { result::free_host(self.at.cast()) };
        }
    }
}

/// A ring of pinned memory, emptied by every synchronisation.
pub struct Staging {
    pinned: Pinned,
    next: Cell<usize>,
    /// Times the ring was full and the host had to wait.
    pub waits: Cell<u64>,
}

const ALIGN: usize = 16;

impl Staging {
    /// A ring of `len` bytes.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self, CudaError> {
        Ok(Self { pinned: Pinned::new(gpu, len)?, next: Cell::new(0), waits: Cell::new(0) })
    }

    /// The card is idle: everything staged was used.
    pub fn clear(&self) {
        self.next.set(0);
    }

    /// Makes room for several `put`s of `bytes` in all, in `parts` parts. Waits for the card only when the ring is full.
    pub fn reserve(&self, gpu: &Gpu, bytes: usize, parts: usize) -> Result<(), CudaError> {
        let bytes = bytes + parts * ALIGN;
        if bytes > self.pinned.len {
            let wanted = format!("at most {}", self.pinned.len);
            return Err(CudaError::Limit { what: "bytes handed to the card at once", found: bytes as u64, wanted });
        }
        if self.next.get() + bytes > self.pinned.len {
            self.waits.set(self.waits.get() + 1);
            gpu.synchronize()?;
            self.clear();
        }
        Ok(())
    }

    /// Copies `values` into the ring and returns their address, on the host and on the card. Call `reserve` first.
    pub fn put<T: bytemuck::NoUninit>(&self, values: &[T]) -> CUdeviceptr {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let at = self.next.get().next_multiple_of(ALIGN);
        assert!(at + bytes.len() <= self.pinned.len, "staged more than was reserved");
        self.next.set(at + bytes.len());
        // SAFETY: inside the allocation; the card uses only parts that were put before and not cleared.
        unsafe {
            let to = self.pinned.at.add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            to as CUdeviceptr
        }
    }
}
