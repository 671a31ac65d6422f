//! `kdtree health`: one real completion with a deadline, for a timer that restarts a server which no longer generates.
//! Exit status: 0 healthy (or busy, loading, draining), 1 unhealthy in every attempt, 3 the probe itself is refused.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hyper::Method;
use serde_json::{Value, json};

use super::output::say;
use crate::bench::serve::Client;

/// The server answers, but not this probe: a restart would not help.
const REFUSED: u8 = 3;

/// Counters that move while the engine works: generated tokens, and prompt tokens for a long prefill.
const PROGRESS: [&str; 2] = ["vllm:generation_tokens_total", "vllm:prompt_tokens_total"];

/// Asks a server for a real completion. Status 1 when every attempt shows that it generates nothing.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Server to ask
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// API key
    #[arg(long, env = "KDTREE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// File of API keys, one a line; the first is used
    #[arg(long, value_name = "FILE", conflicts_with = "api_key")]
    pub api_key_file: Option<PathBuf>,
    /// Prompt; may be given several times, each is completed
    #[arg(long, default_value = "1, 2, 3,")]
    pub prompt: Vec<String>,
    /// Tokens to generate
    #[arg(long, default_value_t = 3)]
    pub max_tokens: u32,
    /// Seconds one completion may take
    #[arg(long, default_value_t = 30.0, allow_negative_numbers = true)]
    pub timeout: f64,
    /// Attempts that must fail, one after the other, before the server counts as unhealthy
    #[arg(long, default_value_t = 3)]
    pub attempts: u32,
    /// Seconds between attempts
    #[arg(long, default_value_t = 5.0, allow_negative_numbers = true)]
    pub pause: f64,
}

/// What one attempt showed.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    /// Tokens came.
    Healthy(String),
    /// It works, on something else: its queue is full, its counters advance, or it is loading or draining.
    Busy(String),
    /// A 4xx that no restart changes, such as a wrong key.
    Refused(String),
    /// No tokens, and nothing advances.
    Unhealthy(String),
}

/// Asks until one attempt settles the question; the status is the answer.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let seconds = |name: &str, value: f64| {
        ensure!(value > 0.0 && value < 1e7, "--{name} {value}: wanted seconds above 0");
        Ok(Duration::from_secs_f64(value))
    };
    let (timeout, pause) = (seconds("timeout", args.timeout)?, seconds("pause", args.pause)?);
    ensure!(args.attempts > 0, "--attempts 0: wanted at least 1");
    ensure!(args.max_tokens > 0, "--max-tokens 0: wanted at least 1");
    let client = Client::new(&args.url, key(args)?, timeout)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    Ok(runtime.block_on(judge(&client, args, pause)))
}

/// The key to send: given, or the first of a file.
fn key(args: &Args) -> anyhow::Result<Option<String>> {
    let Some(file) = &args.api_key_file else { return Ok(args.api_key.clone()) };
    let text = std::fs::read_to_string(file).with_context(|| format!("API key file {}", file.display()))?;
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    match first {
        Some(key) => Ok(Some(key.to_owned())),
        None => bail!("API key file {}: found no key, wanted one a line", file.display()),
    }
}

/// Attempts until one settles the question.
async fn judge(client: &Client, args: &Args, pause: Duration) -> ExitCode {
    for attempt in 1..=args.attempts {
        match probe(client, args).await {
            Finding::Healthy(what) => {
                say(&format!("{}: healthy: {what}", args.url));
                return ExitCode::SUCCESS;
            }
            Finding::Busy(what) => {
                say(&format!("{}: busy, counted as healthy: {what}", args.url));
                return ExitCode::SUCCESS;
            }
            Finding::Refused(why) => {
                eprintln!("kdtree: {}: the probe is refused, nothing known about the engine: {why}", args.url);
                return ExitCode::from(REFUSED);
            }
            Finding::Unhealthy(why) => eprintln!("kdtree: {}: attempt {attempt} of {} failed: {why}", args.url, args.attempts),
        }
        if attempt < args.attempts {
            tokio::time::sleep(pause).await;
        }
    }
    eprintln!("kdtree: {}: unhealthy: {} attempts in a row got no tokens", args.url, args.attempts);
    ExitCode::FAILURE
}

