//! The rollout gate: the same prompts generated with the baseline and with the custom verify kernel at temperature 0, compared token
//! for token. `serve` runs it before it reports ready; `kdtree gate` runs it alone.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a failed gate means for `serve`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The server does not become ready and ends.
    #[default]
    Block,
    /// It serves with the baseline kernel and says so.
    Baseline,
}

/// The `[gate]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GateConfig {
    /// Run the gate inside `serve`, before it reports ready.
    pub enable: bool,
    /// File of prompts, one JSON object a line: {"text": ...} or {"user": ..., "thinking": true|false}; absent = the built-in set.
    pub prompts: Option<PathBuf>,
    /// Tokens generated per prompt.
    pub max_tokens: u32,
    /// After a failed gate: block (not ready) or baseline (serve with the baseline kernel).
    pub on_failure: OnFailure,
    /// Directory of certificates; absent = the state directory of the service, else of the user.
    pub certificates: Option<PathBuf>,
}

impl Default for GateConfig {
    fn default() -> Self {
        Self { enable: true, prompts: None, max_tokens: 24, on_failure: OnFailure::Block, certificates: None }
    }
}

impl GateConfig {
    /// Values that cannot be used.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !(1..=4096).contains(&self.max_tokens) {
            problems.push(format!("gate.max_tokens: found {}, wanted 1 to 4096", self.max_tokens));
        }
        problems
    }
}
