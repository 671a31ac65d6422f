//! Attention on a card against the CPU device, operation by operation, on random tensors: absorbed (all modes, planted faults, sums of
//! mode `validate`), direct, the projections and the drafter's; and that in `exact` a row's bits do not depend on its company.
//!
//! Without a card every test says why and passes.
#![allow(clippy::neg_cmp_op_on_partial_ord, reason = "a NaN must fail the comparison")]

use std::borrow::Cow;

use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;
use kdtree::bench::kernel_inputs::{Mask, Random};
use kdtree::device::cpu::CpuDevice;
use kdtree::device::cpu::mla::CpuLatents;
use kdtree::device::cpu::rows::CpuRows;
use kdtree::device::cuda::buffers::CudaAct;
use kdtree::device::cuda::rows::CudaRows;
use kdtree::device::cuda::{CudaDevice, Gpu, Numerics};
use kdtree::device::{Device, DraftAttention, DraftMask, GqaShape, KernelFault, Limits, MlaProjection, MlaShape, RopeTable, Verify};
use kdtree::model::rope::Rope;
use kdtree::model::target::rope_table;
use kdtree::model::tensor::Matrix;

const MLA: MlaShape = MlaShape { heads: 8, nope: 128, rope: 64, value: 128, latent: 512, scale: 0.144_679_63 };
const CONTEXT: usize = 24_576;
const SLOTS: usize = 49_152;
const HIDDEN: usize = 256;

fn limits() -> Limits {
    Limits { requests: 16, verify_rows: 128, chunk_rows: 512, context: CONTEXT, slots: SLOTS, block: 16, vocab: 256 }
}

/// A device on the first card, or the printed reason why the test has nothing to do.
fn open(numerics: Numerics, verify: Verify) -> Option<CudaDevice> {
    let mut gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(reason) => {
            eprintln!("skipped: {reason}");
            return None;
        }
    };
    if let Some(folder) = std::env::var_os("KDTREE_TEST_FATBINS") {
        gpu.try_fatbins(folder.as_ref());
    }
    Some(CudaDevice::new(gpu, numerics, verify, &limits(), None).unwrap())
}

/// Nearly normal values.
fn normal(random: &mut Random, len: usize, scale: f32) -> Vec<f32> {
    let uniform = |bits: u64| (bits & 0xffff) as f32 / 65536.0;
    (0..len)
        .map(|_| {
            let word = random.word();
            let sum = uniform(word) + uniform(word >> 16) + uniform(word >> 32) + uniform(word >> 48);
            (sum - 2.0) * 3f32.sqrt() * scale
        })
        .collect()
}

fn matrix(random: &mut Random, rows: usize, columns: usize) -> Matrix<'static> {
    let scale = (columns as f32).sqrt().recip();
    let data = normal(random, rows * columns, scale).into_iter().map(bf16::from_f32).collect();
    Matrix { rows, columns, data: Cow::Owned(data) }
}

fn rounded(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
}

/// One request: its prefix and what its rows see.
#[derive(Clone)]
struct Request {
    prefix: usize,
    masks: Vec<u64>,
}

impl Request {
    fn new(prefix: usize, rows: usize, mask: Mask, random: &mut Random) -> Self {
        Self { prefix, masks: mask.rows(rows, random) }
    }
}

/// The same rows for both devices.
struct Pass {
    cpu: CpuRows,
    cuda: CudaRows,
    live: usize,
    _tables: CudaSlice<i32>,
}

/// Slot of position `p` of request `r`: scattered, no two alike while prefixes are shorter than 6000 (or there is one request).
fn slot(r: usize, p: usize) -> usize {
    (r * 6000 + p) * 13 % SLOTS
}

