//! The target's configuration, read from a K2.5/K2.6 `config.json` (multimodal wrapper or bare text model). Everything that loads or
//! runs the target starts here. Sizes come from the file; a switch that changes the arithmetic and is not supported is refused by name.

use std::cell::RefCell;

use serde_json::{Map, Value};

use super::config_keys::{Keys, parse_object};
pub use super::draft_config::{DraftConfig, DraftLayer};
use super::problem::{Problem, Problems};
use super::quantization::{self, Quantization};
use super::rope::{Rope, yarn_mscale};
use super::source::ModelSource;

/// Epsilon of the two latent norms (`q_a_layernorm`, `kv_a_layernorm`): the default of the model's own RMSNorm class, which builds
/// both without passing `rms_norm_eps`.
pub const LATENT_NORM_EPS: f32 = 1e-6;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
/// Most experts of all layers together: the list of tensors of more would fill the memory before anything is compared with it.
const MAX_EXPERTS: usize = 1 << 20;
const MODEL_TYPES: [&str; 3] = ["kimi_k25", "kimi_k2", "deepseek_v3"];

/// Sizes and constants of the target.
#[derive(Clone, Debug)]
pub struct TargetConfig {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub q_lora_rank: usize,
    pub kv_lora_rank: usize,
    /// Head dimensions without and with rotary embedding, and of the values.
    pub nope_dim: usize,
    pub rope_dim: usize,
    pub v_dim: usize,
    /// MLP width of the dense layers.
    pub dense_intermediate: usize,
    /// MLP width of one routed expert.
    pub moe_intermediate: usize,
    pub experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// Shared experts; their MLP has this many times `moe_intermediate`.
    pub shared_experts: usize,
    /// Leading layers with a dense MLP instead of experts.
    pub dense_layers: usize,
    /// Factor on the renormalised weights of the chosen experts, not on the shared expert.
    pub routed_scaling: f64,
    pub rms_norm_eps: f32,
    pub rope: Rope,
    pub max_positions: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    pub quantization: Quantization,
    pub bos: Option<u32>,
    pub pad: Option<u32>,
    /// Ids that end a turn or text: the union of both configurations and `generation_config.json`, ascending.
    pub stop_ids: Vec<u32>,
}

impl TargetConfig {
    /// Reads `config.json` and, if there, `generation_config.json` of a model.
    ///
    /// # Errors
    /// A missing or unreadable file, or every key that is missing, unusable or unsupported.
    pub fn load(source: &ModelSource) -> Result<Self, Problems> {
        let fail = |problem| Problems::one(source.to_string(), problem);
        let config = source.required_text(CONFIG).map_err(fail)?;
        let generation = source.text(GENERATION_CONFIG).map_err(fail)?;
        Self::parse(&source.to_string(), &config, generation.as_deref())
    }

    /// The same from the text of the files; `model` only names the model in errors.
    pub fn parse(model: &str, config: &str, generation: Option<&str>) -> Result<Self, Problems> {
        let fail = |problem| Problems::one(model, problem);
        let outer = parse_object(CONFIG, config).map_err(fail)?;
        let generation = generation.map(|text| parse_object(GENERATION_CONFIG, text)).transpose().map_err(fail)?;
        let problems = RefCell::new(Vec::new());
        let parsed = Self::parse_objects(&outer, generation.as_ref(), &problems);
        match (parsed, problems.into_inner()) {
            (Some(config), list) if list.is_empty() => {
                let list = config.contradictions();
                Problems::unless_empty(model, list, config)
            }
            (_, list) => Err(Problems::new(model, list)),
        }
    }

