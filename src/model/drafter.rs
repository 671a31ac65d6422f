//! The DFlash drafter, written once for every device: a small dense transformer whose context keys and values come from the target's
//! tapped layers, and which fills a block `[anchor, MASK ...]` in one pass. Embedding and head are the target's.

use std::marker::PhantomData;

use super::config::{DraftConfig, DraftLayer};
use super::target::Target;
use super::tensor::Cut;
use super::weights::{Piece, Weights};
use crate::device::{Device, DraftAttention, DraftMask, GqaShape, Limits, Mlp, Result};
use crate::parallel::Rank;

/// One rank's part of the drafter with the buffers of a pass.
pub struct Drafter<D: Device> {
    shape: GqaShape,
    eps: f32,
    mask_token: u32,
    fc: D::Matrix,
    hidden_norm: D::Vector,
    layers: Vec<Layer<D>>,
    norm: D::Vector,
    x: D::Act,
    normed: D::Act,
    attended: D::Act,
    partial: D::Act,
}

struct Layer<D: Device> {
    input_norm: D::Vector,
    attention: DraftAttention<D>,
    mask: DraftMask,
    post_norm: D::Vector,
    mlp: Mlp<D>,
}

impl<D: Device> Drafter<D> {
    /// Loads this rank's part of every weight and makes the buffers of a pass.
    pub fn load(device: &D, weights: &impl Weights<D>, config: &DraftConfig, rank: Rank, limits: &Limits) -> Result<Self> {
        let loader = Loader { weights, config, rank, device: PhantomData };
        let (hidden, rows, shape) = (config.hidden, limits.rows(), shape_of(config, rank));
        let layers: Result<Vec<Layer<D>>> = config.layers.iter().enumerate().map(|(at, layer)| loader.layer(at, layer)).collect();
        Ok(Self {
            shape,
            eps: config.rms_norm_eps,
            mask_token: config.mask_token_id,
            fc: weights.matrix(&[loader.piece("fc.weight", [hidden, config.taps.len() * hidden], Cut::Whole)])?,
            hidden_norm: weights.vector("hidden_norm.weight", hidden)?,
            layers: layers?,
            norm: weights.vector("norm.weight", hidden)?,
            x: device.act(rows, hidden)?,
            normed: device.act(rows, hidden)?,
            attended: device.act(rows, shape.heads * shape.head)?,
            partial: device.act(rows, hidden)?,
        })
    }

    /// Sizes of this rank's attention.
    pub fn shape(&self) -> GqaShape {
        self.shape
    }

    /// Layers, each with a context of its own.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// The id that stands for a token to be drafted.
    pub fn mask_token(&self) -> u32 {
        self.mask_token
    }

    /// Context keys and values of committed rows, from their taps: `c = RMSNorm(fc taps)`, then k and v of every layer.
    pub fn extend_context(&mut self, device: &D, taps: &D::Act, rows: &D::Rows, contexts: &mut D::Contexts) -> Result<()> {
        device.linear(taps, &self.fc, rows, &mut self.x)?;
        device.rms_norm(&self.x, &self.hidden_norm, self.eps, rows, &mut self.normed)?;
        for (index, layer) in self.layers.iter().enumerate() {
            device.draft_context(&layer.attention, self.shape, &self.normed, rows, contexts, index)?;
        }
        Ok(())
    }

    /// One pass over blocks; the logits of every block row end in `target.logits`.
    pub fn draft(&mut self, device: &D, target: &mut Target<D>, rows: &D::Rows, contexts: &D::Contexts) -> Result<()> {
        target.embed(device, rows, &mut self.x)?;
        for (index, layer) in self.layers.iter().enumerate() {
            device.rms_norm(&self.x, &layer.input_norm, self.eps, rows, &mut self.normed)?;
            device.draft_attention(&layer.attention, self.shape, layer.mask, &self.normed, rows, contexts, index, &mut self.attended)?;
            device.linear(&self.attended, &layer.attention.o, rows, &mut self.partial)?;
            device.add_reduced(&mut self.x, &mut self.partial, rows)?;
            device.rms_norm(&self.x, &layer.post_norm, self.eps, rows, &mut self.normed)?;
            device.mlp(&layer.mlp, &self.normed, rows, &mut self.partial)?;
            device.add_reduced(&mut self.x, &mut self.partial, rows)?;
        }
        device.rms_norm(&self.x, &self.norm, self.eps, rows, &mut self.normed)?;
        target.head_of(device, &self.normed, rows)
    }
}

/// Attention shapes of one rank. Where there are more ranks than key heads, ranks that share a key head hold a copy each.
pub fn shape_of(config: &DraftConfig, rank: Rank) -> GqaShape {
    GqaShape {
        heads: config.heads / rank.size,
        kv_heads: (config.kv_heads / rank.size).max(1),
        head: config.head_dim,
        eps: config.rms_norm_eps,
    }
}

struct Loader<'a, D: Device, W: Weights<D>> {
    weights: &'a W,
    config: &'a DraftConfig,
    rank: Rank,
    device: PhantomData<D>,
}

impl<D: Device, W: Weights<D>> Loader<'_, D, W> {
    fn piece(&self, name: impl Into<String>, shape: [usize; 2], cut: Cut) -> Piece {
        Piece::new(name, shape, cut, self.rank)
    }

    /// This rank's key (or value) heads.
    fn key_heads(&self, name: &str) -> Piece {
        let (config, rank) = (self.config, self.rank);
        let shape = [config.kv_heads * config.head_dim, config.hidden];
        if config.kv_heads.is_multiple_of(rank.size) {
            return self.piece(name, shape, Cut::Rows);
        }
        Piece::new(name, shape, Cut::Rows, Rank { index: rank.index * config.kv_heads / rank.size, size: config.kv_heads })
    }

    fn layer(&self, index: usize, layer: &DraftLayer) -> Result<Layer<D>> {
        let (config, hidden, weights) = (self.config, self.config.hidden, self.weights);
        let name = |tensor: &str| format!("layers.{index}.{tensor}.weight");
        let queries = config.heads * config.head_dim;
        let q = self.piece(name("self_attn.q_proj"), [queries, hidden], Cut::Rows);
        let (k, v) = (self.key_heads(&name("self_attn.k_proj")), self.key_heads(&name("self_attn.v_proj")));
        let up = |which: &str| self.piece(name(&format!("mlp.{which}_proj")), [config.intermediate, hidden], Cut::Rows);
        Ok(Layer {
            input_norm: weights.vector(&name("input_layernorm"), hidden)?,
            attention: DraftAttention {
                kv: weights.matrix(&[k.clone(), v.clone()])?,
                qkv: weights.matrix(&[q, k, v])?,
                q_norm: weights.vector(&name("self_attn.q_norm"), config.head_dim)?,
                k_norm: weights.vector(&name("self_attn.k_norm"), config.head_dim)?,
                o: weights.matrix(&[self.piece(name("self_attn.o_proj"), [hidden, queries], Cut::Columns)])?,
            },
            mask: DraftMask { window: layer.window.map(|window| window as u32), causal: layer.causal_block },
            post_norm: weights.vector(&name("post_attention_layernorm"), hidden)?,
            mlp: Mlp {
                gate_up: weights.matrix(&[up("gate"), up("up")])?,
                down: weights.matrix(&[self.piece(name("mlp.down_proj"), [hidden, config.intermediate], Cut::Columns)])?,
            },
        })
    }
}
