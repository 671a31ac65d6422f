//! What the server promises whatever the engine does: parsing of answers, faults in mid-stream, limits, clients that leave.
//! A simulated engine plays the scripts; the real binary is tested in `http_cases.rs`.

#[path = "http_support/mod.rs"]
mod http_support;
#[path = "http_support/sim.rs"]
mod sim;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use http_support::wire::{Answer, Leave, Request, exchange};
use kdtree::engine::contract::{FailureKind, FinishReason};
use kdtree::engine::handle::Health;
use kdtree::server::ServerConfig;
use serde_json::{Value, json};
use sim::{Setup, Sim, Step, start};

const SECTION: &str = "<|tool_calls_section_begin|>";
const SECTION_END: &str = "<|tool_calls_section_end|>";
const CALL: &str = "<|tool_call_begin|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const CALL_END: &str = "<|tool_call_end|>";
const END: &str = "<|im_end|>";

fn say(words: &[&'static str]) -> Step {
    Step::Say(words.to_vec())
}

fn scripted(steps: Vec<Step>) -> Sim {
    start(Setup::default(), move |_| steps.clone())
}

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "k26-mini", "messages": [{"role": "user", "content": "x"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}])
}

fn post(sim: &Sim, body: &Value) -> Answer {
    exchange(sim.address, &Request::post("/v1/chat/completions", body), Leave::Never).unwrap()
}

