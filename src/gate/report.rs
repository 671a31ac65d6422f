//! What a run of the gate found: as JSON in the certificate, as a table on the terminal.

use std::collections::BTreeMap;
use std::fmt::Write;

use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use super::prompts::PromptSet;
use super::run::MIN_COSINE;
use crate::device::Verify;
use crate::engine::contract::LayerDiff;

/// The result of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub passed: bool,
    /// Everything that failed besides differing tokens, one line each.
    pub failures: Vec<String>,
    pub differences: Vec<Difference>,
    /// Places where a pass took the baseline's second best token, closer to its best than the device's rounding can tell apart.
    #[serde(default)]
    pub ties: Vec<Difference>,
    /// The layer with the smallest cosine between both kernels.
    pub worst_layer: Option<usize>,
    pub passes: Vec<PassResult>,
    pub layers: Vec<LayerResult>,
    /// Where the prompts came from.
    pub source: String,
    pub max_tokens: u32,
    pub prompts: Vec<PromptResult>,
    pub seconds: f64,
}

/// One prompt and the plain baseline's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptResult {
    pub prompt: String,
    pub prompt_tokens: usize,
    pub tokens: Vec<u32>,
    pub text: String,
    /// Whether every pass gave the same tokens.
    pub same: bool,
}

/// One way of generating all prompts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassResult {
    pub verify: Verify,
    /// Rows verified per request: a budget, or "mixed trees" of 4 to 64 rows.
    pub budget: String,
    /// Tokens generated over all prompts.
    pub tokens: usize,
    /// Prompts whose tokens equal the plain baseline's.
    pub equal: usize,
    /// Largest difference of a chosen token's log-probability from the plain baseline's.
    pub drift: f32,
    pub seconds: f64,
}

/// The first place where a pass parted from the plain baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    pub pass: String,
    /// Counted from 1, as in the table.
    pub prompt: usize,
    /// Index of the generated token, from 0.
    pub position: usize,
    pub baseline_token: Option<u32>,
    pub token: Option<u32>,
    /// The baseline's log-probability of its best token minus that of its second best, at this position.
    pub margin: Option<f32>,
    /// Whether `token` is the baseline's second best.
    #[serde(default)]
    pub runner_up: bool,
    pub baseline_text: String,
    pub text: String,
}

/// Both kernels in one layer, the worst over all passes. Values that are not finite are written as the largest number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerResult {
    pub layer: usize,
    pub max_abs: f32,
    pub max_ulp: u32,
    pub cosine: f64,
    pub argmax_equal: u64,
    pub rows: u64,
}

impl LayerResult {
    /// A layer's row of the report; values that are not finite become the worst that JSON can hold.
    pub fn new(layer: usize, diff: &LayerDiff) -> Self {
        let LayerDiff { max_abs, max_ulp, cosine, argmax_equal, rows } = *diff;
        let max_abs = if max_abs.is_finite() { max_abs } else { f32::MAX };
        let cosine = if cosine.is_finite() { cosine } else { 0.0 };
        Self { layer, max_abs, max_ulp, cosine, argmax_equal, rows }
    }

    /// More than rounding.
    pub fn is_bad(&self) -> bool {
        self.cosine < MIN_COSINE || self.max_abs == f32::MAX
    }
}

impl Report {
    /// An empty report on these prompts.
    pub fn of(set: &PromptSet) -> Self {
        Self { source: set.source.clone(), max_tokens: set.max_tokens, ..Self::default() }
    }

    /// Everything that failed, a line each: the worst layer first.
    pub fn findings(&self) -> Vec<String> {
        let (layers, others): (Vec<&String>, Vec<&String>) = self.failures.iter().partition(|failure| failure.starts_with("layer "));
        let differences = self.differences.iter().map(Difference::render);
        layers.into_iter().cloned().chain(differences).chain(others.into_iter().cloned()).collect()
    }

    /// Moves differences that rounding explains to `ties`: the pass took the baseline's second best token where it is less than
    /// `margin` behind the best in log-probability. A pass that ties in more than a quarter of the prompts has failed all the same.
    pub fn set_ties_aside(&mut self, margin: f32) {
        let (ties, differences) = std::mem::take(&mut self.differences).into_iter().partition(|difference| difference.is_tie(margin));
        (self.ties, self.differences) = (ties, differences);
        let most = self.prompts.len().div_ceil(4);
        let mut by_pass: BTreeMap<&str, usize> = BTreeMap::new();
        self.ties.iter().for_each(|tie| *by_pass.entry(&tie.pass).or_default() += 1);
        let too_many = by_pass.into_iter().filter(|&(_, ties)| ties > most);
        self.failures
            .extend(too_many.map(|(pass, ties)| format!("{pass}: {ties} ties, wanted at most {most} in {} prompts", self.prompts.len())));
    }

