//! The automatic budget: how many rows are worth verifying, chosen each round so that tokens per microsecond are highest. One per
//! running request (started from its class's), asked and told by the engine around every round. The choice never changes the
//! text, only how long it takes.
//!
//! What a size would accept is known without trying it. A best-first tree of n rows is the first n rows of every larger one, so
//! one walk tells what each smaller budget would have accepted; the drafter's own path probabilities (their sum over rows is the
//! expected acceptance, DDTree proposition 1), corrected by the acceptance seen, tell it with less noise. What has not been seen for a
//! while is assumed to be as good as it can be (later rows are never more probable than earlier ones), which makes the
//! choice try it again just when that could pay.

use super::budget::{Budget, MAX_ROWS};
use super::cost::{CostModel, Curve};
use super::tree::Tree;

/// Tree sizes to choose from; 1 is plain decoding. The chain is a further choice.
pub const LADDER: [usize; 8] = [1, 4, 8, 16, 24, 32, 48, 64];

/// Share of a running mean that one round leaves in place (a memory of about 64 rounds).
const KEEP: f64 = 1.0 - 1.0 / 64.0;

/// The same for rounds that drafted nothing: what is known then ages at half the speed, which halves what retries cost.
const KEEP_IDLE: f64 = 1.0 - 1.0 / 128.0;

/// Rounds that the optimistic assumption counts as: small against one real observation, large against a forgotten one.
const DOUBT: f64 = 0.02;

/// The same for a rung's own acceptance against the drafter's prediction, which is noisier.
const KEEP_HITS: f64 = 1.0 - 1.0 / 192.0;

/// Rounds that "this rung is calibrated like all others" counts as.
const TRUST: f64 = 16.0;

/// A new choice must promise this much more than the one in use.
const HYSTERESIS: f64 = 1.01;

/// A chain must promise this much more than a tree: under the drafter's own probabilities the tree of as many rows is at least as good,
/// and what a chain would do is known with less noise than it seems.
const CHAIN_LEAD: f64 = 1.03;

/// Drafting must promise this much more than not drafting: it is the best of nine guesses, each with its noise, and what it needs of
/// the drafter's context is owed first.
const DRAFT_LEAD: f64 = 1.03;

/// Standard deviations by which a request is believed better than is known of it, so that it is tried where requests differ. With one
/// whole one, requests of one kind that come out just behind plain decoding are tried too often.
const HOPE: f64 = 0.4;

/// The other requests of the round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Rows they verify.
    pub rows: usize,
    /// Tokens they are expected to emit (`AutoBudget::expected`).
    pub tokens: f64,
}

/// A mean that forgets, with a value to fall back on.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    fn fade(&mut self, keep: f64) {
        self.sum *= keep;
        self.weight *= keep;
    }

    fn add(&mut self, value: f64) {
        self.sum += value;
        self.weight += 1.0;
    }

    fn or(&self, assumed: f64) -> f64 {
        (self.sum + DOUBT * assumed) / (self.weight + DOUBT)
    }
}

/// What is known of the rows between two rungs of the ladder.
#[derive(Clone, Copy, Debug, Default)]
struct Rung {
    /// Sum of the drafter's path probabilities over these rows.
    mass: Mean,
    /// Path probability of the last of them: bounds every later row's.
    edge: Mean,
    /// Of rounds that verified these rows: accepted against predicted.
    hits: Ratio,
}

/// Accepted rows and what the drafter had predicted, both forgetting.
#[derive(Clone, Copy, Debug, Default)]
struct Ratio {
    accepted: f64,
    predicted: f64,
}

impl Ratio {
    fn fade(&mut self, keep: f64) {
        self.accepted *= keep;
        self.predicted *= keep;
    }

    fn add(&mut self, accepted: f64, predicted: f64) {
        self.accepted += accepted;
        self.predicted += predicted;
    }

    /// Accepted per predicted, starting from `assumed` as if that had been seen on `trust` predicted rows.
    fn or(&self, assumed: f64, trust: f64) -> f64 {
        (self.accepted + trust * assumed) / (self.predicted + trust)
    }
}

/// Running estimates of one request or class.
#[derive(Clone, Debug)]
pub struct AutoBudget {
    /// Rows of a chain = most tokens of a round.
    block: usize,
    max_rows: usize,
    current: Budget,
    /// By position in `LADDER`; the first stands for the anchor, which is always accepted.
    rungs: [Rung; LADDER.len()],
    /// Over all rungs, lately: how far the drafter's probabilities can be believed at all.
    overall: Ratio,
    /// By depth from 1: how often the drafter's best token was right, given that the ones above it were.
    spine: [Mean; MAX_ROWS],
    /// Standard deviation among the requests it started like, as a multiple of what they accept on average.
    spread: f64,
    /// Rounds that their average counts as, and rounds that this request has drafted itself.
    inherited: f64,
    drafted: f64,
}

