//! `kdtree bench load`: how fast the weights of one rank come from disk onto its device, beside what the disk does by itself.

use std::alloc::Layout as Memory;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;

use crate::device::{Device, Limits, Result as DeviceResult};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TargetConfig;
use crate::model::progress::Progress;
use crate::model::target::Target;
use crate::model::tensor::Cut;
use crate::model::weights::Stored;
use crate::parallel::Rank;

/// Bytes of one read of the disk's own measurement.
const READ: usize = 8 << 20;
/// Bytes a page of memory begins at a multiple of; direct reads want it.
const PAGE: usize = 4096;

/// A step that moved bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    pub what: &'static str,
    /// Bytes of the files that the step has to read.
    pub bytes: u64,
    pub seconds: f64,
}

impl Step {
    /// Bytes of files over time, in GB/s.
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }
}

/// What `kdtree bench load --json` writes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub device: String,
    pub ranks: usize,
    pub rank: usize,
    pub layers: usize,
    pub checkpoint_bytes: u64,
    /// Bytes of weights that the rank holds.
    pub rank_bytes: u64,
    /// The disk's own rate was read past the page cache.
    pub direct: bool,
    pub steps: Vec<Step>,
}

/// Bytes of the files that loading a rank touches: its rows, but all of a matrix that is cut by columns, since every page of it holds
/// some of the rank's.
pub fn touched(checkpoint: &Checkpoint, ranks: usize) -> u64 {
    let bytes = |cut: Cut, all: u64| if cut == Cut::Columns { all } else { cut.bytes_per_rank(all, ranks) };
    checkpoint.inventory().tensors.iter().map(|tensor| bytes(tensor.cut, tensor.bytes())).sum()
}

/// Shards of a directory, sorted.
pub fn shards(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut shards: Vec<PathBuf> =
        std::fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    shards.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    shards.sort_unstable();
    Ok(shards)
}

/// Writes what is still in memory to the disk and drops the files from the page cache, as far as the system follows the advice.
pub fn evict(shards: &[PathBuf]) -> io::Result<()> {
    shards.par_iter().try_for_each(|path| {
        let file = File::open(path)?;
        file.sync_all()?;
        // SAFETY: the descriptor is open; the advice changes no contents.
        match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    })
}

/// Reads the shards whole, each by a thread of its own, past the page cache where the file system can. Returns the step and whether it
/// could.
pub fn read_disk(shards: &[PathBuf]) -> io::Result<(Step, bool)> {
    let direct = shards.first().is_some_and(|path| open_direct(path).is_ok());
    let start = Instant::now();
    let read = |path: &PathBuf| -> io::Result<u64> {
        let mut file = if direct { open_direct(path)? } else { File::open(path)? };
        let mut buffer = Aligned::new();
        let mut bytes = 0;
        loop {
            match file.read(buffer.as_mut_slice())? {
                0 => return Ok(bytes),
                some => bytes += some as u64,
            }
        }
    };
    let bytes = shards.par_iter().map(read).sum::<io::Result<u64>>()?;
    Ok((Step { what: "the disk alone", bytes, seconds: start.elapsed().as_secs_f64() }, direct))
}

fn open_direct(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    // Some file systems take the flag and fail at the first read.
    let _probe: usize = file.read(Aligned::new().as_mut_slice())?;
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// A buffer that direct reads accept.
struct Aligned(*mut u8);

impl Aligned {
    fn memory() -> Memory {
        Memory::from_size_align(READ, PAGE).expect("the page size is a power of two")
    }

    fn new() -> Self {
        // SAFETY: the size is not zero.
        let memory = unsafe { std::alloc::alloc_zeroed(Self::memory()) };
        if memory.is_null() {
            std::alloc::handle_alloc_error(Self::memory());
        }
        Self(memory)
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `new` allocated `READ` initialised bytes, and this borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.0, READ) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { std::alloc::dealloc(self.0, Self::memory()) };
    }
}

/// Loads the rank and drops it again; the seconds until the device has everything.
pub fn load<D: Device>(
    device: &D,
    wait: impl Fn() -> DeviceResult<()>,
    checkpoint: &Checkpoint,
    config: &TargetConfig,
    rank: Rank,
    what: &'static str,
    progress: &dyn Progress,
) -> DeviceResult<Step> {
    let start = Instant::now();
    let limits = limits(config);
    let target = Target::load(device, &Stored { device, checkpoint }, config, &[], rank, &limits, progress)?;
    wait()?;
    let seconds = start.elapsed().as_secs_f64();
    drop(target);
    Ok(Step { what, bytes: touched(checkpoint, rank.size), seconds })
}

/// Sizes of a device that only loads.
pub fn limits(config: &TargetConfig) -> Limits {
    Limits { requests: 1, verify_rows: 1, chunk_rows: 16, context: 16, slots: 16, block: 1, vocab: config.vocab }
}
