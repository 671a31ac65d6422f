//! Drafting does not change what is generated: texts drawn through draft trees follow the target's own distribution exactly,
//! whatever the trees, and a seeded text is the same one that plain decoding gives. Shown on a small target whose distribution can
//! be written down, with a statistic that is itself tested: each planted fault must be caught.

use kdtree::engine::contract::Sampling;
use kdtree::speculate::budget::MAX_ROWS;
use kdtree::speculate::sampling::{History, RowLimits, SamplerScratch, Seen, pick, uniform};
use kdtree::speculate::tree::{Tree, marginals_from_logits};
use kdtree::speculate::walk::walk;

const VOCAB: usize = 5;
const DEPTHS: usize = 3;
const LENGTH: usize = 4;
const TEXTS: usize = VOCAB.pow(LENGTH as u32);
const DRAWS: u64 = 30_000;
/// Every text follows this token.
const START: u32 = 2;

/// The target: logits after a prefix, depending on its last two tokens.
fn logits(prefix: &[u32]) -> [f32; VOCAB] {
    let state = prefix.iter().rev().take(2).fold(0, |state, &token| state * VOCAB as u64 + u64::from(token) + 1);
    std::array::from_fn(|token| (4.0 * uniform(777, state * 64 + token as u64) - 2.0) as f32)
}

/// What the drafter proposes; all but the first are meant to hurt.
#[derive(Clone, Copy, Debug)]
enum Draft {
    Likely,
    Unlikely,
    Noise,
    AllEqual,
    Chain,
}

const DRAFTS: [Draft; 5] = [Draft::Likely, Draft::Unlikely, Draft::Noise, Draft::AllEqual, Draft::Chain];

/// Mistakes a speculative decoder could make.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// One random number for all depths of a round.
    ReusesUniform,
    /// Chooses among a row's children whenever it has some.
    PrefersChildren,
    /// Tries the child by its probability, then draws from the whole distribution instead of what is left of it.
    TriesChildThenDrawsFromAll,
    /// Judges a row by the logits of the first row of its depth.
    ReadsAnotherBranch,
    /// Takes the bonus token from the anchor's row.
    BonusOfTheAnchor,
    /// Penalises every row by the committed text only.
    ForgetsThePath,
}

/// Softmax of the target's logits under the sampling parameters, written independently of the sampler: penalties, temperature, top-k.
fn law(prefix: &[u32], params: &Sampling) -> [f64; VOCAB] {
    let raw = logits(prefix);
    let mut weight: [f64; VOCAB] = std::array::from_fn(|token| {
        let count = prefix[1..].iter().filter(|&&other| other as usize == token).count() as f64;
        let seen = count > 0.0 || prefix[0] as usize == token;
        let repetition = if seen { f64::from(params.repetition_penalty) } else { 1.0 };
        let logit = f64::from(raw[token]);
        let logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
        let penalty = f64::from(params.frequency_penalty) * count + f64::from(params.presence_penalty) * count.min(1.0);
        ((logit - penalty) / f64::from(params.temperature)).exp()
    });
    let mut sorted = weight;
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = if params.top_k > 0 { sorted[params.top_k as usize - 1] } else { 0.0 };
    weight.iter_mut().filter(|w| **w < least).for_each(|w| *w = 0.0);
    let total: f64 = weight.iter().sum();
    weight.map(|w| w / total)
}

/// One request: its committed text and how it is sampled.
struct Decoder<'a> {
    seed: u64,
    params: &'a Sampling,
    fault: Fault,
    text: Vec<u32>,
    seen: Seen,
    scratch: SamplerScratch,
}

impl<'a> Decoder<'a> {
    fn new(seed: u64, params: &'a Sampling, fault: Fault) -> Self {
        let mut seen = Seen::new(VOCAB);
        seen.reset(&[START]);
        Self { seed, params, fault, text: vec![START], seen, scratch: SamplerScratch::new(VOCAB) }
    }

    /// The text of this seed, drafted with trees of `rows` rows.
    fn run(mut self, draft: Draft, rows: usize) -> [u32; LENGTH] {
        let mut tree = Tree::new(0);
        while self.text.len() <= LENGTH {
            self.draft(&mut tree, draft, rows);
            self.round(&tree);
        }
        std::array::from_fn(|at| self.text[at + 1])
    }

