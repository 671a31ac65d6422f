//! One round on two devices: everything is done on the CPU and on a card, and compared.

use std::collections::HashMap;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use half::bf16;

use kdtree::bench::kernel_inputs::Random;
use kdtree::device::cpu::mla::CpuLatents;
use kdtree::device::cpu::round::CpuRound;
use kdtree::device::cpu::rows::CpuRows;
use kdtree::device::cpu::{CpuAct, CpuDevice};
use kdtree::device::cuda::attention::CudaLatents;
use kdtree::device::cuda::buffers::CudaAct;
use kdtree::device::cuda::round::CudaRound;
use kdtree::device::cuda::rows::CudaRows;
use kdtree::device::cuda::{CudaDevice, Gpu, Numerics};
use kdtree::device::{Admission, Bucket, Device, HostTree, Limits, Outcome, Phase, Share, Verify};
use kdtree::engine::contract::{Sampling, TokenLogprob};
use kdtree::engine::options::slots_of_request;

pub const LAYERS: usize = 2;
const WIDTH: usize = 576;
const MASK_TOKEN: u32 = 3;

/// A card, or the reason why there is none.
pub fn card() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(mut gpu) => {
            if let Some(folder) = std::env::var_os("KDTREE_TEST_FATBINS") {
                gpu.try_fatbins(folder.as_ref());
            }
            Some(gpu)
        }
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}

pub fn limits(requests: usize, verify_rows: usize, context: usize, block: usize, vocab: usize) -> Limits {
    let slots = requests * slots_of_request(context);
    Limits { requests, verify_rows, chunk_rows: 64, context, slots, block, vocab }
}

/// Logits of many rows, made from one long table of noise.
pub struct Noise {
    table: Vec<f32>,
    vocab: usize,
    stretched: bool,
}

impl Noise {
    /// A bell of standard deviation 2.3 with a few likely tokens.
    pub fn bell(vocab: usize, random: &mut Random) -> Self {
        let table = (0..vocab + 65_536).map(|_| {
            let word = random.word();
            let bell = (0..4).map(|part| (word >> (16 * part) & 0xffff) as f32 / 8192.0 - 4.0).sum::<f32>();
            if random.below(vocab) < 12 { bell + 9.0 } else { bell }
        });
        Self { table: table.collect(), vocab, stretched: true }
    }

    /// Two levels whose sum of exponentials is a whole number, so that every device rounds its logarithm alike: all ties.
    pub fn levels(vocab: usize, random: &mut Random) -> Self {
        let table = (0..vocab + 65_536).map(|_| if random.below(vocab) < 40 { 0.0 } else { -100.0 });
        Self { table: table.collect(), vocab, stretched: false }
    }

    /// Few different values: ties everywhere.
    pub fn steps(vocab: usize, random: &mut Random) -> Self {
        let table = (0..vocab + 65_536).map(|_| match random.below(20) {
            0 => f32::NEG_INFINITY,
            n => (n % 7) as f32 * 0.5 - 1.0,
        });
        Self { table: table.collect(), vocab, stretched: false }
    }

    /// The same row again and again.
    pub fn of(row: Vec<f32>) -> Self {
        Self { vocab: row.len(), table: row, stretched: false }
    }

    pub fn rows(&self, rows: usize, random: &mut Random) -> Vec<f32> {
        let mut out = Vec::with_capacity(rows * self.vocab);
        for _ in 0..rows {
            let from = random.below(self.table.len() - self.vocab + 1);
            // Rows that differ by their place alone would give paths of exactly equal weight.
            let stretch = if self.stretched { 0.75 + random.below(1 << 20) as f32 / (1 << 21) as f32 } else { 1.0 };
            out.extend(self.table[from..from + self.vocab].iter().map(|value| value * stretch));
        }
        out
    }
}

fn cpu_act(data: Vec<f32>, width: usize) -> CpuAct {
    CpuAct { data, width }
}

/// Activations on the card, written anew each round.
fn upload(gpu: &Gpu, act: &mut CudaAct, data: &[f32]) {
    gpu.stream.memcpy_htod(data, &mut act.data.slice_mut(0..data.len())).unwrap();
}

fn column(layer: usize, slot: usize, column: usize) -> f32 {
    ((slot * 7 + layer * 13 + column) % 251) as f32
}