impl Pass {
    /// Rows of `requests` with `padding` more rows and groups in the bucket. Request r keeps its slots whatever its company (`ids`).
    fn new(device: &CudaDevice, requests: &[Request], ids: &[usize], padding: usize) -> Self {
        let stride = requests.iter().map(|request| request.prefix + request.masks.len()).max().unwrap_or(0).max(1);
        let mut tables = vec![-1i32; stride * requests.len()];
        let mut cpu = CpuRows::with_capacity(64);
        let (mut firsts, mut begins, mut prefixes, mut groups) = (vec![0i32], Vec::new(), Vec::new(), Vec::new());
        for (g, (request, &id)) in requests.iter().zip(ids).enumerate() {
            // Tables lie in the opposite order of the groups.
            let begin = (requests.len() - 1 - g) * stride;
            for p in 0..request.prefix + request.masks.len() {
                tables[begin + p] = slot(id, p) as i32;
            }
            let prefix: Vec<u32> = (0..request.prefix).map(|p| slot(id, p) as u32).collect();
            cpu.open_group(g, &prefix);
            for (row, &mask) in request.masks.iter().enumerate() {
                let depth = mask.count_ones() as usize - 1;
                cpu.push(7, request.prefix + depth, slot(id, request.prefix + row) as u32);
                cpu.ancestors.push(mask);
                groups.push(g as u32);
            }
            cpu.close_group();
            begins.push(begin as i32);
            prefixes.push(request.prefix as i32);
            firsts.push(cpu.len() as i32);
        }
        let live = cpu.len();
        let bound = live + padding;
        let group_bound = requests.len() + padding.min(2);
        let capacity = bound.max(group_bound);
        let stream = &device.gpu.stream;
        let mut cuda = CudaRows::new(&device.gpu, capacity).unwrap();
        let padded = |values: Vec<i32>, with: i32, len: usize| {
            stream.clone_htod(&values.into_iter().chain(std::iter::repeat(with)).take(len).collect::<Vec<i32>>()).unwrap()
        };
        let counts = |values: &[u32]| {
            stream.clone_htod(&values.iter().copied().chain(std::iter::repeat(0)).take(capacity).collect::<Vec<u32>>()).unwrap()
        };
        cuda.bound = bound;
        cuda.group_bound = group_bound;
        cuda.reach = requests.iter().map(|request| request.prefix + request.masks.len()).max().unwrap_or(0);
        cuda.positions = counts(&cpu.positions);
        cuda.groups = counts(&groups);
        cuda.counts = stream.clone_htod(&[live as u32, requests.len() as u32]).unwrap();
        cuda.slots = padded(cpu.slots.iter().map(|&s| s as i32).collect(), -1, capacity);
        cuda.firsts = padded(firsts, live as i32, capacity + 1);
        cuda.table_begins = padded(begins, 0, capacity);
        cuda.prefixes = padded(prefixes, 0, capacity);
        let masks: Vec<u64> = cpu.ancestors.iter().copied().chain(std::iter::repeat(0)).take(capacity).collect();
        cuda.ancestors = stream.clone_htod(&masks).unwrap();
        let tables = stream.clone_htod(&tables).unwrap();
        cuda.tables = tables.device_ptr(stream).0;
        Self { cpu, cuda, live, _tables: tables }
    }

    fn alone(device: &CudaDevice, requests: &[Request], padding: usize) -> Self {
        Self::new(device, requests, &(0..requests.len()).collect::<Vec<_>>(), padding)
    }
}

fn upload(device: &CudaDevice, values: &[f32], rows: usize, width: usize) -> CudaAct {
    let mut all = values.to_vec();
    // Padding rows hold what nothing may read.
    all.resize(rows * width, f32::NAN);
    CudaAct { data: device.gpu.stream.clone_htod(&all).unwrap(), rows, width }
}

fn blank(device: &CudaDevice, rows: usize, width: usize) -> CudaAct {
    upload(device, &[], rows, width)
}

fn download(device: &CudaDevice, act: &CudaAct) -> Vec<f32> {
    device.gpu.synchronize().unwrap();
    device.gpu.stream.clone_dtoh(&act.data).unwrap()
}

