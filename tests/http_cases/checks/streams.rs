//! Reasoning and streams: what a stream holds, in which order, and what it leaves behind.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Run, Verdict, equal, holds, unknown};
use crate::case::france;
use crate::special::freed;

pub fn judge(run: &Run, check: &str) -> Verdict {
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
        "as above" if run.case.id == "ST-12b" => freed(run.server),
        "prefill stops within one chunk" => freed(run.server),
        "after the close: vllm:num_requests_running 0 within 1 s, generation_tokens_total stops" => freed(run.server),
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
