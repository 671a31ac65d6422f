//! One model cut over several CPU ranks gives the same greedy text, wherever the best logit leads by more than rounding. Eight ranks
//! run on a synthetic checkpoint that eight can share.

mod common;

use common::{options, sixty_prompts, with_engine};
use kdtree::engine::driver::{Driver, Generated, greedy};
use kdtree::engine::options::EngineOptions;
use kdtree::model::synthetic::{DraftSizes, Fill, Layout, TargetSizes, write_drafter, write_target};
use kdtree::speculate::budget::Budget;

/// Where sums over ranks differ only in their last bits, a token may differ if its margin is below this.
const MARGIN: f32 = 1e-3;

fn generate(options: EngineOptions, budget: Budget, prompts: usize, tokens: u32) -> Vec<Generated> {
    with_engine(options, move |driver: &mut dyn Driver| {
        let request = |prompt: &Vec<u32>| {
            let mut request = greedy(prompt.clone(), tokens, Some(budget));
            request.logprobs = Some(2);
            request
        };
        let prompts: Vec<_> = sixty_prompts(driver).iter().step_by(60 / prompts).map(request).collect();
        driver.generate(prompts).unwrap()
    })
}

/// Tokens agree up to the first place where the reference's margin is too small to say; at least half of all must come before it.
fn assert_same(what: &str, found: &[Generated], wanted: &[Generated]) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let mut compared = 0;
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        assert!(found.end.is_ok(), "{what}: {:?}", found.end);
        for (step, token) in wanted.tokens.iter().enumerate() {
            let top = &wanted.logprobs[step].top;
            if top[0].1 - top[1].1 < MARGIN {
                break;
            }
            assert_eq!(found.tokens.get(step), Some(token), "{what}: prompt {at}, token {step}");
            compared += 1;
        }
    }
    let all: usize = wanted.iter().map(|wanted| wanted.tokens.len()).sum();
    assert!(2 * compared >= all, "{what}: only {compared} of {all} tokens are sure");
}

#[test]
fn two_and_four_ranks_give_the_text_of_one() {
    let wanted = generate(options(), Budget::Tree(16), 12, 32);
    for ranks in [2, 4] {
        let found = generate(EngineOptions { ranks, ..options() }, Budget::Tree(16), 12, 32);
        assert_same(&format!("{ranks} ranks"), &found, &wanted);
    }
}

#[test]
fn eight_ranks_give_the_text_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let (target, drafter) = (folder.path().join("target"), folder.path().join("drafter"));
    std::fs::create_dir(&target).unwrap();
    std::fs::create_dir(&drafter).unwrap();
    let config = write_target(&target, &TargetSizes::eight_ranks(), Layout { fill: Fill::Random(11), shards: 2, vision: false }).unwrap();
    write_drafter(&drafter, &DraftSizes::eight_ranks(), &config, Fill::Random(12)).unwrap();
    let of = |ranks: usize| EngineOptions {
        model: target.display().to_string(),
        drafter: drafter.display().to_string(),
        ranks,
        max_running: 2,
        ..options()
    };
    let run = |options: EngineOptions| {
        with_engine(options, |driver: &mut dyn Driver| {
            let prompts = (0..4u32).map(|at| (1..20 + at).map(|token| token * 7 % 200).collect::<Vec<u32>>());
            let request = |prompt: Vec<u32>| {
                let mut request = greedy(prompt, 24, Some(Budget::Tree(16)));
                request.logprobs = Some(2);
                request.stop.ignore_eos = true;
                request
            };
            driver.generate(prompts.map(request).collect()).unwrap()
        })
    };
    assert_same("8 ranks", &run(of(8)), &run(of(1)));
}

#[test]
fn a_number_of_ranks_that_cuts_a_head_is_refused_by_name() {
    let error = kdtree::engine::start::Prepared::read(EngineOptions { ranks: 3, ..options() }).err().unwrap().to_string();
    assert!(error.contains("num_attention_heads") && error.contains('8'), "{error}");
}
