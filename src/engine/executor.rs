//! One rank at work: the steps of a round over a device, in the order that a graph would record them. Every rank runs the same
//! commands; the engine reads the results of rank 0.

use std::sync::Arc;

use super::context::{Kept, Missing};
use crate::device::{Admission, Device, DeviceError, HostTree, Limits, Outcome, Phase, Result, Share, Verify};
use crate::engine::contract::{LayerDiff, Sampling, TokenLogprob};
use crate::engine::options::slots_of_request;
use crate::model::drafter::Drafter;
use crate::model::target::{Form, Readers, Target};
use crate::speculate::budget::MAX_ROWS;

/// What the engine tells its ranks to do.
#[derive(Clone, Debug)]
pub enum Command {
    Admit {
        request: usize,
        admission: Arc<Admission>,
    },
    Retire {
        request: usize,
    },
    /// A prompt chunk: `tokens` at positions `start ..`.
    Prefill(Chunk),
    /// Draft and grow for these requests.
    Draft(Arc<[Share]>),
    /// Allowed tokens per row for some shares, then verify, sample, walk and commit. Where a request drafted, the drafter's context
    /// is extended by what every request accepted.
    Verify(Arc<Vec<(usize, Vec<u32>)>>),
    /// After a `Verify` in which nobody drafted: the taps of these rows are kept, in case a later round drafts.
    Keep(Arc<[Kept]>),
    /// Extends the drafter's context by kept taps.
    Extend(Missing),
    SetVerify(Verify),
    /// Rank 0 reads its results: the others read theirs and drop them. What a device may record depends on what was read, so ranks
    /// must read at the same places.
    Read,
}

/// Part of a prompt.
#[derive(Clone, Debug)]
pub struct Chunk {
    pub request: usize,
    pub start: usize,
    pub tokens: Arc<[u32]>,
    /// The prompt ends with this chunk: sample the first token.
    pub last: bool,
    /// Keep the drafter's context.
    pub drafts: bool,
    /// Log-probabilities of the prompt: the token after each row (as far as the prompt goes) and how many alternatives.
    pub logprobs: Option<(Arc<[u32]>, u32)>,
    /// Tokens allowed after the prompt.
    pub mask: Option<Arc<[u32]>>,
}

/// One rank: device, weights, caches and round state.
pub struct Executor<D: Device> {
    pub device: D,
    pub target: Target<D>,
    pub drafter: Option<Drafter<D>>,
    pub latents: D::Latents,
    pub contexts: Option<D::Contexts>,
    pub round: D::Round,
    chunk_rows: D::Rows,
    last_row: D::Rows,
    pub block_rows: D::Rows,
    pub tree_rows: D::Rows,
    pub accepted: D::Rows,
    gathered: D::Act,
    /// Taps of accepted tokens by which the drafter's context is not extended yet: a ring of `kept_per_request` rows per request,
    /// position p in row `p % kept_per_request`. Where a request's ring is full, its context is extended.
    kept: D::Act,
    kept_per_request: usize,
    /// Whether any request of the round in hand drafts.
    drafting: bool,
    prompt_logprobs: Vec<TokenLogprob>,
}

impl<D: Device> Executor<D> {
    /// Allocates everything that rounds need.
    pub fn new(device: D, target: Target<D>, drafter: Option<Drafter<D>>, limits: &Limits, taps: usize) -> Result<Self> {
        let latents = device.latents(target.layer_count(), limits.slots, target.shape())?;
        let contexts = drafter.as_ref().map(|drafter| device.contexts(drafter.layer_count(), limits.slots, drafter.shape())).transpose()?;
        let width = (taps * target.hidden()).max(1);
        let kept_per_request = limits.kept_taps(width);
        let mut executor = Self {
            latents,
            contexts,
            round: device.round(limits)?,
            chunk_rows: device.rows(limits.chunk_rows)?,
            last_row: device.rows(1)?,
            block_rows: device.rows(limits.requests * limits.block)?,
            tree_rows: device.rows(limits.verify_rows)?,
            accepted: device.rows(limits.verify_rows)?,
            gathered: device.act(limits.verify_rows, width)?,
            kept: device.act(if drafter.is_some() { limits.requests * kept_per_request } else { 1 }, width)?,
            kept_per_request,
            drafting: false,
            prompt_logprobs: Vec::new(),
            device,
            target,
            drafter,
        };
        if D::RECORDS {
            executor.reserve(limits)?;
        }
        Ok(executor)
    }

