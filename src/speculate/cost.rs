//! What a round costs: microseconds by rows verified and prefix tokens read, over all requests of the round. Starts from a prior
//! counted in bytes, learns from measured rounds. The engine observes every round (and one of each size at warm-up); the automatic
//! budget asks.

/// Rows at which the cost is estimated; between them it is interpolated.
const KNOTS: [usize; 18] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

/// Prefix lengths are told apart by factors of four from 1,024 tokens on.
const CONTEXTS: usize = 8;

/// Rounds whose lower quartile feeds the running estimate. Disturbances only ever add time; three strays in five do no harm.
const WINDOW: usize = 5;

/// Share of the newest quartile in the running estimate.
const STEP: f64 = 0.1;

/// A size not measured lately is assumed to have become faster by this (logarithm, per round observed). So every size is measured
/// again some day, the sooner the less it is behind, and a machine that was slow at warm-up is not judged by that for ever.
const STALE: f64 = 1.0 / 3200.0;
const STALEST: f64 = 3.0;

/// A size measured again after so many rounds, and found no faster than it was, is believed to age half as fast from then on: a retry that
/// costs more than a round in use is worth it the less, the more often it has told nothing new. At most so often.
const RETURN: u64 = 64;
const NO_FASTER: f64 = -0.1;
const PATIENCE: u8 = 4;

/// After so many rounds without a measurement the old ones no longer outvote a new one.
const FORGET: u64 = 256;

/// Where a round's time goes when bytes are what counts. Source: mixture-of-experts decoding reads every weight it touches once;
/// under uniform routing `rows` rows touch `1 - (1 - active / experts)^rows` of the experts. Rows that share a prefix route alike,
/// so this is an upper bound, which measured rounds then correct.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prior {
    /// Independent of rows: launches, dense weights, the drafter.
    pub fixed_us: f64,
    /// Reading all routed experts of all layers once.
    pub experts_us: f64,
    /// Routed experts of a layer and how many a row uses; 0 experts = a dense model.
    pub experts: u32,
    pub active: u32,
    /// One row's own arithmetic.
    pub row_us: f64,
    /// Reading one prefix token's KV.
    pub token_us: f64,
}

impl Prior {
    /// Microseconds of a round of `rows` rows over `context` prefix tokens.
    pub fn micros(&self, rows: usize, context: usize) -> f64 {
        let missed = 1.0 - f64::from(self.active) / f64::from(self.experts.max(1));
        let touched = if self.experts == 0 { 0.0 } else { 1.0 - missed.powf(rows as f64) };
        self.fixed_us + self.experts_us * touched + self.row_us * rows as f64 + self.token_us * context as f64
    }
}

/// One size of round: the logarithm of measured over prior time.
#[derive(Clone, Copy, Debug)]
struct Cell {
    recent: [f64; WINDOW],
    /// Measurements since the cell was last forgotten.
    rounds: usize,
    estimate: f64,
    /// Count of all rounds observed when this size last was.
    latest: u64,
    /// Returns in a row that found this size no faster.
    patience: u8,
}

impl Cell {
    const EMPTY: Self = Self { recent: [0.0; WINDOW], rounds: 0, estimate: 0.0, latest: 0, patience: 0 };

    fn observe(&mut self, sample: f64, now: u64) {
        if self.rounds > 0 && now - self.latest > RETURN {
            self.patience = if sample - self.estimate > NO_FASTER { (self.patience + 1).min(PATIENCE) } else { 0 };
        }
        if self.rounds > 0 && now - self.latest > FORGET {
            // The old estimate stays as one voice: a faster round is believed at once, a slower one when more agree.
            self.recent[0] = self.estimate;
            self.rounds = 1;
        }
        self.latest = now;
        self.recent[self.rounds % WINDOW] = sample;
        self.rounds += 1;
        let held = self.rounds.min(WINDOW);
        let mut sorted = self.recent;
        sorted[..held].sort_unstable_by(f64::total_cmp);
        // A first round that also compiled or paged something in is forgotten with the second.
        let quartile = sorted[(held - 1) / 4];
        self.estimate = if self.rounds <= WINDOW { quartile } else { self.estimate + STEP * (quartile - self.estimate) };
    }

