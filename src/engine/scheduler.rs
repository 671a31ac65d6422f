//! The engine: takes requests from the queue, prefills prompts in chunks between rounds, advances every running request by one round
//! at a time. It owns the ranks and therefore the device; everything here runs on one thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::active::{Active, End};
use super::context::{DraftContext, Kept};
use super::contract::{Event, Failure, FailureKind, FinishReason, LayerDiff, ModelInfo, Observer, Request, RoundReport, RoundTrace};
use super::executor::{Chunk, Command};
use super::handle::{Health, Inbox, Place, Submission};
use super::options::slots_of_request;
use crate::cache::slots::Slots;
use crate::device::identity::DeviceIdentity;
use crate::device::{Admission, Device, DeviceError, Limits, Outcome, Share, Verify};
use crate::faults::{Fault, fires, planted};
use crate::model::tokenizer::Tokenizer;
use crate::parallel::ranks::Ranks;
use crate::speculate::budget::{Budget, MAX_ROWS};
use crate::speculate::cost::Prior;
use crate::speculate::joint::{self, Load};
use crate::speculate::population::Population;
use crate::speculate::round_cost::{RoundCost, Size};

/// How long an idle engine sleeps before it looks around.
const IDLE: Duration = Duration::from_millis(100);

/// What the engine needs besides its ranks.
pub struct Setup {
    pub limits: Limits,
    pub tokenizer: Arc<Tokenizer>,
    pub info: ModelInfo,
    /// Budget of requests that ask for none.
    pub budget: Budget,
    pub prior: Prior,
    pub observer: Arc<dyn Observer>,
    pub verify: Verify,
}

pub struct Engine<D: Device> {
    ranks: Ranks<D>,
    setup: Setup,
    inbox: Inbox,
    slots: Slots,
    waiting: VecDeque<Submission>,
    active: Vec<Option<Active>>,
    /// By verify mode: both kernels together cost more than either, and the gate runs them just before requests come.
    cost: [RoundCost; 3],
    /// Acceptance of all requests lately: where a new one starts.
    population: Population,
    /// Worst differences per layer since they were last taken.
    validated: Vec<LayerDiff>,
}

impl<D: Device> Engine<D> {
    pub fn new(ranks: Ranks<D>, setup: Setup, inbox: Inbox) -> Self {
        Self {
            slots: Slots::new(setup.limits.slots),
            waiting: VecDeque::new(),
            active: (0..setup.limits.requests).map(|_| None).collect(),
            cost: [(); 3].map(|()| RoundCost::new(setup.prior, D::RECORDS)),
            population: Population::new(setup.limits.block, MAX_ROWS),
            validated: Vec::new(),
            ranks,
            setup,
            inbox,
        }
    }

    pub fn ranks(&mut self) -> &mut Ranks<D> {
        &mut self.ranks
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.setup.tokenizer
    }

    pub fn device(&self) -> DeviceIdentity {
        self.ranks.identity()
    }

    /// See [`Device::allocations`], of rank 0.
    pub fn allocations(&self) -> u64 {
        self.ranks.allocations()
    }

    pub fn info(&self) -> &ModelInfo {
        &self.setup.info
    }

    pub fn beat(&self) {
        self.inbox.shared.beat();
    }

    /// Forgets what earlier requests accepted; the text of warm-up and gate says nothing about users'.
    pub fn forget_acceptance(&mut self) {
        self.population = Population::new(self.setup.limits.block, MAX_ROWS);
    }

    /// How far the start has come.
    pub fn say(&self, what: String) {
        self.inbox.shared.loading(what);
    }

    pub fn take_validation(&mut self) -> Vec<LayerDiff> {
        std::mem::take(&mut self.validated)
    }

    pub fn verify(&self) -> Verify {
        self.setup.verify
    }

    /// Changes the verify mode for everything that follows.
    pub fn set_verify(&mut self, mode: Verify) -> Result<(), DeviceError> {
        self.setup.verify = mode;
        self.ranks.apply(Command::SetVerify(mode))
    }

