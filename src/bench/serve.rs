//! A load client for OpenAI servers: open or closed loop, streamed chats with distinct prompts, latencies by histogram.
//! Called by `kdtree bench serve`; measures any server that speaks the API, so that peers can be compared.
//!
//! Latencies of the open loop count from the moment a request was due, not from when it was sent: a server that stalls is not
//! excused by a client that waits for it.

mod chart;
mod client;
mod prompts;
mod stats;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;
use tokio::sync::Semaphore;

pub use client::{Client, Outcome};
pub use stats::{Percentiles, Recorder, Summary};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// `http://HOST:PORT` of the server.
    pub url: String,
    /// Model to ask for; `None` = the first of `/v1/models`.
    pub model: Option<String>,
    pub api_key: Option<String>,
    pub load: Load,
    /// Requests per load level.
    pub requests: usize,
    /// Requests sent before each level and not counted.
    pub warmup: usize,
    pub max_tokens: u32,
    /// Words of filler in front of each question.
    pub prompt_words: usize,
    /// File with one prompt a line, instead of the built-in ones.
    pub prompts: Option<PathBuf>,
    pub temperature: f64,
    /// Rows verified per round, passed on as `speculation`.
    pub speculation: Option<String>,
    /// End answers at the end of the turn instead of at `max_tokens`.
    pub honour_eos: bool,
    /// Seed of prompts and arrival times.
    pub seed: u64,
    pub timeout: Duration,
}

/// How requests arrive.
#[derive(Clone, Debug, PartialEq)]
pub enum Load {
    /// Closed loop: so many at any time, one level after the other.
    Concurrency(Vec<usize>),
    /// Open loop: so many a second on average, at exponential intervals.
    Rate(Vec<f64>),
}

/// Everything measured, as it is written to JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub url: String,
    pub model: String,
    pub max_tokens: u32,
    pub temperature: f64,
    pub speculation: Option<String>,
    pub levels: Vec<Summary>,
}

impl Report {
    /// Requests that failed, over all levels.
    pub fn errors(&self) -> usize {
        self.levels.iter().map(|level| level.errors).sum()
    }

    /// The latencies as an SVG drawing.
    pub fn svg(&self) -> anyhow::Result<String> {
        chart::draw(self)
    }
}

/// Runs all levels in turn. `progress` is told how many requests of the level have ended.
pub async fn run(options: &Options, progress: impl Fn(&str, usize) + Send + Sync + 'static) -> anyhow::Result<Report> {
    if options.requests == 0 {
        bail!("--requests 0: wanted at least 1");
    }
    let client = Arc::new(Client::new(&options.url, options.api_key.clone(), options.timeout)?);
    let model = match &options.model {
        Some(model) => model.clone(),
        None => client.first_model().await.with_context(|| format!("asking {} for its models", options.url))?,
    };
    let prompts = prompts::Prompts::new(options.prompts.as_deref(), options.prompt_words, options.seed)?;
    let context = Arc::new(Run { client, prompts, model: model.clone(), options: options.clone(), sent: AtomicUsize::new(0) });
    let progress: Progress = Arc::new(progress);
    let mut levels = Vec::new();
    match &options.load {
        Load::Concurrency(counts) => {
            for &count in counts {
                levels.push(closed(&context, count.max(1), progress.clone()).await);
            }
        }
        Load::Rate(rates) => {
            for &rate in rates {
                levels.push(open(&context, rate, progress.clone()).await?);
            }
        }
    }
    Ok(Report {
        url: options.url.clone(),
        model,
        max_tokens: options.max_tokens,
        temperature: options.temperature,
        speculation: options.speculation.clone(),
        levels,
    })
}

/// Told the level's name and how many of its requests have ended.
type Progress = Arc<dyn Fn(&str, usize) + Send + Sync>;

struct Run {
    client: Arc<Client>,
    prompts: prompts::Prompts,
    model: String,
    options: Options,
    /// Numbers the prompts over all levels: none comes twice.
    sent: AtomicUsize,
}

impl Run {
    async fn one(&self, due: Instant) -> Outcome {
        let options = &self.options;
        let prompt = self.prompts.get(self.sent.fetch_add(1, Ordering::Relaxed));
        let mut body = serde_json::json!({
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": !options.honour_eos,
            "seed": options.seed,
        });
        if let Some(speculation) = &options.speculation {
            body["speculation"] = speculation.as_str().into();
        }
        self.client.chat(&body, due).await
    }

    async fn warm_up(self: &Arc<Self>, concurrency: usize) {
        let slots = Arc::new(Semaphore::new(concurrency));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..self.options.warmup {
            let (context, slots) = (self.clone(), slots.clone());
            tasks.spawn(async move {
                let _slot = slots.acquire().await;
                context.one(Instant::now()).await
            });
        }
        tasks.join_all().await;
    }
}

async fn closed(context: &Arc<Run>, concurrency: usize, progress: Progress) -> Summary {
    context.warm_up(concurrency).await;
    let name = format!("concurrency {concurrency}");
    let left = Arc::new(AtomicUsize::new(context.options.requests));
    let ended = Arc::new(AtomicUsize::new(0));
    let begun = Instant::now();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..concurrency {
        let (context, left, ended, progress, name) = (context.clone(), left.clone(), ended.clone(), progress.clone(), name.clone());
        workers.spawn(async move {
            let mut recorder = Recorder::default();
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                recorder.add(context.one(Instant::now()).await);
                progress(&name, ended.fetch_add(1, Ordering::Relaxed) + 1);
            }
            recorder
        });
    }
    let mut all = Recorder::default();
    workers.join_all().await.into_iter().for_each(|recorder| all.merge(recorder));
    all.summary(name, Some(concurrency), None, begun.elapsed())
}

async fn open(context: &Arc<Run>, rate: f64, progress: Progress) -> anyhow::Result<Summary> {
    if !(rate > 0.0 && rate.is_finite()) {
        bail!("--rate {rate}: wanted more than 0 requests a second");
    }
    context.warm_up(4).await;
    let name = format!("rate {rate}/s");
    let ended = Arc::new(AtomicUsize::new(0));
    let begun = Instant::now();
    let mut due = begun;
    let mut arrivals = prompts::Dice::new(context.options.seed);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..context.options.requests {
        due += Duration::from_secs_f64(-arrivals.fraction().ln() / rate);
        tokio::time::sleep_until(due.into()).await;
        let (context, ended, progress, name) = (context.clone(), ended.clone(), progress.clone(), name.clone());
        tasks.spawn(async move {
            let outcome = context.one(due).await;
            progress(&name, ended.fetch_add(1, Ordering::Relaxed) + 1);
            outcome
        });
    }
    let mut all = Recorder::default();
    tasks.join_all().await.into_iter().for_each(|outcome| all.add(outcome));
    Ok(all.summary(name, None, Some(rate), begun.elapsed()))
}
