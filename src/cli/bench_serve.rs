//! `kdtree bench serve`: load an OpenAI server and say how fast it answered.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args as ClapArgs;
use comfy_table::Table;
use indicatif::{ProgressBar, ProgressStyle};

use super::output::{print, write};
use crate::bench::serve::{self, Load, Options, Percentiles, Report};

/// Loads an OpenAI server with streamed chats and measures first token, time between tokens and whole requests.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Server to load
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Model to ask for [default: the server's first]
    #[arg(long)]
    pub model: Option<String>,
    /// API key
    #[arg(long, env = "KDTREE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Closed loop: requests at any time; several levels are run in turn
    #[arg(long, value_delimiter = ',', default_value = "1,8,32", conflicts_with = "rate")]
    pub concurrency: Vec<usize>,
    /// Open loop: requests a second on average, at random intervals; several levels are run in turn
    #[arg(long, value_delimiter = ',')]
    pub rate: Vec<f64>,
    /// Requests per level
    #[arg(long, default_value_t = 64)]
    pub requests: usize,
    /// Requests before each level that are not counted
    #[arg(long, default_value_t = 4)]
    pub warmup: usize,
    /// Tokens to generate per request
    #[arg(long, default_value_t = 64)]
    pub max_tokens: u32,
    /// Words of filler in front of each question
    #[arg(long, default_value_t = 0)]
    pub prompt_words: usize,
    /// File with one prompt a line [default: built-in questions, all different]
    #[arg(long)]
    pub prompts: Option<PathBuf>,
    /// Temperature of the requests
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f64,
    /// Rows verified per round: off, chain, auto or tree:N [default: the server's setting]
    #[arg(long)]
    pub speculation: Option<String>,
    /// Let answers end by themselves instead of at --max-tokens
    #[arg(long)]
    pub honour_eos: bool,
    /// Seed of prompts and arrival times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Seconds a request may take
    #[arg(long, default_value_t = 600.0, allow_negative_numbers = true)]
    pub timeout: f64,
    /// Write all figures to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Draw latencies over percentiles to this file
    #[arg(long)]
    pub svg: Option<PathBuf>,
}

impl Args {
    fn options(&self) -> anyhow::Result<Options> {
        if !(self.timeout > 0.0 && self.timeout < 1e6) {
            bail!("--timeout {}: wanted seconds above 0", self.timeout);
        }
        Ok(Options {
            url: self.url.clone(),
            model: self.model.clone(),
            api_key: self.api_key.clone(),
            load: if self.rate.is_empty() { Load::Concurrency(self.concurrency.clone()) } else { Load::Rate(self.rate.clone()) },
            requests: self.requests,
            warmup: self.warmup,
            max_tokens: self.max_tokens,
            prompt_words: self.prompt_words,
            prompts: self.prompts.clone(),
            temperature: self.temperature,
            speculation: self.speculation.clone(),
            honour_eos: self.honour_eos,
            seed: self.seed,
            timeout: Duration::from_secs_f64(self.timeout),
        })
    }
}

/// Runs the load, prints a table, writes the files asked for. A request that failed makes the command fail.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let options = args.options()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    let bar = ProgressBar::new(options.requests as u64);
    bar.set_style(ProgressStyle::with_template("{msg} {bar:30} {pos}/{len}").context("the progress bar")?);
    let shown = bar.clone();
    let report = runtime.block_on(serve::run(&options, move |level, ended| {
        shown.set_message(level.to_owned());
        shown.set_position(ended as u64);
    }))?;
    bar.finish_and_clear();
    print(format_args!("{}\n", table(&report)))?;
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        write(file, text + "\n")?;
    }
    if let Some(file) = &args.svg {
        write(file, report.svg()?)?;
    }
    let errors = report.errors();
    if errors > 0 {
        let samples: Vec<_> = report.levels.iter().flat_map(|level| level.error_samples.clone()).collect();
        bail!("{errors} requests failed, for example: {}", samples.join("; "));
    }
    Ok(())
}

fn table(report: &Report) -> Table {
    let mut table = Table::new();
    table.set_header([
        "load",
        "requests",
        "errors",
        "tokens/s",
        "tokens/round",
        "first token ms p50 / p99",
        "between deliveries ms p50 / p99",
        "per token ms p50 / p99",
        "request ms p50 / p99",
    ]);
    let pair = |latency: &Percentiles| format!("{:.2} / {:.2}", latency.p50, latency.p99);
    for level in &report.levels {
        table.add_row([
            level.name.clone(),
            level.requests.to_string(),
            level.errors.to_string(),
            format!("{:.1}", level.tokens_per_s),
            level.mean_acceptance_length.map_or("-".into(), |length| format!("{length:.2}")),
            pair(&level.first_token_ms),
            pair(&level.inter_token_ms),
            pair(&level.per_token_ms),
            pair(&level.total_ms),
        ]);
    }
    table
}
