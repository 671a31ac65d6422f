//! The target's token after one row: from logits to an id. Called once per tree row by the CPU device; the CUDA sampler is tested
//! against it. Nothing here depends on the draft, which is why drafting cannot change the text.
//!
//! Order, as vLLM documents its sampler: logit bias, repetition, frequency and presence penalty, allowed tokens; then greedy, or
//! temperature, min-p, top-k, top-p and one draw. The draw runs through the kept tokens in id order, not by rank: a rounding
//! difference that swaps two near-equal tokens then moves the outcome only for uniforms within that rounding.

pub use super::history::{History, Seen};
use super::top_k::{log_sum_exp, top_k};
pub use super::uniform::uniform;
use crate::engine::contract::{Sampling, TokenLogprob};

/// Below this temperature the choice is greedy (vLLM's threshold); dividing by it would overflow.
pub const GREEDY_BELOW: f32 = 1e-5;

/// Most entries of `TokenLogprob::top`.
pub const MAX_LOGPROBS: usize = 20;

/// Tokens looked at before top-p asks for more.
const NUCLEUS_CHUNK: usize = 256;

/// What limits one row besides the request's parameters.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowLimits<'a> {
    /// Needed only with penalties (`Sampling::has_penalties`).
    pub history: Option<History<'a>>,
    /// Bit t of word t / 32 = token t allowed; `None` = all. Tokens beyond the mask are not allowed.
    pub allowed: Option<&'a [u32]>,
    /// Never chosen here: end-of-text ids before `min_tokens`.
    pub banned: &'a [u32],
}

impl RowLimits<'_> {
    fn none(&self, params: &Sampling) -> bool {
        params.logit_bias.is_empty() && self.allowed.is_none() && self.banned.is_empty() && !self.penalises(params)
    }

    fn penalises(&self, params: &Sampling) -> bool {
        self.history.is_some() && params.has_penalties()
    }
}

/// Why no token can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum BadLogits {
    #[error("logit of token {token} is {value}: the model or the device computed something that is not finite")]
    NotFinite { token: u32, value: f32 },
    #[error("no token is allowed here: the constraint, the bias or the banned ids exclude the whole vocabulary")]
    NothingAllowed,
    #[error("logit_bias names token {token}, but the vocabulary has {vocab} tokens")]
    BiasOutside { token: u32, vocab: usize },
}

/// Buffers of one sampling thread, each `vocab` long, reused from row to row.
#[derive(Clone, Debug)]
pub struct SamplerScratch {
    logits: Vec<f32>,
    /// exp((logit - max) / temperature) by token id.
    weights: Vec<f64>,
    kept: Vec<u32>,
}

impl SamplerScratch {
    pub fn new(vocab: usize) -> Self {
        Self { logits: Vec::with_capacity(vocab), weights: Vec::with_capacity(vocab), kept: Vec::with_capacity(vocab) }
    }
}

/// The token the target chooses after a row with these raw `logits`; `uniform` in [0, 1) decides above temperature 0.
/// A logit of `-inf` is a token of probability zero; NaN and `+inf` are errors.
pub fn pick(logits: &[f32], params: &Sampling, limits: &RowLimits, uniform: f64, scratch: &mut SamplerScratch) -> Result<u32, BadLogits> {
    let SamplerScratch { logits: adjusted, weights, kept } = scratch;
    let logits = if limits.none(params) {
        logits
    } else {
        // The model's own faults are judged before a mask can hide them.
        best(logits).or_else(|error| if error == BadLogits::NothingAllowed { Ok(0) } else { Err(error) })?;
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        adjust(adjusted, params, limits)?;
        adjusted
    };
    let best = best(logits)?;
    if params.temperature.is_nan() || params.temperature < GREEDY_BELOW {
        return Ok(best);
    }
    let (max, scale) = (f64::from(logits[best as usize]), 1.0 / f64::from(params.temperature));
    weights.clear();
    let weight = |logit: f32| if logit == f32::NEG_INFINITY { 0.0 } else { ((f64::from(logit) - max) * scale).exp() };
    weights.extend(logits.iter().map(|&logit| weight(logit)));
    if params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0 {
        return Ok(draw(weights, 0..weights.len() as u32, uniform));
    }
    keep(weights, params, kept);
    Ok(draw(weights, kept.iter().copied(), uniform))
}

/// The largest logit's id, the lowest on ties.
fn best(logits: &[f32]) -> Result<u32, BadLogits> {
    let (mut best, mut top) = (None, f32::NEG_INFINITY);
    for (token, &value) in logits.iter().enumerate() {
        if value.is_nan() || value == f32::INFINITY {
            return Err(BadLogits::NotFinite { token: token as u32, value });
        }
        if value > top {
            (best, top) = (Some(token as u32), value);
        }
    }
    best.ok_or(BadLogits::NothingAllowed)
}

