//! What only a card can show about the verify kernels. Ignored by default; on a machine with one run
//! `cargo test --test gpu -- --ignored --nocapture --test-threads=1`. The sanitizer grid runs under compute-sanitizer. The grid of 1288
//! shapes takes minutes; `KDTREE_TEST_PART=0/8` to `7/8` run it in eight parts.

mod verify_support;

use cudarc::driver::sys;
use half::bf16;
use kdtree::bench::kernel_inputs::{Cache, Inputs, Lists, Mask, Random, RequestShape, Slots, poison};
use kdtree::device::cuda::{Gpu, Kernel, Numerics};

use verify_support::{Bench, Checker, Outputs};

const HEADS: usize = 8;
const QS: [usize; 11] = [1, 2, 3, 7, 8, 9, 16, 17, 32, 63, 64];
const BATCHES: [usize; 6] = [1, 2, 7, 8, 32, 128];
const LENGTHS: [usize; 10] = [0, 1, 15, 16, 17, 128, 140, 4096, 4097, 131072];
/// 2.5 GB of KV rows: slots beyond 2^31 bytes are in use.
const BIG_CACHE: usize = 2_200_000 / 16 * 16;

fn uniform(batch: usize, prefix: usize, rows: usize, mask: Mask, random: &mut Random) -> Vec<RequestShape> {
    (0..batch).map(|_| RequestShape { prefix, mask: mask.rows(rows, random) }).collect()
}

/// Which cases of the grid to run: with `KDTREE_TEST_PART=k/n` those whose number leaves k when divided by n, else all.
fn part() -> (usize, usize) {
    let Ok(text) = std::env::var("KDTREE_TEST_PART") else { return (0, 1) };
    let parsed = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    parsed.filter(|(k, n)| k < n).unwrap_or_else(|| panic!("KDTREE_TEST_PART: found {text:?}, wanted k/n with k below n, as 0/8"))
}

#[test]
#[ignore = "needs a card"]
fn grid_matches_the_dense_reference() {
    let (wanted, parts) = part();
    let mut c = Checker::new();
    let mut random = Random(1);
    let cache = Cache::new(&c.bench.gpu, BIG_CACHE, &mut random).unwrap();
    let mut turn = 0;
    for batch in BATCHES {
        for length in LENGTHS {
            for q in QS {
                // The largest caches cost more host time for their lists than they tell: three row counts are enough there.
                if batch * length > 4_000_000 && ![1, 9, 64].contains(&q) {
                    continue;
                }
                for slots in [Slots::Random, Slots::Blocks] {
                    turn += 1;
                    let mask = Mask::ALL[turn % 5];
                    let scale = if turn % 3 == 0 { 1.0 } else { 0.1 };
                    let requests = uniform(batch, length, q, mask, &mut random);
                    if turn % parts != wanted {
                        continue;
                    }
                    c.case(&format!("q {q} B {batch} L {length} {slots:?} {mask:?} x{scale}"), &cache, &requests, slots, HEADS, scale);
                }
            }
        }
    }
    c.finish("grid");
}

#[test]
#[ignore = "needs a card"]
fn ragged_batches_and_other_head_counts_match_the_dense_reference() {
    let mut c = Checker::new();
    let mut random = Random(2);
    let cache = Cache::new(&c.bench.gpu, 400_000, &mut random).unwrap();
    for turn in 0..60 {
        let heads = [4, 8, 16, 32, 64][turn % 5];
        let batch = 1 + random.below(128);
        let mut left = 512;
        let requests: Vec<_> = (0..batch)
            .map(|i| {
                let q = if random.below(5) == 0 { 0 } else { 1 + random.below(if turn % 4 == 0 { 64 } else { 9 }) }.min(left);
                left -= q;
                let prefix = [0, random.below(40), random.below(700), random.below(6000), LENGTHS[random.below(9)]][random.below(5)];
                let mask = if q == 0 { Vec::new() } else { Mask::ALL[(turn + i) % 5].rows(q, &mut random) };
                RequestShape { prefix, mask }
            })
            .collect();
        let slots = if turn % 2 == 0 { Slots::Random } else { Slots::Blocks };
        c.case(
            &format!("ragged {turn}: H {heads} B {batch} {slots:?}"),
            &cache,
            &requests,
            slots,
            heads,
            if turn % 3 == 0 { 1.0 } else { 0.1 },
        );
    }
    c.finish("ragged");
}