struct Live {
    length: usize,
    slots: Vec<u32>,
    sampling: Sampling,
}

/// The two devices with equal state.
pub struct Pair {
    pub limits: Limits,
    pub random: Random,
    cpu: CpuDevice,
    pub cuda: CudaDevice,
    cpu_round: CpuRound,
    pub cuda_round: CudaRound,
    cpu_rows: CpuRows,
    cpu_accepted: CpuRows,
    pub chunk: CudaRows,
    pub blocks: CudaRows,
    pub trees: CudaRows,
    pub accepted: CudaRows,
    cpu_latents: CpuLatents,
    pub latents: CudaLatents,
    pub drafted: CudaAct,
    pub logits: CudaAct,
    live: Vec<Option<Live>>,
    free: Vec<u32>,
    /// Recorded rounds, where rounds are replayed.
    pub graphs: Option<HashMap<Bucket, CudaGraph>>,
    pub compared: usize,
}

impl Pair {
    pub fn new(gpu: Gpu, limits: &Limits, seed: u64) -> Self {
        let mut random = Random(seed);
        let cuda = CudaDevice::new(gpu, Numerics::Fast, Verify::On, limits, None).unwrap();
        let cpu = CpuDevice::new(Verify::On, None);
        let stream = &cuda.gpu.stream;
        let act = |rows: usize| CudaAct { data: stream.alloc_zeros(rows * limits.vocab).unwrap(), rows, width: limits.vocab };
        let mut cpu_latents = CpuLatents::new(LAYERS, limits.slots, WIDTH);
        let mut data = Vec::with_capacity(LAYERS * limits.slots * WIDTH);
        for (layer, rows) in cpu_latents.layers.iter_mut().enumerate() {
            for (at, value) in rows.iter_mut().enumerate() {
                *value = column(layer, at / WIDTH, at % WIDTH);
                data.push(bf16::from_f32(*value));
            }
        }
        let mut free: Vec<u32> = (0..limits.slots as u32).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, random.below(i + 1));
        }
        Self {
            cpu_round: cpu.round(limits).unwrap(),
            cuda_round: cuda.round(limits).unwrap(),
            cpu_rows: cpu.rows(limits.rows()).unwrap(),
            cpu_accepted: cpu.rows(limits.verify_rows).unwrap(),
            chunk: cuda.rows(limits.chunk_rows).unwrap(),
            blocks: cuda.rows(limits.requests * limits.block).unwrap(),
            trees: cuda.rows(limits.verify_rows).unwrap(),
            accepted: cuda.rows(limits.verify_rows).unwrap(),
            latents: CudaLatents { data: stream.clone_htod(&data).unwrap(), layers: LAYERS, slots: limits.slots, kv: Vec::new() },
            drafted: act((limits.requests * limits.block).min(limits.verify_rows / 2 * limits.block).max(1)),
            logits: act(limits.verify_rows),
            live: (0..limits.requests).map(|_| None).collect(),
            limits: limits.clone(),
            cpu_latents,
            cpu,
            cuda,
            free,
            random,
            graphs: None,
            compared: 0,
        }
    }

    pub fn length(&self, request: usize) -> Option<usize> {
        self.live[request].as_ref().map(|live| live.length)
    }

    pub fn room(&self, request: usize) -> bool {
        self.length(request).is_some_and(|length| length + 64 <= self.limits.context)
    }

    /// Admits a request, places its prompt in chunks and begins it with a row of logits.
    pub fn start(
        &mut self,
        request: usize,
        sampling: Sampling,
        logprobs: Option<u32>,
        drafts: bool,
        mask: Option<&[u32]>,
        noise: &Noise,
    ) -> Outcome {
        self.stop(request);
        let prompt_length = 1 + self.random.below(self.limits.context / 3);
        let prompt: Vec<u32> = (0..prompt_length).map(|_| self.random.below(self.limits.vocab) as u32).collect();
        let slots = self.free.split_off(self.free.len() - slots_of_request(self.limits.context));
        let suppressed: Vec<u32> = (0..self.random.below(4)).map(|_| self.random.below(self.limits.vocab) as u32).collect();
        let free_from = (prompt_length + self.random.below(10)) as u32;
        let admission =
            Admission { sampling: sampling.clone(), suppressed, free_from, prompt: prompt.clone(), slots: slots.clone(), logprobs, drafts };
        self.cpu.admit(&mut self.cpu_round, request, admission.clone()).unwrap();
        self.cuda.admit(&mut self.cuda_round, request, admission).unwrap();
        self.live[request] = Some(Live { length: prompt_length, slots, sampling });
        for (at, tokens) in prompt.chunks(self.limits.chunk_rows).enumerate() {
            let start = at * self.limits.chunk_rows;
            self.cpu.place_chunk(&self.cpu_round, request, start, tokens, &mut self.cpu_rows).unwrap();
            self.cuda.place_chunk(&self.cuda_round, request, start, tokens, &mut self.chunk).unwrap();
            self.compare_rows("chunk", &self.cpu_rows, &self.chunk, false);
            assert_eq!(self.chunk.reach, start + tokens.len());
        }
        let logits = noise.rows(1, &mut self.random);
        upload(&self.cuda.gpu, &mut self.logits, &logits);
        self.cpu.begin(&mut self.cpu_round, request, prompt_length, &cpu_act(logits, self.limits.vocab), mask).unwrap();
        self.cuda.begin(&mut self.cuda_round, request, prompt_length, &self.logits, mask).unwrap();
        self.read(&[request]).remove(0)
    }

    pub fn stop(&mut self, request: usize) {
        if let Some(live) = self.live[request].take() {
            self.free.extend(live.slots);
            self.cpu.retire(&mut self.cpu_round, request).unwrap();
            self.cuda.retire(&mut self.cuda_round, request).unwrap();
        }
    }

    /// A whole round. `target` gets the CPU's trees and makes the logits of all verify rows; `masks` the masks of some shares.
    pub fn round(
        &mut self,
        shares: &[Share],
        draft: &Noise,
        mut masks: impl FnMut(&[HostTree], &mut Random) -> Vec<(usize, Vec<u32>)>,
        mut target: impl FnMut(&[HostTree], &mut Random) -> Vec<f32>,
    ) -> Vec<Outcome> {
        let drafting = shares.iter().filter(|share| share.rows > 1).count();
        self.cpu.plan(&mut self.cpu_round, shares).unwrap();
        self.cuda.plan(&mut self.cuda_round, shares).unwrap();
        let drafted = draft.rows(drafting * self.limits.block, &mut self.random);
        upload(&self.cuda.gpu, &mut self.drafted, &drafted);
        if drafting > 0 {
            self.cpu.place_blocks(&self.cpu_round, MASK_TOKEN, &mut self.cpu_rows).unwrap();
            self.cpu.marginals(&mut self.cpu_round, &cpu_act(drafted, self.limits.vocab)).unwrap();
        }
        self.cpu.grow(&mut self.cpu_round).unwrap();
        self.first_half(drafting);
        if drafting > 0 {
            self.compare_rows("blocks", &self.cpu_rows, &self.blocks, true);
        }
        let trees = self.cpu.read_trees(&self.cpu_round).unwrap();
        for (want, got) in trees.iter().zip(self.cuda.read_trees(&self.cuda_round).unwrap()) {
            assert_eq!((&want.tokens, &want.parents), (&got.tokens, &got.parents), "trees differ");
        }
        for (share, masks) in masks(&trees, &mut self.random) {
            self.cpu.set_masks(&mut self.cpu_round, share, &masks).unwrap();
            self.cuda.set_masks(&mut self.cuda_round, share, &masks).unwrap();
        }
        self.cpu.place_trees(&self.cpu_round, &mut self.cpu_rows).unwrap();
        let logits = target(&trees, &mut self.random);
        upload(&self.cuda.gpu, &mut self.logits, &logits);
        self.cpu.sample(&mut self.cpu_round, &cpu_act(logits, self.limits.vocab)).unwrap();
        self.cpu.walk_and_commit(&mut self.cpu_round, &mut self.cpu_latents, &mut self.cpu_accepted).unwrap();
        self.second_half();
        self.compare_rows("trees", &self.cpu_rows, &self.trees, true);
        self.compare_rows("accepted", &self.cpu_accepted, &self.accepted, true);
        let requests: Vec<usize> = shares.iter().map(|share| share.request).collect();
        let outcomes = self.read(&requests);
        for (share, outcome) in shares.iter().zip(&outcomes) {
            self.live[share.request].as_mut().unwrap().length += outcome.tokens.len();
        }
        outcomes
    }

    fn first_half(&mut self, drafting: usize) {
        self.replay(Phase::Draft, |pair| pair.enqueue_first(drafting));
    }

    fn second_half(&mut self) {
        self.replay(Phase::Verify, Self::enqueue_second);
    }

    fn replay(&mut self, phase: Phase, enqueue: impl FnOnce(&mut Self)) {
        if self.graphs.is_none() {
            return enqueue(self);
        }
        let bucket = self.cuda_round.bucket(phase).expect("planned");
        if !self.graphs.as_ref().unwrap().contains_key(&bucket) {
            let graph = self.capture(enqueue);
            self.graphs.as_mut().unwrap().insert(bucket, graph);
        }
        self.graphs.as_ref().unwrap()[&bucket].launch().unwrap();
    }

    pub fn enqueue_first(&mut self, drafting: usize) {
        if drafting > 0 {
            self.cuda.place_blocks(&self.cuda_round, MASK_TOKEN, &mut self.blocks).unwrap();
            self.cuda.marginals(&mut self.cuda_round, &self.drafted).unwrap();
        }
        self.cuda.grow(&mut self.cuda_round).unwrap();
    }

    pub fn enqueue_second(&mut self) {
        self.cuda.place_trees(&self.cuda_round, &mut self.trees).unwrap();
        self.cuda.sample(&mut self.cuda_round, &self.logits).unwrap();
        self.cuda.walk_and_commit(&mut self.cuda_round, &mut self.latents, &mut self.accepted).unwrap();
    }

    pub fn capture(&mut self, enqueue: impl FnOnce(&mut Self)) -> CudaGraph {
        let stream = self.cuda.gpu.stream.clone();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        enqueue(self);
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).unwrap().expect("a captured graph")
    }

    fn read(&mut self, requests: &[usize]) -> Vec<Outcome> {
        let want = self.cpu.read_round(&mut self.cpu_round).unwrap();
        let got = self.cuda.read_round(&mut self.cuda_round).unwrap();
        assert_eq!(want.len(), got.len());
        for (at, (want, got)) in want.iter().zip(&got).enumerate() {
            let sampling = &self.live[requests[at]].as_ref().unwrap().sampling;
            compare_outcomes(&format!("share {at} {:?}", Sampling { logit_bias: Vec::new(), ..sampling.clone() }), want, got);
            self.compared += 1;
        }
        want
    }

    fn compare_rows(&self, what: &str, want: &CpuRows, got: &CudaRows, padded: bool) {
        let stream = &self.cuda.gpu.stream;
        let counts = stream.clone_dtoh(&got.counts).unwrap();
        let rows = want.len();
        assert_eq!(counts[0] as usize, rows, "{what}: rows");
        // A replayed round leaves the host's bounds as they were.
        let bounded = self.graphs.is_none();
        assert!(!bounded || (got.bound >= rows && got.bound <= got.capacity), "{what}: bound {}", got.bound);
        assert!(!padded || !bounded || got.bound.is_power_of_two() || got.bound == got.capacity || what == "blocks");
        let u32s = |slice: &cudarc::driver::CudaSlice<u32>| stream.clone_dtoh(slice).unwrap();
        let (tokens, positions, sources) = (u32s(&got.tokens), u32s(&got.positions), u32s(&got.sources));
        let slots: Vec<i32> = stream.clone_dtoh(&got.slots).unwrap();
        assert_eq!(tokens[..rows], want.tokens[..], "{what}: tokens");
        assert_eq!(positions[..rows], want.positions[..], "{what}: positions");
        if what != "blocks" {
            assert!(slots.iter().zip(&want.slots).all(|(&got, &want)| got == want as i32), "{what}: slots");
        }
        if !want.sources.is_empty() {
            assert_eq!(sources[..rows], want.sources[..], "{what}: sources");
        }
        if !want.ancestors.is_empty() {
            let ancestors: Vec<u64> = stream.clone_dtoh(&got.ancestors).unwrap();
            assert_eq!(ancestors[..rows], want.ancestors[..], "{what}: ancestors");
        }
        for row in rows..if bounded { got.bound } else { rows } {
            assert_eq!((tokens[row], positions[row], slots[row]), (0, 0, -1), "{what}: padding row {row}");
        }
        let (firsts, begins, prefixes): (Vec<i32>, Vec<i32>, Vec<i32>) = (
            stream.clone_dtoh(&got.firsts).unwrap(),
            stream.clone_dtoh(&got.table_begins).unwrap(),
            stream.clone_dtoh(&got.prefixes).unwrap(),
        );
        if bounded {
            for group in want.groups.len().max(counts[1] as usize)..got.group_bound {
                assert_eq!((firsts[group], prefixes[group]), (rows as i32, 0), "{what}: padding group {group}");
            }
            assert_eq!(firsts[got.group_bound], rows as i32, "{what}: the end");
        }
        for (at, group) in want.groups.iter().enumerate() {
            let stride = slots_of_request(self.limits.context);
            let want = (group.first as i32, group.prefix as i32, (group.request * stride) as i32);
            assert_eq!((firsts[at], prefixes[at], begins[at]), want, "{what}: group {at}");
            assert!(!bounded || got.reach >= group.prefix + group.rows, "{what}: reach {}", got.reach);
        }
    }

    /// All latents of both caches.
    pub fn compare_latents(&self) {
        let got: Vec<bf16> = self.cuda.gpu.stream.clone_dtoh(&self.latents.data).unwrap();
        let want = self.cpu_latents.layers.iter().flatten();
        let differing = got.iter().zip(want).filter(|(got, want)| got.to_f32() != **want).count();
        assert_eq!(differing, 0, "latent values differ");
    }

    pub fn prompt_logprobs(&mut self, noise: &Noise, count: usize, top: u32) {
        let logits = noise.rows(count, &mut self.random);
        let next: Vec<u32> = (0..count).map(|_| self.random.below(self.limits.vocab) as u32).collect();
        let tokens: Vec<u32> = vec![1; count];
        self.cpu.place_chunk(&self.cpu_round, 0, 0, &tokens, &mut self.cpu_rows).unwrap();
        self.cuda.place_chunk(&self.cuda_round, 0, 0, &tokens, &mut self.chunk).unwrap();
        upload(&self.cuda.gpu, &mut self.logits, &logits);
        let want = self.cpu.prompt_logprobs(&cpu_act(logits, self.limits.vocab), &self.cpu_rows, &next, top).unwrap();
        let got = self.cuda.prompt_logprobs(&self.logits, &self.chunk, &next, top).unwrap();
        assert_eq!(want.len(), got.len());
        want.iter().zip(&got).for_each(|(want, got)| compare_logprobs(want, got));
    }
}

