//! The card's products against the CPU device, through the trait that the model uses. Without a card every test says so and passes.
//!
//! Activations are values of bf16 where the card would round them, so what remains is the order of the sums.
//! `cargo test --test gpu_products -- --nocapture --test-threads=1`; `--ignored` prints times.

use std::borrow::Cow;
use std::cell::RefCell;
use std::time::Instant;

use half::bf16;
use kdtree::device::cpu::rows::CpuRows;
use kdtree::device::cpu::{CpuAct, CpuDevice};
use kdtree::device::cuda::buffers::{CudaAct, CudaMatrix, CudaVector};
use kdtree::device::cuda::products::CudaExperts;
use kdtree::device::cuda::rows::CudaRows;
use kdtree::device::cuda::verify::Numerics;
use kdtree::device::cuda::{CudaDevice, Gpu};
use kdtree::device::host::HostExpert;
use kdtree::device::{Device, Limits, Mlp, Moe, Residual, Verify};
use kdtree::model::tensor::{Int4Matrix, Matrix};

use cudarc::driver::sys;

fn limits() -> Limits {
    Limits { requests: 128, verify_rows: 512, chunk_rows: 1024, context: 4096, slots: 4096, block: 8, vocab: 4096 }
}

/// The card, or `None` with the reason printed.
fn card() -> Option<CudaDevice> {
    let mut gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    };
    if let Some(folder) = std::env::var_os("KDTREE_TEST_FATBINS") {
        gpu.try_fatbins(folder.as_ref());
    }
    Some(CudaDevice::new(gpu, Numerics::Exact, Verify::Off, &limits(), None).unwrap())
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    /// Uniform in -1 .. 1.
    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    fn rounded(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| bf16::from_f32(self.unit() * scale).to_f32()).collect()
    }
    fn weights(&mut self, rows: usize, columns: usize) -> Matrix<'static> {
        let scale = 1.0 / (columns as f32).sqrt();
        Matrix { rows, columns, data: Cow::Owned((0..rows * columns).map(|_| bf16::from_f32(self.unit() * scale)).collect()) }
    }
    fn int4(&mut self, rows: usize, columns: usize) -> Int4Matrix<'static> {
        let packed = (0..rows * columns / 2).map(|_| self.next() as u8).collect();
        let scale = 0.3 / (columns as f32).sqrt();
        let scales = (0..rows * columns / 32).map(|_| bf16::from_f32((1.0 + 0.5 * self.unit()) * scale)).collect();
        Int4Matrix { rows, columns, group: 32, packed: Cow::Owned(packed), scales: Cow::Owned(scales) }
    }
    fn expert(&mut self, inner: usize, hidden: usize) -> HostExpert<'static> {
        HostExpert { gate: self.int4(inner, hidden), up: self.int4(inner, hidden), down: self.int4(hidden, inner) }
    }
}

/// Rows 0 .. `live` of a pass whose launches are sized for `bound`.
fn cuda_rows(device: &CudaDevice, live: usize, bound: usize) -> CudaRows {
    let mut rows = device.rows(bound.max(1)).unwrap();
    rows.bound = bound;
    device.gpu.stream.memcpy_htod(&[live as u32, 1], &mut rows.counts).unwrap();
    rows
}

fn cpu_rows(count: usize) -> CpuRows {
    let mut rows = CpuRows::with_capacity(count);
    (0..count).for_each(|row| rows.push(row as u32, row, row as u32));
    rows
}

fn act(device: &CudaDevice, values: &[f32], width: usize) -> CudaAct {
    let mut act = device.act(values.len() / width, width).unwrap();
    device.gpu.stream.memcpy_htod(values, &mut act.data).unwrap();
    act
}

/// Largest difference over the root mean square of `want`.
fn difference(found: &[f32], want: &[f32]) -> f64 {
    assert_eq!(found.len(), want.len());
    let square: f64 = want.iter().map(|&x| f64::from(x).powi(2)).sum();
    let worst = found.iter().zip(want).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    worst.fold(0.0, |worst, x| if x > worst || x.is_nan() { x } else { worst }) / (square / want.len() as f64).sqrt()
}

fn cpu() -> CpuDevice {
    CpuDevice::new(Verify::Off, None)
}

/// A few rows of a pass: the first, the last and some between.
fn sample(rows: usize, random: &mut Random) -> Vec<usize> {
    let mut picked = vec![0, rows - 1, random.below(rows), random.below(rows)];
    picked.sort_unstable();
    picked.dedup();
    picked
}