    pub fn apply(&mut self, command: &Command) -> Result<()> {
        match command {
            Command::Admit { request, admission } => self.device.admit(&mut self.round, *request, Admission::clone(admission)),
            Command::Retire { request } => self.device.retire(&mut self.round, *request),
            Command::Prefill(chunk) => self.prefill(chunk),
            Command::Draft(shares) => self.draft(shares),
            Command::Verify(masks) => self.verify(masks),
            Command::Read => {
                self.read_round()?;
                self.prompt_logprobs.clear();
                Ok(())
            }
            Command::Keep(rows) => self.keep(rows),
            Command::Extend(missing) => self.extend(missing),
            Command::SetVerify(mode) => {
                self.device.set_verify(*mode);
                Ok(())
            }
        }
    }

    fn prefill(&mut self, chunk: &Chunk) -> Result<()> {
        let Self { device, target, chunk_rows, last_row, latents, .. } = self;
        device.place_chunk(&self.round, chunk.request, chunk.start, &chunk.tokens, chunk_rows)?;
        let readers = Readers { drafter: chunk.drafts && self.drafter.is_some(), logprobs: chunk.logprobs.is_some() };
        target.prefill(device, chunk_rows, latents, readers, chunk.last.then_some(&mut *last_row))?;
        if let (Some(drafter), Some(contexts), true) = (&mut self.drafter, &mut self.contexts, chunk.drafts) {
            drafter.extend_context(device, &target.tapped, chunk_rows, contexts)?;
        }
        if let Some((next, top)) = &chunk.logprobs {
            target.head(device, chunk_rows)?;
            self.prompt_logprobs.extend(device.prompt_logprobs(&target.logits, chunk_rows, next, *top)?);
        }
        if chunk.last {
            target.head_of_prompt(device, last_row)?;
            device.begin(&mut self.round, chunk.request, chunk.start + chunk.tokens.len(), &target.logits, chunk.mask.as_deref())?;
        }
        Ok(())
    }

    fn draft(&mut self, shares: &[Share]) -> Result<()> {
        let Self { device, round, target, drafter, contexts, block_rows, .. } = self;
        device.plan(round, shares)?;
        self.drafting = shares.iter().any(|share| share.rows > 1);
        device.recorded(device.bucket(round, Phase::Draft), || {
            if let (Some(drafter), Some(contexts), true) = (drafter, contexts, self.drafting) {
                device.place_blocks(round, drafter.mask_token(), block_rows)?;
                drafter.draft(device, target, block_rows, contexts)?;
                device.marginals(round, &target.logits)?;
            }
            device.grow(round)
        })
    }

    fn verify(&mut self, masks: &[(usize, Vec<u32>)]) -> Result<()> {
        let Self { device, round, target, drafter, latents, contexts, tree_rows, accepted, gathered, drafting, .. } = self;
        for (share, masks) in masks {
            device.set_masks(round, *share, masks)?;
        }
        device.recorded(device.bucket(round, Phase::Verify), || {
            device.place_trees(round, tree_rows)?;
            target.forward(device, tree_rows, Form::Absorbed, latents)?;
            target.head(device, tree_rows)?;
            device.sample(round, &target.logits)?;
            device.walk_and_commit(round, latents, accepted)?;
            if let (Some(drafter), Some(contexts), true) = (drafter, contexts, *drafting) {
                device.gather_taps(&target.tapped, accepted, gathered)?;
                drafter.extend_context(device, gathered, accepted, contexts)?;
            }
            Ok(())
        })
    }

    /// Tokens per request whose taps can be kept.
    pub fn kept_taps(&self) -> usize {
        self.kept_per_request
    }

    /// The row of `kept` that belongs to a position.
    fn place(&self, request: usize, position: usize) -> usize {
        request * self.kept_per_request + position % self.kept_per_request
    }

    fn keep(&mut self, rows: &[Kept]) -> Result<()> {
        let places: Vec<(usize, usize)> = rows.iter().map(|row| (row.row, self.place(row.request, row.position))).collect();
        self.device.scatter_rows(&self.target.tapped, &places, &mut self.kept)
    }

