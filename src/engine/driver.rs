//! The engine as warm-up, gate and benches drive it: on its own thread, before or without the queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::contract::{Event, Finished, LayerDiff, ModelInfo, Request, Sampling, Stop};
use super::scheduler::Engine;
use crate::device::identity::DeviceIdentity;
use crate::device::{Device, DeviceError, Verify};
use crate::model::tokenizer::Tokenizer;
use crate::speculate::auto::LADDER;
use crate::speculate::budget::Budget;

/// What one request produced.
#[derive(Clone, Debug)]
pub struct Generated {
    pub tokens: Vec<u32>,
    pub text: String,
    /// Log-probability reports, one per token where the request asked for them.
    pub logprobs: Vec<super::contract::TokenLogprob>,
    /// `Err` = the failure's message.
    pub end: Result<Finished, String>,
}

/// A loaded engine that is not serving yet. Independent of the device behind it.
pub trait Driver {
    fn set_verify(&mut self, mode: Verify) -> Result<(), DeviceError>;
    fn verify(&self) -> Verify;
    /// Runs requests together until all have ended.
    fn generate(&mut self, requests: Vec<Request>) -> Result<Vec<Generated>, DeviceError>;
    /// Worst differences per layer since the last call; filled in mode `validate`.
    fn take_validation(&mut self) -> Vec<LayerDiff>;
    fn tokenizer(&self) -> &Arc<Tokenizer>;
    fn info(&self) -> &ModelInfo;
    /// What does the arithmetic.
    fn device(&self) -> DeviceIdentity;
    /// See [`Device::allocations`], of rank 0.
    fn allocations(&self) -> u64;
    /// See [`Device::TIE_MARGIN`].
    fn tie_margin(&self) -> f32;
    /// A sign of life for the watchdog.
    fn beat(&self);
    /// What `/health` and the service manager are told while the engine is not ready yet.
    fn say(&self, what: String);
}

impl<D: Device> Driver for Engine<D> {
    fn set_verify(&mut self, mode: Verify) -> Result<(), DeviceError> {
        Engine::set_verify(self, mode)
    }

    fn verify(&self) -> Verify {
        Engine::verify(self)
    }

    fn generate(&mut self, requests: Vec<Request>) -> Result<Vec<Generated>, DeviceError> {
        let mut streams = Vec::with_capacity(requests.len());
        for request in requests {
            let (events, stream) = tokio::sync::mpsc::unbounded_channel();
            self.push(request, events);
            streams.push(stream);
        }
        while !self.is_idle() {
            self.beat();
            self.step()?;
        }
        Ok(streams.into_iter().map(collect).collect())
    }

    fn take_validation(&mut self) -> Vec<LayerDiff> {
        Engine::take_validation(self)
    }

    fn tokenizer(&self) -> &Arc<Tokenizer> {
        Engine::tokenizer(self)
    }

    fn info(&self) -> &ModelInfo {
        Engine::info(self)
    }

    fn device(&self) -> DeviceIdentity {
        Engine::device(self)
    }

    fn allocations(&self) -> u64 {
        Engine::allocations(self)
    }

    fn tie_margin(&self) -> f32 {
        D::TIE_MARGIN
    }

    fn beat(&self) {
        Engine::beat(self);
    }

    fn say(&self, what: String) {
        Engine::say(self, what);
    }
}

fn collect(mut stream: tokio::sync::mpsc::UnboundedReceiver<Event>) -> Generated {
    let mut generated = Generated { tokens: Vec::new(), text: String::new(), logprobs: Vec::new(), end: Err("no terminal event".into()) };
    while let Ok(event) = stream.try_recv() {
        match event {
            Event::Tokens(tokens) => {
                for token in tokens {
                    generated.tokens.push(token.id);
                    generated.text.push_str(&token.text);
                    generated.logprobs.extend(token.logprob);
                }
            }
            Event::Finished(finished) => generated.end = Ok(finished),
            Event::Failed(failure) => generated.end = Err(failure.message),
            Event::Started { .. } | Event::Prompt(_) | Event::Round(_) => {}
        }
    }
    generated
}

/// A plain greedy request.
pub fn greedy(prompt: Vec<u32>, max_tokens: u32, budget: Option<Budget>) -> Request {
    Request {
        prompt,
        sampling: Sampling::greedy(),
        stop: Stop::default(),
        max_tokens,
        min_tokens: 0,
        budget,
        logprobs: None,
        prompt_logprobs: None,
        constraint: None,
        trace: false,
    }
}

/// Runs rounds of every size once, so that buffers have grown, caches are warm and the cost of each size is known. A request that
/// fails is only logged: whether this engine may serve is for the gate and the first completion to say.
pub fn warm_up(driver: &mut dyn Driver) -> Result<Duration, DeviceError> {
    let began = Instant::now();
    let prompt: Vec<u32> = (1..=driver.info().max_model_len.saturating_sub(8).clamp(1, 16) as u32).collect();
    let room = (driver.info().max_model_len - prompt.len()).min(4) as u32;
    let sizes = LADDER.iter().map(|&rows| Budget::Tree(rows as u8)).chain([Budget::Off, Budget::Chain]);
    let max_rows = driver.info().max_rows;
    let mut failed = Vec::new();
    for budget in sizes.filter(|budget| !matches!(budget, Budget::Tree(rows) if usize::from(*rows) > max_rows)) {
        let mut request = greedy(prompt.clone(), room.max(1), Some(budget));
        request.stop.ignore_eos = true;
        failed.extend(driver.generate(vec![request])?.into_iter().filter_map(|generated| generated.end.err()));
    }
    if let Some(first) = failed.first() {
        tracing::warn!(requests = failed.len(), "failed in warm-up: {first}");
    }
    Ok(began.elapsed())
}
