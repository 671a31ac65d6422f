//! `kdtree bench round`: the engine measured from inside.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::Context;
use comfy_table::Table;

use super::logging::start_logging;
use crate::bench::batches::{self, Batch, Interleaved, Recorder};
use crate::bench::round::{self, Report};
use crate::config::{LogConfig, Overrides};
use crate::engine::contract::Observer;
use crate::engine::driver::Driver;
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

struct Quiet;
impl Observer for Quiet {}

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
    let report = measured(prepared, recorder, move |driver| {
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
    println!("{}\n{table}", report.device);
    if let Some(i) = &report.interleaved {
        println!(
            "{} streams, between rounds: p50 {:.0} us, p99 {:.0} us alone; p50 {:.0} us, p99 {:.0} us beside a prompt of {} tokens",
            i.streams, i.alone_p50_us, i.alone_p99_us, i.beside_p50_us, i.beside_p99_us, i.prompt
        );
    }
    write_json(args, &report)?;
    Ok(ExitCode::SUCCESS)
}

fn write_json(args: &Args, report: &impl serde::Serialize) -> anyhow::Result<()> {
    let Some(path) = &args.json else { return Ok(()) };
    std::fs::write(path, serde_json::to_vec_pretty(report)?).with_context(|| format!("writing {}", path.display()))
}

/// Runs `work` on the engine's own thread, loaded and warm, instead of serving.
fn measured<T: Send + 'static>(
    prepared: Prepared,
    observer: Arc<dyn Observer>,
    work: impl FnOnce(&mut dyn Driver) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (send, receive) = channel();
    let measure = Box::new(move |driver: &mut dyn Driver| {
        let _ = send.send(work(driver));
        Err("measured".to_string())
    });
    let (_handle, thread) = prepared.start(observer, progress::for_this_process(), measure);
    match receive.recv() {
        Ok(report) => report,
        Err(_) => match thread.join() {
            Ok(Err(error)) => anyhow::bail!("{error}"),
            _ => anyhow::bail!("the engine ended before it was measured"),
        },
    }
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !args.batch.is_empty() {
        return run_batches(args);
    }
    let config = args.overrides.load()?;
    start_logging(&LogConfig { filter: "warn".into(), ..config.log.clone() })?;
    let prepared = Prepared::read(config.engine)?;
    let target = prepared.config.clone();
    let (budgets, repeat) = (args.budgets.clone(), args.repeat.max(1));
    let report = measured(prepared, Arc::new(Quiet), move |driver| round::run(driver, &target, &budgets, repeat))?;
    print(&report);
    write_json(args, &report)?;
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
    println!("{table}");
    println!("of best: tokens/s against the fastest fixed budget of the class; spread: half the distance between the quartiles of times");
}
