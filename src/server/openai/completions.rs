//! `POST /v1/completions`: raw prompts, as text or token ids.
//!
//! Text prompts are read with markers: clients that render chat templates themselves send them this way. `/tokenize` with
//! `prompt` follows the same rule. `[BOS]` is put in front unless `add_special_tokens` is false.

use std::sync::Arc;
use std::time::Instant;

use hyper::{Response, StatusCode};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::logprobs::{self, PromptLogprobs, TextLogprobs};
use super::params::{Common, token_id};
use super::stream::{Chunk, Shape, Streamed};
use super::types::{Head, SpeculationSum, StopReason, Usage, finish_reason, stop_reason};
use crate::engine::contract::{Event, Finished, Request, Token, TokenLogprob};
use crate::model::tokenizer::Tokenizer;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::generation::Generation;
use crate::server::http::{self, Body};
use crate::server::sse;
use crate::server::state::{App, unix_now};

/// One prompt of the request.
struct Prompt {
    ids: Vec<u32>,
    /// What `echo` shows.
    text: String,
    /// A `[BOS]` we put in front: it has no text.
    hidden_first: bool,
    /// Whether special tokens inside are part of the text (a text prompt in which they were written out).
    shows_specials: bool,
}

/// A checked request.
pub struct CompletionRequest {
    common: Common,
    prompts: Vec<Prompt>,
    echo: bool,
    logprobs: Option<u32>,
    /// `max_tokens` 0: the engine generates one token, which is thrown away.
    nothing: bool,
    rooms: Vec<u32>,
}

impl CompletionRequest {
    pub fn parse(app: &App, body: &Map<String, Value>) -> Result<Self, ApiError> {
        let fields = Fields::root(body);
        super::check_model(app, fields)?;
        let info = app.engine.info();
        let common = Common::parse(fields, info.vocab_size, &app.config)?;
        refuse_unsupported(fields, common.n)?;
        let add_bos = fields.bool("add_special_tokens")?.unwrap_or(true);
        let prompts = prompts(fields, app, add_bos)?;
        if prompts.len() * common.n > app.config.max_choices {
            let message = format!(
                "{} prompts times n = {} are too many: wanted at most {} choices.",
                prompts.len(),
                common.n,
                app.config.max_choices
            );
            return Err(ApiError::invalid("n", message));
        }
        let slots = app.request_slots();
        let room = |prompt: &Prompt| common.room(prompt.ids.len(), info.max_model_len, slots).map_err(|error| error.with_param("prompt"));
        let mut rooms = prompts.iter().map(room).collect::<Result<Vec<_>, _>>()?;
        let logprobs = fields.integer("logprobs", 0..=super::params::MAX_TOP_LOGPROBS)?.map(|k| k as u32);
        common.fit_logprobs("logprobs", logprobs, &mut rooms)?;
        let tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        let request =
            Self { nothing: common.max_tokens == Some(0), echo: fields.bool("echo")?.unwrap_or(false), logprobs, common, prompts, rooms };
        request.common.check_prompt_logprobs(request.prompt_logprobs(), tokens)?;
        Ok(request)
    }

    /// The engine's requests, `n` for each prompt in turn.
    fn requests(&self, app: &App) -> Vec<Request> {
        let choices = self.prompts.iter().zip(&self.rooms).flat_map(|prompt| (0..self.common.n).map(move |index| (prompt, index)));
        choices
            .enumerate()
            .map(|(place, ((prompt, room), _))| {
                let mut sampling = self.common.sampling.clone();
                sampling.seed = self.common.seed_of(place, || app.random_seed());
                Request {
                    prompt: prompt.ids.clone(),
                    sampling,
                    stop: self.common.stop.clone(),
                    max_tokens: if self.nothing { 1 } else { *room },
                    min_tokens: self.common.min_tokens,
                    budget: self.common.budget,
                    logprobs: self.logprobs,
                    prompt_logprobs: self.prompt_logprobs(),
                    constraint: None,
                    trace: self.common.trace,
                }
            })
            .collect()
    }

