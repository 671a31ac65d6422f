//! The state of rounds on the CPU: requests, trees, samples, and what they turn into.

use std::cell::RefCell;

use super::mla::CpuLatents;
use super::parallel::{SharedMut, split_fine};
use super::rows::CpuRows;
use crate::device::{Admission, DeviceError, HostTree, Limits, Outcome, Result, Share};
use crate::speculate::budget::MAX_ROWS;
use crate::speculate::sampling::{BadLogits, History, RowLimits, SamplerScratch, Seen, logprobs, pick, uniform};
use crate::speculate::tree::{Marginals, Tree, marginals_from_logits};
use crate::speculate::walk::walk;

/// One admitted request.
struct Running {
    admission: Admission,
    /// Committed tokens: the anchor's position.
    length: usize,
    anchor: u32,
    seen: Option<Seen>,
}

/// See the module.
pub struct CpuRound {
    limits: Limits,
    requests: Vec<Option<Running>>,
    shares: Vec<Share>,
    trees: Vec<Tree>,
    /// `[shares][slots of a block][MAX_ROWS]` best ids and log-probabilities.
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    /// Allowed tokens per share; empty = all.
    masks: Vec<Vec<u32>>,
    picks: Vec<std::result::Result<u32, BadLogits>>,
    /// Log-probabilities of the picked tokens of every row, where wanted.
    reports: Vec<Option<crate::engine::contract::TokenLogprob>>,
    outcomes: Vec<Outcome>,
}

thread_local! {
    static SAMPLER: RefCell<SamplerScratch> = RefCell::new(SamplerScratch::new(0));
}

impl CpuRound {
    /// Room for what `limits` allows.
    pub fn new(limits: &Limits) -> Self {
        let slots = limits.block.saturating_sub(1);
        Self {
            limits: limits.clone(),
            requests: (0..limits.requests).map(|_| None).collect(),
            shares: Vec::with_capacity(limits.requests),
            trees: (0..limits.requests).map(|_| Tree::new(0)).collect(),
            ids: vec![0; limits.requests * slots * MAX_ROWS],
            logprobs: vec![0.0; limits.requests * slots * MAX_ROWS],
            masks: vec![Vec::new(); limits.requests],
            picks: Vec::with_capacity(limits.verify_rows),
            reports: Vec::with_capacity(limits.verify_rows),
            outcomes: Vec::new(),
        }
    }

    fn running(&self, request: usize) -> Result<&Running> {
        self.requests.get(request).and_then(Option::as_ref).ok_or_else(|| DeviceError(format!("request {request} was not admitted")))
    }

    /// As [`Device::admit`](crate::device::Device::admit).
    pub fn admit(&mut self, request: usize, admission: Admission) -> Result<()> {
        let place = self.requests.get_mut(request).ok_or_else(|| DeviceError(format!("request index {request} is out of range")))?;
        let seen = admission.sampling.has_penalties().then(|| {
            let mut seen = Seen::new(self.limits.vocab);
            seen.reset(&admission.prompt);
            seen
        });
        *place = Some(Running { admission, length: 0, anchor: 0, seen });
        Ok(())
    }

    /// As [`Device::retire`](crate::device::Device::retire).
    pub fn retire(&mut self, request: usize) {
        self.requests[request] = None;
    }

    /// As [`Device::place_chunk`](crate::device::Device::place_chunk).
    pub fn place_chunk(&self, request: usize, start: usize, tokens: &[u32], rows: &mut CpuRows) -> Result<()> {
        let slots = &self.running(request)?.admission.slots;
        rows.clear();
        rows.open_group(request, &slots[..start]);
        for (i, &token) in tokens.iter().enumerate() {
            rows.push(token, start + i, slots[start + i]);
        }
        rows.close_group();
        Ok(())
    }

    /// The first token after a prompt of `prompt` tokens.
    pub fn begin(&mut self, request: usize, prompt: usize, logits: &[f32], mask: Option<&[u32]>) -> Result<()> {
        self.running(request)?;
        self.plan(&[Share { request, rows: 1, chain: false }])?;
        let running = self.requests[request].as_mut().expect("admitted");
        // The row in hand is the last prompt token, one position before the length.
        running.length = prompt - 1;
        self.trees[0].root(0);
        if let Some(mask) = mask {
            self.set_masks(0, mask);
        }
        self.sample(logits);
        let mut outcome = self.walk_one(0, 0).1;
        let running = self.requests[request].as_mut().expect("admitted");
        running.length = prompt;
        (outcome.path, outcome.tree) = (Vec::new(), None);
        self.outcomes.push(outcome);
        Ok(())
    }

