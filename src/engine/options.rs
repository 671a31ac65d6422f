//! What an engine is started with: models, device, limits, speculation. The `[engine]` table of the configuration.

use serde::{Deserialize, Serialize};

use crate::cache::slots::BLOCK;
use crate::device::Verify;
use crate::device::cuda::Numerics;
use crate::model::source::ModelSource;
use crate::speculate::budget::{Budget, MAX_ROWS};

/// Where the arithmetic runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// CUDA where a usable card is present, else the CPU.
    #[default]
    Auto,
    Cpu,
    Cuda,
}

/// Sizes and switches of the engine. Zero means "choose for me" where the comment says so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineOptions {
    /// Directory of the target model; empty = the embedded one.
    pub model: String,
    /// Directory of the drafter; empty = the embedded one beside the embedded model, otherwise none.
    pub drafter: String,
    /// Name under which the model is served; empty = the directory's name.
    pub served_name: String,
    /// Where the arithmetic runs: auto (CUDA where a usable card is present, else the CPU), cpu, cuda.
    pub device: DeviceKind,
    /// Verify attention: off (baseline kernel), validate (both), on (custom kernel).
    pub verify: Verify,
    /// Arithmetic of a CUDA device: fast, or exact (a request's bits do not depend on batch or tree). The CPU is always exact.
    pub numerics: Numerics,
    /// Rows verified per request and round: off, chain, auto, tree:N (N = 1 to 64 rows, root included).
    pub budget: Budget,
    /// Tensor-parallel ranks.
    pub ranks: usize,
    /// CPU threads over all ranks; 0 = one per core.
    pub threads: usize,
    /// Requests that run at once, 1 to 128.
    pub max_running: usize,
    /// Requests that may wait; one more is answered 429.
    pub max_waiting: usize,
    /// Longest prompt plus output, in tokens; 0 = 8192, or less where the model ends earlier.
    pub max_model_len: usize,
    /// KV slots, in tokens; 0 = enough for every running request at full length, at most 2 GiB of cache (CUDA: what the card has left).
    pub kv_tokens: usize,
    /// Prompt tokens per prefill chunk; running streams get a round between two chunks.
    pub chunk_tokens: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            model: String::new(),
            drafter: String::new(),
            served_name: String::new(),
            device: DeviceKind::Auto,
            verify: Verify::On,
            numerics: Numerics::Fast,
            budget: Budget::Auto,
            ranks: 1,
            threads: 0,
            max_running: 16,
            max_waiting: 256,
            max_model_len: 0,
            kv_tokens: 0,
            chunk_tokens: 512,
        }
    }
}

/// Default context limit.
const DEFAULT_CONTEXT: usize = 8192;

/// Most bytes of cache taken from the machine's memory without being asked for.
pub const DEFAULT_CACHE_BYTES: usize = 2 << 30;

/// Most KV slots: kernels count them in 32 bits with a sign.
const MAX_SLOTS: usize = 1 << 30;

/// Rows of one verify pass, over all requests.
pub const VERIFY_ROWS: usize = 512;

impl EngineOptions {
    /// The target's files.
    pub fn target(&self) -> ModelSource {
        if self.model.is_empty() { ModelSource::EmbeddedTarget } else { ModelSource::directory(&self.model) }
    }

    /// The drafter's files, if there is one.
    pub fn draft_source(&self) -> Option<ModelSource> {
        match (self.drafter.is_empty(), self.model.is_empty()) {
            (false, _) => Some(ModelSource::directory(&self.drafter)),
            (true, true) => Some(ModelSource::EmbeddedDrafter),
            (true, false) => None,
        }
    }

    /// Every value that cannot be used, as `key: found, wanted`.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut between = |key: &str, value: usize, low: usize, high: usize| {
            if !(low..=high).contains(&value) {
                problems.push(format!("engine.{key}: found {value}, wanted {low} to {high}"));
            }
        };
        between("ranks", self.ranks, 1, 64);
        between("max_running", self.max_running, 1, 128);
        between("max_waiting", self.max_waiting, 1, 1 << 20);
        between("chunk_tokens", self.chunk_tokens, BLOCK, 1 << 20);
        between("threads", self.threads, 0, 4096);
        if self.max_model_len == 1 {
            problems.push("engine.max_model_len: found 1, wanted at least 2 (a prompt and one token), or 0 to choose".into());
        }
        if self.kv_tokens != 0 && !(BLOCK..=MAX_SLOTS).contains(&self.kv_tokens) {
            problems.push(format!("engine.kv_tokens: found {}, wanted {BLOCK} to {MAX_SLOTS}, or 0 to choose", self.kv_tokens));
        }
        problems
    }

    /// Longest context for a model of `positions` positions.
    pub fn context(&self, positions: usize) -> usize {
        let wanted = if self.max_model_len == 0 { DEFAULT_CONTEXT } else { self.max_model_len };
        wanted.min(positions)
    }

    /// KV slots for contexts of `context` tokens and `bytes` of cache per slot, within `most` bytes of cache.
    pub fn slots(&self, context: usize, bytes: usize, most: usize) -> usize {
        if self.kv_tokens > 0 {
            return self.kv_tokens.next_multiple_of(BLOCK);
        }
        let one = slots_of_request(context);
        let affordable = (most / bytes.max(1)).max(one);
        (one * self.max_running).min(affordable).next_multiple_of(BLOCK)
    }
}

/// Slots a request of `tokens` tokens holds: draft rows stand beyond the last committed token, up to a full tree.
pub fn slots_of_request(tokens: usize) -> usize {
    (tokens + MAX_ROWS).next_multiple_of(BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_slots_that_cannot_be_counted_is_refused_by_name() {
        for kv_tokens in [1, BLOCK - 1, MAX_SLOTS + 1, usize::MAX] {
            let problems = EngineOptions { kv_tokens, ..EngineOptions::default() }.problems();
            assert!(problems.len() == 1 && problems[0].contains("engine.kv_tokens"), "{problems:?}");
        }
        for kv_tokens in [0, BLOCK, MAX_SLOTS] {
            assert!(EngineOptions { kv_tokens, ..EngineOptions::default() }.problems().is_empty());
        }
    }
}