    /// How much faster this size may have become unseen.
    fn staleness(&self, now: u64) -> f64 {
        ((now - self.latest) as f64 * STALE / f64::from(1u32 << self.patience)).min(STALEST)
    }

    /// How much this cell says now: fresh measurements, halved every `FORGET` rounds.
    fn weight(&self, now: u64) -> f64 {
        self.rounds.min(WINDOW) as f64 * (-((now - self.latest) as f64) / FORGET as f64).exp2()
    }
}

/// Running estimates per knot and context class.
#[derive(Clone, Debug)]
pub struct CostModel {
    prior: Prior,
    observed: u64,
    cells: Box<[[Cell; CONTEXTS]; KNOTS.len()]>,
}

impl CostModel {
    pub fn new(prior: Prior) -> Self {
        Self { prior, observed: 0, cells: Box::new([[Cell::EMPTY; CONTEXTS]; KNOTS.len()]) }
    }

    /// A round of `rows` rows (all requests, anchors included) over `context` prefix tokens (all requests) took `micros`.
    /// Times that are not positive numbers are ignored.
    pub fn observe(&mut self, rows: usize, context: usize, micros: f64) {
        let expected = self.prior.micros(rows, context);
        if rows > 0 && micros.is_finite() && micros > 0.0 && expected > 0.0 {
            self.observed += 1;
            self.cells[nearest_knot(rows)][context_class(context)].observe((micros / expected).ln(), self.observed);
        }
    }

    /// A round was observed elsewhere: what is known here grows older.
    pub fn tick(&mut self) {
        self.observed += 1;
    }

    /// Rows of the largest size ever measured.
    pub fn largest(&self) -> Option<usize> {
        let measured = |knot: &usize| self.cells[*knot].iter().any(|cell| cell.rounds > 0);
        (0..KNOTS.len()).rev().find(measured).map(|knot| KNOTS[knot])
    }

    /// Microseconds of a round of `rows` rows over `context` prefix tokens. For several sizes at one context, take `curve` once.
    pub fn micros(&self, rows: usize, context: usize) -> f64 {
        self.curve(context).micros(rows)
    }

    /// The cost by rows at one context. Never falls with rows: more rows cannot cost less, only be measured so.
    pub fn curve(&self, context: usize) -> Curve {
        let class = context_class(context);
        let (mut factors, mut weights) = ([0.0; KNOTS.len()], [0.0; KNOTS.len()]);
        for (knot, cells) in self.cells.iter().enumerate() {
            for (other, cell) in cells.iter().enumerate().filter(|(_, cell)| cell.rounds > 0) {
                // A neighbouring context class says much about this one, a distant one little.
                let weight = cell.weight(self.observed) * 8f64.powi(-(class.abs_diff(other) as i32));
                factors[knot] += weight * cell.estimate;
                weights[knot] += weight;
            }
            if weights[knot] > 0.0 {
                let latest = cells.iter().max_by_key(|cell| cell.latest);
                factors[knot] = factors[knot] / weights[knot] - latest.map_or(0.0, |cell| cell.staleness(self.observed));
            }
        }
        fill_gaps(&mut factors, &weights);
        let mut micros = [0.0; KNOTS.len()];
        for (knot, value) in micros.iter_mut().enumerate() {
            *value = self.prior.micros(KNOTS[knot], context) * factors[knot].exp();
        }
        make_monotone(&mut micros, &weights);
        Curve { micros, beyond: self.prior, context }
    }
}

/// Microseconds by rows at one context.
#[derive(Clone, Debug)]
pub struct Curve {
    micros: [f64; KNOTS.len()],
    beyond: Prior,
    context: usize,
}

impl Curve {
    /// Takes sizes beyond `largest`, which nobody has measured, for as cheap as they can be. The prior's guess of them may be so wrong
    /// that they were never tried; this way a single round tells.
    pub fn hopeful_beyond(mut self, largest: Option<usize>) -> Self {
        let Some(largest) = largest else { return self };
        let last = self.micros[nearest_knot(largest)];
        self.micros.iter_mut().zip(KNOTS).filter(|(_, rows)| *rows > largest).for_each(|(micros, _)| *micros = last);
        self
    }

