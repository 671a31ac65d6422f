//! `kdtree gate`: the rollout gate alone, on the model and with the options that `serve` would use. Exit status 0 = passed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use super::engine::{Quiet, on_engine};
use super::logging::start_logging;
use super::output::{print, write};
use crate::config::{Config, LogConfig, Overrides};
use crate::engine::start::Prepared;
use crate::gate::certificate::{Certificate, Verdict};
use crate::gate::prompts::{PromptSet, Renderer};
use crate::gate::{Checked, Gate, GateConfig};
use crate::model::chat::ChatTemplate;

/// Compares the custom verify kernel with the baseline, token for token, and writes a certificate. Ends with status 1 when they differ.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub overrides: Overrides,
    /// Prompts, one JSON object a line: {"text": ...} or {"user": ..., "thinking": true|false} [default: the built-in set]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Tokens generated per prompt [default: 24]
    #[arg(long, short = 'n', value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Write the certificate, the report in it, to this file too; "-" = standard output, instead of the tables
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Directory of certificates [default: $STATE_DIRECTORY, $XDG_STATE_HOME/kdtree or ~/.local/state/kdtree]
    #[arg(long, value_name = "DIR")]
    pub certificates: Option<PathBuf>,
    /// Run even if a certificate says that exactly this combination has passed
    #[arg(long)]
    pub force: bool,
}

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let mut config = self.overrides.load()?;
        let GateConfig { prompts, max_tokens, certificates, .. } = &mut config.gate;
        *prompts = self.prompts.clone().or(prompts.take());
        *max_tokens = self.max_tokens.unwrap_or(*max_tokens);
        *certificates = self.certificates.clone().or(certificates.take());
        config.check()?;
        Ok(config)
    }
}

/// Runs the gate, prints its report and keeps its certificate; status 1 after a failed comparison.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let config = args.config()?;
    start_logging(&LogConfig { filter: "warn".into(), ..config.log.clone() })?;
    let prepared = Prepared::read(config.engine.clone())?;
    let chat = chat_template(&config, &prepared)?;
    let gate = gate(&config, &prepared, &chat, args.force)?;
    let checked = on_engine(prepared, Arc::new(Quiet), move |driver| gate.check(driver))?;
    report(&checked, args.json.as_deref())?;
    Ok(match checked.certificate.verdict {
        Verdict::Passed => ExitCode::SUCCESS,
        Verdict::Failed => ExitCode::FAILURE,
    })
}

/// The checkpoint's chat template, or K2.6's own where the configuration says so.
pub fn chat_template(config: &Config, prepared: &Prepared) -> anyhow::Result<Arc<ChatTemplate>> {
    let tokenizer = prepared.tokenizer.clone();
    let template = if config.chat.builtin_template {
        ChatTemplate::builtin(tokenizer)
    } else {
        ChatTemplate::load(&config.engine.target(), tokenizer)
    };
    Ok(Arc::new(template?))
}

/// The gate of this configuration; mistakes in the prompts show here, before anything is loaded.
pub fn gate(config: &Config, prepared: &Prepared, chat: &ChatTemplate, force: bool) -> anyhow::Result<Gate> {
    let set = PromptSet::load(&config.gate, Renderer { tokenizer: &prepared.tokenizer, chat, info: &prepared.info })?;
    Ok(Gate::new(&config.gate, set, &config.engine, force))
}

fn report(checked: &Checked, json: Option<&Path>) -> anyhow::Result<()> {
    let Checked { certificate, remembered, file } = checked;
    if json != Some(Path::new("-")) {
        print(certificate.report.render())?;
        let place = file.as_ref().map_or("not kept".to_string(), |file| file.display().to_string());
        let when = if *remembered { " (of an earlier run: exactly this combination has passed; --force runs again)" } else { "" };
        print(format_args!("certificate: {place}{when}\n"))?;
    }
    json.map_or(Ok(()), |file| write_json(file, certificate))
}

fn write_json(file: &Path, certificate: &Certificate) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(certificate)? + "\n";
    if file == Path::new("-") { print(text) } else { write(file, text) }
}
