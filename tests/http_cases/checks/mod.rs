//! The words of the cases as assertions. A check nobody has written an assertion for fails: nothing passes unread.

mod limits;
mod sampling;
mod streams;
mod tokens;
mod tools;
mod validation;

use serde_json::{Value, json};

use super::case::Case;
use crate::binary::Binary;
use crate::http_support::wire::{Answer, Request};

/// One case that was run.
pub struct Run<'a> {
    pub case: &'a Case,
    pub server: &'a Binary,
    pub answers: Vec<Answer>,
    /// Resident bytes before.
    pub memory: u64,
}

type Verdict = Result<(), String>;

pub fn equal<T: PartialEq + std::fmt::Debug>(what: &str, found: T, wanted: T) -> Verdict {
    if found == wanted { Ok(()) } else { Err(format!("{what} is {found:?}, wanted {wanted:?}")) }
}

pub fn holds(what: &str, good: bool) -> Verdict {
    if good { Ok(()) } else { Err(what.into()) }
}

impl Run<'_> {
    pub fn first(&self) -> &Answer {
        &self.answers[0]
    }

    fn on_success(&self, verdict: impl FnOnce() -> Verdict) -> Verdict {
        if self.first().status == 200 { verdict() } else { Ok(()) }
    }

    fn content(&self, wanted: &str) -> Verdict {
        equal("content", self.first().content().as_str(), wanted)
    }

    fn content_if_200(&self, wanted: &str) -> Verdict {
        self.on_success(|| self.content(wanted))
    }

    fn usage(&self, place: &str, wanted: u64) -> Verdict {
        equal(place, self.first().usage()[place].as_u64(), Some(wanted))
    }

    fn finish(&self, wanted: &str) -> Verdict {
        equal("finish reasons", self.first().finishes(), vec![wanted.to_string()])
    }

    fn names(&self, wanted: &str) -> Verdict {
        let message = self.first().error_message();
        holds(&format!("the message {message:?} does not name {wanted}"), message.contains(wanted))
    }

    fn field(&self, name: &str) -> Value {
        self.first().json()[name].clone()
    }

    fn again(&self, extra: Value) -> Answer {
        self.server.send(&self.case.request_with(&extra))
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        self.server.send(&Request::post(path, body))
    }

    /// The same text from every budget.
    fn equal_in_all_modes(&self) -> Verdict {
        let wanted = (self.first().texts(), self.first().usage()["completion_tokens"].clone());
        for mode in ["off", "chain", "tree:8", "tree:32", "tree:64"] {
            let answer = self.again(json!({"speculation": mode}));
            equal(mode, (answer.texts(), answer.usage()["completion_tokens"].clone()), wanted.clone())?;
        }
        Ok(())
    }

    fn logprobs(&self, answer: &Answer) -> Vec<f64> {
        let chunks = if answer.is_stream() { answer.chunks() } else { vec![answer.json()] };
        let lists = chunks.iter().flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        lists.filter_map(|entry| entry["logprob"].as_f64()).collect()
    }

    fn no_replacement_character(&self) -> Verdict {
        holds("U+FFFD in a delta", !self.first().text().contains('\u{fffd}') && !self.first().text().contains("\\ufffd"))?;
        holds("the stream is no UTF-8", std::str::from_utf8(&self.first().body).is_ok())
    }

    fn memory_flat(&self) -> Verdict {
        let grown = self.server.memory().saturating_sub(self.memory);
        holds(&format!("memory grew by {} MiB", grown >> 20), grown < 48 << 20)
    }

    fn decoded(&self, tokens: &Value) -> String {
        self.post("/detokenize", &json!({"tokens": tokens})).json()["prompt"].as_str().unwrap_or("").into()
    }

    fn tokenized(&self, messages: &Value) -> Value {
        let mut body = self.case.body.clone();
        body["model"] = json!(super::case::MODEL);
        body["messages"] = messages.clone();
        self.post("/tokenize", &body).json()["tokens"].clone()
    }

    fn specials(&self) -> Vec<u64> {
        let tokens = self.field("tokens");
        tokens.as_array().into_iter().flatten().filter_map(Value::as_u64).filter(|id| *id >= 3840).collect()
    }
}

/// Every answer, asked for or not: strict JSON, errors in OpenAI's form, streams ended as they must be.
pub fn always(answer: &Answer, stream: bool) -> Verdict {
    if answer.status == 0 {
        return Ok(());
    }
    if answer.is_stream() {
        return well_formed_stream(answer);
    }
    if answer.status == 200 && stream {
        return Err("a stream was asked for".into());
    }
    if answer.status >= 400 && answer.status != 431 && !answer.body.is_empty() {
        error_form(answer)?;
    }
    Ok(())
}