/// One attempt: every prompt is completed, unless something else is found first.
async fn probe(client: &Client, args: &Args) -> Finding {
    let before = progress(client).await;
    let mut tokens = 0;
    for prompt in &args.prompt {
        match complete(client, prompt, args.max_tokens).await {
            Ok((200, answer)) => match answer.pointer("/usage/completion_tokens").and_then(Value::as_u64) {
                Some(got @ 1..) => tokens += got,
                _ => return Finding::Unhealthy(format!("status 200 without tokens: {}", short(&answer))),
            },
            Ok((429, _)) => return Finding::Busy("its queue is full (429)".into()),
            Ok((503, answer)) => return unavailable(client, &answer).await,
            Ok((status @ 400..=499, answer)) => return Finding::Refused(format!("status {status}: {}", short(&answer))),
            Ok((status, answer)) => return Finding::Unhealthy(format!("status {status}: {}", short(&answer))),
            Err(error) => return silent(before, progress(client).await, &format!("{error:#}")),
        }
    }
    Finding::Healthy(format!("{tokens} tokens"))
}

async fn complete(client: &Client, prompt: &str, max_tokens: u32) -> anyhow::Result<(u16, Value)> {
    let body = json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true});
    client.json(Method::POST, "/v1/completions", Some(&body)).await
}

/// No answer in time: the counters tell a busy engine from a mute one.
fn silent(before: Option<f64>, after: Option<f64>, why: &str) -> Finding {
    match (before, after) {
        (Some(before), Some(after)) if after > before => {
            Finding::Busy(format!("{why}, but {} tokens went through meanwhile", after - before))
        }
        (Some(_), Some(_)) => Finding::Unhealthy(format!("{why}, and no token went through meanwhile")),
        _ => Finding::Unhealthy(format!("{why}, and /metrics does not answer")),
    }
}

/// 503: loading and draining have deadlines of their own, a dead engine has none. A server whose connections are all taken lives, and
/// a restart would cut them all.
async fn unavailable(client: &Client, answer: &Value) -> Finding {
    if answer.pointer("/error/code").and_then(Value::as_str) == Some("too_many_connections") {
        return Finding::Busy("all its connections are taken (503)".into());
    }
    let state = client.json(Method::GET, "/health", None).await;
    match state.as_ref().ok().and_then(|(_, health)| health.get("status")).and_then(Value::as_str) {
        Some(state @ ("loading" | "draining")) => Finding::Busy(format!("it is {state}")),
        _ => Finding::Unhealthy(format!("status 503: {}", short(answer))),
    }
}

/// Sum of the counters of work, if `/metrics` can be read.
async fn progress(client: &Client) -> Option<f64> {
    let text = client.text("/metrics").await.ok()?;
    counted(&text)
}

fn counted(metrics: &str) -> Option<f64> {
    let values = metrics.lines().filter_map(|line| {
        let (name, value) = line.rsplit_once(' ')?;
        let name = name.split('{').next()?;
        PROGRESS.contains(&name).then(|| value.parse::<f64>().ok()).flatten()
    });
    values.reduce(|sum, value| sum + value)
}

fn short(answer: &Value) -> String {
    let message = answer.pointer("/error/message").and_then(Value::as_str).map_or_else(|| answer.to_string(), str::to_owned);
    message.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = "# HELP vllm:generation_tokens_total Tokens generated.\n# TYPE vllm:generation_tokens_total counter\n\
        vllm:generation_tokens_total{model_name=\"a b\",engine=\"0\"} 41\nvllm:prompt_tokens_total{engine=\"0\"} 1\n\
        vllm:generation_tokens_total_of_something_else{engine=\"0\"} 1000\n";

    #[test]
    fn a_server_whose_tokens_advance_is_busy_and_one_whose_do_not_is_unhealthy() {
        assert_eq!(counted(METRICS), Some(42.0));
        assert_eq!(counted("other 3\n"), None);
        assert!(matches!(silent(Some(42.0), Some(43.0), "late"), Finding::Busy(why) if why.contains("1 tokens")));
        assert!(matches!(silent(Some(42.0), Some(42.0), "late"), Finding::Unhealthy(_)));
        assert!(matches!(silent(Some(42.0), None, "late"), Finding::Unhealthy(_)));
        assert!(matches!(silent(None, Some(42.0), "late"), Finding::Unhealthy(_)));
    }

    #[test]
    fn the_first_key_of_a_file_is_sent_and_a_file_without_keys_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        let args = |file: &std::path::Path| Args {
            url: String::new(),
            api_key: None,
            api_key_file: Some(file.to_owned()),
            prompt: Vec::new(),
            max_tokens: 1,
            timeout: 1.0,
            attempts: 1,
            pause: 1.0,
        };
        std::fs::write(&file, "# for the probe\n\n alpha \nbeta\n").unwrap();
        assert_eq!(key(&args(&file)).unwrap().as_deref(), Some("alpha"));
        std::fs::write(&file, "# none\n").unwrap();
        assert!(key(&args(&file)).unwrap_err().to_string().contains("found no key"));
    }
}
