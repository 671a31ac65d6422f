//! The CUDA device: every operation enqueues kernels on one stream; nothing waits but `read_round`, `read_trees` and the calls that
//! bring results to the host. One device belongs to one thread.

use std::cell::RefCell;

use cudarc::driver::{CudaSlice, DeviceRepr};

use super::CudaError;
use super::attention::{Attention, CudaAbsorbed, CudaContexts, CudaLatents};
use super::buffers::{CudaAct, CudaMatrix, CudaVector};
use super::collective::Collective;
use super::gpu::Gpu;
use super::graphs::Graphs;
use super::products::{CudaExperts, Input, Products};
use super::round::{CudaRound, RoundKernels};
use super::rows::CudaRows;
use super::scratch::Scratch;
use super::upload::Staging;
use super::verify::Numerics;
use crate::device::host::HostExpert;
use crate::device::identity::DeviceIdentity;
use crate::device::*;
use crate::engine::contract::{LayerDiff, TokenLogprob};
use crate::model::tensor::Matrix;

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        Self(error.to_string())
    }
}

/// One card as a rank.
pub struct CudaDevice {
    pub gpu: Gpu,
    pub numerics: Numerics,
    pub limits: Limits,
    pub(super) verify: Verify,
    pub(super) fault: Option<KernelFault>,
    pub(super) scratch: RefCell<Scratch>,
    pub(super) products: Products,
    pub(super) attention: Attention,
    pub(super) rounds: RoundKernels,
    /// Before the collective, which ends only once no graph holds a part of it.
    graphs: Graphs,
    pub(super) collective: Option<Collective>,
    staging: RefCell<Staging>,
}

impl CudaDevice {
    /// Loads the kernels. `limits` are the sizes every buffer must hold.
    /// `collective` joins this rank to the others; `None` = it is alone.
    pub fn new(gpu: Gpu, numerics: Numerics, verify: Verify, limits: &Limits, collective: Option<Collective>) -> Result<Self> {
        Ok(Self {
            products: Products::load(&gpu)?,
            attention: Attention::load(&gpu)?,
            rounds: RoundKernels::load(&gpu)?,
            scratch: RefCell::default(),
            limits: limits.clone(),
            fault: None,
            collective,
            graphs: Graphs::default(),
            staging: RefCell::new(Staging::new(&gpu)?),
            gpu,
            numerics,
            verify,
        })
    }

    /// A device array with these values.
    pub(super) fn upload<T: DeviceRepr + bytemuck::Pod + Sync>(&self, values: &[T]) -> Result<CudaSlice<T>> {
        Ok(self.staging.borrow_mut().upload(&self.gpu, values)?)
    }

    /// One device array with all parts, and where each lies.
    pub(super) fn upload_parts(&self, parts: &[&[u8]]) -> Result<(CudaSlice<u8>, Vec<cudarc::driver::sys::CUdeviceptr>)> {
        Ok(self.staging.borrow_mut().upload_parts(&self.gpu, parts)?)
    }

    /// Plants a fault in the custom verify kernel's inputs.
    pub fn plant(&mut self, fault: Option<KernelFault>) {
        self.fault = fault;
    }
}

impl Device for CudaDevice {
    type Matrix = CudaMatrix;
    type Table = CudaMatrix;
    type Vector = CudaVector;
    type Experts = CudaExperts;
    type Absorbed = CudaAbsorbed;
    type Act = CudaAct;
    type Latents = CudaLatents;
    type Contexts = CudaContexts;
    type Rows = CudaRows;
    type Round = CudaRound;

    fn matrix(&self, weights: Matrix<'_>) -> Result<CudaMatrix> {
        self.upload_matrix(&weights)
    }

    fn table(&self, weights: Matrix<'_>) -> Result<CudaMatrix> {
        self.upload_matrix(&weights)
    }

    fn vector(&self, values: &[f32]) -> Result<CudaVector> {
        self.upload_vector(values)
    }