fn error_form(answer: &Answer) -> Verdict {
    let body = answer.json();
    let error = body["error"].as_object().ok_or_else(|| format!("no error object in {}", answer.text()))?;
    let keys: Vec<_> = error.keys().map(String::as_str).collect();
    equal("the error's fields", keys, vec!["message", "type", "param", "code"])?;
    equal("content type", answer.header("content-type"), Some("application/json"))?;
    let text = answer.text();
    let leaks = [".rs:", "src/", "panicked", "stack backtrace", "::", "Some(", "None", "Err(", "unwrap"];
    match leaks.iter().find(|leak| text.contains(**leak)) {
        Some(leak) => Err(format!("{leak:?} in {text}")),
        None => Ok(()),
    }
}

fn well_formed_stream(answer: &Answer) -> Verdict {
    let events = answer.events();
    for event in events.iter().filter(|event| *event != "[DONE]") {
        serde_json::from_str::<Value>(event).map_err(|error| format!("{error} in {event}"))?;
    }
    if answer.chunks().last().is_some_and(|last| last.get("error").is_some()) {
        return holds("an error event is followed by something", events.last().is_some_and(|last| last != "[DONE]"));
    }
    equal("events [DONE]", events.iter().filter(|event| *event == "[DONE]").count(), 1)?;
    equal("the last event", events.last().map(String::as_str), Some("[DONE]"))?;
    let choices = answer.texts().len();
    equal("finish reasons", answer.finishes().len(), choices)
}

pub fn judge(run: &Run, check: &str) -> Verdict {
    if let Some(verdict) = simple(run, check) {
        return verdict;
    }
    let answer = run.first();
    match check {
        "server alive" | "never 500" | "not 400" | "not 400, not 500" | "no complaint about missing content" => {
            holds("a server error", answer.status < 500 && run.case.expect.allows(answer.status))
        }
        "documented"
        | "documented choice"
        | "documented; never 500"
        | "reference for fixture a"
        | "never 200"
        | "no overflow"
        | "no stack overflow"
        | "no division by zero"
        | "NaN is not JSON"
        | "bytes C4 E3 BA C3 are GBK, not UTF-8"
        | "400 names the limit"
        | "400 only if refused"
        | "documented: logprobs before or after filtering"
        | "404 code model_not_found, or documented" => holds("the status", run.case.expect.allows(answer.status) && answer.status < 500),
        "error body is {error:{message,type,param,code}}; no Rust type, file path or backtrace in it" => error_form(answer),
        "application/json body" | "Content-Type application/json" => equal("type", answer.header("content-type"), Some("application/json")),
        _ => by_topic(run, check),
    }
}

/// Checks of one word and a value.
fn simple(run: &Run, check: &str) -> Option<Verdict> {
    let quoted = |rest: &str| rest.trim_matches('\'').to_string();
    if let Some(rest) = check.strip_prefix("content == ").filter(|rest| rest.ends_with('\'')) {
        return Some(run.content(&quoted(rest)));
    }
    if let Some(rest) = check.strip_prefix("text == ") {
        return Some(equal("text", run.first().content(), quoted(rest)));
    }
    if let Some(rest) = check.strip_prefix("200: text == ") {
        return Some(run.on_success(|| equal("text", run.first().content(), quoted(rest))));
    }
    if let Some(rest) = check.strip_prefix("content is '") {
        return Some(run.content(rest.split('\'').next()?));
    }
    if let Some(rest) = check.strip_prefix("completion_tokens ") {
        let (count, finish) = rest.split_once(", finish ").unwrap_or((rest, ""));
        let count = count.parse().ok()?;
        return Some(run.usage("completion_tokens", count).and_then(|()| if finish.is_empty() { Ok(()) } else { run.finish(finish) }));
    }
    if let Some(count) = check.strip_prefix("prompt_tokens ").and_then(|rest| rest.parse().ok()) {
        return Some(run.usage("prompt_tokens", count));
    }
    if let Some(rest) = check.strip_prefix("finish ") {
        let reason = rest.split([',', ' ']).next()?;
        return matches!(rest, "stop" | "length" | "stop, [DONE] once" | "length, [DONE] once").then(|| run.finish(reason));
    }
    if let Some(word) = check.strip_prefix("names ").filter(|rest| !rest.contains(' ')) {
        return Some(run.names(word));
    }
    None
}

fn by_topic(run: &Run, check: &str) -> Verdict {
    let topic = run.case.case.split('-').next().unwrap_or("");
    match topic {
        "TK" | "CT" => tokens::judge(run, check),
        "TC" => tools::judge(run, check),
        "RS" | "ST" => streams::judge(run, check),
        "AV" => validation::judge(run, check),
        "SA" | "SX" | "PC" => sampling::judge(run, check),
        _ => limits::judge(run, check),
    }
}

fn unknown(check: &str) -> Verdict {
    Err(format!("no assertion is written for {check:?}"))
}
