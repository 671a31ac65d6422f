//! Acceptance of the drafter over its fourteen bench prompts equals the table measured with PyTorch when it was trained.

mod common;

use std::sync::{Arc, Mutex};

use common::{options, with_engine, with_observed_engine};
use kdtree::bench::round::{CLASSES, one};
use kdtree::engine::contract::Observer;
use kdtree::engine::driver::{Driver, greedy};
use kdtree::speculate::budget::{Budget, MAX_ROWS};
use kdtree::speculate::tree::Tree;

/// Tokens per round from training/README.md: chain, then trees of 8, 16, 32 and 64 rows.
const TABLE: [(&str, [f64; 5]); 7] = [
    ("facts", [2.21, 2.43, 2.61, 2.61, 2.81]),
    ("lists, arithmetic", [6.31, 6.73, 6.73, 7.21, 7.21]),
    ("code", [7.44, 7.44, 7.44, 7.44, 7.44]),
    ("definitions", [4.22, 4.22, 4.22, 4.22, 4.22]),
    ("stories", [2.18, 2.52, 2.69, 3.0, 3.35]),
    ("reasoning", [3.08, 3.36, 3.7, 4.11, 4.11]),
    ("all", [3.01, 3.37, 3.55, 3.82, 4.11]),
];

const BUDGETS: [Budget; 5] = [Budget::Chain, Budget::Tree(8), Budget::Tree(16), Budget::Tree(32), Budget::Tree(64)];

#[test]
fn tokens_per_round_equal_the_trainings_table() {
    let measured = with_engine(options(), |driver: &mut dyn Driver| {
        let mut rows: Vec<(String, [f64; 5])> = Vec::new();
        let mut all = [(0u64, 0u64); 5];
        for class in &CLASSES {
            let mut row = [0.0; 5];
            for (at, budget) in BUDGETS.into_iter().enumerate() {
                let mut sum = (0, 0);
                for prompt in class.prompts {
                    let (tokens, rounds, _) = one(driver, *prompt, budget).unwrap();
                    sum = (sum.0 + tokens, sum.1 + rounds);
                }
                row[at] = sum.0 as f64 / sum.1 as f64;
                all[at] = (all[at].0 + sum.0, all[at].1 + sum.1);
            }
            rows.push((class.name.to_string(), row));
        }
        rows.push(("all".into(), all.map(|(tokens, rounds)| tokens as f64 / rounds as f64)));
        rows
    });
    for ((name, row), (wanted_name, wanted)) in measured.iter().zip(TABLE) {
        assert_eq!(name, wanted_name);
        println!("{name}: {row:.2?}");
        for (found, wanted) in row.iter().zip(wanted) {
            assert!((found / wanted - 1.0).abs() < 0.02, "{name}: {row:.2?}, the table says {wanted}");
        }
    }
}

/// Tokens of each text that `what_budgets_would_accept` records.
const RECORDED: usize = 128;

/// The draft of the latest round that drafted, as a record of `what_budgets_would_accept`.
#[derive(Default)]
struct Latest(Mutex<Option<[u8; 80]>>);

impl Observer for Latest {
    fn draft(&self, tree: &Tree, path: &[u8]) {
        if tree.rows > 1 {
            *self.0.lock().unwrap() = Some(record(tree, path));
        }
    }
}

/// Rows; accepted rows, how many and which (8); the drafter's best path, by depth from 1 (7, 0 = not in the tree); the path
/// probabilities of rows 1 to 63 in twelfths of a nat below 0 (255 = no such row).
fn record(tree: &Tree, path: &[u8]) -> [u8; 80] {
    let mut record = [0; 80];
    record[0] = tree.rows as u8;
    record[1] = path.len() as u8;
    record[2..2 + path.len()].copy_from_slice(path);
    let mut at = 0;
    for slot in &mut record[10..17] {
        let Some(child) = (at + 1..tree.rows).find(|&row| usize::from(tree.parent[row]) == at) else { break };
        (*slot, at) = (child as u8, child);
    }
    record[17..].fill(255);
    for row in 1..tree.rows {
        record[16 + row] = (-12.0 * tree.logprob[row]).round().min(254.0) as u8;
    }
    record
}

/// Drafts from every position of the bench prompts' greedy texts, so that what any budget would have accepted can be told without the
/// model: `src/speculate/recorded_tests.rs` reads the file.
#[test]
#[ignore = "writes tests/golden/drafts.bin, takes minutes"]
fn what_budgets_would_accept() {
    let latest = Arc::new(Latest::default());
    let seen = latest.clone();
    let bytes = with_observed_engine(options(), latest, move |driver: &mut dyn Driver| {
        let mut bytes = Vec::new();
        for prompt in CLASSES.iter().flat_map(|class| class.prompts) {
            let generate = |driver: &mut dyn Driver, prompt: Vec<u32>, tokens: u32, budget| {
                let mut request = greedy(prompt, tokens, Some(budget));
                request.stop.ignore_eos = true;
                driver.generate(vec![request]).unwrap().remove(0).tokens
            };
            let mut ids = prompt.ids(driver);
            let text = generate(driver, ids.clone(), RECORDED as u32, Budget::Off);
            for token in &text[..RECORDED - 1] {
                *seen.0.lock().unwrap() = None;
                assert_eq!(generate(driver, ids.clone(), 3, Budget::Tree(MAX_ROWS as u8))[0], *token);
                bytes.extend(seen.0.lock().unwrap().expect("a round that drafted"));
                ids.push(*token);
            }
        }
        bytes
    });
    std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/drafts.bin"), bytes).unwrap();
}
