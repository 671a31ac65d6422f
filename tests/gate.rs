//! The rollout gate as its users meet it: `kdtree gate` and `kdtree serve` as child processes. What plants a fault in a kernel needs
//! `--features faults`.

#[path = "gate_support/mod.rs"]
mod gate_support;
#[path = "http_support/mod.rs"]
mod http_support;

use gate_support::command::{Gated, MODEL, certificates, copied_model, gate};
use gate_support::manager::Manager;
use serde_json::Value;

#[test]
fn the_model_passes_and_the_second_run_is_skipped() {
    let state = tempfile::tempdir().unwrap();
    let first = gate(&state, &[]);
    first.expect(0);
    assert!(first.out.contains("gate passed") && first.out.contains("The capital of France is"), "{}", first.out);
    let [file] = certificates(&state).try_into().unwrap_or_else(|all| panic!("one certificate, found {all:?}"));
    let certificate: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(certificate["verdict"], "passed");
    let report = &certificate["report"];
    assert_eq!((report["passes"].as_array().unwrap().len(), report["prompts"].as_array().unwrap().len()), (5, 6));
    assert!(report["layers"].as_array().unwrap().iter().all(|layer| layer["rows"].as_u64().unwrap() > 100), "{report}");
    for key in ["binary", "model", "drafter", "prompts"] {
        assert_eq!(certificate["identity"][key].as_str().map(str::len), Some(64), "{key}");
    }
    let second = gate(&state, &[]);
    second.expect(0);
    assert!(second.out.contains("of an earlier run"), "{}", second.out);
    let forced = gate(&state, &["--force"]);
    forced.expect(0);
    assert!(!forced.out.contains("of an earlier run"), "{}", forced.out);
}

#[test]
fn other_prompts_other_options_and_another_model_run_again() {
    let state = tempfile::tempdir().unwrap();
    let prompts = |text: &str| {
        let file = state.path().join("prompts.jsonl");
        std::fs::write(&file, text).unwrap();
        file.display().to_string()
    };
    let file = prompts("{\"text\": \"Once upon a time\"}\n");
    let few = ["--prompts", file.as_str(), "-n", "4"];
    let skipped = |run: &Gated| run.out.contains("of an earlier run");
    assert!(!skipped(gate(&state, &few).expect(0)));
    assert!(skipped(gate(&state, &few).expect(0)));
    assert!(!skipped(gate(&state, &["--prompts", &file, "-n", "5"]).expect(0)));
    assert!(!skipped(gate(&state, &[&few[..], &["--budget", "chain"]].concat()).expect(0)));
    let model = copied_model(state.path());
    let other = [&few[..], &["--model", &model]].concat();
    assert!(!skipped(gate(&state, &other).expect(0)));
    assert!(skipped(gate(&state, &other).expect(0)));
    // A change that no shape or size shows.
    gate_support::command::patch(&model, "model.norm.weight", |bytes| bytes[0] ^= 1);
    assert!(!skipped(gate(&state, &other).expect(0)));
    prompts("{\"text\": \"Once upon another time\"}\n");
    assert!(!skipped(gate(&state, &few).expect(0)));
}

#[test]
fn a_damaged_certificate_is_ignored_with_a_log_line() {
    let state = tempfile::tempdir().unwrap();
    gate(&state, &["-n", "2"]).expect(0);
    for file in certificates(&state) {
        std::fs::write(file, "{\"format\": 1,").unwrap();
    }
    let again = gate(&state, &["-n", "2"]);
    again.expect(0);
    assert!(again.log.contains("ignored") && !again.out.contains("of an earlier run"), "{}{}", again.log, again.out);
}

#[test]
fn a_nan_in_a_weight_is_named() {
    let state = tempfile::tempdir().unwrap();
    let model = copied_model(state.path());
    let tensor = "model.layers.2.self_attn.o_proj.weight";
    gate_support::command::patch(&model, tensor, |bytes| bytes[10..12].copy_from_slice(&0x7fc0_u16.to_le_bytes()));
    let run = gate(&state, &["--model", &model]);
    run.expect(1);
    assert!(run.log.contains(tensor) && run.log.contains("NaN at [0, 5]"), "{}", run.log);
    assert!(certificates(&state).is_empty());
}

#[test]
fn an_answer_without_text_fails() {
    let state = tempfile::tempdir().unwrap();
    // With the head's rows zeroed every logit is equal, and the first id, the byte zero, is chosen for ever.
    let model = copied_model(state.path());
    gate_support::command::patch(&model, "lm_head.weight", |bytes| bytes.fill(0));
    let run = gate(&state, &["--model", &model, "-n", "4"]);
    run.expect(1);
    assert!(run.out.contains("found no text"), "{}", run.out);
}

