//! Rounds on a card do what rounds on the CPU do: the same rows, trees, tokens, paths, faults and moved latents. Runs where there
//! is a card (`cargo test --test gpu_round -- --nocapture --test-threads=1`) and says so where there is none.

mod round_support;

use std::time::Instant;

use kdtree::bench::kernel_inputs::Random;
use kdtree::device::{HostTree, Share};
use kdtree::engine::contract::Sampling;
use round_support::{Noise, Pair, card, limits};

fn one_of<T: Copy>(random: &mut Random, choices: &[T]) -> T {
    choices[random.below(choices.len())]
}

/// Any mixture of parameters.
fn any_sampling(vocab: usize, random: &mut Random) -> Sampling {
    let mut sampling = Sampling {
        temperature: one_of(random, &[0.0, 0.0, 0.3, 1.0, 1.0, 2.5]),
        top_p: one_of(random, &[1.0, 1.0, 0.95, 0.5, 0.05]),
        top_k: one_of(random, &[0, 0, 1, 5, 50, 1000]),
        min_p: one_of(random, &[0.0, 0.0, 0.02, 0.3]),
        seed: random.word(),
        ..Sampling::greedy()
    };
    if random.below(3) == 0 {
        sampling.frequency_penalty = one_of(random, &[0.0, 0.7]);
        sampling.presence_penalty = one_of(random, &[0.0, -0.4]);
        sampling.repetition_penalty = one_of(random, &[1.0, 1.3]);
    }
    if random.below(4) == 0 {
        let biases = 1 + random.below(300);
        sampling.logit_bias = (0..biases).map(|_| (random.below(vocab) as u32, random.below(200) as f32 / 10.0 - 10.0)).collect();
        sampling.logit_bias.sort_unstable_by_key(|entry| entry.0);
        sampling.logit_bias.dedup_by_key(|entry| entry.0);
    }
    sampling
}

/// Noise in which most rows choose one of their children.
fn leading(noise: &Noise, vocab: usize, trees: &[HostTree], random: &mut Random) -> Vec<f32> {
    let rows = trees.iter().map(|tree| tree.tokens.len()).sum();
    let mut logits = noise.rows(rows, random);
    let mut first = 0;
    for tree in trees {
        for row in 0..tree.tokens.len() {
            let children: Vec<usize> = (row + 1..tree.tokens.len()).filter(|&child| usize::from(tree.parents[child]) == row).collect();
            if !children.is_empty() && random.below(4) > 0 {
                let child = tree.tokens[children[random.below(children.len())]];
                logits[(first + row) * vocab + child as usize] += 14.0;
            }
        }
        first += tree.tokens.len();
    }
    logits
}

/// Random masks for some shares; every one allows the row's children.
fn masks(vocab: usize, some: usize, trees: &[HostTree], random: &mut Random) -> Vec<(usize, Vec<u32>)> {
    let words = vocab.div_ceil(32);
    let mut out = Vec::new();
    for (share, tree) in trees.iter().enumerate() {
        if random.below(some) > 0 {
            continue;
        }
        let mut mask: Vec<u32> = (0..tree.tokens.len() * words).map(|_| random.word() as u32).collect();
        for row in 1..tree.tokens.len() {
            mask[usize::from(tree.parents[row]) * words + tree.tokens[row] as usize / 32] |= 1 << (tree.tokens[row] % 32);
        }
        out.push((share, mask));
    }
    out
}

/// Shares over a random part of the admitted requests, within the rows of a pass.
fn shares(pair: &mut Pair, most: usize) -> Vec<Share> {
    let mut left = pair.limits.verify_rows;
    let mut out = Vec::new();
    for request in 0..pair.limits.requests {
        if !pair.room(request) || left == 0 || pair.random.below(8) == 0 {
            continue;
        }
        let rows = match pair.random.below(4) {
            0 => 1,
            1 => 1 + pair.random.below(most.min(64)),
            _ => most.min(64),
        };
        let rows = rows.min(left);
        left -= rows;
        out.push(Share { request, rows, chain: pair.random.below(4) == 0 });
    }
    out
}

