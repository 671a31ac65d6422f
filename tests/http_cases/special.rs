//! Cases that are more than one request and its answer: several clients at once, clients that leave, signals, planted faults.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;

use super::case::{Case, france, primes};
use super::checks::{Run, equal, holds};
use crate::binary::{Binary, Start};
use crate::http_support::wire::{Answer, Leave, Request, exchange};

type Verdict = Result<(), String>;

/// Nothing runs, nothing waits and no slot is held within two seconds, and no token is generated afterwards.
pub fn freed(server: &Binary) -> Verdict {
    let begun = Instant::now();
    let busy = || ["vllm:num_requests_running", "vllm:num_requests_waiting", "kdtree:kv_slots_held"].map(|name| server.metric(name));
    while busy() != [0.0; 3] {
        if begun.elapsed() > Duration::from_secs(2) {
            return Err(format!("running, waiting, held slots are {:?} after 2 s", busy()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let before = server.metric("vllm:generation_tokens_total");
    std::thread::sleep(Duration::from_millis(200));
    equal("tokens generated after the client left", server.metric("vllm:generation_tokens_total"), before)
}

/// Sends `count` requests from `clients` threads.
pub fn flood(address: SocketAddr, clients: usize, count: usize, make: impl Fn(usize) -> (Request, Leave) + Sync) -> Vec<Answer> {
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..clients.min(count) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        return;
                    }
                    let (request, leave) = make(index);
                    let answer = exchange(address, &request, leave).unwrap_or_default();
                    answers.lock().unwrap().push(answer);
                }
            });
        }
    });
    answers.into_inner().unwrap()
}

fn sampled(index: usize) -> Request {
    let more = [
        json!({"top_k": 1}),
        json!({"top_k": 50}),
        json!({"top_k": 5000}),
        json!({"min_p": 0.1}),
        json!({"top_p": 0.5}),
        json!({"logit_bias": {"50": 5}}),
        json!({"seed": 3}),
    ];
    let mut body = primes(more[index % more.len()].clone());
    body["temperature"] = json!(1);
    Request::post("/v1/chat/completions", &body)
}

/// The case's request while seven others with other sampling settings run.
fn with_others(server: &Binary, request: &Request) -> Answer {
    let address = server.address;
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..7).map(|index| scope.spawn(move || exchange(address, &sampled(index), Leave::Never).unwrap())).collect();
        let answer = server.send(request);
        for other in others {
            assert_eq!(other.join().unwrap().status, 200);
        }
        answer
    })
}

pub fn beside_others(run: &Run) -> Verdict {
    equal("text beside others", with_others(run.server, &run.case.request()).content(), run.first().content())
}

/// Runs a case whose `parallel`, `times` or `client` say how. The answers are judged like any other case's.
pub fn answers(case: &Case, server: &Binary) -> Result<Vec<Answer>, String> {
    let address = server.address;
    let request = case.request();
    let once = |leave| exchange(address, &request, leave).map_err(|error| error.to_string());
    match (case.client.as_deref(), case.parallel.as_deref()) {
        (Some("close after 3 chunks"), _) => Ok(vec![once(Leave::AfterEvents(3))?]),
        (Some("close after 300 ms, no answer read"), _) => Ok(vec![once(Leave::After(Duration::from_millis(300)))?]),
        (Some("close 200 ms after sending"), _) => {
            // Headers may have come; what counts is that the client left before an answer was complete.
            let answer = once(Leave::After(Duration::from_millis(200)))?;
            holds("it was answered already", answer.finishes().is_empty())?;
            Ok(vec![Answer::default()])
        }
        (Some("close after a random 0..1500 ms"), _) => storm(case, server).map(|()| vec![Answer::default()]),
        (None, Some("7 requests with other sampling settings at temperature 1")) => {
            Ok((0..5).map(|_| with_others(server, &request)).collect())
        }
        (None, Some("all at once")) => {
            Ok(flood(address, case.times.unwrap_or(1), case.times.unwrap_or(1), |_| (request.clone(), Leave::Never)))
        }
        (None, Some("100 clients")) => Ok(flood(address, 100, case.times.unwrap_or(1), |_| (request.clone(), Leave::Never))),
        (None, Some("victim: primes prompt streamed, ignore_eos, 700 tokens, started 3 s before")) => victim(server, &request),
        (None, Some("with CC-2's load")) => scraped(case, server),
        (None, Some("with a 400-token stream")) => advancing(server, &request),
        (None, None) => (0..case.times.unwrap_or(1)).map(|_| once(Leave::Never)).collect(),
        other => Err(format!("nobody knows how to do {other:?}")),
    }
}

