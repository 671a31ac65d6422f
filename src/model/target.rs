//! The target's forward pass, written once for every device: K2.6's MLA layers, one dense MLP, sigmoid-routed experts, the head.
//! Called by the round for prompt chunks (direct attention) and for draft trees (absorbed attention).

mod prefill;

use std::marker::PhantomData;

use super::config::{LATENT_NORM_EPS, TargetConfig};
use super::problem::Problem;
use super::progress::Progress;
use super::tensor::{Cut, part};
use super::weights::{Piece, Weights};
use crate::device::{Device, DeviceError, Limits, MlaProjection, MlaShape, Mlp, Moe, Residual, Result, RopeTable};
use crate::parallel::Rank;
pub use prefill::Readers;

impl From<Problem> for DeviceError {
    fn from(problem: Problem) -> Self {
        Self(problem.to_string())
    }
}

/// How the rows of a pass attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Prompt rows: keys and values expanded from the latents, causal.
    Direct,
    /// Draft rows: queries absorbed into the latent space, tree mask.
    Absorbed,
}

/// One rank's part of the target with the buffers of a pass.
pub struct Target<D: Device> {
    hidden: usize,
    shape: MlaShape,
    eps: f32,
    rank: Rank,
    /// First id of this rank's part of the vocabulary.
    vocab_first: u32,
    embed: D::Table,
    layers: Vec<Layer<D>>,
    norm: D::Vector,
    head: D::Matrix,
    /// For each layer the place of its output among the taps.
    taps: Vec<Option<usize>>,
    /// The residual stream after `forward`; between the layers, what is still to be added to it lies in `from_mlp`.
    pub x: D::Act,
    /// The stream after `project`; `from_attention` is still to be added.
    mid: D::Act,
    normed: D::Act,
    /// Residual stream and queries of a prompt's last row, which goes through the last layer on its own.
    last: D::Act,
    last_mid: D::Act,
    last_q: D::Act,
    from_attention: D::Act,
    from_mlp: D::Act,
    q: D::Act,
    attended: D::Act,
    /// This rank's part of the logits; `None` where it is alone.
    local_logits: Option<D::Act>,
    /// `[rows, vocab]` after `head`, `[1, vocab]` after `head_of_last` and `head_of_prompt`.
    pub logits: D::Act,
    /// `[rows, taps * hidden]` after `forward`.
    pub tapped: D::Act,
}

struct Layer<D: Device> {
    input_norm: D::Vector,
    projection: MlaProjection<D>,
    absorbed: D::Absorbed,
    output: D::Matrix,
    post_norm: D::Vector,
    mlp: LayerMlp<D>,
}

enum LayerMlp<D: Device> {
    Dense(Mlp<D>),
    Experts(Moe<D>),
}

