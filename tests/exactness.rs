//! The same request gives the same tokens however it is computed: speculated or not, alone or in company, on any number of threads,
//! with either verify kernel. Sixty prompts of 64 tokens, greedy and seeded.

mod common;

use common::{options, sampled, sixty_prompts, tokens, with_engine};
use kdtree::device::Verify;
use kdtree::engine::contract::TokenLogprob;
use kdtree::engine::driver::{Driver, greedy};
use kdtree::engine::options::EngineOptions;
use kdtree::speculate::budget::Budget;

const TOKENS: u32 = 64;

const BUDGETS: [Budget; 5] = [Budget::Off, Budget::Chain, Budget::Tree(8), Budget::Tree(32), Budget::Tree(64)];

/// All sixty prompts, `together` at a time, greedy and at temperature 1.
fn all(driver: &mut dyn Driver, budget: Budget, together: usize) -> Vec<Vec<u32>> {
    let prompts = sixty_prompts(driver);
    let mut out = Vec::new();
    for (first, prompts) in prompts.chunks(together).enumerate() {
        let seed = |at: usize| 2000 + (first * together + at) as u64;
        let plain = prompts.iter().map(|prompt| greedy(prompt.clone(), TOKENS, Some(budget))).collect();
        out.extend(tokens(&driver.generate(plain).unwrap()));
        let seeded = prompts.iter().enumerate().map(|(at, prompt)| sampled(prompt.clone(), TOKENS, budget, seed(at))).collect();
        out.extend(tokens(&driver.generate(seeded).unwrap()));
    }
    out
}

/// Which prompt each entry of `all` belongs to differs with `together`; this brings it back to (greedy, seeded) per prompt.
fn by_prompt(all: &[Vec<u32>], together: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    let pairs = all.chunks(2 * together).flat_map(|chunk| {
        let (plain, seeded) = chunk.split_at(chunk.len() / 2);
        plain.iter().cloned().zip(seeded.iter().cloned()).collect::<Vec<_>>()
    });
    pairs.collect()
}

#[test]
fn every_budget_batch_and_thread_count_gives_the_same_tokens() {
    let reference = with_engine(options(), |driver| by_prompt(&all(driver, Budget::Off, 1), 1));
    assert_eq!(reference.len(), 60);
    assert!(reference.iter().filter(|(plain, seeded)| plain != seeded).count() > 40, "sampling must differ from greedy");
    let compare = |what: String, found: Vec<(Vec<u32>, Vec<u32>)>| {
        for (at, (found, wanted)) in found.iter().zip(&reference).enumerate() {
            assert_eq!(found.0, wanted.0, "{what}: prompt {at}, greedy");
            assert_eq!(found.1, wanted.1, "{what}: prompt {at}, seeded");
        }
    };
    for budget in BUDGETS {
        let found = with_engine(options(), move |driver| by_prompt(&all(driver, budget, 4), 4));
        compare(format!("{budget}, four at a time"), found);
    }
    let one_thread = EngineOptions { threads: 1, ..options() };
    compare("one thread".into(), with_engine(one_thread, |driver| by_prompt(&all(driver, Budget::Tree(32), 10), 10)));
    let off = EngineOptions { verify: Verify::Off, ..options() };
    compare("baseline kernel".into(), with_engine(off, |driver| by_prompt(&all(driver, Budget::Tree(16), 4), 4)));
}

/// Not only the tokens: the log-probabilities of the twenty best tokens, which hang on every logit of the row, have the same bits.
#[test]
fn logits_of_shared_rows_have_the_same_bits_under_every_budget() {
    let run = |options: EngineOptions, budget: Budget, together: usize| {
        with_engine(options, move |driver| {
            let prompts: Vec<_> = sixty_prompts(driver).into_iter().step_by(8).collect();
            let mut all = Vec::new();
            for prompts in prompts.chunks(together) {
                let requests = prompts.iter().map(|prompt| {
                    let mut request = greedy(prompt.clone(), 24, Some(budget));
                    request.logprobs = Some(20);
                    request
                });
                for generated in driver.generate(requests.collect()).unwrap() {
                    assert!(generated.end.is_ok(), "{:?}", generated.end);
                    let bits = |report: &TokenLogprob| report.top.iter().map(|(token, value)| (*token, value.to_bits())).collect();
                    all.push(generated.logprobs.iter().map(bits).collect::<Vec<Vec<(u32, u32)>>>());
                }
            }
            all
        })
    };
    for verify in [Verify::On, Verify::Off] {
        let of = |threads: usize| EngineOptions { verify, threads, ..options() };
        let wanted = run(of(2), Budget::Off, 1);
        assert!(wanted.iter().all(|reports| reports.len() > 4));
        for budget in [Budget::Chain, Budget::Tree(8), Budget::Tree(32), Budget::Tree(64)] {
            assert_eq!(run(of(1), budget, 4), wanted, "{budget}, verify {verify}");
        }
    }
}
