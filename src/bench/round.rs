//! `kdtree bench round`: tokens per second and tokens per round for plain decoding, chains and trees, by class of prompt; decode and
//! prefill beside the floor measured in the same run: the time to stream the weights of one token once with the same threads.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::device::cpu::parallel::{SharedMut, split};
use crate::device::cpu::simd::{Isa, Lanes, WIDTH, dispatch};
use crate::engine::contract::{Finished, Request};
use crate::engine::driver::{Driver, greedy};
use crate::model::config::TargetConfig;
use crate::model::inventory::{Inventory, Part};
use crate::speculate::budget::Budget;

/// One class of prompts.
pub struct Class {
    pub name: &'static str,
    pub prompts: &'static [Prompt],
}

/// A prompt as users would send it.
#[derive(Clone, Copy)]
pub enum Prompt {
    /// Plain text to continue.
    Text(&'static str),
    /// A user's message, answered at once.
    Chat(&'static str),
    /// A user's message, answered after thinking.
    Thinking(&'static str),
}

use Prompt::{Chat, Text, Thinking};

/// The fourteen prompts that the drafter's acceptance was measured with when it was trained (training/README.md).
pub const CLASSES: [Class; 6] = [
    Class {
        name: "facts",
        prompts: &[Chat("What is the capital of France?"), Chat("What is the currency of Japan?"), Chat("Which countries border Germany?")],
    },
    Class {
        name: "lists, arithmetic",
        prompts: &[Chat("List the first ten prime numbers."), Chat("What is 17 + 25?"), Chat("Count from 12 to 30.")],
    },
    Class {
        name: "code",
        prompts: &[
            Chat("Write a Python function that checks whether a number is prime."),
            Chat("Write a Python function that reverses a string."),
        ],
    },
    Class { name: "definitions", prompts: &[Chat("What does the word \"harbour\" mean?"), Chat("Define gravity.")] },
    Class {
        name: "stories",
        prompts: &[
            Text("Once upon a time there was a king who had three sons."),
            Text("It was a dark night, and the old man"),
            Text("\"I am very glad to see you,\" said"),
        ],
    },
    Class { name: "reasoning", prompts: &[Thinking("Tom has 5 apples and buys 7 more. How many apples does he have?")] },
];

/// Tokens generated per prompt.
pub const TOKENS: u32 = 96;

impl Prompt {
    /// Ids under Kimi's chat format.
    pub fn ids(self, driver: &dyn Driver) -> Vec<u32> {
        let tokenizer = driver.tokenizer();
        let chat = |text: &str, tail: &str| {
            let mut ids = tokenizer.encode_with_markers("<|im_user|>user<|im_middle|>");
            ids.extend(tokenizer.encode(text));
            ids.extend(tokenizer.encode_with_markers(&format!("<|im_end|><|im_assistant|>assistant<|im_middle|>{tail}")));
            ids
        };
        match self {
            Text(text) => tokenizer.encode_prompt(text),
            Chat(text) => chat(text, "<think></think>"),
            Thinking(text) => chat(text, "<think>"),
        }
    }
}

/// One class under one budget.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    pub class: String,
    pub budget: String,
    /// Tokens decoded after each prompt's first, and rounds they took, over all repetitions.
    pub tokens: u64,
    pub rounds: u64,
    pub tokens_per_round: f64,
    /// Decode only: the tokens of one repetition over the sum of each prompt's median time.
    pub tokens_per_second: f64,
    /// Those median times, and rounds a repetition, by prompt.
    pub prompt_ms: Vec<f64>,
    pub prompt_rounds: Vec<f64>,
    /// Half the distance between the quartiles of the repetitions' times, each prompt's against its median: how far one repetition lies
    /// from another.
    pub spread: f64,
    /// Tokens per second against the fastest fixed budget's of this class; `None` where no fixed budget was measured.
    pub of_best: Option<f64>,
}

/// What the floor is made of and how decode and prefill stand to it.
#[derive(Clone, Debug, Serialize)]
pub struct Floor {
    pub weight_bytes: u64,
    /// Streaming those bytes once, median.
    pub stream_us: f64,
    /// One plain decode round at a short prefix, median.
    pub decode_us: f64,
    pub decode_over_floor: f64,
    pub prefill_tokens: usize,
    pub prefill_us_per_token: f64,
    /// Decode per token over prefill per token.
    pub prefill_gain: f64,
    /// The same prompt when the request drafts: the drafter's context is kept, and every row passes every layer.
    pub drafting_prefill_us_per_token: f64,
    pub drafting_prefill_gain: f64,
}

/// What `kdtree bench round --json` writes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub model: String,
    pub threads: usize,
    pub verify: String,
    pub floor: Floor,
    pub cells: Vec<Cell>,
}

/// Prompts that a class has in a repetition, at least; a class of fewer is repeated as much more often, so that no figure hangs on a
/// few short texts.
const PROMPTS: usize = 3;

/// Runs every class under every budget, `repeat` times after one pass that is not counted, one request at a time.
pub fn run(driver: &mut dyn Driver, config: &TargetConfig, budgets: &[Budget], repeat: usize) -> anyhow::Result<Report> {
    let floor = measure_floor(driver, config)?;
    let mut cells = Vec::new();
    for class in &CLASSES {
        let mut measured = vec![Measured::of(class); budgets.len()];
        // The first pass is not counted: it teaches `auto` this class, as steady traffic of the class would.
        for pass in 0..=repeat * (PROMPTS / class.prompts.len()).max(1) {
            for (at, &prompt) in class.prompts.iter().enumerate() {
                // Every prompt goes through all budgets before the next comes, so that they share a machine's better and worse moments.
                for of in order(budgets.len(), pass + at) {
                    let once = one(driver, prompt, budgets[of])?;
                    if pass > 0 {
                        measured[of].add(at, once);
                    }
                }
            }
        }
        let fixed = budgets.iter().zip(&measured).filter(|(budget, _)| **budget != Budget::Auto);
        let best = fixed.map(|(_, measured)| measured.tokens_per_second()).reduce(f64::max);
        cells.extend(budgets.iter().zip(&measured).map(|(budget, measured)| measured.cell(class.name, *budget, best)));
    }
    Ok(Report {
        model: driver.info().name.clone(),
        threads: rayon::current_num_threads(),
        verify: driver.verify().to_string(),
        floor,
        cells,
    })
}

/// What one budget did with one class.
#[derive(Clone)]
struct Measured {
    tokens: u64,
    /// By prompt.
    rounds: Vec<u64>,
    /// By prompt and repetition.
    seconds: Vec<Vec<f64>>,
}

impl Measured {
    fn of(class: &Class) -> Self {
        Self { tokens: 0, rounds: vec![0; class.prompts.len()], seconds: vec![Vec::new(); class.prompts.len()] }
    }