    /// As [`Device::plan`](crate::device::Device::plan).
    pub fn plan(&mut self, shares: &[Share]) -> Result<()> {
        let rows: usize = shares.iter().map(|share| share.rows).sum();
        if shares.len() > self.limits.requests || rows > self.limits.verify_rows {
            let limits = (self.limits.requests, self.limits.verify_rows);
            return Err(DeviceError(format!("round of {} requests and {rows} rows exceeds {limits:?}", shares.len())));
        }
        self.shares.clear();
        self.shares.extend_from_slice(shares);
        self.outcomes.clear();
        self.masks.iter_mut().for_each(Vec::clear);
        Ok(())
    }

    /// As [`Device::place_blocks`](crate::device::Device::place_blocks).
    pub fn place_blocks(&self, mask_token: u32, rows: &mut CpuRows) -> Result<()> {
        rows.clear();
        for share in self.shares.iter().filter(|share| share.rows > 1) {
            let running = self.running(share.request)?;
            rows.open_group(share.request, &running.admission.slots[..running.length]);
            for s in 0..self.limits.block {
                rows.push(if s == 0 { running.anchor } else { mask_token }, running.length + s, 0);
            }
            rows.close_group();
        }
        Ok(())
    }

    /// As [`Device::marginals`](crate::device::Device::marginals).
    pub fn marginals(&mut self, logits: &[f32]) {
        let (vocab, block) = (self.limits.vocab, self.limits.block);
        let slots = block - 1;
        let drafting: Vec<(usize, usize)> =
            self.shares.iter().enumerate().filter(|(_, share)| share.rows > 1).map(|(at, share)| (at, share.rows - 1)).collect();
        let (ids, values) = (SharedMut::new(&mut self.ids), SharedMut::new(&mut self.logprobs));
        split_fine(drafting.len() * slots, 1, &|range| {
            for item in range {
                let (group, slot) = (item / slots, item % slots);
                let (share, k) = drafting[group];
                let at = (share * slots + slot) * MAX_ROWS;
                let row = &logits[(group * block + slot + 1) * vocab..][..vocab];
                // SAFETY: every item has its own slot.
                let (ids, values) = unsafe { (ids.range(at, MAX_ROWS), values.range(at, MAX_ROWS)) };
                ids.fill(0);
                values.fill(f32::NEG_INFINITY);
                marginals_from_logits(row, vocab, k, &mut ids[..k], &mut values[..k]);
            }
        });
    }

    /// As [`Device::grow`](crate::device::Device::grow).
    pub fn grow(&mut self) {
        let slots = self.limits.block.saturating_sub(1);
        for (at, share) in self.shares.iter().enumerate() {
            let anchor = self.requests[share.request].as_ref().map_or(0, |running| running.anchor);
            let (tree, from) = (&mut self.trees[at], at * slots * MAX_ROWS);
            if share.rows == 1 || slots == 0 {
                tree.root(anchor);
                continue;
            }
            let until = from + slots * MAX_ROWS;
            let marginals = Marginals { depths: slots, k: MAX_ROWS, ids: &self.ids[from..until], logprobs: &self.logprobs[from..until] };
            if share.chain {
                tree.chain(anchor, &marginals, share.rows);
            } else {
                tree.grow(anchor, &marginals, share.rows);
            }
        }
    }

    /// As [`Device::place_trees`](crate::device::Device::place_trees).
    pub fn place_trees(&self, rows: &mut CpuRows) -> Result<()> {
        rows.clear();
        for (share, tree) in self.shares.iter().zip(&self.trees) {
            let running = self.running(share.request)?;
            let slots = &running.admission.slots;
            rows.open_group(share.request, &slots[..running.length]);
            for row in 0..tree.rows {
                // Row i writes to the slot of position length + i; accepted rows move to their own position at commit.
                rows.push(tree.token[row], running.length + usize::from(tree.depth[row]), slots[running.length + row]);
                rows.ancestors.push(tree.ancestors[row]);
            }
            rows.close_group();
        }
        Ok(())
    }

    /// As [`Device::read_trees`](crate::device::Device::read_trees).
    pub fn read_trees(&self) -> Vec<HostTree> {
        let trees = self.shares.iter().zip(&self.trees);
        trees.map(|(_, tree)| HostTree { tokens: tree.token[..tree.rows].to_vec(), parents: tree.parent[..tree.rows].to_vec() }).collect()
    }

    /// As [`Device::set_masks`](crate::device::Device::set_masks).
    pub fn set_masks(&mut self, share: usize, masks: &[u32]) {
        self.masks[share].clear();
        self.masks[share].extend_from_slice(masks);
    }

    /// The first verify row of every share.
    fn firsts(&self) -> Vec<usize> {
        let rows = self.shares.iter().zip(&self.trees).map(|(_, tree)| tree.rows);
        rows.scan(0, |next, rows| Some(std::mem::replace(next, *next + rows))).collect()
    }

