//! One request while the engine works on it: what it has emitted, when it must stop, what is counted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::DraftContext;
use super::contract::{Event, Failure, FailureKind, FinishReason, Finished, Speculation, StopMatch, Timing, Token, TokenLogprob};
use super::handle::Submission;
use super::text::TextStream;
use crate::cache::slots::Lease;
use crate::device::Outcome;
use crate::model::tokenizer::Tokenizer;
use crate::speculate::auto::AutoBudget;
use crate::speculate::budget::Budget;
use crate::speculate::population::Record;

/// How a request ended.
pub enum End {
    Finished(FinishReason, Option<StopMatch>),
    Failed(Failure),
}

pub struct Active {
    pub submission: Submission,
    pub lease: Lease,
    /// Prompt tokens whose latents are in the cache.
    pub prefilled: usize,
    pub prompt: Arc<[u32]>,
    /// What the request asked for (or the server's setting).
    pub budget: Budget,
    /// How far the drafter's context reaches; `None` = none of its rounds may draft.
    pub context: Option<DraftContext>,
    pub auto: AutoBudget,
    /// How its drafts did against those of others.
    pub record: Record,
    /// What this round verifies.
    pub chosen: Budget,
    /// Why its constraint could not say what may follow: the round in hand chooses nothing.
    pub unmet: Option<String>,
    generated: u32,
    text: TextStream,
    stop_ids: Vec<u32>,
    spec: Speculation,
    timing: Timing,
    started: Instant,
    decoding_since: Option<Instant>,
    prompt_logprobs: Vec<Option<TokenLogprob>>,
}

impl Active {
    pub fn new(
        submission: Submission,
        lease: Lease,
        budget: Budget,
        context: Option<DraftContext>,
        auto: AutoBudget,
        model_stops: &[u32],
    ) -> Self {
        let stop = &submission.request.stop;
        let stop_ids = if stop.ignore_eos { Vec::new() } else { model_stops.to_vec() };
        let text = TextStream::new(&stop.strings, stop.include_in_output);
        let queued = submission.submitted.elapsed();
        let prompt: Arc<[u32]> = submission.request.prompt.as_slice().into();
        let active = Self {
            lease,
            prefilled: 0,
            budget,
            context,
            auto,
            record: Record::default(),
            chosen: Budget::Off,
            unmet: None,
            generated: 0,
            text,
            stop_ids,
            spec: Speculation::default(),
            timing: Timing { queued, ..Timing::default() },
            started: Instant::now(),
            decoding_since: None,
            prompt_logprobs: vec![None],
            prompt,
            submission,
        };
        active.send(Event::Started { prompt_tokens: active.prompt.len() as u32, cached_tokens: 0, queued });
        active
    }

    /// Sends an event; a receiver that is gone shows as a cancelled request.
    fn send(&self, event: Event) {
        if self.submission.events.send(event).is_err() {
            self.submission.place.cancel();
        }
    }

    pub fn is_cancelled(&self) -> bool {
        self.submission.place.is_cancelled()
    }

    pub fn is_prefilling(&self) -> bool {
        self.prefilled < self.prompt.len()
    }

    /// Committed tokens whose keys a round reads.
    pub fn prefix(&self) -> usize {
        self.prompt.len() + self.generated as usize
    }

    /// Tokens whose latents are in the cache once the prompt is done: all but the last generated one, which is the anchor. The
    /// anchor's position.
    pub fn committed(&self) -> usize {
        (self.prompt.len() + self.generated as usize).saturating_sub(1)
    }

    pub fn remaining(&self) -> usize {
        (self.submission.request.max_tokens - self.generated) as usize
    }

    pub fn add_prompt_logprobs(&mut self, logprobs: Vec<TokenLogprob>) {
        self.prompt_logprobs.extend(logprobs.into_iter().map(Some));
    }

    /// The prompt is done: its log-probabilities go out and the first token is about to.
    pub fn prefill_done(&mut self) {
        if let Some(context) = &mut self.context {
            context.prompt(self.prompt.len());
        }
        self.timing.prefill = self.started.elapsed();
        self.decoding_since = Some(Instant::now());
        if self.submission.request.prompt_logprobs.is_some() {
            let logprobs = std::mem::take(&mut self.prompt_logprobs);
            self.send(Event::Prompt(logprobs));
        }
    }

