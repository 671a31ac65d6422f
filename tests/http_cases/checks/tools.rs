//! Tools: calls that came back as the model wrote them, ids and arguments.

use serde_json::Value;

use super::{Run, Verdict, equal, holds, unknown};
use crate::case::FRANCE;

pub fn judge(run: &Run, check: &str) -> Verdict {
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
