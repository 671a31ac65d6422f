//! `kdtree wait`: returns once a server answers a real request. What a unit's health check and a deployment run.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args as ClapArgs;
use hyper::Method;
use serde_json::{Value, json};

use super::output::say;
use crate::bench::serve::Client;

/// Waits until a server generates three tokens, or the deadline passes.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// Server to wait for
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// API key
    #[arg(long, env = "KDTREE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Seconds to wait at most
    #[arg(long, default_value_t = 600.0, allow_negative_numbers = true)]
    pub timeout: f64,
    /// Seconds one probe may take
    #[arg(long, default_value_t = 10.0, allow_negative_numbers = true)]
    pub probe_timeout: f64,
    /// Seconds between probes
    #[arg(long, default_value_t = 0.5, allow_negative_numbers = true)]
    pub interval: f64,
    /// Say nothing while waiting
    #[arg(long, short)]
    pub quiet: bool,
}

/// Polls until a probe succeeds. Fails at the deadline, naming the last reason.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let seconds = |name: &str, value: f64| match value {
        value if value > 0.0 && value < 1e7 => Ok(Duration::from_secs_f64(value)),
        _ => bail!("--{name} {value}: wanted seconds above 0"),
    };
    let timeout = seconds("timeout", args.timeout)?;
    let probe_timeout = seconds("probe-timeout", args.probe_timeout)?.min(timeout);
    let interval = seconds("interval", args.interval)?;
    let client = Client::new(&args.url, args.api_key.clone(), probe_timeout)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(wait(&client, args, timeout, interval))
}

async fn wait(client: &Client, args: &Args, timeout: Duration, interval: Duration) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut said = String::new();
    loop {
        let left = timeout.saturating_sub(begun.elapsed());
        // The last probe is cut at the deadline, however long a probe may take otherwise.
        let why = match tokio::time::timeout(left, probe(client)).await {
            Ok(Ok(text)) => {
                if !args.quiet {
                    say(&format!("{} answers after {:.1} s: {text:?}", args.url, begun.elapsed().as_secs_f64()));
                }
                return Ok(());
            }
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => "the probe did not end".into(),
        };
        if begun.elapsed() + interval >= timeout {
            bail!("{} did not answer within {} s: {why}", args.url, timeout.as_secs_f64());
        }
        if !args.quiet && why != said {
            eprintln!("waiting for {}: {why}", args.url);
            said = why;
        }
        tokio::time::sleep(interval).await;
    }
}

/// A real completion of three tokens: `/health` alone may be green while nothing is generated.
async fn probe(client: &Client) -> anyhow::Result<String> {
    let model = client.first_model().await?;
    let body = json!({"model": model, "prompt": "1, 2, 3,", "max_tokens": 3, "temperature": 0, "ignore_eos": true});
    let (status, answer) = client.json(Method::POST, "/v1/completions", Some(&body)).await?;
    let tokens = answer.pointer("/usage/completion_tokens").and_then(Value::as_u64);
    match (status, tokens, answer.pointer("/choices/0/text").and_then(Value::as_str)) {
        (200, Some(3), Some(text)) => Ok(text.into()),
        _ => {
            let message = answer.pointer("/error/message").and_then(Value::as_str).map_or_else(|| answer.to_string(), str::to_owned);
            bail!("status {status}: {}", message.chars().take(200).collect::<String>())
        }
    }
}
