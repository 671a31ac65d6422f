//! `kdtree generate`: text on the terminal, as it comes.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use serde_json::json;

use super::engine::Quiet;
use super::logging::start_logging;
use crate::config::{LogConfig, Overrides};
use crate::engine::contract::{Event, FinishReason, Request, Sampling, Stop};
use crate::engine::handle::Health;
use crate::engine::start::Prepared;
use crate::model::chat::{ChatOptions, ChatTemplate, Conversation};
use crate::model::progress;

/// Generates text on this terminal, as it comes.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub overrides: Overrides,
    /// Text to continue; "-" or nothing = standard input
    pub prompt: Option<String>,
    /// The prompt is a user's message: render it as a chat
    #[arg(long)]
    pub chat: bool,
    /// With --chat: think first
    #[arg(long, requires = "chat")]
    pub thinking: bool,
    /// Most tokens to generate
    #[arg(long, short = 'n', default_value_t = 128)]
    pub max_tokens: u32,
    /// 0 = always the most probable token
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Share of the probability that is kept, most probable tokens first
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub top_p: f32,
    /// The same seed gives the same text under every budget
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Stop before this text (repeatable)
    #[arg(long)]
    pub stop: Vec<String>,
    /// Print what speculation did, on standard error
    #[arg(long)]
    pub stats: bool,
}

/// Streams the text to stdout; status 1 when the request was aborted.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    ensure!((0.0..=100.0).contains(&args.temperature), "--temperature: found {}, wanted 0 to 100", args.temperature);
    ensure!(args.top_p > 0.0 && args.top_p <= 1.0, "--top-p: found {}, wanted above 0, up to 1", args.top_p);
    ensure!(args.max_tokens > 0, "--max-tokens: found 0, wanted at least 1");
    let config = args.overrides.load()?;
    start_logging(&LogConfig { filter: "warn".into(), ..config.log.clone() })?;
    let prepared = Prepared::read(config.engine.clone())?;
    let prompt = prompt_ids(args, &prepared, &config.engine.target())?;
    let room = prepared.info.max_model_len.saturating_sub(prompt.len()) as u32;
    let (engine, thread) = prepared.start(Arc::new(Quiet), progress::for_this_process(), Box::new(|_| Ok(())));
    loop {
        match engine.health() {
            Health::Ready => break,
            Health::Dead(why) => bail!("{why}"),
            Health::Loading(_) | Health::Draining => std::thread::sleep(std::time::Duration::from_millis(2)),
        }
    }
    let request = Request {
        prompt,
        sampling: Sampling { temperature: args.temperature, top_p: args.top_p, seed: args.seed, ..Sampling::greedy() },
        stop: Stop { strings: args.stop.clone(), ..Stop::default() },
        max_tokens: args.max_tokens.min(room.max(1)),
        min_tokens: 0,
        budget: None,
        logprobs: None,
        prompt_logprobs: None,
        constraint: None,
        trace: false,
    };
    let mut stream = engine.submit(request)?;
    let mut out = std::io::stdout().lock();
    let code = loop {
        match stream.next_blocking() {
            Some(Event::Tokens(tokens)) => {
                for token in tokens {
                    out.write_all(token.text.as_bytes()).context("writing text")?;
                }
                out.flush().context("writing text")?;
            }
            Some(Event::Finished(finished)) => {
                writeln!(out).context("writing text")?;
                if args.stats {
                    let (spec, decode) = (&finished.speculation, finished.timing.decode.as_secs_f64());
                    eprintln!(
                        "{} tokens, {:.1} tokens/s, {:.2} tokens per round over {} rounds",
                        finished.completion_tokens,
                        f64::from(finished.completion_tokens) / decode.max(1e-9),
                        1.0 + spec.accepted as f64 / spec.rounds.max(1) as f64,
                        spec.rounds
                    );
                }
                break if finished.reason == FinishReason::Abort { ExitCode::FAILURE } else { ExitCode::SUCCESS };
            }
            Some(Event::Failed(failure)) => bail!("{failure}"),
            Some(Event::Started { .. } | Event::Prompt(_) | Event::Round(_)) => {}
            None => bail!("the engine ended without an answer"),
        }
    };
    drop(stream);
    drop(engine);
    let _ = thread.join();
    Ok(code)
}

fn prompt_ids(args: &Args, prepared: &Prepared, source: &crate::model::source::ModelSource) -> anyhow::Result<Vec<u32>> {
    let text = match args.prompt.as_deref() {
        Some("-") | None => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("reading the prompt")?;
            text
        }
        Some(text) => text.to_string(),
    };
    if text.is_empty() {
        bail!("the prompt is empty: give it as an argument or on standard input");
    }
    if !args.chat {
        return Ok(prepared.tokenizer.encode_prompt(&text));
    }
    let template = ChatTemplate::load(source, prepared.tokenizer.clone())?;
    let conversation = Conversation::parse(&json!([{"role": "user", "content": text}]), None)?;
    let options = ChatOptions { thinking: args.thinking, ..ChatOptions::default() };
    Ok(template.render(&conversation, &options)?.ids)
}