    fn prompt_logprobs(&self) -> Option<u32> {
        let echoed = self.echo.then_some(self.logprobs).flatten();
        self.common.prompt_logprobs.max(echoed)
    }
}

fn refuse_unsupported(fields: Fields, n: usize) -> Result<(), ApiError> {
    fields.refuse_unless("best_of", &[json!(n)], "only best_of equal to n is done")?;
    fields.refuse_unless("suffix", &[json!("")], "the model fills no gaps")?;
    fields.refuse_unless("response_format", &[json!({"type": "text"})], "use /v1/chat/completions for structured output")?;
    fields.refuse_unless("tools", &[json!([])], "use /v1/chat/completions for tools")
}

fn prompts(fields: Fields, app: &App, add_bos: bool) -> Result<Vec<Prompt>, ApiError> {
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::invalid("prompt", "prompt is missing: wanted a string, a list of strings, token ids or a list of those."));
    };
    let wrong = || fields.wrong("prompt", value, "a string, a list of strings, token ids or a list of those (none of them empty)");
    match value {
        Value::String(text) => Ok(vec![text_prompt(app.engine.tokenizer(), text, add_bos)?]),
        Value::Array(list) => match list.first() {
            Some(Value::String(_)) => {
                let one = |item: &Value| text_prompt(app.engine.tokenizer(), item.as_str().ok_or_else(wrong)?, add_bos);
                list.iter().take(app.config.max_choices + 1).map(one).collect()
            }
            Some(Value::Number(_)) => Ok(vec![id_prompt(app, list)?]),
            Some(Value::Array(_)) => {
                let one = |item: &Value| match item.as_array() {
                    Some(ids) if !ids.is_empty() => id_prompt(app, ids),
                    _ => Err(wrong()),
                };
                list.iter().take(app.config.max_choices + 1).map(one).collect()
            }
            _ => Err(wrong()),
        },
        _ => Err(wrong()),
    }
}

fn text_prompt(tokenizer: &Tokenizer, text: &str, add_bos: bool) -> Result<Prompt, ApiError> {
    let ids = super::tokenize::encode_raw(tokenizer, text, add_bos);
    if ids.is_empty() {
        let message = "prompt holds an empty string and add_special_tokens is false: wanted at least one token to go on from.";
        return Err(ApiError::invalid("prompt", message));
    }
    let hidden_first = add_bos && tokenizer.bos().is_some();
    Ok(Prompt { ids, text: text.into(), hidden_first, shows_specials: true })
}

fn id_prompt(app: &App, list: &[Value]) -> Result<Prompt, ApiError> {
    let vocab_size = app.engine.info().vocab_size;
    let ids = list.iter().map(|item| token_id(item, "prompt", vocab_size)).collect::<Result<Vec<_>, _>>()?;
    let tokenizer = app.engine.tokenizer();
    let ordinary = ids.iter().filter(|id| !tokenizer.is_special(**id));
    let bytes: Vec<u8> = ordinary.flat_map(|id| logprobs::shown_bytes(tokenizer, *id)).copied().collect();
    Ok(Prompt { text: String::from_utf8_lossy(&bytes).into_owned(), ids, hidden_first: false, shows_specials: false })
}

/// Where in a text the next token begins, in characters.
#[derive(Clone, Copy, Default)]
struct Offset {
    characters: usize,
}

impl Offset {
    /// The offset of a token with these bytes, moving behind it. A token that begins inside a character begins where that does.
    fn pass(&mut self, bytes: &[u8]) -> usize {
        let leads = |byte: &&u8| **byte & 0xC0 != 0x80;
        let inside = bytes.first().is_some_and(|byte| !leads(&byte));
        let start = self.characters.saturating_sub(usize::from(inside));
        self.characters += bytes.iter().filter(leads).count();
        start
    }
}

/// One choice as it grows.
struct ChoiceState {
    prompt: usize,
    offset: Offset,
    completion_tokens: u32,
    prompt_logprobs: Option<PromptLogprobs>,
}

/// What one event adds to a choice.
#[derive(Default, Serialize)]
struct Delta {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
}