fn until(what: &str, most: Duration, mut good: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !good() {
        assert!(begun.elapsed() < most, "{what} not within {most:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn metric(sim: &Sim, name: &str) -> f64 {
    let text = exchange(sim.address, &Request::get("/metrics"), Leave::Never).unwrap().text();
    let line = text.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
}

#[test]
fn a_tool_section_inside_the_reasoning_is_a_call() {
    let feeds = [
        vec!["plan", SECTION, CALL, "functions.get:0", ARGUMENTS, "{\"a\":", "1}", CALL_END, SECTION_END, END],
        vec!["plan", CALL, "functions.get:0", ARGUMENTS, "{\"a\":", "1}", CALL_END, END],
        vec!["plan", SECTION, CALL, "functions.get:0", ARGUMENTS, "{\"a\":", "1}", CALL_END, SECTION_END, " and more", END],
        vec![
            "plan",
            "<|tool_call_section_begin|>",
            CALL,
            "functions.get:0",
            ARGUMENTS,
            "{\"a\":",
            "1}",
            CALL_END,
            "<|tool_call_section_end|>",
            END,
        ],
    ];
    for feed in feeds {
        let sim = scripted(feed.iter().map(|word| say(&[word])).collect());
        let whole = post(&sim, &chat(json!({"tools": weather()}))).json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"]["reasoning_content"], "plan", "{feed:?}");
        assert_eq!(choice["message"]["reasoning"], "plan");
        assert_eq!(choice["message"]["content"], Value::Null);
        let call = json!([{"id": "functions.get:0", "type": "function", "function": {"name": "get", "arguments": "{\"a\":1}"}}]);
        assert_eq!(choice["message"]["tool_calls"], call);
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert!(!whole.to_string().contains("<|"), "{whole}");
    }
}

#[test]
fn nothing_to_go_on_from_is_refused_by_name_and_whole_numbers_are_ids() {
    let sim = scripted(vec![say(&["Hi"]), Step::End(FinishReason::Stop)]);
    let send = |path, body| exchange(sim.address, &Request::post(path, &body), Leave::Never).unwrap();
    for prompt in [json!(""), json!(["Hello", ""])] {
        let answer = send("/v1/completions", json!({"prompt": prompt, "add_special_tokens": false}));
        assert_eq!((answer.status, answer.json()["error"]["param"].clone()), (400, json!("prompt")), "{}", answer.text());
    }
    assert_eq!(send("/v1/completions", json!({"prompt": ""})).status, 200);
    assert_eq!(send("/detokenize", json!({"tokens": [261.0, 262]})).text(), send("/detokenize", json!({"tokens": [261, 262]})).text());
}

#[test]
fn a_streamed_call_ends_with_one_finish_reason_then_usage_then_done() {
    let feed = ["plan", "</think>", "On it.", SECTION, CALL, "functions.get:0", ARGUMENTS, "{\"a\":", "1}", CALL_END, SECTION_END, END];
    let sim = scripted(feed.iter().map(|word| say(&[word])).collect());
    let answer = post(&sim, &chat(json!({"tools": weather(), "stream": true, "stream_options": {"include_usage": true}})));
    assert_eq!(answer.reasoning(), "plan");
    assert_eq!(answer.content(), "On it.");
    assert_eq!(answer.finishes(), ["tool_calls"]);
    let chunks = answer.chunks();
    let calls: Vec<&Value> = chunks.iter().filter_map(|chunk| chunk.pointer("/choices/0/delta/tool_calls/0")).collect();
    assert_eq!(calls[0]["id"], "functions.get:0");
    assert_eq!(calls[0]["function"], json!({"name": "get", "arguments": ""}));
    assert!(calls[1..].iter().all(|call| call.get("id").is_none() && call["function"].get("name").is_none() && call["index"] == 0));
    let arguments: String = calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(arguments, "{\"a\":1}");
    let events = answer.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert_eq!(chunks.last().unwrap()["choices"], json!([]));
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(chunks.last().unwrap()["metrics"]["speculative_decoding"]["mean_acceptance_length"], 2.5);
    assert_eq!(answer.usage()["completion_tokens_details"]["reasoning_tokens"], 1);
}

#[test]
fn a_failure_in_mid_stream_is_an_error_event_and_no_end() {
    let sim = scripted(vec![say(&["</think>", "Hel"]), Step::Fail(FailureKind::Model, "NaN in the logits"), Step::End(FinishReason::Stop)]);
    let answer = post(&sim, &chat(json!({"stream": true})));
    assert_eq!(answer.status, 200);
    assert!(answer.finishes().is_empty());
    let last: Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
    assert_eq!(last["error"], json!({"message": "NaN in the logits", "type": "server_error", "param": null, "code": "internal_error"}));
    let whole = post(&sim, &chat(json!({})));
    assert_eq!((whole.status, whole.error_message()), (500, "NaN in the logits".into()));
    let refused = scripted(vec![Step::Fail(FailureKind::Request, "cannot be met")]);
    assert_eq!(post(&refused, &chat(json!({}))).status, 400);
}

#[test]
fn the_engines_death_turns_health_red_ends_streams_with_an_error_and_the_process() {
    let config = ServerConfig { port: 0, death_grace_s: 1.0, ..ServerConfig::default() };
    let sim = start(Setup { config, ..Setup::default() }, |request| match request.max_tokens {
        7 => vec![Step::Sleep(Duration::from_millis(200)), Step::Die],
        _ => vec![say(&["</think>", "a"]), Step::Chatter(10_000, Duration::from_millis(5))],
    });
    let address = sim.address;
    let stream = std::thread::spawn(move || {
        exchange(address, &Request::post("/v1/chat/completions", &chat(json!({"stream": true}))), Leave::Never).unwrap()
    });
    let lost = post(&sim, &chat(json!({"max_tokens": 7})));
    assert_eq!(lost.status, 503);
    until("health 503", Duration::from_secs(1), || exchange(address, &Request::get("/health"), Leave::Never).unwrap().status == 503);
    assert_eq!(post(&sim, &chat(json!({}))).status, 503);
    until("an end with an error", Duration::from_secs(3), || sim.ended.lock().unwrap().is_some());
    assert!(sim.ended.lock().unwrap().clone().unwrap().unwrap_err().contains("engine"));
    // The simulated threads of other requests go on; the real engine's senders are gone with its thread.
    drop(stream);
}

#[test]
fn silence_is_filled_with_comments_and_headers_come_at_once() {
    let config = ServerConfig { port: 0, keep_alive_s: 0.1, ..ServerConfig::default() };
    let script = |_: &_| vec![Step::Sleep(Duration::from_millis(1000)), say(&["</think>", "a", END])];
    let sim = start(Setup { config, ..Setup::default() }, script);
    let answer = post(&sim, &chat(json!({"stream": true})));
    assert!(answer.head_after < Duration::from_millis(300), "{:?}", answer.head_after);
    assert!(answer.longest_silence() < Duration::from_millis(500), "{:?}", answer.longest_silence());
    let comments = answer.text().split("\n\n").filter(|block| block.starts_with(':')).count();
    assert!((5..=11).contains(&comments), "{comments}");
    assert_eq!(answer.content(), "a");
    let whole = post(&sim, &chat(json!({})));
    assert!(serde_json::from_slice::<Value>(&whole.body).is_ok(), "comments only belong in streams");
}

#[test]
fn a_client_that_leaves_cancels_its_request_streamed_or_not() {
    let sim = scripted(vec![say(&["</think>"]), Step::Chatter(100_000, Duration::from_millis(2))]);
    for (round, (body, leave)) in [
        (json!({"stream": true}), Leave::AfterEvents(3)),
        (json!({"stream": false}), Leave::After(Duration::from_millis(100))),
        (json!({"stream": true, "n": 3}), Leave::AfterEvents(5)),
    ]
    .into_iter()
    .enumerate()
    {
        exchange(sim.address, &Request::post("/v1/chat/completions", &chat(body)), leave).unwrap();
        until("nothing running", Duration::from_secs(1), || sim.engine.running() == 0);
        assert!(sim.seen.cancelled.load(Ordering::SeqCst) > round);
    }
    assert_eq!(sim.seen.cancelled.load(Ordering::SeqCst), 5);
    assert_eq!(metric(&sim, "vllm:request_success_total{model_name=\"k26-mini\",engine=\"0\",finished_reason=\"abort\"}"), 5.0);
}

#[test]
fn a_reader_that_takes_nothing_is_cut_and_its_request_cancelled() {
    let config = ServerConfig { port: 0, write_timeout_s: 0.3, ..ServerConfig::default() };
    let sim =
        start(Setup { config, context: 1 << 20, ..Setup::default() }, |_| vec![say(&["</think>"]), Step::Chatter(1 << 20, Duration::ZERO)]);
    let request = Request::post("/v1/chat/completions", &chat(json!({"stream": true})));
    let mut stream = TcpStream::connect(sim.address).unwrap();
    stream.write_all(&request.bytes(sim.address)).unwrap();
    until("the request began", Duration::from_secs(5), || sim.seen.started.load(Ordering::SeqCst) == 1);
    until("the silent reader's request was cancelled", Duration::from_secs(20), || sim.seen.cancelled.load(Ordering::SeqCst) == 1);
    drop(stream);
}

#[test]
fn a_schema_that_admits_nothing_or_too_much_is_refused_before_the_engine_sees_it() {
    let sim = scripted(vec![say(&["</think>", "1", END])]);
    let names: serde_json::Map<_, _> = (0..2001).map(|i| (format!("k{i}"), json!({}))).collect();
    for (schema, why) in [
        (json!({"$ref": "#"}), "nothing fits it"),
        (json!({"type": "object", "properties": names}), "properties"),
        (json!({"multipleOf": 1_000_003}), "multipleOf"),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let answer = post(&sim, &chat(json!({"response_format": format})));
        assert_eq!(answer.status, 400, "{}", answer.text());
        let message = answer.error_message();
        assert!(message.contains("cannot be honoured") && message.contains(why), "{message}");
    }
    assert_eq!(sim.seen.started.load(Ordering::SeqCst), 0);
}

#[test]
fn grammars_are_compiled_once_a_request_and_hold_nobody_up() {
    let setup = Setup { context: 1 << 17, queue: 128, ..Setup::default() };
    let sim = start(setup, |_| vec![say(&["</think>", "a", END])]);
    let one =
        |i: usize| json!({"type": "function", "function": {"name": format!("f{i}"), "parameters": weather()[0]["function"]["parameters"]}});
    let tools: Vec<Value> = (0..400).map(one).collect();
    let body = chat(json!({"tools": tools, "n": 64}));
    let address = sim.address;
    let asked = std::thread::spawn(move || exchange(address, &Request::post("/v1/chat/completions", &body), Leave::Never).unwrap());
    let begun = Instant::now();
    while !asked.is_finished() {
        let health = exchange(address, &Request::get("/health"), Leave::Never).unwrap();
        assert!(health.status == 200 && health.total < Duration::from_secs(3), "{:?}", health.total);
    }
    assert_eq!(asked.join().unwrap().texts(), vec!["a"; 64]);
    assert!(begun.elapsed() < Duration::from_secs(12), "{:?}", begun.elapsed());
}

#[test]
fn a_full_queue_is_429_with_retry_after_and_json() {
    let setup = Setup { queue: 1, running: 1, ..Setup::default() };
    let sim = start(setup, |_| vec![say(&["</think>"]), Step::Sleep(Duration::from_millis(700)), say(&["a", END])]);
    let address = sim.address;
    let ask = move || exchange(address, &Request::post("/v1/chat/completions", &chat(json!({"stream": true}))), Leave::Never).unwrap();
    let others: Vec<_> = (0..2)
        .map(|count| {
            let asked = std::thread::spawn(ask);
            until("taken", Duration::from_secs(1), || sim.engine.running() + sim.engine.waiting() == count + 1);
            until("running", Duration::from_secs(1), || sim.engine.running() == 1);
            asked
        })
        .collect();
    let refused = ask();
    assert_eq!(refused.status, 429);
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(refused.header("content-type"), Some("application/json"));
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    others.into_iter().for_each(|other| assert_eq!(other.join().unwrap().content(), "a"));
}

#[test]
fn one_connection_too_many_is_told_so_and_a_freed_one_is_used() {
    let config = ServerConfig { port: 0, max_connections: 2, ..ServerConfig::default() };
    let sim = start(Setup { config, ..Setup::default() }, |_| vec![say(&["</think>"]), Step::Chatter(1000, Duration::from_millis(10))]);
    let ask = Request::post("/v1/chat/completions", &chat(json!({"stream": true})));
    let held: Vec<_> = (1..=2)
        .map(|count| {
            let mut stream = TcpStream::connect(sim.address).unwrap();
            stream.write_all(&ask.bytes(sim.address)).unwrap();
            until("it streams", Duration::from_secs(2), || sim.engine.running() == count);
            stream
        })
        .collect();
    until("the third is refused", Duration::from_secs(2), || {
        let answer = exchange(sim.address, &Request::get("/health"), Leave::Never).unwrap();
        answer.status == 503 && answer.header("retry-after").is_some()
    });
    assert_eq!(sim.engine.running(), 2, "nobody who is served makes room");
    drop(held);
    until("served again", Duration::from_secs(2), || {
        exchange(sim.address, &Request::get("/health"), Leave::Never).is_ok_and(|a| a.status == 200)
    });
}

/// Asks for `/health` on a connection that is kept; the status, or `None` where the server has closed it.
fn health_on(stream: &mut TcpStream) -> Option<u16> {
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").ok()?;
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    while !text.contains("\r\n\r\n{") {
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return None,
            Ok(count) => text.push_str(&String::from_utf8_lossy(&buffer[..count])),
        }
    }
    text.split(' ').nth(1)?.parse().ok()
}

#[test]
fn connections_without_a_request_keep_nobody_out_and_the_longest_silent_makes_room() {
    let config = ServerConfig { port: 0, max_connections: 3, ..ServerConfig::default() };
    let sim = start(Setup { config, ..Setup::default() }, |_| vec![say(&["</think>", "a", END])]);
    // One says nothing at all, one half a head, and one has been answered since.
    let silent = TcpStream::connect(sim.address).unwrap();
    let mut half = TcpStream::connect(sim.address).unwrap();
    half.write_all(b"GET /health HTTP/1.1\r\nHos").unwrap();
    let mut kept = TcpStream::connect(sim.address).unwrap();
    assert_eq!(health_on(&mut kept), Some(200));
    let others: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = TcpStream::connect(sim.address).unwrap();
            assert_eq!(health_on(&mut stream), Some(200), "room is made for who comes last");
            stream
        })
        .collect();
    for mut closed in [silent, half] {
        closed.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        assert!(matches!(closed.read(&mut [0; 16]), Ok(0)), "the two that were silent longest are closed");
    }
    assert_eq!(health_on(&mut kept), Some(200), "who has asked since keeps its connection");
    for mut stream in others {
        assert_eq!(health_on(&mut stream), Some(200));
    }
    // However many they are.
    let idle: Vec<_> = (0..100).map(|_| TcpStream::connect(sim.address).unwrap()).collect();
    assert_eq!(exchange(sim.address, &Request::get("/health"), Leave::Never).unwrap().status, 200);
    drop(idle);
}

