//! Where arithmetic happens: the [`Device`] trait, a small set of fused operations on buffers allocated at start.
//!
//! The forward passes (`model::target`, `model::drafter`) and the round (`engine::round`) are written once over this trait.
//! Operations only enqueue work: how many rows a request has, its length, tree, mask, samples and walk are device data, and one
//! [`Device::read_round`] returns the accepted tokens. The CPU runs each operation at once; a device with graphs records the same
//! calls and replays them.

pub mod cpu;
pub mod cuda;
pub mod host;
pub mod identity;

use crate::engine::contract::{LayerDiff, Sampling, TokenLogprob};
use crate::model::tensor::Matrix;
use crate::speculate::tree::Tree;
use host::HostExpert;
use identity::DeviceIdentity;

/// A fault of the device or of what it was asked to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// What device operations return.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// Which verify attention runs: `off` = baseline, `validate` = both (returns the baseline), `on` = custom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    Off,
    Validate,
    #[default]
    On,
}

impl std::fmt::Display for Verify {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Validate => "validate",
            Self::On => "on",
        })
    }
}

/// Faults planted on purpose, to prove that the gate catches them. Only tests and builds with feature `faults` set one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelFault {
    /// The mask of row i is taken from row i + 1.
    MaskStride,
    /// Keys of the draft rows are not visible.
    MissingDraftKeys,
    /// The first split of the prefix is left out of the merge.
    DroppedSplit,
}

/// Sizes that every buffer is allocated for.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests that may be admitted at once.
    pub requests: usize,
    /// Rows of one verify pass, over all requests.
    pub verify_rows: usize,
    /// Prompt rows of one prefill chunk.
    pub chunk_rows: usize,
    /// Longest context of one request, in tokens.
    pub context: usize,
    /// KV slots in all (a multiple of 16).
    pub slots: usize,
    /// Drafter block size (anchor + masks), 1 where there is no drafter.
    pub block: usize,
    pub vocab: usize,
}

impl Limits {
    /// Accepted tokens per request whose taps, `width` f32 values each, wait for the drafter's context to be extended by them.
    pub fn kept_taps(&self, width: usize) -> usize {
        let affordable = KEPT_BYTES / (self.requests * width * size_of::<f32>()).max(1);
        affordable.clamp(1, KEPT_TAPS).min(self.chunk_rows).min(self.verify_rows).min(self.context)
    }

    /// Rows that any activation buffer must hold.
    pub fn rows(&self) -> usize {
        self.verify_rows.max(self.chunk_rows).max(self.requests * self.block)
    }
}

/// Most kept taps of a request: extending a context by so many takes about as long as a round that drafts.
const KEPT_TAPS: usize = 128;

/// Most bytes of kept taps of all requests: at K2.6's size 97 tokens of each of 16.
const KEPT_BYTES: usize = 256 << 20;

/// Shapes of multi-head latent attention on one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaShape {
    /// Query heads of this rank.
    pub heads: usize,
    /// Width of the part of a query head without position (128).
    pub nope: usize,
    /// Width of the rotated part (64).
    pub rope: usize,
    /// Width of a value head (128).
    pub value: usize,
    /// Width of the latent (512); a cache row holds `latent + rope` values.
    pub latent: usize,
    /// Softmax scale, YaRN's magnitude included.
    pub scale: f32,
}

impl MlaShape {
    /// Values of a cached row: latent and rope columns.
    pub fn cache_width(&self) -> usize {
        self.latent + self.rope
    }
    /// Values of a head's query before absorption.
    pub fn query_width(&self) -> usize {
        self.nope + self.rope
    }
}

/// Shapes of grouped-query attention in the drafter on one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GqaShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head: usize,
    pub eps: f32,
}

/// What a drafter layer may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftMask {
    /// Keys at `query - key >= window` are hidden; `None` = all visible.
    pub window: Option<u32>,
    /// Inside the block a row sees only itself and rows before it.
    pub causal: bool,
}

/// Weights of the projections into queries and the latent cache (spec: `q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa` and their norms).
pub struct MlaProjection<D: Device> {
    pub q_a: D::Matrix,
    pub q_a_norm: D::Vector,
    pub q_b: D::Matrix,
    pub kv_a: D::Matrix,
    pub kv_a_norm: D::Vector,
    /// Epsilon of the two latent norms.
    pub eps: f32,
}

/// A SwiGLU block; `gate` and `up` are stacked, gate first.
pub struct Mlp<D: Device> {
    pub gate_up: D::Matrix,
    pub down: D::Matrix,
}