    /// The first finding in one line, for log lines and the service manager.
    pub fn reason(&self) -> String {
        self.findings().first().map_or("nothing failed".into(), |finding| finding.lines().next().unwrap_or_default().to_string())
    }

    /// Tables and findings for a terminal.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let mut write = |text: String| writeln!(out, "{text}").expect("writing to a string never fails");
        write(self.prompt_table());
        write(self.pass_table());
        write(self.layer_table());
        self.findings().into_iter().for_each(&mut write);
        for tie in &self.ties {
            write(format!("tie: {}", tie.render()));
        }
        let verdict = if self.passed { "passed" } else { "FAILED" };
        write(format!(
            "gate {verdict}: {} prompts ({}), {} passes, {} differences, {} ties, {} failures, {:.1} s",
            self.prompts.len(),
            self.source,
            self.passes.len(),
            self.differences.len(),
            self.ties.len(),
            self.failures.len(),
            self.seconds
        ));
        out
    }

    fn prompt_table(&self) -> String {
        let mut table = table(&["#", "prompt", "prompt tokens", "tokens", "baseline text", "all passes"]);
        for (at, prompt) in self.prompts.iter().enumerate() {
            let same = if prompt.same { "same" } else { "DIFFERENT" };
            table.add_row([
                (at + 1).to_string(),
                short(&prompt.prompt, 36),
                prompt.prompt_tokens.to_string(),
                prompt.tokens.len().to_string(),
                short(&prompt.text, 48),
                same.into(),
            ]);
        }
        table.to_string()
    }

    fn pass_table(&self) -> String {
        let mut table = table(&["verify", "budget", "tokens", "equal", "log-prob drift", "seconds"]);
        for pass in &self.passes {
            table.add_row([
                pass.verify.to_string(),
                pass.budget.clone(),
                pass.tokens.to_string(),
                format!("{}/{}", pass.equal, self.prompts.len()),
                format!("{:.1e}", pass.drift),
                format!("{:.2}", pass.seconds),
            ]);
        }
        table.to_string()
    }

    fn layer_table(&self) -> String {
        let mut table = table(&["layer", "max abs", "max ulp", "1 - cosine", "same argmax", ""]);
        for layer in &self.layers {
            let mark = match (layer.is_bad(), self.worst_layer == Some(layer.layer)) {
                (true, true) => "DIFFERENT, worst",
                (true, false) => "DIFFERENT",
                (false, true) => "worst",
                (false, false) => "",
            };
            table.add_row([
                layer.layer.to_string(),
                format!("{:.2e}", layer.max_abs),
                layer.max_ulp.to_string(),
                format!("{:.1e}", 1.0 - layer.cosine),
                format!("{}/{}", layer.argmax_equal, layer.rows),
                mark.into(),
            ]);
        }
        table.to_string()
    }
}

impl Difference {
    fn is_tie(&self, margin: f32) -> bool {
        self.runner_up && self.margin.is_some_and(|found| found < margin)
    }

    fn render(&self) -> String {
        let token = |token: Option<u32>| token.map_or("the end".to_string(), |id| format!("token {id}"));
        let margin = self.margin.map_or("no margin (the baseline had ended)".to_string(), |margin| {
            format!("the baseline's best token leads by {margin:.4} in log-probability")
        });
        format!(
            "different: {}, prompt {}, position {}: {} instead of {}; {margin}\n  baseline: {:?}\n  found:    {:?}",
            self.pass,
            self.prompt,
            self.position,
            token(self.token),
            token(self.baseline_token),
            self.baseline_text,
            self.text
        )
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    table
}

/// One line of at most `most` characters.
pub fn short(text: &str, most: usize) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.chars().count() <= most { line } else { line.chars().take(most - 1).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_both_texts_position_and_margin() {
        let found = Difference {
            pass: "verify on, budget tree:16".into(),
            prompt: 2,
            position: 7,
            baseline_token: Some(11),
            token: None,
            runner_up: false,
            margin: Some(0.125),
            baseline_text: "left".into(),
            text: "right\n".into(),
        };
        let text = Report { differences: vec![found], ..Report::default() }.render();
        for part in ["position 7", "0.1250", "\"left\"", "\"right\\n\"", "the end instead of token 11", "gate FAILED"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn infinite_differences_survive_json() {
        let diff = LayerDiff { max_abs: f32::INFINITY, cosine: f64::NAN, ..LayerDiff::default() };
        let layer = LayerResult::new(3, &diff);
        assert!(layer.is_bad());
        let report = Report { layers: vec![layer], ..Report::default() };
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }
}