/// Rounds of a changing crowd.
fn crowd(pair: &mut Pair, rounds: usize, most: usize, draft: &Noise, target: &Noise) {
    let vocab = pair.limits.vocab;
    let (mut accepted, mut emitted) = (0, 0);
    for _ in 0..rounds {
        for request in 0..pair.limits.requests {
            let leaves = pair.random.below(9) == 0;
            if !pair.room(request) || leaves {
                let sampling = any_sampling(vocab, &mut pair.random);
                let logprobs = [None, None, Some(0), Some(5), Some(20)][pair.random.below(5)];
                let drafts = pair.random.below(4) > 0;
                pair.start(request, sampling, logprobs, drafts, None, target);
            }
        }
        let shares = shares(pair, most);
        if shares.is_empty() {
            continue;
        }
        let outcomes = pair.round(
            &shares,
            draft,
            |trees, random| masks(vocab, 5, trees, random),
            |trees, random| leading(target, vocab, trees, random),
        );
        accepted += outcomes.iter().map(|outcome| outcome.tokens.len().saturating_sub(1)).sum::<usize>();
        emitted += outcomes.len();
    }
    pair.compare_latents();
    println!("{} outcomes compared, {:.2} drafted tokens accepted a share", pair.compared, accepted as f64 / emitted as f64);
    assert!(accepted > 0, "trees are walked");
}

#[test]
fn rounds_of_a_small_vocabulary_match_the_cpu() {
    for (requests, rows, most) in [(1, 64, 64), (3, 64, 17), (8, 128, 16), (128, 512, 8)] {
        let Some(gpu) = card() else { return };
        let limits = limits(requests, rows, 200, 8, 4096);
        let mut pair = Pair::new(gpu, &limits, 11 + requests as u64);
        let noise = Noise::bell(4096, &mut pair.random);
        crowd(&mut pair, 3 + 60 / requests, most, &noise, &noise);
    }
}

#[test]
fn rounds_of_kimis_vocabulary_match_the_cpu() {
    for (requests, rows, most, rounds) in [(1, 64, 64, 5), (8, 64, 8, 3), (64, 256, 4, 1)] {
        let Some(gpu) = card() else { return };
        let limits = limits(requests, rows, 200, 8, 163_840);
        let mut pair = Pair::new(gpu, &limits, 31 + requests as u64);
        let noise = Noise::bell(163_840, &mut pair.random);
        crowd(&mut pair, rounds, most, &noise, &noise);
    }
}

#[test]
fn rounds_replayed_from_graphs_match_the_cpu() {
    let Some(gpu) = card() else { return };
    let limits = limits(16, 128, 200, 8, 4096);
    let mut pair = Pair::new(gpu, &limits, 5);
    pair.graphs = Some(Default::default());
    let noise = Noise::bell(4096, &mut pair.random);
    crowd(&mut pair, 40, 8, &noise, &noise);
    println!(
        "{} graphs, {} vectors allocated, {} waits",
        pair.graphs.as_ref().unwrap().len(),
        pair.cuda_round.allocations(),
        pair.cuda_round.waits()
    );
}

#[test]
fn ties_fall_as_on_the_cpu() {
    for vocab in [4096, 5003, 163_840] {
        let Some(gpu) = card() else { return };
        let mut pair = Pair::new(gpu, &limits(4, 128, 200, 16, vocab), 7);
        let (levels, steps) = (Noise::levels(vocab, &mut pair.random), Noise::steps(vocab, &mut pair.random));
        crowd(&mut pair, 4, 64, &levels, &steps);
    }
}

#[test]
fn every_sampling_parameter_draws_as_on_the_cpu() {
    for (vocab, rounds) in [(4096, 24), (163_840, 1)] {
        let Some(gpu) = card() else { return };
        let mut pair = Pair::new(gpu, &limits(128, 128, 200, 1, vocab), 13);
        let noise = Noise::bell(vocab, &mut pair.random);
        for round in 0..rounds {
            for request in 0..128 {
                if round % 4 == 0 {
                    let mut sampling = any_sampling(vocab, &mut pair.random);
                    sampling.temperature = one_of(&mut pair.random, &[0.2, 0.7, 1.0, 3.0]);
                    pair.start(request, sampling, None, false, None, &noise);
                }
            }
            let shares: Vec<Share> = (0..128).map(|request| Share { request, rows: 1, chain: false }).collect();
            pair.round(&shares, &noise, |_, _| Vec::new(), |trees, random| noise.rows(trees.len(), random));
        }
        println!("{} draws compared at {vocab} tokens", pair.compared);
    }
}

