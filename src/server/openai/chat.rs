//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use hyper::{Response, StatusCode};
use serde::Serialize;

use super::chat_request::ChatRequest;
use super::logprobs::{self, ChatLogprobs, PromptLogprobs};
use super::stream::{Chunk, Shape, Streamed};
use super::types::{CompletionDetails, Head, SpeculationSum, StopReason, Usage, finish_reason, stop_reason};
use crate::engine::contract::{Event, FinishReason, Finished, Request, Token};
use crate::model::tokenizer::Tokenizer;
use crate::server::chat_output::{ChatOutput, Markers, Piece};
use crate::server::error::ApiError;
use crate::server::generation::Generation;
use crate::server::http::{self, Body};
use crate::server::sse;
use crate::server::state::{App, unix_now};

const OBJECT: &str = "chat.completion.chunk";

/// One choice as it grows.
struct ChoiceState {
    /// `None` for a vocabulary without markers: everything is content.
    output: Option<ChatOutput>,
    tokens: u32,
    role_sent: bool,
    prompt_logprobs: Option<PromptLogprobs>,
}

/// What one event adds to a choice.
#[derive(Default, Serialize)]
struct ChoiceDelta {
    index: usize,
    delta: Delta,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
}

#[derive(Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// The same under the name newer vLLM clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallDelta>,
}

#[derive(Clone, Serialize)]
struct CallDelta {
    /// Only in streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Clone, Serialize)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl Delta {
    fn of(piece: Piece) -> Self {
        match piece {
            Piece::Content(text) => Self { content: Some(text), ..Self::default() },
            Piece::Reasoning(text) => Self { reasoning_content: Some(text.clone()), reasoning: Some(text), ..Self::default() },
            Piece::CallBegin { index, id, name } => {
                let function = FunctionDelta { name: Some(name), arguments: String::new() };
                Self {
                    tool_calls: vec![CallDelta { index: Some(index), id: Some(id), kind: Some("function"), function }],
                    ..Self::default()
                }
            }
            Piece::CallArguments { index, text } => {
                let function = FunctionDelta { name: None, arguments: text };
                Self { tool_calls: vec![CallDelta { index: Some(index), id: None, kind: None, function }], ..Self::default() }
            }
        }
    }
}

/// Joins neighbouring pieces of the same part, so that a round makes one chunk in the usual case.
fn join(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (joined.last_mut(), &piece) {
            (Some(Piece::Content(text)), Piece::Content(more)) | (Some(Piece::Reasoning(text)), Piece::Reasoning(more)) => {
                text.push_str(more)
            }
            (Some(Piece::CallArguments { text, .. }), Piece::CallArguments { text: more, .. }) => text.push_str(more),
            _ => joined.push(piece),
        }
    }
    joined
}

/// The answer in the making; both forms, streamed and whole, are fed by it.
struct Chat {
    request: ChatRequest,
    tokenizer: Arc<Tokenizer>,
    head: Head,
    choices: Vec<ChoiceState>,
    usage: Usage,
    reasoning_tokens: u32,
    speculation: SpeculationSum,
}

impl Chat {
    fn new(app: &App, request: ChatRequest, markers: Option<Markers>) -> Self {
        let head = Head { id: app.new_id("chatcmpl"), created: unix_now(), model: app.model_name() };
        let output = || {
            markers.map(|markers| ChatOutput::new(markers, request.prompt.reasoning_open, request.calls_tools(), request.prompt.next_call))
        };
        let choice = |_| ChoiceState { output: output(), tokens: 0, role_sent: false, prompt_logprobs: None };
        let choices = (0..request.common.n).map(choice).collect();
        Self {
            tokenizer: app.engine.tokenizer().clone(),
            head,
            choices,
            request,
            usage: Usage::default(),
            reasoning_tokens: 0,
            speculation: SpeculationSum::default(),
        }
    }

