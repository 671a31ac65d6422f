//! `kdtree bench round`: the engine measured from inside.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use comfy_table::Table;

use super::engine::{Quiet, on_engine};
use super::logging::start_logging;
use super::output::{print, write};
use crate::bench::batches::{self, Batch, Interleaved, Recorder};
use crate::bench::round::{self, Report};
use crate::config::{LogConfig, Overrides};
use crate::engine::start::Prepared;
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
    /// Measure this many requests at once instead of the prompt classes
    #[arg(long, value_delimiter = ',', value_name = "REQUESTS")]
    pub batch: Vec<usize>,
    /// With --batch: also prefill a prompt of this many tokens beside eight streams and report how long they wait
    #[arg(long, value_name = "TOKENS", requires = "batch")]
    pub beside: Option<usize>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What `--batch` measures.
#[derive(Debug, serde::Serialize)]
struct BatchReport {
    device: String,
    batches: Vec<Batch>,
    interleaved: Option<Interleaved>,
}

/// Streams that run beside a long prompt.
const STREAMS: usize = 8;

fn run_batches(args: &Args) -> anyhow::Result<ExitCode> {
    let config = args.overrides.load()?;
    start_logging(&LogConfig { filter: "warn".into(), ..config.log.clone() })?;
    let prepared = Prepared::read(config.engine)?;
    batches::check(&prepared.info, &args.batch, args.beside.map(|prompt| (STREAMS, prompt)))?;
    let (recorder, wanted) = (Arc::new(Recorder::default()), args.clone());
    let inside = recorder.clone();
    let report = on_engine(prepared, recorder, move |driver| {
        let batches = batches::run(driver, &inside, &wanted.budgets, &wanted.batch)?;
        let interleaved = wanted.beside.map(|prompt| batches::interleaved(driver, &inside, STREAMS, prompt)).transpose()?;
        Ok(BatchReport { device: driver.device().name, batches, interleaved })
    })?;
    let mut table = Table::new();
    table.set_header(["requests", "budget", "tokens/round", "round us", "tokens/s"]);
    for cell in &report.batches {
        let numbers = [cell.tokens_per_round, cell.round_us, cell.tokens_per_second];
        let [per_round, us, per_second] = numbers;
        table.add_row([
            cell.requests.to_string(),
            cell.budget.clone(),
            format!("{per_round:.2}"),
            format!("{us:.0}"),
            format!("{per_second:.0}"),
        ]);
    }
    print(format_args!("{}\n{table}\n", report.device))?;
    if let Some(i) = &report.interleaved {
        print(format_args!(
            "{} streams, between rounds: p50 {:.0} us, p99 {:.0} us alone; p50 {:.0} us, p99 {:.0} us beside a prompt of {} tokens\n",
            i.streams, i.alone_p50_us, i.alone_p99_us, i.beside_p50_us, i.beside_p99_us, i.prompt
        ))?;
    }
    write_json(args, &report)?;
    Ok(ExitCode::SUCCESS)
}

fn write_json(args: &Args, report: &impl serde::Serialize) -> anyhow::Result<()> {
    let Some(path) = &args.json else { return Ok(()) };
    write(path, serde_json::to_vec_pretty(report)?)
}

/// Measures classes of prompts, or batches where `--batch` asks for them; tables go to stdout.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !args.batch.is_empty() {
        return run_batches(args);
    }
    anyhow::ensure!(args.repeat > 0, "--repeat: found 0, wanted at least 1");
    let config = args.overrides.load()?;
    start_logging(&LogConfig { filter: "warn".into(), ..config.log.clone() })?;
    let prepared = Prepared::read(config.engine)?;
    let target = prepared.config.clone();
    let (budgets, repeat) = (args.budgets.clone(), args.repeat);
    let report = on_engine(prepared, Arc::new(Quiet), move |driver| round::run(driver, &target, &budgets, repeat))?;
    print(rendered(&report))?;
    write_json(args, &report)?;
    Ok(ExitCode::SUCCESS)
}

/// The report as people read it.
fn rendered(report: &Report) -> String {
    let floor = &report.floor;
    let mut table = Table::new();
    table.set_header(["class", "budget", "tokens/round", "tokens/s", "spread", "of best"]);
    for cell in &report.cells {
        table.add_row([
            cell.class.clone(),
            cell.budget.clone(),
            format!("{:.2}", cell.tokens_per_round),
            format!("{:.0}", cell.tokens_per_second),
            format!("{:.1} %", 100.0 * cell.spread),
            cell.of_best.map_or("-".into(), |share| format!("{share:.3}")),
        ]);
    }
    format!(
        "{} on {} threads, verify {}\n\
         plain decode {:.0} us a token; floor {:.0} us ({:.1} MB of weights streamed once): {:.2} x\n\
         prefill of {} tokens {:.0} us a token: {:.1} x faster than decoding; with the drafter's context {:.0} us: {:.1} x\n\
         {table}\n\
         of best: tokens/s against the fastest fixed budget of the class; spread: half the distance between the quartiles of times\n",
        report.model,
        report.threads,
        report.verify,
        floor.decode_us,
        floor.stream_us,
        floor.weight_bytes as f64 / 1e6,
        floor.decode_over_floor,
        floor.prefill_tokens,
        floor.prefill_us_per_token,
        floor.prefill_gain,
        floor.drafting_prefill_us_per_token,
        floor.drafting_prefill_gain
    )
}
