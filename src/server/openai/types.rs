//! Parts of answers that several routes share, as they are written to clients.

use std::sync::Arc;

use serde::Serialize;

use crate::engine::contract::{FinishReason, Finished, Speculation, StopMatch};

/// OpenAI's usage object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptDetails {
    pub cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionDetails {
    pub reasoning_tokens: u32,
}

impl Usage {
    /// Each prompt is counted once, however many choices it has.
    pub fn add_prompt(&mut self, tokens: u32, cached: u32) {
        self.prompt_tokens += tokens;
        self.prompt_tokens_details.cached_tokens += cached;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }

    pub fn add_completion(&mut self, tokens: u32) {
        self.completion_tokens += tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// vLLM's per-request `metrics` object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestMetrics {
    pub speculative_decoding: SpeculativeDecoding,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SpeculativeDecoding {
    /// Tokens per round, the bonus token included: 1 + accepted / rounds.
    pub mean_acceptance_length: f64,
    /// Accepted / drafted.
    pub draft_acceptance_rate: f64,
    /// Entry `d`: rounds that accepted exactly `d` drafted tokens.
    pub acceptance_histogram: Vec<u64>,
    pub num_spec_steps: u64,
    pub num_accepted_draft_tokens: u64,
    pub num_draft_tokens: u64,
    /// Drafted tokens per round, on average and rounded up.
    pub num_spec_tokens: u64,
}

/// Sums the rounds of all choices.
#[derive(Clone, Debug, Default)]
pub struct SpeculationSum(Speculation);

impl SpeculationSum {
    pub fn add(&mut self, more: &Speculation) {
        let sum = &mut self.0;
        sum.rounds += more.rounds;
        sum.drafted += more.drafted;
        sum.accepted += more.accepted;
        if sum.histogram.len() < more.histogram.len() {
            sum.histogram.resize(more.histogram.len(), 0);
        }
        sum.histogram.iter_mut().zip(&more.histogram).for_each(|(sum, more)| *sum += more);
    }

    pub fn metrics(&self) -> RequestMetrics {
        let sum = &self.0;
        let ratio = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        RequestMetrics {
            speculative_decoding: SpeculativeDecoding {
                mean_acceptance_length: 1.0 + ratio(sum.accepted, sum.rounds),
                draft_acceptance_rate: ratio(sum.accepted, sum.drafted),
                acceptance_histogram: sum.histogram.clone(),
                num_spec_steps: sum.rounds,
                num_accepted_draft_tokens: sum.accepted,
                num_draft_tokens: sum.drafted,
                num_spec_tokens: sum.drafted.div_ceil(sum.rounds.max(1)),
            },
        }
    }
}

/// `finish_reason` of a choice that ended without tool calls.
pub fn finish_reason(finished: &Finished) -> &'static str {
    match finished.reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort => "abort",
    }
}

/// vLLM's `stop_reason`: the id or string that matched, `null` for the end of the turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Id(u32),
    Text(String),
}

pub fn stop_reason(finished: &Finished) -> Option<StopReason> {
    finished.stop_match.as_ref().map(|found| match found {
        StopMatch::Id(id) => StopReason::Id(*id),
        StopMatch::Text(text) => StopReason::Text(text.clone()),
    })
}

/// What every object of one answer repeats.
#[derive(Clone, Debug)]
pub struct Head {
    pub id: String,
    pub created: u64,
    pub model: Arc<str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bonus_token_counts_in_the_mean_acceptance_length() {
        let mut sum = SpeculationSum::default();
        sum.add(&Speculation { rounds: 4, drafted: 28, accepted: 10, histogram: vec![0, 1, 1, 1, 1] });
        sum.add(&Speculation { rounds: 0, drafted: 0, accepted: 0, histogram: vec![] });
        let metrics = sum.metrics().speculative_decoding;
        assert_eq!(metrics.mean_acceptance_length, 3.5);
        assert_eq!((metrics.num_spec_tokens, metrics.num_spec_steps), (7, 4));
        assert_eq!(SpeculationSum::default().metrics().speculative_decoding.draft_acceptance_rate, 0.0);
    }

    #[test]
    fn usage_adds_up() {
        let mut usage = Usage::default();
        usage.add_prompt(17, 16);
        usage.add_completion(10);
        usage.add_completion(3);
        assert_eq!((usage.total_tokens, usage.prompt_tokens_details.cached_tokens), (30, 16));
    }
}