    fn tokens(&mut self, index: usize, tokens: &[Token]) -> Vec<ChoiceDelta> {
        let choice = &mut self.choices[index];
        choice.tokens += tokens.len() as u32;
        let mut pieces = Vec::new();
        match &mut choice.output {
            Some(output) => tokens.iter().for_each(|token| output.token(token.id, &token.text, &mut pieces)),
            None => pieces.extend(tokens.iter().filter(|token| !token.text.is_empty()).map(|token| Piece::Content(token.text.clone()))),
        }
        let mut deltas = self.deltas(index, pieces);
        if let Some(top) = self.request.logprobs {
            if deltas.is_empty() {
                deltas.push(ChoiceDelta { index, ..Default::default() });
            }
            deltas[0].logprobs = Some(logprobs::chat(&self.tokenizer, tokens, top as usize));
        }
        deltas
    }

    fn deltas(&self, index: usize, pieces: Vec<Piece>) -> Vec<ChoiceDelta> {
        let wanted = |piece: &Piece| self.request.include_reasoning || !matches!(piece, Piece::Reasoning(_));
        let pieces = join(pieces).into_iter().filter(wanted);
        pieces.map(|piece| ChoiceDelta { index, delta: Delta::of(piece), ..Default::default() }).collect()
    }

    fn finished(&mut self, index: usize, finished: &Finished) -> Vec<ChoiceDelta> {
        if index == 0 {
            self.usage.add_prompt(finished.prompt_tokens, finished.cached_tokens);
        }
        self.usage.add_completion(finished.completion_tokens);
        self.speculation.add(&finished.speculation);
        let mut pieces = Vec::new();
        let mut called = false;
        if let Some(output) = &mut self.choices[index].output {
            output.finish(finished.reason == FinishReason::Length, &mut pieces);
            called = output.calls() > 0;
            self.reasoning_tokens += output.reasoning_tokens().min(finished.completion_tokens);
        }
        self.usage.completion_tokens_details = Some(CompletionDetails { reasoning_tokens: self.reasoning_tokens });
        let mut deltas = self.deltas(index, pieces);
        let reason = finish_reason(finished);
        deltas.push(ChoiceDelta {
            index,
            finish_reason: Some(if called && reason == "stop" { "tool_calls" } else { reason }),
            stop_reason: stop_reason(finished),
            ..Default::default()
        });
        deltas
    }

    /// What an event says to the client.
    fn take(&mut self, index: usize, event: &Event) -> Vec<ChoiceDelta> {
        match event {
            Event::Tokens(tokens) => self.tokens(index, tokens),
            Event::Finished(finished) => self.finished(index, finished),
            Event::Prompt(entries) => {
                if let Some(top) = self.request.common.prompt_logprobs {
                    self.choices[index].prompt_logprobs = Some(logprobs::prompt(&self.tokenizer, entries, top as usize));
                }
                Vec::new()
            }
            Event::Started { .. } | Event::Round(_) | Event::Failed(_) => Vec::new(),
        }
    }

    fn usage_now(&self) -> Usage {
        let mut usage = Usage::default();
        usage.add_prompt(self.request.prompt.ids.len() as u32, 0);
        self.choices.iter().for_each(|choice| usage.add_completion(choice.tokens));
        usage
    }

    fn write(&mut self, mut delta: ChoiceDelta, out: &mut Vec<u8>) {
        let common = &self.request.common;
        let usage = common.include_usage.then(|| common.continuous_usage.then(|| self.usage_now()));
        let choice = &mut self.choices[delta.index];
        if !std::mem::replace(&mut choice.role_sent, true) {
            delta.delta.role = Some("assistant");
            delta.delta.content.get_or_insert_default();
        }
        sse::event(out, &Chunk::new(&self.head, OBJECT, &[delta], usage));
    }
}

impl Shape for Chat {
    fn begin(&mut self, _out: &mut Vec<u8>) {}

