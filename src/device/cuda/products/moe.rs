//! A layer of experts: router and the shared expert's first product in one launch, routing, the grouped products, the weighted sum.
//! In three steps, so that a bench can time the experts alone. Up to 32 rows the second grouped product takes the third step along.

use cudarc::driver::sys::CUdeviceptr;
use half::bf16;

use super::super::buffers::{CudaAct, View};
use super::super::device::CudaDevice;
use super::super::rows::CudaRows;
use super::super::scratch::Use;
use super::experts::sums_by_itself;
use super::linear::{Input, Mode, Part, With};
use super::routing::{Router, WorkList};
use crate::device::{Moe, Result};

/// What the first step leaves for the others: who goes where, and the shared expert's inner activations.
pub struct Routed {
    list: WorkList,
    shared: View,
    /// The input as bf16 rows, but for the factors of its norm.
    rounded: CUdeviceptr,
    /// Those factors, or 0.
    factors: CUdeviceptr,
}

impl CudaDevice {
    pub(in crate::device::cuda) fn moe_rows(
        &self,
        weights: &Moe<Self>,
        input: Input<'_>,
        rows: &CudaRows,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        if rows.bound == 0 {
            return Ok(());
        }
        let routed = self.route_rows(weights, input, rows, layer)?;
        match self.moe_experts(weights, &routed, out)? {
            Some(outer) => self.moe_sum(weights, &routed, outer, rows, out),
            None => Ok(()),
        }
    }

    /// Router, shared gate and up, and the work list of `layer`.
    pub fn moe_route(&self, weights: &Moe<Self>, h: &CudaAct, rows: &CudaRows, layer: usize) -> Result<Routed> {
        self.route_rows(weights, Input::Rows(h.view(&self.gpu)), rows, layer)
    }

    fn route_rows(&self, weights: &Moe<Self>, input: Input<'_>, rows: &CudaRows, layer: usize) -> Result<Routed> {
        let (bound, experts) = (rows.bound, weights.router.n);
        let gates = self.scratch.borrow_mut().get(&self.gpu, Use::Gates, bound * experts * size_of::<f32>())?;
        let router = Part { weights: &weights.router, out: View { at: gates, stride: experts }, mode: Mode::Precise };
        let rounded = self.scratch.borrow_mut().get(&self.gpu, Use::Rounded, bound * weights.router.k * size_of::<bf16>())?;
        let (shared, factors) = self.gated(input, &weights.shared.gate_up, Some((router, rounded)), bound)?;
        let many = self.products.many.take(&weights.experts);
        let built = sums_by_itself(&weights.experts, &weights.shared.down, bound, weights.top_k);
        let router = Router { gates, bias: &weights.bias, experts, top_k: weights.top_k, scaling: weights.scaling, layer, many, built };
        Ok(Routed { list: self.route(&router, rows)?, shared, rounded, factors })
    }

    /// The routed experts' outputs, one row per choice, unweighted; returns where they lie in scratch, or `None` when they are in `out`
    /// already, weighted, with the shared expert's.
    pub fn moe_experts(&self, weights: &Moe<Self>, routed: &Routed, out: &mut CudaAct) -> Result<Option<CUdeviceptr>> {
        let Routed { list, rounded, factors, .. } = routed;
        let inner = self.experts_up(&weights.experts, *rounded, *factors, list, weights.top_k)?;
        if list.built {
            let shared = (&weights.shared.down, routed.shared);
            self.experts_down_sum(&weights.experts, inner, list, weights.top_k, shared, out.view(&self.gpu))?;
            return Ok(None);
        }
        self.experts_down(&weights.experts, inner, list).map(Some)
    }

    /// The shared expert's output and on top, in the order of the choices, the weighted routed ones.
    pub fn moe_sum(&self, weights: &Moe<Self>, routed: &Routed, outer: CUdeviceptr, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        let list = routed.list;
        let with = With { list: list.at, places: list.places, top_k: weights.top_k, outer, ..With::default() };
        let part = Part { weights: &weights.shared.down, out: out.view(&self.gpu), mode: Mode::Combine };
        self.products_of(Input::Rows(routed.shared), &[part], rows.bound, &with).map(drop)
    }
}