#[test]
fn large_slow_and_broken_requests_are_refused_within_bounds() {
    let config = ServerConfig {
        port: 0,
        max_body_bytes: 100_000,
        body_timeout_s: 0.3,
        header_timeout_s: 0.3,
        max_header_bytes: 16_384,
        ..ServerConfig::default()
    };
    let sim = start(Setup { config, ..Setup::default() }, |_| vec![say(&["</think>", "a", END])]);
    let mut large = Request::post("/v1/chat/completions", &json!({}));
    large.body = vec![b' '; 5_000_000];
    let answer = exchange(sim.address, &large, Leave::Never).unwrap();
    assert_eq!((answer.status, answer.error_code()), (413, "body_too_large".into()));

    let slow = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(sim.address).unwrap();
        stream.write_all(bytes).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut text = String::new();
        let begun = Instant::now();
        let _ = stream.read_to_string(&mut text);
        assert!(begun.elapsed() < Duration::from_secs(3));
        text
    };
    let body = slow(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{");
    assert!(body.starts_with("HTTP/1.1 408"), "{body}");
    let head = slow(b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ");
    assert!(head.is_empty() || head.starts_with("HTTP/1.1 408"), "{head}");
    let junk = slow(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 \r\n\r\n");
    assert!(junk.starts_with("HTTP/1.1 400"), "{junk}");
    let wide = exchange(sim.address, &Request::get("/health").header("X-Fill", &"a".repeat(1_000_000)), Leave::Never).unwrap();
    assert!([431, 400].contains(&wide.status), "{}", wide.status);
    let mut many = Request::get("/health");
    many.headers = (0..1000).map(|index| (format!("x-{index}"), "1".into())).collect();
    assert!([431, 400].contains(&exchange(sim.address, &many, Leave::Never).unwrap().status));
    let form =
        Request { headers: vec![("Content-Type".into(), "text/plain".into())], ..Request::post("/v1/chat/completions", &chat(json!({}))) };
    assert_eq!(exchange(sim.address, &form, Leave::Never).unwrap().status, 415);
    assert_eq!(post(&sim, &chat(json!({}))).content(), "a");
}

#[test]
fn while_loading_everything_but_health_and_the_page_waits() {
    let setup = Setup { health: Health::Loading("shard 1 of 2".into()), ..Setup::default() };
    let sim = start(setup, |_| vec![say(&["</think>", "a", END])]);
    let health = exchange(sim.address, &Request::get("/health"), Leave::Never).unwrap();
    assert_eq!((health.status, health.json()), (503, json!({"status": "loading", "progress": "shard 1 of 2"})));
    let refused = post(&sim, &chat(json!({})));
    assert_eq!(refused.status, 503);
    assert!(refused.header("retry-after").is_some());
    assert_eq!(exchange(sim.address, &Request::get("/"), Leave::Never).unwrap().status, 200);
    assert_eq!(exchange(sim.address, &Request::get("/v1/models"), Leave::Never).unwrap().status, 200);
}

#[test]
fn a_taken_port_is_named_in_one_line() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = kdtree::server::Bound::bind(&ServerConfig { port, ..ServerConfig::default() }).err().unwrap();
    let line = format!("{error:#}");
    assert!(line.contains(&port.to_string()) && line.contains("in use") && !line.contains('\n'), "{line}");
}

#[test]
fn choices_of_one_request_are_kept_apart_and_counted_once() {
    let sim = scripted(vec![say(&["</think>", "a"]), say(&["b", END])]);
    let whole = post(&sim, &chat(json!({"n": 3})));
    assert_eq!(whole.texts(), ["ab", "ab", "ab"]);
    let usage = whole.usage();
    let prompt = sim.seen.requests.lock().unwrap()[0].0.len();
    assert_eq!((usage["prompt_tokens"].as_u64().unwrap() as usize, usage["completion_tokens"].as_u64()), (prompt, Some(12)));
    let stream = post(&sim, &chat(json!({"n": 3, "stream": true})));
    assert_eq!(stream.texts(), ["ab", "ab", "ab"]);
    assert_eq!(stream.finishes(), ["stop", "stop", "stop"]);
    assert_eq!(stream.events().iter().filter(|event| *event == "[DONE]").count(), 1);
}