    /// As [`Device::sample`](crate::device::Device::sample).
    pub fn sample(&mut self, logits: &[f32]) {
        let vocab = self.limits.vocab;
        let places: Vec<(usize, usize)> =
            self.shares.iter().zip(&self.trees).enumerate().flat_map(|(at, (_, tree))| (0..tree.rows).map(move |row| (at, row))).collect();
        self.picks.clear();
        self.picks.resize(places.len(), Ok(0));
        self.reports.clear();
        self.reports.resize(places.len(), None);
        let (picks, reports) = (SharedMut::new(&mut self.picks), SharedMut::new(&mut self.reports));
        let (requests, shares, trees, masks) = (&self.requests, &self.shares, &self.trees, &self.masks);
        split_fine(places.len(), 4, &|range| {
            SAMPLER.with_borrow_mut(|scratch| {
                for item in range {
                    let (at, row) = places[item];
                    let (tree, logits) = (&trees[at], &logits[item * vocab..(item + 1) * vocab]);
                    let Some(running) = requests[shares[at].request].as_ref() else { continue };
                    // The token after this row stands one position further.
                    let position = running.length + usize::from(tree.depth[row]) + 1;
                    let mut path = [0; MAX_ROWS];
                    let history = running.seen.as_ref().map(|seen| History { seen, path: tree.path_tokens(row, &mut path) });
                    let words = vocab.div_ceil(32);
                    let allowed = masks[at].get(row * words..(row + 1) * words);
                    let admission = &running.admission;
                    let banned: &[u32] = if position < admission.free_from as usize { &admission.suppressed } else { &[] };
                    let limits = RowLimits { history, allowed, banned };
                    let random = uniform(admission.sampling.seed, position as u64);
                    let picked = pick(logits, &admission.sampling, &limits, random, scratch);
                    // SAFETY: every item has its own place.
                    unsafe {
                        if let (Ok(token), Some(top)) = (picked, admission.logprobs) {
                            reports.range(item, 1)[0] = Some(logprobs(logits, token, top as usize));
                        }
                        picks.range(item, 1)[0] = picked;
                    }
                }
            });
        });
    }

    /// Walks one share's tree; its rows begin at `first`. Does not touch the cache.
    fn walk_one(&mut self, at: usize, first: usize) -> (Vec<u8>, Outcome) {
        let tree = &self.trees[at];
        let picks = &self.picks[first..first + tree.rows];
        let mut outcome = Outcome { tree: Some(tree.clone()), ..Outcome::default() };
        let tokens: Vec<u32> = picks.iter().map(|pick| pick.as_ref().copied().unwrap_or(u32::MAX)).collect();
        let mut path = [0u8; MAX_ROWS];
        let accepted = walk(tree, &tokens, &mut path);
        let path = path[..accepted].to_vec();
        // Only rows on the path matter: a row that cannot be sampled ends the request when the walk stands on it.
        if let Some(bad) = path.iter().find_map(|&row| picks[usize::from(row)].as_ref().err()) {
            outcome.fault = Some(bad.to_string());
            return (path, outcome);
        }
        outcome.tokens = path.iter().map(|&row| tokens[usize::from(row)]).collect();
        outcome.logprobs = path.iter().filter_map(|&row| self.reports[first + usize::from(row)].take()).collect();
        outcome.path = path.clone();
        let running = self.requests[self.shares[at].request].as_mut().expect("planned requests are admitted");
        running.length += accepted;
        running.anchor = *outcome.tokens.last().expect("the bonus token");
        if let Some(seen) = &mut running.seen {
            outcome.tokens.iter().for_each(|&token| seen.commit(token));
        }
        (path, outcome)
    }

    /// As [`Device::walk_and_commit`](crate::device::Device::walk_and_commit).
    pub fn walk_and_commit(&mut self, latents: &mut CpuLatents, accepted: &mut CpuRows) -> Result<()> {
        accepted.clear();
        for (at, first) in self.firsts().into_iter().enumerate() {
            let request = self.shares[at].request;
            let before = self.running(request)?.length;
            let (path, outcome) = self.walk_one(at, first);
            if outcome.fault.is_none() {
                let running = self.running(request)?;
                let slots = &running.admission.slots;
                for (j, &row) in path.iter().enumerate() {
                    // Ascending moves never overwrite a later source: path[j] >= j.
                    latents.move_row(slots[before + usize::from(row)], slots[before + j]);
                    if running.admission.drafts {
                        accepted.push(0, before + j, slots[before + j]);
                        accepted.sources.push((first + usize::from(row)) as u32);
                    }
                }
            }
            self.outcomes.push(outcome);
        }
        Ok(())
    }

    /// What the rounds since the last call gave.
    pub fn take_outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }
}