    /// Serves until every handle is gone, or a drain has finished. A device error ends the engine: the requests in hand fail.
    pub fn run(&mut self) -> Result<(), DeviceError> {
        let result = self.serve();
        let (kind, message) = match &result {
            Ok(()) => (FailureKind::EngineDead, "the server is stopping".to_string()),
            Err(error) => (FailureKind::EngineDead, format!("the engine failed: {error}")),
        };
        if let Err(error) = &result {
            self.inbox.shared.set_health(Health::Dead(error.to_string()));
        }
        for request in 0..self.active.len() {
            self.close(request, End::Failed(Failure { kind, message: message.clone() }));
        }
        result
    }

    fn serve(&mut self) -> Result<(), DeviceError> {
        loop {
            self.inbox.shared.beat();
            if !self.collect() {
                return Ok(());
            }
            self.step()?;
        }
    }

    /// Takes what is in the queue. Sleeps while there is nothing to do; false when nobody can send any more.
    fn collect(&mut self) -> bool {
        let idle = self.is_idle();
        loop {
            let received = if idle && self.waiting.is_empty() {
                match self.inbox.queue.recv_timeout(IDLE) {
                    Ok(submission) => Some(submission),
                    Err(crossbeam_channel::RecvTimeoutError::Timeout) => None,
                    Err(crossbeam_channel::RecvTimeoutError::Disconnected) => return false,
                }
            } else {
                self.inbox.queue.try_recv().ok()
            };
            match received {
                Some(submission) => self.waiting.push_back(submission),
                None => return true,
            }
        }
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.active.iter().all(Option::is_none)
    }

    /// Puts a request in without the queue: the gate's and warm-up's way.
    pub fn push(&mut self, request: Request, events: UnboundedSender<Event>) {
        let place = Arc::new(Place::new(self.inbox.shared.clone()));
        self.waiting.push_back(Submission { request, events, place, submitted: Instant::now() });
    }

    /// One step: admissions, at most one prompt chunk, at most one round.
    pub fn step(&mut self) -> Result<(), DeviceError> {
        self.drop_cancelled();
        self.admit()?;
        if let Some(request) = self.next_prefill() {
            self.prefill(request)?;
        }
        self.round()
    }

    fn drop_cancelled(&mut self) {
        let stopping = self.inbox.shared.stop_requested();
        let cancelled = |submission: &Submission| stopping || submission.place.is_cancelled();
        let (gone, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut self.waiting).into_iter().partition(cancelled);
        self.waiting = kept;
        for submission in gone {
            submission.place.leave_queue();
            let _ = submission.events.send(Event::Finished(super::contract::Finished::aborted(submission.request.prompt.len())));
        }
        for request in 0..self.active.len() {
            if self.active[request].as_ref().is_some_and(|active| stopping || active.is_cancelled()) {
                self.close(request, End::Finished(FinishReason::Abort, None));
            }
        }
    }

    /// First come, first served: the head of the queue waits until its slots are free, and nobody overtakes it.
    fn admit(&mut self) -> Result<(), DeviceError> {
        while let Some(next) = self.waiting.front() {
            let Some(request) = self.active.iter().position(Option::is_none) else { break };
            let tokens = next.request.prompt.len() + next.request.max_tokens as usize;
            let Some(lease) = self.slots.take(slots_of_request(tokens)) else { break };
            let Some(submission) = self.waiting.pop_front() else { break };
            submission.place.leave_queue();
            let budget = submission.request.budget.unwrap_or(self.setup.budget);
            let context = (budget.drafts() && self.setup.limits.block > 1).then(|| DraftContext::new(request, self.ranks.kept_taps()));
            let active = Active::new(submission, lease, budget, context, self.population.request(), &self.setup.info.stop_ids);
            let admission = self.admission(&active);
            self.ranks.apply(Command::Admit { request, admission: Arc::new(admission) })?;
            self.active[request] = Some(active);
            self.report_load();
        }
        Ok(())
    }

