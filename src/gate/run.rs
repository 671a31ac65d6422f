//! One run of the gate on a loaded engine: the same prompts with the baseline kernel, with the custom kernel and with both, as plain
//! decoding and as trees, at temperature 0; then everything against the plain baseline. Called by `gate::check` on the engine thread.

use std::time::Instant;

use super::errors;
use super::prompts::PromptSet;
use super::report::{Difference, LayerResult, PassResult, PromptResult, Report};
use crate::device::{DeviceError, Verify};
use crate::engine::contract::{FinishReason, LayerDiff, ModelInfo};
use crate::engine::driver::{Driver, Generated, greedy};
use crate::speculate::budget::Budget;

/// Prompts that run together: several requests in one pass, so that ragged rows and slot lists are exercised too.
const TOGETHER: usize = 8;

/// Tree sizes of a mixed pass, prompt after prompt: ragged rows, full and partial tiles, one whole mask.
const TREES: [u8; 6] = [64, 8, 4, 12, 4, 17];

/// Smallest cosine between both kernels' outputs of a layer, over all rows of the run. Rounding to bf16 alone gives 1 - 4e-6 at
/// worst; one wrong row in a thousand gives 1 - 5e-4.
pub const MIN_COSINE: f64 = 1.0 - 1e-5;

/// Why a run gave no report.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("the server was stopped before the gate had finished")]
    Stopped,
}

/// Rows verified per request in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    Same(Budget),
    /// Every prompt a tree of another size.
    Mixed,
}

impl Rows {
    fn of_prompt(self, at: usize) -> Budget {
        match self {
            Self::Same(budget) => budget,
            Self::Mixed => Budget::Tree(TREES[at % TREES.len()]),
        }
    }
}

impl std::fmt::Display for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Same(budget) => budget.fmt(f),
            Self::Mixed => f.write_str("mixed trees"),
        }
    }
}

/// One way of generating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    pub verify: Verify,
    pub rows: Rows,
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "verify {}, budget {}", self.verify, self.rows)
    }
}

/// What a run goes through: plain decoding, trees of all sizes, and the configured budget where that is another fixed one.
pub fn rows(info: &ModelInfo, configured: Budget) -> Vec<Rows> {
    let mut rows = vec![Rows::Same(Budget::Off)];
    if info.max_rows > 1 {
        rows.push(Rows::Mixed);
        if !matches!(configured, Budget::Auto | Budget::Off) {
            rows.push(Rows::Same(configured));
        }
    }
    rows
}

/// Every pass: the reference first.
fn passes(rows: &[Rows]) -> Vec<Pass> {
    let both = |&rows| [Verify::On, Verify::Validate].map(|verify| Pass { verify, rows });
    let reference = Pass { verify: Verify::Off, rows: Rows::Same(Budget::Off) };
    std::iter::once(reference).chain(rows.iter().flat_map(both)).collect()
}