    fn draft(&self, tree: &mut Tree, draft: Draft, rows: usize) {
        let likely = logits(&self.text);
        let noise = |depth: usize, token: usize| uniform(!self.seed, (self.text.len() * 64 + depth * 8 + token) as u64) as f32;
        let rated: Vec<f32> = (0..DEPTHS * VOCAB)
            .map(|at| match draft {
                Draft::Likely | Draft::Chain => likely[at % VOCAB],
                Draft::Unlikely => -likely[at % VOCAB],
                Draft::Noise => 3.0 * noise(at / VOCAB, at % VOCAB),
                Draft::AllEqual => 0.0,
            })
            .collect();
        let (mut ids, mut logprobs) = ([0; DEPTHS * VOCAB], [0.0; DEPTHS * VOCAB]);
        let marginals = marginals_from_logits(&rated, VOCAB, VOCAB, &mut ids, &mut logprobs);
        let anchor = self.text[self.text.len() - 1];
        match draft {
            Draft::Chain => tree.chain(anchor, &marginals, rows),
            _ => tree.grow(anchor, &marginals, rows),
        }
    }

    fn round(&mut self, tree: &Tree) {
        let picks: Vec<u32> = (0..tree.rows).map(|row| self.pick(tree, row)).collect();
        let mut path = [0; MAX_ROWS];
        let accepted = walk(tree, &picks, &mut path);
        let bonus = if self.fault == Fault::BonusOfTheAnchor { picks[0] } else { picks[usize::from(path[accepted - 1])] };
        let emitted = path[1..accepted].iter().map(|&row| tree.token[usize::from(row)]).chain([bonus]);
        for token in emitted {
            self.text.push(token);
            self.seen.commit(token);
        }
    }

    /// The target's token after one row.
    fn pick(&mut self, tree: &Tree, row: usize) -> u32 {
        let mut tokens = [0; MAX_ROWS];
        let path = tree.path_tokens(row, &mut tokens);
        let committed = self.text.len();
        let judged = match self.fault {
            Fault::ReadsAnotherBranch => (0..=row).find(|&other| tree.depth[other] == tree.depth[row]).unwrap(),
            _ => row,
        };
        let prefix: Vec<u32> = self.text.iter().chain(tree.path_tokens(judged, &mut [0; MAX_ROWS])).copied().collect();
        let position = if self.fault == Fault::ReusesUniform { committed } else { committed + path.len() };
        let children: Vec<u32> =
            (1..tree.rows).filter(|&other| usize::from(tree.parent[other]) == row).map(|other| tree.token[other]).collect();
        let children_only = [children.iter().fold(0u32, |bits, token| bits | 1 << token)];
        let prefers = self.fault == Fault::PrefersChildren && !children.is_empty();
        if self.fault == Fault::TriesChildThenDrawsFromAll
            && let Some(&child) = children.first()
            && uniform(self.seed ^ 0xabcd, position as u64) < law(&prefix, self.params)[child as usize]
        {
            return child;
        }
        let path = if self.fault == Fault::ForgetsThePath { &[] } else { path };
        let limits = RowLimits {
            history: self.params.has_penalties().then_some(History { seen: &self.seen, path }),
            allowed: prefers.then_some(&children_only),
            banned: &[],
        };
        pick(&logits(&prefix), self.params, &limits, uniform(self.seed, position as u64), &mut self.scratch).unwrap()
    }
}

fn code(text: &[u32; LENGTH]) -> usize {
    text.iter().fold(0, |code, &token| code * VOCAB + token as usize)
}

/// Probability of every text.
fn exact(params: &Sampling) -> Vec<f64> {
    let probability = |code: usize| {
        let mut prefix = vec![START];
        (0..LENGTH as u32).rev().fold(1.0, |probability, place| {
            let token = code / VOCAB.pow(place) % VOCAB;
            let own = law(&prefix, params)[token];
            prefix.push(token as u32);
            probability * own
        })
    };
    (0..TEXTS).map(probability).collect()
}