    fn admission(&self, active: &Active) -> Admission {
        let request = &active.submission.request;
        let mut suppressed = self.setup.info.stop_ids.clone();
        suppressed.extend_from_slice(&request.stop.ids);
        Admission {
            sampling: request.sampling.clone(),
            suppressed,
            free_from: (request.prompt.len() as u32).saturating_add(request.min_tokens),
            prompt: request.prompt.clone(),
            slots: active.lease.slots(),
            logprobs: request.logprobs,
            drafts: active.context.is_some(),
        }
    }

    /// The oldest request whose prompt is not in the cache yet.
    fn next_prefill(&self) -> Option<usize> {
        let prefilling = self.active.iter().enumerate().filter_map(|(at, active)| active.as_ref().map(|active| (at, active)));
        prefilling.filter(|(_, active)| active.is_prefilling()).min_by_key(|(_, active)| active.submission.submitted).map(|(at, _)| at)
    }

    fn prefill(&mut self, request: usize) -> Result<(), DeviceError> {
        let Some(active) = self.active[request].as_mut() else { return Ok(()) };
        let began = Instant::now();
        let start = active.prefilled;
        let end = active.prompt.len().min(start + self.setup.limits.chunk_rows);
        let last = end == active.prompt.len();
        let words = self.setup.limits.vocab.div_ceil(32);
        let mut mask = None;
        if let (true, Some(constraint)) = (last, &mut active.submission.request.constraint) {
            let mut masks = vec![0; words];
            let tail = active.prompt[end - 1];
            if let Err(message) = constraint.mask_tree(&[tail], &[0], words, &mut masks) {
                self.close(request, End::Failed(Failure { kind: FailureKind::Request, message }));
                return Ok(());
            }
            mask = Some(masks.into());
        }
        let logprobs = active.submission.request.prompt_logprobs.map(|top| {
            let next: Arc<[u32]> = active.prompt[start + 1..active.prompt.len().min(end + 1)].into();
            (next, top)
        });
        let chunk =
            Chunk { request, start, tokens: active.prompt[start..end].into(), last, drafts: active.context.is_some(), logprobs, mask };
        active.prefilled = end;
        self.ranks.apply(Command::Prefill(chunk))?;
        let logprobs = self.ranks.take_prompt_logprobs();
        let outcomes = if last { self.ranks.read_round()? } else { Vec::new() };
        self.setup.observer.prefill(end - start, began.elapsed());
        let Some(active) = self.active[request].as_mut() else { return Ok(()) };
        active.add_prompt_logprobs(logprobs);
        if last {
            active.prefill_done();
            for outcome in outcomes {
                if let Some(end) = active.emit(&self.setup.tokenizer, outcome) {
                    self.close(request, end);
                    break;
                }
            }
        }
        Ok(())
    }

    /// One round over every request whose prompt is done.
    fn round(&mut self) -> Result<(), DeviceError> {
        let shares = self.plan();
        if shares.is_empty() {
            return Ok(());
        }
        plant_faults();
        let began = Instant::now();
        let drafting = shares.iter().any(|share| share.rows > 1);
        self.extend_contexts(&shares, drafting)?;
        let caught_up = Instant::now();
        self.ranks.apply(Command::Draft(shares.as_slice().into()))?;
        let masks = self.masks(&shares)?;
        self.ranks.apply(Command::Verify(Arc::new(masks)))?;
        if !drafting {
            self.keep_taps(&shares)?;
        }
        let mut outcomes = self.ranks.read_round()?;
        // What was owed from earlier rounds says nothing about the next round of this size.
        let (took, own) = (began.elapsed(), caught_up.elapsed());
        if fires(Fault::NanLogits) {
            outcomes.iter_mut().for_each(|outcome| outcome.fault = Some("logit of token 0 is NaN (planted)".into()));
        }
        if fires(Fault::SamplerError) {
            outcomes.iter_mut().for_each(|outcome| outcome.fault = Some("no token could be chosen (planted)".into()));
        }
        self.learn(&shares, &outcomes, own);
        self.report(&shares, &outcomes, took);
        for (share, outcome) in shares.iter().zip(outcomes) {
            self.settle(share, outcome, took);
        }
        Ok(())
    }