impl AutoBudget {
    /// `block`: the drafter's block size. `max_rows`: most rows the device verifies per request.
    pub fn new(block: usize, max_rows: usize) -> Self {
        Self {
            block: block.clamp(1, MAX_ROWS),
            max_rows: max_rows.clamp(1, MAX_ROWS),
            current: Budget::Off,
            rungs: [Rung::default(); LADDER.len()],
            overall: Ratio::default(),
            spine: [Mean::default(); MAX_ROWS],
            spread: 0.0,
            inherited: 1.0,
            drafted: 0.0,
        }
    }

    /// One of many that differ by `spread` (standard deviation, relative) and whose average counts as `rounds` rounds of its own: as
    /// long as it has drafted little itself, it may be one of the better ones.
    pub fn among(self, spread: f64, rounds: f64) -> Self {
        Self { spread, inherited: rounds, drafted: 0.0, ..self }
    }

    /// The same knowledge, counting for at most about `rounds` rounds: a start for a new request of the class, which its own
    /// rounds then outweigh.
    pub fn inherit(&self, rounds: f64) -> Self {
        let mut heir = self.clone();
        let most = heir.rungs.iter().map(|rung| rung.mass.weight).chain([heir.spine[1].weight]).fold(0.0, f64::max);
        let keep = (rounds / most.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        heir.fade(keep, keep);
        heir
    }

    /// The budget of the next round: `Off`, `Chain` or `Tree(rows)`. `context` is the prefix of all requests of the round.
    pub fn choose(&mut self, cost: &CostModel, context: usize, load: Load) -> Budget {
        let curve = cost.curve(context);
        let unknown = self.spread * (self.inherited / (self.inherited + self.drafted)).sqrt();
        let hope = 1.0 + HOPE * unknown;
        let (mut best, mut most, mut now) = (Budget::Off, 0.0, 0.0);
        for (budget, tokens) in self.forecasts() {
            let handicap = match budget {
                Budget::Off => 1.0,
                Budget::Chain => DRAFT_LEAD * CHAIN_LEAD,
                _ => DRAFT_LEAD,
            };
            let tokens = f64::min(1.0 + (tokens - 1.0) * hope, self.block as f64);
            let worth = (tokens + load.tokens) / curve.micros(load.rows + self.rows(budget)) / handicap;
            if worth > most {
                (best, most) = (budget, worth);
            }
            if budget == self.current {
                now = worth;
            }
        }
        if most > HYSTERESIS * now {
            self.current = best;
        }
        self.current
    }

    /// CaDDTree's rule for one grown tree: how many of its rows are worth verifying at this cost, given the probabilities this tree
    /// has. Rows are worth it while they add tokens faster than the best budget yields on average. Returns a rung of the
    /// ladder, at most `tree.rows` rounded up to one.
    pub fn trim(&self, tree: &Tree, cost: &CostModel, context: usize, load: Load) -> usize {
        let curve = cost.curve(context);
        let price = self.choices().map(|budget| self.rate(budget, &curve, load)).fold(0.0, f64::max);
        let (mut tokens, mut best, mut rows, usual) = (1.0, f64::NEG_INFINITY, 1, self.usual());
        for (at, &size) in LADDER.iter().enumerate().take_while(|&(_, &size)| size <= self.max_rows) {
            if at > 0 {
                tokens += self.calibration(at, usual) * mass(tree, at);
            }
            let surplus = f64::min(tokens, self.block as f64) - price * curve.micros(load.rows + size);
            if surplus > best {
                (best, rows) = (surplus, size);
            }
            if size >= tree.rows {
                break;
            }
        }
        rows
    }

    /// A round is over: of `tree`, the first `verified` rows (or the chain) were verified and `path` of them accepted, root first.
    /// `tree` may be larger than what was verified: its probabilities count all the same.
    pub fn observe(&mut self, budget: Budget, verified: usize, tree: &Tree, path: &[u8]) {
        self.fade(if tree.rows > 1 { KEEP } else { KEEP_IDLE }, KEEP_HITS);
        self.drafted += f64::from(u8::from(tree.rows > 1));
        self.observe_spine(verified.min(tree.rows), tree, path);
        if budget == Budget::Chain {
            return;
        }
        for at in 1..LADDER.len() {
            // A tree that ended short has nothing beyond its end; one cut at its budget leaves that unknown.
            let complete = tree.rows >= LADDER[at] || tree.rows < verified;
            if !complete {
                break;
            }
            let (predicted, edge) = (mass(tree, at), if tree.rows >= LADDER[at] { tree.logprob[LADDER[at] - 1].exp() } else { 0.0 });
            let rung = &mut self.rungs[at];
            rung.mass.add(predicted);
            rung.edge.add(edge);
            if verified >= LADDER[at] {
                let inside = LADDER[at - 1]..LADDER[at];
                let accepted = path.iter().filter(|&&row| inside.contains(&usize::from(row))).count() as f64;
                rung.hits.add(accepted, predicted);
                self.overall.add(accepted, predicted);
            }
        }
    }

    /// Tokens a round of this budget is expected to emit, the bonus token included.
    pub fn expected(&self, budget: Budget) -> f64 {
        let most = self.block as f64;
        match budget {
            Budget::Off => 1.0,
            Budget::Chain => self.expected_of_chain(),
            Budget::Tree(rows) => self.expected_of_tree(usize::from(rows)).min(most),
            Budget::Auto => self.expected(self.current),
        }
    }

    fn expected_of_chain(&self) -> f64 {
        let (mut tokens, mut reached, mut assumed) = (1.0, 1.0, 1.0);
        for depth in 1..self.block.min(self.max_rows) {
            assumed = self.spine[depth].or(assumed);
            reached *= assumed;
            tokens += reached;
        }
        tokens
    }

    /// Every choice with the tokens it is expected to emit (`expected`), in one pass.
    fn forecasts(&self) -> impl Iterator<Item = (Budget, f64)> {
        let (mut tokens, mut edge, usual) = (1.0, 1.0, self.usual());
        let most = self.block as f64;
        let trees = (1..LADDER.len()).take_while(|&at| LADDER[at] <= self.max_rows).map(move |at| {
            (tokens, edge) = self.with_rung(at, tokens, edge, usual);
            (Budget::Tree(LADDER[at] as u8), tokens.min(most))
        });
        [(Budget::Off, 1.0), (Budget::Chain, self.expected_of_chain())].into_iter().chain(trees)
    }

    fn expected_of_tree(&self, rows: usize) -> f64 {
        let (mut tokens, mut edge, usual) = (1.0, 1.0, self.usual());
        for at in (1..LADDER.len()).take_while(|&at| LADDER[at] <= rows) {
            (tokens, edge) = self.with_rung(at, tokens, edge, usual);
        }
        tokens
    }

    /// Tokens with one rung more, and the probability that bounds the next rung's rows; `edge` bounds this one's.
    fn with_rung(&self, at: usize, tokens: f64, edge: f64, usual: f64) -> (f64, f64) {
        let (rung, width) = (&self.rungs[at], (LADDER[at] - LADDER[at - 1]) as f64);
        (tokens + self.calibration(at, usual) * rung.mass.or(width * edge), rung.edge.or(edge))
    }

    /// Accepted rows per predicted one, over all rungs and a long time.
    fn usual(&self) -> f64 {
        let mut long = Ratio::default();
        self.rungs.iter().for_each(|rung| long.add(rung.hits.accepted, rung.hits.predicted));
        long.or(1.0, 1.0)
    }

    /// Accepted rows per predicted one: how all rungs do lately, times how this one does compared with all.
    fn calibration(&self, at: usize, usual: f64) -> f64 {
        let rung = &self.rungs[at];
        self.overall.or(1.0, 1.0) * rung.hits.or(usual, TRUST * rung.mass.or(1.0)) / usual
    }

    /// Tokens per microsecond of the whole round.
    fn rate(&self, budget: Budget, curve: &Curve, load: Load) -> f64 {
        (self.expected(budget) + load.tokens) / curve.micros(load.rows + self.rows(budget))
    }

    /// Rows that a round of this budget verifies.
    pub fn rows(&self, budget: Budget) -> usize {
        match budget {
            Budget::Off => 1,
            Budget::Chain => self.block.min(self.max_rows),
            Budget::Tree(rows) => usize::from(rows),
            Budget::Auto => self.rows(self.current),
        }
    }

    fn choices(&self) -> impl Iterator<Item = Budget> {
        let trees = LADDER.iter().skip(1).filter(|&&rows| rows <= self.max_rows).map(|&rows| Budget::Tree(rows as u8));
        [Budget::Off, Budget::Chain].into_iter().chain(trees)
    }

    /// Walks down the best-token path: each step that was verified tells whether the drafter's best token was right.
    fn observe_spine(&mut self, verified: usize, tree: &Tree, path: &[u8]) {
        let mut at = 0;
        for depth in 1..self.block {
            // The first child in row order is the most probable one.
            let Some(child) = (at + 1..verified).find(|&row| usize::from(tree.parent[row]) == at) else { return };
            let right = path.get(depth).is_some_and(|&row| usize::from(row) == child);
            self.spine[depth].add(f64::from(u8::from(right)));
            if !right {
                return;
            }
            at = child;
        }
    }

    fn fade(&mut self, keep: f64, keep_hits: f64) {
        for rung in &mut self.rungs {
            rung.mass.fade(keep);
            rung.edge.fade(keep);
            rung.hits.fade(keep_hits);
        }
        self.overall.fade(keep);
        self.spine.iter_mut().for_each(|step| step.fade(keep));
    }
}

/// The drafter's path probabilities summed over the tree's rows of one rung.
fn mass(tree: &Tree, at: usize) -> f64 {
    let end = LADDER[at].min(tree.rows);
    tree.logprob[LADDER[at - 1].min(end)..end].iter().map(|w| w.exp()).sum()
}

#[cfg(test)]
#[path = "auto_tests.rs"]
mod tests;
