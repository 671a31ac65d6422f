//! What a whole round costs, for choosing its requests' budgets together: rounds in which nobody drafts apart from rounds in which
//! anybody does, since the drafter's pass is a step that all requests of the round pay once, whoever wanted it. The engine observes
//! every round; `joint` asks.

use std::collections::HashSet;

use super::cost::{CostModel, Curve, Prior};

/// What was run in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Size {
    pub requests: usize,
    /// Requests that verify more than their anchor.
    pub drafting: usize,
    /// Rows verified, of all requests, anchors included.
    pub rows: usize,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct RoundCost {
    plain: CostModel,
    drafting: CostModel,
    /// On a device that records rounds: the sizes that it has a recording of. Its recordings are made for powers of two.
    recorded: Option<HashSet<Size>>,
}

impl RoundCost {
    /// `records`: see `Device::RECORDS`.
    pub fn new(prior: Prior, records: bool) -> Self {
        Self { plain: CostModel::new(prior), drafting: CostModel::new(prior), recorded: records.then(HashSet::new) }
    }

    /// A round over `context` prefix tokens (all requests) took `micros`. The round that a device recorded says nothing about those that
    /// replay it.
    pub fn observe(&mut self, size: Size, context: usize, micros: f64) {
        let mut size = size;
        if let Some(recorded) = &mut self.recorded {
            let padded = |n: usize| if n == 0 { 0 } else { n.next_power_of_two() };
            size = Size { requests: padded(size.requests), drafting: padded(size.drafting), rows: padded(size.rows) };
            if recorded.insert(size) {
                return;
            }
        }
        let (one, other) = match size.drafting {
            0 => (&mut self.plain, &mut self.drafting),
            _ => (&mut self.drafting, &mut self.plain),
        };
        one.observe(size.rows, context, micros);
        other.tick();
    }

    /// The costs at one context.
    pub fn curves(&self, context: usize) -> Curves {
        let of = |model: &CostModel| model.curve(context).hopeful_beyond(model.largest());
        let plain_known = self.plain.largest().is_some();
        Curves { plain: of(&self.plain), drafting: of(&self.drafting), plain_known, padded: self.recorded.is_some() }
    }
}

/// Microseconds by rows at one context.
#[derive(Clone, Debug)]
pub struct Curves {
    plain: Curve,
    drafting: Curve,
    plain_known: bool,
    padded: bool,
}

impl Curves {
    /// A round of `rows` rows in which somebody drafts, or nobody does. The former is never cheaper: the latter is a part of it.
    pub fn micros(&self, rows: usize, drafting: bool) -> f64 {
        let rows = if self.padded { rows.next_power_of_two() } else { rows };
        let plain = self.plain.micros(rows);
        match (drafting, self.plain_known) {
            (true, true) => plain.max(self.drafting.micros(rows)),
            (true, false) => self.drafting.micros(rows),
            (false, _) => plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIOR: Prior = Prior { fixed_us: 100.0, experts_us: 0.0, experts: 0, active: 0, row_us: 10.0, token_us: 0.0 };

    fn observed(records: bool, rounds: &[(usize, usize, f64)]) -> RoundCost {
        let mut cost = RoundCost::new(PRIOR, records);
        for &(drafting, rows, micros) in rounds {
            (0..8).for_each(|_| cost.observe(Size { requests: 32, drafting, rows }, 0, micros));
        }
        cost
    }

    #[test]
    fn the_drafters_pass_is_a_step() {
        let curves = observed(false, &[(0, 32, 228.0), (32, 256, 557.0), (1, 32, 325.0)]).curves(0);
        for (rows, drafting, micros) in [(32, false, 228.0), (32, true, 325.0), (256, true, 557.0)] {
            assert!((curves.micros(rows, drafting) / micros - 1.0).abs() < 0.02, "{rows} rows: {}", curves.micros(rows, drafting));
        }
    }

    #[test]
    fn larger_rounds_than_were_measured_are_taken_for_as_cheap_as_they_can_be() {
        let cost = observed(false, &[(0, 1, 158.0), (1, 64, 359.0)]);
        assert!((cost.curves(0).micros(512, true) / 359.0 - 1.0).abs() < 0.02);
        assert!((cost.curves(0).micros(32, false) / 158.0 - 1.0).abs() < 0.02);
    }

    #[test]
    fn a_recorded_round_costs_its_power_of_two_and_recording_it_is_not_counted() {
        let mut cost = RoundCost::new(PRIOR, true);
        let size = |rows| Size { requests: 3, drafting: 3, rows };
        cost.observe(size(64), 0, 9_000.0);
        (0..4).for_each(|_| cost.observe(size(50), 0, 360.0));
        for rows in [33, 50, 64] {
            assert!((cost.curves(0).micros(rows, true) / 360.0 - 1.0).abs() < 0.02, "{rows} rows");
        }
    }
}