/// Few blocks and short prefixes, for compute-sanitizer.
#[test]
#[ignore = "needs a card"]
fn sanitizer_grid() {
    let mut c = Checker::new();
    let mut random = Random(3);
    let cache = Cache::new(&c.bench.gpu, 1600, &mut random).unwrap();
    for (turn, (q, batch, length)) in [(1, 1, 0), (2, 2, 140), (4, 3, 33), (8, 1, 300), (17, 2, 64)].into_iter().enumerate() {
        let slots = if turn % 2 == 0 { Slots::Random } else { Slots::Blocks };
        let mut requests = uniform(batch, length, q, Mask::Tree, &mut random);
        requests.push(RequestShape { prefix: 0, mask: Vec::new() });
        c.case(&format!("q {q} B {batch} L {length} {slots:?}"), &cache, &requests, slots, HEADS, 0.1);
    }
    c.finish("sanitizer grid");
}

#[test]
#[ignore = "needs a card"]
fn reference_equals_host_arithmetic() {
    let mut b = Bench::open();
    let mut random = Random(4);
    let cache = Cache::new(&b.gpu, 1024, &mut random).unwrap();
    let requests = uniform(2, 37, 5, Mask::Tree, &mut random);
    let (lists, inputs) = b.inputs(&cache, &requests, Slots::Random, HEADS, 1.0, 11);
    let samples: Vec<i32> = (0..(10 * HEADS) as i32).collect();
    let (out, lse) = b.dense(&cache, &lists, &inputs, &samples);
    let kv: Vec<u16> = b.gpu.stream.clone_dtoh(&cache.kv).unwrap();
    let q: Vec<u16> = b.gpu.stream.clone_dtoh(&inputs.q).unwrap();
    let value = |bits: u16| f64::from(bf16::from_bits(bits).to_f32());
    for (i, &sample) in samples.iter().enumerate() {
        let row = sample as usize / HEADS;
        let r = row / 5;
        let mut keys: Vec<i32> = lists.kv_indices[lists.kv_begin[r] as usize..][..lists.kv_len[r] as usize].to_vec();
        keys.extend((0..5).filter(|j| lists.mask[row] >> j & 1 == 1).map(|j| lists.draft_slots[r * 5 + j]));
        let scores: Vec<f64> = keys
            .iter()
            .map(|&k| (0..576).map(|c| value(q[sample as usize * 576 + c]) * value(kv[k as usize * 576 + c])).sum::<f64>() / 192f64.sqrt())
            .collect();
        let total: f64 = scores.iter().map(|s| s.exp()).sum();
        assert!((f64::from(lse[i]) - total.ln()).abs() < 1e-5, "lse of {sample}");
        for c in 0..512 {
            let o: f64 = keys.iter().zip(&scores).map(|(&k, s)| s.exp() / total * value(kv[k as usize * 576 + c])).sum();
            assert!((f64::from(out[i * 512 + c]) - o).abs() < 1e-5, "output {sample} {c}");
        }
    }
}

fn captured(gpu: &Gpu, work: impl FnOnce()) -> cudarc::driver::CudaGraph {
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    work();
    gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().expect("a graph with nodes")
}