impl<D: Device> Target<D> {
    /// Loads this rank's part. `taps` are the layers whose outputs the drafter reads.
    pub fn load(
        device: &D,
        weights: &impl Weights<D>,
        config: &TargetConfig,
        taps: &[usize],
        rank: Rank,
        limits: &Limits,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let loader = Loader { weights, config, rank, shape: shape_of(config, rank), device: PhantomData };
        let (hidden, rows) = (config.hidden, limits.rows());
        let local_vocab = part(config.vocab, rank.index, rank.size);
        progress.begin("loading the target", weights.bytes());
        let mut layers = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            layers.push(loader.layer(layer)?);
            progress.advance(weights.bytes() / config.layers as u64);
        }
        progress.end();
        let shape = loader.shape;
        Ok(Self {
            hidden,
            shape,
            eps: config.rms_norm_eps,
            rank,
            vocab_first: local_vocab.start as u32,
            embed: weights.table(&loader.piece("model.embed_tokens.weight", [config.vocab, hidden], Cut::Rows))?,
            layers,
            norm: weights.vector("model.norm.weight", hidden)?,
            head: loader.matrix("lm_head.weight", [config.vocab, hidden], Cut::Rows)?,
            taps: (0..config.layers).map(|layer| taps.iter().position(|&tap| tap == layer)).collect(),
            x: device.act(rows, hidden)?,
            mid: device.act(rows, hidden)?,
            normed: device.act(rows, hidden)?,
            last: device.act(1, hidden)?,
            last_mid: device.act(1, hidden)?,
            last_q: device.act(1, shape.heads * shape.query_width())?,
            from_attention: device.act(rows, hidden)?,
            from_mlp: device.act(rows, hidden)?,
            q: device.act(rows, shape.heads * shape.query_width())?,
            attended: device.act(rows, shape.heads * shape.value)?,
            local_logits: if rank.size > 1 { Some(device.act(rows, local_vocab.len())?) } else { None },
            logits: device.act(rows, config.vocab)?,
            tapped: device.act(rows, (taps.len() * hidden).max(1))?,
        })
    }

    /// Sizes of this rank's attention.
    pub fn shape(&self) -> MlaShape {
        self.shape
    }

    /// Layers, dense ones included.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Width of the residual stream.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Embeds the rows' tokens.
    pub fn embed(&self, device: &D, rows: &D::Rows, out: &mut D::Act) -> Result<()> {
        device.embed(&self.embed, self.vocab_first, rows, out)?;
        device.all_reduce(out, rows)
    }

    /// One pass over `rows`: their latents go into the cache, their outputs into `x`, the tapped ones into `tapped`.
    pub fn forward(&mut self, device: &D, rows: &D::Rows, form: Form, latents: &mut D::Latents) -> Result<()> {
        self.begin(device, rows)?;
        for index in 0..self.layers.len() {
            self.project(device, index, rows, latents, index > 0)?;
            self.finish_layer(device, index, rows, form, latents)?;
        }
        self.settle(device, rows)?;
        self.tap_of(device, self.layers.len() - 1, rows, true)
    }

    /// The same; `watch` is shown the residual stream: 0 = embedding, l + 1 = after layer l.
    pub fn forward_watched(
        &mut self,
        device: &D,
        rows: &D::Rows,
        form: Form,
        latents: &mut D::Latents,
        watch: &mut dyn FnMut(usize, &D::Act) -> Result<()>,
    ) -> Result<()> {
        self.begin(device, rows)?;
        watch(0, &self.x)?;
        for index in 0..self.layers.len() {
            self.project(device, index, rows, latents, false)?;
            self.finish_layer(device, index, rows, form, latents)?;
            self.settle(device, rows)?;
            watch(index + 1, &self.x)?;
        }
        self.tap_of(device, self.layers.len() - 1, rows, true)
    }

    /// The residual stream of the rows' tokens.
    fn begin(&mut self, device: &D, rows: &D::Rows) -> Result<()> {
        device.embed(&self.embed, self.vocab_first, rows, &mut self.x)?;
        device.all_reduce(&mut self.x, rows)
    }

    /// Queries into `q`, latents into the cache. `pending`: the MLP of the layer before is still to be added to the stream.
    pub fn project(&mut self, device: &D, index: usize, rows: &D::Rows, latents: &mut D::Latents, pending: bool) -> Result<()> {
        self.project_rows(device, index, rows, latents, pending, true)?;
        match index {
            0 => Ok(()),
            _ => self.tap_of(device, index - 1, rows, false),
        }
    }

    /// The same without taps. Where nobody reads the `queries`, the device may leave them out.
    fn project_rows(
        &mut self,
        device: &D,
        index: usize,
        rows: &D::Rows,
        latents: &mut D::Latents,
        pending: bool,
        queries: bool,
    ) -> Result<()> {
        let layer = &self.layers[index];
        let input = Residual {
            x: &self.x,
            added: pending.then_some(&mut self.from_mlp),
            sum: &mut self.mid,
            norm: &layer.input_norm,
            eps: self.eps,
            normed: &mut self.normed,
        };
        let (projection, shape, q) = (&layer.projection, self.shape, &mut self.q);
        if queries {
            device.mla_project_normed(projection, shape, input, rows, latents, index, q)
        } else {
            device.mla_latents_normed(projection, shape, input, rows, latents, index, q)
        }
    }

    /// Attention of the queries in `q`, then the MLP, which is left to be added to `x`.
    fn finish_layer(&mut self, device: &D, index: usize, rows: &D::Rows, form: Form, latents: &D::Latents) -> Result<()> {
        self.attend(device, index, rows, form, latents)?;
        self.output(device, index, rows)?;
        self.mlp(device, index, rows)
    }

    /// Adds what the last MLP left.
    fn settle(&mut self, device: &D, rows: &D::Rows) -> Result<()> {
        device.add_reduced(&mut self.x, &mut self.from_mlp, rows)
    }

    /// Attention of one layer, from queries and cache.
    pub fn attend(&mut self, device: &D, index: usize, rows: &D::Rows, form: Form, latents: &D::Latents) -> Result<()> {
        let absorbed = &self.layers[index].absorbed;
        match form {
            Form::Direct => device.prompt_attention(absorbed, self.shape, &self.q, rows, latents, index, &mut self.attended),
            Form::Absorbed => device.verify_attention(absorbed, self.shape, &self.q, rows, latents, index, &mut self.attended),
        }
    }

    /// Output projection of one layer.
    pub fn output(&mut self, device: &D, index: usize, rows: &D::Rows) -> Result<()> {
        device.linear(&self.attended, &self.layers[index].output, rows, &mut self.from_attention)
    }

    /// Dense MLP, or routed and shared experts, of one layer, on the stream with attention added to it.
    pub fn mlp(&mut self, device: &D, index: usize, rows: &D::Rows) -> Result<()> {
        let layer = &self.layers[index];
        let input = Residual {
            x: &self.mid,
            added: Some(&mut self.from_attention),
            sum: &mut self.x,
            norm: &layer.post_norm,
            eps: self.eps,
            normed: &mut self.normed,
        };
        match &layer.mlp {
            LayerMlp::Dense(mlp) => device.mlp_normed(mlp, input, rows, &mut self.from_mlp),
            LayerMlp::Experts(moe) => device.moe_normed(moe, input, rows, index, &mut self.from_mlp),
        }
    }

    /// The experts of one layer, rows of activations, and room for what they make of them; `None` for a dense layer. For benches.
    pub fn moe(&mut self, index: usize) -> Option<(&Moe<D>, &D::Act, &mut D::Act)> {
        match &self.layers[index].mlp {
            LayerMlp::Experts(moe) => Some((moe, &self.x, &mut self.from_mlp)),
            LayerMlp::Dense(_) => None,
        }
    }

    /// Keeps the output of a layer that the drafter reads: the stream at its end, or `mid` of the next.
    fn tap_of(&mut self, device: &D, index: usize, rows: &D::Rows, settled: bool) -> Result<()> {
        match self.taps[index] {
            Some(tap) => device.tap(if settled { &self.x } else { &self.mid }, rows, tap, &mut self.tapped),
            None => Ok(()),
        }
    }

    /// Logits of every row of the last pass.
    pub fn head(&mut self, device: &D, rows: &D::Rows) -> Result<()> {
        device.rms_norm(&self.x, &self.norm, self.eps, rows, &mut self.normed)?;
        logits_of(device, &self.head, &self.normed, rows, &mut self.local_logits, &mut self.logits)
    }

    /// Logits of the last row of a pass by `forward`, in row 0 of `logits`; `last` becomes that row.
    pub fn head_of_last(&mut self, device: &D, rows: &D::Rows, last: &mut D::Rows) -> Result<()> {
        device.last_row(&self.x, rows, &mut self.last, last)?;
        self.head_of_prompt(device, last)
    }

    /// Logits of the row `last` of a prompt that `prefill` has ended, in row 0 of `logits`.
    pub fn head_of_prompt(&mut self, device: &D, last: &D::Rows) -> Result<()> {
        device.rms_norm(&self.last, &self.norm, self.eps, last, &mut self.normed)?;
        logits_of(device, &self.head, &self.normed, last, &mut self.local_logits, &mut self.logits)
    }

    /// Logits of rows that are already normed: the drafter's, which shares this head.
    pub fn head_of(&mut self, device: &D, normed: &D::Act, rows: &D::Rows) -> Result<()> {
        logits_of(device, &self.head, normed, rows, &mut self.local_logits, &mut self.logits)
    }

    /// The rank whose part is loaded.
    pub fn rank(&self) -> Rank {
        self.rank
    }
}

