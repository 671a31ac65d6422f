//! The words of the cases as assertions. A check nobody has written an assertion for fails: nothing passes unread.

use std::time::Duration;

use serde_json::{Value, json};

use super::case::{Case, FRANCE, PRIMES, france};
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

    fn logprobs(&self) -> Vec<f64> {
        let chunks = if self.first().is_stream() { self.first().chunks() } else { vec![self.first().json()] };
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
        | "no allocation"
        | "never ignored"
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
        "TK" | "CT" => tokens_and_template(run, check),
        "TC" => tools(run, check),
        "RS" | "ST" => streams(run, check),
        "AV" => validation(run, check),
        "SA" | "SX" | "PC" => sampling(run, check),
        _ => limits(run, check),
    }
}

fn unknown(check: &str) -> Verdict {
    Err(format!("no assertion is written for {check:?}"))
}

fn tokens_and_template(run: &Run, check: &str) -> Verdict {
    let answer = run.first();
    let tokens = run.field("tokens");
    match check {
        "text holds <|reserved_token_3845|>, _3848, _3856, _3864, _4093 with the ids themselves" => {
            let text = run.field("prompt").as_str().unwrap_or("").to_string();
            let missing = [3845, 3848, 3856, 3864, 4093].into_iter().find(|id| !text.contains(&format!("<|reserved_token_{id}|>")));
            equal("a missing name", missing, None)
        }
        "empty text" => equal("text", run.field("prompt"), json!("")),
        "message names 4096 and the vocabulary size" => run.names("4096").and_then(|()| run.names("vocabulary")),
        "ids >= 3840 in tokens are [3843,3857,3842,3844,3857,3862]" | "ids >= 3840 are the same six" => {
            equal("control tokens", run.specials(), vec![3843, 3857, 3842, 3844, 3857, 3862])
        }
        "documented: markers parsed (clients that render templates themselves need it) or plain; the same rule in /tokenize and /v1/completions" =>
        {
            let body = json!({"prompt": run.case.body["prompt"], "max_tokens": 1, "temperature": 0});
            let billed = run.post("/v1/completions", &body).usage()["prompt_tokens"].clone();
            equal("tokens billed by /v1/completions", billed, run.field("count"))
        }
        "detokenizing tokens gives the same bytes" => equal("text", json!(run.decoded(&tokens)), run.case.body["prompt"].clone()),
        "no id >= 3840" => equal("control tokens", run.specials(), vec![]),
        "first id 3840 (k26-mini has add_bos_token)" => equal("first id", tokens[0].clone(), json!(3840)),
        "tokens equal those of content 'one two'" => {
            let messages =
                json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "one two"}, {"role": "user", "content": "r"}]);
            equal("tokens", tokens, run.tokenized(&messages))
        }
        "documented meaning; prompt_tokens includes the assistant text" => {
            let alone = run.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "Count."}], "max_tokens": 1}));
            let more = answer.usage()["prompt_tokens"].as_u64() > alone.usage()["prompt_tokens"].as_u64().map(|count| count + 5);
            holds("the assistant's text is not in the prompt", more)
        }
        "tokens equal those with reasoning_content:'R'" => {
            let mut messages = run.case.body["messages"].clone();
            let turn = messages[1].as_object_mut().unwrap();
            let reasoning = turn.remove("reasoning").unwrap();
            turn.insert("reasoning_content".into(), reasoning);
            equal("tokens", tokens, run.tokenized(&messages))
        }
        "reasoning empty or absent" => equal("reasoning", answer.reasoning().as_str(), ""),
        "200: as fixture a; 400 names `thinking`" | "as above" => run.on_success(|| {
            run.content(FRANCE)
                .and_then(|()| run.usage("prompt_tokens", 17))
                .and_then(|()| equal("reasoning", answer.reasoning().as_str(), ""))
        }),
        "answer in < 1 s" => holds(&format!("{:?}", answer.total), answer.total < Duration::from_secs(1)),
        "200: content == 'The capital of France is Paris.' and prompt_tokens 17" => {
            run.on_success(|| run.content(FRANCE).and_then(|()| run.usage("prompt_tokens", 17)))
        }
        _ => unknown(check),
    }
}