/// Largest relative difference (norm of the difference over norm of the reference) of any stretch of `width` values.
fn worst(found: &[f32], wanted: &[f32], width: usize) -> f64 {
    let mut worst = 0f64;
    for (a, b) in found.chunks_exact(width).zip(wanted.chunks_exact(width)) {
        let off: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let size: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
        let relative = (off / size.max(1e-30)).sqrt();
        worst = worst.max(if relative.is_nan() { f64::INFINITY } else { relative });
    }
    worst
}

/// Rounding of inputs and probabilities to bf16 leaves about 0.5 % of a head's output, and up to 1.4 % where few keys are seen.
const CLOSE: f64 = 0.02;

struct Tensors {
    kv_b: Matrix<'static>,
    cpu_latents: CpuLatents,
    cuda_latents: kdtree::device::cuda::attention::CudaLatents,
}

fn tensors(device: &CudaDevice, layers: usize, random: &mut Random) -> Tensors {
    let kv_b = matrix(random, MLA.heads * (MLA.nope + MLA.value), MLA.latent);
    let mut cpu_latents = CpuLatents::new(layers, SLOTS, MLA.cache_width());
    let mut cuda_latents = device.latents(layers, SLOTS, MLA).unwrap();
    let mut all = Vec::new();
    // A prime number of values over and over: no two rows are alike.
    let values = rounded(normal(random, 1_000_003, 1.0));
    for (at, layer) in cpu_latents.layers.iter_mut().enumerate() {
        layer.iter_mut().zip(values.iter().cycle().skip(at * 12_345)).for_each(|(to, value)| *to = *value);
        all.extend(layer.iter().map(|&x| bf16::from_f32(x)));
    }
    device.gpu.stream.memcpy_htod(&all, &mut cuda_latents.data).unwrap();
    Tensors { kv_b, cpu_latents, cuda_latents }
}

fn ragged(random: &mut Random) -> Vec<Request> {
    let shapes = [(0, 1), (1, 8), (17, 16), (128, 3), (700, 1), (1500, 9), (4096, 5), (5000, 2)];
    shapes.iter().enumerate().map(|(i, &(prefix, rows))| Request::new(prefix, rows, Mask::ALL[i % 5], random)).collect()
}

/// Absorbed attention of both devices; the CPU runs the baseline.
fn absorbed(device: &CudaDevice, t: &Tensors, pass: &Pass, q: &[f32], layer: usize) -> (Vec<f32>, Vec<f32>) {
    let cpu = CpuDevice::new(Verify::Off, None);
    let width = MLA.heads * MLA.value;
    let mut wanted = cpu.act(pass.live, width).unwrap();
    let mut cpu_q = cpu.act(pass.live, MLA.heads * MLA.query_width()).unwrap();
    cpu_q.data.copy_from_slice(&q[..pass.live * MLA.heads * MLA.query_width()]);
    let weights = cpu.absorbed(t.kv_b.clone(), MLA).unwrap();
    cpu.verify_attention(&weights, MLA, &cpu_q, &pass.cpu, &t.cpu_latents, layer, &mut wanted).unwrap();
    (run_absorbed(device, t, pass, q, layer), wanted.data)
}

fn run_absorbed(device: &CudaDevice, t: &Tensors, pass: &Pass, q: &[f32], layer: usize) -> Vec<f32> {
    let weights = device.absorbed(t.kv_b.clone(), MLA).unwrap();
    let queries = upload(device, &q[..pass.live * MLA.heads * MLA.query_width()], pass.cuda.bound, MLA.heads * MLA.query_width());
    let mut out = blank(device, pass.cuda.bound, MLA.heads * MLA.value);
    device.verify_attention(&weights, MLA, &queries, &pass.cuda, &t.cuda_latents, layer, &mut out).unwrap();
    download(device, &out)
}