/// Logits of normed rows: a lone rank's are whole, those of several are gathered from each rank's part of the vocabulary.
fn logits_of<D: Device>(
    device: &D,
    head: &D::Matrix,
    normed: &D::Act,
    rows: &D::Rows,
    part: &mut Option<D::Act>,
    logits: &mut D::Act,
) -> Result<()> {
    let Some(part) = part else { return device.linear(normed, head, rows, logits) };
    device.linear(normed, head, rows, part)?;
    device.gather_columns(part, rows, logits)
}

/// Attention shapes of one rank.
pub fn shape_of(config: &TargetConfig, rank: Rank) -> MlaShape {
    MlaShape {
        heads: config.heads / rank.size,
        nope: config.nope_dim,
        rope: config.rope_dim,
        value: config.v_dim,
        latent: config.kv_lora_rank,
        scale: config.softmax_scale() as f32,
    }
}

/// cos and sin for positions `0..context` of the target.
pub fn rope_table(rope: &super::rope::Rope, context: usize) -> RopeTable {
    let (cos, sin) = rope.angles().table(context);
    RopeTable { half: rope.dim / 2, cos, sin }
}

struct Loader<'a, D: Device, W: Weights<D>> {
    weights: &'a W,
    config: &'a TargetConfig,
    rank: Rank,
    shape: MlaShape,
    device: PhantomData<D>,
}