fn adjust(logits: &mut [f32], params: &Sampling, limits: &RowLimits) -> Result<(), BadLogits> {
    let vocab = logits.len();
    for &(token, bias) in &params.logit_bias {
        *logits.get_mut(token as usize).ok_or(BadLogits::BiasOutside { token, vocab })? += bias;
    }
    if let Some(history) = limits.history.filter(|_| limits.penalises(params)) {
        history.for_each(|token, count| {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = penalise(*logit, count, params);
            }
        });
    }
    if let Some(allowed) = limits.allowed {
        for (word, chunk) in logits.chunks_mut(32).enumerate() {
            let bits = allowed.get(word).copied().unwrap_or(0);
            if bits == u32::MAX {
                continue;
            }
            for (bit, logit) in chunk.iter_mut().enumerate() {
                if bits >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
    for &token in limits.banned {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    Ok(())
}

/// Repetition (HF, vLLM), then frequency and presence penalty (OpenAI) of a token seen in prompt or output, generated `count` times.
fn penalise(logit: f32, count: u32, params: &Sampling) -> f32 {
    let repetition = params.repetition_penalty;
    let logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
    let presence = if count > 0 { params.presence_penalty } else { 0.0 };
    logit - params.frequency_penalty * count as f32 - presence
}

/// Leaves in `kept` the ids that min-p, top-k and top-p let pass, in id order. Equal weights: the lower id ranks first.
fn keep(weights: &[f64], params: &Sampling, kept: &mut Vec<u32>) {
    let better = |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
    // The best token's weight is 1, so min-p compares with it directly; a weight of zero is never drawn.
    let floor = f64::from(params.min_p).clamp(f64::MIN_POSITIVE, 1.0);
    kept.clear();
    kept.extend((0..weights.len() as u32).filter(|&token| weights[token as usize] >= floor));
    let k = params.top_k as usize;
    if (1..kept.len()).contains(&k) {
        kept.select_nth_unstable_by(k - 1, better);
        kept.truncate(k);
        kept.sort_unstable();
    }
    if params.top_p < 1.0 {
        nucleus(weights, f64::from(params.top_p), kept, better);
        kept.sort_unstable();
    }
}

/// Cuts `kept` to its smallest set of best tokens whose mass reaches `top_p` of the mass kept so far; at least one token.
/// Sorts only as many of the best as needed, in chunks that grow.
fn nucleus(weights: &[f64], top_p: f64, kept: &mut Vec<u32>, better: impl Fn(&u32, &u32) -> std::cmp::Ordering) {
    let goal = top_p * kept.iter().map(|&token| weights[token as usize]).sum::<f64>();
    let (mut mass, mut done, mut chunk) = (0.0, 0, NUCLEUS_CHUNK);
    while done < kept.len() {
        let rest = &mut kept[done..];
        let size = chunk.min(rest.len());
        if size < rest.len() {
            rest.select_nth_unstable_by(size - 1, &better);
        }
        rest[..size].sort_unstable_by(&better);
        for at in done..done + size {
            mass += weights[kept[at] as usize];
            if mass >= goal {
                kept.truncate(at + 1);
                return;
            }
        }
        done += size;
        chunk *= 8;
    }
}

/// Inverse of the cumulative distribution over `tokens` in the given order.
fn draw(weights: &[f64], tokens: impl Iterator<Item = u32> + Clone, uniform: f64) -> u32 {
    let goal = uniform * tokens.clone().map(|token| weights[token as usize]).sum::<f64>();
    let (mut mass, mut last) = (0.0, 0);
    for token in tokens {
        let weight = weights[token as usize];
        if weight > 0.0 {
            mass += weight;
            last = token;
            if mass > goal {
                break;
            }
        }
    }
    last
}

/// Log-probability and rank of `token` under the target's own distribution (raw `logits`), and of the `k` best (at most
/// `MAX_LOGPROBS`). Ranks and order break ties by lower id. The result owns a small list, so this allocates; it runs only for
/// requests that ask for it.
pub fn logprobs(logits: &[f32], token: u32, k: usize) -> TokenLogprob {
    let total = log_sum_exp(logits);
    let logprob = |value: f32| (f64::from(value) - total) as f32;
    let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let ahead = |id: usize, value: f32| value > own || (value == own && id < token as usize);
    let rank = 1 + logits.iter().enumerate().filter(|&(id, &value)| ahead(id, value)).count() as u32;
    let k = k.min(MAX_LOGPROBS);
    let (mut ids, mut values) = ([0; MAX_LOGPROBS], [0.0; MAX_LOGPROBS]);
    let found = top_k(logits, &mut ids[..k], &mut values[..k]);
    let top = ids[..found].iter().zip(&values).map(|(&id, &value)| (id, logprob(value))).collect();
    TokenLogprob { token, logprob: logprob(own), rank, top }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(temperature: f32) -> Sampling {
        Sampling { temperature, ..Sampling::greedy() }
    }

    fn pick_one(logits: &[f32], params: &Sampling, limits: &RowLimits, uniform: f64) -> Result<u32, BadLogits> {
        pick(logits, params, limits, uniform, &mut SamplerScratch::new(logits.len()))
    }

    /// The definition, spelled out: full sort, probabilities, cuts, then the draw in id order.
    fn by_definition(logits: &[f32], params: &Sampling, uniform: f64) -> u32 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight: Vec<f64> = logits.iter().map(|&l| ((f64::from(l) - f64::from(max)) / f64::from(params.temperature)).exp()).collect();
        let mut order: Vec<usize> = (0..logits.len()).filter(|&t| weight[t] >= f64::from(params.min_p)).collect();
        order.sort_by(|&a, &b| weight[b].total_cmp(&weight[a]).then(a.cmp(&b)));
        if params.top_k > 0 {
            order.truncate(params.top_k as usize);
        }
        let total: f64 = order.iter().map(|&t| weight[t]).sum();
        let mut mass = 0.0;
        let before: Vec<f64> = order
            .iter()
            .map(|&t| {
                mass += weight[t];
                mass - weight[t]
            })
            .collect();
        let mut kept: Vec<usize> =
            order.iter().zip(before).filter(|&(_, m)| m < f64::from(params.top_p) * total || m == 0.0).map(|(&t, _)| t).collect();
        kept.sort_unstable();
        let total: f64 = kept.iter().map(|&t| weight[t]).sum();
        let mut mass = 0.0;
        for &t in &kept {
            mass += weight[t];
            if mass > uniform * total {
                return t as u32;
            }
        }
        *kept.last().unwrap() as u32
    }

    proptest! {
        #[test]
        fn equals_the_definition(
            logits in prop::collection::vec(-6.0f32..6.0, 1..900),
            temperature in 0.2f32..3.0,
            top_k in prop_oneof![Just(0u32), 1u32..400],
            top_p in prop_oneof![Just(1.0f32), 0.05f32..0.999],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
            uniform in 0.0f64..1.0,
        ) {
            let params = Sampling { top_k, top_p, min_p, ..at(temperature) };
            prop_assert_eq!(pick_one(&logits, &params, &RowLimits::default(), uniform), Ok(by_definition(&logits, &params, uniform)));
        }

        #[test]
        fn never_chooses_what_is_not_allowed(
            logits in prop::collection::vec(-3.0f32..3.0, 100),
            allowed in prop::collection::vec(any::<u32>(), 3),
            temperature in prop_oneof![Just(0.0f32), Just(1.0)],
            uniform in 0.0f64..1.0,
        ) {
            let limits = RowLimits { allowed: Some(&allowed), banned: &[5, 40], ..RowLimits::default() };
            let open = |t: u32| t != 5 && t != 40 && allowed.get(t as usize / 32).is_some_and(|w| w >> (t % 32) & 1 == 1);
            match pick_one(&logits, &at(temperature), &limits, uniform) {
                Ok(token) => prop_assert!(open(token)),
                Err(error) => prop_assert!(error == BadLogits::NothingAllowed && !(0..100).any(open)),
            }
        }
    }

    #[test]
    fn draws_with_the_softmax_frequencies() {
        let logits = [0.0, 1.0, -1.0, 2.0, f32::NEG_INFINITY];
        let params = at(0.8);
        let weight: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / 0.8f32 as f64).exp()).collect();
        let total: f64 = weight.iter().sum();
        let draws = 40_000;
        let mut counts = [0u32; 5];
        for n in 0..draws {
            counts[pick_one(&logits, &params, &RowLimits::default(), uniform(1, n)).unwrap() as usize] += 1;
        }
        assert_eq!(counts[4], 0);
        for t in 0..4 {
            let p = weight[t] / total;
            let deviation = (f64::from(counts[t]) - p * draws as f64) / (p * (1.0 - p) * draws as f64).sqrt();
            assert!(deviation.abs() < 4.0, "token {t}: {deviation} standard deviations");
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_on_ties() {
        assert_eq!(pick_one(&[1.0, 3.0, 3.0], &at(0.0), &RowLimits::default(), 0.9), Ok(1));
        assert_eq!(pick_one(&[1.0, 3.0, 3.0], &at(f32::NAN), &RowLimits::default(), 0.9), Ok(1));
    }

    #[test]
    fn draws_never_leave_the_support_at_the_ends_of_the_uniform() {
        let logits = [f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY];
        for temperature in [1e-3, 1.0, f32::INFINITY] {
            assert_eq!(pick_one(&logits, &at(temperature), &RowLimits::default(), 0.0), Ok(1));
            assert_eq!(pick_one(&logits, &at(temperature), &RowLimits::default(), 1.0 - f64::EPSILON / 2.0), Ok(2));
        }
    }

    #[test]
    fn faults_are_named_and_a_mask_does_not_hide_them() {
        let limits = RowLimits { allowed: Some(&[0b10]), ..RowLimits::default() };
        for limits in [limits, RowLimits::default()] {
            for temperature in [0.0, 1.0] {
                let nan = pick_one(&[f32::NAN, 0.0], &at(temperature), &limits, 0.5);
                assert!(matches!(nan, Err(BadLogits::NotFinite { token: 0, value }) if value.is_nan()));
                let infinite = pick_one(&[f32::INFINITY, 0.0], &at(temperature), &limits, 0.5);
                assert_eq!(infinite, Err(BadLogits::NotFinite { token: 0, value: f32::INFINITY }));
                assert_eq!(pick_one(&[f32::NEG_INFINITY; 3], &at(temperature), &limits, 0.5), Err(BadLogits::NothingAllowed));
            }
        }
        let biased = Sampling { logit_bias: vec![(2, 1.0)], ..at(0.0) };
        let outside = pick_one(&[0.0, 0.0], &biased, &RowLimits::default(), 0.5);
        assert_eq!(outside, Err(BadLogits::BiasOutside { token: 2, vocab: 2 }));
    }

    #[test]
    fn bias_comes_before_the_repetition_penalty() {
        // 1 - 3 = -2, which repetition 2 makes -4; the other order would give 1 / 2 - 3 = -2.5 and win over -3.
        let mut seen = Seen::new(2);
        seen.reset(&[0]);
        let params = Sampling { logit_bias: vec![(0, -3.0)], repetition_penalty: 2.0, ..at(0.0) };
        let limits = RowLimits { history: Some(History { seen: &seen, path: &[] }), ..RowLimits::default() };
        assert_eq!(pick_one(&[1.0, -3.0], &params, &limits, 0.0), Ok(1));
    }

    #[test]
    fn penalties_count_the_output_and_the_rows_own_path_only() {
        let mut seen = Seen::new(4);
        seen.reset(&[0]);
        seen.commit(1);
        let choose = |params: &Sampling, path: &[u32], logits: &[f32]| {
            let limits = RowLimits { history: Some(History { seen: &seen, path }), ..RowLimits::default() };
            pick_one(logits, params, &limits, 0.0).unwrap()
        };
        let frequency = Sampling { frequency_penalty: 1.0, ..at(0.0) };
        assert_eq!(choose(&frequency, &[], &[9.0, 8.0, 0.0, 0.0]), 0, "the prompt has no count");
        assert_eq!(choose(&frequency, &[], &[0.0, 2.0, 1.5, 0.0]), 2);
        assert_eq!(choose(&frequency, &[2], &[0.0, 2.0, 1.5, 0.0]), 1, "two in all on this branch: 2 - 1 against 1.5 - 1");
        let presence = Sampling { presence_penalty: 1.0, ..at(0.0) };
        assert_eq!(choose(&presence, &[1, 1], &[0.0, 2.5, 1.0, 0.0]), 1, "presence does not add up");
        let repetition = Sampling { repetition_penalty: 2.0, ..at(0.0) };
        assert_eq!(choose(&repetition, &[], &[3.0, 3.0, 1.6, 0.0]), 2, "prompt and output alike");
        assert_eq!(choose(&repetition, &[2, 3], &[-1.0, -1.0, -0.9, -0.9]), 2, "negative logits are multiplied");
    }

    #[test]
    fn logprobs_are_of_the_raw_distribution() {
        let found = logprobs(&[0.0, 2.0, 1.0, 2.0], 3, 3);
        let total = (1.0 + 2.0 * 2f64.exp() + 1f64.exp()).ln();
        assert_eq!((found.token, found.rank), (3, 2));
        assert_eq!(found.top.iter().map(|entry| entry.0).collect::<Vec<_>>(), [1, 3, 2]);
        assert!((f64::from(found.logprob) - (2.0 - total)).abs() < 1e-6);
        assert!((f64::from(found.top[2].1) - (1.0 - total)).abs() < 1e-6);
        assert!(logprobs(&[0.0, 1.0], 0, 0).top.is_empty());
        assert_eq!(logprobs(&[0.0, 1.0], 0, 50).top.len(), 2);
    }
}
