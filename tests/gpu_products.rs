//! The card's products against the CPU device, through the trait that the model uses. Without a card every test says so and passes.
//!
//! Activations are values of bf16 where the card would round them, so what remains is the order of the sums.
//! `cargo test --test gpu_products --test gpu_experts -- --nocapture --test-threads=1`; `--ignored` prints times.

mod products_support;

use std::cell::RefCell;

use kdtree::device::cpu::{CpuAct, CpuDevice};
use kdtree::device::cuda::CudaDevice;
use kdtree::device::cuda::buffers::{CudaMatrix, CudaVector};
use kdtree::device::{Device, Mlp};
use products_support::*;

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
        // More rows than one launch moves, in any order.
        let mut moved = device.act(count + 300, 3 * width).unwrap();
        let places: Vec<(usize, usize)> = (0..count + 300).map(|to| (random.below(count), count + 299 - to)).collect();
        device.scatter_rows(&taps, &places, &mut moved).unwrap();
        let moved = device.read(&moved, count + 300).unwrap();
        for (from, to) in places {
            assert_eq!(moved[to * 3 * width..(to + 1) * 3 * width], tapped[from * 3 * width..(from + 1) * 3 * width]);
        }
        assert!(
            device.scatter_rows(&taps, &[(count, 0)], &mut ring).is_err()
                && device.scatter_rows(&taps, &[(0, count + 3)], &mut ring).is_err()
        );
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