    pub fn micros(&self, rows: usize) -> f64 {
        let above = KNOTS.partition_point(|&knot| knot < rows);
        if above == 0 {
            return self.micros[0];
        }
        if above == KNOTS.len() {
            let last = KNOTS.len() - 1;
            return self.micros[last] * self.beyond.micros(rows, self.context) / self.beyond.micros(KNOTS[last], self.context);
        }
        let (low, high) = (KNOTS[above - 1], KNOTS[above]);
        let share = (rows - low) as f64 / (high - low) as f64;
        self.micros[above - 1] + share * (self.micros[above] - self.micros[above - 1])
    }
}

/// The knot nearest to `rows` by ratio.
fn nearest_knot(rows: usize) -> usize {
    let above = KNOTS.partition_point(|&knot| knot < rows).min(KNOTS.len() - 1);
    let nearer_below = above > 0 && KNOTS[above] * KNOTS[above - 1] > rows * rows;
    if nearer_below { above - 1 } else { above }
}

fn context_class(context: usize) -> usize {
    let thousands = context / 1024;
    if thousands == 0 { 0 } else { (thousands.ilog2() as usize / 2 + 1).min(CONTEXTS - 1) }
}

/// Knots without a measurement take their factor from the measured ones around them, in proportion to the logarithm of rows.
fn fill_gaps(factors: &mut [f64; KNOTS.len()], weights: &[f64; KNOTS.len()]) {
    let log = |knot: usize| (KNOTS[knot] as f64).ln();
    for knot in (0..KNOTS.len()).filter(|&knot| weights[knot] == 0.0) {
        let below = (0..knot).rev().find(|&other| weights[other] > 0.0);
        let above = (knot + 1..KNOTS.len()).find(|&other| weights[other] > 0.0);
        factors[knot] = match (below, above) {
            (Some(a), Some(b)) => factors[a] + (factors[b] - factors[a]) * (log(knot) - log(a)) / (log(b) - log(a)),
            (Some(one), None) | (None, Some(one)) => factors[one],
            (None, None) => 0.0,
        };
    }
}

/// The nearest non-falling sequence in weighted least squares (pool adjacent violators).
fn make_monotone(values: &mut [f64; KNOTS.len()], weights: &[f64; KNOTS.len()]) {
    // Pools as (mean, weight, length); an unmeasured knot yields to a measured one.
    let mut pools = [(0.0, 0.0, 0usize); KNOTS.len()];
    let mut count = 0;
    for (&value, &weight) in values.iter().zip(weights) {
        pools[count] = (value, weight + 1e-3, 1);
        count += 1;
        while count > 1 && pools[count - 2].0 > pools[count - 1].0 {
            let ((a, wa, na), (b, wb, nb)) = (pools[count - 2], pools[count - 1]);
            pools[count - 2] = ((a * wa + b * wb) / (wa + wb), wa + wb, na + nb);
            count -= 1;
        }
    }
    let pooled = pools[..count].iter().flat_map(|&(mean, _, length)| std::iter::repeat_n(mean, length));
    for (value, mean) in values.iter_mut().zip(pooled) {
        *value = mean;
    }
}

#[cfg(test)]
mod tests {
    use super::super::uniform::uniform;
    use super::*;
    use proptest::prelude::*;

    /// Kimi K2.6 on eight cards of 1.792 TB/s: 4.5 GB a card of dense weights, 24.8 MB an expert, 60 layers of 384.
    fn kimi() -> Prior {
        let per_us = 1.792e6;
        let experts_us = 24.8e6 * 384.0 * 60.0 / 8.0 / per_us;
        Prior { fixed_us: 4.5e9 / per_us, experts_us, experts: 384, active: 8, row_us: 0.0, token_us: 0.0 }
    }

    #[test]
    fn the_prior_counts_bytes() {
        for (rows, milliseconds) in [(1, 3.4), (4, 5.8), (8, 8.7), (16, 13.9), (32, 22.1), (64, 32.0)] {
            let found = CostModel::new(kimi()).micros(rows, 0) / 1e3;
            assert!((found - milliseconds).abs() < 0.15, "{rows} rows: {found} ms against {milliseconds}");
        }
    }