#[test]
#[ignore = "needs a card"]
fn graph_replay_with_changed_lengths_equals_eager_bit_for_bit_and_runs_repeat() {
    let mut b = Bench::open();
    let mut random = Random(5);
    let cache = Cache::new(&b.gpu, 200_000, &mut random).unwrap();
    cache.fill(&b.gpu, 0.3, 9).unwrap();
    let length_sets: [[usize; 4]; 5] =
        [[1000, 17, 4096, 250], [9000, 4000, 20_000, 5000], [3, 0, 16, 1], [0, 0, 0, 0], [64, 30_000, 0, 129]];
    let row_sets: [[usize; 4]; 5] = [[16, 16, 16, 16], [16, 1, 9, 16], [3, 4, 5, 6], [0, 0, 0, 0], [16, 0, 2, 1]];
    for (kernel, numerics) in [(Kernel::Tree, Numerics::Fast), (Kernel::Tree, Numerics::Exact), (Kernel::Baseline, Numerics::Fast)] {
        let verify = b.verify(4, 64, 16, HEADS, 40_000);
        let lists: Vec<Lists> = length_sets
            .iter()
            .zip(&row_sets)
            .map(|(lengths, rows)| {
                let requests: Vec<_> = lengths
                    .iter()
                    .zip(rows)
                    .map(|(&prefix, &q)| RequestShape { prefix, mask: if q == 0 { Vec::new() } else { Mask::Tree.rows(q, &mut random) } })
                    .collect();
                let start = b.random.below(cache.capacity());
                cache.lists(&requests, Slots::Random, start, 3)
            })
            .collect();
        // One set of device buffers, sized for the largest, rewritten for each set of lengths.
        let mut widest = lists[1].clone();
        widest.draft_slots.resize(64, i32::MAX);
        widest.mask.resize(64, u64::MAX);
        let mut inputs = Inputs::new(&b.gpu, &widest, HEADS, 64).unwrap();
        cache.fill_array(&b.gpu, &inputs.q, 0.5, 77).unwrap();
        let upload = |inputs: &mut Inputs, l: &Lists, gpu: &Gpu| {
            gpu.stream.memcpy_htod(&l.qo_indptr, &mut inputs.qo_indptr).unwrap();
            gpu.stream.memcpy_htod(&l.kv_begin, &mut inputs.kv_begin).unwrap();
            gpu.stream.memcpy_htod(&l.kv_len, &mut inputs.kv_len).unwrap();
            gpu.stream.memcpy_htod(&l.kv_indices, &mut inputs.kv_indices).unwrap();
            if !l.mask.is_empty() {
                gpu.stream.memcpy_htod(&l.draft_slots, &mut inputs.draft_slots).unwrap();
                gpu.stream.memcpy_htod(&l.mask, &mut inputs.mask).unwrap();
            }
            gpu.synchronize().unwrap();
        };
        upload(&mut inputs, &lists[0], &b.gpu);
        b.run(&verify, kernel, numerics, &cache, &inputs);
        // SAFETY: `inputs`, `cache` and `verify` outlive the graph.
        let graph = captured(&b.gpu, || unsafe { verify.launch(&b.gpu, kernel, numerics, &inputs.call(&b.gpu, &cache.rows)).unwrap() });
        for (i, l) in lists.iter().enumerate() {
            upload(&mut inputs, l, &b.gpu);
            let eager = b.run(&verify, kernel, numerics, &cache, &inputs);
            let again = b.run(&verify, kernel, numerics, &cache, &inputs);
            assert_eq!(eager.bits, again.bits, "{kernel:?} {numerics:?} set {i}: two runs differ");
            poison(&b.gpu, &inputs.out).unwrap();
            graph.launch().unwrap();
            let replayed = b.read(&inputs);
            assert_eq!(eager.bits, replayed.bits, "{kernel:?} {numerics:?} set {i}: replay differs from eager");
            let used = *l.qo_indptr.last().unwrap() as usize * HEADS;
            assert_eq!(
                eager.lse[..used].iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                replayed.lse[..used].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            );
            assert!(eager.out[..used * 512].iter().all(|x| x.is_finite()));
        }
    }
    println!("graph replay = eager = second run, bit for bit, over {} sets of lengths", length_sets.len());
}

/// Rows of one request out of a batch's outputs.
fn rows_of(outputs: &Outputs, first_row: usize, rows: usize) -> (&[u16], Vec<u32>) {
    let (a, b) = (first_row * HEADS, (first_row + rows) * HEADS);
    (&outputs.bits[a * 512..b * 512], outputs.lse[a..b].iter().map(|x| x.to_bits()).collect())
}

