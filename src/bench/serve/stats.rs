//! Latencies of many requests, as histograms with three significant digits from a microsecond to an hour.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::client::Outcome;

/// Different reasons of failure that are kept as samples.
const SAMPLES: usize = 5;

/// Histograms of one level, in microseconds, and a few of its errors.
pub struct Recorder {
    first: Histogram<u64>,
    gap: Histogram<u64>,
    per_token: Histogram<u64>,
    total: Histogram<u64>,
    done: usize,
    errors: usize,
    samples: Vec<String>,
    prompt_tokens: u64,
    completion_tokens: u64,
    accepted: u64,
    rounds: u64,
}

impl Default for Recorder {
    fn default() -> Self {
        let histogram = || Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("the bounds are right");
        Self {
            first: histogram(),
            gap: histogram(),
            per_token: histogram(),
            total: histogram(),
            done: 0,
            errors: 0,
            samples: Vec::new(),
            prompt_tokens: 0,
            completion_tokens: 0,
            accepted: 0,
            rounds: 0,
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).max(1)
}

impl Recorder {
    /// Counts one request.
    pub fn add(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Failed(why) => {
                self.errors += 1;
                if self.samples.len() < SAMPLES && !self.samples.contains(&why) {
                    self.samples.push(why);
                }
            }
            Outcome::Done { first, gaps, total, prompt_tokens, completion_tokens, speculation } => {
                self.done += 1;
                self.first.saturating_record(micros(first));
                gaps.iter().for_each(|gap| self.gap.saturating_record(micros(*gap)));
                self.total.saturating_record(micros(total));
                if completion_tokens > 1 {
                    self.per_token.saturating_record(micros(total.saturating_sub(first)) / (completion_tokens - 1));
                }
                self.prompt_tokens += prompt_tokens;
                self.completion_tokens += completion_tokens;
                let (accepted, rounds) = speculation.unwrap_or_default();
                self.accepted += accepted;
                self.rounds += rounds;
            }
        }
    }

    /// Adds what another level's part has counted.
    pub fn merge(&mut self, other: Self) {
        let pairs = [
            (&mut self.first, other.first),
            (&mut self.gap, other.gap),
            (&mut self.per_token, other.per_token),
            (&mut self.total, other.total),
        ];
        for (mine, theirs) in pairs {
            mine.add(theirs).expect("both have the same bounds");
        }
        self.done += other.done;
        self.errors += other.errors;
        for sample in other.samples {
            if self.samples.len() < SAMPLES && !self.samples.contains(&sample) {
                self.samples.push(sample);
            }
        }
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.accepted += other.accepted;
        self.rounds += other.rounds;
    }

    /// Percentiles and rates; `took` is the time from the first request to the end of the last.
    pub fn summary(&self, name: String, concurrency: Option<usize>, rate: Option<f64>, took: Duration) -> Summary {
        let seconds = took.as_secs_f64().max(1e-9);
        Summary {
            name,
            concurrency,
            rate_per_s: rate,
            requests: self.done,
            errors: self.errors,
            error_samples: self.samples.clone(),
            duration_s: seconds,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            requests_per_s: self.done as f64 / seconds,
            tokens_per_s: self.completion_tokens as f64 / seconds,
            mean_acceptance_length: (self.rounds > 0).then(|| 1.0 + self.accepted as f64 / self.rounds as f64),
            first_token_ms: Percentiles::of(&self.first),
            inter_token_ms: Percentiles::of(&self.gap),
            per_token_ms: Percentiles::of(&self.per_token),
            total_ms: Percentiles::of(&self.total),
        }
    }
}

/// One load level.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub name: String,
    pub concurrency: Option<usize>,
    pub rate_per_s: Option<f64>,
    pub requests: usize,
    pub errors: usize,
    pub error_samples: Vec<String>,
    pub duration_s: f64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub requests_per_s: f64,
    pub tokens_per_s: f64,
    /// Tokens per round, the bonus token included; `null` when the server does not tell.
    pub mean_acceptance_length: Option<f64>,
    pub first_token_ms: Percentiles,
    /// Between two deliveries of tokens of one stream; with speculation a delivery holds several.
    pub inter_token_ms: Percentiles,
    /// Per request: time after the first token over tokens after the first.
    pub per_token_ms: Percentiles,
    pub total_ms: Percentiles,
}

/// Milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub count: u64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
    /// (percentile, milliseconds), for drawing.
    pub curve: Vec<(f64, f64)>,
}

impl Percentiles {
    fn of(histogram: &Histogram<u64>) -> Self {
        if histogram.is_empty() {
            return Self::default();
        }
        let at = |percentile: f64| histogram.value_at_percentile(percentile) as f64 / 1000.0;
        let steps = (0..=20).map(|step| f64::from(step) * 5.0).chain([99.0, 99.9]);
        let mut curve: Vec<_> = steps.map(|percentile| (percentile, at(percentile))).collect();
        curve.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self {
            count: histogram.len(),
            mean: histogram.mean() / 1000.0,
            p50: at(50.0),
            p90: at(90.0),
            p95: at(95.0),
            p99: at(99.0),
            max: histogram.max() as f64 / 1000.0,
            curve,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(milliseconds: u64) -> Outcome {
        Outcome::Done {
            first: Duration::from_millis(milliseconds),
            gaps: vec![Duration::from_millis(2); 3],
            total: Duration::from_millis(milliseconds + 9),
            prompt_tokens: 5,
            completion_tokens: 10,
            speculation: Some((6, 4)),
        }
    }

    #[test]
    fn percentiles_and_means_are_those_of_what_was_recorded() {
        let (mut one, mut two) = (Recorder::default(), Recorder::default());
        (1..=50).for_each(|ms| one.add(done(ms)));
        (51..=100).for_each(|ms| two.add(done(ms)));
        two.add(Outcome::Failed("status 500".into()));
        one.merge(two);
        let summary = one.summary("x".into(), Some(2), None, Duration::from_secs(2));
        assert_eq!((summary.requests, summary.errors, summary.first_token_ms.count), (100, 1, 100));
        assert!((summary.first_token_ms.p50 - 50.0).abs() < 0.5 && (summary.first_token_ms.p99 - 99.0).abs() < 0.5);
        assert!((summary.per_token_ms.p50 - 1.0).abs() < 0.01);
        assert_eq!((summary.tokens_per_s, summary.mean_acceptance_length), (500.0, Some(2.5)));
        assert_eq!(summary.error_samples, ["status 500"]);
    }
}
