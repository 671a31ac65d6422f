//! What the requests of a server have in common, and how much they differ: where a new request's automatic budget starts. One per
//! engine, told of every round and of every request's end.
//!
//! Requests of one kind accept alike: then the experience of the others is worth many rounds of one's own, and nobody need try what
//! did not pay for them. Where kinds are mixed it is worth little, and a first draft or two tell what kind a request is. Both follow
//! from two variances, of rounds within a request and of requests among each other (one-way analysis of variance; the weight of the
//! others' mean is their ratio, as in James-Stein estimates).

use super::auto::{AutoBudget, Masses};
use super::budget::Budget;
use super::tree::Tree;

/// Share of what is known of variances that one request leaves in place (a memory of about 16 requests).
const KEEP: f64 = 1.0 - 1.0 / 16.0;

/// Assumed variances, and requests and rounds that the assumptions count as: little against what was seen, but what comes after a
/// long time without drafts may be anything.
const PRIOR_BETWEEN: f64 = 4.0;
const PRIOR_REQUESTS: f64 = 0.1;
const PRIOR_WITHIN: f64 = 0.25;
const PRIOR_ROUNDS: f64 = 4.0;

/// Rounds of its own that outweigh what a request took over, at least and at most.
const INHERITED: (f64, f64) = (1.0, 16.0);

/// See the module.
#[derive(Clone, Debug)]
pub struct Population {
    mean: AutoBudget,
    /// Sum over requests of the squared deviations of their rounds from their mean, and its degrees of freedom.
    within: f64,
    freedom: f64,
    /// Sum over requests of the squared deviation of their mean from what was expected, less what the rounds' own variance explains.
    between: f64,
    requests: f64,
}

/// Tokens of a request's drafting rounds, each as a multiple of what the population led to expect.
#[derive(Clone, Copy, Debug, Default)]
pub struct Record {
    rounds: f64,
    sum: f64,
    squares: f64,
}

impl Record {
    fn add(&mut self, multiple: f64) {
        self.rounds += 1.0;
        self.sum += multiple;
        self.squares += multiple * multiple;
    }
}

impl Population {
    /// See [`AutoBudget::new`].
    pub fn new(block: usize, max_rows: usize) -> Self {
        Self { mean: AutoBudget::new(block, max_rows), within: 0.0, freedom: 0.0, between: 0.0, requests: 0.0 }
    }

    /// The start of a new request.
    pub fn request(&self) -> AutoBudget {
        let between = self.between();
        let rounds = (self.within() / between.max(f64::MIN_POSITIVE)).clamp(INHERITED.0, INHERITED.1);
        self.mean.inherit(rounds).among(between.sqrt(), rounds)
    }

    /// A round of `request` is over: see [`AutoBudget::observe`].
    pub fn observe(&mut self, request: &mut AutoBudget, record: &mut Record, budget: Budget, verified: usize, tree: &Tree, path: &[u8]) {
        if tree.rows > 1 {
            // A device with many requests may have verified fewer rows than were chosen.
            let ran = if let Budget::Tree(rows) = budget { Budget::Tree(rows.min(verified as u8)) } else { budget };
            record.add(path.len() as f64 / self.mean.expected(ran));
        }
        let masses = Masses::of(tree);
        request.observe_draft(budget, verified, tree, path, &masses);
        self.mean.observe_draft(budget, verified, tree, path, &masses);
    }

    /// A request has ended.
    pub fn leave(&mut self, record: &Record) {
        for sum in [&mut self.within, &mut self.freedom, &mut self.between, &mut self.requests] {
            *sum *= KEEP;
        }
        if record.rounds > 0.0 {
            let mean = record.sum / record.rounds;
            self.within += (record.squares - record.sum * mean).max(0.0);
            self.freedom += record.rounds - 1.0;
            self.between += (mean - 1.0).powi(2) - self.within() / record.rounds;
            self.requests += 1.0;
        }
    }

    /// Variance of rounds within a request.
    fn within(&self) -> f64 {
        (self.within + PRIOR_ROUNDS * PRIOR_WITHIN) / (self.freedom + PRIOR_ROUNDS)
    }

    /// Variance of requests.
    fn between(&self) -> f64 {
        ((self.between + PRIOR_REQUESTS * PRIOR_BETWEEN) / (self.requests + PRIOR_REQUESTS)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::speculate::uniform::uniform;

    /// A population after requests whose rounds emit about `means[i % means.len()]` times what was expected.
    fn after(means: &[f64], requests: u64) -> Population {
        let mut population = Population::new(8, 64);
        for request in 0..requests {
            let mut record = Record::default();
            for round in 0..8 {
                record.add(means[request as usize % means.len()] * (0.5 + uniform(request, round)));
            }
            population.leave(&record);
        }
        population
    }

    #[test]
    fn variances_within_and_between_requests_are_told_apart() {
        let alike = after(&[1.0], 60);
        assert!((alike.within() / (1.0 / 12.0) - 1.0).abs() < 0.4, "{}", alike.within());
        assert!(alike.between() < 0.06, "{}", alike.between());
        let unlike = after(&[0.4, 1.6], 60);
        assert!((unlike.between() / 0.36 - 1.0).abs() < 0.3, "{}", unlike.between());
    }

    #[test]
    fn long_without_drafts_anything_is_possible_again() {
        let mut population = after(&[1.0], 60);
        let known = population.between();
        (0..100).for_each(|_| population.leave(&Record::default()));
        assert!(population.between() > 1.0 && known < 0.1);
    }
}