#[test]
fn absorbed_attention_equals_the_cpus_in_every_mode_and_numerics() {
    for numerics in [Numerics::Fast, Numerics::Exact] {
        for mode in [Verify::Off, Verify::Validate, Verify::On] {
            let Some(device) = open(numerics, mode) else { return };
            let mut random = Random(11);
            let t = tensors(&device, 2, &mut random);
            let requests = ragged(&mut random);
            let q = normal(&mut random, 200 * MLA.heads * MLA.query_width(), 1.0);
            for (few, padding) in [(8, 0), (8, 19), (1, 0), (1, 3), (2, 1)] {
                let pass = Pass::alone(&device, &requests[..few], padding);
                let (found, wanted) = absorbed(&device, &t, &pass, &q, 1);
                let off = worst(&found[..wanted.len()], &wanted, MLA.value);
                println!("absorbed {numerics:?} {mode}: {few} requests, {padding} padding rows: {off:.5}");
                assert!(off < CLOSE, "{numerics:?} {mode} {few} {padding}: {off}");
                assert!(found[wanted.len()..].iter().all(|&x| x == 0.0), "padding rows are zero");
            }
        }
    }
}

#[test]
fn in_exact_a_rows_bits_are_the_same_alone_and_in_any_batch() {
    for mode in [Verify::Off, Verify::On] {
        let Some(device) = open(Numerics::Exact, mode) else { return };
        let mut random = Random(12);
        let t = tensors(&device, 1, &mut random);
        let requests = ragged(&mut random);
        let q = normal(&mut random, 200 * MLA.heads * MLA.query_width(), 1.0);
        let together = run_absorbed(&device, &t, &Pass::alone(&device, &requests, 40), &q, 0);
        let mut row = 0;
        for (id, request) in requests.iter().enumerate() {
            let pass = Pass::new(&device, std::slice::from_ref(request), &[id], id % 3);
            let own = run_absorbed(&device, &t, &pass, &q[row * MLA.heads * MLA.query_width()..], 0);
            let width = MLA.heads * MLA.value;
            let (a, b) = (&own[..pass.live * width], &together[row * width..(row + pass.live) * width]);
            assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "request {id} in mode {mode}");
            row += pass.live;
        }
    }
}

#[test]
fn validation_sums_are_small_without_a_fault_and_large_with_each() {
    let Some(mut device) = open(Numerics::Fast, Verify::Validate) else { return };
    let mut random = Random(13);
    let t = tensors(&device, 3, &mut random);
    let requests = ragged(&mut random);
    let pass = Pass::alone(&device, &requests, 5);
    let q = normal(&mut random, 200 * MLA.heads * MLA.query_width(), 1.0);
    let sound = run_absorbed(&device, &t, &pass, &q, 1);
    let diffs = device.take_validation();
    assert_eq!(diffs.len(), 2, "layers up to the one compared");
    assert_eq!((diffs[0].rows, diffs[1].rows), (0, (pass.live * MLA.heads) as u64));
    println!("validate: {:?}", diffs[1]);
    assert!(diffs[1].max_abs < 0.05 && diffs[1].cosine > 0.9999, "{:?}", diffs[1]);
    assert!(diffs[1].argmax_equal * 100 >= diffs[1].rows * 95, "{:?}", diffs[1]);
    assert!(device.take_validation().is_empty(), "taken sums are gone");
    for fault in [KernelFault::MaskStride, KernelFault::MissingDraftKeys, KernelFault::DroppedSplit] {
        device.plant(Some(fault));
        let returned = run_absorbed(&device, &t, &pass, &q, 0);
        let diff = device.take_validation()[0];
        println!("validate with {fault:?}: {diff:?}");
        assert!(diff.max_abs > 0.1 && diff.cosine < 0.9999, "{fault:?}: {diff:?}");
        assert!(returned.iter().zip(&sound).take(pass.live).all(|(a, b)| (a - b).abs() < 100.0), "the baseline goes on");
    }
}

