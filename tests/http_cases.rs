//! Every case of `tests/cases/http.jsonl` against the real binary. Cases that plant a fault need `--features faults`; those that
//! need a GPU are run elsewhere. `KDTREE_CASES=ST,AV-7` runs some of them.

#[path = "http_support/binary.rs"]
mod binary;
#[path = "http_cases/case.rs"]
mod case;
#[path = "http_cases/checks/mod.rs"]
mod checks;
#[path = "http_support/mod.rs"]
mod http_support;
#[path = "http_cases/special.rs"]
mod special;

use binary::{Binary, Start};
use case::{Case, KEY};
use checks::Run;

/// What a case's `setup` asks of the server.
fn start_of(case: &Case) -> Start {
    let engine = |lines: &str| Start { engine: lines.into(), ..Start::default() };
    let fault = |name: &str| Start { engine: "budget = \"off\"\nmax_running = 2".into(), fault: Some(name.into()), ..Start::default() };
    match (case.id.as_str(), case.setup.as_deref()) {
        // The limit itself is asked for, which a small context does quickly.
        ("AV-17a", _) => engine("max_model_len = 64"),
        (_, None | Some("built-in K2.6 template" | "after SIGTERM, while a stream drains")) => Start::default(),
        (_, Some("context limit 64")) => engine("max_model_len = 64"),
        (_, Some("context limit >= 32768")) => {
            Start { server: "keep_alive_s = 0.5".into(), ..engine("max_model_len = 32768\nkv_tokens = 65536") }
        }
        ("PC-5a" | "PC-5b", _) => engine("max_model_len = 1024\nkv_tokens = 256"),
        (_, Some("API key configured")) => Start { key: Some(KEY.into()), ..Start::default() },
        (_, Some("fault switch: NaN logits in round 3")) | ("ST-8b", _) => fault("nan-logits=3"),
        (_, Some("fault switch: grammar or sampler error")) => fault("sampler-error=2"),
        (_, Some("fault switch: engine panic")) => fault("engine-panic=40"),
        (_, Some("slowed load")) => fault("slow-load=4000"),
        (id, Some(other)) => panic!("{id}: nobody knows the setup {other:?}"),
    }
}

fn run(case: &Case, start: &Start, server: &mut Option<(Start, Binary)>) -> Result<(), String> {
    match case.id.as_str() {
        "SH-1a" => return special::engine_panic(case, start),
        "SH-4a" => return special::slow_load(case, start),
        "SH-5a" => return special::drained(case, start),
        _ => {}
    }
    // A planted fault fires once, so that each case needs a server of its own.
    if start.fault.is_some() || server.as_ref().is_none_or(|(running, _)| running != start) {
        *server = None;
        *server = Some((start.clone(), Binary::start(start)));
    }
    let (_, server) = server.as_ref().expect("just started");
    let memory = server.memory();
    let answers = special::answers(case, server)?;
    let stream = case.body["stream"] == serde_json::json!(true);
    for answer in &answers {
        if !case.expect.allows(answer.status) {
            return Err(format!("status {}, wanted {}: {}", answer.status, case.expect.status, short(&answer.text())));
        }
        if case.client.is_some() {
            continue;
        }
        checks::always(answer, stream).map_err(|why| format!("{why}; the answer was {}", short(&answer.text())))?;
    }
    let run = Run { case, server, answers, memory };
    for check in &case.expect.checks {
        checks::judge(&run, check).map_err(|why| format!("{check:?}: {why}; the answer was {}", short(&run.first().text())))?;
    }
    special::canary(server, start).map_err(|why| format!("afterwards: {why}"))
}

fn short(text: &str) -> String {
    text.chars().take(600).collect()
}

#[test]
fn all_cases_have_the_expected_outcome() {
    let all = case::all();
    assert_eq!(all.len(), 215, "the copy of the cases is complete");
    let wanted = std::env::var("KDTREE_CASES").unwrap_or_default();
    let chosen = |case: &&Case| wanted.is_empty() || wanted.split(',').any(|prefix| case.id.starts_with(prefix));
    let mut cases: Vec<&Case> = all.iter().filter(chosen).collect();
    // Servers are started once per setup.
    cases.sort_by_key(|case| format!("{:?}", start_of(case)));
    let (mut passed, mut failed, mut left) = (0, Vec::new(), Vec::new());
    let mut server = None;
    for case in cases {
        let start = start_of(case);
        if case.run_on.as_deref() == Some("gpu") || (start.fault.is_some() && !cfg!(feature = "faults")) {
            left.push(case.id.as_str());
            continue;
        }
        let begun = std::time::Instant::now();
        let outcome = run(case, &start, &mut server);
        if begun.elapsed().as_secs() >= 5 {
            eprintln!("{} took {:.1} s", case.id, begun.elapsed().as_secs_f64());
        }
        match outcome {
            Ok(()) => passed += 1,
            Err(why) => {
                eprintln!("{} FAILED: {why}", case.id);
                failed.push(case.id.as_str());
                server = None;
            }
        }
    }
    eprintln!("{passed} cases as expected, {} not: {failed:?}; not run here: {left:?}", failed.len());
    assert!(failed.is_empty());
}
