//! Makes checkpoints of any size in K2.6's format: with random weights, to run what k26-mini is too small for (eight ranks, many experts),
//! or with holes for data, to check the layout of the full-size model without its 554 GiB. Used by tests and benches.

mod shards;
mod values;
mod vision;
mod vocabulary;

use std::io;
use std::path::Path;

use serde_json::{Value, json};

use self::shards::Entry;
use super::config::{DraftConfig, TargetConfig};
use super::inventory::{Inventory, Part};
use super::problem::Problems;
use super::quantization::WRAPPER_PREFIX;

/// What the tensors hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: sparse files that have the right length and read as zeros.
    Holes,
    /// Weights of sensible scale from this seed: activations keep their size through the layers, routing is spread, nothing overflows.
    Random(u64),
    /// The same, but every tensor repeats its first 65,536 numbers: quick to make at any size.
    Repeated(u64),
}

/// Sizes of a target. Head sizes and latent width are K2.6's, as its kernels need them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSizes {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub q_lora_rank: usize,
    pub dense_intermediate: usize,
    pub moe_intermediate: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Base tokens and 256 control slots.
    pub vocab: usize,
    pub max_positions: usize,
}

impl TargetSizes {
    /// Kimi K2.6.
    pub fn kimi() -> Self {
        Self {
            hidden: 7168,
            layers: 61,
            heads: 64,
            q_lora_rank: 1536,
            dense_intermediate: 18432,
            moe_intermediate: 2048,
            experts: 384,
            top_k: 8,
            vocab: 163_840,
            max_positions: 262_144,
        }
    }

    /// The smallest that can be cut over eight ranks: one head, 64 ids and one quantisation group of every expert each.
    pub fn eight_ranks() -> Self {
        Self {
            hidden: 128,
            layers: 3,
            heads: 8,
            q_lora_rank: 64,
            dense_intermediate: 256,
            moe_intermediate: 256,
            experts: 16,
            top_k: 4,
            vocab: 1024,
            max_positions: 4096,
        }
    }

    /// The text of `config.json`, wrapper and all.
    pub fn config(&self) -> Value {
        let first = self.vocab - 256;
        let ids = json!({"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": self.vocab - 1});
        let mut text = json!({
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "dtype": "bfloat16", "attention_bias": false,
            "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": self.hidden, "intermediate_size": self.dense_intermediate,
            "kv_lora_rank": 512, "max_position_embeddings": self.max_positions, "moe_intermediate_size": self.moe_intermediate,
            "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": self.experts, "n_shared_experts": 1, "norm_topk_prob": true,
            "num_attention_heads": self.heads, "num_experts_per_tok": self.top_k, "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads, "num_nextn_predict_layers": 0, "q_lora_rank": self.q_lora_rank, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": rope_scaling(),
            "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 1,
            "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": self.vocab, "quantization_config": quantization(),
        });
        merge(&mut text, &ids);
        let mut outer = json!({"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
            "tie_word_embeddings": false, "text_config": text, "vision_config": null});
        merge(&mut outer, &ids);
        outer
    }
}

/// Sizes of a drafter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftSizes {
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub block_size: usize,
    pub taps: Vec<usize>,
}

impl DraftSizes {
    /// Kimi's.
    pub fn kimi() -> Self {
        Self { layers: 6, heads: 64, kv_heads: 8, head_dim: 128, intermediate: 18432, block_size: 8, taps: vec![1, 12, 24, 35, 47, 58] }
    }

    /// One that goes with `TargetSizes::eight_ranks`.
    pub fn eight_ranks() -> Self {
        Self { layers: 2, heads: 8, kv_heads: 8, head_dim: 32, intermediate: 256, block_size: 8, taps: vec![0, 1, 2] }
    }

    /// The text of `config.json`.
    pub fn config(&self, target: &TargetConfig) -> Value {
        json!({
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16", "attention_bias": false,
            "block_size": self.block_size, "dflash_config": {"mask_token_id": target.vocab - 2, "target_layer_ids": self.taps},
            "head_dim": self.head_dim, "hidden_act": "silu", "hidden_size": target.hidden, "intermediate_size": self.intermediate,
            "layer_types": vec!["full_attention"; self.layers], "max_position_embeddings": target.max_positions,
            "num_attention_heads": self.heads, "num_hidden_layers": self.layers, "num_key_value_heads": self.kv_heads,
            "num_target_layers": target.layers, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": rope_scaling(),
            "tie_word_embeddings": false, "vocab_size": target.vocab,
        })
    }
}

/// How a target is written.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub fill: Fill,
    /// Most files the tensors are spread over.
    pub shards: usize,
    /// Add the 335 tensors of the vision tower and its projector, in the full model's sizes (0.94 GB; always holes).
    pub vision: bool,
}

