//! Requests join and leave: their parameters, slot tables, biases and counts.

use cudarc::driver::{CudaSlice, DevicePtr};

use super::super::buffers::Argument;
use super::super::device::CudaDevice;
use super::CudaRound;
use super::kernels::{Grid, by_value, launch};
use super::layout::*;
use crate::device::{Admission, DeviceError, Result};
use crate::speculate::sampling::{GREEDY_BELOW, MAX_LOGPROBS};

/// What the host remembers of an admitted request.
pub(super) struct Running {
    /// Slots it holds.
    pub slots: usize,
    /// Committed tokens when last read, and rows planned since.
    pub length: usize,
    pub planned: usize,
    pub draws: bool,
    pub reports: bool,
    vectors: Vec<CudaSlice<u32>>,
}

impl CudaRound {
    pub(super) fn running(&self, request: usize) -> Result<&Running> {
        self.requests.get(request).and_then(Option::as_ref).ok_or_else(|| DeviceError(format!("request {request} was not admitted")))
    }

    /// Takes a request in. One kernel; allocates only where the vectors set aside for biases and penalties are all lent.
    pub fn admit(&mut self, device: &CudaDevice, request: usize, admission: Admission) -> Result<()> {
        if request >= self.requests.len() {
            return Err(DeviceError(format!("request index {request} is out of range")));
        }
        if admission.slots.len() > self.memory.stride {
            let (found, wanted) = (admission.slots.len(), self.memory.stride);
            return Err(DeviceError(format!("request {request} brings {found} slots, wanted at most {wanted}")));
        }
        self.retire(device, request)?;
        let gpu = &device.gpu;
        let (sampling, vocab) = (&admission.sampling, self.limits.vocab);
        let mut vectors = Vec::new();
        let mut vector = |wanted: bool| -> Result<u64> {
            if !wanted {
                return Ok(0);
            }
            let vector = self.pool.take(gpu)?;
            let at = vector.device_ptr(&gpu.stream).0;
            vectors.push(vector);
            Ok(at)
        };
        let (seen, bias) = (vector(sampling.has_penalties())?, vector(!sampling.logit_bias.is_empty())?);
        let suppressed_ids = within(&admission.suppressed, vocab);
        let suppressed = if suppressed_ids.len() > INLINE_SUPPRESSED {
            vector(true)?
        } else {
            self.memory.suppressed + (request * INLINE_SUPPRESSED * 4) as u64
        };
        let biases = biases(&sampling.logit_bias, vocab);
        let (bias_ids, bias_values): (Vec<u32>, Vec<f32>) = biases.iter().copied().unzip();
        let prompt: &[u32] = if sampling.has_penalties() { &admission.prompt } else { &[] };

        let words = admission.slots.len() + suppressed_ids.len() + 2 * biases.len() + prompt.len();
        self.staging.reserve(gpu, words * 4, 5)?;
        let lists = AdmitLists {
            slots: self.staging.put(&admission.slots),
            suppressed: self.staging.put(&suppressed_ids),
            bias_ids: self.staging.put(&bias_ids),
            bias_values: self.staging.put(&bias_values),
            prompt: self.staging.put(prompt),
            slots_count: admission.slots.len() as u32,
            suppressed_count: suppressed_ids.len() as u32,
            bias_count: biases.len() as u32,
            prompt_count: prompt.len() as u32,
        };
        let data = RequestData {
            length: 0,
            anchor: 0,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            top_k: sampling.top_k,
            seed: sampling.seed,
            frequency: sampling.frequency_penalty,
            presence: sampling.presence_penalty,
            repetition: sampling.repetition_penalty,
            reported: admission.logprobs.map_or(-1, |top| (top as usize).min(MAX_LOGPROBS) as i32),
            free_from: admission.free_from,
            suppressed_count: suppressed_ids.len() as u32,
            drafts: u32::from(admission.drafts),
            bias_outside: sampling.logit_bias.iter().map(|entry| entry.0).find(|&token| token as usize >= vocab).unwrap_or(NONE),
            seen,
            bias,
            suppressed,
        };
        let structs = [by_value(&self.memory.pointers), by_value(&data), by_value(&lists)];
        // SAFETY: the parameters of `round_admit`; the staged lists stay until the next synchronisation.
        unsafe { launch(gpu, &device.rounds.admit, Grid::new(1, 1, 1024), &structs, &mut [(request as u32).bits()])? };
        self.requests[request] = Some(Running {
            slots: admission.slots.len(),
            length: 0,
            planned: 0,
            draws: sampling.temperature >= GREEDY_BELOW,
            reports: admission.logprobs.is_some(),
            vectors,
        });
        Ok(())
    }

    /// Forgets a request. Its vectors may be lent again at once: everything runs in one order.
    pub fn retire(&mut self, _device: &CudaDevice, request: usize) -> Result<()> {
        if let Some(running) = self.requests.get_mut(request).and_then(Option::take) {
            self.pool.give(running.vectors);
        }
        Ok(())
    }
}

/// The ids below `vocab`, each once.
fn within(ids: &[u32], vocab: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = ids.iter().copied().filter(|&id| (id as usize) < vocab).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// One bias per token of the vocabulary; repeated ones add up.
fn biases(list: &[(u32, f32)], vocab: usize) -> Vec<(u32, f32)> {
    let mut sorted: Vec<(u32, f32)> = list.iter().copied().filter(|entry| (entry.0 as usize) < vocab).collect();
    sorted.sort_by_key(|entry| entry.0);
    let mut out: Vec<(u32, f32)> = Vec::with_capacity(sorted.len());
    for (token, bias) in sorted {
        match out.last_mut() {
            Some(last) if last.0 == token => last.1 += bias,
            _ => out.push((token, bias)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_hold_each_token_of_the_vocabulary_once() {
        assert_eq!(within(&[7, 3, 9, 3], 9), [3, 7]);
        assert_eq!(biases(&[(5, 1.0), (2, -1.0), (5, 0.5), (8, 4.0)], 8), [(2, -1.0), (5, 1.5)]);
    }
}
