//! Host memory to the card at load: all threads fill one of two page-locked buffers in turn, so that reading one piece of a
//! memory-mapped shard overlaps with sending the one before.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaEvent, CudaSlice, DevicePtr, DeviceRepr, PinnedHostSlice, result};
use rayon::prelude::*;

use super::error::{CudaError, During};
use super::gpu::Gpu;

/// Bytes of one page-locked buffer.
const PIECE: usize = 32 << 20;

/// Where parts of one array may begin: 16-byte loads.
const ALIGNMENT: usize = 16;

/// Bytes one thread copies at a time.
const SHARE: usize = 256 << 10;

/// See the module. Made at the first upload.
pub struct Staging {
    buffers: [PinnedHostSlice<u8>; 2],
    /// The last copy out of each buffer.
    sent: [Option<CudaEvent>; 2],
    next: usize,
}

impl Staging {
    /// Two page-locked buffers that take turns.
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        // SAFETY: every byte that is sent was written before.
        let buffer = || unsafe { gpu.context.alloc_pinned(PIECE) }.during("allocating page-locked memory");
        Ok(Self { buffers: [buffer()?, buffer()?], sent: [None, None], next: 0 })
    }

    /// A new device array with these values. Returns once the last piece is on its way; the stream orders it before any use.
    pub fn upload<T: DeviceRepr + bytemuck::Pod + Sync>(&mut self, gpu: &Gpu, values: &[T]) -> Result<CudaSlice<T>, CudaError> {
        // SAFETY: all of it is written below.
        let slice = unsafe { gpu.stream.alloc::<T>(values.len().max(1)) }.during("allocating device memory")?;
        self.send_all(gpu, &[bytemuck::cast_slice(values)], slice.device_ptr(&gpu.stream).0)?;
        Ok(slice)
    }

    /// One new device array with all of `parts`, each begun at a multiple of [`ALIGNMENT`]. Many small matrices fill the page-locked
    /// buffers together, so that all threads have something to copy.
    pub fn upload_parts(&mut self, gpu: &Gpu, parts: &[&[u8]]) -> Result<(CudaSlice<u8>, Vec<CUdeviceptr>), CudaError> {
        let begins: Vec<usize> = parts
            .iter()
            .scan(0, |end, part| {
                let begin = *end;
                *end = (begin + part.len()).next_multiple_of(ALIGNMENT);
                Some(begin)
            })
            .collect();
        let total = begins.last().map_or(0, |begin| begin + parts[parts.len() - 1].len().next_multiple_of(ALIGNMENT));
        // SAFETY: all but the gaps between parts is written below, and nobody reads the gaps.
        let slice = unsafe { gpu.stream.alloc::<u8>(total.max(1)) }.during("allocating device memory")?;
        let to = slice.device_ptr(&gpu.stream).0;
        let padding = [0; ALIGNMENT];
        let padded: Vec<&[u8]> =
            parts.iter().flat_map(|&part| [part, &padding[..part.len().next_multiple_of(ALIGNMENT) - part.len()]]).collect();
        self.send_all(gpu, &padded, to)?;
        Ok((slice, begins.into_iter().map(|begin| to + begin as CUdeviceptr).collect()))
    }

    /// Sends the bytes of `parts` one after the other, in pieces of a buffer's size.
    fn send_all(&mut self, gpu: &Gpu, parts: &[&[u8]], to: CUdeviceptr) -> Result<(), CudaError> {
        let mut sent = 0;
        for piece in pieces(parts, PIECE) {
            self.send(gpu, &piece, to + sent as CUdeviceptr)?;
            sent += piece.iter().map(|part| part.len()).sum::<usize>();
        }
        Ok(())
    }

    fn send(&mut self, gpu: &Gpu, parts: &[&[u8]], to: CUdeviceptr) -> Result<(), CudaError> {
        let at = self.next;
        self.next = 1 - at;
        if let Some(sent) = self.sent[at].take() {
            sent.synchronize().during("waiting for a copy to the card")?;
        }
        let buffer = self.buffers[at].as_mut_slice().during("page-locked memory")?;
        let length = fill(buffer, parts);
        // SAFETY: the destination holds the piece, and the buffer is not written again before the event below has passed.
        unsafe { result::memcpy_htod_async(to, &buffer[..length], gpu.stream.cu_stream()) }.during("copying to the card")?;
        self.sent[at] = Some(gpu.stream.record_event(None).during("recording an event")?);
        Ok(())
    }
}

/// Copies `parts` one after the other into `buffer`, on all threads; returns how many bytes that were.
fn fill(buffer: &mut [u8], parts: &[&[u8]]) -> usize {
    let (mut rest, mut shares, mut length) = (buffer, Vec::new(), 0);
    for share in parts.iter().flat_map(|part| part.chunks(SHARE)) {
        let (to, after) = rest.split_at_mut(share.len());
        rest = after;
        length += share.len();
        shares.push((to, share));
    }
    shares.into_par_iter().for_each(|(to, from)| to.copy_from_slice(from));
    length
}

/// `parts` cut so that what stands between two cuts takes at most `most` bytes.
fn pieces<'a>(parts: &[&'a [u8]], most: usize) -> Vec<Vec<&'a [u8]>> {
    let (mut pieces, mut room) = (Vec::new(), 0);
    for &part in parts {
        let mut part = part;
        while !part.is_empty() {
            if room == 0 {
                pieces.push(Vec::new());
                room = most;
            }
            let (now, later) = part.split_at(part.len().min(room));
            pieces.last_mut().expect("one was pushed when there was no room").push(now);
            (room, part) = (room - now.len(), later);
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_are_the_parts_in_order_and_none_is_too_long(lengths in prop::collection::vec(0_usize..40, 0..12), most in 1_usize..50) {
            let all: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|i| i as u8).collect();
            let mut rest = &all[..];
            let parts: Vec<&[u8]> = lengths.iter().map(|&length| { let (part, after) = rest.split_at(length); rest = after; part }).collect();
            let pieces = pieces(&parts, most);
            let mut joined = Vec::new();
            for (number, piece) in pieces.iter().enumerate() {
                let mut buffer = vec![0; most];
                let length = fill(&mut buffer, piece);
                prop_assert!(length == most || number + 1 == pieces.len(), "only the last piece may be short");
                joined.extend_from_slice(&buffer[..length]);
            }
            prop_assert_eq!(joined, all);
        }
    }
}