fn tools(run: &Run, check: &str) -> Verdict {
    let answer = run.first();
    match check {
        "detokenized prompt holds functions.get_weather:0 and :1 each twice, no call_abc123" => {
            let text = run.decoded(&run.field("tokens"));
            let count = |what: &str| text.matches(what).count();
            let found = (count("functions.get_weather:0"), count("functions.get_weather:1"), count("call_abc123"));
            equal("ids in the prompt", found, (2, 2, 0))
        }
        "200: message.tool_calls[0].function.arguments parses and has city" => run.on_success(|| {
            let call = answer.json()["choices"][0]["message"]["tool_calls"][0].clone();
            city(call["function"]["arguments"].as_str().unwrap_or(""))?;
            // The small model goes on calling until its 64 tokens are used up; what counts is that it never answers in prose.
            holds("prose", answer.content().is_empty() && ["tool_calls", "length"].contains(&answer.finishes()[0].as_str()))
        }),
        "as above; 400 arrives as plain JSON, not SSE" => run.on_success(|| {
            let chunks = answer.chunks();
            let parts = chunks.iter().filter_map(|chunk| chunk.pointer("/choices/0/delta/tool_calls/0/function/arguments")?.as_str());
            city(&parts.collect::<String>())?;
            run.finish("tool_calls")
        }),
        "200 preferred: content == 'The capital of France is Paris.', prompt_tokens 17"
        | "as a"
        | "content == 'The capital of France is Paris.', prompt_tokens 17" => {
            run.content(FRANCE).and_then(|()| run.usage("prompt_tokens", 17))
        }
        _ => unknown(check),
    }
}

fn city(arguments: &str) -> Verdict {
    let parsed: Value = serde_json::from_str(arguments).map_err(|error| format!("{error} in {arguments:?}"))?;
    holds(&format!("no city in {arguments}"), parsed["city"].is_string())
}

fn streams(run: &Run, check: &str) -> Verdict {
    let answer = run.first();
    let chunks = answer.chunks();
    match check {
        "reasoning empty" => equal("reasoning", answer.reasoning().as_str(), ""),
        "finish length, completion_tokens 9 (the marker counts)" => run.finish("length").and_then(|()| run.usage("completion_tokens", 9)),
        "concatenated content equals fixture a" => run.content("The number of apples is 5"),
        "no delta holds '<' from the marker" => holds("a '<'", !answer.content().contains('<') && !answer.reasoning().contains('<')),
        "200: finish length, content empty, completion_tokens_details.reasoning_tokens 8; 400 only if logit_bias is refused as unsupported" =>
        {
            run.finish("length")?;
            run.content("")?;
            equal("reasoning tokens", answer.usage()["completion_tokens_details"]["reasoning_tokens"].clone(), json!(8))
        }
        "text starts with the prompt, no U+FFFD; 400 only if echo is refused as unsupported" => {
            let prompt = run.case.body["prompt"].as_str().unwrap_or("");
            holds(&format!("the text {:?} does not start with the prompt", answer.content()), answer.content().starts_with(prompt))?;
            run.no_replacement_character()
        }
        "content decodes as JSON to 🎭é你 (raw or escaped)" => {
            equal("content", serde_json::from_str::<Value>(&answer.content()).unwrap_or_default(), json!("🎭é你"))
        }
        "no U+FFFD in any delta" => run.no_replacement_character(),
        "no chunk with empty choices" => holds("a chunk without choices", chunks.iter().all(|chunk| chunk["choices"] != json!([]))),
        "no non-null usage" => holds("usage", chunks.iter().all(|chunk| chunk["usage"].is_null())),
        "one usage chunk, last before [DONE]" => {
            let with: Vec<_> = chunks.iter().filter(|chunk| !chunk["usage"].is_null()).collect();
            equal("usage chunks", with.len(), 1)?;
            equal("its choices", &with[0]["choices"], &json!([]))?;
            holds("usage is not last", chunks.last().is_some_and(|last| !last["usage"].is_null()))
        }
        "prompt_tokens 17, total = sum" => {
            let usage = answer.usage();
            run.usage("prompt_tokens", 17)?;
            equal("total", usage["total_tokens"].as_u64(), Some(17 + usage["completion_tokens"].as_u64().unwrap_or(0)))
        }
        "usage equals the non-streamed usage" => {
            let whole = run.post("/v1/chat/completions", &france(json!({}))).usage();
            let same = |name: &str| equal(name, answer.usage()[name].clone(), whole[name].clone());
            same("prompt_tokens").and_then(|()| same("completion_tokens")).and_then(|()| same("total_tokens"))
        }
        "schema of every chunk as stated" => chunk_schema(&chunks),
        "one id for all chunks" => {
            let first = |name: &str| chunks.iter().all(|chunk| chunk[name] == chunks[0][name] && !chunk[name].is_null());
            holds("id, created or model differ", first("id") && first("created") && first("model"))
        }
        "last data line holds error" => {
            holds("no error event at the end", chunks.last().is_some_and(|last| last["error"]["message"].is_string()))
        }
        "no finish_reason 'stop'" => equal("finish reasons", answer.finishes(), vec![]),
        "code context_length_exceeded, application/json" => {
            equal("code", answer.error_code().as_str(), "context_length_exceeded")?;
            equal("type", answer.header("content-type"), Some("application/json"))
        }
        "headers < 100 ms after admission" => holds(&format!("{:?}", answer.head_after), answer.head_after < Duration::from_millis(250)),
        "longest silence <= keep-alive interval + 1 s" => {
            holds(&format!("{:?}", answer.longest_silence()), answer.longest_silence() < Duration::from_millis(1500))
        }
        "lines starting with ':' hold no JSON" => {
            let text = answer.text();
            let comments: Vec<_> = text.lines().filter(|line| line.starts_with(':')).collect();
            holds("no comment came", !comments.is_empty())?;
            holds("JSON in a comment", comments.iter().all(|line| !line.contains('{')))
        }
        "as above" if run.case.id == "ST-12b" => super::special::freed(run.server),
        "prefill stops within one chunk" => super::special::freed(run.server),
        "after the close: vllm:num_requests_running 0 within 1 s, generation_tokens_total stops" => super::special::freed(run.server),
        _ => unknown(check),
    }
}