/// The answer in the making; both forms, streamed and whole, are fed by it.
pub struct Completion {
    request: CompletionRequest,
    tokenizer: Arc<Tokenizer>,
    head: Head,
    choices: Vec<ChoiceState>,
    usage: Usage,
    speculation: SpeculationSum,
}

impl Completion {
    fn new(app: &App, request: CompletionRequest) -> Self {
        let head = Head { id: app.new_id("cmpl"), created: unix_now(), model: app.model_name() };
        let n = request.common.n;
        let state =
            |place: usize| ChoiceState { prompt: place / n, offset: Offset::default(), completion_tokens: 0, prompt_logprobs: None };
        let choices = (0..request.prompts.len() * n).map(state).collect();
        Self {
            tokenizer: app.engine.tokenizer().clone(),
            head,
            choices,
            request,
            usage: Usage::default(),
            speculation: SpeculationSum::default(),
        }
    }

    /// The echoed prompt of a choice, once its log-probabilities are there if they were asked for.
    fn echo(&mut self, index: usize, entries: Option<&[Option<TokenLogprob>]>) -> Delta {
        let choice = &mut self.choices[index];
        let prompt = &self.request.prompts[choice.prompt];
        let mut all = TextLogprobs::default();
        for (place, &id) in prompt.ids.iter().enumerate() {
            let special = self.tokenizer.is_special(id);
            let hidden = (place == 0 && prompt.hidden_first) || (special && !prompt.shows_specials);
            let bytes = if hidden { &[] } else { logprobs::shown_bytes(&self.tokenizer, id) };
            let offset = choice.offset.pass(bytes);
            if let (Some(entries), Some(top)) = (entries, self.request.logprobs) {
                all.push(&self.tokenizer, id, entries.get(place).and_then(Option::as_ref), top as usize, offset);
            }
        }
        let logprobs = entries.is_some().then_some(all).filter(|_| self.request.logprobs.is_some());
        Delta { index, text: prompt.text.clone(), logprobs, ..Default::default() }
    }

    fn tokens(&mut self, index: usize, tokens: &[Token]) -> Option<Delta> {
        if self.request.nothing {
            return None;
        }
        let choice = &mut self.choices[index];
        choice.completion_tokens += tokens.len() as u32;
        let text: String = tokens.iter().map(|token| token.text.as_str()).collect();
        let logprobs = self.request.logprobs.map(|top| {
            let mut all = TextLogprobs::default();
            for token in tokens {
                let special = self.tokenizer.is_special(token.id);
                let bytes = if special { &[] } else { logprobs::shown_bytes(&self.tokenizer, token.id) };
                let offset = choice.offset.pass(bytes);
                all.push(&self.tokenizer, token.id, token.logprob.as_ref(), top as usize, offset);
            }
            all
        });
        if text.is_empty() && logprobs.is_none() {
            return None;
        }
        Some(Delta { index, text, logprobs, ..Default::default() })
    }

    fn finished(&mut self, index: usize, finished: &Finished) -> Delta {
        let prompt = self.choices[index].prompt;
        if index == prompt * self.request.common.n {
            self.usage.add_prompt(finished.prompt_tokens, finished.cached_tokens);
        }
        if !self.request.nothing {
            self.usage.add_completion(finished.completion_tokens);
        }
        self.speculation.add(&finished.speculation);
        let reason = if self.request.nothing { "length" } else { finish_reason(finished) };
        Delta {
            index,
            finish_reason: Some(reason),
            stop_reason: stop_reason(finished).filter(|_| !self.request.nothing),
            ..Default::default()
        }
    }

    /// What an event says to the client, if anything.
    fn take(&mut self, index: usize, event: &Event) -> Option<Delta> {
        match event {
            Event::Prompt(entries) => {
                if let Some(top) = self.request.common.prompt_logprobs {
                    self.choices[index].prompt_logprobs = Some(logprobs::prompt(&self.tokenizer, entries, top as usize));
                }
                (self.request.echo && self.request.logprobs.is_some()).then(|| self.echo(index, Some(entries)))
            }
            Event::Tokens(tokens) => self.tokens(index, tokens),
            Event::Finished(finished) => Some(self.finished(index, finished)),
            Event::Started { .. } | Event::Round(_) | Event::Failed(_) => None,
        }
    }

