//! Tokenizer and chat template: what text becomes which ids, and what is billed for it.

use std::time::Duration;

use serde_json::json;

use super::{Run, Verdict, equal, holds, unknown};
use crate::case::FRANCE;

pub fn judge(run: &Run, check: &str) -> Verdict {
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