fn pick(values: &[f32], width: usize, rows: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|&row| values[row * width..(row + 1) * width].to_vec()).collect()
}

/// Dense shapes: of k26-mini and of one of eight ranks of K2.6.
const SHAPES: [(usize, usize); 13] = [
    (128, 256),
    (576, 256),
    (4096, 256),
    (256, 128),
    (32, 256),
    (40, 64),
    (1536, 7168),
    (576, 7168),
    (1536, 1536),
    (7168, 1024),
    (384, 7168),
    (7168, 256),
    (4608, 7168),
];

#[test]
fn linear_equals_the_cpu_for_any_number_of_rows_and_a_row_keeps_its_bits() {
    let Some(device) = card() else { return };
    let mut random = Random(1);
    for (n, k) in SHAPES {
        let host = random.weights(n, k);
        let (on_card, on_cpu) = (device.matrix(host.clone()).unwrap(), cpu().matrix(host).unwrap());
        let counts: &[usize] = if n * k < 1 << 20 {
            &[1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 512, 1000]
        } else {
            &[1, 3, 8, 13, 32, 64, 65, 130, 300, 512, 1000]
        };
        let x = random.rounded(1000 * k, 1.0);
        let mut alone: Vec<Vec<f32>> = Vec::new();
        for &count in counts {
            let mut out = device.act(count, n).unwrap();
            device.linear(&act(&device, &x[..count * k], k), &on_card, &cuda_rows(&device, count, count), &mut out).unwrap();
            let found = device.read(&out, count).unwrap();
            let rows = sample(count, &mut random);
            let mut want = CpuAct { data: vec![0.0; rows.len() * n], width: n };
            cpu().linear(&CpuAct { data: pick(&x, k, &rows), width: k }, &on_cpu, &cpu_rows(rows.len()), &mut want).unwrap();
            let worst = difference(&pick(&found, n, &rows), &want.data);
            assert!(worst < 2e-5, "{n} x {k}, {count} rows: {worst:e}");
            // Row 0 and the first of the last tile, alone, must have the same bits.
            if count <= 512 {
                if alone.is_empty() {
                    alone.push(found[..n].to_vec());
                }
                assert_eq!(bits(&found[..n]), bits(&alone[0]), "{n} x {k}: row 0 among {count} rows has other bits than alone");
                let row = count - 1;
                let mut out = device.act(1, n).unwrap();
                device.linear(&act(&device, &x[row * k..(row + 1) * k], k), &on_card, &cuda_rows(&device, 1, 1), &mut out).unwrap();
                let lone = device.read(&out, 1).unwrap();
                assert_eq!(bits(&found[row * n..]), bits(&lone), "{n} x {k}: row {row} among {count} rows has other bits than alone");
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn weights_come_back_as_they_went_up() {
    let Some(device) = card() else { return };
    let mut random = Random(2);
    for (n, k) in [(1, 32), (16, 64), (40, 96), (576, 256)] {
        let host = random.weights(n, k);
        assert_eq!(device.matrix(host.clone()).unwrap().read(&device).unwrap(), host.data.to_vec(), "{n} x {k}");
    }
    assert!(device.matrix(random.weights(16, 40)).is_err(), "a width that does not fit is refused");
}

#[test]
fn int4_is_unpacked_as_the_checkpoint_means_it() {
    let Some(device) = card() else { return };
    let mut random = Random(3);
    for (inner, hidden) in [(32, 64), (128, 256), (256, 7168), (96, 160)] {
        let mut host: Vec<HostExpert> = (0..3).map(|_| random.expert(inner, hidden)).collect();
        // Every nibble under extreme scales too.
        for (scale, byte) in [(1e-33, 0), (-1e-20, 1), (1000.0, 2)] {
            host[1].gate.scales.to_mut()[byte] = bf16::from_f32(scale);
        }
        let experts = device.experts(&host).unwrap();
        for (i, expert) in host.iter().enumerate() {
            let [gate, up, down] = experts.unpack(&device, i).unwrap();
            let same = |found: &[bf16], want: &Int4Matrix| {
                let want = want.unpack();
                let differing =
                    found.iter().zip(&want).position(|(a, b)| a.to_bits() != b.to_bits() && (a.to_f32() != 0.0 || b.to_f32() != 0.0));
                assert_eq!(differing, None, "{inner} x {hidden}, expert {i}: {:?}", differing.map(|at| (found[at], want[at])));
            };
            same(&gate, &expert.gate);
            same(&up, &expert.up);
            same(&down, &expert.down);
        }
        for scale in [1e-38, 1e-40, 3e37, 2048.0, f32::NAN, f32::INFINITY] {
            host[2].down.scales.to_mut()[1] = bf16::from_f32(scale);
            assert!(
                device.experts(&host).is_err_and(|error| error.to_string().contains("2^-110 to 2^10")),
                "a scale of {scale:e} is refused"
            );
        }
    }
}

#[test]
fn row_wise_operations_equal_the_cpu() {
    let Some(device) = card() else { return };
    let mut random = Random(4);
    for (width, count) in [(256, 1), (7168, 9), (128, 70), (1536, 33), (20480, 2)] {
        let x: Vec<f32> = (0..count * width).map(|_| random.unit() * 3.0).collect();
        let y: Vec<f32> = (0..count * width).map(|_| random.unit()).collect();
        let scale: Vec<f32> = (0..width).map(|_| 1.0 + random.unit() * 0.1).collect();
        let (rows, host_rows) = (cuda_rows(&device, count, count), cpu_rows(count));
        let mut out = device.act(count, width).unwrap();
        device.rms_norm(&act(&device, &x, width), &device.vector(&scale).unwrap(), 1e-5, &rows, &mut out).unwrap();
        let mut want = CpuAct { data: vec![0.0; count * width], width };
        let host_x = CpuAct { data: x.clone(), width };
        cpu().rms_norm(&host_x, &scale, 1e-5, &host_rows, &mut want).unwrap();
        assert!(difference(&device.read(&out, count).unwrap(), &want.data) < 1e-6);

        let (mut sum, mut other) = (act(&device, &x, width), act(&device, &y, width));
        device.add_reduced(&mut sum, &mut other, &rows).unwrap();
        let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert_eq!(device.read(&sum, count).unwrap(), want);

        let mut taps = device.act(count, 3 * width).unwrap();
        for (index, values) in [(0, &x), (2, &y)] {
            device.tap(&act(&device, values, width), &rows, index, &mut taps).unwrap();
        }
        let tapped = device.read(&taps, count).unwrap();
        let mut accepted = cuda_rows(&device, count, count);
        let sources: Vec<u32> = (0..count).map(|_| random.below(count) as u32).collect();
        device.gpu.stream.memcpy_htod(&sources, &mut accepted.sources).unwrap();
        let mut gathered = device.act(count, 3 * width).unwrap();
        device.gather_taps(&taps, &accepted, &mut gathered).unwrap();
        let gathered = device.read(&gathered, count).unwrap();
        let mut ring = device.act(count + 3, 3 * width).unwrap();
        device.copy_range(&taps, 0, count, &mut ring, 3).unwrap();
        device.copy_range(&taps, count - 1, 1, &mut ring, 0).unwrap();
        let copied = device.read(&ring, count + 3).unwrap();
        assert_eq!(copied[3 * 3 * width..], tapped);
        assert_eq!(copied[..3 * width], tapped[(count - 1) * 3 * width..]);
        assert!(device.copy_range(&taps, 1, count, &mut ring, 0).is_err() && device.copy_range(&taps, 0, count, &mut ring, 4).is_err());
        for row in 0..count {
            let at = row * 3 * width;
            assert_eq!(tapped[at..at + width], x[row * width..(row + 1) * width]);
            assert_eq!(tapped[at + 2 * width..at + 3 * width], y[row * width..(row + 1) * width]);
            let from = sources[row] as usize * 3 * width;
            assert_eq!(gathered[at..at + 3 * width], tapped[from..from + 3 * width]);
        }
    }
}

#[test]
fn embeddings_and_the_last_row_are_found() {
    let Some(device) = card() else { return };
    let mut random = Random(5);
    let (vocab, width, first) = (200, 256, 1000);
    let table = random.weights(vocab, width);
    let tokens: Vec<u32> = vec![1000, 1199, 999, 1200, 1100, 0, u32::MAX, 1005];
    let mut rows = cuda_rows(&device, 7, 8);
    let stream = &device.gpu.stream;
    stream.memcpy_htod(&tokens, &mut rows.tokens).unwrap();
    stream.memcpy_htod(&[3u32, 4, 5, 6, 7, 8, 9, 10], &mut rows.positions).unwrap();
    stream.memcpy_htod(&[30i32, 40, 50, 60, 70, 80, 90, 100], &mut rows.slots).unwrap();
    let mut out = device.act(8, width).unwrap();
    device.embed(&device.table(table.clone()).unwrap(), first, &rows, &mut out).unwrap();
    let found = device.read(&out, 8).unwrap();
    for (row, &token) in tokens.iter().enumerate().take(7) {
        let want: Vec<f32> = match token.checked_sub(first).filter(|&t| (t as usize) < vocab) {
            Some(at) => table.row(at as usize).iter().map(|x| x.to_f32()).collect(),
            None => vec![0.0; width],
        };
        assert_eq!(found[row * width..(row + 1) * width], want, "token {token}");
    }
    let (mut kept, mut last) = (device.act(1, width).unwrap(), device.rows(1).unwrap());
    device.last_row(&out, &rows, &mut kept, &mut last).unwrap();
    assert_eq!(device.read(&kept, 1).unwrap(), found[6 * width..7 * width]);
    let read = |what: &_| stream.clone_dtoh(what).unwrap();
    assert_eq!((last.bound, read(&last.tokens)[0], read(&last.positions)[0], read(&last.counts)[0]), (1, u32::MAX, 9, 1));
    assert_eq!(stream.clone_dtoh(&last.slots).unwrap()[0], 90);
}

/// One layer of experts on both devices.
struct Layer {
    on_card: Moe<CudaDevice>,
    on_cpu: Moe<CpuDevice>,
    hidden: usize,
}

fn layer(device: &CudaDevice, experts: usize, top_k: usize, inner: usize, hidden: usize, random: &mut Random) -> Layer {
    let router = random.weights(experts, hidden);
    let bias: Vec<f32> = (0..experts).map(|_| random.unit() * 0.05).collect();
    let host: Vec<HostExpert> = (0..experts).map(|_| random.expert(inner, hidden)).collect();
    let (gate_up, down) = (random.weights(2 * inner, hidden), random.weights(hidden, inner));
    let scaling = 2.827;
    Layer {
        on_card: Moe {
            router: device.matrix(router.clone()).unwrap(),
            bias: device.vector(&bias).unwrap(),
            experts: device.experts(&host).unwrap(),
            shared: Mlp { gate_up: device.matrix(gate_up.clone()).unwrap(), down: device.matrix(down.clone()).unwrap() },
            top_k,
            scaling,
        },
        on_cpu: Moe {
            router: cpu().matrix(router).unwrap(),
            bias,
            experts: cpu().experts(&host).unwrap(),
            shared: Mlp { gate_up: cpu().matrix(gate_up).unwrap(), down: cpu().matrix(down).unwrap() },
            top_k,
            scaling,
        },
        hidden,
    }
}

#[test]
fn mlp_equals_the_cpu() {
    let Some(device) = card() else { return };
    let mut random = Random(6);
    for (inner, hidden) in [(128, 256), (512, 256), (2304, 7168)] {
        let (gate_up, down) = (random.weights(2 * inner, hidden), random.weights(hidden, inner));
        let on_card = Mlp::<CudaDevice> { gate_up: device.matrix(gate_up.clone()).unwrap(), down: device.matrix(down.clone()).unwrap() };
        let on_cpu = Mlp::<CpuDevice> { gate_up: cpu().matrix(gate_up).unwrap(), down: cpu().matrix(down).unwrap() };
        for count in [1, 8, 20, 200] {
            let x = random.rounded(count * hidden, 2.0);
            let mut out = device.act(count, hidden).unwrap();
            device.mlp(&on_card, &act(&device, &x, hidden), &cuda_rows(&device, count, count), &mut out).unwrap();
            let rows = sample(count, &mut random);
            let mut want = CpuAct { data: vec![0.0; rows.len() * hidden], width: hidden };
            cpu().mlp(&on_cpu, &CpuAct { data: pick(&x, hidden, &rows), width: hidden }, &cpu_rows(rows.len()), &mut want).unwrap();
            let worst = difference(&pick(&device.read(&out, count).unwrap(), hidden, &rows), &want.data);
            assert!(worst < 1.5e-2, "{inner} x {hidden}, {count} rows: {worst:e}");
        }
    }
}

/// Runs the layer on the card and checks it against the CPU on a sample of rows: routes, weights, outputs.
fn check_layer(device: &CudaDevice, layer: &Layer, x: &[f32], live: usize, bound: usize, random: &mut Random) -> Vec<f32> {
    let (hidden, top_k) = (layer.hidden, layer.on_card.top_k);
    let mut out = device.act(bound, hidden).unwrap();
    device.moe(&layer.on_card, &act(device, &x[..bound * hidden], hidden), &cuda_rows(device, live, bound), 0, &mut out).unwrap();
    let found = device.read(&out, live).unwrap();
    let routes = device.read_routes(bound, live, top_k).unwrap();
    assert_eq!(routes.experts.iter().map(|e| e.1).sum::<i32>(), (live * top_k) as i32, "padding rows are routed nowhere");
    assert!(routes.experts.windows(2).all(|pair| pair[0].0 < pair[1].0));

    let rows = sample(live, random);
    let reference = cpu();
    reference.record_routes();
    let mut want = CpuAct { data: vec![0.0; rows.len() * hidden], width: hidden };
    reference.moe(&layer.on_cpu, &CpuAct { data: pick(x, hidden, &rows), width: hidden }, &cpu_rows(rows.len()), 0, &mut want).unwrap();
    let host = reference.take_routes().remove(0).1;
    for (i, &row) in rows.iter().enumerate() {
        let (there, here) = (&host.ids[i * top_k..(i + 1) * top_k], &routes.ids[row * top_k..(row + 1) * top_k]);
        let here: Vec<u32> = here.iter().map(|&e| e as u32).collect();
        if *there != here[..] {
            println!("row {row}: routes differ, {there:?} and {here:?}");
            assert!(there.iter().filter(|e| !here.contains(e)).count() <= 1, "more than a near-tie");
            continue;
        }
        for choice in 0..top_k {
            let (a, b) = (routes.weights[row * top_k + choice], host.weights[i * top_k + choice]);
            assert!((a - b).abs() < 1e-5 * b.abs(), "row {row}: weight {a} and {b}");
        }
        let worst = difference(&found[row * hidden..(row + 1) * hidden], &want.data[i * hidden..(i + 1) * hidden]);
        assert!(worst < 1.5e-2, "{live} of {bound} rows, row {row}: {worst:e}");
    }
    found
}

#[test]
fn experts_equal_the_cpu_with_equal_routes_and_a_row_keeps_its_bits() {
    let Some(device) = card() else { return };
    let mut random = Random(7);
    for (experts, top_k, inner, hidden, most) in
        [(32, 4, 128, 256, 1000), (16, 2, 32, 64, 100), (384, 8, 256, 512, 512), (24, 8, 256, 7168, 64)]
    {
        let layer = layer(&device, experts, top_k, inner, hidden, &mut random);
        let x = random.rounded(most * hidden, 1.0);
        let mut first: Option<Vec<f32>> = None;
        for count in [1, 2, 8, 9, 33, 64, 65, 100, 200, 512, 1000].into_iter().filter(|&c| c <= most) {
            for live in [count, count - count / 3] {
                let found = check_layer(&device, &layer, &x, live, count, &mut random);
                if count <= 512 {
                    let lone = first.get_or_insert_with(|| found[..hidden].to_vec());
                    assert_eq!(
                        bits(lone),
                        bits(&found[..hidden]),
                        "{experts} experts: row 0 of {live} in {count} has other bits than alone"
                    );
                }
            }
        }
        let again = check_layer(&device, &layer, &x, 1, 1, &mut random);
        assert_eq!(bits(&again), bits(&first.unwrap()), "two runs differ");
    }
}

/// A block behind the residual stream: what is added to it, the norm, then experts or a dense MLP.
#[test]
fn a_normed_stream_equals_the_cpu_and_a_row_keeps_its_bits() {
    let Some(device) = card() else { return };
    let mut random = Random(15);
    for (experts, top_k, inner, hidden, most) in
        [(32, 4, 128, 256, 200), (384, 8, 256, 512, 200), (24, 8, 256, 7168, 100), (16, 2, 32, 64, 70)]
    {
        let layer = layer(&device, experts, top_k, inner, hidden, &mut random);
        let values = |random: &mut Random, count: usize, scale: f32| -> Vec<f32> { (0..count).map(|_| random.unit() * scale).collect() };
        let (x, added) = (values(&mut random, most * hidden, 3.0), values(&mut random, most * hidden, 1.0));
        let norm: Vec<f32> = (0..hidden).map(|_| 1.0 + random.unit() * 0.3).collect();
        let on_card = device.vector(&norm).unwrap();
        let mut alone: [Option<Vec<f32>>; 2] = [None, None];
        for count in [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 100, 200].into_iter().filter(|&c| c <= most) {
            for (dense, alone) in alone.iter_mut().enumerate() {
                let act_of = |values: &[f32]| act(&device, &values[..count * hidden], hidden);
                let (card_x, mut card_added) = (act_of(&x), act_of(&added));
                let nan = vec![f32::NAN; count * hidden];
                let (mut sum, mut normed, mut out) = (act_of(&nan), act_of(&nan), act_of(&nan));
                let rows = cuda_rows(&device, count, count);
                let added_there = Some(&mut card_added);
                let input = Residual { x: &card_x, added: added_there, sum: &mut sum, norm: &on_card, eps: 1e-5, normed: &mut normed };
                match dense {
                    0 => device.moe_normed(&layer.on_card, input, &rows, 0, &mut out).unwrap(),
                    _ => device.mlp_normed(&layer.on_card.shared, input, &rows, &mut out).unwrap(),
                }
                let found = device.read(&out, count).unwrap();
                let want_sum: Vec<f32> = x.iter().zip(&added).take(count * hidden).map(|(x, y)| x + y).collect();
                assert_eq!(device.read(&sum, count).unwrap(), want_sum, "{hidden} columns, {count} rows: the sum");
                let lone = alone.get_or_insert_with(|| found[..hidden].to_vec());
                assert_eq!(bits(lone), bits(&found[..hidden]), "{experts} experts: row 0 among {count} has other bits than alone");

                let picked = sample(count, &mut random);
                let few = picked.len();
                let host = |values: Vec<f32>| CpuAct { data: values, width: hidden };
                let (host_x, mut host_added) = (host(pick(&x, hidden, &picked)), host(pick(&added, hidden, &picked)));
                let (mut sum, mut normed, mut want) =
                    (host(vec![0.0; few * hidden]), host(vec![0.0; few * hidden]), host(vec![0.0; few * hidden]));
                let added_here = Some(&mut host_added);
                let input = Residual { x: &host_x, added: added_here, sum: &mut sum, norm: &norm, eps: 1e-5, normed: &mut normed };
                let (reference, rows) = (cpu(), cpu_rows(few));
                reference.record_routes();
                match dense {
                    0 => reference.moe_normed(&layer.on_cpu, input, &rows, 0, &mut want).unwrap(),
                    _ => reference.mlp_normed(&layer.on_cpu.shared, input, &rows, &mut want).unwrap(),
                }
                let routes = (dense == 0).then(|| (reference.take_routes().remove(0).1, device.read_routes(count, count, top_k).unwrap()));
                for (i, &row) in picked.iter().enumerate() {
                    if let Some((there, here)) = &routes {
                        let same = (0..top_k).all(|c| there.ids[i * top_k + c] == here.ids[row * top_k + c] as u32);
                        if !same {
                            println!("row {row} of {count}: routes differ");
                            continue;
                        }
                    }
                    let worst = difference(&found[row * hidden..(row + 1) * hidden], &want.data[i * hidden..(i + 1) * hidden]);
                    assert!(worst < 3e-2, "{experts} experts, dense {dense}, {count} rows, row {row}: {worst:e}");
                }
            }
        }
    }
}

/// Text repeats itself: rows that are alike all choose the same experts, which then hold every row of the pass.
#[test]
fn experts_that_every_row_chooses_equal_the_cpu() {
    let Some(device) = card() else { return };
    let mut random = Random(12);
    for (experts, top_k, inner, hidden) in [(32, 4, 128, 256), (16, 2, 32, 64), (384, 8, 256, 512)] {
        let layer = layer(&device, experts, top_k, inner, hidden, &mut random);
        let row = random.rounded(hidden, 1.0);
        for count in [1, 8, 9, 12, 16, 24, 32, 33, 64, 100, 300] {
            check_layer(&device, &layer, &row.repeat(count), count, count, &mut random);
        }
    }
}

#[test]
fn routes_agree_with_the_cpu_for_unrounded_activations() {
    let Some(device) = card() else { return };
    let mut random = Random(8);
    let layer = layer(&device, 384, 8, 32, 7168, &mut random);
    let (count, hidden) = (64, 7168);
    let x: Vec<f32> = (0..count * hidden).map(|_| random.unit()).collect();
    let mut out = device.act(count, hidden).unwrap();
    device.moe(&layer.on_card, &act(&device, &x, hidden), &cuda_rows(&device, count, count), 0, &mut out).unwrap();
    let routes = device.read_routes(count, count, 8).unwrap();
    let reference = cpu();
    reference.record_routes();
    let mut want = CpuAct { data: vec![0.0; count * hidden], width: hidden };
    reference.moe(&layer.on_cpu, &CpuAct { data: x, width: hidden }, &cpu_rows(count), 0, &mut want).unwrap();
    let host = reference.take_routes().remove(0).1;
    let differing = host.ids.iter().zip(&routes.ids).filter(|(a, b)| **a as i32 != **b).count();
    println!("{differing} of {} choices differ", host.ids.len());
    assert!(differing <= 2, "{differing} of {} choices differ", host.ids.len());
}

fn captured(device: &CudaDevice, work: impl FnOnce()) -> cudarc::driver::CudaGraph {
    device.gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    work();
    device.gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().expect("a graph with nodes")
}

#[test]
fn a_recorded_layer_replays_with_other_rows() {
    let Some(device) = card() else { return };
    let mut random = Random(9);
    let layer = layer(&device, 32, 4, 128, 256, &mut random);
    let bound = 40;
    let mut x = act(&device, &random.rounded(bound * 256, 1.0), 256);
    let mut rows = cuda_rows(&device, bound, bound);
    let out = RefCell::new(device.act(bound, 256).unwrap());
    let run = |x: &CudaAct, rows: &CudaRows| device.moe(&layer.on_card, x, rows, 0, &mut out.borrow_mut()).unwrap();
    run(&x, &rows);
    device.gpu.synchronize().unwrap();
    let graph = captured(&device, || run(&x, &rows));
    for live in [40usize, 1, 0, 17, 40] {
        let values = random.rounded(bound * 256, 1.0);
        device.gpu.stream.memcpy_htod(&values, &mut x.data).unwrap();
        device.gpu.stream.memcpy_htod(&[live as u32, 1], &mut rows.counts).unwrap();
        run(&x, &rows);
        let eager = device.read(&out.borrow(), bound).unwrap();
        graph.launch().unwrap();
        let replayed = device.read(&out.borrow(), bound).unwrap();
        assert_eq!(bits(&eager[..live * 256]), bits(&replayed[..live * 256]), "{live} rows");
    }
}

/// Microseconds per call of `work(i)` for `calls` calls in one graph, median of several replays.
fn time(device: &CudaDevice, calls: usize, work: impl Fn(usize)) -> f64 {
    (0..calls).for_each(&work);
    device.gpu.synchronize().unwrap();
    let graph = captured(device, || (0..calls).for_each(&work));
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let begin = Instant::now();
            graph.launch().unwrap();
            device.gpu.synchronize().unwrap();
            begin.elapsed().as_secs_f64() * 1e6 / calls as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

const TIMED_ROWS: [usize; 6] = [1, 4, 8, 16, 32, 64];

fn line(what: &str, rows: usize, us: f64, bytes: usize) {
    let rate = bytes as f64 / us / 1e3;
    println!("{what:28} {rows:4} rows {us:9.2} us {rate:7.0} GB/s {:5.1} % of 4600", rate / 46.0);
}

#[test]
#[ignore = "prints times"]
fn times_of_products_at_the_shapes_of_one_of_eight_ranks() {
    let Some(device) = card() else { return };
    let shapes = [
        ("q_a", 1536, 7168),
        ("kv_a", 576, 7168),
        ("q_b", 1536, 1536),
        ("o", 7168, 1024),
        ("shared down", 7168, 256),
        ("head", 20480, 7168),
        ("dense down", 7168, 2304),
    ];
    for (name, n, k) in shapes {
        let copies = (300_000_000 / (2 * n * k)).clamp(2, 64);
        let weights: Vec<CudaMatrix> = (0..copies).map(|i| CudaMatrix::random(&device, n, k, 0.02, i as u64).unwrap()).collect();
        for rows in TIMED_ROWS.into_iter().chain([512, 1024]) {
            let x = act(&device, &Random(1).rounded(rows * k, 1.0), k);
            let out = RefCell::new(device.act(rows, n).unwrap());
            let at = cuda_rows(&device, rows, rows);
            let us = time(&device, 2 * copies, |i| device.linear(&x, &weights[i % copies], &at, &mut out.borrow_mut()).unwrap());
            line(name, rows, us, 2 * n * k);
        }
    }
    let (q_a, kv_a): (Vec<_>, Vec<_>) = (0..10)
        .map(|i| (CudaMatrix::random(&device, 1536, 7168, 0.02, i).unwrap(), CudaMatrix::random(&device, 576, 7168, 0.02, i).unwrap()))
        .unzip();
    for rows in TIMED_ROWS {
        let x = act(&device, &Random(1).rounded(rows * 7168, 1.0), 7168);
        let (a, b) = (device.act(rows, 1536).unwrap(), device.act(rows, 576).unwrap());
        let at = cuda_rows(&device, rows, rows);
        let gpu = &device.gpu;
        let us = time(&device, 20, |i| {
            device.product_pair(x.view(gpu), [(&q_a[i % 10], a.view(gpu)), (&kv_a[i % 10], b.view(gpu))], &at).unwrap();
        });
        line("q_a and kv_a", rows, us, 2 * 2112 * 7168);
    }
    let norm = CudaVector::upload(&device.gpu, &vec![1.0; 7168]).unwrap();
    for rows in TIMED_ROWS {
        let x = RefCell::new(act(&device, &Random(1).rounded(rows * 7168, 1.0), 7168));
        let out = RefCell::new(device.act(rows, 7168).unwrap());
        let at = cuda_rows(&device, rows, rows);
        line(
            "rms_norm",
            rows,
            time(&device, 20, |_| device.rms_norm(&x.borrow(), &norm, 1e-5, &at, &mut out.borrow_mut()).unwrap()),
            rows * 57344,
        );
        line(
            "add",
            rows,
            time(&device, 20, |_| device.add_reduced(&mut x.borrow_mut(), &mut out.borrow_mut(), &at).unwrap()),
            rows * 57344,
        );
    }
}

#[test]
#[ignore = "prints times"]
fn times_of_experts_at_the_shapes_of_one_of_eight_ranks() {
    let Some(device) = card() else { return };
    let (experts, inner, hidden, top_k, layers) = (384, 256, 7168, 8, 4);
    device.set_uniform_routing(true);
    let moes: Vec<Moe<CudaDevice>> = (0..layers)
        .map(|seed| Moe {
            router: CudaMatrix::random(&device, experts, hidden, 0.02, seed).unwrap(),
            bias: device.vector(&vec![0.0; experts]).unwrap(),
            experts: CudaExperts::random(&device, experts, inner, hidden, 0.01, seed).unwrap(),
            shared: Mlp {
                gate_up: CudaMatrix::random(&device, 2 * inner, hidden, 0.02, seed).unwrap(),
                down: CudaMatrix::random(&device, hidden, inner, 0.02, seed).unwrap(),
            },
            top_k,
            scaling: 2.827,
        })
        .collect();
    let beside = 2 * (experts * hidden + 3 * inner * hidden);
    for rows in TIMED_ROWS.into_iter().chain([128, 512, 1024]) {
        let h = act(&device, &Random(1).rounded(rows * hidden, 1.0), hidden);
        let out = RefCell::new(device.act(rows, hidden).unwrap());
        let at = cuda_rows(&device, rows, rows);
        let distinct: Vec<usize> = (0..layers as usize)
            .map(|i| {
                device.moe(&moes[i], &h, &at, i, &mut out.borrow_mut()).unwrap();
                device.read_routes(rows, rows, top_k).unwrap().experts.len()
            })
            .collect();
        let distinct = distinct.iter().sum::<usize>() as f64 / layers as f64;
        let bytes = (distinct * moes[0].experts.bytes_per_expert() as f64) as usize;
        let calls = 2 * layers as usize;
        let of = |i: usize| &moes[i % layers as usize];
        let us = time(&device, calls, |i| device.moe(of(i), &h, &at, i % layers as usize, &mut out.borrow_mut()).unwrap());
        line(&format!("moe, {distinct:.1} experts"), rows, us, bytes + beside);
        let us = time(&device, calls, |i| {
            let routed = device.moe_route(of(i), &h, &at, i % layers as usize).unwrap();
            let _ = routed;
        });
        line("  router, shared up, routing", rows, us, 2 * (experts * hidden + 2 * inner * hidden));
        // The list of the layer routed last serves every call: the same number of experts, other weights.
        let routed = device.moe_route(of(0), &h, &at, 0).unwrap();
        let us = time(&device, calls, |i| {
            device.moe_experts(of(i), &routed, &mut out.borrow_mut()).unwrap();
        });
        line("  experts", rows, us, bytes);
        // Of few rows the experts' launches route and sum.
        let outer = device.moe_experts(of(0), &routed, &mut out.borrow_mut()).unwrap();
        let Some(outer) = outer else { continue };
        let us = time(&device, calls, |i| device.moe_sum(of(i), &routed, outer, &at, &mut out.borrow_mut()).unwrap());
        line("  shared down and sum", rows, us, 2 * inner * hidden);
    }
}
