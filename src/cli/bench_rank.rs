//! `kdtree bench rank`: times one rank of full-size K2.6 on one card.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use comfy_table::{Cell, Table};

use super::output::{print, write};
use crate::bench::rank::{Bench, Grid, Report, Row, Setup, plot};
use crate::device::cuda::{Gpu, Numerics};

/// Time one tensor-parallel rank of K2.6 on one card, part by part, beside the floor (weights are made up on the card).
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Model whose rank is built
    #[arg(long, default_value = "k2.6", value_parser = ["k2.6"])]
    config: String,
    /// Ranks the model is cut over; one of them is built
    #[arg(long, default_value_t = 8)]
    tp: usize,
    /// Layers of the 61
    #[arg(long, default_value_t = 61)]
    layers: usize,
    /// Card to use
    #[arg(long, default_value_t = 0)]
    card: usize,
    /// Arithmetic
    #[arg(long, value_enum, default_value_t = Numerics::Fast)]
    numerics: Numerics,
    /// Rows verified per request
    #[arg(long, value_delimiter = ',', default_value = "1,4,8,16,32,64")]
    rows: Vec<usize>,
    /// Requests
    #[arg(long, value_delimiter = ',', default_value = "1,8,32")]
    batch: Vec<usize>,
    /// Prefix tokens of each request
    #[arg(long, value_delimiter = ',', default_value = "1024,16384,131072")]
    prefix: Vec<usize>,
    /// Cells with more prefix tokens in all are left out
    #[arg(long, default_value_t = 524_288)]
    most_tokens: usize,
    /// Replays per part; the median counts
    #[arg(long, default_value_t = 20)]
    repeats: usize,
    /// Prefixes at which whole rounds with verify off and on are compared
    #[arg(long, value_delimiter = ',', default_value = "1024,16384,131072")]
    compare: Vec<usize>,
    /// Prompt lengths whose prefill is timed
    #[arg(long, value_delimiter = ',', default_value = "8192,131072")]
    prompts: Vec<usize>,
    /// Try the fatbins in this folder instead of those in the binary (a run that is no evidence).
    #[arg(long, value_name = "FOLDER")]
    fatbins: Option<PathBuf>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the parts of a pass at the shortest prefix as bars
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Rows go to stderr as they come, the table to stdout at the end.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::ensure!((2..=61).contains(&args.layers), "--layers: found {}, wanted 2 to 61", args.layers);
    anyhow::ensure!(args.rows.iter().all(|rows| (1..=64).contains(rows)), "--rows: found {:?}, wanted 1 to 64 each", args.rows);
    anyhow::ensure!(args.batch.iter().all(|batch| (1..=128).contains(batch)), "--batch: found {:?}, wanted 1 to 128 each", args.batch);
    anyhow::ensure!(args.repeats > 2, "--repeats: found {}, wanted at least 3", args.repeats);
    let setup = Setup::kimi(args.tp, args.layers)?;
    let mut gpu = Gpu::open(args.card).context("kdtree bench rank needs a card")?;
    if let Some(folder) = &args.fatbins {
        gpu.try_fatbins(folder);
    }
    let grid = Grid {
        draft_rows: args.rows.clone(),
        batches: args.batch.clone(),
        prefixes: args.prefix.clone(),
        most_tokens: args.most_tokens,
        most_rows: 512,
        repeats: args.repeats,
        compare: args.compare.clone(),
        prompts: args.prompts.clone(),
    };
    let (mut bench, mut report) = Bench::new(gpu, &setup, args.numerics, grid)?;
    eprintln!("{} of weights on {}", indicatif::HumanBytes(report.weight_bytes), report.device);
    let tell = |row: &Row| {
        let (part, ratio) = (row.part.name(), row.us / row.floor_us);
        eprintln!(
            "rows {:>2} batch {:>2} prefix {:>6} {part:<11} {:>9.1} us, floor {:>9.1} us, {ratio:.2}x",
            row.draft_rows, row.batch, row.prefix, row.us, row.floor_us
        );
    };
    let mut failure = None;
    bench.run(&mut report, tell, |report| failure = write_json(args, report).err().or(failure.take()))?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    print(table(&report))?;
    if let (Some(path), Some(&prefix)) = (&args.svg, args.prefix.iter().min()) {
        let svg = plot::bars(&report, prefix).map_err(anyhow::Error::msg)?;
        write(path, svg)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn write_json(args: &Args, report: &Report) -> anyhow::Result<()> {
    let Some(path) = &args.json else { return Ok(()) };
    let text = serde_json::to_string(report)?.replace("{\"draft_rows\"", "\n{\"draft_rows\"") + "\n";
    write(path, text)
}

fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["rows", "batch", "prefix", "part", "us", "floor us", "x floor", "distinct experts"]);
    for row in &report.rows {
        let ratio = if row.bytes > 0 { format!("{:.2}", row.us / row.floor_us) } else { String::new() };
        let experts = if row.distinct_experts > 0.0 { format!("{:.1}", row.distinct_experts) } else { String::new() };
        let numbers = [row.draft_rows, row.batch, row.prefix].map(Cell::new);
        let rest = [row.part.name().into(), format!("{:.1}", row.us), format!("{:.1}", row.floor_us), ratio, experts].map(Cell::new);
        table.add_row(numbers.into_iter().chain(rest));
    }
    let mut text = format!(
        "{}, {}, read rate {:.0} GB/s, rank 1 of {}, {} layers, {} collectives a pass left out\n\n{table}\n\n",
        report.device, report.driver, report.read_gbps, report.ranks, report.layers, report.collectives_left_out
    );
    for c in &report.comparisons {
        text += &format!("round of {} rows at {}: off {:.0} us, on {:.0} us\n", c.draft_rows, c.prefix, c.off_us, c.on_us);
    }
    for p in &report.prefill {
        text += &format!("prefill of {} tokens: {:.0} tokens/s\n", p.prompt, p.tokens_per_second);
    }
    text
}
