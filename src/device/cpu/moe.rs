//! Mixture of experts: sigmoid routing in f32, INT4 experts, the shared expert, a weighted sum in the order of the choice.
//!
//! s = sigmoid(router z); the top k of s + bias are chosen (ties to the lower index); weights are s over the sum of the chosen,
//! times the scaling factor. The shared expert is added unscaled.

use std::cell::RefCell;

use super::gemm::{Into, PanelMatrix, Panels, Target, linear, matrix_blocks, panel_product};
use super::int4::Int4Matrix;
use super::layers::swiglu;
use super::parallel::{SharedMut, split_fine};
use super::simd::{Isa, WIDTH};

/// Routed experts of one layer: gate stacked above up, and down.
pub struct CpuExperts {
    pub gate_up: Vec<ExpertMatrix>,
    pub down: Vec<ExpertMatrix>,
}

/// An expert's weights: packed, unpacked panel by panel before use; or already bf16 where memory allows, which saves the unpacking
/// when an expert has one or two rows. Both hold the same numbers and give the same bits.
pub enum ExpertMatrix {
    Int4(Int4Matrix),
    Bf16(PanelMatrix),
}

impl ExpertMatrix {
    /// Output columns.
    fn n(&self) -> usize {
        match self {
            Self::Int4(matrix) => matrix.n,
            Self::Bf16(matrix) => matrix.n,
        }
    }

    /// Panel `block` times the rows of `x`, into columns `column ..` of the target.
    fn product(&self, isa: Isa, x: &[&[f32]], block: usize, panel: &mut Vec<f32>, target: Target<'_>, column: usize) {
        match self {
            Self::Int4(matrix) => {
                panel.resize(panel.len().max(matrix.k * WIDTH), 0.0);
                matrix.unpack(isa, block, panel);
                panel_product(isa, x, Panels::F32(panel), matrix.k, 1, target, column, WIDTH);
            }
            Self::Bf16(matrix) => matrix.block_product(isa, x, block, target, column),
        }
    }
}

/// Which experts each row chose, `top_k` per row, with their weights.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    pub top_k: usize,
    pub ids: Vec<u32>,
    pub weights: Vec<f32>,
}

/// Buffers of one layer's experts; grown to the largest batch at first use, then reused.
#[derive(Default)]
pub struct MoeScratch {
    gates: Vec<f32>,
    pub routes: Routes,
    /// For every expert the places (row * top_k + choice) that chose it.
    places: Vec<Vec<u32>>,
    /// `silu(gate) * up` of every place, then of every row for the shared expert.
    inner: Vec<f32>,
    /// Output of every place.
    outer: Vec<f32>,
}

thread_local! {
    /// One unpacked panel pair and the stacked gate and up sums of this thread.
    static PANEL: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

pub struct MoeArgs<'a> {
    pub router: &'a PanelMatrix,
    pub bias: &'a [f32],
    pub experts: &'a CpuExperts,
    pub shared_gate_up: &'a PanelMatrix,
    pub shared_down: &'a PanelMatrix,
    pub top_k: usize,
    pub scaling: f32,
}

/// `out[row] = shared(z) + sum_j weight_j expert_j(z)` for `rows` rows of width `hidden`.
pub fn moe(isa: Isa, args: &MoeArgs<'_>, z: &[f32], hidden: usize, rows: usize, scratch: &mut MoeScratch, out: &mut [f32]) {
    let experts = args.router.n;
    scratch.gates.resize(rows * experts, 0.0);
    linear(isa, z, hidden, rows, args.router, &mut scratch.gates, experts, Into::Overwrite);
    route(&scratch.gates, args.bias, args.top_k, args.scaling, &mut scratch.routes);
    scratch.places.resize_with(experts, Vec::new);
    scratch.places.iter_mut().for_each(Vec::clear);
    for (place, &expert) in scratch.routes.ids.iter().enumerate() {
        scratch.places[expert as usize].push(place as u32);
    }
    let places = rows * args.top_k;
    let inner = args.experts.gate_up.first().map_or(0, |m| m.n() / 2).max(1);
    let shared_inner = args.shared_down.k;
    scratch.inner.resize(places * inner + rows * shared_inner, 0.0);
    scratch.outer.resize(places * hidden, 0.0);

    let x_rows: Vec<&[f32]> = (0..rows).map(|row| &z[row * hidden..(row + 1) * hidden]).collect();
    let active: Vec<usize> = (0..experts).filter(|&e| !scratch.places[e].is_empty()).collect();
    up_stage(isa, args, &x_rows, &active, &scratch.places, inner, places, &mut scratch.inner);
    down_stage(isa, args, &active, &scratch.places, inner, places, hidden, rows, &scratch.inner, &mut scratch.outer, out);
    combine(&scratch.routes, &scratch.outer, hidden, rows, out);
}

