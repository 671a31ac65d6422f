//! A layer of experts: router and the shared expert's first product in one launch, routing, the grouped products, the weighted sum.
//! In three steps, so that a bench can time the experts alone.

use cudarc::driver::sys::CUdeviceptr;
use half::bf16;

use super::super::buffers::{CudaAct, View};
use super::super::device::CudaDevice;
use super::super::rows::CudaRows;
use super::super::scratch::Use;
use super::linear::{Mode, Part, With};
use super::routing::{Router, WorkList};
use crate::device::{Moe, Result};

/// What the first step leaves for the others: who goes where, and the shared expert's inner activations.
pub struct Routed {
    list: WorkList,
    shared: View,
    /// The input as bf16 rows.
    rounded: CUdeviceptr,
}

impl CudaDevice {
    pub(in crate::device::cuda) fn moe_rows(
        &self,
        weights: &Moe<Self>,
        h: &CudaAct,
        rows: &CudaRows,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        if rows.bound == 0 {
            return Ok(());
        }
        let routed = self.moe_route(weights, h, rows, layer)?;
        let outer = self.moe_experts(weights, &routed)?;
        self.moe_sum(weights, &routed, outer, rows, out)
    }

    /// Router, shared gate and up, and the work list of `layer`.
    pub fn moe_route(&self, weights: &Moe<Self>, h: &CudaAct, rows: &CudaRows, layer: usize) -> Result<Routed> {
        let (bound, experts) = (rows.bound, weights.router.n);
        let gates = self.scratch.borrow_mut().get(&self.gpu, Use::Gates, bound * experts * size_of::<f32>())?;
        let router = Part { weights: &weights.router, out: View { at: gates, stride: experts }, mode: Mode::Precise };
        let rounded = self.scratch.borrow_mut().get(&self.gpu, Use::Rounded, bound * h.width * size_of::<bf16>())?;
        let shared = self.gated(h.view(&self.gpu), &weights.shared.gate_up, Some((router, rounded)), bound)?;
        let router = Router { gates, bias: &weights.bias, experts, top_k: weights.top_k, scaling: weights.scaling, layer };
        Ok(Routed { list: self.route(&router, rows)?, shared, rounded })
    }

    /// The routed experts' outputs, one row per choice, unweighted; returns where they lie in scratch.
    pub fn moe_experts(&self, weights: &Moe<Self>, routed: &Routed) -> Result<CUdeviceptr> {
        let inner = self.experts_up(&weights.experts, routed.rounded, &routed.list, weights.top_k)?;
        self.experts_down(&weights.experts, inner, &routed.list)
    }

    /// The shared expert's output and on top, in the order of the choices, the weighted routed ones.
    pub fn moe_sum(&self, weights: &Moe<Self>, routed: &Routed, outer: CUdeviceptr, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        let list = routed.list;
        let with = With { list: list.at, places: list.places, top_k: weights.top_k, outer, ..With::default() };
        let part = Part { weights: &weights.shared.down, out: out.view(&self.gpu), mode: Mode::Combine };
        self.products_of(routed.shared, &[part], rows.bound, &with)
    }
}
