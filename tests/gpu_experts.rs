//! The card's experts, and blocks behind the residual stream, against the CPU device, through the trait that the model uses. Without a card
//! every test says so and passes. `--ignored` prints times.

mod products_support;

use std::cell::RefCell;

use half::bf16;
use kdtree::device::cpu::{CpuAct, CpuDevice};
use kdtree::device::cuda::CudaDevice;
use kdtree::device::cuda::buffers::{CudaAct, CudaMatrix};
use kdtree::device::cuda::products::CudaExperts;
use kdtree::device::cuda::rows::CudaRows;
use kdtree::device::host::HostExpert;
use kdtree::device::{Device, Mlp, Moe, Residual};
use kdtree::model::tensor::Int4Matrix;
use products_support::*;

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

#[test]
fn a_scale_that_the_kernels_cannot_take_is_refused_at_load() {
    let Some(device) = card() else { return };
    let mut expert = Random(3).expert(32, 64);
    device.experts(std::slice::from_ref(&expert)).unwrap();
    expert.up.scales.to_mut()[1] = bf16::from_f32(2048.0);
    let error = device.experts(&[expert]).err().expect("2^11 is beyond what an INT4 weight is unpacked by").to_string();
    assert!(error.contains("2.048e3") && error.contains("2^-110 to 2^10"), "{error}");
}