/// Generates and compares. The engine's verify mode is what it was before.
///
/// # Errors
/// The device failed, or the server is being stopped. A failed comparison is a report.
pub fn run(driver: &mut dyn Driver, set: &PromptSet, rows: &[Rows]) -> Result<Report, RunError> {
    let began = Instant::now();
    let served = driver.verify();
    errors::watch();
    let outputs = generate(driver, set, &passes(rows));
    let records = errors::take();
    driver.set_verify(served)?;
    let (passes, layers) = outputs?;
    let mut report = compare(set, &passes);
    report.layers = layers.iter().enumerate().map(|(layer, diff)| LayerResult::new(layer, diff)).collect();
    judge_layers(&mut report);
    report.set_ties_aside(driver.tie_margin());
    if records.count > 0 {
        report.failures.push(format!("{} error records in the log; the first: {}", records.count, records.texts[0]));
    }
    report.passed = report.failures.is_empty() && report.differences.is_empty();
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

/// What one pass gave, a result per prompt.
struct Output {
    pass: Pass,
    results: Vec<Generated>,
    seconds: f64,
}

fn generate(driver: &mut dyn Driver, set: &PromptSet, passes: &[Pass]) -> Result<(Vec<Output>, Vec<LayerDiff>), RunError> {
    let total = passes.len() * set.prompts.len();
    let mut done = 0;
    let mut outputs = Vec::with_capacity(passes.len());
    let mut layers = Vec::new();
    for &pass in passes {
        let began = Instant::now();
        driver.set_verify(pass.verify)?;
        driver.take_validation();
        let mut results = Vec::with_capacity(set.prompts.len());
        for group in set.prompts.chunks(TOGETHER) {
            driver.say(format!("gate {done}/{total}"));
            let first = results.len();
            let requests = group.iter().enumerate().map(|(at, prompt)| {
                let mut request = greedy(prompt.ids.clone(), set.max_tokens, Some(pass.rows.of_prompt(first + at)));
                request.logprobs = Some(2);
                request
            });
            results.extend(driver.generate(requests.collect())?);
            done += group.len();
        }
        if results.iter().any(|result| result.end.as_ref().is_ok_and(|end| end.reason == FinishReason::Abort)) {
            return Err(RunError::Stopped);
        }
        LayerDiff::keep_worst(&mut layers, &driver.take_validation());
        outputs.push(Output { pass, results, seconds: began.elapsed().as_secs_f64() });
    }
    driver.say(format!("gate {total}/{total}"));
    Ok((outputs, layers))
}

/// Every output against the first one.
fn compare(set: &PromptSet, outputs: &[Output]) -> Report {
    let mut report = Report::of(set);
    let reference = &outputs[0].results;
    for output in outputs {
        let (mut tokens, mut equal) = (0, 0);
        for (at, (result, wanted)) in output.results.iter().zip(reference).enumerate() {
            tokens += result.tokens.len();
            let place = format!("{}, prompt {} ({})", output.pass, at + 1, super::report::short(&set.prompts[at].shown, 40));
            report.failures.extend(faults(result).map(|fault| format!("{place}: {fault}")));
            match first_difference(&wanted.tokens, &result.tokens) {
                None => equal += 1,
                Some(position) => report.differences.push(difference(output.pass, at, position, wanted, result)),
            }
        }
        let Pass { verify, rows } = output.pass;
        let (drift, seconds) = (drift(reference, &output.results), output.seconds);
        report.passes.push(PassResult { verify, budget: rows.to_string(), tokens, equal, drift, seconds });
    }
    for (at, (prompt, wanted)) in set.prompts.iter().zip(reference).enumerate() {
        report.prompts.push(PromptResult {
            prompt: prompt.shown.clone(),
            prompt_tokens: prompt.ids.len(),
            tokens: wanted.tokens.clone(),
            text: wanted.text.clone(),
            same: !report.differences.iter().any(|difference| difference.prompt == at + 1),
        });
    }
    report
}

/// What is wrong with a result by itself.
fn faults(result: &Generated) -> impl Iterator<Item = String> {
    let failed = result.end.as_ref().err().map(|message| format!("the request failed: {message}"));
    let empty = (failed.is_none() && !is_text(&result.text)).then(|| "found no text, wanted some".to_string());
    let nan = result.logprobs.iter().position(|entry| entry.logprob.is_nan() || entry.top.iter().any(|(_, value)| value.is_nan()));
    let nan = nan.map(|at| format!("the log-probability of token {at} is NaN"));
    [failed, empty, nan].into_iter().flatten()
}

/// Something to read: not only white space, control bytes and pieces of characters.
fn is_text(text: &str) -> bool {
    text.chars().any(|c| !c.is_whitespace() && !c.is_control() && c != char::REPLACEMENT_CHARACTER)
}

/// The first place where two outputs part; the end of the shorter one counts.
fn first_difference(wanted: &[u32], found: &[u32]) -> Option<usize> {
    let parted = wanted.iter().zip(found).position(|(wanted, found)| wanted != found);
    parted.or_else(|| (wanted.len() != found.len()).then(|| wanted.len().min(found.len())))
}

fn difference(pass: Pass, at: usize, position: usize, wanted: &Generated, found: &Generated) -> Difference {
    let top = wanted.logprobs.get(position).map(|entry| entry.top.as_slice()).unwrap_or_default();
    let margin = match top {
        [first, second, ..] => Some(first.1 - second.1),
        _ => None,
    };
    Difference {
        pass: pass.to_string(),
        prompt: at + 1,
        position,
        baseline_token: wanted.tokens.get(position).copied(),
        token: found.tokens.get(position).copied(),
        margin: margin.filter(|margin| margin.is_finite()),
        runner_up: top.get(1).is_some_and(|second| Some(second.0) == found.tokens.get(position).copied()),
        baseline_text: wanted.text.clone(),
        text: found.text.clone(),
    }
}

/// Largest difference of the chosen tokens' log-probabilities as long as both outputs agree.
fn drift(reference: &[Generated], results: &[Generated]) -> f32 {
    let pairs = reference.iter().zip(results).flat_map(|(wanted, found)| wanted.logprobs.iter().zip(&found.logprobs));
    let apart = pairs.filter(|(wanted, found)| wanted.token == found.token).map(|(wanted, found)| (wanted.logprob - found.logprob).abs());
    apart.filter(|apart| apart.is_finite()).fold(0.0, f32::max)
}

/// Names the worst layer where both kernels differ by more than rounding.
fn judge_layers(report: &mut Report) {
    let bad = report.layers.iter().filter(|layer| layer.is_bad()).count();
    report.worst_layer =
        report.layers.iter().min_by(|a, b| a.cosine.total_cmp(&b.cosine).then(b.max_abs.total_cmp(&a.max_abs))).map(|l| l.layer);
    let Some(worst) = report.worst_layer.map(|worst| &report.layers[worst]) else {
        report.failures.push("no round was verified, so nothing was compared: wanted prompts with an answer of at least 2 tokens".into());
        return;
    };
    if bad > 0 {
        let failure = format!(
            "layer {}: cosine {:.7} between both kernels, wanted at least {MIN_COSINE:.7} (max abs {:.3e}, {} bf16 ulp, same largest component in {} of {} rows); {bad} of {} layers differ, this one most",
            worst.layer,
            worst.cosine,
            worst.max_abs,
            worst.max_ulp,
            worst.argmax_equal,
            worst.rows,
            report.layers.len()
        );
        report.failures.push(failure);
    }
}

#[cfg(test)]
mod tests {
    use super::super::prompts::Prompt;
    use super::*;
    use crate::engine::contract::{Finished, TokenLogprob};

    fn result(tokens: &[u32], text: &str) -> Generated {
        let entry = |&token: &u32| TokenLogprob { token, logprob: -0.5, rank: 1, top: vec![(token, -0.5), (99, -0.75)] };
        let logprobs = tokens.iter().map(entry).collect();
        let end = Ok(Finished { reason: FinishReason::Length, ..Finished::aborted(1) });
        Generated { tokens: tokens.to_vec(), text: text.into(), logprobs, end }
    }

    fn compared(custom: Generated) -> Report {
        let set = PromptSet { source: "test".into(), prompts: vec![Prompt { shown: "p".into(), ids: vec![1] }], max_tokens: 3 };
        let pass = |verify| Pass { verify, rows: Rows::Mixed };
        let output = |verify, result| Output { pass: pass(verify), results: vec![result], seconds: 0.0 };
        compare(&set, &[output(Verify::Off, result(&[5, 6, 7], "abc")), output(Verify::On, custom)])
    }

    #[test]
    fn equal_outputs_are_no_difference() {
        let report = compared(result(&[5, 6, 7], "abc"));
        assert!(report.differences.is_empty() && report.failures.is_empty());
        assert_eq!((report.passes[1].equal, report.prompts[0].same), (1, true));
    }

    #[test]
    fn the_first_difference_comes_with_both_texts_and_the_margin() {
        let report = compared(result(&[5, 8, 7], "axc"));
        let [found] = report.differences.as_slice() else { panic!("{:?}", report.differences) };
        assert_eq!((found.position, found.baseline_token, found.token, found.margin), (1, Some(6), Some(8), Some(0.25)));
        assert_eq!((found.baseline_text.as_str(), found.text.as_str()), ("abc", "axc"));
        assert!(!report.prompts[0].same);
    }

    #[test]
    fn only_the_runner_up_within_the_margin_is_a_tie_and_too_many_fail() {
        let tied = |token: u32, margin: f32| {
            let mut report = compared(result(&[5, token, 7], "axc"));
            report.set_ties_aside(margin);
            (report.differences.len(), report.ties.len(), report.failures.len())
        };
        assert_eq!(tied(99, 0.3), (0, 1, 0), "the second best, 0.25 behind");
        assert_eq!(tied(99, 0.2), (1, 0, 0), "too far behind");
        assert_eq!(tied(8, 0.3), (1, 0, 0), "not the second best");
        assert_eq!(tied(99, 0.0), (1, 0, 0), "a device whose kernels agree knows no ties");
        let mut report = compared(result(&[5, 99, 7], "axc"));
        report.differences.push(report.differences[0].clone());
        report.set_ties_aside(0.3);
        assert!(report.failures[0].contains("2 ties, wanted at most 1"), "{:?}", report.failures);
    }

    #[test]
    fn a_shorter_output_is_a_difference_at_its_end() {
        let report = compared(result(&[5, 6], "ab"));
        assert_eq!((report.differences[0].position, report.differences[0].token), (2, None));
    }

    #[test]
    fn failed_empty_and_nan_results_are_failures() {
        let failed = Generated { end: Err("logit 3 is NaN".into()), ..result(&[5, 6, 7], "abc") };
        let mut nan = result(&[5, 6, 7], "abc");
        nan.logprobs[1].logprob = f32::NAN;
        for (bad, named) in [(failed, "logit 3 is NaN"), (result(&[5, 6, 7], " \n\0\u{fffd}"), "no text"), (nan, "token 1 is NaN")] {
            let report = compared(bad);
            assert!(
                report.failures.iter().any(|failure| failure.contains(named) && failure.contains("verify on")),
                "{:?}",
                report.failures
            );
        }
    }

    #[test]
    fn the_worst_layer_is_named_and_no_layers_at_all_fail() {
        let mut report = compared(result(&[5, 6, 7], "abc"));
        judge_layers(&mut report);
        assert!(report.failures[0].contains("nothing was compared"));
        report.failures.clear();
        let diff = |cosine| LayerDiff { cosine, max_abs: 0.1, ..LayerDiff::default() };
        report.layers = [1.0, 0.9, 0.5, 0.999].iter().enumerate().map(|(at, &cosine)| LayerResult::new(at, &diff(cosine))).collect();
        judge_layers(&mut report);
        assert_eq!(report.worst_layer, Some(2));
        assert!(report.failures[0].starts_with("layer 2: ") && report.failures[0].contains("3 of 4 layers"), "{:?}", report.failures);
    }
}
