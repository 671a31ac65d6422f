//! The drafter's configuration, read from a DFlash `config.json` (z-lab's format, or vLLM speculators' one) and checked against the
//! target it drafts for. A key that changes the arithmetic and is not supported is refused by name.

use std::cell::RefCell;

use serde_json::{Map, Value};

use super::config::TargetConfig;
use super::config_keys::{Keys, parse_object};
use super::problem::{Problem, Problems};
use super::rope::Rope;
use super::source::ModelSource;
use crate::speculate::budget::MAX_ROWS;

const CONFIG: &str = "config.json";
/// Most layers of a drafter; more are no drafter but a damaged file.
const MAX_LAYERS: usize = 1024;
/// What SGLang assumes when no block size is stated.
const DEFAULT_BLOCK: usize = 16;

/// Keys of drafters that need other arithmetic: DFlash2 (convolution, selector), DSpark and Domino (Markov head, confidence head,
/// anchor slot), sinks and soft caps.
const UNSUPPORTED: [&str; 14] = [
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "final_logit_softcapping",
    "attention_sink_bias",
    "projector_type",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "sample_from_anchor",
    "shift_label",
    "sliding_window_non_causal",
    "embedding_scale",
];

/// Sizes and constants of the drafter.
#[derive(Clone, Debug)]
pub struct DraftConfig {
    pub hidden: usize,
    pub layers: Vec<DraftLayer>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub rms_norm_eps: f32,
    /// Over the whole head, pairs i and i + head_dim/2.
    pub rope: Rope,
    pub max_positions: usize,
    pub vocab: usize,
    /// Rows of one drafting pass: the anchor and `block_size - 1` masked slots.
    pub block_size: usize,
    pub mask_token_id: u32,
    /// Target layers (0-based) whose output, the residual stream after the layer, is tapped, in the order `fc` expects.
    pub taps: Vec<usize>,
}

/// What a row of the block sees in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftLayer {
    /// `Some(w)`: a key is visible when its position is less than `w` before the query's.
    pub window: Option<usize>,
    /// Whether a row sees only itself and earlier rows of its block.
    pub causal_block: bool,
}

impl DraftConfig {
    /// # Errors
    /// A missing or unreadable file, or every key that is missing, unusable, unsupported or does not fit `target`.
    pub fn load(source: &ModelSource, target: &TargetConfig) -> Result<Self, Problems> {
        let text = source.required_text(CONFIG).map_err(|problem| Problems::one(source.to_string(), problem))?;
        Self::parse(&source.to_string(), &text, target)
    }

    /// The same from the text of the file; `model` only names the drafter in errors.
    pub fn parse(model: &str, config: &str, target: &TargetConfig) -> Result<Self, Problems> {
        let object = parse_object(CONFIG, config).map_err(|problem| Problems::one(model, problem))?;
        let problems = RefCell::new(Vec::new());
        let config = Self::parse_object(&object, target, &problems);
        let mut list = problems.into_inner();
        if list.is_empty() {
            list = config.contradictions(target);
        }
        Problems::unless_empty(model, list, config)
    }

    /// Values per token in the drafter's own cache: keys and values of every layer.
    pub fn slot_width(&self) -> usize {
        2 * self.layers.len() * self.kv_heads * self.head_dim
    }

    fn parse_object(object: &Map<String, Value>, target: &TargetConfig, problems: &RefCell<Vec<Problem>>) -> Self {
        let top = Keys::new(CONFIG, object, problems);
        let speculators = top.get("speculators_config").is_some() || top.get("speculators_model_type").is_some();
        let model = top.child("transformer_layer_config").unwrap_or_else(|| top.clone());
        let dflash = top.child("dflash_config").unwrap_or_else(|| top.clone());
        refuse_unsupported(&top, &model, &dflash);
        let heads = model.size("num_attention_heads");
        let hidden = model.size("hidden_size");
        let head_dim = model.size_or("head_dim", (hidden / heads).max(1));
        let mut layers = model.size("num_hidden_layers");
        if layers > MAX_LAYERS {
            model.report("num_hidden_layers", layers, format!("at most {MAX_LAYERS}"));
            layers = 1;
        }
        if let Some(count) = dflash.get("num_target_layers").or_else(|| top.get("num_target_layers"))
            && count.as_u64() != Some(target.layers as u64)
        {
            top.report("num_target_layers", count, format!("the target's {} layers", target.layers));
        }
        Self {
            hidden,
            layers: parse_layers(&model, &dflash, layers),
            heads,
            kv_heads: model.size_or("num_key_value_heads", heads),
            head_dim,
            intermediate: model.size("intermediate_size"),
            rms_norm_eps: model.positive("rms_norm_eps") as f32,
            rope: Rope::parse(&model, head_dim),
            max_positions: model.size("max_position_embeddings"),
            vocab: if speculators { top.size_or("draft_vocab_size", model.size("vocab_size")) } else { model.size("vocab_size") },
            block_size: dflash.size_or("block_size", top.size_or("block_size", DEFAULT_BLOCK)),
            mask_token_id: parse_mask_token(&top, &dflash),
            taps: parse_taps(&top, &dflash, speculators, target.layers, layers),
        }
    }

