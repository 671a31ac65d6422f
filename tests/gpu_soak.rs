//! Rounds by the thousand on a card, requests of all kinds joining and leaving: texts stay what they are alone, and memory what it was.
//! Skipped, with the reason, where no card can be used. `KDTREE_SOAK_ROUNDS` says how many (2,000 if it does not).

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use common::{options, sampled, sixty_prompts, tokens, with_observed_engine};
use cudarc::driver::result::mem_get_info;
use kdtree::device::cuda::Numerics;
use kdtree::device::cuda::gpu::usable_cards;
use kdtree::engine::contract::{Observer, Request, RoundReport};
use kdtree::engine::driver::Driver;
use kdtree::engine::options::{DeviceKind, EngineOptions};
use kdtree::speculate::budget::Budget;

/// Requests handed over at once; 8 of them run together, the others come in as places become free.
const CROWD: usize = 64;

/// A reproducible stream of choices (SplitMix64).
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % bound as u64) as usize
    }
}

/// Requests of 1 to 300 prompt tokens and 1 to 64 generated ones, under every budget, greedy at heart or at temperature 1.
fn crowd(prompts: &[Vec<u32>], choices: &mut Choices) -> Vec<Request> {
    let budgets = [Budget::Off, Budget::Chain, Budget::Tree(4), Budget::Tree(8), Budget::Tree(16), Budget::Tree(64), Budget::Auto];
    let request = |_| {
        let mut prompt: Vec<u32> = (0..1 + choices.below(20)).flat_map(|_| prompts[choices.below(prompts.len())].clone()).collect();
        prompt.truncate(1 + choices.below(300));
        let tokens = 1 + choices.below(64) as u32;
        let mut request = sampled(prompt, tokens, budgets[choices.below(budgets.len())], choices.below(1 << 30) as u64);
        request.sampling.temperature = choices.below(2) as f32;
        request
    };
    (0..CROWD).map(request).collect()
}

#[derive(Default)]
struct Rounds(AtomicU64);

impl Observer for Rounds {
    fn round(&self, _report: &RoundReport) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Bytes that recordings of sizes seen late may take. A buffer left behind every round, 512 bytes at least, would be 38 MB in 75,000.
const RECORDINGS: usize = 16 << 20;

/// Bytes of the card that are free.
fn free_memory() -> usize {
    mem_get_info().expect("the engine's thread has a context").0
}

#[test]
fn a_long_run_gives_the_texts_of_requests_alone_and_takes_no_memory() {
    if let Err(error) = usable_cards(1) {
        println!("skipped: {error}");
        return;
    }
    let wanted = std::env::var("KDTREE_SOAK_ROUNDS").map_or(2_000, |rounds| rounds.parse().expect("a number of rounds"));
    let options = EngineOptions { device: DeviceKind::Cuda, numerics: Numerics::Exact, max_running: 8, ..options() };
    let rounds = Arc::new(Rounds::default());
    let counted = Arc::clone(&rounds);
    with_observed_engine(options, counted, move |driver: &mut dyn Driver| {
        let count = || rounds.0.load(Ordering::Relaxed);
        let (prompts, mut choices, began) = (sixty_prompts(driver), Choices(7), Instant::now());
        let probes = || crowd(&prompts, &mut Choices(1));
        let alone: Vec<_> = probes().into_iter().flat_map(|probe| tokens(&driver.generate(vec![probe]).unwrap())).collect();
        // Rounds of nearly every size have been seen, and recorded, when some have run.
        while count() < wanted / 4 {
            tokens(&driver.generate(crowd(&prompts, &mut choices)).unwrap());
        }
        let (allocations, free) = (driver.allocations(), free_memory());
        assert!(allocations > 0, "nothing counts allocations");
        while count() < wanted {
            tokens(&driver.generate(crowd(&prompts, &mut choices)).unwrap());
        }
        println!("{} rounds in {:.1?}; {allocations} allocations of scratch, all before the first", count(), began.elapsed());
        println!("free memory after {} rounds {free}, at the end {}", wanted / 4, free_memory());
        assert!(tokens(&driver.generate(probes()).unwrap()) == alone, "a text is no longer what it is alone");
        assert_eq!(driver.allocations(), allocations, "rounds allocate");
        assert!(free_memory() + RECORDINGS >= free, "device memory leaks");
    });
}
