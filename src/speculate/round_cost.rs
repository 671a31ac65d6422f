//! What a whole round costs, for choosing its requests' budgets together: rounds in which nobody drafts apart from rounds in which
//! anybody does, since the drafter's pass is a step that all requests of the round pay once, whoever wanted it. The engine observes
//! every round; `joint` asks.

use super::cost::{CostModel, Curve, Prior};

/// What was run in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub requests: usize,
    /// Requests that verify more than their anchor.
    pub drafting: usize,
    /// Rows verified, of all requests, anchors included.
    pub rows: usize,
}

/// Sizes that a device has recorded: by powers of two of requests and drafting requests, one bit for each of rows.
#[derive(Clone, Debug, Default)]
struct Recorded([[u16; 16]; 16]);

impl Recorded {
    fn place(size: Size) -> (usize, usize, u16) {
        let power = |n: usize| if n == 0 { 0 } else { (n.next_power_of_two().ilog2() as usize + 1).min(15) };
        (power(size.requests), power(size.drafting), 1 << power(size.rows))
    }

    fn has(&self, size: Size) -> bool {
        let (requests, drafting, rows) = Self::place(size);
        self.0[requests][drafting] & rows != 0
    }

    /// Whether it was not there yet.
    fn insert(&mut self, size: Size) -> bool {
        let (requests, drafting, rows) = Self::place(size);
        let known = &mut self.0[requests][drafting];
        let new = *known & rows == 0;
        *known |= rows;
        new
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct RoundCost {
    plain: CostModel,
    drafting: CostModel,
    /// On a device that records rounds: the sizes that it has a recording of, in powers of two.
    recorded: Option<Recorded>,
}

impl RoundCost {
    /// `records`: see `Device::RECORDS`.
    pub fn new(prior: Prior, records: bool) -> Self {
        Self { plain: CostModel::new(prior), drafting: CostModel::new(prior), recorded: records.then(Recorded::default) }
    }

    /// A round over `context` prefix tokens (all requests) took `micros`. The round that a device recorded says nothing about those that
    /// replay it.
    pub fn observe(&mut self, size: Size, context: usize, micros: f64) {
        let mut rows = size.rows;
        if let Some(recorded) = &mut self.recorded {
            if recorded.insert(size) {
                return;
            }
            rows = rows.next_power_of_two();
        }
        let (one, other) = match size.drafting {
            0 => (&mut self.plain, &mut self.drafting),
            _ => (&mut self.drafting, &mut self.plain),
        };
        one.observe(rows, context, micros);
        other.tick();
    }

    /// The costs at one context.
    pub fn curves(&self, context: usize) -> Curves<'_> {
        let of = |model: &CostModel| model.curve(context).hopeful_beyond(model.largest());
        let plain_known = self.plain.largest().is_some();
        let mut curves =
            Curves { plain: of(&self.plain), drafting: of(&self.drafting), plain_known, recorded: None, by_power: [[0.0; POWERS]; 2] };
        if let Some(recorded) = &self.recorded {
            curves.by_power = [false, true].map(|drafting| std::array::from_fn(|power| curves.micros(1 << power, drafting)));
            curves.recorded = Some(recorded);
        }
        curves
    }
}

/// Microseconds by rows at one context.
#[derive(Clone, Debug)]
pub struct Curves<'a> {
    plain: Curve,
    drafting: Curve,
    plain_known: bool,
    recorded: Option<&'a Recorded>,
    /// On a device that records: of plain rounds and of such with drafts, by powers of two of rows.
    by_power: [[f64; POWERS]; 2],
}

/// Powers of two up to the most rows of any round.
const POWERS: usize = 16;

impl Curves<'_> {
    /// Whether a round of this size must be recorded first.
    pub fn is_new(&self, size: Size) -> bool {
        self.recorded.is_some_and(|recorded| !recorded.has(size))
    }

    /// A round of `rows` rows in which somebody drafts, or nobody does. The former is never cheaper: the latter is a part of it.
    pub fn micros(&self, rows: usize, drafting: bool) -> f64 {
        if self.recorded.is_some() {
            return self.by_power[usize::from(drafting)][(rows.next_power_of_two().ilog2() as usize).min(POWERS - 1)];
        }
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
        let cost = observed(false, &[(0, 32, 228.0), (32, 256, 557.0), (1, 32, 325.0)]);
        let curves = cost.curves(0);
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
        assert!(cost.curves(0).is_new(size(50)));
        cost.observe(size(64), 0, 9_000.0);
        assert!(!cost.curves(0).is_new(size(50)) && cost.curves(0).is_new(size(20)));
        (0..4).for_each(|_| cost.observe(size(50), 0, 360.0));
        for rows in [33, 50, 64] {
            assert!((cost.curves(0).micros(rows, true) / 360.0 - 1.0).abs() < 0.02, "{rows} rows");
        }
    }
}