#[test]
fn faults_are_named_as_on_the_cpu() {
    let Some(gpu) = card() else { return };
    let vocab = 4096;
    let mut pair = Pair::new(gpu, &limits(6, 64, 200, 8, vocab), 17);
    let noise = Noise::bell(vocab, &mut pair.random);
    let biased = |bias: f32, token: u32| Sampling { logit_bias: vec![(5, 1.0), (token, bias)], ..Sampling::greedy() };
    let drawn = Sampling { temperature: 1.0, top_p: 0.9, ..Sampling::greedy() };
    let nothing = vec![0u32; vocab / 32];
    for (request, sampling) in
        [Sampling::greedy(), drawn, biased(2.0, 4096), biased(f32::INFINITY, 9), Sampling::greedy(), Sampling::greedy()]
            .into_iter()
            .enumerate()
    {
        let mask = (request == 4).then_some(&nothing[..]);
        let outcome = pair.start(request, sampling, Some(3), true, mask, &noise);
        println!("begin {request}: {:?}", outcome.fault);
    }
    let planted = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let mut seen = 0;
    for turn in 0..12 {
        let shares: Vec<Share> = (0..6).map(|request| Share { request, rows: 1 + turn % 9, chain: false }).collect();
        let outcomes = pair.round(
            &shares,
            &noise,
            |trees, _| vec![(4, vec![0; trees[4].tokens.len() * (vocab / 32)])],
            |trees, random| {
                let mut logits = leading(&noise, vocab, trees, random);
                let rows = logits.len() / vocab;
                for _ in 0..rows / 6 + 1 {
                    let at = random.below(logits.len());
                    logits[at] = planted[turn % 3];
                }
                // A row with no number that can be chosen.
                let last = random.below(rows);
                if turn % 3 == 2 {
                    logits[last * vocab..(last + 1) * vocab].fill(f32::NEG_INFINITY);
                }
                logits
            },
        );
        seen += outcomes.iter().filter(|outcome| outcome.fault.is_some()).count();
    }
    pair.compare_latents();
    println!("{seen} faults named alike");
    assert!(seen > 24);
}

#[test]
fn draft_logits_with_few_or_no_numbers_end_trees_short() {
    let Some(gpu) = card() else { return };
    let vocab = 4096;
    let mut pair = Pair::new(gpu, &limits(5, 128, 200, 8, vocab), 19);
    let noise = Noise::bell(vocab, &mut pair.random);
    for request in 0..5 {
        pair.start(request, Sampling::greedy(), None, true, None, &noise);
    }
    for holes in [vocab - 1, vocab, vocab - 20] {
        let mut sparse = noise.rows(1, &mut pair.random);
        for (at, value) in sparse[..holes].iter_mut().enumerate() {
            *value = if at % 3 == 0 { f32::NAN } else { f32::NEG_INFINITY };
        }
        let few = Noise::of(sparse.iter().map(|value| if value.is_nan() { f32::NEG_INFINITY } else { *value }).collect());
        let broken = Noise::of(sparse);
        for draft in [&few, &broken] {
            let shares: Vec<Share> = (0..5).map(|request| Share { request, rows: 20, chain: request == 3 }).collect();
            pair.round(&shares, draft, |_, _| Vec::new(), |trees, random| leading(&noise, vocab, trees, random));
        }
    }
    pair.compare_latents();
}

