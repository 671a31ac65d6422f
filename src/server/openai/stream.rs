//! Turns the merged events of a generation into server-sent events, the same way for both generating routes.

use std::task::{Context, Poll};

use serde::Serialize;
use serde_json::{Value, json};

use crate::engine::contract::{Event, RoundTrace};
use crate::model::tokenizer::Tokenizer;
use crate::server::generation::Generation;
use crate::server::openai::logprobs;
use crate::server::openai::types::{Head, RequestMetrics, Usage};
use crate::server::sse::{self, Source};

/// Bytes after which events are handed to the connection even though more are ready.
const FRAME: usize = 16 << 10;

/// How one route writes its chunks.
pub trait Shape: Send + Unpin + 'static {
    /// Before any event of the engine.
    fn begin(&mut self, out: &mut Vec<u8>);
    fn event(&mut self, choice: usize, event: Event, out: &mut Vec<u8>);
    /// After the last choice ended well.
    fn end(&mut self, out: &mut Vec<u8>);
}

/// A stream of chunks in one shape.
pub struct Streamed<S> {
    generation: Generation,
    shape: S,
    begun: bool,
}

impl<S: Shape> Streamed<S> {
    pub fn new(generation: Generation, shape: S) -> Self {
        Self { generation, shape, begun: false }
    }
}

impl<S: Shape> Source for Streamed<S> {
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<bool> {
        if !self.begun {
            self.begun = true;
            self.shape.begin(out);
        }
        while out.len() < FRAME {
            match self.generation.poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok((choice, event)))) => self.shape.event(choice, event, out),
                // No finish reason and no [DONE]: a failure must not look like an end.
                Poll::Ready(Some(Err(error))) => {
                    sse::event(out, &error.to_json());
                    return Poll::Ready(false);
                }
                Poll::Ready(None) => {
                    self.shape.end(out);
                    sse::done(out);
                    return Poll::Ready(false);
                }
            }
        }
        Poll::Ready(true)
    }
}

/// One chunk of a stream, or a whole answer; `C` is the route's choice.
#[derive(Serialize)]
pub struct Chunk<'a, C: Serialize> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: &'a [C],
    /// Absent unless usage was asked for; then `null` but in the last chunk (and in every one with continuous usage).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<RequestMetrics>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kdtree: Option<Value>,
}

impl<'a, C: Serialize> Chunk<'a, C> {
    pub fn new(head: &'a Head, object: &'static str, choices: &'a [C], usage: Option<Option<Usage>>) -> Self {
        Self { id: &head.id, object, created: head.created, model: &head.model, choices, usage, metrics: None, kdtree: None }
    }

    /// The answer of a request that is not streamed; without choices, the last chunk of one that is.
    pub fn whole(head: &'a Head, object: &'static str, choices: &'a [C], usage: Usage, metrics: RequestMetrics) -> Self {
        Self { metrics: Some(metrics), ..Self::new(head, object, choices, Some(Some(usage))) }
    }

    /// What a round did, for whoever asked for `trace`.
    pub fn traced(head: &'a Head, object: &'static str, tokenizer: &Tokenizer, choice: usize, round: &RoundTrace) -> Self {
        Self { kdtree: Some(json!({"round": trace(tokenizer, choice, round)})), ..Self::new(head, object, &[], None) }
    }
}

/// The tree of one round, with the text of each row.
fn trace(tokenizer: &Tokenizer, choice: usize, round: &RoundTrace) -> Value {
    let texts: Vec<_> = round.tokens.iter().map(|id| logprobs::shown(tokenizer, *id)).collect();
    json!({
        "choice": choice,
        "tokens": round.tokens,
        "texts": texts,
        "parents": round.parents,
        "path": round.path,
        "bonus": round.bonus,
        "bonus_text": logprobs::shown(tokenizer, round.bonus),
        "round_us": round.round_us,
    })
}
