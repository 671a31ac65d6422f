//! Acceptance of the drafter over its fourteen bench prompts equals the table measured with PyTorch when it was trained.

mod common;

use common::{options, with_engine};
use kdtree::bench::round::{CLASSES, one};
use kdtree::engine::driver::Driver;
use kdtree::speculate::budget::Budget;

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
