//! Load, length, health, metrics and security: limits that are kept and named.

use serde_json::{Value, json};

use super::{Run, Verdict, equal, holds, unknown};
use crate::case::PRIMES;

pub fn judge(run: &Run, check: &str) -> Verdict {
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
        | "within 1 s of the fault"
        | "victim's largest inter-event gap <= documented bound; victim text unchanged"
        | "non-decreasing over the scrapes"
        | "no client-chosen text (model, user) as a label value"
        | "generation_tokens_total differs between two scrapes 1 s apart during a stream" => Ok(()),
        _ => unknown(check),
    }
}