    fn echoes_at_once(&self) -> bool {
        self.request.echo && self.request.logprobs.is_none()
    }

    /// Usage so far, for clients that asked for it in every chunk.
    fn usage_now(&self) -> Usage {
        let mut usage = Usage::default();
        self.request.prompts.iter().for_each(|prompt| usage.add_prompt(prompt.ids.len() as u32, 0));
        self.choices.iter().for_each(|choice| usage.add_completion(choice.completion_tokens));
        usage
    }

    fn write(&self, delta: Delta, out: &mut Vec<u8>) {
        let common = &self.request.common;
        let usage = common.include_usage.then(|| common.continuous_usage.then(|| self.usage_now()));
        sse::event(out, &Chunk::new(&self.head, OBJECT, &[delta], usage));
    }
}

const OBJECT: &str = "text_completion";

impl Shape for Completion {
    fn begin(&mut self, out: &mut Vec<u8>) {
        if self.echoes_at_once() {
            for index in 0..self.choices.len() {
                let delta = self.echo(index, None);
                self.write(delta, out);
            }
        }
    }

    fn event(&mut self, choice: usize, event: Event, out: &mut Vec<u8>) {
        if let Event::Round(round) = &event {
            sse::event(out, &Chunk::<Delta>::traced(&self.head, OBJECT, &self.tokenizer, choice, round));
        }
        if let Some(delta) = self.take(choice, &event) {
            self.write(delta, out);
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        if self.request.common.include_usage {
            sse::event(out, &Chunk::<Delta>::whole(&self.head, OBJECT, &[], self.usage, self.speculation.metrics()));
        }
    }
}

/// A choice of the whole answer.
#[derive(Default, Serialize)]
struct Whole {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

impl Whole {
    fn add(&mut self, delta: Delta) {
        self.text.push_str(&delta.text);
        if let Some(more) = delta.logprobs {
            self.logprobs.get_or_insert_default().append(more);
        }
        self.finish_reason = delta.finish_reason.or(self.finish_reason);
        self.stop_reason = delta.stop_reason.or(self.stop_reason.take());
    }
}

/// Answers one checked request.
pub async fn answer(app: Arc<App>, request: CompletionRequest, arrival: Instant) -> Result<Response<Body>, ApiError> {
    let generation = Generation::submit(&app, request.requests(&app), arrival)?;
    let stream = request.common.stream;
    let completion = Completion::new(&app, request);
    if stream {
        return Ok(sse::response(Streamed::new(generation, completion), app.config.keep_alive(), app.metrics.clone()));
    }
    whole(generation, completion).await
}

async fn whole(mut generation: Generation, mut completion: Completion) -> Result<Response<Body>, ApiError> {
    let mut choices: Vec<_> = (0..completion.choices.len()).map(|index| Whole { index, ..Default::default() }).collect();
    if completion.echoes_at_once() {
        choices.iter_mut().for_each(|choice| choice.add(completion.echo(choice.index, None)));
    }
    while let Some(event) = generation.next().await {
        let (index, event) = event?;
        if let Some(delta) = completion.take(index, &event) {
            choices[index].add(delta);
        }
    }
    for (choice, state) in choices.iter_mut().zip(&mut completion.choices) {
        choice.prompt_logprobs = state.prompt_logprobs.take();
    }
    let answer = Chunk::whole(&completion.head, OBJECT, &choices, completion.usage, completion.speculation.metrics());
    Ok(http::json(StatusCode::OK, &answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_count_characters_and_a_part_of_one_begins_where_it_does() {
        let mut offset = Offset::default();
        let parts: [&[u8]; 6] = [b"", b"ab", b"\xC3", b"\xA9", b"\xF0\x9F", b"\x8E\xAD!"];
        assert_eq!(parts.map(|part| offset.pass(part)), [0, 0, 2, 2, 3, 3]);
        assert_eq!(offset.characters, 5);
    }
}