#[test]
fn a_planted_fault_changes_what_the_custom_kernel_returns_and_not_the_baseline() {
    let Some(mut device) = open(Numerics::Fast, Verify::On) else { return };
    let mut random = Random(14);
    let t = tensors(&device, 1, &mut random);
    let pass = Pass::alone(&device, &ragged(&mut random), 0);
    let q = normal(&mut random, 200 * MLA.heads * MLA.query_width(), 1.0);
    for mode in [Verify::On, Verify::Off] {
        device.set_verify(mode);
        device.plant(None);
        let sound = run_absorbed(&device, &t, &pass, &q, 0);
        for fault in [KernelFault::MaskStride, KernelFault::MissingDraftKeys, KernelFault::DroppedSplit] {
            device.plant(Some(fault));
            let off = worst(&run_absorbed(&device, &t, &pass, &q, 0), &sound, MLA.value);
            assert_eq!(off > 0.1, mode == Verify::On, "{fault:?} in {mode}: {off}");
            assert!(mode == Verify::On || off == 0.0, "{fault:?} in {mode}: {off}");
        }
    }
}

#[test]
fn direct_attention_equals_the_cpus_over_short_and_long_prefixes() {
    let Some(device) = open(Numerics::Fast, Verify::On) else { return };
    let mut random = Random(15);
    let t = tensors(&device, 1, &mut random);
    let cpu = CpuDevice::new(Verify::Off, None);
    let (cpu_weights, cuda_weights) = (cpu.absorbed(t.kv_b.clone(), MLA).unwrap(), device.absorbed(t.kv_b.clone(), MLA).unwrap());
    let (q_width, width) = (MLA.heads * MLA.query_width(), MLA.heads * MLA.value);
    for (prefix, rows) in [(0, 1), (0, 64), (0, 129), (0, 512), (1, 63), (100, 300), (640, 17), (5000, 130), (8100, 200), (20_000, 64)] {
        // Prompt rows need no masks: 63 rows of a chain stand for the order of positions.
        let requests = [Request { prefix, masks: vec![1; rows] }];
        let mut pass = Pass::alone(&device, &requests, 0);
        pass.cpu.ancestors.clear();
        pass.cuda.group_bound = 1;
        let q = normal(&mut random, rows * q_width, 1.0);
        let mut wanted = cpu.act(rows, width).unwrap();
        let mut cpu_q = cpu.act(rows, q_width).unwrap();
        cpu_q.data.copy_from_slice(&q);
        cpu.prompt_attention(&cpu_weights, MLA, &cpu_q, &pass.cpu, &t.cpu_latents, 0, &mut wanted).unwrap();
        let queries = upload(&device, &q, rows, q_width);
        let mut out = blank(&device, rows, width);
        device.prompt_attention(&cuda_weights, MLA, &queries, &pass.cuda, &t.cuda_latents, 0, &mut out).unwrap();
        let found = download(&device, &out);
        let off = worst(&found, &wanted.data, MLA.value);
        println!("direct: prefix {prefix}, {rows} rows: {off:.5}");
        assert!(off < CLOSE, "prefix {prefix}, {rows} rows: {off}");
        device.prompt_attention(&cuda_weights, MLA, &queries, &pass.cuda, &t.cuda_latents, 0, &mut out).unwrap();
        assert!(download(&device, &out).iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()), "the same bits again");
    }
}

fn plain_rope(dim: usize) -> RopeTable {
    rope_table(&Rope { dim, theta: 50_000.0, yarn: None, magnitude: 1.0 }, CONTEXT)
}

