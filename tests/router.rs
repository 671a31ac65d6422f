//! A router's choice is a step: where two experts are as good as tied, whoever takes the other one may write another text from there
//! on, however sure the next token looked. The two texts in which a card parts from the CPU at a clear margin (docs/performance.md)
//! are of that kind. Needs `--features faults`.
#![cfg(feature = "faults")]

mod common;

use std::process::Command;

use common::{options, with_engine};
use kdtree::engine::driver::greedy;
use kdtree::speculate::budget::Budget;

const TOKENS: u32 = 64;

/// What the CPU writes, greedily and without drafts, where its router takes the runner-up at near-tie `turn`.
fn with_the_other_expert(prompt: &str, turn: usize) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kdtree"));
    command.args(["generate", "--device", "cpu", "--budget", "off", "--temperature", "0", "--max-tokens", &TOKENS.to_string(), prompt]);
    let output = command.env("KDTREE_FAULT", format!("other-expert={turn}")).output().expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The step at which `prompt`'s text parts when the router's near-tie `turn` goes the other way, for the turns at which it does, and
/// the margin (of log-probabilities) of the token that stood there.
fn parted(prompt: &'static str, turns: usize) -> Vec<(usize, usize, f32)> {
    let (steps, margins) = with_engine(options(), move |driver| {
        let mut request = greedy(driver.tokenizer().encode_prompt(prompt), TOKENS, Some(Budget::Off));
        request.logprobs = Some(2);
        let text = driver.generate(vec![request]).unwrap().remove(0);
        let steps: Vec<String> = (0..=text.tokens.len()).map(|end| driver.tokenizer().decode(&text.tokens[..end], false)).collect();
        (steps, text.logprobs.iter().map(|step| step.top[0].1 - step.top[1].1).collect::<Vec<f32>>())
    });
    let whole = steps.last().unwrap();
    let found = (1..=turns).filter_map(|turn| {
        let text = with_the_other_expert(prompt, turn);
        let step = steps.iter().rposition(|step| text.starts_with(step.as_str())).unwrap();
        (text.trim_end_matches('\n') != whole.trim_end_matches('\n')).then(|| (turn, step, margins[step]))
    });
    found.collect()
}

#[test]
fn one_near_tie_of_the_router_parts_a_text_at_a_token_that_looked_sure() {
    let king = parted("Once upon a time there was a king who had three sons. And then", 9);
    assert!(matches!(king[..], [(_, 59, margin)] if margin > 0.5), "{king:?}");
    let count = parted("1, 2, 3, 4, 5,\n\n", 8);
    assert!(matches!(count[..], [(_, 21, margin)] if margin > 0.1), "{count:?}");
}