    /// Counts one round.
    pub fn count_round(&mut self, rows: usize, accepted: usize) {
        self.spec.rounds += 1;
        self.spec.drafted += rows as u64 - 1;
        self.spec.accepted += accepted as u64;
        if self.spec.histogram.len() <= accepted {
            self.spec.histogram.resize(accepted + 1, 0);
        }
        self.spec.histogram[accepted] += 1;
    }

    pub fn send_round(&self, event: impl FnOnce() -> Event) {
        if self.submission.request.trace {
            self.send(event());
        }
    }

    /// Takes in what a round gave, sends it, and says whether the request ends with it. Tokens after a stop are dropped.
    pub fn emit(&mut self, tokenizer: &Tokenizer, outcome: Outcome) -> Option<End> {
        if let Some(message) = self.unmet.take() {
            return Some(End::Failed(Failure { kind: FailureKind::Request, message }));
        }
        if let Some(message) = outcome.fault {
            return Some(End::Failed(Failure { kind: FailureKind::Model, message }));
        }
        let mut logprobs = outcome.logprobs.into_iter();
        let mut out = Vec::with_capacity(outcome.tokens.len());
        let mut end = None;
        for id in outcome.tokens {
            let (text, ended) = self.take(tokenizer, id);
            out.push(Token { id, text, logprob: logprobs.next() });
            if ended.is_some() {
                end = ended;
                break;
            }
        }
        if end.is_some()
            && let Some(last) = out.last_mut()
        {
            let ended_by_text = matches!(&end, Some(End::Finished(_, Some(StopMatch::Text(_)))));
            if !ended_by_text {
                last.text.push_str(&self.text.flush());
            }
        }
        self.send(Event::Tokens(out));
        end
    }

    /// One token: its text and whether it is the last.
    fn take(&mut self, tokenizer: &Tokenizer, id: u32) -> (String, Option<End>) {
        self.generated += 1;
        let request = &mut self.submission.request;
        let may_stop = self.generated > request.min_tokens;
        let asked = request.stop.ids.contains(&id);
        if self.stop_ids.contains(&id) || (asked && may_stop) {
            let matched = asked.then_some(StopMatch::Id(id));
            let text = if request.stop.include_in_output { self.text.push(tokenizer, id, false).text } else { self.text.flush() };
            return (text, Some(End::Finished(FinishReason::Stop, matched)));
        }
        if let Some(constraint) = &mut request.constraint {
            match constraint.commit(id) {
                Err(message) => return (String::new(), Some(End::Failed(Failure { kind: FailureKind::Model, message }))),
                Ok(true) => {
                    let text = self.text.push(tokenizer, id, may_stop).text;
                    return (text, Some(End::Finished(FinishReason::Stop, None)));
                }
                Ok(false) => {}
            }
        }
        let released = self.text.push(tokenizer, id, may_stop);
        if let Some(stop) = released.stop {
            return (released.text, Some(End::Finished(FinishReason::Stop, Some(StopMatch::Text(stop)))));
        }
        let full = self.generated >= request.max_tokens;
        (released.text, full.then_some(End::Finished(FinishReason::Length, None)))
    }

    /// The terminal event, and the two things the engine does with it: give the slots back, then send it.
    pub fn end(mut self, end: End) -> (Lease, Terminal) {
        self.timing.decode = self.decoding_since.map_or(Duration::ZERO, |since| since.elapsed());
        let result = match end {
            End::Failed(failure) => Err(failure),
            End::Finished(reason, stop_match) => Ok(Finished {
                reason,
                stop_match,
                prompt_tokens: self.prompt.len() as u32,
                cached_tokens: 0,
                completion_tokens: self.generated,
                speculation: self.spec,
                timing: self.timing,
            }),
        };
        (self.lease, Terminal { result, events: self.submission.events })
    }
}

/// A terminal event on its way.
pub struct Terminal {
    pub result: Result<Finished, Failure>,
    events: tokio::sync::mpsc::UnboundedSender<Event>,
}

impl Terminal {
    /// The receiver may be gone; then nobody waits for it.
    pub fn send(self) {
        let event = match self.result {
            Ok(finished) => Event::Finished(finished),
            Err(failure) => Event::Failed(failure),
        };
        let _ = self.events.send(event);
    }
}