    #[test]
    fn measured_rounds_replace_the_prior_and_strays_do_not() {
        let mut cost = CostModel::new(kimi());
        let truth = |rows: usize| 2000.0 + 90.0 * rows as f64;
        for n in 0..400 {
            let rows = [1, 4, 8, 16, 24, 32, 48, 64][n as usize % 8];
            let stray = if uniform(1, n) < 0.1 { 4.0 } else { 1.0 };
            cost.observe(rows, 500, truth(rows) * (0.97 + 0.06 * uniform(2, n)) * stray);
        }
        for rows in [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64] {
            let found = cost.micros(rows, 500);
            let bound = if matches!(rows, 2 | 12) { 0.05 } else { 0.03 }; // those two were never measured
            assert!((found / truth(rows) - 1.0).abs() < bound, "{rows} rows: {found} against {}", truth(rows));
        }
    }

    #[test]
    fn sizes_never_measured_are_scaled_like_their_neighbours() {
        let mut cost = CostModel::new(kimi());
        for rows in [4, 32] {
            for _ in 0..10 {
                cost.observe(rows, 0, 1.5 * kimi().micros(rows, 0));
            }
        }
        for rows in [1, 8, 64, 200, 3000] {
            assert!((cost.micros(rows, 0) / (1.5 * kimi().micros(rows, 0)) - 1.0).abs() < 0.05, "{rows} rows");
        }
    }

    #[test]
    fn contexts_are_told_apart() {
        let mut cost = CostModel::new(Prior { token_us: 0.01, ..kimi() });
        for _ in 0..30 {
            cost.observe(8, 500, 9_000.0);
            cost.observe(8, 100_000, 30_000.0);
        }
        assert!((cost.micros(8, 500) / 9_000.0 - 1.0).abs() < 0.03);
        assert!((cost.micros(8, 100_000) / 30_000.0 - 1.0).abs() < 0.03);
    }

    #[test]
    fn a_change_of_speed_is_followed() {
        let mut cost = CostModel::new(kimi());
        (0..200).for_each(|_| cost.observe(8, 0, 9_000.0));
        (0..40).for_each(|_| cost.observe(8, 0, 18_000.0));
        assert!(cost.micros(8, 0) > 17_000.0);
    }

    #[test]
    fn a_size_found_no_faster_is_tried_more_rarely_until_it_is() {
        let mut cost = CostModel::new(kimi());
        (0..10).for_each(|_| cost.observe(64, 0, 60_000.0));
        let mut retries = |rounds: u64, truth: f64| {
            let mut at = Vec::new();
            for round in 0..rounds {
                cost.observe(8, 0, 9_000.0);
                if cost.micros(64, 0) < 40_000.0 {
                    cost.observe(64, 0, truth);
                    at.push(round);
                }
            }
            at
        };
        let slow = retries(40_000, 60_000.0);
        let gaps: Vec<u64> = slow.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.len() >= 3 && gaps[1] > 3 * slow[0] && gaps[gaps.len() - 1] <= 17 * slow[0], "{slow:?}");
        assert!(!retries(gaps[gaps.len() - 1] + 100, 20_000.0).is_empty());
        assert!(cost.micros(64, 0) < 25_000.0, "a faster round is believed at once");
    }

    #[test]
    fn times_that_are_no_times_are_ignored() {
        let mut cost = CostModel::new(kimi());
        [f64::NAN, f64::INFINITY, 0.0, -5.0].into_iter().for_each(|micros| cost.observe(8, 0, micros));
        cost.observe(0, 0, 5.0);
        assert_eq!(cost.micros(8, 0), kimi().micros(8, 0));
    }

    proptest! {
        #[test]
        fn never_falls_with_rows(rounds in prop::collection::vec((1usize..1500, 0usize..200_000, 1.0f64..1e5), 0..60), context in 0usize..300_000) {
            let mut cost = CostModel::new(kimi());
            rounds.iter().for_each(|&(rows, context, micros)| cost.observe(rows, context, micros));
            let curve = cost.curve(context);
            for rows in 1..1100 {
                prop_assert!(curve.micros(rows) <= curve.micros(rows + 1) * (1.0 + 1e-12) && curve.micros(rows) > 0.0);
            }
        }
    }
}