/// Writes a whole model into an existing directory: configuration, tokenizer, index and shards.
///
/// # Errors
/// Whatever writing meets, or sizes that do not make a model.
pub fn write_target(directory: &Path, sizes: &TargetSizes, layout: Layout) -> io::Result<TargetConfig> {
    let config_text = sizes.config().to_string();
    let config = TargetConfig::parse("synthetic", &config_text, None).map_err(invalid)?;
    std::fs::write(directory.join("config.json"), config_text)?;
    vocabulary::write(directory, sizes.vocab)?;
    let inventory = Inventory::target(&config);
    let entries = inventory.tensors.iter().zip(0..).map(|(spec, number)| {
        let entry = Entry::of_spec(spec, WRAPPER_PREFIX, layout.fill, number);
        match (spec.part, layout.fill) {
            (Part::ExpertsShapes, Fill::Random(_) | Fill::Repeated(_)) => entry.stating(expert_shape(&spec.name, sizes)),
            _ => entry,
        }
    });
    let vision = if layout.vision { vision::tensors() } else { Vec::new() };
    shards::write(directory, entries.chain(vision).collect(), layout.shards)?;
    Ok(config)
}

/// Writes a drafter for `target` into an existing directory: configuration and one file of weights. Errors as for `write_target`.
pub fn write_drafter(directory: &Path, sizes: &DraftSizes, target: &TargetConfig, fill: Fill) -> io::Result<DraftConfig> {
    let config_text = sizes.config(target).to_string();
    let config = DraftConfig::parse("synthetic", &config_text, target).map_err(invalid)?;
    std::fs::write(directory.join("config.json"), config_text)?;
    let inventory = Inventory::drafter(&config);
    let entries = inventory.tensors.iter().zip(0..).map(|(spec, number)| Entry::of_spec(spec, "", fill, number)).collect();
    shards::write_single(directory, entries)?;
    Ok(config)
}

fn expert_shape(name: &str, sizes: &TargetSizes) -> [usize; 2] {
    if name.contains(".down_proj.") { [sizes.hidden, sizes.moe_intermediate] } else { [sizes.moe_intermediate, sizes.hidden] }
}

fn invalid(problems: Problems) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problems)
}

fn rope_scaling() -> Value {
    json!({"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
           "mscale": 1.0, "mscale_all_dim": 1.0})
}

fn quantization() -> Value {
    let weights =
        json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32, "actorder": null, "dynamic": false});
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": null,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null, "output_activations": null}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    })
}

fn merge(into: &mut Value, fields: &Value) {
    for (key, value) in fields.as_object().into_iter().flatten() {
        into[key] = value.clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::checkpoint::Checkpoint;
    use crate::model::progress::Silent;
    use crate::model::source::ModelSource;
    use crate::model::tokenizer::Tokenizer;

    fn write(seed: u64) -> (tempfile::TempDir, TargetConfig) {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout { fill: Fill::Random(seed), shards: 3, vision: false };
        let config = write_target(directory.path(), &TargetSizes::eight_ranks(), layout).unwrap();
        (directory, config)
    }

    #[test]
    fn a_random_model_loads_passes_the_scan_and_can_be_cut_over_eight_ranks() {
        let (directory, config) = write(1);
        let source = ModelSource::directory(directory.path());
        let checkpoint = Checkpoint::open_target(&source, &TargetConfig::load(&source).unwrap()).unwrap();
        checkpoint.scan_values(&Silent).unwrap();
        assert!(config.tp_problems(8).is_empty());
        Tokenizer::load(&source).unwrap().fits(&config).unwrap();
        let drafter = tempfile::tempdir().unwrap();
        let draft = write_drafter(drafter.path(), &DraftSizes::eight_ranks(), &config, Fill::Random(2)).unwrap();
        let checkpoint = Checkpoint::open_drafter(&ModelSource::directory(drafter.path()), &draft).unwrap();
        checkpoint.scan_values(&Silent).unwrap();
        assert!(draft.tp_problems(8).is_empty());
    }

    #[test]
    fn weights_come_from_the_seed() {
        let shard = |seed| {
            let (directory, _) = write(seed);
            std::fs::read(directory.path().join("model-00001-of-000003.safetensors")).unwrap()
        };
        assert_eq!(shard(1), shard(1));
        assert_ne!(shard(1), shard(2));
    }

    #[test]
    fn random_weights_keep_the_size_of_what_they_multiply() {
        let (directory, config) = write(3);
        let source = ModelSource::directory(directory.path());
        let checkpoint = Checkpoint::open_target(&source, &config).unwrap();
        let expert = checkpoint.int4("model.layers.1.mlp.experts.0.gate_proj", [256, 128]).unwrap().unpack();
        let plain = checkpoint.matrix("model.layers.1.self_attn.q_a_proj.weight", [64, 128]).unwrap();
        for weights in [&expert, &plain.data.into_owned()] {
            let mean_square = weights.iter().map(|w| w.to_f32().powi(2)).sum::<f32>() / weights.len() as f32;
            assert!((0.5..2.0).contains(&(mean_square * 128.0)), "{mean_square}");
        }
    }
}