/// First stage: gate and up of every active expert for its rows, and of the shared expert for all rows, then SwiGLU.
#[allow(clippy::too_many_arguments)]
fn up_stage(
    isa: Isa,
    args: &MoeArgs<'_>,
    x: &[&[f32]],
    active: &[usize],
    places: &[Vec<u32>],
    inner: usize,
    all_places: usize,
    out: &mut [f32],
) {
    let (per_expert, shared_inner) = (inner / WIDTH, args.shared_down.k);
    let shared_blocks = shared_inner / WIDTH;
    let shared = SharedMut::new(out);
    split_fine(active.len() * per_expert + shared_blocks, 4, &|range| {
        PANEL.with_borrow_mut(|(panel, sums)| {
            for item in range {
                if item < active.len() * per_expert {
                    let (expert, block) = (active[item / per_expert], item % per_expert);
                    let rows: Vec<&[f32]> = places[expert].iter().map(|&place| x[place as usize / args.top_k]).collect();
                    let matrix = &args.experts.gate_up[expert];
                    let to = |i: usize| places[expert][i] as usize * inner + block * WIDTH;
                    gate_up_block(isa, &rows, GateUp::Expert(matrix), block, per_expert, panel, sums, &|i, values| {
                        // SAFETY: this item alone writes these columns of these places.
                        unsafe { shared.range(to(i), WIDTH) }.copy_from_slice(values);
                    });
                } else {
                    let block = item - active.len() * per_expert;
                    let to = |i: usize| all_places * inner + i * shared_inner + block * WIDTH;
                    gate_up_block(isa, x, GateUp::Shared(args.shared_gate_up), block, shared_blocks, panel, sums, &|i, values| {
                        // SAFETY: as above.
                        unsafe { shared.range(to(i), WIDTH) }.copy_from_slice(values);
                    });
                }
            }
        });
    });
}