    fn parse_objects(
        outer_object: &Map<String, Value>,
        generation: Option<&Map<String, Value>>,
        problems: &RefCell<Vec<Problem>>,
    ) -> Option<Self> {
        let outer = Keys::new(CONFIG, outer_object, problems);
        let text = outer.child("text_config").unwrap_or_else(|| outer.clone());
        refuse_unsupported(&outer, &text);
        let quantization = parse_quantization(&outer, &text, outer_object);
        let mut stop_ids = [outer.tokens("eos_token_id"), text.tokens("eos_token_id")].concat();
        if let Some(generation) = generation {
            stop_ids.extend(Keys::new(GENERATION_CONFIG, generation, problems).tokens("eos_token_id"));
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        let rope = Rope::parse(&text, text.size("qk_rope_head_dim"));
        if rope.magnitude != 1.0 {
            text.report("rope_scaling.mscale", format!("a factor of {} on cos and sin", rope.magnitude), "mscale = mscale_all_dim");
        }
        Some(Self {
            hidden: text.size("hidden_size"),
            layers: text.size("num_hidden_layers"),
            heads: text.size("num_attention_heads"),
            q_lora_rank: text.size("q_lora_rank"),
            kv_lora_rank: text.size("kv_lora_rank"),
            nope_dim: text.size("qk_nope_head_dim"),
            rope_dim: rope.dim,
            v_dim: text.size("v_head_dim"),
            dense_intermediate: text.size("intermediate_size"),
            moe_intermediate: text.size("moe_intermediate_size"),
            experts: text.size("n_routed_experts"),
            top_k: text.size("num_experts_per_tok"),
            shared_experts: text.size("n_shared_experts"),
            dense_layers: text.size("first_k_dense_replace"),
            routed_scaling: text.positive("routed_scaling_factor"),
            rms_norm_eps: text.positive("rms_norm_eps") as f32,
            rope,
            max_positions: text.size("max_position_embeddings"),
            vocab: text.size("vocab_size"),
            bos: text.token("bos_token_id").or_else(|| outer.token("bos_token_id")),
            pad: text.token("pad_token_id").or_else(|| outer.token("pad_token_id")),
            stop_ids,
            quantization: quantization?,
        })
    }

    /// Keys that are fine alone and do not fit together.
    fn contradictions(&self) -> Vec<Problem> {
        let mut list = Vec::new();
        let mut check = |holds: bool, subject: &str, found: String, wanted: String| {
            if !holds {
                list.push(Problem::new(CONFIG, subject, found, wanted));
            }
        };
        if self.layers.saturating_mul(self.experts) > MAX_EXPERTS {
            let found = format!("{} layers of {}", self.layers, self.experts);
            check(false, "n_routed_experts", found, format!("at most {MAX_EXPERTS} experts over all layers"));
            return list;
        }
        let group = self.quantization.group_size;
        check(
            self.top_k <= self.experts,
            "num_experts_per_tok",
            self.top_k.to_string(),
            format!("at most n_routed_experts {}", self.experts),
        );
        check(
            self.dense_layers <= self.layers,
            "first_k_dense_replace",
            self.dense_layers.to_string(),
            format!("at most num_hidden_layers {}", self.layers),
        );
        for (key, size) in [("hidden_size", self.hidden), ("moe_intermediate_size", self.moe_intermediate)] {
            check(size.is_multiple_of(group), key, size.to_string(), format!("a multiple of the quantisation group {group}"));
        }
        check(!self.stop_ids.is_empty(), "eos_token_id", "nothing".into(), "at least one stop id".into());
        let named = [("bos_token_id", self.bos), ("pad_token_id", self.pad)];
        let ids = named.iter().filter_map(|(key, id)| Some((*key, (*id)?)));
        for (key, id) in ids.chain(self.stop_ids.iter().map(|&id| ("eos_token_id", id))) {
            check((id as usize) < self.vocab, key, id.to_string(), format!("an id below vocab_size {}", self.vocab));
        }
        for module in self.plain_modules() {
            check(
                self.quantization.is_ignored(&module),
                "quantization_config.ignore",
                format!("no entry for {module}"),
                "one, as only routed experts are INT4".into(),
            );
        }
        for layer in self.dense_layers..self.layers {
            let module = format!("model.layers.{layer}.mlp.experts.0.gate_proj");
            check(
                !self.quantization.is_ignored(&module),
                "quantization_config.ignore",
                format!("an entry that covers {module}"),
                "none, as routed experts are INT4".into(),
            );
        }
        list
    }

    /// One module of every kind that must stay BF16.
    fn plain_modules(&self) -> Vec<String> {
        let mut modules = vec!["lm_head".to_string()];
        let last = self.layers - 1;
        for name in ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"] {
            modules.push(format!("model.layers.{last}.self_attn.{name}"));
        }
        for name in ["gate_proj", "up_proj", "down_proj"] {
            if self.dense_layers > 0 {
                modules.push(format!("model.layers.0.mlp.{name}"));
            }
            if self.dense_layers < self.layers {
                modules.push(format!("model.layers.{last}.mlp.shared_experts.{name}"));
            }
        }
        modules
    }

