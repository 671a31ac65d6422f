//! The automatic budget: how many rows are worth verifying, chosen each round so that tokens per microsecond are highest. One per
//! running request (started from its class's), told by the engine after every round; `joint` chooses for all requests of a round. The
//! choice never changes the text, only how long it takes.
//!
//! What a size would accept is known without trying it. A best-first tree of n rows is the first n rows of every larger one, so
//! one walk tells what each smaller budget would have accepted; the drafter's own path probabilities (their sum over rows is the
//! expected acceptance, DDTree proposition 1), corrected by the acceptance seen, tell it with less noise. What has not been seen for a
//! while is assumed to be as good as it can be (later rows are never more probable than earlier ones), which makes the
//! choice try it again just when that could pay.

use super::budget::{Budget, MAX_ROWS};
use super::joint::{self, Load, Offer};
use super::round_cost::{Curves, RoundCost};
use super::tree::Tree;

/// Tree sizes to choose from; 1 is plain decoding. The chain is a further choice.
pub const LADDER: [usize; 8] = [1, 4, 8, 16, 24, 32, 48, 64];

/// Share of a running mean that one round leaves in place (a memory of about 64 rounds).
const KEEP: f64 = 1.0 - 1.0 / 64.0;

/// The same for rounds that drafted nothing: what is known then ages at half the speed, which halves what retries cost.
const KEEP_IDLE: f64 = 1.0 - 1.0 / 128.0;

/// Rounds that the optimistic assumption counts as: small against one real observation, large against a forgotten one.
const DOUBT: f64 = 0.1;

/// The same for a rung's own acceptance against the drafter's prediction, which is noisier.
const KEEP_HITS: f64 = 1.0 - 1.0 / 192.0;

/// The same where others drafted but did not get as far as this rung.
const KEEP_UNSEEN: f64 = 1.0 - 1.0 / 1024.0;

/// Predicted rows that "this rung is calibrated as in the class, or like all others" counts as.
const TRUST: f64 = 4.0;

/// How far places where drafting is hard lie together in a text, 0 = not at all, 1 = in long stretches (`Rung::rounds`).
const STRETCH: f64 = 0.5;

/// A new choice must promise this much more than the one in use.
const HYSTERESIS: f64 = 1.01;

/// A chain must promise this much more than a tree: under the drafter's own probabilities the tree of as many rows is at least as good,
/// and what a chain would do is known with less noise than it seems.
const CHAIN_LEAD: f64 = 1.03;

/// Standard deviations by which a request is believed better than is known of it, so that it is tried where requests differ. With one
/// whole one, requests of one kind that come out just behind plain decoding are tried too often.
const HOPE: f64 = 0.4;

/// A weighted mean that forgets: a sum over the weight that it came of. With weights of 1 it is a plain mean; else it is one quantity
/// per other, such as accepted rows per predicted one.
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

    fn add(&mut self, sum: f64, weight: f64) {
        self.sum += sum;
        self.weight += weight;
    }

    /// Starting from `assumed`, as if that had been seen with a weight of `trust`.
    fn or(&self, assumed: f64, trust: f64) -> f64 {
        (self.sum + trust * assumed) / (self.weight + trust)
    }
}

/// What is known of the rows between two rungs of the ladder.
#[derive(Clone, Copy, Debug)]
struct Rung {
    /// Sum of the drafter's path probabilities over these rows.
    mass: Mean,
    /// Path probability of the last of them: bounds every later row's.
    edge: Mean,
    /// Rounds that a text takes with these rows per round without them.
    ///
    /// Tokens per round of another budget are not its mean over the rounds of this one where hard places lie together: a budget that gets
    /// further there leaves them in fewer rounds and meets easy ones the more often. A stretch that took a round of `w` expected tokens
    /// takes `w / r` rounds of a budget that expects `r` there; the sum over stretches is what that budget needs. On the bench's texts,
    /// seen from rounds of 8 rows, 32 rows get 1.21 times the tokens; their mean over those rounds is 1.15 times what was accepted and 1.19
    /// times what the drafter predicts, this estimate 1.22; from 4 rows it is 1.68 against 1.71 and 1.65.
    rounds: Mean,
    /// Of rounds that verified these rows: accepted against predicted. Rounds that did not say nothing, and make nothing older.
    hits: Mean,
    /// What a request starts from: accepted against predicted in its class, compared with all rungs.
    class: f64,
}

impl Default for Rung {
    fn default() -> Self {
        Self { mass: Mean::default(), edge: Mean::default(), rounds: Mean::default(), hits: Mean::default(), class: 1.0 }
    }
}

/// What a tree of some rungs comes to.
#[derive(Clone, Copy)]
struct Climb {
    /// Tokens per round, by what the drafter predicts and how far that has come true.
    tokens: f64,
    /// The same by the drafter's prediction alone.
    predicted: f64,
    /// Tokens of such rounds at the places of the rounds seen.
    mean: f64,
    /// Bounds the path probabilities of further rows.
    edge: f64,
}

