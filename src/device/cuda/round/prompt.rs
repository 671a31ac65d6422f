//! Log-probabilities of prompt tokens, for requests that ask for them. Waits for the card.

use cudarc::driver::result;

use super::super::buffers::{Argument, CudaAct};
use super::super::device::CudaDevice;
use super::super::error::During;
use super::super::gpu::Gpu;
use super::super::rows::CudaRows;
use super::super::scratch::{Scratch, Use};
use super::kernels::{Grid, by_value, launch};
use super::layout::*;
use super::results::token_logprob;
use crate::device::{DeviceError, Result};
use crate::engine::contract::TokenLogprob;
use crate::speculate::sampling::MAX_LOGPROBS;

/// Rows looked at in one launch.
const BATCH: usize = 64;

/// Where a batch's arrays lie in scratch.
struct Places {
    next: u64,
    arrivals: u64,
    reports: u64,
    parts: u64,
    candidates: u64,
}

/// Scratch for one batch; called once at start, so that it exists before scratch is frozen.
pub(super) fn reserve(scratch: &mut Scratch, gpu: &Gpu, vocab: usize) -> Result<u64> {
    Ok(places(scratch, gpu, vocab)?.next)
}

fn places(scratch: &mut Scratch, gpu: &Gpu, vocab: usize) -> Result<Places> {
    let chunks = vocab.div_ceil(TOP_CHUNK);
    let sizes = [BATCH * 4, BATCH * 4, BATCH * size_of::<Report>(), BATCH * chunks * TOP_PART_BYTES, BATCH * chunks * TOP_CAP * 8];
    let bytes: usize = sizes.iter().map(|size| size.next_multiple_of(256)).sum();
    let mut at = scratch.get(gpu, Use::Sampler, bytes)?;
    let [next, arrivals, reports, parts, candidates] = sizes.map(|size| {
        let here = at;
        at += size.next_multiple_of(256) as u64;
        here
    });
    Ok(Places { next, arrivals, reports, parts, candidates })
}

impl CudaDevice {
    /// Row i of `logits` predicts `next[i]`; as many rows as both sides have.
    pub(in super::super) fn report_prompt(&self, logits: &CudaAct, rows: &CudaRows, next: &[u32], top: u32) -> Result<Vec<TokenLogprob>> {
        let vocab = self.limits.vocab;
        if logits.width < vocab || vocab > MAX_VOCAB {
            return Err(DeviceError(format!("logits of {} tokens, wanted {vocab} (at most {MAX_VOCAB})", logits.width)));
        }
        let count = rows.bound.min(next.len()).min(logits.rows);
        let places = places(&mut self.scratch.borrow_mut(), &self.gpu, vocab)?;
        let mut out = Vec::with_capacity(count);
        for start in (0..count).step_by(BATCH) {
            let batch = &next[start..count.min(start + BATCH)];
            out.extend(self.report_batch(logits, start, batch, (top as usize).min(MAX_LOGPROBS), &places)?);
        }
        Ok(out)
    }

    fn report_batch(&self, logits: &CudaAct, start: usize, next: &[u32], top: usize, places: &Places) -> Result<Vec<TokenLogprob>> {
        let (gpu, vocab) = (&self.gpu, self.limits.vocab);
        let pointers = RoundPointers {
            top_parts: places.parts,
            candidates: places.candidates,
            arrivals: places.arrivals,
            vocab: vocab as i32,
            ..RoundPointers::default()
        };
        let from = logits.view(gpu).at + (start * logits.width * 4) as u64;
        let mut reports = vec![<Report as bytemuck::Zeroable>::zeroed(); next.len()];
        let grid = Grid::new(vocab.div_ceil(TOP_CHUNK), next.len(), 256);
        let mut values = [from, logits.width as u64, places.next, (top as i32).bits(), places.reports];
        let stream = gpu.stream.cu_stream();
        // SAFETY: scratch holds a batch; the parameters are those of `round_report_prompt`; both copies are awaited below.
        unsafe {
            result::memset_d8_async(places.arrivals, 0, BATCH * 4, stream).during("clearing counters")?;
            result::memcpy_htod_async(places.next, next, stream).during("handing over prompt tokens")?;
            launch(gpu, &self.rounds.report_prompt, grid, &[by_value(&pointers)], &mut values)?;
            result::memcpy_dtoh_async(&mut reports, places.reports, stream).during("reading log-probabilities")?;
        }
        gpu.synchronize()?;
        Ok(reports.iter().map(token_logprob).collect())
    }
}