fn projection<D: Device>(device: &D, parts: &[Matrix<'static>], norms: &[Vec<f32>]) -> MlaProjection<D> {
    MlaProjection {
        q_a: device.matrix(parts[0].clone()).unwrap(),
        q_b: device.matrix(parts[1].clone()).unwrap(),
        kv_a: device.matrix(parts[2].clone()).unwrap(),
        q_a_norm: device.vector(&norms[0]).unwrap(),
        kv_a_norm: device.vector(&norms[1]).unwrap(),
        eps: 1e-6,
    }
}

#[test]
fn projected_queries_and_latents_equal_the_cpus_and_padding_touches_no_slot() {
    let Some(mut device) = open(Numerics::Fast, Verify::On) else { return };
    let mut cpu = CpuDevice::new(Verify::Off, None);
    cpu.set_rope(plain_rope(64), None).unwrap();
    device.set_rope(plain_rope(64), None).unwrap();
    let mut random = Random(16);
    let (rank, q_width) = (128, MLA.heads * MLA.query_width());
    let parts = [matrix(&mut random, rank, HIDDEN), matrix(&mut random, q_width, rank), matrix(&mut random, 576, HIDDEN)];
    let norms = [rank, 512].map(|n| normal(&mut random, n, 0.2).into_iter().map(|x| x + 1.0).collect());
    let (ours, theirs) = (projection(&device, &parts, &norms), projection(&cpu, &parts, &norms));
    let requests = ragged(&mut random);
    for (few, padding) in [(8, 13), (1, 0), (1, 7)] {
        let pass = Pass::alone(&device, &requests[..few], padding);
        let h = normal(&mut random, pass.live * HIDDEN, 1.0);
        let mut cpu_latents = CpuLatents::new(2, SLOTS, 576);
        let mut cuda_latents = device.latents(2, SLOTS, MLA).unwrap();
        let mut cpu_h = cpu.act(pass.live, HIDDEN).unwrap();
        cpu_h.data.copy_from_slice(&h);
        let mut wanted = cpu.act(pass.live, q_width).unwrap();
        cpu.mla_project(&theirs, MLA, &cpu_h, &pass.cpu, &mut cpu_latents, 1, &mut wanted).unwrap();
        let cuda_h = upload(&device, &h, pass.cuda.bound, HIDDEN);
        let mut q = blank(&device, pass.cuda.bound, q_width);
        device.mla_project(&ours, MLA, &cuda_h, &pass.cuda, &mut cuda_latents, 1, &mut q).unwrap();
        let off = worst(&download(&device, &q)[..wanted.data.len()], &wanted.data, MLA.query_width());
        let cache: Vec<f32> = device.gpu.stream.clone_dtoh(&cuda_latents.data).unwrap().iter().map(|x: &bf16| x.to_f32()).collect();
        let wanted_cache: Vec<f32> = cpu_latents.layers.concat();
        let off_cache = worst(&cache, &wanted_cache, 576);
        println!("projected: {few} requests, {padding} padding rows: queries {off:.5}, latents {off_cache:.5}");
        assert!(off < CLOSE && off_cache < CLOSE, "queries {off}, latents {off_cache}");
        let written = cache.chunks_exact(576).filter(|row| row.iter().any(|&x| x != 0.0)).count();
        assert_eq!(written, pass.live, "slots written");
    }
}

fn draft_weights<D: Device>(device: &D, qkv: &Matrix<'static>, kv: &Matrix<'static>, norms: &[Vec<f32>]) -> DraftAttention<D> {
    DraftAttention {
        qkv: device.matrix(qkv.clone()).unwrap(),
        kv: device.matrix(kv.clone()).unwrap(),
        o: device.matrix(kv.clone()).unwrap(),
        q_norm: device.vector(&norms[0]).unwrap(),
        k_norm: device.vector(&norms[1]).unwrap(),
    }
}

#[test]
fn the_drafters_attention_equals_the_cpus_with_and_without_window() {
    let mini = GqaShape { heads: 4, kv_heads: 2, head: 64, eps: 1e-5 };
    let rank = GqaShape { heads: 8, kv_heads: 1, head: 128, eps: 1e-5 };
    for (shape, numerics) in [(mini, Numerics::Fast), (rank, Numerics::Fast), (mini, Numerics::Exact), (rank, Numerics::Exact)] {
        let Some(mut device) = open(numerics, Verify::On) else { return };
        let mut cpu = CpuDevice::new(Verify::Off, None);
        cpu.set_rope(plain_rope(64), Some(plain_rope(shape.head))).unwrap();
        device.set_rope(plain_rope(64), Some(plain_rope(shape.head))).unwrap();
        let mut random = Random(17);
        let kv_rows = 2 * shape.kv_heads * shape.head;
        let kv = matrix(&mut random, kv_rows, HIDDEN);
        let qkv = matrix(&mut random, shape.heads * shape.head + kv_rows, HIDDEN);
        let norms = [shape.head; 2].map(|n| normal(&mut random, n, 0.2).into_iter().map(|x| x + 1.0).collect());
        let (ours, theirs) = (draft_weights(&device, &qkv, &kv, &norms), draft_weights(&cpu, &qkv, &kv, &norms));

        // The context of every request first, in passes of one request each.
        let blocks = [(0, 8), (1, 8), (63, 8), (130, 16), (700, 8), (2100, 16), (5000, 8)];
        let mut contexts = device.contexts(2, SLOTS, shape).unwrap();
        let mut cpu_contexts = cpu.contexts(2, SLOTS, shape).unwrap();
        for (id, &(prefix, _)) in blocks.iter().enumerate() {
            for first in (0..prefix).step_by(512) {
                let count = 512.min(prefix - first);
                let chunk = [Request { prefix: first, masks: (0..count).map(|_| 1).collect() }];
                let mut pass = Pass::new(&device, &chunk, &[id], 3);
                pass.cpu.positions = (first..first + count).map(|p| p as u32).collect();
                let positions: Vec<u32> = pass.cpu.positions.iter().copied().chain([0; 3]).collect();
                pass.cuda.positions = device.gpu.stream.clone_htod(&positions).unwrap();
                let c = normal(&mut random, count * HIDDEN, 1.0);
                let mut cpu_c = cpu.act(count, HIDDEN).unwrap();
                cpu_c.data.copy_from_slice(&c);
                cpu.draft_context(&theirs, shape, &cpu_c, &pass.cpu, &mut cpu_contexts, 1).unwrap();
                let cuda_c = upload(&device, &c, pass.cuda.bound, HIDDEN);
                device.draft_context(&ours, shape, &cuda_c, &pass.cuda, &mut contexts, 1).unwrap();
                device.gpu.synchronize().unwrap();
            }
        }
        let requests: Vec<Request> =
            blocks.iter().map(|&(prefix, rows)| Request { prefix, masks: (0..rows).map(|i| (2u64 << i) - 1).collect() }).collect();
        for (window, causal) in [(None, false), (Some(256), true), (Some(2048), false), (None, true)] {
            for (from, to, padding) in [(0, 7, 11), (6, 7, 0), (0, 1, 2)] {
                let ids: Vec<usize> = (from..to).collect();
                let pass = Pass::new(&device, &requests[from..to], &ids, padding);
                let h = normal(&mut random, pass.live * HIDDEN, 1.0);
                let mask = DraftMask { window, causal };
                let width = shape.heads * shape.head;
                let mut cpu_h = cpu.act(pass.live, HIDDEN).unwrap();
                cpu_h.data.copy_from_slice(&h);
                let mut wanted = cpu.act(pass.live, width).unwrap();
                cpu.draft_attention(&theirs, shape, mask, &cpu_h, &pass.cpu, &cpu_contexts, 1, &mut wanted).unwrap();
                let cuda_h = upload(&device, &h, pass.cuda.bound, HIDDEN);
                let mut out = blank(&device, pass.cuda.bound, width);
                device.draft_attention(&ours, shape, mask, &cuda_h, &pass.cuda, &contexts, 1, &mut out).unwrap();
                let found = download(&device, &out);
                let off = worst(&found[..wanted.data.len()], &wanted.data, shape.head);
                println!("drafter {shape:?} {numerics:?} {mask:?}: requests {from}..{to}: {off:.5}");
                for (row, (a, b)) in found.chunks_exact(width).zip(wanted.data.chunks_exact(width)).enumerate() {
                    let heads: Vec<_> =
                        a.chunks_exact(shape.head).zip(b.chunks_exact(shape.head)).map(|(a, b)| worst(a, b, shape.head)).collect();
                    if heads.iter().any(|&off| off > CLOSE) {
                        println!("  row {row}: {heads:.3?}");
                    }
                }
                assert!(off < CLOSE, "{shape:?} {mask:?} {from}..{to}: {off}");
            }
        }
    }
}
