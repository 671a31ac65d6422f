//! `kdtree bench round`: the engine measured from inside.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::Context;
use comfy_table::Table;

use super::logging::start_logging;
use crate::bench::round::{self, Report};
use crate::config::{LogConfig, Overrides};
use crate::engine::contract::Observer;
use crate::engine::start::Prepared;
use crate::model::progress;
use crate::speculate::budget::Budget;

/// Measures rounds: tokens per second and per round by prompt class and budget, decode and prefill beside their floor.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub overrides: Overrides,
    /// Budgets to measure
    #[arg(long, value_delimiter = ',', default_value = "off,chain,tree:8,tree:16,tree:32,tree:64,auto")]
    pub budgets: Vec<Budget>,
    /// Repetitions of every prompt
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

struct Quiet;
impl Observer for Quiet {}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let config = args.overrides.load()?;
    start_logging(&LogConfig { filter: "warn".into(), ..config.log.clone() })?;
    let prepared = Prepared::read(config.engine)?;
    let target = prepared.config.clone();
    let (send, receive) = channel();
    let (budgets, repeat) = (args.budgets.clone(), args.repeat.max(1));
    let measure = Box::new(move |driver: &mut dyn crate::engine::driver::Driver| {
        let _ = send.send(round::run(driver, &target, &budgets, repeat));
        Err("measured".to_string())
    });
    let (_handle, thread) = prepared.start(Arc::new(Quiet), progress::for_this_process(), measure);
    let report = match receive.recv() {
        Ok(report) => report?,
        Err(_) => match thread.join() {
            Ok(Err(error)) => anyhow::bail!("{error}"),
            _ => anyhow::bail!("the engine ended before it was measured"),
        },
    };
    print(&report);
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report) {
    let floor = &report.floor;
    println!("{} on {} threads, verify {}", report.model, report.threads, report.verify);
    println!(
        "plain decode {:.0} us a token; floor {:.0} us ({:.1} MB of weights streamed once): {:.2} x",
        floor.decode_us,
        floor.stream_us,
        floor.weight_bytes as f64 / 1e6,
        floor.decode_over_floor
    );
    println!(
        "prefill of {} tokens {:.0} us a token: {:.1} x faster than decoding; with the drafter's context {:.0} us: {:.1} x",
        floor.prefill_tokens,
        floor.prefill_us_per_token,
        floor.prefill_gain,
        floor.drafting_prefill_us_per_token,
        floor.drafting_prefill_gain
    );
    let mut table = Table::new();
    table.set_header(["class", "budget", "tokens/round", "tokens/s"]);
    for cell in &report.cells {
        table.add_row([
            cell.class.clone(),
            cell.budget.clone(),
            format!("{:.2}", cell.tokens_per_round),
            format!("{:.0}", cell.tokens_per_second),
        ]);
    }
    println!("{table}");
}