    fn contradictions(&self, target: &TargetConfig) -> Vec<Problem> {
        let mut list = Vec::new();
        let mut check = |holds: bool, subject: &str, found: String, wanted: String| {
            if !holds {
                list.push(Problem::new(CONFIG, subject, found, wanted));
            }
        };
        check(self.hidden == target.hidden, "hidden_size", self.hidden.to_string(), format!("the target's {}", target.hidden));
        check(self.vocab == target.vocab, "vocab_size", self.vocab.to_string(), format!("the target's {}", target.vocab));
        check(
            self.heads.is_multiple_of(self.kv_heads),
            "num_key_value_heads",
            self.kv_heads.to_string(),
            format!("a divisor of num_attention_heads {}", self.heads),
        );
        check(
            (2..=MAX_ROWS).contains(&self.block_size),
            "block_size",
            self.block_size.to_string(),
            format!("2 to {MAX_ROWS} (an anchor and at least one slot, at most one bit of the tree mask each)"),
        );
        check(
            (self.mask_token_id as usize) < target.vocab,
            "mask_token_id",
            self.mask_token_id.to_string(),
            format!("an id below the target's vocab_size {}", target.vocab),
        );
        check(!self.taps.is_empty(), "target_layer_ids", "none".into(), "at least one layer".into());
        for (i, &tap) in self.taps.iter().enumerate() {
            let wanted = format!("0 to {} (the target has {} layers)", target.layers - 1, target.layers);
            check(tap < target.layers, "target_layer_ids", tap.to_string(), wanted);
            check(!self.taps[..i].contains(&tap), "target_layer_ids", format!("{tap} twice"), "each layer once".into());
        }
        list
    }
}

/// The taps of a drafter that names none: the first is layer 1, the last the third from the end, the others evenly between.
/// Rounding is half to even. Source: z-lab/dflash `build_target_layer_ids`.
pub fn default_taps(target_layers: usize, draft_layers: usize) -> Vec<usize> {
    if draft_layers == 1 {
        return vec![target_layers / 2];
    }
    let span = (target_layers as f64 - 4.0) / (draft_layers as f64 - 1.0);
    (0..draft_layers).map(|i| (1.0 + i as f64 * span).round_ties_even().max(0.0) as usize).collect()
}

fn refuse_unsupported(top: &Keys, model: &Keys, dflash: &Keys) {
    for name in top.strings("architectures") {
        if !name.starts_with("DFlash") || name.starts_with("DFlash2") {
            top.report("architectures", format!("{name:?}"), "DFlashDraftModel");
        }
    }
    model.only("hidden_act", "silu");
    model.only("attention_bias", false);
    model.only("mlp_bias", false);
    for keys in [top, model, dflash] {
        for key in UNSUPPORTED {
            keys.absent(key, "this kind of drafter is not supported");
        }
        keys.only("partial_rotary_factor", 1);
        keys.only("output_multiplier", 1);
        keys.only("attention_value_scale", 1);
    }
}

fn parse_mask_token(top: &Keys, dflash: &Keys) -> u32 {
    dflash.token("mask_token_id").or_else(|| top.token("mask_token_id")).unwrap_or_else(|| {
        dflash.report("mask_token_id", "nothing", "the id of the drafter's mask token");
        0
    })
}

/// Speculators counts layers already run, so its ids are one more than z-lab's "after this layer".
fn parse_taps(top: &Keys, dflash: &Keys, speculators: bool, target_layers: usize, draft_layers: usize) -> Vec<usize> {
    let (keys, key) = if dflash.get("target_layer_ids").is_some() {
        (dflash, "target_layer_ids")
    } else if top.get("aux_hidden_state_layer_ids").is_some() {
        (top, "aux_hidden_state_layer_ids")
    } else {
        return default_taps(target_layers, draft_layers);
    };
    let ids = keys.tokens(key);
    if !speculators {
        return ids.into_iter().map(|id| id as usize).collect();
    }
    if ids.contains(&0) {
        keys.report(key, 0, "ids from 1 (speculators counts the layers already run)");
    }
    ids.into_iter().map(|id| id.saturating_sub(1) as usize).collect()
}

/// Sliding layers are causal inside the block and full ones see all of it, unless `is_causal` (or `causal`) decides for every layer.
fn parse_layers(model: &Keys, dflash: &Keys, count: usize) -> Vec<DraftLayer> {
    let causal = match (dflash.bool("is_causal"), dflash.bool("causal")) {
        (Some(a), Some(b)) if a != b => {
            dflash.report("causal", b, format!("the same as is_causal {a}"));
            None
        }
        (a, b) => a.or(b),
    };
    let sliding = sliding_layers(model, count);
    let window = model.get("sliding_window").map(|_| model.size("sliding_window"));
    if sliding.contains(&true) && window.is_none() {
        model.report("sliding_window", "nothing", "a window, as layer_types has sliding_attention");
    }
    if sliding.contains(&true) && model.bool("use_sliding_window") == Some(false) {
        model.report("use_sliding_window", false, "true, as layer_types has sliding_attention");
    }
    let layer = |sliding: bool| DraftLayer { window: window.filter(|_| sliding), causal_block: causal.unwrap_or(sliding) };
    sliding.into_iter().map(layer).collect()
}

/// Which layers have a window: `layer_types`, else Qwen3's rule (every layer from `max_window_layers` on, if windows are used at all).
fn sliding_layers(model: &Keys, count: usize) -> Vec<bool> {
    if model.get("layer_types").is_none() {
        let used = model.bool("use_sliding_window") == Some(true) && model.get("sliding_window").is_some();
        let first = model.get("max_window_layers").and_then(Value::as_u64).unwrap_or(28) as usize;
        return (0..count).map(|i| used && i >= first).collect();
    }
    let kinds = model.strings("layer_types");
    if kinds.len() != count && model.get("num_hidden_layers").is_some() {
        model.report("layer_types", format!("{} entries", kinds.len()), format!("num_hidden_layers {count}"));
    }
    let sliding = |kind: &str| match kind {
        "sliding_attention" => true,
        "full_attention" => false,
        other => {
            model.report("layer_types", format!("{other:?}"), "full_attention or sliding_attention");
            false
        }
    };
    kinds.into_iter().map(sliding).collect()
}

#[cfg(test)]
mod tests;