    /// Brings drafter's contexts up to date where this round needs it ([`DraftContext`]).
    fn extend_contexts(&mut self, shares: &[Share], drafting: bool) -> Result<(), DeviceError> {
        for share in shares {
            let Some(active) = self.active[share.request].as_mut() else { continue };
            let committed = active.committed();
            if let Some(missing) = active.context.as_mut().and_then(|context| context.extend(committed, drafting)) {
                self.ranks.apply(Command::Extend(missing))?;
            }
        }
        Ok(())
    }

    /// Nobody drafted, so that row i of the pass is the anchor of share i.
    fn keep_taps(&mut self, shares: &[Share]) -> Result<(), DeviceError> {
        let kept = |(row, share): (usize, &Share)| {
            let active = self.active[share.request].as_ref()?;
            active.context.as_ref().map(|context| context.keep(row, active.committed()))
        };
        let rows: Arc<[Kept]> = shares.iter().enumerate().filter_map(kept).collect();
        if rows.is_empty() { Ok(()) } else { self.ranks.apply(Command::Keep(rows)) }
    }

    /// Who verifies how many rows: an equal part of the device's limit at most, and only an anchor where nothing can be drafted.
    fn plan(&mut self) -> Vec<Share> {
        let block = self.setup.limits.block;
        let mut running: Vec<(usize, &mut Active)> =
            self.active.iter_mut().enumerate().filter_map(|(at, a)| Some((at, a.as_mut()?))).collect();
        running.retain(|(_, active)| !active.is_prefilling());
        let cap = (self.setup.limits.verify_rows / running.len().max(1)).clamp(1, MAX_ROWS);
        let rows_of = |budget: Budget| match budget {
            Budget::Off | Budget::Auto => 1,
            Budget::Chain => block.min(cap),
            Budget::Tree(rows) => usize::from(rows).min(cap),
        };
        let (mut context, mut fixed, mut choosing) = (0, Load::default(), Vec::new());
        for (_, active) in &mut running {
            context += active.prefix();
            // Without a drafter, or with one token to go, there is nothing to draft.
            active.chosen = if block <= 1 || active.remaining() <= 1 { Budget::Off } else { active.budget };
            if active.chosen == Budget::Auto {
                choosing.push(&mut active.auto);
                continue;
            }
            let rows = rows_of(active.chosen);
            fixed.rows += rows;
            fixed.tokens += active.auto.expected(active.chosen);
            fixed.requests += 1;
            fixed.drafting += usize::from(rows > 1);
        }
        if !choosing.is_empty() {
            joint::choose(&mut choosing, &self.cost[self.setup.verify as usize].curves(context), fixed, cap);
        }
        let share = |(request, active): (usize, &mut Active)| {
            if active.chosen == Budget::Auto {
                active.chosen = active.auto.current();
            }
            Share { request, rows: rows_of(active.chosen), chain: active.chosen == Budget::Chain }
        };
        running.into_iter().map(share).collect()
    }

    /// Allowed tokens at every row of the requests under a constraint.
    fn masks(&mut self, shares: &[Share]) -> Result<Vec<(usize, Vec<u32>)>, DeviceError> {
        let constrained =
            |request: usize| self.active[request].as_ref().is_some_and(|active| active.submission.request.constraint.is_some());
        if !shares.iter().any(|share| constrained(share.request)) {
            return Ok(Vec::new());
        }
        let words = self.setup.limits.vocab.div_ceil(32);
        let trees = self.ranks.read_trees()?;
        let mut all = Vec::new();
        for (at, (share, tree)) in shares.iter().zip(trees).enumerate() {
            let Some(active) = self.active[share.request].as_mut() else { continue };
            let Some(constraint) = &mut active.submission.request.constraint else { continue };
            let mut masks = vec![0; tree.tokens.len() * words];
            // An empty mask makes sampling fail for this request alone.
            if let Err(message) = constraint.mask_tree(&tree.tokens, &tree.parents, words, &mut masks) {
                active.unmet = Some(message);
                masks.fill(0);
            }
            all.push((at, masks));
        }
        Ok(all)
    }

