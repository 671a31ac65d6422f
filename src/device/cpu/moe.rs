//! Mixture of experts: sigmoid routing in f32, INT4 experts, the shared expert, a weighted sum in the order of the choice.
//!
//! s = sigmoid(router z); the top k of s + bias are chosen (ties to the lower index); weights are s over the sum of the chosen,
//! times the scaling factor. The shared expert is added unscaled.

use std::cell::RefCell;
use std::ops::Range;

use super::gemm::{PanelMatrix, Panels, Target, linear, matrix_blocks, scattered_product};
use super::int4::Int4Matrix;
use super::layers::swiglu;
use super::parallel::{SharedMut, split, split_fine};
use super::simd::{Isa, Lanes, WIDTH, dispatch};
use super::tiles::GROUP;
use crate::faults::{Fault, fires, planted};

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

    /// Panels `blocks` (at most [`GROUP`]) times the rows of `x`, one after the other into the target from its first panel on.
    fn product(&self, isa: Isa, x: &[&[f32]], blocks: &[usize], unpacked: &mut Vec<f32>, target: Target<'_>) {
        match self {
            Self::Int4(matrix) => {
                let size = matrix.k * WIDTH;
                unpacked.resize(unpacked.len().max(GROUP * size), 0.0);
                for (panel, &block) in unpacked.chunks_exact_mut(size).zip(blocks) {
                    matrix.unpack(isa, block, panel);
                }
                scattered_product(isa, x, blocks.len(), &|at| Panels::F32(&unpacked[at * size..(at + 1) * size]), matrix.k, target);
            }
            Self::Bf16(matrix) => scattered_product(isa, x, blocks.len(), &|at| matrix.panel(blocks[at]), matrix.k, target),
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
    places: Places,
    /// `silu(gate) * up` of every place, then of every row for the shared expert.
    inner: Vec<f32>,
    /// Output of every place.
    outer: Vec<f32>,
}

/// A place for every choice of every row, those of one expert side by side.
#[derive(Default)]
struct Places {
    /// First place of every expert, and the end of the last.
    starts: Vec<u32>,
    /// Row of every place.
    rows: Vec<u32>,
    /// Place of choice `row * top_k + choice`.
    of_choice: Vec<u32>,
}

impl Places {
    /// Counting sort: within an expert the places keep the order of the rows.
    fn sort(&mut self, routes: &Routes, experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for &expert in &routes.ids {
            self.starts[expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.rows.resize(routes.ids.len(), 0);
        self.of_choice.resize(routes.ids.len(), 0);
        let mut next = self.starts.clone();
        for (choice, &expert) in routes.ids.iter().enumerate() {
            let place = &mut next[expert as usize];
            self.rows[*place as usize] = (choice / routes.top_k) as u32;
            self.of_choice[choice] = *place;
            *place += 1;
        }
    }

    /// The places of an expert.
    fn of(&self, expert: usize) -> Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }
}

thread_local! {
    /// Unpacked panels and the sums of this thread.
    static PANEL: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// The weights and sizes of one layer of experts.
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
    linear(isa, z, hidden, rows, args.router, &mut scratch.gates, experts);
    route(&scratch.gates, args.bias, args.top_k, args.scaling, &mut scratch.routes);
    scratch.places.sort(&scratch.routes, experts);
    let places = rows * args.top_k;
    let inner = args.experts.gate_up.first().map_or(0, |m| m.n() / 2).max(1);
    let shared_inner = args.shared_down.k;
    let (inner_len, outer_len) = (places * inner + rows * shared_inner, places * hidden);
    scratch.inner.resize(scratch.inner.len().max(inner_len), 0.0);
    scratch.outer.resize(scratch.outer.len().max(outer_len), 0.0);

    let x_rows: Vec<&[f32]> = (0..rows).map(|row| &z[row * hidden..(row + 1) * hidden]).collect();
    let active: Vec<usize> = (0..experts).filter(|&e| !scratch.places.of(e).is_empty()).collect();
    up_stage(isa, args, &x_rows, &active, &scratch.places, inner, places, &mut scratch.inner);
    down_stage(isa, args, &active, &scratch.places, inner, places, hidden, rows, &scratch.inner, &mut scratch.outer, out);
    combine(isa, &scratch.routes, &scratch.places, &scratch.outer, hidden, rows, out);
}

/// First stage: gate and up of every active expert for its rows, and of the shared expert for all rows, then SwiGLU.
#[allow(clippy::too_many_arguments)]
fn up_stage(
    isa: Isa,
    args: &MoeArgs<'_>,
    x: &[&[f32]],
    active: &[usize],
    places: &Places,
    inner: usize,
    all_places: usize,
    out: &mut [f32],
) {
    let (blocks, shared_inner) = (inner / WIDTH, args.shared_down.k);
    let shared_blocks = shared_inner / WIDTH;
    let (steps, shared_steps) = (blocks.div_ceil(UP_BLOCKS), shared_blocks.div_ceil(UP_BLOCKS));
    let shared = SharedMut::new(out);
    split_fine(active.len() * steps + shared_steps, 2, &|range| {
        PANEL.with_borrow_mut(|(unpacked, sums)| {
            for item in range {
                if item < active.len() * steps {
                    let (expert, block) = (active[item / steps], item % steps * UP_BLOCKS);
                    let own = places.of(expert);
                    let rows: Vec<&[f32]> = places.rows[own.clone()].iter().map(|&row| x[row as usize]).collect();
                    let weights = GateUp::Expert(&args.experts.gate_up[expert], unpacked);
                    let to = |i: usize| (own.start + i) * inner + block * WIDTH;
                    gate_up_blocks(isa, &rows, weights, block..blocks.min(block + UP_BLOCKS), blocks, sums, &|i, wide| {
                        // SAFETY: this item alone writes these columns of these places.
                        unsafe { shared.range(to(i), wide) }
                    });
                } else {
                    let block = (item - active.len() * steps) * UP_BLOCKS;
                    let weights = GateUp::Shared(args.shared_gate_up);
                    let to = |i: usize| all_places * inner + i * shared_inner + block * WIDTH;
                    gate_up_blocks(isa, x, weights, block..shared_blocks.min(block + UP_BLOCKS), shared_blocks, sums, &|i, wide| {
                        // SAFETY: as above.
                        unsafe { shared.range(to(i), wide) }
                    });
                }
            }
        });
    });
}

/// Blocks of 16 columns that one step of the first stage takes: their gate and up panels are a group.
const UP_BLOCKS: usize = GROUP / 2;

enum GateUp<'a> {
    /// With room for unpacked panels.
    Expert(&'a ExpertMatrix, &'a mut Vec<f32>),
    Shared(&'a PanelMatrix),
}

/// `silu(gate) * up` of all rows in the columns of `range`; the gate's panels are those of `range`, up's lie `blocks` further.
fn gate_up_blocks<'o>(
    isa: Isa,
    rows: &[&[f32]],
    weights: GateUp<'_>,
    range: Range<usize>,
    blocks: usize,
    sums: &mut Vec<f32>,
    out: &impl Fn(usize, usize) -> &'o mut [f32],
) {
    let wide = range.len() * WIDTH;
    let panels: Vec<usize> = range.clone().chain(range.map(|block| block + blocks)).collect();
    sums.resize(sums.len().max(rows.len() * 2 * wide), 0.0);
    let target = Target::rows(SharedMut::new(sums), 2 * wide);
    match weights {
        GateUp::Expert(matrix, unpacked) => matrix.product(isa, rows, &panels, unpacked, target),
        GateUp::Shared(matrix) => scattered_product(isa, rows, panels.len(), &|at| matrix.panel(panels[at]), matrix.k, target),
    }
    for (i, sums) in sums.chunks_exact(2 * wide).take(rows.len()).enumerate() {
        swiglu(isa, &sums[..wide], &sums[wide..], out(i, wide));
    }
}

/// Second stage: down projection of every place into `outer`, of the shared expert straight into `out`.
#[allow(clippy::too_many_arguments)]
fn down_stage(
    isa: Isa,
    args: &MoeArgs<'_>,
    active: &[usize],
    places: &Places,
    inner: usize,
    all_places: usize,
    hidden: usize,
    rows: usize,
    values: &[f32],
    outer: &mut [f32],
    out: &mut [f32],
) {
    let (blocks, shared_inner) = (hidden / WIDTH, args.shared_down.k);
    let steps = blocks.div_ceil(GROUP);
    let (outer, out) = (SharedMut::new(outer), SharedMut::new(out));
    let shared_rows: Vec<&[f32]> = (0..rows).map(|row| &values[all_places * inner + row * shared_inner..][..shared_inner]).collect();
    split_fine(active.len() * steps + steps, 2, &|range| {
        PANEL.with_borrow_mut(|(unpacked, _)| {
            for item in range {
                let first = item % steps * GROUP;
                let group: Vec<usize> = (first..blocks.min(first + GROUP)).collect();
                if item < active.len() * steps {
                    let expert = active[item / steps];
                    let own = places.of(expert);
                    let x: Vec<&[f32]> = values[own.start * inner..own.end * inner].chunks_exact(inner).collect();
                    let target = Target::rows(outer, hidden).from(own.start * hidden).from_panel(first);
                    args.experts.down[expert].product(isa, &x, &group, unpacked, target);
                } else {
                    let target = Target::rows(out, hidden).from_panel(first);
                    matrix_blocks(isa, &shared_rows, args.shared_down, first, first + group.len(), target);
                }
            }
        });
    });
}

/// Adds the weighted expert outputs of each row, in the order of its choice, to the shared expert's.
fn combine(isa: Isa, routes: &Routes, places: &Places, outer: &[f32], hidden: usize, rows: usize, out: &mut [f32]) {
    let shared = SharedMut::new(out);
    split_fine(rows, 8, &|range| {
        for row in range {
            // SAFETY: rows are disjoint.
            let out = unsafe { shared.range(row * hidden, hidden) };
            let choices = row * routes.top_k..(row + 1) * routes.top_k;
            add_weighted(isa, &routes.weights[choices.clone()], &places.of_choice[choices], outer, out);
        }
    });
}

dispatch! {
    /// `out += weights[i] * rows[at[i]]`, one after the other; rows as wide as `out`, a multiple of 16.
    fn add_weighted = add_weighted_kernel(weights: &[f32], at: &[u32], rows: &[f32], out: &mut [f32])
}

#[inline(always)]
unsafe fn add_weighted_kernel<V: Lanes>(weights: &[f32], at: &[u32], rows: &[f32], out: &mut [f32]) {
    let width = out.len();
    assert!(width.is_multiple_of(WIDTH) && at.iter().all(|&row| rows.len() >= (row as usize + 1) * width));
    for (column, out) in out.chunks_exact_mut(WIDTH).enumerate() {
        // SAFETY: 16 lanes of `out` and of every row.
        unsafe {
            let mut sum = V::load(out.as_ptr());
            for (&weight, &row) in weights.iter().zip(at) {
                sum = sum.add(V::splat(weight).mul(V::load(rows.as_ptr().add(row as usize * width + column * WIDTH))));
            }
            sum.store(out.as_mut_ptr());
        }
    }
}

/// Two scores closer than this are as good as tied: activations in bf16 decide between them either way.
const NEAR_TIE: f32 = 2e-3;

/// Chooses experts from router logits `[rows, experts]`.
pub fn route(gates: &[f32], bias: &[f32], top_k: usize, scaling: f32, routes: &mut Routes) {
    let (experts, rows) = (bias.len(), gates.len() / bias.len());
    routes.top_k = top_k;
    routes.ids.clear();
    routes.ids.resize(rows * top_k, 0);
    routes.weights.clear();
    routes.weights.resize(rows * top_k, 0.0);
    let (ids, weights) = (SharedMut::new(&mut routes.ids), SharedMut::new(&mut routes.weights));
    split(rows, 32, &|range| {
        let mut scores = vec![0f32; experts];
        let kept = top_k + usize::from(planted(Fault::OtherExpert).is_some());
        let mut taken: Vec<(f32, u32)> = Vec::with_capacity(kept);
        for row in range {
            taken.clear();
            for (e, (score, gate)) in scores.iter_mut().zip(&gates[row * experts..]).enumerate() {
                *score = 1.0 / (1.0 + (-gate).exp());
                let key = *score + bias[e];
                // NaN sorts nowhere: it is kept out of the choice and shows in the output through its own logit.
                let place = taken.iter().position(|&(other, _)| key > other).unwrap_or(taken.len());
                if place < kept {
                    taken.truncate(kept - 1);
                    taken.insert(place, (key, e as u32));
                }
            }
            if taken.len() > top_k && taken[top_k - 1].0 - taken[top_k].0 < NEAR_TIE && fires(Fault::OtherExpert) {
                taken.swap(top_k - 1, top_k);
            }
            taken.truncate(top_k);
            let sum: f32 = taken.iter().map(|&(_, e)| scores[e as usize]).sum::<f32>() + 1e-20;
            // SAFETY: rows are disjoint.
            let (ids, weights) = unsafe { (ids.range(row * top_k, top_k), weights.range(row * top_k, top_k)) };
            for ((id, weight), &(_, e)) in ids.iter_mut().zip(weights).zip(&taken) {
                (*id, *weight) = (e, scores[e as usize] / sum * scaling);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_an_expert_lie_together_in_the_order_of_their_rows() {
        let routes = Routes { top_k: 2, ids: vec![3, 0, 0, 2, 3, 2], weights: vec![0.5; 6] };
        let mut places = Places::default();
        for _ in 0..2 {
            places.sort(&routes, 4);
        }
        assert_eq!((0..4).map(|expert| places.of(expert)).collect::<Vec<_>>(), [0..2, 2..2, 2..4, 4..6]);
        assert_eq!(places.rows, [0, 1, 1, 2, 0, 2]);
        assert_eq!(places.of_choice, [4, 0, 1, 2, 5, 3]);
    }
}