/// How far the drawn texts are from the exact distribution: chi-square as standard deviations of a normal (Wilson and Hilferty).
/// Texts expected fewer than five times are counted as one.
fn distance(counts: &[u64], exact: &[f64]) -> f64 {
    let draws = counts.iter().sum::<u64>() as f64;
    let (mut chi, mut cells, mut rare) = (0.0, 0.0, (0.0, 0.0));
    for (&count, &probability) in counts.iter().zip(exact) {
        let expected = probability * draws;
        if expected < 5.0 {
            rare = (rare.0 + count as f64, rare.1 + expected);
        } else {
            chi += (count as f64 - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    if rare.1 > 0.0 {
        chi += (rare.0 - rare.1).powi(2) / rare.1;
        cells += 1.0;
    } else if rare.0 > 0.0 {
        return f64::INFINITY; // an impossible text was drawn
    }
    let spread = 2.0 / (9.0 * (cells - 1.0));
    ((chi / (cells - 1.0)).cbrt() - (1.0 - spread)) / spread.sqrt()
}

fn drawn(params: &Sampling, draft: Draft, rows: usize, fault: Fault) -> f64 {
    let mut counts = vec![0; TEXTS];
    for seed in 0..DRAWS {
        counts[code(&Decoder::new(seed, params, fault).run(draft, rows))] += 1;
    }
    distance(&counts, &exact(params))
}

fn temperature(temperature: f32) -> Sampling {
    Sampling { temperature, ..Sampling::greedy() }
}

fn penalised() -> Sampling {
    Sampling { frequency_penalty: 0.8, presence_penalty: 0.4, repetition_penalty: 1.3, ..temperature(1.0) }
}

#[test]
fn texts_through_trees_follow_the_targets_distribution() {
    for draft in DRAFTS {
        let distance = drawn(&temperature(1.0), draft, 12, Fault::None);
        assert!(distance < 3.5, "{draft:?}: {distance} standard deviations");
    }
}

#[test]
fn so_they_do_with_temperature_top_k_and_penalties() {
    for params in [Sampling { top_k: 3, ..temperature(0.7) }, penalised()] {
        let distance = drawn(&params, Draft::Likely, 12, Fault::None);
        assert!(distance < 3.5, "{params:?}: {distance} standard deviations");
    }
}

#[test]
fn every_planted_fault_is_caught() {
    let plain = temperature(1.0);
    for (fault, params) in [
        (Fault::ReusesUniform, plain.clone()),
        (Fault::PrefersChildren, plain.clone()),
        (Fault::TriesChildThenDrawsFromAll, plain.clone()),
        (Fault::ReadsAnotherBranch, plain.clone()),
        (Fault::BonusOfTheAnchor, plain),
        (Fault::ForgetsThePath, penalised()),
    ] {
        let distance = drawn(&params, Draft::Likely, 8, fault);
        assert!(distance > 8.0, "{fault:?} passes as honest: {distance} standard deviations");
    }
}

#[test]
fn a_seeded_text_is_the_one_of_plain_decoding() {
    for params in [temperature(0.0), temperature(1.0), penalised()] {
        for seed in 0..300 {
            let plain = Decoder::new(seed, &params, Fault::None).run(Draft::Likely, 1);
            for draft in DRAFTS {
                for rows in [2, 4, 7, 16, 64] {
                    assert_eq!(Decoder::new(seed, &params, Fault::None).run(draft, rows), plain, "seed {seed}, {draft:?}, {rows} rows");
                }
            }
        }
    }
}

#[test]
fn the_statistic_measures_what_it_says() {
    let exact = exact(&temperature(1.0));
    assert!((exact.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    // Honest draws from the table itself stay near zero.
    for stream in 1..6 {
        let mut counts = vec![0; TEXTS];
        for n in 0..DRAWS {
            let mut rest = uniform(stream, n);
            let at = exact.iter().position(|probability| {
                rest -= probability;
                rest < 0.0
            });
            counts[at.unwrap_or(TEXTS - 1)] += 1;
        }
        assert!(distance(&counts, &exact).abs() < 3.5);
    }
}