/// Storms of clients that leave at random moments; every 50th stays. `client` and `times` (in all) as in CC-2.
///
/// Memory may grow when rounds, cache slots and threads at the same time first need so much: that is kept, comes irregularly and
/// ends. A leak adds the same in every storm, so the quiet storms tell: the second quietest of six.
fn storm(case: &Case, server: &Binary) -> Verdict {
    let alone = server.send(&case.request()).content();
    let count = case.times.unwrap_or(2000) / STORMS;
    let mut memory = vec![server.memory() as f64];
    for _ in 0..STORMS {
        for answer in leavers(case, server, count) {
            match answer.status {
                200 => equal("a survivor's text", answer.content(), alone.clone())?,
                429 => {}
                other => return Err(format!("a survivor got {other}")),
            }
        }
        freed(server)?;
        memory.push(server.memory() as f64);
    }
    holds("nothing was counted as aborted", server.metric("vllm:request_success_total") > 0.0)?;
    let mut growths: Vec<f64> = memory.windows(2).map(|pair| (pair[1] - pair[0]) / count as f64).collect();
    eprintln!("{}: memory grew by {growths:.0?} bytes a client, to {:.0} MiB", case.id, memory[STORMS] / f64::from(1 << 20));
    growths.sort_by(f64::total_cmp);
    holds(&format!("memory grew by {:.0} bytes a client in the second quietest storm", growths[1]), growths[1] < MOST_KEPT)?;
    let log = server.log.lock().unwrap();
    holds(&log, !log.contains("panicked"))
}

const STORMS: usize = 6;

/// Bytes kept of each client in a quiet storm at most: what a page more or less per thread comes to.
const MOST_KEPT: f64 = 4096.0;

/// A hundred clients at a time that leave at random moments; the answers of those that stay, every 50th.
fn leavers(case: &Case, server: &Binary, count: usize) -> Vec<Answer> {
    let stays = Mutex::new(Vec::new());
    let address = server.address;
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        return;
                    }
                    let moment = Duration::from_millis((index as u64).wrapping_mul(0x9E37_79B9) % 1500);
                    if index.is_multiple_of(50) {
                        stays.lock().unwrap().push(exchange(address, &case.request(), Leave::Never).unwrap_or_default());
                    } else {
                        let _ = exchange(address, &case.request(), Leave::After(moment));
                    }
                }
            });
        }
    });
    stays.into_inner().unwrap()
}

/// A long prompt arrives while a stream runs.
fn victim(server: &Binary, long: &Request) -> Result<Vec<Answer>, String> {
    let stream = primes(json!({"stream": true, "ignore_eos": true, "max_tokens": 700}));
    let request = Request::post("/v1/chat/completions", &stream);
    let alone = server.send(&request);
    let address = server.address;
    let (victim, answer) = std::thread::scope(|scope| {
        let victim = scope.spawn(|| exchange(address, &request, Leave::Never).unwrap());
        let begun = Instant::now();
        while server.metric("vllm:num_requests_running") == 0.0 && begun.elapsed() < Duration::from_secs(3) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let answer = exchange(address, long, Leave::Never).unwrap();
        (victim.join().unwrap(), answer)
    });
    equal("the victim's text", victim.content(), alone.content())?;
    let gap = victim.longest_wait_for_an_event();
    // Documented: one chunk of 512 prompt tokens and one round. The prompt has 40 chunks, the last of which take about twice their
    // average; an eighth of the whole leaves room for what else the machine does.
    let most = answer.total / 8 + Duration::from_millis(250);
    holds(&format!("the victim waited {gap:?} of {:?}", answer.total), gap < most)?;
    Ok(vec![answer])
}