#[test]
#[ignore = "needs a card"]
fn exact_gives_a_request_the_same_bits_alone_batched_in_a_chain_in_a_tree_and_after_commit() {
    let mut b = Bench::open();
    let mut random = Random(6);
    let cache = Cache::new(&b.gpu, 300_000, &mut random).unwrap();
    cache.fill(&b.gpu, 0.4, 3).unwrap();
    let stream = b.gpu.stream.clone();
    let mut compared = 0;
    for (kernel, numerics) in [(Kernel::Tree, Numerics::Exact), (Kernel::Baseline, Numerics::Fast)] {
        for prefix in [0, 5, 120, 127, 1000, 4090, 8190, 20_011] {
            // A tree of 16 rows; the path to its deepest row is also run as a chain, and row by row after commit.
            let words = Mask::Tree.rows(16, &mut random);
            let deepest = (0..16).max_by_key(|&i| words[i].count_ones()).unwrap();
            let path: Vec<usize> = (0..16).filter(|j| words[deepest] >> j & 1 == 1).collect();
            let tree = RequestShape { prefix, mask: words.clone() };
            let start = b.random.below(cache.capacity());
            let alone = cache.lists(std::slice::from_ref(&tree), Slots::Random, start, 0);
            let run = |b: &Bench, lists: &Lists, q: &[u16], per: usize| {
                let verify = b.verify(lists.qo_indptr.len() - 1, lists.draft_slots.len().max(per), per, HEADS, 40_000);
                let mut inputs = Inputs::new(&b.gpu, lists, HEADS, 0).unwrap();
                stream.memcpy_htod(q, &mut inputs.q).unwrap();
                b.run(&verify, kernel, numerics, &cache, &inputs)
            };
            let scratch = Inputs::new(&b.gpu, &alone, HEADS, 16).unwrap();
            cache.fill_array(&b.gpu, &scratch.q, 0.6, prefix as u64).unwrap();
            let q: Vec<u16> = stream.clone_dtoh(&scratch.q).unwrap();
            let q_of = |rows: &[usize]| rows.iter().flat_map(|&r| q[r * HEADS * 576..(r + 1) * HEADS * 576].to_vec()).collect::<Vec<u16>>();
            let lone = run(&b, &alone, &q, 16);

            // Among 32: the same request at a random place between others of any length and size.
            let place = b.random.below(32);
            let mut batch = Lists { qo_indptr: vec![0], ..Lists::default() };
            let mut batch_q = Vec::new();
            let mut first_row = 0;
            for i in 0..32 {
                let one = if i == place {
                    first_row = batch.draft_slots.len();
                    batch_q.extend(&q);
                    alone.clone()
                } else {
                    let rows = 1 + b.random.below(16);
                    let other = RequestShape { prefix: b.random.below(3000), mask: Mask::Tree.rows(rows, &mut random) };
                    batch_q.extend(q_of(&(0..rows).collect::<Vec<_>>()));
                    let start = b.random.below(cache.capacity());
                    cache.lists(std::slice::from_ref(&other), Slots::Random, start, 0)
                };
                batch.kv_begin.push(batch.kv_indices.len() as i32);
                batch.kv_len.extend(&one.kv_len);
                batch.kv_indices.extend(&one.kv_indices);
                batch.draft_slots.extend(&one.draft_slots);
                batch.mask.extend(&one.mask);
                batch.qo_indptr.push(batch.draft_slots.len() as i32);
            }
            let together = run(&b, &batch, &batch_q, 16);
            assert_eq!(rows_of(&lone, 0, 16), rows_of(&together, first_row, 16), "{kernel:?} prefix {prefix}: alone and among 32 differ");

            // The path as a chain.
            let chain = Lists {
                qo_indptr: vec![0, path.len() as i32],
                kv_begin: vec![0],
                kv_len: alone.kv_len.clone(),
                kv_indices: alone.kv_indices.clone(),
                draft_slots: path.iter().map(|&r| alone.draft_slots[r]).collect(),
                mask: (0..path.len()).map(|i| u64::MAX >> (63 - i)).collect(),
            };
            let chained = run(&b, &chain, &q_of(&path), path.len());
            for (i, &row) in path.iter().enumerate() {
                assert_eq!(
                    rows_of(&lone, row, 1),
                    rows_of(&chained, i, 1),
                    "{kernel:?} prefix {prefix}: chain and tree differ in row {row}"
                );
            }

            // Each row of the path alone, its ancestors committed.
            for (i, &row) in path.iter().enumerate() {
                let mut slots = alone.kv_indices.clone();
                slots.extend(path[..i].iter().map(|&r| alone.draft_slots[r]));
                let committed = Lists {
                    qo_indptr: vec![0, 1],
                    kv_begin: vec![0],
                    kv_len: vec![slots.len() as i32],
                    kv_indices: slots,
                    draft_slots: vec![alone.draft_slots[row]],
                    mask: vec![1],
                };
                let after = run(&b, &committed, &q_of(&[row]), 1);
                assert_eq!(
                    rows_of(&lone, row, 1),
                    rows_of(&after, 0, 1),
                    "{kernel:?} prefix {prefix}: before and after commit differ in row {row}"
                );
                compared += 1;
            }
        }
    }
    println!("exact: alone = among 32, chain = tree, before = after commit ({compared} rows after commit), bit for bit");
}
