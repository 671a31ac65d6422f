//! The state of rounds on the card: requests, trees, samples, and what they turn into. Lengths, anchors, trees and picks are device
//! data; the host plans the shares and reads one packed result. Between `plan` and `read` every call only enqueues kernels, whose
//! launches depend on nothing but the bucket, so that they can be captured and replayed.

mod kernels;
mod layout;
mod memory;
mod plan;
mod prompt;
mod requests;
mod results;
mod staging;

use cudarc::driver::{CudaFunction, DevicePtr};

use super::attention::CudaLatents;
use super::buffers::{Argument, CudaAct};
use super::device::CudaDevice;
use super::rows::CudaRows;
use crate::device::{DeviceError, Limits, Result, Share};
use crate::speculate::budget::MAX_ROWS;

pub use kernels::RoundKernels;

use kernels::{Grid, by_value, launch};
use layout::*;
use memory::{Pool, RoundMemory};
use plan::{Planned, Sizes};
use requests::Running;
use staging::{Pinned, Staging};

/// Vectors set aside for requests with biases or penalties.
const READY_VECTORS: usize = 4;

/// Blocks that keep a card busy with `round_scan`.
const SCAN_BLOCKS: usize = 1056;

/// Shares that one block of `round_walk` walks.
const WALKERS: usize = 4;

/// See the module.
pub struct CudaRound {
    limits: Limits,
    memory: RoundMemory,
    staging: Staging,
    result: Pinned,
    pool: Pool,
    requests: Vec<Option<Running>>,
    planned: Vec<Planned>,
    /// The plan as it is handed over.
    words: Vec<u32>,
    sizes: Sizes,
    /// Planned rows.
    rows: usize,
    /// Keys any planned row may see at most, rounded up.
    reach: usize,
    begun: bool,
    unread: bool,
}

impl CudaDevice {
    pub(super) fn new_round(&self, limits: &Limits) -> Result<CudaRound> {
        let gpu = &self.gpu;
        let memory = RoundMemory::new(gpu, limits)?;
        prompt::reserve(&mut self.scratch.borrow_mut(), gpu, limits.vocab)?;
        let masks = limits.verify_rows * memory.pointers.words as usize * 4;
        Ok(CudaRound {
            staging: Staging::new(gpu, masks + 4 * memory.stride * 4 + (1 << 20))?,
            result: Pinned::new(gpu, memory.result_bytes)?,
            pool: Pool::new(gpu, limits.vocab, READY_VECTORS.min(limits.requests))?,
            requests: (0..limits.requests).map(|_| None).collect(),
            planned: Vec::with_capacity(limits.requests),
            words: Vec::with_capacity(PLAN_HEAD + SHARE_WORDS * limits.requests),
            limits: limits.clone(),
            memory,
            sizes: Sizes::default(),
            rows: 0,
            reach: 0,
            begun: false,
            unread: false,
        })
    }
}

impl CudaRound {
    /// Vectors allocated since start-up, because more requests than foreseen had biases or penalties.
    pub fn allocations(&self) -> u64 {
        self.pool.allocations
    }

    /// Times the host waited because too much was handed over between two reads.
    pub fn waits(&self) -> u64 {
        self.staging.waits.get()
    }

    /// As [`Device::place_chunk`](crate::device::Device::place_chunk).
    pub fn place_chunk(&self, device: &CudaDevice, request: usize, start: usize, tokens: &[u32], rows: &mut CudaRows) -> Result<()> {
        let held = self.running(request)?.slots;
        if tokens.len() > rows.capacity || start + tokens.len() > held || tokens.is_empty() {
            let (count, capacity) = (tokens.len(), rows.capacity);
            return Err(DeviceError(format!("{count} prompt tokens from {start}, wanted 1 to {capacity} within {held} slots")));
        }
        self.describe(rows, tokens.len(), 1, start + tokens.len());
        let gpu = &device.gpu;
        self.staging.reserve(gpu, tokens.len() * 4, 1)?;
        let mut values = [self.staging.put(tokens), (request as i32).bits(), (start as i32).bits(), (tokens.len() as i32).bits()];
        let row_pointers = rows.pointers(gpu);
        let structs = [by_value(&self.memory.pointers), by_value(&row_pointers)];
        // SAFETY: the parameters of `round_place_chunk`; the staged tokens stay until the next synchronisation.
        unsafe { launch(gpu, &device.rounds.place_chunk, Grid::new(tokens.len().div_ceil(256), 1, 256), &structs, &mut values)? };
        Ok(())
    }