enum GateUp<'a> {
    Expert(&'a ExpertMatrix),
    Shared(&'a PanelMatrix),
}

/// 16 columns of `silu(gate) * up` for all rows; the gate's panel is `block`, up's is `block + blocks`.
#[allow(clippy::too_many_arguments)]
fn gate_up_block(
    isa: Isa,
    rows: &[&[f32]],
    weights: GateUp<'_>,
    block: usize,
    blocks: usize,
    panel: &mut Vec<f32>,
    sums: &mut Vec<f32>,
    write: &impl Fn(usize, &[f32]),
) {
    sums.resize(sums.len().max(rows.len() * 2 * WIDTH), 0.0);
    let target = Target { out: SharedMut::new(sums), stride: 2 * WIDTH, into: Into::Overwrite };
    for (half, block) in [block, block + blocks].into_iter().enumerate() {
        match weights {
            GateUp::Expert(matrix) => matrix.product(isa, rows, block, panel, target, half * WIDTH),
            GateUp::Shared(matrix) => matrix.block_product(isa, rows, block, target, half * WIDTH),
        }
    }
    for i in 0..rows.len() {
        let (gate, up) = sums[i * 2 * WIDTH..(i + 1) * 2 * WIDTH].split_at(WIDTH);
        let mut values = [0f32; WIDTH];
        swiglu(isa, gate, up, &mut values);
        write(i, &values);
    }
}

/// Second stage: down projection of every place into `outer`, of the shared expert straight into `out`.
#[allow(clippy::too_many_arguments)]
fn down_stage(
    isa: Isa,
    args: &MoeArgs<'_>,
    active: &[usize],
    places: &[Vec<u32>],
    inner: usize,
    all_places: usize,
    hidden: usize,
    rows: usize,
    values: &[f32],
    outer: &mut [f32],
    out: &mut [f32],
) {
    let (blocks, shared_inner) = (hidden / WIDTH, args.shared_down.k);
    let (outer, out) = (SharedMut::new(outer), SharedMut::new(out));
    let shared_rows: Vec<&[f32]> = (0..rows).map(|row| &values[all_places * inner + row * shared_inner..][..shared_inner]).collect();
    split_fine(active.len() * blocks + blocks, 4, &|range| {
        PANEL.with_borrow_mut(|(panel, sums)| {
            for item in range {
                if item < active.len() * blocks {
                    let (expert, block) = (active[item / blocks], item % blocks);
                    let x: Vec<&[f32]> = places[expert].iter().map(|&place| &values[place as usize * inner..][..inner]).collect();
                    let matrix = &args.experts.down[expert];
                    sums.resize(sums.len().max(x.len() * WIDTH), 0.0);
                    let target = Target { out: SharedMut::new(sums), stride: WIDTH, into: Into::Overwrite };
                    matrix.product(isa, &x, block, panel, target, 0);
                    for (i, &place) in places[expert].iter().enumerate() {
                        // SAFETY: this item alone writes these columns of these places.
                        unsafe { outer.range(place as usize * hidden + block * WIDTH, WIDTH) }
                            .copy_from_slice(&sums[i * WIDTH..(i + 1) * WIDTH]);
                    }
                } else {
                    let block = item - active.len() * blocks;
                    let target = Target { out, stride: hidden, into: Into::Overwrite };
                    matrix_blocks(isa, &shared_rows, args.shared_down, block, block + 1, target, 0);
                }
            }
        });
    });
}

/// Adds the weighted expert outputs of each row, in the order of its choice, to the shared expert's.
fn combine(routes: &Routes, outer: &[f32], hidden: usize, rows: usize, out: &mut [f32]) {
    let shared = SharedMut::new(out);
    split_fine(rows, 8, &|range| {
        for row in range {
            // SAFETY: rows are disjoint.
            let out = unsafe { shared.range(row * hidden, hidden) };
            for choice in 0..routes.top_k {
                let place = row * routes.top_k + choice;
                let weight = routes.weights[place];
                for (out, value) in out.iter_mut().zip(&outer[place * hidden..(place + 1) * hidden]) {
                    *out += weight * value;
                }
            }
        }
    });
}

/// Chooses experts from router logits `[rows, experts]`.
pub fn route(gates: &[f32], bias: &[f32], top_k: usize, scaling: f32, routes: &mut Routes) {
    routes.top_k = top_k;
    routes.ids.clear();
    routes.weights.clear();
    let mut scores = vec![0f32; bias.len()];
    let mut taken: Vec<(f32, u32)> = Vec::with_capacity(top_k);
    for gates in gates.chunks_exact(bias.len()) {
        taken.clear();
        for (e, (score, gate)) in scores.iter_mut().zip(gates).enumerate() {
            *score = 1.0 / (1.0 + (-gate).exp());
            let key = *score + bias[e];
            // NaN sorts nowhere: it is kept out of the choice and shows in the output through its own logit.
            let place = taken.iter().position(|&(other, _)| key > other).unwrap_or(taken.len());
            if place < top_k {
                taken.truncate(top_k - 1);
                taken.insert(place, (key, e as u32));
            }
        }
        let sum: f32 = taken.iter().map(|&(_, e)| scores[e as usize]).sum::<f32>() + 1e-20;
        for &(_, e) in &taken {
            routes.ids.push(e);
            routes.weights.push(scores[e as usize] / sum * scaling);
        }
    }
}