    fn event(&mut self, choice: usize, event: Event, out: &mut Vec<u8>) {
        if let Event::Round(round) = &event {
            sse::event(out, &Chunk::<ChoiceDelta>::traced(&self.head, OBJECT, &self.tokenizer, choice, round));
        }
        for delta in self.take(choice, &event) {
            self.write(delta, out);
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        if self.request.common.include_usage {
            sse::event(out, &Chunk::<ChoiceDelta>::whole(&self.head, OBJECT, &[], self.usage, self.speculation.metrics()));
        }
    }
}

/// A choice of the whole answer.
#[derive(Default, Serialize)]
struct Whole {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallDelta>,
}

impl Default for Message {
    fn default() -> Self {
        Self { role: "assistant", content: None, reasoning_content: None, reasoning: None, tool_calls: Vec::new() }
    }
}

impl Whole {
    fn add(&mut self, more: ChoiceDelta) {
        let message = &mut self.message;
        if let Some(text) = more.delta.content {
            message.content.get_or_insert_default().push_str(&text);
        }
        if let Some(text) = more.delta.reasoning_content {
            message.reasoning_content.get_or_insert_default().push_str(&text);
        }
        for call in more.delta.tool_calls {
            match message.tool_calls.last_mut().filter(|last| last.index == call.index) {
                Some(last) => last.function.arguments.push_str(&call.function.arguments),
                None => message.tool_calls.push(call),
            }
        }
        if let Some(mut more) = more.logprobs {
            self.logprobs.get_or_insert_default().content.append(&mut more.content);
        }
        self.finish_reason = more.finish_reason.or(self.finish_reason);
        self.stop_reason = more.stop_reason.or(self.stop_reason.take());
    }

    fn complete(&mut self) {
        self.message.reasoning = self.message.reasoning_content.clone();
        if self.message.tool_calls.is_empty() {
            self.message.content.get_or_insert_default();
        }
        self.message.tool_calls.iter_mut().for_each(|call| call.index = None);
    }
}

/// Answers one checked request.
pub async fn answer(app: Arc<App>, request: ChatRequest, arrival: Instant) -> Result<Response<Body>, ApiError> {
    let markers = Markers::of(app.engine.tokenizer());
    let (request, requests) = requests(&app, request, markers).await?;
    let generation = Generation::submit(&app, requests, arrival)?;
    let stream = request.common.stream;
    let chat = Chat::new(&app, request, markers);
    if stream {
        return Ok(sse::response(Streamed::new(generation, chat), app.config.keep_alive(), app.metrics.clone()));
    }
    whole(generation, chat).await
}

/// The engine's requests. Grammars are compiled beside the runtime's threads and a few at a time, so that other connections go on.
async fn requests(app: &Arc<App>, request: ChatRequest, markers: Option<Markers>) -> Result<(ChatRequest, Vec<Request>), ApiError> {
    if !request.is_bound() {
        let requests = request.requests(app, markers)?;
        return Ok((request, requests));
    }
    let failed = "Preparing the request failed.";
    let permit = app.compiling.clone().acquire_owned().await.map_err(|_| ApiError::internal(failed))?;
    let app = app.clone();
    let compile = move || {
        let _permit = permit;
        let requests = request.requests(&app, markers)?;
        Ok((request, requests))
    };
    tokio::task::spawn_blocking(compile).await.map_err(|_| ApiError::internal(failed))?
}

async fn whole(mut generation: Generation, mut chat: Chat) -> Result<Response<Body>, ApiError> {
    let mut choices: Vec<_> = (0..chat.choices.len()).map(|index| Whole { index, ..Default::default() }).collect();
    while let Some(event) = generation.next().await {
        let (index, event) = event?;
        chat.take(index, &event).into_iter().for_each(|delta| choices[index].add(delta));
    }
    for (choice, state) in choices.iter_mut().zip(&mut chat.choices) {
        choice.complete();
        choice.prompt_logprobs = state.prompt_logprobs.take();
    }
    let answer = Chunk::whole(&chat.head, "chat.completion", &choices, chat.usage, chat.speculation.metrics());
    Ok(http::json(StatusCode::OK, &answer))
}