    /// Dimensions of one query or key head.
    pub fn qk_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Values per token and layer in the cache: the normed latent, then the rotated key shared by all heads.
    pub fn slot_width(&self) -> usize {
        self.kv_lora_rank + self.rope_dim
    }

    /// Values per token that one of `ranks` ranks caches over all layers: the whole latent of the target, and the drafter's keys and
    /// values cut by heads (ranks beyond the key heads hold a copy).
    pub fn cached_values(&self, draft: Option<&DraftConfig>, ranks: usize) -> usize {
        self.layers * self.slot_width() + draft.map_or(0, |draft| draft.slot_width() / ranks.min(draft.kv_heads))
    }

    /// Width of the shared expert.
    pub fn shared_intermediate(&self) -> usize {
        self.shared_experts * self.moe_intermediate
    }

    /// Whether the layer has experts; those before are dense.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.dense_layers
    }

    /// Layers with experts.
    pub fn moe_layers(&self) -> usize {
        self.layers - self.dense_layers
    }

    /// Scale of the attention scores: `qk_dim^-1/2`, times YaRN's magnitude correction squared. The absorbed form uses the same.
    /// Source: DeepSeek-V3's `DeepseekV3Attention.softmax_scale`.
    pub fn softmax_scale(&self) -> f64 {
        let correction = match self.rope.yarn {
            Some(yarn) => yarn_mscale(yarn.factor, yarn.mscale_all_dim.unwrap_or(0.0)),
            None => 1.0,
        };
        (self.qk_dim() as f64).powf(-0.5) * correction * correction
    }
}

/// Every switch that changes the arithmetic and has one supported setting.
fn refuse_unsupported(outer: &Keys, text: &Keys) {
    for keys in [outer, text] {
        if let Some(kind) = keys.text("model_type").filter(|kind| !MODEL_TYPES.contains(kind)) {
            keys.report("model_type", format!("{kind:?}"), format!("one of {MODEL_TYPES:?}"));
        }
        for dtype in ["dtype", "torch_dtype"] {
            keys.only(dtype, "bfloat16");
        }
        keys.only("tie_word_embeddings", false);
    }
    text.only("scoring_func", "sigmoid");
    text.only("topk_method", "noaux_tc");
    text.only_stated("n_group", 1);
    text.only_stated("topk_group", 1);
    text.only("norm_topk_prob", true);
    text.only("moe_layer_freq", 1);
    text.only("hidden_act", "silu");
    text.only("attention_bias", false);
    text.only("mlp_bias", false);
    text.only("rope_interleave", true);
    text.absent("num_nextn_predict_layers", "multi-token prediction layers are not supported");
    text.absent("index_topk", "sparse attention is not supported");
    text.absent("final_logit_softcapping", "the head has no soft cap");
    text.absent("sliding_window", "the target attends to everything");
    if let Some(kv_heads) = text.get("num_key_value_heads")
        && text.get("num_attention_heads") != Some(kv_heads)
    {
        text.report("num_key_value_heads", kv_heads, "the same as num_attention_heads (every head has its own key)");
    }
}

fn parse_quantization(outer: &Keys, text: &Keys, outer_object: &Map<String, Value>) -> Option<Quantization> {
    if let Some(Value::Object(text_object)) = outer_object.get("text_config")
        && let Err((found, wanted)) = quantization::agree(outer_object, text_object)
    {
        outer.report("quantization_config", found, wanted);
    }
    let place = if text.get("quantization_config").is_some() { text } else { outer };
    Quantization::parse(place)
}

#[cfg(test)]
pub(crate) mod tests;