    fn experts(&self, weights: &[HostExpert<'_>]) -> Result<CudaExperts> {
        self.upload_experts(weights)
    }

    fn absorbed(&self, kv_b: Matrix<'_>, shape: MlaShape) -> Result<CudaAbsorbed> {
        self.upload_absorbed(&kv_b, shape)
    }

    fn act(&self, rows: usize, width: usize) -> Result<CudaAct> {
        self.new_act(rows, width)
    }

    fn latents(&self, layers: usize, slots: usize, shape: MlaShape) -> Result<CudaLatents> {
        self.new_latents(layers, slots, shape)
    }

    fn contexts(&self, layers: usize, slots: usize, shape: GqaShape) -> Result<CudaContexts> {
        self.new_contexts(layers, slots, shape)
    }

    fn rows(&self, capacity: usize) -> Result<CudaRows> {
        Ok(CudaRows::new(&self.gpu, capacity)?)
    }

    fn round(&self, limits: &Limits) -> Result<CudaRound> {
        self.new_round(limits)
    }

    fn set_rope(&mut self, target: RopeTable, drafter: Option<RopeTable>) -> Result<()> {
        self.attention.set_rope(&self.gpu, &target, drafter.as_ref())
    }

    fn embed(&self, table: &CudaMatrix, first: u32, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        self.embed_rows(table, first, rows, out)
    }

    fn rms_norm(&self, x: &CudaAct, weight: &CudaVector, eps: f32, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        self.rms_norm_rows(x, weight, eps, rows, out)
    }

    fn linear(&self, x: &CudaAct, weight: &CudaMatrix, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        self.product(x.view(&self.gpu), weight, rows, out.view(&self.gpu))
    }

    fn add_reduced(&self, x: &mut CudaAct, y: &mut CudaAct, rows: &CudaRows) -> Result<()> {
        self.all_reduce(y, rows)?;
        self.add_rows(x, y, rows)
    }

    fn all_reduce(&self, x: &mut CudaAct, rows: &CudaRows) -> Result<()> {
        self.sum_over_ranks(x, rows.bound)
    }

    fn gather_columns(&self, x: &CudaAct, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        match &self.collective {
            Some(_) => self.columns_of_ranks(x, rows.bound, out),
            None => self.copy_rows(x, rows, out),
        }
    }

    fn mla_project(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        h: &CudaAct,
        rows: &CudaRows,
        latents: &mut CudaLatents,
        layer: usize,
        q: &mut CudaAct,
    ) -> Result<()> {
        self.project_latents(weights, shape, Input::Rows(h.view(&self.gpu)), rows, latents, layer, q)
    }

    fn mla_project_normed(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        input: Residual<'_, Self>,
        rows: &CudaRows,
        latents: &mut CudaLatents,
        layer: usize,
        q: &mut CudaAct,
    ) -> Result<()> {
        self.project_latents(weights, shape, self.reduced(input, rows)?, rows, latents, layer, q)
    }

    fn verify_attention(
        &self,
        weights: &CudaAbsorbed,
        shape: MlaShape,
        q: &CudaAct,
        rows: &CudaRows,
        latents: &CudaLatents,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        self.attend_absorbed(weights, shape, q, rows, latents, layer, out)
    }

    fn prompt_attention(
        &self,
        weights: &CudaAbsorbed,
        shape: MlaShape,
        q: &CudaAct,
        rows: &CudaRows,
        latents: &CudaLatents,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        self.attend_direct(weights, shape, q, rows, latents, layer, out)
    }

    fn mlp(&self, weights: &Mlp<Self>, h: &CudaAct, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        self.mlp_rows(weights, Input::Rows(h.view(&self.gpu)), rows, out)
    }

    fn mlp_normed(&self, weights: &Mlp<Self>, input: Residual<'_, Self>, rows: &CudaRows, out: &mut CudaAct) -> Result<()> {
        self.mlp_rows(weights, self.reduced(input, rows)?, rows, out)
    }

    fn moe(&self, weights: &Moe<Self>, h: &CudaAct, rows: &CudaRows, layer: usize, out: &mut CudaAct) -> Result<()> {
        self.moe_rows(weights, Input::Rows(h.view(&self.gpu)), rows, layer, out)
    }

    fn moe_normed(&self, weights: &Moe<Self>, input: Residual<'_, Self>, rows: &CudaRows, layer: usize, out: &mut CudaAct) -> Result<()> {
        self.moe_rows(weights, self.reduced(input, rows)?, rows, layer, out)
    }

    fn tap(&self, x: &CudaAct, rows: &CudaRows, index: usize, taps: &mut CudaAct) -> Result<()> {
        self.tap_rows(x, rows, index, taps)
    }

    fn draft_context(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        c: &CudaAct,
        rows: &CudaRows,
        contexts: &mut CudaContexts,
        layer: usize,
    ) -> Result<()> {
        self.store_context(weights, shape, c, rows, contexts, layer)
    }

    fn draft_attention(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        mask: DraftMask,
        h: &CudaAct,
        rows: &CudaRows,
        contexts: &CudaContexts,
        layer: usize,
        out: &mut CudaAct,
    ) -> Result<()> {
        self.attend_block(weights, shape, mask, h, rows, contexts, layer, out)
    }

    fn admit(&self, round: &mut CudaRound, request: usize, admission: Admission) -> Result<()> {
        round.admit(self, request, admission)
    }

    fn retire(&self, round: &mut CudaRound, request: usize) -> Result<()> {
        round.retire(self, request)
    }

    fn place_chunk(&self, round: &CudaRound, request: usize, start: usize, tokens: &[u32], rows: &mut CudaRows) -> Result<()> {
        round.place_chunk(self, request, start, tokens, rows)
    }

    fn last_row(&self, h: &CudaAct, rows: &CudaRows, out: &mut CudaAct, last: &mut CudaRows) -> Result<()> {
        self.keep_last_row(h, rows, out, last)
    }

    fn begin(&self, round: &mut CudaRound, request: usize, prompt: usize, logits: &CudaAct, mask: Option<&[u32]>) -> Result<()> {
        round.begin(self, request, prompt, logits, mask)
    }

    fn plan(&self, round: &mut CudaRound, shares: &[Share]) -> Result<()> {
        round.plan(self, shares)
    }

    fn place_blocks(&self, round: &CudaRound, mask_token: u32, rows: &mut CudaRows) -> Result<()> {
        round.place_blocks(self, mask_token, rows)
    }

    fn marginals(&self, round: &mut CudaRound, logits: &CudaAct) -> Result<()> {
        round.marginals(self, logits)
    }

    fn grow(&self, round: &mut CudaRound) -> Result<()> {
        round.grow(self)
    }

    fn place_trees(&self, round: &CudaRound, rows: &mut CudaRows) -> Result<()> {
        round.place_trees(self, rows)
    }

    fn read_trees(&self, round: &CudaRound) -> Result<Vec<HostTree>> {
        round.read_trees(self)
    }

    fn set_masks(&self, round: &mut CudaRound, share: usize, masks: &[u32]) -> Result<()> {
        round.set_masks(self, share, masks)
    }

    fn sample(&self, round: &mut CudaRound, logits: &CudaAct) -> Result<()> {
        round.sample(self, logits)
    }

    fn walk_and_commit(&self, round: &mut CudaRound, latents: &mut CudaLatents, accepted: &mut CudaRows) -> Result<()> {
        round.walk_and_commit(self, latents, accepted)
    }

    fn gather_taps(&self, taps: &CudaAct, accepted: &CudaRows, out: &mut CudaAct) -> Result<()> {
        self.gather_rows(taps, accepted, out)
    }

    fn copy_range(&self, x: &CudaAct, from: usize, rows: usize, out: &mut CudaAct, to: usize) -> Result<()> {
        self.copy_span(x, from, rows, out, to)
    }

    fn scatter_rows(&self, x: &CudaAct, places: &[(usize, usize)], out: &mut CudaAct) -> Result<()> {
        self.scatter(x, places, out)
    }

    fn read_round(&self, round: &mut CudaRound) -> Result<Vec<Outcome>> {
        round.read(self)
    }

    const RECORDS: bool = true;

    /// bf16 outputs of attention differ in the last place in 0.005 % of elements; a changed expert choice makes that visible.
    const TIE_MARGIN: f32 = 0.1;

    fn bucket(&self, round: &CudaRound, phase: Phase) -> Option<Bucket> {
        round.bucket(phase)
    }

    fn recorded(&self, bucket: Option<Bucket>, body: impl FnOnce() -> Result<()>) -> Result<()> {
        self.graphs.run(&self.gpu, bucket, self.verify, body)
    }

    fn settle(&self) {
        self.scratch.borrow_mut().freeze();
        self.graphs.settle();
        if let Some(collective) = &self.collective {
            collective.settle();
        }
    }

    fn allocations(&self) -> u64 {
        self.scratch.borrow().allocations
    }

    fn identity(&self) -> DeviceIdentity {
        DeviceIdentity::cuda(&self.gpu, self.numerics)
    }

    fn prompt_logprobs(&self, logits: &CudaAct, rows: &CudaRows, next: &[u32], top: u32) -> Result<Vec<TokenLogprob>> {
        self.report_prompt(logits, rows, next, top)
    }

    fn read(&self, x: &CudaAct, rows: usize) -> Result<Vec<f32>> {
        self.read_act(x, rows)
    }

    fn take_validation(&self) -> Vec<LayerDiff> {
        self.attention.take_validation(&self.gpu)
    }

    fn verify_mode(&self) -> Verify {
        self.verify
    }

    fn set_verify(&mut self, mode: Verify) {
        self.verify = mode;
    }
}