/// Scrapes while clients come and go; counters never fall and no client's words are labels.
fn scraped(case: &Case, server: &Binary) -> Result<Vec<Answer>, String> {
    let over = Arc::new(AtomicBool::new(false));
    let load = json!({"model": "client-chosen-name", "user": "client-chosen-user", "messages": [{"role": "user", "content": "Count on."}],
        "max_tokens": 100, "stream": true, "ignore_eos": true});
    let (address, stop) = (server.address, over.clone());
    let loading = std::thread::spawn(move || {
        let mut index = 0u64;
        while !stop.load(Ordering::Relaxed) {
            let mut body = load.clone();
            if !index.is_multiple_of(3) {
                body["model"] = json!("k26-mini");
            }
            let leave = if index.is_multiple_of(2) { Leave::After(Duration::from_millis(index * 37 % 400)) } else { Leave::AfterEvents(5) };
            let _ = exchange(address, &Request::post("/v1/chat/completions", &body), leave);
            index += 1;
        }
    });
    let mut last: HashMap<String, f64> = HashMap::new();
    let mut verdict = Ok(());
    let mut answer = Answer::default();
    for _ in 0..case.times.unwrap_or(600) {
        answer = server.get("/metrics").ok_or("no metrics")?;
        verdict = verdict.and(never_falls(&answer.text(), &mut last));
        std::thread::sleep(Duration::from_millis(20));
    }
    over.store(true, Ordering::Relaxed);
    loading.join().unwrap();
    verdict?;
    holds("a client's words in the metrics", !answer.text().contains("client-chosen"))?;
    Ok(vec![answer])
}

fn never_falls(text: &str, last: &mut HashMap<String, f64>) -> Verdict {
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (name, value) = line.rsplit_once(' ').ok_or_else(|| format!("no value in {line:?}"))?;
        let value: f64 = value.parse().map_err(|_| format!("no number in {line:?}"))?;
        let bare = name.split('{').next().unwrap_or(name);
        if ["_total", "_count", "_bucket", "_sum"].iter().any(|end| bare.ends_with(end)) {
            let before = last.insert(name.to_owned(), value).unwrap_or(0.0);
            holds(&format!("{name} fell from {before} to {value}"), value >= before)?;
        }
    }
    Ok(())
}

/// Counters advance while a stream runs, and gauges agree with it.
fn advancing(server: &Binary, request: &Request) -> Result<Vec<Answer>, String> {
    let body = primes(json!({"stream": true, "ignore_eos": true, "max_tokens": 400, "speculation": "tree:8"}));
    let stream = Request::post("/v1/chat/completions", &body);
    let (address, ended) = (server.address, AtomicBool::new(false));
    let names = ["vllm:generation_tokens_total", "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"];
    let seen = std::thread::scope(|scope| {
        scope.spawn(|| {
            exchange(address, &stream, Leave::Never).unwrap();
            ended.store(true, Ordering::Relaxed);
        });
        let mut seen = Vec::new();
        while !ended.load(Ordering::Relaxed) {
            let running = server.metric("vllm:num_requests_running");
            let values = names.map(|name| server.metric(name));
            if !ended.load(Ordering::Relaxed) && running == 1.0 {
                seen.push(values);
            }
            std::thread::sleep(Duration::from_millis(30));
        }
        seen
    });
    let (first, last) = (seen.first().ok_or("the stream was never seen running")?, seen.last().ok_or("never")?);
    for (index, name) in names.iter().enumerate() {
        holds(&format!("{name} stood at {} while the stream ran", first[index]), last[index] > first[index])?;
    }
    freed(server)?;
    Ok(vec![server.send(request)])
}

