//! Who takes part in a round with how many rows: the only thing the host tells the card each round.

use cudarc::driver::result;

use super::super::device::CudaDevice;
use super::super::error::During;
use super::super::verify;
use super::CudaRound;
use super::layout::*;
use super::memory::result_places;
use crate::device::{Bucket, DeviceError, Phase, Result, Share};
use crate::speculate::budget::MAX_ROWS;

/// What the launches of a planned round are sized by.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    /// Verify rows, rounded up to a power of two.
    pub rows: usize,
    /// Requests, rounded up likewise.
    pub groups: usize,
    /// Requests that draft, rounded up likewise; 0 = nobody.
    pub drafting: usize,
    /// The requests' prefixes are long together ([`verify::is_long`]).
    pub long: bool,
    /// Some request draws its tokens (temperature above 0).
    pub draws: bool,
    /// Some request wants log-probabilities.
    pub reports: bool,
}

/// A share as planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    pub share: Share,
    /// First planned row.
    pub first: usize,
    pub reports: bool,
}

impl CudaRound {
    /// Fixes who takes part. One small copy.
    pub fn plan(&mut self, device: &CudaDevice, shares: &[Share]) -> Result<()> {
        self.plan_rows(device, shares, false)
    }

    /// `begin`: the single row after a prompt.
    pub(super) fn plan_rows(&mut self, device: &CudaDevice, shares: &[Share], begin: bool) -> Result<()> {
        self.check(shares)?;
        let rows: usize = shares.iter().map(|share| share.rows).sum();
        let slots = self.limits.block.max(1) - 1;
        let (records, reports) = result_places(shares.len(), rows);
        let words = &mut self.words;
        words.clear();
        words.resize(PLAN_HEAD, 0);
        self.planned.clear();
        self.sizes = Sizes::default();
        let (mut first, mut drafting, mut reach, mut prefixes) = (0, 0, 0, 0);
        for (at, share) in shares.iter().enumerate() {
            let running = self.requests[share.request].as_mut().expect("checked");
            let drafts = share.rows > 1 && slots > 0;
            if drafts {
                words[8 + drafting] = at as u32;
                drafting += 1;
            }
            words.extend([share.request as u32, share.rows as u32, u32::from(share.chain), first as u32, 0, 0, 0, 0]);
            self.planned.push(Planned { share: *share, first, reports: running.reports });
            self.sizes.draws |= running.draws;
            self.sizes.reports |= running.reports;
            reach = reach.max(running.length + running.planned + share.rows.max(if drafts { slots + 1 } else { 0 }));
            prefixes += running.length + running.planned;
            running.planned += share.rows;
            first += share.rows;
        }
        words[..5].copy_from_slice(&[shares.len() as u32, drafting as u32, u32::from(begin), records as u32, reports as u32]);
        let padded = |n: usize, most: usize| if n == 0 { 0 } else { n.next_power_of_two().min(most) };
        let requests = self.limits.requests.min(self.limits.verify_rows);
        self.sizes.rows = padded(rows, self.limits.verify_rows);
        self.sizes.groups = padded(shares.len(), requests);
        self.sizes.drafting = padded(drafting, requests);
        self.sizes.long = verify::is_long(self.sizes.groups, self.sizes.rows, prefixes);
        self.rows = rows;
        self.reach = reach.next_power_of_two().max(1024);
        (self.begun, self.unread) = (begin, true);

        let gpu = &device.gpu;
        self.staging.reserve(gpu, self.words.len() * 4, 1)?;
        let from = self.staging.put(&self.words);
        // SAFETY: the staged words stay until the next synchronisation, and a plan has room for MAX_SHARES shares.
        unsafe {
            let words = std::slice::from_raw_parts(from as *const u32, self.words.len());
            result::memcpy_htod_async(self.memory.pointers.plan, words, gpu.stream.cu_stream()).during("handing a plan to the card")?;
        }
        Ok(())
    }

    fn check(&self, shares: &[Share]) -> Result<()> {
        let rows: usize = shares.iter().map(|share| share.rows).sum();
        if shares.len() > self.limits.requests || rows > self.limits.verify_rows {
            let limits = (self.limits.requests, self.limits.verify_rows);
            return Err(DeviceError(format!("round of {} requests and {rows} rows exceeds {limits:?}", shares.len())));
        }
        for share in shares {
            self.running(share.request)?;
            if !(1..=MAX_ROWS).contains(&share.rows) {
                return Err(DeviceError(format!("{} rows planned for request {}, wanted 1 to {MAX_ROWS}", share.rows, share.request)));
            }
        }
        Ok(())
    }

    /// Rounds of one bucket enqueue the same launches. The first token after a prompt is not recorded.
    pub fn bucket(&self, phase: Phase) -> Option<Bucket> {
        let sizes = &self.sizes;
        let verify = phase == Phase::Verify;
        (self.unread && !self.begun).then(|| Bucket {
            phase,
            rows: if verify { sizes.rows as u16 } else { 0 },
            requests: sizes.groups as u16,
            drafting: sizes.drafting as u16,
            long: verify && sizes.long,
            extras: if verify { u8::from(sizes.draws) | u8::from(sizes.reports) << 1 } else { 0 },
        })
    }

    /// Allowed tokens per row of a planned share: copied to its planned rows.
    pub fn set_masks(&mut self, device: &CudaDevice, share: usize, masks: &[u32]) -> Result<()> {
        let planned = *self.planned.get(share).ok_or_else(|| DeviceError(format!("masks for share {share} of {}", self.planned.len())))?;
        let words = self.memory.pointers.words as usize;
        // More rows than planned say nothing.
        let rows = (masks.len() / words).min(planned.share.rows);
        let masks = &masks[..rows * words];
        let (gpu, pointers) = (&device.gpu, &self.memory.pointers);
        self.staging.reserve(gpu, masks.len() * 4, 1)?;
        let from = self.staging.put(masks);
        let to = pointers.masks + (planned.first * words * 4) as u64;
        let flag = pointers.plan + 4 * (PLAN_HEAD + share * SHARE_WORDS + SHARE_MASKED) as u64;
        let stream = gpu.stream.cu_stream();
        // SAFETY: inside the masks of the planned rows and the planned share; the staged words stay until the next synchronisation.
        unsafe {
            let words = std::slice::from_raw_parts(from as *const u32, masks.len());
            result::memcpy_htod_async(to, words, stream).during("handing masks to the card")?;
            cudarc::driver::sys::cuMemsetD32Async(flag, rows as u32, 1, stream).result().during("counting masked rows")?;
        }
        Ok(())
    }
}