#[test]
fn prompt_logprobs_match_the_cpu() {
    for vocab in [4096, 5003, 163_840] {
        let Some(gpu) = card() else { return };
        let mut pair = Pair::new(gpu, &limits(1, 128, 200, 8, vocab), 23);
        pair.limits.chunk_rows = 64;
        let noise = Noise::bell(vocab, &mut pair.random);
        pair.start(0, Sampling::greedy(), None, false, None, &noise);
        for (count, top) in [(1, 0), (7, 5), (64, 20)] {
            pair.prompt_logprobs(&noise, count, top);
        }
        let steps = Noise::steps(vocab, &mut pair.random);
        pair.prompt_logprobs(&steps, 40, 20);
    }
}

/// Times every operation of a round by replaying it from a graph. Prints; promises nothing.
#[test]
#[ignore = "measures"]
fn times_of_every_operation() {
    const REPLAYS: usize = 50;
    for vocab in [4096, 163_840] {
        for (requests, rows) in [(1, 1), (1, 8), (8, 1), (8, 8), (8, 64), (32, 8), (128, 4)] {
            for (name, sampling) in [
                ("greedy", Sampling::greedy()),
                ("drawn", Sampling { temperature: 1.0, ..Sampling::greedy() }),
                ("top-p", Sampling { temperature: 1.0, top_p: 0.95, ..Sampling::greedy() }),
            ] {
                let Some(gpu) = card() else { return };
                let mut pair = Pair::new(gpu, &limits(requests, requests * rows.max(2), 2048, 8, vocab), 29);
                let noise = Noise::bell(vocab, &mut pair.random);
                for request in 0..requests {
                    pair.start(request, sampling.clone(), None, true, None, &noise);
                }
                let shares: Vec<Share> = (0..requests).map(|request| Share { request, rows, chain: false }).collect();
                pair.round(&shares, &noise, |_, _| Vec::new(), |trees, random| leading(&noise, vocab, trees, random));
                kdtree::device::Device::plan(&pair.cuda, &mut pair.cuda_round, &shares).unwrap();
                let drafting = if rows > 1 { requests } else { 0 };
                let mut line = format!("{vocab} tokens, {requests} requests x {rows} rows, {name}:");
                let mut total = 0.0;
                for (what, op) in OPERATIONS {
                    if drafting == 0 && matches!(*what, "blocks" | "marginals") {
                        continue;
                    }
                    let graph = pair.capture(op);
                    graph.launch().unwrap();
                    pair.cuda.gpu.synchronize().unwrap();
                    let start = Instant::now();
                    (0..REPLAYS).for_each(|_| graph.launch().unwrap());
                    pair.cuda.gpu.synchronize().unwrap();
                    let us = start.elapsed().as_secs_f64() * 1e6 / REPLAYS as f64;
                    total += us;
                    line += &format!(" {what} {us:.1}");
                }
                let whole = pair.capture(|pair| {
                    pair.enqueue_first(drafting);
                    pair.enqueue_second();
                });
                let start = Instant::now();
                (0..REPLAYS).for_each(|_| whole.launch().unwrap());
                pair.cuda.gpu.synchronize().unwrap();
                println!("{line} | sum {total:.1}, one graph {:.1} us", start.elapsed().as_secs_f64() * 1e6 / REPLAYS as f64);
            }
        }
    }
}

type Operation = fn(&mut Pair);

const OPERATIONS: &[(&str, Operation)] = &[
    ("blocks", |pair| kdtree::device::Device::place_blocks(&pair.cuda, &pair.cuda_round, 3, &mut pair.blocks).unwrap()),
    ("marginals", |pair| kdtree::device::Device::marginals(&pair.cuda, &mut pair.cuda_round, &pair.drafted).unwrap()),
    ("grow", |pair| kdtree::device::Device::grow(&pair.cuda, &mut pair.cuda_round).unwrap()),
    ("place", |pair| kdtree::device::Device::place_trees(&pair.cuda, &pair.cuda_round, &mut pair.trees).unwrap()),
    ("sample", |pair| kdtree::device::Device::sample(&pair.cuda, &mut pair.cuda_round, &pair.logits).unwrap()),
    ("walk", |pair| {
        kdtree::device::Device::walk_and_commit(&pair.cuda, &mut pair.cuda_round, &mut pair.latents, &mut pair.accepted).unwrap();
    }),
];