    fn extend(&mut self, missing: &Missing) -> Result<()> {
        let &Missing { request, start, count } = missing;
        if count == 0 || count > self.kept_per_request {
            return Err(DeviceError(format!("context of {count} kept tokens, wanted 1 to {}", self.kept_per_request)));
        }
        let place = self.place(request, start);
        // The ring's end cuts the positions in two.
        let ahead = count.min(self.kept_per_request - start % self.kept_per_request);
        let Self { device, round, drafter, contexts, chunk_rows, gathered, kept, kept_per_request, .. } = self;
        let (Some(drafter), Some(contexts)) = (drafter, contexts) else { return Ok(()) };
        device.copy_range(kept, place, ahead, gathered, 0)?;
        device.copy_range(kept, request * *kept_per_request, count - ahead, gathered, ahead)?;
        // Only slots and positions of these rows matter; which tokens they are is in the taps.
        device.place_chunk(round, request, start, &vec![0; count], chunk_rows)?;
        drafter.extend_context(device, gathered, chunk_rows, contexts)
    }

    /// Runs the largest prompt chunk and the largest rounds on made-up tokens, so that every buffer of the device has its final
    /// size, then lets the device settle. Leaves no request behind; what it writes into the caches is never read.
    pub fn reserve(&mut self, limits: &Limits) -> Result<()> {
        let reach = slots_of_request(limits.context);
        let admission = |prompt: usize| Admission {
            sampling: Sampling::greedy(),
            suppressed: Vec::new(),
            free_from: 0,
            prompt: vec![0; prompt],
            slots: (0..reach).map(|position| (position % limits.slots) as u32).collect(),
            logprobs: None,
            drafts: true,
        };
        let tokens = limits.chunk_rows.min(limits.context - 1);
        let start = limits.context - 1 - tokens;
        for request in 0..limits.requests {
            self.device.admit(&mut self.round, request, admission(1))?;
        }
        let logprobs = Some((vec![0; tokens].into(), 1));
        let chunk = Chunk { request: 0, start, tokens: vec![0; tokens].into(), last: true, drafts: true, logprobs, mask: None };
        self.prefill(&chunk)?;
        self.prompt_logprobs.clear();
        self.read_round()?;
        for request in 1..limits.requests {
            let chunk = Chunk { request, start: 0, tokens: [0].into(), last: true, drafts: true, logprobs: None, mask: None };
            self.prefill(&chunk)?;
            self.read_round()?;
        }
        if self.drafter.is_some() {
            let count = self.kept_per_request;
            self.extend(&Missing { request: 0, start: limits.context - count, count })?;
        }
        let mode = self.device.verify_mode();
        for verify in [Verify::Off, Verify::On, Verify::Validate] {
            self.device.set_verify(verify);
            for requests in [limits.requests, (limits.verify_rows / MAX_ROWS).clamp(1, limits.requests)] {
                let rows = if self.drafter.is_some() { (limits.verify_rows / requests).clamp(1, MAX_ROWS) } else { 1 };
                let shares: Vec<Share> = (0..requests).map(|request| Share { request, rows, chain: false }).collect();
                self.draft(&shares)?;
                self.verify(&[])?;
                self.read_round()?;
            }
        }
        self.device.take_validation();
        self.device.set_verify(mode);
        for request in 0..limits.requests {
            self.device.retire(&mut self.round, request)?;
        }
        self.device.settle();
        Ok(())
    }

    /// The trees of the round in hand, in the order of its shares.
    pub fn read_trees(&self) -> Result<Vec<HostTree>> {
        self.device.read_trees(&self.round)
    }

    /// Results of the last `Verify`, or of a `Prefill` that ended its prompt.
    pub fn read_round(&mut self) -> Result<Vec<Outcome>> {
        self.device.read_round(&mut self.round)
    }

    /// Log-probabilities gathered by prompt chunks since the last call.
    pub fn take_prompt_logprobs(&mut self) -> Vec<TokenLogprob> {
        std::mem::take(&mut self.prompt_logprobs)
    }

    pub fn take_validation(&self) -> Vec<LayerDiff> {
        self.device.take_validation()
    }
}
