//! The rollout gate: the same prompts generated with the baseline and with the custom verify kernel at temperature 0, compared token
//! for token. `serve` runs it before it reports ready; `kdtree gate` runs it alone.
//!
//! ```text
//! prompts --+                      +-- report --+
//!           +-- run (on the engine)             +-- certificate --> next start skips the run
//! engine  --+                      identity ----+
//! ```

pub mod certificate;
pub mod errors;
mod hashes;
pub mod identity;
pub mod prompts;
pub mod report;
pub mod rollout;
pub mod run;
mod store;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::engine::driver::Driver;
use crate::engine::options::EngineOptions;
use certificate::Certificate;
use identity::{Subject, identify};
use prompts::PromptSet;

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
        // One token comes from the prompt's own pass: nothing would be verified.
        if !(2..=4096).contains(&self.max_tokens) {
            problems.push(format!("gate.max_tokens: found {}, wanted 2 to 4096", self.max_tokens));
        }
        problems
    }
}

/// Everything a gate needs besides a loaded engine.
#[derive(Clone, Debug)]
pub struct Gate {
    pub set: PromptSet,
    pub options: EngineOptions,
    /// Where certificates are kept; `None` = nowhere.
    pub directory: Option<PathBuf>,
    /// Run even where a certificate says "passed".
    pub force: bool,
}

/// A verdict, new or remembered.
#[derive(Clone, Debug)]
pub struct Checked {
    pub certificate: Certificate,
    /// The run was skipped.
    pub remembered: bool,
    /// The file the certificate lies in.
    pub file: Option<PathBuf>,
}

impl Gate {
    /// A gate of this configuration; certificates are kept where it says, else in the state directory.
    pub fn new(config: &GateConfig, set: PromptSet, options: &EngineOptions, force: bool) -> Self {
        Self { set, options: options.clone(), directory: store::directory(config.certificates.as_deref()), force }
    }

    /// Looks for a certificate; without one, runs and writes one.
    ///
    /// # Errors
    /// The binary or the model cannot be read, the device failed, or the server is being stopped. A failed comparison is a verdict.
    pub fn check(&self, driver: &mut dyn Driver) -> anyhow::Result<Checked> {
        let rows = run::rows(driver.info(), self.options.budget);
        let directory = self.directory.as_deref();
        let subject = Subject { options: &self.options, set: &self.set, rows: &rows, directory };
        let identity = identify(driver, &subject)?;
        if !self.force
            && let Some(directory) = directory
            && let Some(certificate) = Certificate::find(directory, &identity)
        {
            let file = Certificate::path(directory, &identity);
            tracing::info!(file = %file.display(), "the gate was passed before by exactly this combination");
            return Ok(Checked { certificate, remembered: true, file: Some(file) });
        }
        let report = run::run(driver, &self.set, &rows)?;
        let certificate = Certificate::new(identity, report);
        let file = match directory.map(|directory| certificate.store(directory)) {
            Some(Ok(file)) => Some(file),
            Some(Err(error)) => {
                tracing::warn!(error = format!("{error:#}"), "certificate not kept; the next start runs the gate again");
                None
            }
            None => {
                tracing::warn!("certificate not kept: neither gate.certificates nor STATE_DIRECTORY, XDG_STATE_HOME or HOME names a place");
                None
            }
        };
        Ok(Checked { certificate, remembered: false, file })
    }
}