impl Climb {
    const START: Self = Self { tokens: 1.0, predicted: 1.0, mean: 1.0, edge: 1.0 };
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
    overall: Mean,
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
            overall: Mean::default(),
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
        let usual = self.usual();
        for (at, rung) in heir.rungs.iter_mut().enumerate() {
            rung.class = self.compared(at, usual);
            rung.hits.fade(keep);
        }
        heir.fade(keep);
        heir
    }

    /// The budget of the next round where nobody else chooses: `Off`, `Chain` or `Tree(rows)`. `context` is the prefix of all
    /// requests of the round.
    pub fn choose(&mut self, cost: &RoundCost, context: usize, load: Load) -> Budget {
        joint::choose(&mut [self], &cost.curves(context), load, MAX_ROWS);
        self.current
    }

    /// What was chosen last.
    pub fn current(&self) -> Budget {
        self.current
    }

    /// Takes one of its offers.
    pub fn take(&mut self, budget: Budget) {
        self.current = budget;
    }

    /// Every choice of at most `cap` rows, not to draft first, with the tokens it is credited with: those expected, less what a
    /// choice must promise to be taken.
    pub fn offers(&self, cap: usize) -> Vec<Offer> {
        let unknown = self.spread * (self.inherited / (self.inherited + self.drafted)).sqrt();
        let hope = 1.0 + HOPE * unknown;
        let offer = |(budget, tokens): (Budget, f64)| {
            let handicap = match budget {
                Budget::Chain => CHAIN_LEAD,
                _ => 1.0,
            };
            let kept = if budget == self.current { HYSTERESIS } else { 1.0 };
            let tokens = f64::min(1.0 + (tokens - 1.0) * hope, self.block as f64) * kept / handicap;
            Offer { budget, rows: self.rows(budget), tokens }
        };
        self.forecasts().map(offer).filter(|offer| offer.budget == Budget::Off || offer.rows <= cap).collect()
    }

    /// CaDDTree's rule for one grown tree: how many of its rows are worth verifying at this cost, given the probabilities this tree
    /// has. Rows are worth it while they add tokens faster than the best budget yields on average. Returns a rung of the
    /// ladder, at most `tree.rows` rounded up to one.
    pub fn trim(&self, tree: &Tree, cost: &RoundCost, context: usize, load: Load) -> usize {
        let curve = cost.curves(context);
        let price = self.choices().map(|budget| self.rate(budget, &curve, load)).fold(0.0, f64::max);
        let (mut tokens, mut best, mut rows, usual) = (1.0, f64::NEG_INFINITY, 1, self.usual());
        let masses = Masses::of(tree);
        for (at, &size) in LADDER.iter().enumerate().take_while(|&(_, &size)| size <= self.max_rows) {
            if at > 0 {
                tokens += self.calibration(at, usual) * masses.mass[at];
            }
            let surplus = f64::min(tokens, self.block as f64) - price * curve.micros(load.rows + size, load.drafting > 0 || size > 1);
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
        self.observe_draft(budget, verified, tree, path, &Masses::of(tree));
    }

    /// The same where the tree's probabilities are summed already.
    pub(super) fn observe_draft(&mut self, budget: Budget, verified: usize, tree: &Tree, path: &[u8], masses: &Masses) {
        self.fade(if tree.rows > 1 { KEEP } else { KEEP_IDLE });
        for (rung, size) in self.rungs.iter_mut().zip(LADDER) {
            let verifies = verified >= size || tree.rows == 1;
            rung.hits.fade(if verifies { KEEP_HITS } else { KEEP_UNSEEN });
        }
        self.drafted += f64::from(u8::from(tree.rows > 1));
        self.observe_spine(verified.min(tree.rows), tree, path);
        if budget == Budget::Chain {
            return;
        }
        let here = (1..LADDER.len()).take_while(|&at| LADDER[at] <= verified).fold(1.0, |sum, at| sum + masses.mass[at]);
        let mut tokens = 1.0;
        for at in 1..LADDER.len() {
            // A tree that ended short has nothing beyond its end; one cut at its budget leaves that unknown.
            let complete = tree.rows >= LADDER[at] || tree.rows < verified;
            if !complete {
                break;
            }
            let (predicted, edge) = (masses.mass[at], masses.edge[at]);
            let rung = &mut self.rungs[at];
            rung.mass.add(predicted, 1.0);
            rung.edge.add(edge, 1.0);
            rung.rounds.weight += here / tokens;
            tokens += predicted;
            rung.rounds.sum += here / tokens;
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
            Budget::Chain => self.expected_of_chain(self.climbed(self.rows(budget))).min(most),
            Budget::Tree(rows) => self.climbed(usize::from(rows)).tokens.min(most),
            Budget::Auto => self.expected(self.current),
        }
    }

    /// The drafter's best path, whose rows are compared with the `tree` of as many.
    fn expected_of_chain(&self, tree: Climb) -> f64 {
        let (mut tokens, mut reached, mut assumed) = (1.0, 1.0, 1.0);
        for depth in 1..self.rows(Budget::Chain) {
            assumed = self.spine[depth].or(assumed, DOUBT);
            reached *= assumed;
            tokens += reached;
        }
        1.0 + (tokens - 1.0) * (tree.tokens - 1.0) / (tree.mean - 1.0).max(f64::MIN_POSITIVE)
    }

    /// Every choice with the tokens it is expected to emit (`expected`), in one pass.
    fn forecasts(&self) -> impl Iterator<Item = (Budget, f64)> {
        let (most, usual) = (self.block as f64, self.usual());
        let mut climbs = [Climb::START; LADDER.len()];
        for at in 1..LADDER.len() {
            climbs[at] = self.with_rung(at, climbs[at - 1], usual);
        }
        let beside = LADDER.partition_point(|&rows| rows <= self.rows(Budget::Chain)) - 1;
        let chain = self.expected_of_chain(climbs[beside]).min(most);
        let trees = (1..LADDER.len()).take_while(|&at| LADDER[at] <= self.max_rows);
        let trees = trees.map(move |at| (Budget::Tree(LADDER[at] as u8), climbs[at].tokens.min(most)));
        [(Budget::Off, 1.0), (Budget::Chain, chain)].into_iter().chain(trees)
    }

    fn climbed(&self, rows: usize) -> Climb {
        let usual = self.usual();
        (1..LADDER.len()).take_while(|&at| LADDER[at] <= rows).fold(Climb::START, |climb, at| self.with_rung(at, climb, usual))
    }

    /// The same with one rung more.
    fn with_rung(&self, at: usize, below: Climb, usual: f64) -> Climb {
        let (rung, width, calibration) = (&self.rungs[at], (LADDER[at] - LADDER[at - 1]) as f64, self.calibration(at, usual));
        let most = width * below.edge;
        let predicted = below.predicted / rung.rounds.or(below.predicted / (below.predicted + most), DOUBT);
        let mean = rung.mass.or(most, DOUBT);
        Climb {
            tokens: below.tokens + calibration * (mean + STRETCH * (predicted - below.predicted - mean)),
            mean: below.mean + calibration * mean,
            predicted,
            edge: rung.edge.or(below.edge, DOUBT),
        }
    }

    /// Accepted rows per predicted one, over all rungs and a long time.
    fn usual(&self) -> f64 {
        let mut long = Mean::default();
        self.rungs.iter().for_each(|rung| long.add(rung.hits.sum, rung.hits.weight));
        long.or(1.0, 1.0)
    }

    /// Accepted rows per predicted one: how all rungs do lately, times how this one does compared with all.
    fn calibration(&self, at: usize, usual: f64) -> f64 {
        self.overall.or(1.0, 1.0) * self.compared(at, usual)
    }

    /// Accepted rows per predicted one of this rung, compared with all.
    fn compared(&self, at: usize, usual: f64) -> f64 {
        let rung = &self.rungs[at];
        rung.hits.or(usual * rung.class, TRUST) / usual
    }

    /// Tokens per microsecond of the whole round.
    fn rate(&self, budget: Budget, curve: &Curves, load: Load) -> f64 {
        let rows = self.rows(budget);
        (self.expected(budget) + load.tokens) / curve.micros(load.rows + rows, load.drafting > 0 || rows > 1)
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
            self.spine[depth].add(f64::from(u8::from(right)), 1.0);
            if !right {
                return;
            }
            at = child;
        }
    }

    fn fade(&mut self, keep: f64) {
        for rung in &mut self.rungs {
            rung.mass.fade(keep);
            rung.edge.fade(keep);
            rung.rounds.fade(keep);
        }
        self.overall.fade(keep);
        self.spine[..self.block].iter_mut().for_each(|step| step.fade(keep));
    }
}

/// A tree's path probabilities by rung: their sum, and the last row's.
pub(super) struct Masses {
    mass: [f64; LADDER.len()],
    edge: [f64; LADDER.len()],
}

impl Masses {
    pub(super) fn of(tree: &Tree) -> Self {
        let mut masses = Self { mass: [0.0; LADDER.len()], edge: [0.0; LADDER.len()] };
        for at in 1..LADDER.len() {
            for row in LADDER[at - 1]..LADDER[at].min(tree.rows) {
                let probability = tree.logprob[row].exp();
                masses.mass[at] += probability;
                if row == LADDER[at] - 1 {
                    masses.edge[at] = probability;
                }
            }
        }
        masses
    }
}

#[cfg(test)]
#[path = "auto_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "recorded_tests.rs"]
mod recorded_tests;
