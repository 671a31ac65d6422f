//! One rank at work: the steps of a round over a device, in the order that a graph would record them. Every rank runs the same
//! commands; the engine reads the results of rank 0.

use std::sync::Arc;

use crate::device::{Admission, Device, HostTree, Limits, Outcome, Result, Share, Verify};
use crate::engine::contract::{LayerDiff, TokenLogprob};
use crate::model::drafter::Drafter;
use crate::model::target::{Form, Target};

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
    /// Allowed tokens per row for some shares, then verify, sample, walk and commit.
    Verify(Arc<Vec<(usize, Vec<u32>)>>),
    SetVerify(Verify),
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
    contexts: Option<D::Contexts>,
    round: D::Round,
    chunk_rows: D::Rows,
    last_row: D::Rows,
    block_rows: D::Rows,
    tree_rows: D::Rows,
    accepted: D::Rows,
    gathered: D::Act,
    prompt_logprobs: Vec<TokenLogprob>,
}

impl<D: Device> Executor<D> {
    /// Allocates everything that rounds need.
    pub fn new(device: D, target: Target<D>, drafter: Option<Drafter<D>>, limits: &Limits, taps: usize) -> Result<Self> {
        let latents = device.latents(target.layer_count(), limits.slots, target.shape())?;
        let contexts = drafter.as_ref().map(|drafter| device.contexts(drafter.layer_count(), limits.slots, drafter.shape())).transpose()?;
        Ok(Self {
            latents,
            contexts,
            round: device.round(limits)?,
            chunk_rows: device.rows(limits.chunk_rows)?,
            last_row: device.rows(1)?,
            block_rows: device.rows(limits.requests * limits.block)?,
            tree_rows: device.rows(limits.verify_rows)?,
            accepted: device.rows(limits.verify_rows)?,
            gathered: device.act(limits.verify_rows, (taps * target.hidden()).max(1))?,
            prompt_logprobs: Vec::new(),
            device,
            target,
            drafter,
        })
    }

    pub fn apply(&mut self, command: &Command) -> Result<()> {
        match command {
            Command::Admit { request, admission } => self.device.admit(&mut self.round, *request, Admission::clone(admission)),
            Command::Retire { request } => self.device.retire(&mut self.round, *request),
            Command::Prefill(chunk) => self.prefill(chunk),
            Command::Draft(shares) => self.draft(shares),
            Command::Verify(masks) => self.verify(masks),
            Command::SetVerify(mode) => {
                self.device.set_verify(*mode);
                Ok(())
            }
        }
    }

    fn prefill(&mut self, chunk: &Chunk) -> Result<()> {
        let Self { device, target, chunk_rows, latents, .. } = self;
        device.place_chunk(&self.round, chunk.request, chunk.start, &chunk.tokens, chunk_rows)?;
        target.forward(device, chunk_rows, Form::Direct, latents)?;
        if let (Some(drafter), Some(contexts), true) = (&mut self.drafter, &mut self.contexts, chunk.drafts) {
            drafter.extend_context(device, &target.tapped, chunk_rows, contexts)?;
        }
        if let Some((next, top)) = &chunk.logprobs {
            target.head(device, chunk_rows)?;
            self.prompt_logprobs.extend(device.prompt_logprobs(&target.logits, chunk_rows, next, *top)?);
        }
        if chunk.last {
            target.head_of_last(device, chunk_rows, &mut self.last_row)?;
            device.begin(&mut self.round, chunk.request, chunk.start + chunk.tokens.len(), &target.logits, chunk.mask.as_deref())?;
        }
        Ok(())
    }

    fn draft(&mut self, shares: &[Share]) -> Result<()> {
        let Self { device, round, .. } = self;
        device.plan(round, shares)?;
        if let (Some(drafter), Some(contexts)) = (&mut self.drafter, &self.contexts)
            && shares.iter().any(|share| share.rows > 1)
        {
            device.place_blocks(round, drafter.mask_token(), &mut self.block_rows)?;
            drafter.draft(device, &mut self.target, &self.block_rows, contexts)?;
            device.marginals(round, &self.target.logits)?;
        }
        device.grow(round)
    }

    fn verify(&mut self, masks: &[(usize, Vec<u32>)]) -> Result<()> {
        let Self { device, round, target, tree_rows, accepted, .. } = self;
        device.place_trees(round, tree_rows)?;
        for (share, masks) in masks {
            device.set_masks(round, *share, masks)?;
        }
        target.forward(device, tree_rows, Form::Absorbed, &mut self.latents)?;
        target.head(device, tree_rows)?;
        device.sample(round, &target.logits)?;
        device.walk_and_commit(round, &mut self.latents, accepted)?;
        if let (Some(drafter), Some(contexts)) = (&mut self.drafter, &mut self.contexts) {
            device.gather_taps(&target.tapped, accepted, &mut self.gathered)?;
            drafter.extend_context(device, &self.gathered, accepted, contexts)?;
        }
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
