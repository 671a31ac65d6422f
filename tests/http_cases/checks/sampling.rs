//! Sampling, structured output and prefixes kept: the same text however it was speculated, seeded or cached.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Answer, Run, Verdict, equal, holds, unknown};
use crate::special::beside_others;

pub fn judge(run: &Run, check: &str) -> Verdict {
    let answer = run.first();
    match check {
        "all logprobs finite and <= 0" => {
            let all = run.logprobs(answer);
            holds(&format!("{all:?}"), !all.is_empty() && all.iter().all(|one| *one <= 0.0 && one.is_finite()))?;
            equal("count", all.len() as u64, answer.usage()["completion_tokens"].as_u64().unwrap_or(0))
        }
        "text equal for all fixtures of this case" => {
            let plain = run.post("/v1/completions", &json!({"prompt": "1, 2, 3, 4, 5,", "temperature": 1, "max_tokens": 24, "seed": 7}));
            equal("text", answer.content(), plain.content())
        }
        "same text alone, with 7 others, per mode" => beside_others(run).and_then(|()| run.equal_in_all_modes()),
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
            let count = run.logprobs(answer).len();
            holds(&format!("{count} entries"), (36..=37).contains(&count))?;
            equal("entries per completion token", count as u64, answer.usage()["completion_tokens"].as_u64().unwrap_or(0))
        }
        "equal in off, chain, tree:32" => {
            let of = |mode: &str| run.again(json!({"speculation": mode})).json()["choices"][0]["logprobs"].clone();
            equal("chain", of("chain"), of("off")).and_then(|()| equal("tree:32", of("tree:32"), of("off")))
        }
        "not all 0.0" => holds("all are 0", run.logprobs(answer).iter().any(|one| *one < 0.0)),
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
