//! The automatic budgets of one round, chosen together: a round's time is one number for all its requests, the drafter's pass is paid
//! once however many draft, and a request that alone would gain from drafting may cost all others more than that. The engine asks once
//! a round.
//!
//! Rows are handed out in the order of what they yield, whoever's they are, until the round as a whole gains no more tokens per
//! microsecond (CaDDTree's rule over all requests); nobody drafting is one of the outcomes compared.

use super::auto::AutoBudget;
use super::budget::Budget;
use super::round_cost::{Curves, Size};

/// A round with drafts must promise this much more than one without: it is the best of many guesses, each with its noise, and what it
/// needs of the drafter's contexts, of all requests, is owed first.
const DRAFT_LEAD: f64 = 1.03;

/// A round of a size that the device must record first takes several times as long: it must promise this much more.
const NEW_LEAD: f64 = 1.03;

/// One request's choice: rows it verifies and tokens it is credited with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    pub budget: Budget,
    pub rows: usize,
    pub tokens: f64,
}

/// The requests of the round that choose nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub requests: usize,
    /// Those of them that draft.
    pub drafting: usize,
    /// Rows they verify.
    pub rows: usize,
    /// Tokens they are expected to emit (`AutoBudget::expected`).
    pub tokens: f64,
}

/// Chooses for every request; `AutoBudget::current` tells what. `cap`: most rows of one request.
pub fn choose(requests: &mut [&mut AutoBudget], cost: &Curves, fixed: Load, cap: usize) {
    let offers: Vec<Vec<Offer>> = requests.iter().map(|request| request.offers(cap)).collect();
    let mut round = Round::plain(&offers, cost, fixed);
    round.hand_out();
    round.settle();
    for ((request, offers), &chosen) in requests.iter_mut().zip(&offers).zip(&round.chosen) {
        request.take(offers[chosen].budget);
    }
}

/// A choice for all requests, and what it comes to.
struct Round<'a> {
    offers: &'a [Vec<Offer>],
    cost: &'a Curves<'a>,
    fixed: Load,
    /// By request, into its offers; the first is not to draft.
    chosen: Vec<usize>,
    sum: Sum,
}

#[derive(Clone, Copy)]
struct Sum {
    rows: usize,
    tokens: f64,
    drafting: usize,
}

impl Sum {
    fn with(self, old: &Offer, new: &Offer) -> Self {
        Self {
            rows: self.rows - old.rows + new.rows,
            tokens: self.tokens - old.tokens + new.tokens,
            drafting: self.drafting - usize::from(old.rows > 1) + usize::from(new.rows > 1),
        }
    }
}

impl<'a> Round<'a> {
    fn plain(offers: &'a [Vec<Offer>], cost: &'a Curves<'a>, fixed: Load) -> Self {
        let rows = fixed.rows + offers.iter().map(|offers| offers[0].rows).sum::<usize>();
        let tokens = fixed.tokens + offers.iter().map(|offers| offers[0].tokens).sum::<f64>();
        Self { offers, cost, fixed, chosen: vec![0; offers.len()], sum: Sum { rows, tokens, drafting: 0 } }
    }

    /// Tokens per microsecond, as far as they can be believed.
    fn rate(&self, sum: Sum) -> f64 {
        let drafting = self.fixed.drafting + sum.drafting;
        let size = Size { requests: self.fixed.requests + self.offers.len(), drafting, rows: sum.rows };
        let mut lead = if sum.drafting > 0 { DRAFT_LEAD } else { 1.0 };
        if self.cost.is_new(size) {
            lead *= NEW_LEAD;
        }
        sum.tokens / self.cost.micros(sum.rows, drafting > 0) / lead
    }

    /// Every request's worthwhile steps, steepest first, as far as the round is best.
    fn hand_out(&mut self) {
        let mut steps: Vec<Step> = Vec::with_capacity(4 * self.offers.len());
        for (request, offers) in self.offers.iter().enumerate() {
            climb(request, offers, &mut steps);
        }
        // A request's own steps grow flatter, so that they stay in order.
        steps.sort_by(|a, b| b.slope.total_cmp(&a.slope));
        let (mut sum, mut best, mut most, mut taken) = (self.sum, self.sum, self.rate(self.sum), 0);
        for (at, step) in steps.iter().enumerate() {
            let offers = &self.offers[step.request];
            sum = sum.with(&offers[step.from], &offers[step.to]);
            let rate = self.rate(sum);
            if rate > most {
                (best, most, taken) = (sum, rate, at + 1);
            }
        }
        steps[..taken].iter().for_each(|step| self.chosen[step.request] = step.to);
        self.sum = best;
    }

    /// What is best for each request, given the others: where cost has steps, single rows do not tell.
    fn settle(&mut self) {
        for (request, offers) in self.offers.iter().enumerate() {
            let now = self.chosen[request];
            let (mut best, mut most) = (now, self.rate(self.sum));
            for (at, offer) in offers.iter().enumerate() {
                let rate = self.rate(self.sum.with(&offers[now], offer));
                if rate > most {
                    (best, most) = (at, rate);
                }
            }
            self.sum = self.sum.with(&offers[now], &offers[best]);
            self.chosen[request] = best;
        }
    }
}

/// From one offer of a request to a larger one, at so many tokens a row.
struct Step {
    request: usize,
    from: usize,
    to: usize,
    slope: f64,
}

/// The upper hull of a request's offers from the first on: each next one is the one that yields most per row.
fn climb(request: usize, offers: &[Offer], steps: &mut Vec<Step>) {
    let (mut from, mut last) = (0, f64::INFINITY);
    loop {
        let slope = |to: usize| (offers[to].tokens - offers[from].tokens) / (offers[to].rows - offers[from].rows) as f64;
        let larger = (0..offers.len()).filter(|&to| offers[to].rows > offers[from].rows);
        let Some(to) = larger.max_by(|&a, &b| slope(a).total_cmp(&slope(b))) else { return };
        // Never steeper than the one before, not even by rounding: a step presupposes it.
        last = slope(to).min(last);
        if last <= 0.0 {
            return;
        }
        steps.push(Step { request, from, to, slope: last });
        from = to;
    }
}
