//! Log lines on standard error, and the watch for error records that the gate relies on. Called once per process.

use std::io::IsTerminal;

use anyhow::Context;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

use crate::config::LogConfig;
use crate::gate::errors;

/// Starts the log. `RUST_LOG` stands above the configuration.
///
/// # Errors
/// The filter cannot be read, or a log was started before.
pub fn start_logging(config: &LogConfig) -> anyhow::Result<()> {
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| config.filter.clone());
    let filter = EnvFilter::try_new(&filter).with_context(|| format!("log filter {filter:?}"))?;
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    // The service manager's journal stamps lines itself.
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match (config.json, journal) {
        (true, _) => lines.json().boxed(),
        (false, true) => lines.without_time().boxed(),
        (false, false) => lines.boxed(),
    };
    // The watch stands beside the filter: an error counts even where the filter hides it.
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter)).with(errors::layer());
    subscriber.try_init().context("starting the log")
}