/// A panic of the engine thread with two streams running and three requests queued.
pub fn engine_panic(case: &Case, start: &Start) -> Verdict {
    let mut server = Binary::start(start);
    let body = primes(json!({"stream": true, "ignore_eos": true, "max_tokens": 2000, "speculation": "off"}));
    let request = Request::post("/v1/chat/completions", &body);
    let queued = Request::post("/v1/chat/completions", &primes(json!({"max_tokens": 2000, "ignore_eos": true})));
    let address = server.address;
    let (streams, waiting, red) = std::thread::scope(|scope| {
        let streams: Vec<_> = (0..2).map(|_| scope.spawn(|| exchange(address, &request, Leave::Never).unwrap())).collect();
        std::thread::sleep(Duration::from_millis(50));
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| exchange(address, &queued, Leave::Never).unwrap())).collect();
        let streams: Vec<_> = streams.into_iter().map(|stream| stream.join().unwrap()).collect();
        let died = Instant::now();
        let mut red = server.get("/health").map_or(0, |answer| answer.status);
        while red != 503 && died.elapsed() < Duration::from_secs(1) {
            red = server.get("/health").map_or(0, |answer| answer.status);
        }
        (streams, waiting.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>(), red)
    });
    for stream in &streams {
        holds(
            &format!("a stream ended with {:?}", stream.events().last()),
            stream.chunks().last().is_some_and(|last| last.get("error").is_some()),
        )?;
    }
    waiting.iter().try_for_each(|answer| equal("a queued request's status", answer.status, 503))?;
    holds("the health", case.expect.allows(red))?;
    let code = server.exit(Duration::from_secs(10));
    holds(&format!("the exit code is {code:?}"), code.is_some_and(|code| code != 0))
}

/// While loading: 503 with progress; SIGTERM ends it within two seconds.
pub fn slow_load(case: &Case, start: &Start) -> Verdict {
    let mut server = Binary::spawn(start);
    let begun = Instant::now();
    let answer = loop {
        match server.get(&case.path) {
            Some(answer) => break answer,
            None if begun.elapsed() > Duration::from_secs(30) => return Err("it never listened".into()),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    holds(&format!("status {}", answer.status), case.expect.allows(answer.status))?;
    let run = Run { case, server: &server, answers: vec![answer], memory: 0 };
    case.expect.checks.iter().try_for_each(|check| super::checks::judge(&run, check))?;
    server.signal(libc::SIGTERM);
    let code = server.exit(Duration::from_secs(2));
    holds("it did not end within 2 s of SIGTERM", code.is_some())
}

/// SIGTERM while a stream runs: it ends well, new requests are refused, health is red, the exit code is 0.
pub fn drained(case: &Case, start: &Start) -> Verdict {
    let mut server = Binary::start(start);
    let stream = Request::post(
        "/v1/chat/completions",
        &primes(json!({"stream": true, "ignore_eos": true, "max_tokens": 1500, "speculation": "off"})),
    );
    let address = server.address;
    let (stream, refused, health) = std::thread::scope(|scope| {
        let running = scope.spawn(|| exchange(address, &stream, Leave::Never).unwrap());
        let before = server.metric("vllm:generation_tokens_total");
        while server.metric("vllm:num_requests_running") == 0.0 || server.metric("vllm:generation_tokens_total") < before + 5.0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        server.signal(libc::SIGTERM);
        std::thread::sleep(Duration::from_millis(50));
        let refused = exchange(address, &case.request(), Leave::Never).unwrap_or_default();
        let health = server.get("/health").map_or(0, |answer| answer.status);
        (running.join().unwrap(), refused, health)
    });
    holds(&format!("a new request got {}", refused.status), case.expect.allows(refused.status))?;
    equal("health", health, 503)?;
    equal("the running stream's end", stream.finishes(), vec!["length".to_string()])?;
    let run = Run { case, server: &server, answers: vec![refused], memory: 0 };
    case.expect.checks.iter().try_for_each(|check| super::checks::judge(&run, check))?;
    equal("the exit code", server.exit(Duration::from_secs(5)), Some(0))
}

/// The canary: the France request still gives its sentence, health is green.
pub fn canary(server: &Binary, start: &Start) -> Verdict {
    let mut request = Request::post("/v1/chat/completions", &france(json!({})));
    if let Some(key) = &start.key {
        request = request.header("Authorization", &format!("Bearer {key}"));
    }
    let mut answer = server.send(&request);
    let begun = Instant::now();
    // After an overload the queue may still be full for a moment.
    while answer.status == 429 && begun.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(100));
        answer = server.send(&request);
    }
    equal("the canary's text", answer.content().as_str(), super::case::FRANCE)?;
    equal("health", server.get("/health").map(|answer| answer.status), Some(200))
}