    fn add(&mut self, prompt: usize, (tokens, rounds, took): (u64, u64, Duration)) {
        self.tokens += tokens;
        self.rounds[prompt] += rounds;
        self.seconds[prompt].push(took.as_secs_f64());
    }

    /// Tokens are the same in every repetition, whatever the budget; of its times the median counts, since what disturbs a machine
    /// adds to some of them only.
    fn tokens_per_second(&self) -> f64 {
        let seconds: f64 = self.seconds.iter().map(|times| median(times.clone())).sum();
        self.tokens as f64 / self.repetitions() / seconds.max(1e-9)
    }

    fn repetitions(&self) -> f64 {
        self.seconds.first().map_or(0, Vec::len).max(1) as f64
    }

    fn cell(&self, class: &str, budget: Budget, best: Option<f64>) -> Cell {
        let (tokens_per_second, rounds) = (self.tokens_per_second(), self.rounds.iter().sum::<u64>());
        Cell {
            class: class.into(),
            budget: budget.to_string(),
            tokens: self.tokens,
            rounds,
            tokens_per_round: self.tokens as f64 / rounds.max(1) as f64,
            tokens_per_second,
            prompt_ms: self.seconds.iter().map(|times| 1e3 * median(times.clone())).collect(),
            prompt_rounds: self.rounds.iter().map(|&rounds| rounds as f64 / self.repetitions()).collect(),
            spread: spread(&self.seconds),
            of_best: best.map(|best| tokens_per_second / best),
        }
    }
}

/// See [`Cell::spread`].
fn spread(seconds: &[Vec<f64>]) -> f64 {
    let mut relative = Vec::new();
    for times in seconds {
        let middle = median(times.clone());
        relative.extend(times.iter().map(|time| time / middle));
    }
    relative.sort_unstable_by(f64::total_cmp);
    let quarter = relative.len() / 4;
    match relative.len() {
        0 => f64::NAN,
        count => (relative[count - 1 - quarter] - relative[quarter]) / 2.0,
    }
}

/// The order in which a pass takes `count` budgets. They alternate, so that a machine whose speed drifts treats them alike, and over
/// `count` passes (twice as many where it is odd) each follows every other equally often: what wide rounds leave behind in caches and
/// clock slows the next budget by a few per cent. Source: Williams 1949, designs balanced for residual effects.
fn order(count: usize, pass: usize) -> Vec<usize> {
    let first = (0..count).map(|i| if i % 2 == 1 { i.div_ceil(2) } else { (count - i / 2) % count });
    let mut order: Vec<usize> = first.map(|at| (at + pass) % count).collect();
    if count % 2 == 1 && pass / count % 2 == 1 {
        order.reverse();
    }
    order
}

/// Tokens after the first, rounds and decode time of one prompt.
pub fn one(driver: &mut dyn Driver, prompt: Prompt, budget: Budget) -> anyhow::Result<(u64, u64, Duration)> {
    let ids = prompt.ids(driver);
    let finished = finished(driver, greedy(ids, TOKENS, Some(budget)))?;
    Ok((u64::from(finished.completion_tokens) - 1, finished.speculation.rounds, finished.timing.decode))
}

/// Bytes of the weights that decoding one token reads: everything but the embedding table and the experts not chosen.
pub fn bytes_per_token(config: &TargetConfig) -> u64 {
    let chosen = |bytes: u64| bytes * config.top_k as u64 / config.experts as u64;
    let of = |tensor: &crate::model::inventory::TensorSpec| match tensor.part {
        Part::ExpertsPacked | Part::ExpertsScales => chosen(tensor.bytes()),
        Part::ExpertsShapes => 0,
        _ if tensor.name.ends_with("embed_tokens.weight") => 0,
        _ => tensor.bytes(),
    };
    Inventory::target(config).tensors.iter().map(of).sum()
}

fn measure_floor(driver: &mut dyn Driver, config: &TargetConfig) -> anyhow::Result<Floor> {
    let weight_bytes = bytes_per_token(config);
    let buffer = vec![1.0f32; weight_bytes as usize / 4];
    let prompt = Text("The capital of France is").ids(driver);
    let prefill_tokens = 1000.min(driver.info().max_model_len - 1);
    let long: Vec<u32> = prompt.iter().copied().cycle().take(prefill_tokens).collect();
    let (mut streams, mut decodes, mut prefills, mut drafting) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // All four by turns, so that a machine whose speed drifts treats them alike.
    for _ in 0..15 {
        let began = Instant::now();
        std::hint::black_box(stream(&buffer));
        streams.push(began.elapsed().as_secs_f64() * 1e6);
        let mut request = greedy(prompt.clone(), 33, Some(Budget::Off));
        request.stop.ignore_eos = true;
        let decoded = finished(driver, request)?;
        decodes.push(decoded.timing.decode.as_secs_f64() * 1e6 / decoded.speculation.rounds.max(1) as f64);
        for (budget, prefills) in [(Budget::Off, &mut prefills), (Budget::Chain, &mut drafting)] {
            let read = finished(driver, greedy(long.clone(), 1, Some(budget)))?;
            prefills.push(read.timing.prefill.as_secs_f64() * 1e6 / prefill_tokens as f64);
        }
    }
    let (stream_us, decode_us, prefill, drafting) = (median(streams), median(decodes), median(prefills), median(drafting));
    Ok(Floor {
        weight_bytes,
        stream_us,
        decode_us,
        decode_over_floor: decode_us / stream_us,
        prefill_tokens,
        prefill_us_per_token: prefill,
        prefill_gain: decode_us / prefill,
        drafting_prefill_us_per_token: drafting,
        drafting_prefill_gain: decode_us / drafting,
    })
}

fn finished(driver: &mut dyn Driver, request: Request) -> anyhow::Result<Finished> {
    driver.generate(vec![request])?.remove(0).end.map_err(|message| anyhow::anyhow!(message))
}

/// The middle value, or the mean of the two in the middle; NaN of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    match values.get(low) {
        Some(low) => (low + values[high]) / 2.0,
        None => f64::NAN,
    }
}