    /// Feeds the cost model and the acceptance estimates.
    fn learn(&mut self, shares: &[Share], outcomes: &[Outcome], took: Duration) {
        let rows = match D::RECORDS {
            true => shares.iter().map(|share| share.rows).sum(),
            false => outcomes.iter().filter_map(|outcome| outcome.tree.as_ref()).map(|tree| tree.rows).sum(),
        };
        let size = Size { requests: shares.len(), drafting: shares.iter().filter(|share| share.rows > 1).count(), rows };
        let context = shares.iter().filter_map(|share| self.active[share.request].as_ref()).map(Active::prefix).sum();
        self.cost[self.setup.verify as usize].observe(size, context, took.as_secs_f64() * 1e6);
        let drafting = size.drafting > 0;
        for (share, outcome) in shares.iter().zip(outcomes) {
            let (Some(active), Some(tree)) = (self.active[share.request].as_mut(), &outcome.tree) else { continue };
            self.setup.observer.draft(tree, &outcome.path);
            // A request that may not draft says nothing about drafts, not even that they were not worth it.
            if let Some(context) = &mut active.context {
                context.advance(outcome.path.len(), drafting);
                self.population.observe(&mut active.auto, &mut active.record, active.chosen, share.rows, tree, &outcome.path);
            }
        }
    }

    fn report(&mut self, shares: &[Share], outcomes: &[Outcome], took: Duration) {
        let rows_of = |outcome: &Outcome| outcome.tree.as_ref().map_or(0, |tree| tree.rows);
        let validation = if self.setup.verify == Verify::Validate { self.ranks.take_validation() } else { Vec::new() };
        LayerDiff::keep_worst(&mut self.validated, &validation);
        let report = RoundReport {
            requests: shares.len(),
            rows: outcomes.iter().map(rows_of).sum(),
            tokens: outcomes.iter().map(|outcome| outcome.tokens.len()).sum(),
            took,
            kv_slots_used: self.slots.used(),
            accepted: outcomes.iter().map(|o| (rows_of(o) as u16, o.path.len().saturating_sub(1) as u16)).collect(),
            validation,
        };
        self.setup.observer.round(&report);
    }

    fn settle(&mut self, share: &Share, outcome: Outcome, took: Duration) {
        let Some(active) = self.active[share.request].as_mut() else { return };
        if let (Some(tree), None) = (&outcome.tree, &outcome.fault) {
            active.count_round(tree.rows, outcome.path.len().saturating_sub(1));
            active.send_round(|| {
                Event::Round(RoundTrace {
                    tokens: tree.token[..tree.rows].to_vec(),
                    parents: tree.parent[..tree.rows].to_vec(),
                    path: outcome.path.clone(),
                    bonus: outcome.tokens.last().copied().unwrap_or_default(),
                    round_us: took.as_micros() as u64,
                })
            });
        }
        if let Some(end) = active.emit(&self.setup.tokenizer, outcome) {
            self.close(share.request, end);
        }
    }

    /// Ends a request: slots back, device told, terminal event.
    fn close(&mut self, request: usize, end: End) {
        let Some(active) = self.active[request].take() else { return };
        if active.context.is_some() {
            self.population.leave(&active.record);
        }
        let (lease, terminal) = active.end(end);
        match &terminal.result {
            Ok(finished) => self.setup.observer.finished(finished),
            Err(failure) => self.setup.observer.failed(failure),
        }
        self.slots.give_back(lease);
        // A device that cannot forget a request has failed; the next command reports it.
        if let Err(error) = self.ranks.apply(Command::Retire { request }) {
            tracing::error!(%error, "a request could not be retired");
        }
        self.report_load();
        // Last, so that whoever has seen the end also sees the slots free.
        terminal.send();
    }

    fn report_load(&self) {
        let running = self.active.iter().flatten().count();
        self.inbox.shared.set_running(running);
        self.setup.observer.queue(self.inbox.shared.waiting(), running);
        self.setup.observer.kv(self.slots.used(), 0);
    }
}

/// Test-only faults of a round.
fn plant_faults() {
    if let Some(milliseconds) = planted(Fault::SlowRound) {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }
    if fires(Fault::EnginePanic) {
        panic!("planted: the engine thread panics");
    }
    if fires(Fault::EngineHang) {
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
}