#[test]
fn mistakes_are_one_line_that_names_them() {
    let state = tempfile::tempdir().unwrap();
    let file = state.path().join("prompts.jsonl");
    std::fs::write(&file, "{\"text\": \"a\"}\n{\"txet\": \"b\"}\n").unwrap();
    let file = file.display().to_string();
    for (arguments, named) in [
        (["--prompts", file.as_str()], "line 2"),
        (["--prompts", "/nowhere/prompts.jsonl"], "/nowhere/prompts.jsonl"),
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["-n", "1"], "gate.max_tokens"),
    ] {
        let run = gate(&state, &arguments);
        run.expect(1);
        assert!(run.log.contains(named) && run.log.trim_end().lines().count() == 1, "{arguments:?}: {}", run.log);
    }
}

#[test]
fn the_json_says_the_same_as_the_table() {
    let state = tempfile::tempdir().unwrap();
    let file = state.path().join("report.json").display().to_string();
    gate(&state, &["-n", "4", "--json", &file]).expect(0);
    let written: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(written["report"]["passed"], true);
    let run = gate(&state, &["-n", "4", "--json", "-"]);
    run.expect(0);
    assert_eq!(serde_json::from_str::<Value>(&run.out).unwrap(), written);
}

#[test]
fn without_a_drafter_plain_decoding_alone_is_compared() {
    let state = tempfile::tempdir().unwrap();
    let run = gate(&state, &["--model", MODEL, "--json", "-"]);
    run.expect(0);
    let written: Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!(written["report"]["passes"].as_array().unwrap().len(), 3);
    assert_eq!(written["identity"]["drafter"], Value::Null);
}

#[test]
fn a_server_is_ready_after_its_gate_and_drains_before_it_ends() {
    let mut server = Manager::start("max_tokens = 8", None);
    server.wait_for("WATCHDOG=1");
    let said = server.said();
    let first = |text: &str| said.iter().position(|line| line.starts_with(text)).unwrap_or_else(|| panic!("no {text}: {said:?}"));
    assert!(first("STATUS=gate ") < first("READY=1") && first("EXTEND_TIMEOUT_USEC=") < first("READY=1"), "{said:?}");
    assert!(first("READY=1") < first("WATCHDOG=1"), "{said:?}");
    assert!(said[first("STATUS=serving")].ends_with("verify on, gate passed"), "{said:?}");
    let certificate = server.get("/gate").json()["certificate"].clone();
    assert_eq!((&certificate["verdict"], &certificate["report"]["passed"]), (&"passed".into(), &true.into()));
    assert_eq!(server.metric("kdtree:gate_passed", ""), 1.0);
    assert_eq!(server.metric("kdtree:verify_mode", "mode=\"on\""), 1.0);
    assert_eq!(server.metric("vllm:request_success_total", ""), 0.0, "warm-up and gate are no traffic");
    server.signal(libc::SIGHUP);
    server.wait_for("RELOADING=1");
    server.wait_for("MONOTONIC_USEC=");
    server.wait("a second READY=1", || server.said().iter().filter(|line| *line == "READY=1").count() == 2);
    server.signal(libc::SIGTERM);
    assert_eq!(server.exit(), 0);
    assert_eq!(server.said().iter().filter(|line| *line == "STOPPING=1").count(), 1);
}

#[test]
fn a_second_start_skips_the_gate_by_its_certificate_until_the_prompts_change() {
    let few = |folder: &tempfile::TempDir, text: &str| {
        let file = folder.path().join("prompts.jsonl");
        std::fs::write(&file, text).unwrap();
        format!("max_tokens = 4\nprompts = {:?}", file.display().to_string())
    };
    let folder = tempfile::tempdir().unwrap();
    let gate = few(&folder, "{\"text\": \"Once upon a time\"}");
    let stand = |mut server: Manager| {
        server.wait_for("STATUS=serving");
        let said = server.said();
        server.signal(libc::SIGTERM);
        assert_eq!(server.exit(), 0);
        let status = said.into_iter().find(|line| line.starts_with("STATUS=serving")).unwrap();
        (status.rsplit(", ").next().unwrap().to_string(), server.into_folder())
    };
    let (first, folder) = stand(Manager::start_in(folder, &gate, None));
    let (second, folder) = stand(Manager::start_in(folder, &gate, None));
    let gate = few(&folder, "{\"text\": \"Once upon another time\"}");
    let (third, _folder) = stand(Manager::start_in(folder, &gate, None));
    assert_eq!([first, second, third], ["gate passed", "gate passed before", "gate passed"]);
}