/// Reads a buffer once over the pool, as fast as vector loads go.
fn stream(buffer: &[f32]) -> f32 {
    let pieces = rayon::current_num_threads();
    let mut sums = vec![0f32; pieces];
    let shared = SharedMut::new(&mut sums);
    split(pieces, 1, &|range| {
        for piece in range {
            let part = &buffer[piece * buffer.len() / pieces..(piece + 1) * buffer.len() / pieces];
            // SAFETY: every piece has its own place.
            unsafe { shared.range(piece, 1)[0] = sum_of(Isa::detect(), part) };
        }
    });
    sums.iter().sum()
}

dispatch! {
    fn sum_of = sum_kernel(x: &[f32]) -> f32
}

#[inline(always)]
unsafe fn sum_kernel<V: Lanes>(x: &[f32]) -> f32 {
    // SAFETY: whole lanes inside the slice.
    unsafe {
        let mut sums = [V::splat(0.0); 8];
        for lanes in x.chunks_exact(8 * WIDTH) {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = sum.add(V::load(lanes.as_ptr().add(i * WIDTH)));
            }
        }
        sums.into_iter().reduce(|a, b| a.add(b)).map_or(0.0, |sum| sum.sum())
    }
}

#[cfg(test)]
mod tests {
    use super::{Budget, CLASSES, Duration, Measured, median, order, spread};