fn near(want: f32, got: f32) -> bool {
    want == got || (want.is_nan() && got.is_nan()) || (want - got).abs() <= 2e-6 * want.abs().max(1.0)
}

fn compare_logprobs(want: &TokenLogprob, got: &TokenLogprob) {
    assert_eq!((want.token, want.rank, want.top.len()), (got.token, got.rank, got.top.len()));
    assert!(near(want.logprob, got.logprob), "{want:?} {got:?}");
    for (want, got) in want.top.iter().zip(&got.top) {
        assert!(want.0 == got.0 && near(want.1, got.1), "{want:?} {got:?}");
    }
}

fn compare_outcomes(at: &str, want: &Outcome, got: &Outcome) {
    assert_eq!(want.fault, got.fault, "{at}");
    assert_eq!(want.tokens, got.tokens, "{at}");
    assert_eq!(want.path, got.path, "{at}");
    assert_eq!(want.logprobs.len(), got.logprobs.len(), "{at}");
    want.logprobs.iter().zip(&got.logprobs).for_each(|(want, got)| compare_logprobs(want, got));
    match (&want.tree, &got.tree) {
        (None, None) => {}
        (Some(want), Some(got)) => {
            let rows = want.rows;
            assert_eq!(rows, got.rows);
            assert_eq!(want.token[..rows], got.token[..rows]);
            assert_eq!(want.parent[..rows], got.parent[..rows]);
            assert_eq!(want.depth[..rows], got.depth[..rows]);
            assert_eq!(want.ancestors[..rows], got.ancestors[..rows]);
            for row in 0..rows {
                assert!((want.logprob[row] - got.logprob[row]).abs() < 1e-5, "row {row}");
            }
        }
        _ => panic!("{at}: one tree is missing"),
    }
}