impl<D: Device, W: Weights<D>> Loader<'_, D, W> {
    fn piece(&self, name: impl Into<String>, shape: [usize; 2], cut: Cut) -> Piece {
        Piece::new(name, shape, cut, self.rank)
    }

    fn matrix(&self, name: &str, shape: [usize; 2], cut: Cut) -> Result<D::Matrix> {
        self.weights.matrix(&[self.piece(name, shape, cut)])
    }

    fn layer(&self, layer: usize) -> Result<Layer<D>> {
        let (config, hidden, weights) = (self.config, self.config.hidden, self.weights);
        let name = |tensor: &str| format!("model.layers.{layer}.{tensor}.weight");
        let attention = |tensor: &str| format!("model.layers.{layer}.self_attn.{tensor}.weight");
        let wide = config.nope_dim + config.v_dim;
        let kv_b = self.piece(attention("kv_b_proj"), [config.heads * wide, config.kv_lora_rank], Cut::Rows);
        Ok(Layer {
            input_norm: weights.vector(&name("input_layernorm"), hidden)?,
            projection: MlaProjection {
                q_a: self.matrix(&attention("q_a_proj"), [config.q_lora_rank, hidden], Cut::Whole)?,
                q_a_norm: weights.vector(&attention("q_a_layernorm"), config.q_lora_rank)?,
                q_b: self.matrix(&attention("q_b_proj"), [config.heads * config.qk_dim(), config.q_lora_rank], Cut::Rows)?,
                kv_a: self.matrix(&attention("kv_a_proj_with_mqa"), [config.slot_width(), hidden], Cut::Whole)?,
                kv_a_norm: weights.vector(&attention("kv_a_layernorm"), config.kv_lora_rank)?,
                eps: LATENT_NORM_EPS,
            },
            absorbed: weights.absorbed(&kv_b, self.shape)?,
            output: self.matrix(&attention("o_proj"), [hidden, config.heads * config.v_dim], Cut::Columns)?,
            post_norm: weights.vector(&name("post_attention_layernorm"), hidden)?,
            mlp: if config.is_moe(layer) {
                LayerMlp::Experts(self.moe(layer)?)
            } else {
                LayerMlp::Dense(self.mlp(&format!("model.layers.{layer}.mlp"), config.dense_intermediate)?)
            },
        })
    }

    fn mlp(&self, module: &str, inner: usize) -> Result<Mlp<D>> {
        let hidden = self.config.hidden;
        let up = |which: &str| self.piece(format!("{module}.{which}_proj.weight"), [inner, hidden], Cut::Rows);
        Ok(Mlp {
            gate_up: self.weights.matrix(&[up("gate"), up("up")])?,
            down: self.matrix(&format!("{module}.down_proj.weight"), [hidden, inner], Cut::Columns)?,
        })
    }

    fn moe(&self, layer: usize) -> Result<Moe<D>> {
        let (config, module) = (self.config, format!("model.layers.{layer}.mlp"));
        Ok(Moe {
            router: self.matrix(&format!("{module}.gate.weight"), [config.experts, config.hidden], Cut::Whole)?,
            bias: self.weights.vector(&format!("{module}.gate.e_score_correction_bias"), config.experts)?,
            experts: self.weights.experts(&module, config.experts, config.moe_intermediate, config.hidden, self.rank)?,
            shared: self.mlp(&format!("{module}.shared_experts"), config.shared_intermediate())?,
            top_k: config.top_k,
            scaling: config.routed_scaling as f32,
        })
    }
}