fn chunk_schema(chunks: &[Value]) -> Verdict {
    for (place, chunk) in chunks.iter().enumerate() {
        equal("object", chunk["object"].clone(), json!("chat.completion.chunk"))?;
        let choice = &chunk["choices"][0];
        let delta = choice["delta"].as_object().ok_or("a choice without delta")?;
        equal("index", choice["index"].clone(), json!(0))?;
        equal("role", delta.get("role").cloned(), (place == 0).then(|| json!("assistant")))?;
        holds("tool_calls: null", delta.get("tool_calls").is_none())?;
        let last = place + 1 == chunks.len();
        equal("finish_reason", choice.get("finish_reason").cloned(), Some(if last { json!("stop") } else { Value::Null }))?;
    }
    Ok(())
}

fn validation(run: &Run, check: &str) -> Verdict {
    let answer = run.first();
    let body = answer.json();
    let logprobs = &body["choices"][0]["logprobs"];
    let count = |name: &str| logprobs[name].as_array().map_or(0, Vec::len);
    match check {
        "200 only with content == 'The capital of France is Paris.'" | "as c" => run.content_if_200(FRANCE),
        "number out of range, not inf" => run.names("out of range"),
        "200: choices index 0 and 1" => run.on_success(|| {
            let indexes: Vec<_> = body["choices"].as_array().into_iter().flatten().map(|choice| choice["index"].as_u64()).collect();
            equal("indexes", indexes, vec![Some(0), Some(1)])
        }),
        "200 only with finite logprobs" => Ok(()),
        "200: completion_tokens 0; never 16 tokens" => run.on_success(|| run.usage("completion_tokens", 0).and_then(|()| run.content(""))),
        "200: 15 token entries, first logprob null" => run.on_success(|| {
            equal("tokens", count("tokens"), 15)?;
            equal("first", logprobs["token_logprobs"][0].clone(), Value::Null)
        }),
        "200: content == 'The capital of France is Paris.'; 400: numbers named; RSS flat" => {
            run.content_if_200(FRANCE).and_then(|()| run.memory_flat())
        }
        "len(tokens)==len(token_logprobs)==len(text_offset)==16 (15 if BOS is hidden, documented)" => {
            equal("entries", [count("tokens"), count("token_logprobs"), count("text_offset"), count("top_logprobs")], [16; 4])?;
            let offsets: Vec<_> = logprobs["text_offset"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
            holds(&format!("offsets fall: {offsets:?}"), offsets.is_sorted() && offsets[0] == 0 && offsets[15] == 14)
        }
        "token_logprobs[0] is null, others <= 0 and finite" => {
            let list = logprobs["token_logprobs"].as_array().cloned().unwrap_or_default();
            let (first, rest) = list.split_first().ok_or("no log-probabilities")?;
            equal("first", first.clone(), Value::Null)?;
            holds("one is positive or no number", rest.iter().all(|one| one.as_f64().is_some_and(|one| one <= 0.0)))
        }
        "names min_tokens and max_tokens" => run.names("min_tokens").and_then(|()| run.names("max_tokens")),
        "says images are not supported; no outgoing request" => {
            let message = answer.error_message();
            holds(&message, message.contains("image") && message.contains("text"))
        }
        "200: prompt_tokens equal those with role system" => run.on_success(|| {
            let mut messages = run.case.body["messages"].clone();
            messages[0]["role"] = json!("system");
            let other = run.again(json!({"messages": messages}));
            equal("prompt tokens", answer.usage()["prompt_tokens"].clone(), other.usage()["prompt_tokens"].clone())
        }),
        "code is not context_length_exceeded" => holds("the code", answer.error_code() != "context_length_exceeded"),
        "code == context_length_exceeded" => equal("code", answer.error_code().as_str(), "context_length_exceeded"),
        "message holds 70 and 64" => run.names("70").and_then(|()| run.names("64")),
        "200: two choices, completion_tokens = sum" => run.on_success(|| {
            equal("texts", answer.texts(), vec![FRANCE.to_string(); 2])?;
            run.usage("completion_tokens", 20).and_then(|()| run.usage("prompt_tokens", 17))
        }),
        "200: three texts not all equal; the same three on repeat" => run.on_success(|| {
            let texts = answer.texts();
            holds(&format!("all equal: {texts:?}"), texts.len() == 3 && texts.iter().any(|text| *text != texts[0]))?;
            equal("the same again", run.again(json!({})).texts(), texts)
        }),
        "data[0].max_model_len equals the limit at which requests are refused" => {
            let limit = body["data"][0]["max_model_len"].as_u64().ok_or("no max_model_len")? as usize;
            let ask = |tokens: usize| run.post("/v1/completions", &json!({"prompt": vec![261; tokens], "max_tokens": 1, "temperature": 0}));
            equal("at the limit", ask(limit - 1).status, 200)?;
            let over = ask(limit);
            equal("over it", (over.status, over.error_code().as_str()), (400, "context_length_exceeded"))
        }
        "Allow: POST (OPTIONS may follow)" => holds("Allow", answer.header("allow").is_some_and(|allow| allow.starts_with("POST"))),
        "no body" => holds("a body", answer.body.is_empty()),
        _ => unknown(check),
    }
}

fn sampling(run: &Run, check: &str) -> Verdict {
    let answer = run.first();
    match check {
        "all logprobs finite and <= 0" => {
            let all = run.logprobs();
            holds(&format!("{all:?}"), !all.is_empty() && all.iter().all(|one| *one <= 0.0 && one.is_finite()))?;
            equal("count", all.len() as u64, answer.usage()["completion_tokens"].as_u64().unwrap_or(0))
        }
        "text equal for all fixtures of this case" => {
            let plain = run.post("/v1/completions", &json!({"prompt": "1, 2, 3, 4, 5,", "temperature": 1, "max_tokens": 24, "seed": 7}));
            equal("text", answer.content(), plain.content())
        }
        "same text alone, with 7 others, per mode" => super::special::beside_others(run).and_then(|()| run.equal_in_all_modes()),
        "0 is a seed, not 'none': repeatable" | "repeatable" => equal("again", run.again(json!({})).content(), answer.content()),
        "never equal to seed 0 by wrap-around" => {
            run.on_success(|| holds("equal to seed 0", run.again(json!({"seed": 0})).content() != answer.content()))
        }
        "200: 'Paris' not via 2323 (logprobs tokens checked)" => run.on_success(|| {
            let with = run.again(json!({"logprobs": true})).json();
            let tokens = with["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default();
            holds("\" Par\" was produced", !tokens.is_empty() && tokens.iter().all(|entry| entry["token"] != " Par"))
        }),
        "body parses with a strict JSON parser" | "strict JSON" => {
            serde_json::from_slice::<Value>(&answer.body).map(|_| ()).map_err(|error| error.to_string())
        }
        "equal in all modes" => run.equal_in_all_modes(),
        "36 or 37 entries (end token documented)" => {
            let count = run.logprobs().len();
            holds(&format!("{count} entries"), (36..=37).contains(&count))?;
            equal("entries per completion token", count as u64, answer.usage()["completion_tokens"].as_u64().unwrap_or(0))
        }
        "equal in off, chain, tree:32" => {
            let of = |mode: &str| run.again(json!({"speculation": mode})).json()["choices"][0]["logprobs"].clone();
            equal("chain", of("chain"), of("off")).and_then(|()| equal("tree:32", of("tree:32"), of("off")))
        }
        "not all 0.0" => holds("all are 0", run.logprobs().iter().any(|one| *one < 0.0)),
        "no entry for a token whose text starts after the match" => {
            equal("content", answer.content().as_str(), "The first ten prime numbers are 2, 3, 5, 7, 1")?;
            let chunks = answer.chunks();
            let entries =
                chunks.iter().flat_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default());
            let text: String = entries.filter_map(|entry| entry["token"].as_str().map(str::to_owned)).collect();
            holds(&format!("entries spell {text:?}"), text == "The first ten prime numbers are 2, 3, 5, 7, 11, 13")
        }
        "equal text cold, warm, with speculation off" => {
            let off = run.again(json!({"speculation": "off"})).content();
            equal("texts", run.answers.iter().map(Answer::content).collect(), vec![off; run.answers.len()])
        }
        "200: content validates (or finish length with a valid prefix)" => {
            for answer in &run.answers {
                let value: Value = match serde_json::from_str(&answer.content()) {
                    Ok(value) => value,
                    Err(error) if error.is_eof() && answer.finishes() == ["length"] => continue,
                    Err(error) => return Err(format!("{error} in {:?}", answer.content())),
                };
                let good =
                    value["state"] == "done" && value["nums"].as_array().is_some_and(|list| list.len() == 3) && value["job"].is_i64();
                holds(&answer.content(), good)?;
            }
            run.equal_in_all_modes()
        }
        "no error-level log line" => {
            let log = run.server.log.lock().unwrap().clone();
            holds(&log, !log.contains("ERROR"))
        }
        "same text on all repeats and with the cache off" => {
            let wanted = run.again(json!({"speculation": "off"})).content();
            equal("texts", run.answers.iter().map(Answer::content).collect(), vec![wanted; run.answers.len()])
        }
        "prompt_tokens_details.cached_tokens < prompt_tokens" => run.answers.iter().try_for_each(|answer| {
            let usage = answer.usage();
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().ok_or("cached_tokens is not told")?;
            holds(&usage.to_string(), cached < usage["prompt_tokens"].as_u64().unwrap_or(0))
        }),
        "answer in < 1 s, names KV capacity" => {
            holds(&format!("{:?}", answer.total), answer.total < Duration::from_secs(1)).and_then(|()| run.names("KV capacity"))
        }
        "pool runs out in mid-generation: finish length, an error event, or refusal up front; others go on" => {
            run.on_success(|| run.finish("length"))
        }
        _ => unknown(check),
    }
}

fn limits(run: &Run, check: &str) -> Verdict {
    let answer = run.first();
    match check {
        "200: content == 'The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23, 29.'; 429: Retry-After present" => {
            equal("answers", run.answers.len(), run.case.times.unwrap_or(1))?;
            run.answers.iter().try_for_each(|answer| match answer.status {
                200 => equal("content", answer.content().as_str(), PRIMES),
                _ => holds("no Retry-After", answer.header("retry-after").is_some()),
            })
        }
        "400 names 60, 5, 64; or 4 tokens with finish length" => match answer.status {
            200 => run.usage("completion_tokens", 4).and_then(|()| run.finish("length")),
            _ => ["60", "5", "64"].iter().try_for_each(|number| run.names(number)),
        },
        "code context_length_exceeded" => equal("code", answer.error_code().as_str(), "context_length_exceeded"),
        "within 1 s of the fault" => Ok(()),
        "while loading; body says loading and progress" => {
            equal("status", run.field("status"), json!("loading"))?;
            holds("no progress", run.field("progress").as_str().is_some_and(|progress| !progress.is_empty()))
        }
        "Retry-After or Connection: close" => {
            holds("neither", answer.header("retry-after").is_some() || answer.header("connection") == Some("close"))
        }
        "no detail beyond status" => equal("body", answer.json(), json!({"status": "ok"})),
        "RSS flat" => run.memory_flat(),
        "200 only if content matches" => run.on_success(|| equal("content", answer.content().as_str(), "\"good day to you!\"")),
        "200: content is a JSON value or a valid prefix; not 64 digits" => run.on_success(|| {
            let text = answer.content();
            let whole = serde_json::from_str::<Value>(&text).is_ok();
            let prefix = answer.finishes() == ["length"] && serde_json::from_str::<Value>(&text).is_err_and(|error| error.is_eof());
            holds(&text, (whole || prefix) && !text.bytes().all(|byte| byte.is_ascii_digit()))
        }),
        // Judged where they are run, since they need more than an answer.
        "see case"
        | "victim's largest inter-event gap <= documented bound; victim text unchanged"
        | "non-decreasing over the scrapes"
        | "no client-chosen text (model, user) as a label value"
        | "generation_tokens_total differs between two scrapes 1 s apart during a stream" => Ok(()),
        _ => unknown(check),
    }
}