    /// As [`Device::begin`](crate::device::Device::begin).
    pub fn begin(&mut self, device: &CudaDevice, request: usize, prompt: usize, logits: &CudaAct, mask: Option<&[u32]>) -> Result<()> {
        if prompt == 0 {
            return Err(DeviceError("a prompt of no tokens cannot begin".into()));
        }
        self.plan_rows(device, &[Share { request, rows: 1, chain: false }], true)?;
        let mut values = [(request as i32).bits(), (prompt as i32).bits()];
        // SAFETY: the parameters of `round_open_prompt`.
        unsafe { launch(&device.gpu, &device.rounds.open_prompt, Grid::new(1, 1, 32), &[by_value(&self.memory.pointers)], &mut values)? };
        if let Some(mask) = mask {
            self.set_masks(device, 0, mask)?;
        }
        self.sample(device, logits)?;
        if let Some(running) = &mut self.requests[request] {
            (running.length, running.planned) = (prompt, 0);
        }
        let nowhere = super::rows::RowPointers::default();
        // SAFETY: the parameters of `round_walk`, which writes no rows when the bound is 0.
        unsafe {
            let structs = [by_value(&self.memory.pointers), by_value(&nowhere)];
            launch(&device.gpu, &device.rounds.walk, Grid::new(1, 1, 128), &structs, &mut [0, 0])?;
        }
        Ok(())
    }

    /// As [`Device::place_blocks`](crate::device::Device::place_blocks).
    pub fn place_blocks(&self, device: &CudaDevice, mask_token: u32, rows: &mut CudaRows) -> Result<()> {
        let (groups, block) = (self.sizes.drafting, self.limits.block.max(1));
        self.fits(rows, groups * block)?;
        self.describe(rows, groups * block, groups, self.reach);
        let mut values = [mask_token.bits(), (rows.bound as i32).bits(), (groups as i32).bits()];
        let row_pointers = rows.pointers(&device.gpu);
        let structs = [by_value(&self.memory.pointers), by_value(&row_pointers)];
        // SAFETY: the parameters of `round_place_blocks`; the rows hold the bound.
        unsafe { launch(&device.gpu, &device.rounds.place_blocks, Grid::new(1, 1, 1024), &structs, &mut values)? };
        Ok(())
    }

    /// As [`Device::marginals`](crate::device::Device::marginals).
    pub fn marginals(&mut self, device: &CudaDevice, logits: &CudaAct) -> Result<()> {
        let slots = self.limits.block.max(1) - 1;
        let items = self.sizes.drafting * slots;
        if items == 0 {
            return Ok(());
        }
        let drafting = self.planned.iter().filter(|planned| planned.share.rows > 1).count();
        self.sees(logits, drafting * self.limits.block)?;
        let grid = Grid::new(self.limits.vocab.div_ceil(TOP_CHUNK), items, 256);
        self.over_logits(device, &device.rounds.marginals, grid, logits, &[])
    }

    /// As [`Device::grow`](crate::device::Device::grow).
    pub fn grow(&mut self, device: &CudaDevice) -> Result<()> {
        if self.sizes.groups == 0 {
            return Ok(());
        }
        let grid = Grid { shared: (self.limits.block.max(1) * MAX_ROWS * 8) as u32, ..Grid::new(self.sizes.groups, 1, 32) };
        // SAFETY: the parameter of `round_grow`, with room for the marginals of a full tree.
        unsafe { launch(&device.gpu, &device.rounds.grow, grid, &[by_value(&self.memory.pointers)], &mut [])? };
        Ok(())
    }

    /// As [`Device::place_trees`](crate::device::Device::place_trees).
    pub fn place_trees(&self, device: &CudaDevice, rows: &mut CudaRows) -> Result<()> {
        self.fits(rows, self.sizes.rows)?;
        self.describe(rows, self.sizes.rows, self.sizes.groups, self.reach);
        rows.long = self.sizes.long;
        let mut values = [(rows.bound as i32).bits(), (rows.group_bound as i32).bits()];
        let row_pointers = rows.pointers(&device.gpu);
        let structs = [by_value(&self.memory.pointers), by_value(&row_pointers)];
        // SAFETY: the parameters of `round_place_trees`; the rows hold the bound.
        unsafe { launch(&device.gpu, &device.rounds.place_trees, Grid::new(1, 1, 1024), &structs, &mut values)? };
        Ok(())
    }