/// Routed experts and the shared one.
pub struct Moe<D: Device> {
    /// `[experts, hidden]`, used in f32.
    pub router: D::Matrix,
    /// `e_score_correction_bias`.
    pub bias: D::Vector,
    pub experts: D::Experts,
    pub shared: Mlp<D>,
    pub top_k: usize,
    /// `routed_scaling_factor`.
    pub scaling: f32,
}

/// Projections of one drafter layer.
pub struct DraftAttention<D: Device> {
    /// `q_proj`, `k_proj` and `v_proj` stacked.
    pub qkv: D::Matrix,
    pub q_norm: D::Vector,
    pub k_norm: D::Vector,
    /// `k_proj` and `v_proj` stacked, for context rows.
    pub kv: D::Matrix,
    pub o: D::Matrix,
}

/// A request as the device knows it.
#[derive(Clone, Debug)]
pub struct Admission {
    pub sampling: Sampling,
    /// Ids that may not be sampled for a position before `free_from`.
    pub suppressed: Vec<u32>,
    pub free_from: u32,
    pub prompt: Vec<u32>,
    /// Cache slot of every position this request may reach.
    pub slots: Vec<u32>,
    /// Report log-probabilities of the `n` best at every emitted token.
    pub logprobs: Option<u32>,
    /// Keep the drafter's context of this request (false where it never drafts).
    pub drafts: bool,
}

/// Which of a round's two recordable parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Blocks, drafter, marginals, growth.
    Draft,
    /// Trees, target, sampling, walk, commit, the drafter's context.
    Verify,
}

/// What the launches of a planned round depend on: rounds of the same bucket may share one recording. Numbers are rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    pub phase: Phase,
    pub rows: u16,
    pub requests: u16,
    /// Requests that draft.
    pub drafting: u16,
    /// Whether the prefixes are so long together that the device takes other launches for them.
    pub long: bool,
    /// Whether any request wants log-probabilities, has masks, has penalties or samples above temperature 0: one bit each.
    pub extras: u8,
}

/// One request's part of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Index given to `admit`.
    pub request: usize,
    /// Rows to verify, root included.
    pub rows: usize,
    /// `true` = the drafter's best token per slot, one after another; `false` = best-first tree.
    pub chain: bool,
}

/// What one request got out of a round.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Accepted drafted tokens, then the bonus token.
    pub tokens: Vec<u32>,
    /// One per token, when asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// Accepted rows, root first.
    pub path: Vec<u8>,
    /// The tree that was verified; `None` after `begin`.
    pub tree: Option<Tree>,
    /// Set when the logits could not be sampled from (NaN, nothing allowed).
    pub fault: Option<String>,
}

/// The draft tree of one request, as `read_trees` returns it.
#[derive(Clone, Debug, Default)]
pub struct HostTree {
    pub tokens: Vec<u32>,
    pub parents: Vec<u8>,
}

/// Where a block of a layer takes its input: the residual stream, with what is still to be added to it, and the norm in front.
pub struct Residual<'a, D: Device> {
    pub x: &'a D::Act,
    /// Still to be summed over ranks (in place) and added.
    pub added: Option<&'a mut D::Act>,
    /// Becomes `x + added`.
    pub sum: &'a mut D::Act,
    pub norm: &'a D::Vector,
    pub eps: f32,
    /// Room for the normed rows, on devices that write them down.
    pub normed: &'a mut D::Act,
}

impl<'a, D: Device> Residual<'a, D> {
    /// Adds and norms, step by step; returns the normed rows.
    ///
    /// # Errors
    /// The device's.
    pub fn settle(self, device: &D, rows: &D::Rows) -> Result<&'a D::Act> {
        device.add_and_norm(self.x, self.added, self.sum, self.norm, self.eps, rows, self.normed)?;
        Ok(self.normed)
    }
}

