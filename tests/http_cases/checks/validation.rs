//! Requests that are wrong or unusual: named by field and limit, or answered as asked.

use serde_json::{Value, json};

use super::{Run, Verdict, equal, holds, unknown};
use crate::case::FRANCE;

pub fn judge(run: &Run, check: &str) -> Verdict {
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
        "200 only with finite logprobs" => run.on_success(|| {
            let all = run.logprobs(&run.again(json!({"logprobs": true})));
            holds(&format!("{all:?}"), !all.is_empty() && all.iter().all(|one| *one <= 0.0 && one.is_finite()))
        }),
        "no allocation" => equal("status", answer.status, 400).and_then(|()| run.memory_flat()),
        "never ignored" => equal("status", answer.status, 400).and_then(|()| run.names("best_of")),
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