#[test]
fn a_start_that_cannot_be_is_one_line() {
    for (key, named) in [("model", "/nowhere/model"), ("drafter", "/nowhere/drafter"), ("api-key-file", "/nowhere/keys")] {
        let run = gate_support::command::run(&["serve", "--port", "0", &format!("--{key}"), named]);
        run.expect(1);
        assert!(run.log.contains(named) && run.log.trim_end().lines().count() == 1, "{}", run.log);
    }
}

#[test]
fn a_port_that_is_taken_is_named_before_anything_of_the_model_is_read() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let run = gate_support::command::run(&["serve", "--port", &port, "--model", "/nowhere/model"]);
    run.expect(1);
    let line = run.log.trim_end();
    assert!(line.contains(&format!("cannot listen on 127.0.0.1 port {port}")) && line.lines().count() == 1, "{line}");
}

#[cfg(feature = "faults")]
#[test]
fn every_planted_kernel_fault_fails_and_a_layer_is_named() {
    let state = tempfile::tempdir().unwrap();
    gate(&state, &[]).expect(0);
    for fault in ["kernel-error=1", "kernel-error=2", "kernel-error=3"] {
        let run = gate_support::command::gate_with(&state, &["--json", "-"], Some(fault));
        run.expect(1);
        let report = &serde_json::from_str::<Value>(&run.out).unwrap()["report"];
        assert_eq!(report["passed"], false);
        let named = report["failures"].as_array().unwrap().iter().any(|failure| failure.as_str().unwrap().starts_with("layer "));
        assert!(named && report["worst_layer"].is_u64(), "{fault}: {}", report["failures"]);
        assert!(!report["differences"].as_array().unwrap().is_empty(), "{fault} changes the text too");
        // It is no certificate: the same combination fails again.
        gate_support::command::gate_with(&state, &[], Some(fault)).expect(1);
    }
    assert!(gate(&state, &[]).out.contains("of an earlier run"), "a fault's verdict does not touch the sound build's");
}

#[cfg(feature = "faults")]
#[test]
fn a_failed_gate_that_blocks_ends_the_server_with_its_own_status() {
    let mut server = Manager::start("max_tokens = 8\non_failure = \"block\"", Some("kernel-error=2"));
    assert_eq!(server.exit(), 78);
    assert!(server.log().lines().any(|line| line.starts_with("kdtree: the gate failed: layer ")), "{}", server.log());
    let said = server.said();
    assert!(!said.iter().any(|line| line == "READY=1"), "{said:?}");
    assert!(said.iter().any(|line| line.starts_with("STATUS=stopped: the gate failed: layer ")), "{said:?}");
}

#[cfg(feature = "faults")]
#[test]
fn a_failed_gate_with_baseline_serves_with_verify_off_and_says_so() {
    let server = Manager::start("max_tokens = 8\non_failure = \"baseline\"", Some("kernel-error=3"));
    server.wait_for("READY=1");
    server.wait_for("WATCHDOG=1");
    let metrics = server.get("/metrics").text();
    for line in ["kdtree:verify_mode{", "kdtree:gate_passed{"] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert_eq!(server.metric("kdtree:gate_passed", ""), 0.0);
    assert_eq!(server.metric("kdtree:verify_mode", "mode=\"off\""), 1.0);
    assert_eq!(server.metric("kdtree:verify_mode", "mode=\"on\""), 0.0);
    assert!(
        server.said().iter().any(|line| line.starts_with("STATUS=serving") && line.contains("GATE FAILED: layer")),
        "{:?}",
        server.said()
    );
    assert!(server.log().contains("serving with the baseline kernel"), "{}", server.log());
    let certificate = server.get("/gate").json()["certificate"].clone();
    assert_eq!(certificate["verdict"], "failed");
    assert!(!server.complete("The capital of France is").is_empty());
}

#[cfg(feature = "faults")]
#[test]
fn a_hung_engine_starves_the_watchdog_while_http_still_answers() {
    let server = Manager::start("enable = false", Some("engine-hang=3"));
    server.wait_for("WATCHDOG=1");
    server.complete_without_waiting("Once upon a time");
    std::thread::sleep(2 * gate_support::manager::WATCHDOG);
    let before = server.said().len();
    std::thread::sleep(2 * gate_support::manager::WATCHDOG);
    let after = server.said();
    assert!(!after[before..].iter().any(|line| line == "WATCHDOG=1"), "{after:?}");
    assert_eq!(server.get("/health").status, 200);
}

#[cfg(feature = "faults")]
#[test]
fn slow_loading_extends_the_start_timeout() {
    let server = Manager::start("enable = false", Some("slow-load=500"));
    server.wait_for("READY=1");
    let said = server.said();
    let first = |text: &str| said.iter().position(|line| line.starts_with(text)).unwrap_or_else(|| panic!("no {text}: {said:?}"));
    assert!(first("EXTEND_TIMEOUT_USEC=") < first("READY=1"));
}