/// A place for arithmetic. Row-major activations; every operation works on the rows that its `Rows` (or round) describes.
pub trait Device: Sized + 'static {
    /// A bf16 weight matrix `[n, k]`.
    type Matrix;
    /// An embedding table `[vocabulary, width]`.
    type Table;
    /// A vector of weights (norms, router bias).
    type Vector;
    /// INT4 weights of every routed expert of a layer, this rank's slices.
    type Experts;
    /// `kv_b_proj` in the forms that absorbed and direct attention need.
    type Absorbed;
    /// Activations `[rows, width]`.
    type Act;
    /// Latent KV cache of every layer: one row of `latent + rope` values per slot.
    type Latents;
    /// Drafter context KV of every drafter layer, by the same slots.
    type Contexts;
    /// Which rows an operation works on: token, position, slot, request, visible ancestors.
    type Rows;
    /// Requests, trees, samples: the state of rounds.
    type Round;

    // ----- loading and buffers: before the first round only

    fn matrix(&self, weights: Matrix<'_>) -> Result<Self::Matrix>;
    fn table(&self, weights: Matrix<'_>) -> Result<Self::Table>;
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
    fn experts(&self, weights: &[HostExpert<'_>]) -> Result<Self::Experts>;
    /// `kv_b_proj` rows of this rank's heads, `[heads * (nope + value), latent]`.
    fn absorbed(&self, kv_b: Matrix<'_>, shape: MlaShape) -> Result<Self::Absorbed>;
    fn act(&self, rows: usize, width: usize) -> Result<Self::Act>;
    fn latents(&self, layers: usize, slots: usize, shape: MlaShape) -> Result<Self::Latents>;
    fn contexts(&self, layers: usize, slots: usize, shape: GqaShape) -> Result<Self::Contexts>;
    fn rows(&self, capacity: usize) -> Result<Self::Rows>;
    fn round(&self, limits: &Limits) -> Result<Self::Round>;
    /// cos and sin of the rotary embeddings: `[positions, half]` each, for target and drafter.
    fn set_rope(&mut self, target: RopeTable, drafter: Option<RopeTable>) -> Result<()>;

    // ----- operations of the forward passes

    /// `out = table[token]`; tokens outside `first .. first + table rows` give zeros (another rank holds them).
    fn embed(&self, table: &Self::Table, first: u32, rows: &Self::Rows, out: &mut Self::Act) -> Result<()>;
    /// `out = x / sqrt(mean(x^2) + eps) * weight`.
    fn rms_norm(&self, x: &Self::Act, weight: &Self::Vector, eps: f32, rows: &Self::Rows, out: &mut Self::Act) -> Result<()>;
    /// `out = x W^T`.
    fn linear(&self, x: &Self::Act, weight: &Self::Matrix, rows: &Self::Rows, out: &mut Self::Act) -> Result<()>;
    /// `x += y`, after `y` was summed over ranks.
    fn add_reduced(&self, x: &mut Self::Act, y: &mut Self::Act, rows: &Self::Rows) -> Result<()>;
    /// Sums `x` over ranks.
    fn all_reduce(&self, x: &mut Self::Act, rows: &Self::Rows) -> Result<()>;
    /// `out[:, rank * width ..] = x` of every rank.
    fn gather_columns(&self, x: &Self::Act, rows: &Self::Rows, out: &mut Self::Act) -> Result<()>;
    #[allow(clippy::too_many_arguments)]
    /// Queries (rotated) `[rows, heads * (nope + rope)]`, and the rows' latents into the cache at their slots.
    fn mla_project(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        h: &Self::Act,
        rows: &Self::Rows,
        latents: &mut Self::Latents,
        layer: usize,
        q: &mut Self::Act,
    ) -> Result<()>;
    /// Absorbed attention of draft rows over their request's prefix and their ancestors: `[rows, heads * value]`.
    #[allow(clippy::too_many_arguments)]
    fn verify_attention(
        &self,
        weights: &Self::Absorbed,
        shape: MlaShape,
        q: &Self::Act,
        rows: &Self::Rows,
        latents: &Self::Latents,
        layer: usize,
        out: &mut Self::Act,
    ) -> Result<()>;
    /// Direct attention of prompt rows (K and V expanded): causal, over everything before them.
    #[allow(clippy::too_many_arguments)]
    fn prompt_attention(
        &self,
        weights: &Self::Absorbed,
        shape: MlaShape,
        q: &Self::Act,
        rows: &Self::Rows,
        latents: &Self::Latents,
        layer: usize,
        out: &mut Self::Act,
    ) -> Result<()>;
    fn mlp(&self, weights: &Mlp<Self>, h: &Self::Act, rows: &Self::Rows, out: &mut Self::Act) -> Result<()>;
    /// Sigmoid routing, the chosen experts, the shared expert; this rank's part of the sum.
    fn moe(&self, weights: &Moe<Self>, h: &Self::Act, rows: &Self::Rows, layer: usize, out: &mut Self::Act) -> Result<()>;
    /// Keeps `x` as tap `index` of `[rows, taps * hidden]`.
    fn tap(&self, x: &Self::Act, rows: &Self::Rows, index: usize, taps: &mut Self::Act) -> Result<()>;

    // ----- the same from the residual stream, for devices that can do more at once

    /// `sum = x + added` (which is still to be summed over ranks, in place), `normed = rms_norm(sum)`.
    #[allow(clippy::too_many_arguments)]
    fn add_and_norm(
        &self,
        x: &Self::Act,
        added: Option<&mut Self::Act>,
        sum: &mut Self::Act,
        norm: &Self::Vector,
        eps: f32,
        rows: &Self::Rows,
        normed: &mut Self::Act,
    ) -> Result<()> {
        self.tap(x, rows, 0, sum)?;
        if let Some(added) = added {
            self.add_reduced(sum, added, rows)?;
        }
        self.rms_norm(sum, norm, eps, rows, normed)
    }
    /// [`Device::mla_project`] of the normed stream.
    #[allow(clippy::too_many_arguments)]
    fn mla_project_normed(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        input: Residual<'_, Self>,
        rows: &Self::Rows,
        latents: &mut Self::Latents,
        layer: usize,
        q: &mut Self::Act,
    ) -> Result<()> {
        self.mla_project(weights, shape, input.settle(self, rows)?, rows, latents, layer, q)
    }
    /// [`Device::mla_project_normed`] of rows whose queries nobody reads: what is in `q` then is nobody's.
    #[allow(clippy::too_many_arguments)]
    fn mla_latents_normed(
        &self,
        weights: &MlaProjection<Self>,
        shape: MlaShape,
        input: Residual<'_, Self>,
        rows: &Self::Rows,
        latents: &mut Self::Latents,
        layer: usize,
        q: &mut Self::Act,
    ) -> Result<()> {
        self.mla_project_normed(weights, shape, input, rows, latents, layer, q)
    }
    /// [`Device::mlp`] of the normed stream.
    fn mlp_normed(&self, weights: &Mlp<Self>, input: Residual<'_, Self>, rows: &Self::Rows, out: &mut Self::Act) -> Result<()> {
        self.mlp(weights, input.settle(self, rows)?, rows, out)
    }
    /// [`Device::moe`] of the normed stream.
    fn moe_normed(
        &self,
        weights: &Moe<Self>,
        input: Residual<'_, Self>,
        rows: &Self::Rows,
        layer: usize,
        out: &mut Self::Act,
    ) -> Result<()> {
        self.moe(weights, input.settle(self, rows)?, rows, layer, out)
    }

    // ----- drafter

    /// Keys and values of context rows into the drafter's cache at the rows' slots.
    fn draft_context(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        c: &Self::Act,
        rows: &Self::Rows,
        contexts: &mut Self::Contexts,
        layer: usize,
    ) -> Result<()>;
    /// Attention of block rows over the context and their own block: `[rows, heads * head]`.
    #[allow(clippy::too_many_arguments)]
    fn draft_attention(
        &self,
        weights: &DraftAttention<Self>,
        shape: GqaShape,
        mask: DraftMask,
        h: &Self::Act,
        rows: &Self::Rows,
        contexts: &Self::Contexts,
        layer: usize,
        out: &mut Self::Act,
    ) -> Result<()>;

    // ----- rounds

    /// Takes a request in under index `request`.
    fn admit(&self, round: &mut Self::Round, request: usize, admission: Admission) -> Result<()>;
    /// Forgets a request.
    fn retire(&self, round: &mut Self::Round, request: usize) -> Result<()>;
    /// Rows of a prompt chunk: `tokens` at positions `start ..` of the request.
    fn place_chunk(&self, round: &Self::Round, request: usize, start: usize, tokens: &[u32], rows: &mut Self::Rows) -> Result<()>;
    /// Whether `last_row` describes its row as a tree of that row alone, everything before it being its prefix. Then a prompt's last
    /// row can go through the last layer on its own; otherwise every row of its chunk does.
    const LAST_ROW_IS_ROOT: bool = false;

    /// Keeps only the last row of `h` (the one whose logits matter) in row 0 of `out`.
    fn last_row(&self, h: &Self::Act, rows: &Self::Rows, out: &mut Self::Act, last: &mut Self::Rows) -> Result<()>;
    /// The prompt is in the cache: its length, and the first token from row 0 of `logits` (`mask` = allowed tokens, if restricted).
    fn begin(&self, round: &mut Self::Round, request: usize, prompt: usize, logits: &Self::Act, mask: Option<&[u32]>) -> Result<()>;
    /// Fixes who takes part in this round with how many rows.
    fn plan(&self, round: &mut Self::Round, shares: &[Share]) -> Result<()>;
    /// Block rows `[anchor, MASK ...]` of every planned request that verifies more than one row.
    fn place_blocks(&self, round: &Self::Round, mask_token: u32, rows: &mut Self::Rows) -> Result<()>;
    /// Best tokens per slot of each block, from the logits of all block rows (row 0 of a block is not used).
    fn marginals(&self, round: &mut Self::Round, logits: &Self::Act) -> Result<()>;
    /// Trees (or chains, or bare roots) of every planned request.
    fn grow(&self, round: &mut Self::Round) -> Result<()>;
    /// Verify rows of every planned request, with slots, positions and masks.
    fn place_trees(&self, round: &Self::Round, rows: &mut Self::Rows) -> Result<()>;
    /// The trees on the host: only for requests under a constraint.
    fn read_trees(&self, round: &Self::Round) -> Result<Vec<HostTree>>;
    /// Allowed tokens per row of the planned request at `share` (`rows * words` words).
    fn set_masks(&self, round: &mut Self::Round, share: usize, masks: &[u32]) -> Result<()>;
    /// One token per verify row.
    fn sample(&self, round: &mut Self::Round, logits: &Self::Act) -> Result<()>;
    /// Walks the trees, moves the accepted rows' latents to their positions, advances lengths and anchors, and describes the
    /// accepted rows (source row, position, slot) for the drafter's context.
    fn walk_and_commit(&self, round: &mut Self::Round, latents: &mut Self::Latents, accepted: &mut Self::Rows) -> Result<()>;
    /// The accepted rows' taps, in the order of `accepted`.
    fn gather_taps(&self, taps: &Self::Act, accepted: &Self::Rows, out: &mut Self::Act) -> Result<()>;
    /// `out[to + i] = x[from + i]` for `rows` rows. The places are the host's, so this is never part of a recording.
    fn copy_range(&self, x: &Self::Act, from: usize, rows: usize, out: &mut Self::Act, to: usize) -> Result<()>;
    /// `out[to] = x[from]` for every `(from, to)`; no two have the same `to`. The host's places as well.
    fn scatter_rows(&self, x: &Self::Act, places: &[(usize, usize)], out: &mut Self::Act) -> Result<()>;
    /// What the planned requests got, in the order of the plan (after `begin`: of the request that began). Waits for the device.
    fn read_round(&self, round: &mut Self::Round) -> Result<Vec<Outcome>>;

    // ----- recording

    /// Whether rounds are recorded: then buffers must have grown to their largest before (`Executor::reserve`).
    const RECORDS: bool = false;

    /// The bucket of the planned round; `None` = do not record.
    fn bucket(&self, _round: &Self::Round, _phase: Phase) -> Option<Bucket> {
        None
    }

    /// Enqueues what `body` enqueues: by running it, or by replaying a recording of an earlier call with the same bucket.
    fn recorded(&self, _bucket: Option<Bucket>, body: impl FnOnce() -> Result<()>) -> Result<()> {
        body()
    }

    /// Every buffer has its final size: from here on nothing may be allocated.
    fn settle(&self) {}

    /// Buffers that operations made so far on the device's memory: once settled, the same after any number of rounds.
    fn allocations(&self) -> u64 {
        0
    }

    // ----- looking in

    /// Below this difference in log-probability two best tokens may change places between baseline and custom kernel, because both
    /// round; 0 = the kernels agree so well that they never do.
    const TIE_MARGIN: f32 = 0.0;

    /// What does the arithmetic.
    fn identity(&self) -> DeviceIdentity;

    /// Log-probabilities of prompt rows: row i predicts `next[i]`.
    fn prompt_logprobs(&self, logits: &Self::Act, rows: &Self::Rows, next: &[u32], top: u32) -> Result<Vec<TokenLogprob>>;
    /// Copies `rows` rows of an activation to the host, f32.
    fn read(&self, x: &Self::Act, rows: usize) -> Result<Vec<f32>>;
    /// Differences per layer gathered in mode `validate` since the last call.
    fn take_validation(&self) -> Vec<LayerDiff>;
    fn verify_mode(&self) -> Verify;
    fn set_verify(&mut self, mode: Verify);
}

/// cos and sin, `[positions, half]` row-major.
#[derive(Clone, Debug, Default)]
pub struct RopeTable {
    pub half: usize,
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// cos and sin at a position.
    pub fn at(&self, position: u32) -> (&[f32], &[f32]) {
        let from = position as usize * self.half;
        (&self.cos[from..from + self.half], &self.sin[from..from + self.half])
    }
}