    /// As [`Device::sample`](crate::device::Device::sample).
    pub fn sample(&mut self, device: &CudaDevice, logits: &CudaAct) -> Result<()> {
        let (rows, vocab) = (self.sizes.rows, self.limits.vocab);
        if rows == 0 {
            return Ok(());
        }
        self.sees(logits, self.rows)?;
        let kernels = &device.rounds;
        let chunks = vocab.div_ceil(SCAN_CHUNK);
        // Few rows want many blocks; many rows want each block to live longer than it takes to start.
        let loops = (rows * chunks / SCAN_BLOCKS).clamp(1, 8);
        self.over_logits(device, &kernels.scan, Grid::new(chunks.div_ceil(loops), rows, 256), logits, &[(loops as i32).bits()])?;
        if self.sizes.draws {
            self.over_logits(device, &kernels.draw, Grid::new(8, rows, 512), logits, &[])?;
        }
        if self.sizes.reports {
            self.over_logits(device, &kernels.report, Grid::new(vocab.div_ceil(TOP_CHUNK), rows, 256), logits, &[])?;
        }
        Ok(())
    }

    /// As [`Device::walk_and_commit`](crate::device::Device::walk_and_commit).
    pub fn walk_and_commit(&mut self, device: &CudaDevice, latents: &mut CudaLatents, accepted: &mut CudaRows) -> Result<()> {
        let sizes = self.sizes;
        if sizes.rows == 0 {
            return Ok(());
        }
        self.fits(accepted, sizes.rows)?;
        self.describe(accepted, sizes.rows, sizes.groups, self.reach);
        let gpu = &device.gpu;
        let mut values = [(sizes.rows as i32).bits(), (sizes.groups as i32).bits()];
        let row_bytes = latents.data.len() / (latents.layers * latents.slots).max(1) * 2;
        if !row_bytes.is_multiple_of(16) || row_bytes > 96 * 16 {
            return Err(DeviceError(format!("latent rows of {row_bytes} bytes, wanted a multiple of 16 up to 1536")));
        }
        let cache = latents.data.device_ptr(&gpu.stream).0;
        let mut moved = [cache, (latents.slots * row_bytes) as u64, (row_bytes as i32).bits()];
        let row_pointers = accepted.pointers(gpu);
        let pointers = by_value(&self.memory.pointers);
        // SAFETY: the parameters of `round_walk` and `round_move`; rows and latents hold what they are said to hold.
        unsafe {
            let structs = [pointers, by_value(&row_pointers)];
            launch(gpu, &device.rounds.walk, Grid::new(sizes.groups.div_ceil(WALKERS), 1, 128), &structs, &mut values)?;
            launch(gpu, &device.rounds.shift, Grid::new(latents.layers, sizes.groups, 96), &[pointers], &mut moved)?;
        }
        Ok(())
    }

    /// Enqueues a kernel whose parameters are the round, logits and `more`.
    fn over_logits(&self, device: &CudaDevice, kernel: &CudaFunction, grid: Grid, logits: &CudaAct, more: &[u64]) -> Result<()> {
        let view = logits.view(&device.gpu);
        let mut values = vec![view.at, view.stride as u64];
        values.extend_from_slice(more);
        // SAFETY: the parameters of every kernel this is called with; live rows lie inside the logits.
        unsafe { launch(&device.gpu, kernel, grid, &[by_value(&self.memory.pointers)], &mut values)? };
        Ok(())
    }

    fn describe(&self, rows: &mut CudaRows, bound: usize, groups: usize, reach: usize) {
        (rows.bound, rows.group_bound, rows.reach) = (bound, groups, reach);
        rows.tables = self.memory.pointers.tables;
    }

    fn fits(&self, rows: &CudaRows, bound: usize) -> Result<()> {
        if bound > rows.capacity {
            return Err(DeviceError(format!("{bound} rows planned, wanted at most {}", rows.capacity)));
        }
        Ok(())
    }

    fn sees(&self, logits: &CudaAct, rows: usize) -> Result<()> {
        let vocab = self.limits.vocab;
        if logits.rows < rows || logits.width < vocab {
            return Err(DeviceError(format!("logits of {} rows x {}, wanted {rows} x {vocab}", logits.rows, logits.width)));
        }
        Ok(())
    }
}