    #[test]
    fn one_slow_repetition_changes_neither_speed_nor_spread() {
        let class = &CLASSES[2];
        let mut measured = Measured::of(class);
        for repetition in 0..8 {
            for prompt in 0..class.prompts.len() {
                let stray = if repetition == 5 { 300 } else { 0 };
                measured.add(prompt, (95, 10, Duration::from_millis(50 + 50 * prompt as u64 + stray)));
            }
        }
        let cell = measured.cell("code", Budget::Chain, Some(1000.0));
        assert_eq!((cell.tokens, cell.rounds), (2 * 8 * 95, 160));
        assert!((cell.tokens_per_second - 2.0 * 95.0 / 0.15).abs() < 1e-6, "{cell:?}");
        assert!(cell.spread < 1e-9 && (cell.of_best.unwrap() - cell.tokens_per_second / 1000.0).abs() < 1e-12, "{cell:?}");
    }

    #[test]
    fn the_spread_is_half_the_distance_of_the_quartiles() {
        assert!((spread(&[vec![0.9, 0.9, 1.1, 1.1], vec![1.8, 1.8, 2.2, 2.2]]) - 0.1).abs() < 1e-12);
        assert!(spread(&[]).is_nan() && spread(&[vec![]]).is_nan());
        assert_eq!((median(vec![4.0, 1.0]), median(vec![3.0, 1.0, 2.0])), (2.5, 2.0));
    }

    #[test]
    fn every_budget_follows_every_other_equally_often() {
        for count in 1..9usize {
            let passes = if count % 2 == 0 { count } else { 2 * count };
            let mut follows = vec![0; count * count];
            for pass in 0..passes {
                let order = order(count, pass);
                assert_eq!(
                    {
                        let mut sorted = order.clone();
                        sorted.sort_unstable();
                        sorted
                    },
                    (0..count).collect::<Vec<_>>()
                );
                order.windows(2).for_each(|pair| follows[pair[0] * count + pair[1]] += 1);
            }
            for at in 0..count * count {
                assert_eq!(follows[at], if at / count == at % count { 0 } else { passes / count }, "{count} budgets: {follows:?}");
            }
        }
    }
}
