//! The complete list of tensors a checkpoint must have, derived from its configuration: name, type, shape, which part of the model it
//! belongs to and how ranks share it. The checkpoint is compared with it at open; `kdtree check` adds its bytes up.

use serde::Serialize;

use super::config::{DraftConfig, TargetConfig};
use super::problem::Problem;
use super::quantization::WRAPPER_PREFIX;
use super::tensor::Cut;

/// Element type a tensor must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wanted {
    Bf16,
    F32,
    I32,
    /// `weight_shape`: generic compressed-tensors files hold it in 64 bits, Kimi's in 32.
    I32OrI64,
}

/// Part of a model, for sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    ExpertsPacked,
    ExpertsScales,
    ExpertsShapes,
    Attention,
    DenseMlp,
    Routers,
    SharedExperts,
    EmbedHeadNorm,
    Drafter,
}

impl Part {
    /// As tables call it.
    pub fn label(self) -> &'static str {
        match self {
            Self::ExpertsPacked => "routed experts, packed",
            Self::ExpertsScales => "routed experts, scales",
            Self::ExpertsShapes => "routed experts, shapes",
            Self::Attention => "attention and layer norms",
            Self::DenseMlp => "dense MLP",
            Self::Routers => "routers",
            Self::SharedExperts => "shared experts",
            Self::EmbedHeadNorm => "embedding, head, final norm",
            Self::Drafter => "drafter",
        }
    }
}

/// One tensor a checkpoint must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name without the multimodal wrapper's (or an exporter's) prefix.
    pub name: String,
    pub wanted: Wanted,
    pub shape: Vec<usize>,
    pub part: Part,
    pub cut: Cut,
}

impl TensorSpec {
    /// Numbers in the tensor.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    /// Bytes in a file that has the narrowest accepted type.
    pub fn bytes(&self) -> u64 {
        let width = match self.wanted {
            Wanted::Bf16 => 2,
            Wanted::F32 | Wanted::I32 | Wanted::I32OrI64 => 4,
        };
        self.elements() * width
    }
}

/// Which checkpoint the list is for; decides how names on disk are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Target,
    Drafter,
}

/// What a name on disk means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named<'a> {
    /// A tensor of the inventory, or a surplus one: its name without prefix.
    Tensor(&'a str),
    /// Known and not needed: the reason.
    Skipped(&'static str),
}

/// Every tensor that a configuration asks for.
#[derive(Clone, Debug)]
pub struct Inventory {
    pub kind: Kind,
    pub tensors: Vec<TensorSpec>,
}

impl Inventory {
    /// Every tensor of the text model: 208,215 for Kimi K2.6.
    pub fn target(config: &TargetConfig) -> Self {
        let mut list = List::default();
        let (hidden, vocab) = (config.hidden, config.vocab);
        list.matrix("model.embed_tokens.weight", vocab, hidden, Part::EmbedHeadNorm, Cut::Rows);
        for layer in 0..config.layers {
            list.attention(config, layer);
            if config.is_moe(layer) {
                list.experts(config, layer);
            } else {
                list.mlp(&format!("model.layers.{layer}.mlp"), hidden, config.dense_intermediate, Part::DenseMlp);
            }
        }
        list.vector("model.norm.weight", hidden, Part::EmbedHeadNorm);
        list.matrix("lm_head.weight", vocab, hidden, Part::EmbedHeadNorm, Cut::Rows);
        Self { kind: Kind::Target, tensors: list.0 }
    }

    /// Every tensor of the drafter: 11 a layer and 3 more, 69 for Kimi's.
    pub fn drafter(config: &DraftConfig) -> Self {
        let mut list = List::default();
        let (hidden, part) = (config.hidden, Part::Drafter);
        list.matrix("fc.weight", hidden, config.taps.len() * hidden, part, Cut::Whole);
        list.vector("hidden_norm.weight", hidden, part);
        for layer in 0..config.layers.len() {
            let name = |tensor: &str| format!("layers.{layer}.{tensor}.weight");
            let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
            list.vector(&name("input_layernorm"), hidden, part);
            list.matrix(&name("self_attn.q_proj"), queries, hidden, part, Cut::Rows);
            list.matrix(&name("self_attn.k_proj"), keys, hidden, part, Cut::Rows);
            list.matrix(&name("self_attn.v_proj"), keys, hidden, part, Cut::Rows);
            list.matrix(&name("self_attn.o_proj"), hidden, queries, part, Cut::Columns);
            list.vector(&name("self_attn.q_norm"), config.head_dim, part);
            list.vector(&name("self_attn.k_norm"), config.head_dim, part);
            list.vector(&name("post_attention_layernorm"), hidden, part);
            list.mlp(&format!("layers.{layer}.mlp"), hidden, config.intermediate, part);
        }
        list.vector("norm.weight", hidden, part);
        Self { kind: Kind::Drafter, tensors: list.0 }
    }

    /// Reads a name as it stands in a file.
    pub fn read_name<'a>(&self, on_disk: &'a str) -> Named<'a> {
        match self.kind {
            Kind::Target => {
                if on_disk.starts_with("vision_tower.") || on_disk.starts_with("mm_projector.") {
                    return Named::Skipped("vision, not used by a text server");
                }
                Named::Tensor(on_disk.strip_prefix(WRAPPER_PREFIX).unwrap_or(on_disk))
            }
            Kind::Drafter => {
                let name = on_disk.strip_prefix("model.").unwrap_or(on_disk);
                let copies = ["embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head."];
                if copies.iter().any(|copy| name.starts_with(copy)) {
                    return Named::Skipped("a copy of the target's, which is used instead");
                }
                if name.starts_with("rotary_emb.") {
                    return Named::Skipped("computed from the configuration");
                }
                Named::Tensor(name)
            }
        }
    }

    /// Bytes one rank holds.
    pub fn bytes_per_rank(&self, ranks: usize) -> u64 {
        self.tensors.iter().map(|tensor| tensor.cut.bytes_per_rank(tensor.bytes(), ranks)).sum()
    }
}

impl TargetConfig {
    /// Why the target cannot be cut over this many ranks; empty when it can.
    pub fn tp_problems(&self, ranks: usize) -> Vec<Problem> {
        let group = self.quantization.group_size;
        uneven(
            ranks,
            &[
                ("num_attention_heads", self.heads),
                ("vocab_size", self.vocab),
                ("intermediate_size", self.dense_intermediate),
                ("moe_intermediate_size / group_size (an expert is cut on group borders)", self.moe_intermediate / group),
            ],
        )
    }
}

impl DraftConfig {
    /// Why the drafter cannot be cut over this many ranks; empty when it can.
    pub fn tp_problems(&self, ranks: usize) -> Vec<Problem> {
        let mut problems = uneven(ranks, &[("num_attention_heads", self.heads), ("intermediate_size", self.intermediate)]);
        // Where there are more ranks than key heads, ranks that share a key head hold a copy each.
        if ranks > 0 && !ranks.is_multiple_of(self.kv_heads) {
            problems.extend(uneven(ranks, &[("num_key_value_heads", self.kv_heads)]));
        }
        problems
    }
}

fn uneven(ranks: usize, sizes: &[(&str, usize)]) -> Vec<Problem> {
    if ranks == 0 {
        return vec![Problem::new("config.json", "tensor parallel ranks", 0, "at least 1")];
    }
    let uneven = sizes.iter().filter(|(_, size)| !size.is_multiple_of(ranks));
    uneven.map(|(key, size)| Problem::new("config.json", *key, size, format!("a multiple of the {ranks} ranks"))).collect()
}

#[derive(Default)]
struct List(Vec<TensorSpec>);

impl List {
    fn push(&mut self, name: String, wanted: Wanted, shape: &[usize], part: Part, cut: Cut) {
        self.0.push(TensorSpec { name, wanted, shape: shape.to_vec(), part, cut });
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize, part: Part, cut: Cut) {
        self.push(name.to_string(), Wanted::Bf16, &[rows, columns], part, cut);
    }

    fn vector(&mut self, name: &str, size: usize, part: Part) {
        self.push(name.to_string(), Wanted::Bf16, &[size], part, Cut::Whole);
    }

    /// Multi-head latent attention and the two norms of a layer. Heads are contiguous row blocks of `q_b` and `kv_b` and column blocks
    /// of `o`, so equal parts are whole heads.
    fn attention(&mut self, config: &TargetConfig, layer: usize) {
        let name = |tensor: &str| format!("model.layers.{layer}.{tensor}.weight");
        let (hidden, heads, part) = (config.hidden, config.heads, Part::Attention);
        self.vector(&name("input_layernorm"), hidden, part);
        self.matrix(&name("self_attn.q_a_proj"), config.q_lora_rank, hidden, part, Cut::Whole);
        self.vector(&name("self_attn.q_a_layernorm"), config.q_lora_rank, part);
        self.matrix(&name("self_attn.q_b_proj"), heads * config.qk_dim(), config.q_lora_rank, part, Cut::Rows);
        self.matrix(&name("self_attn.kv_a_proj_with_mqa"), config.slot_width(), hidden, part, Cut::Whole);
        self.vector(&name("self_attn.kv_a_layernorm"), config.kv_lora_rank, part);
        self.matrix(&name("self_attn.kv_b_proj"), heads * (config.nope_dim + config.v_dim), config.kv_lora_rank, part, Cut::Rows);
        self.matrix(&name("self_attn.o_proj"), hidden, heads * config.v_dim, part, Cut::Columns);
        self.vector(&name("post_attention_layernorm"), hidden, part);
    }

    fn mlp(&mut self, prefix: &str, hidden: usize, width: usize, part: Part) {
        self.matrix(&format!("{prefix}.gate_proj.weight"), width, hidden, part, Cut::Rows);
        self.matrix(&format!("{prefix}.up_proj.weight"), width, hidden, part, Cut::Rows);
        self.matrix(&format!("{prefix}.down_proj.weight"), hidden, width, part, Cut::Columns);
    }

    fn experts(&mut self, config: &TargetConfig, layer: usize) {
        let prefix = format!("model.layers.{layer}.mlp");
        let (hidden, width) = (config.hidden, config.moe_intermediate);
        self.matrix(&format!("{prefix}.gate.weight"), config.experts, hidden, Part::Routers, Cut::Whole);
        self.push(format!("{prefix}.gate.e_score_correction_bias"), Wanted::F32, &[config.experts], Part::Routers, Cut::Whole);
        for expert in 0..config.experts {
            for (name, rows, columns, cut) in
                [("gate_proj", width, hidden, Cut::Rows), ("up_proj", width, hidden, Cut::Rows), ("down_proj", hidden, width, Cut::Columns)]
            {
                let module = format!("{prefix}.experts.{expert}.{name}");
                self.int4(&module, rows, columns, config.quantization.group_size, cut);
            }
        }
        self.mlp(&format!("{prefix}.shared_experts"), hidden, config.shared_intermediate(), Part::SharedExperts);
    }

    fn int4(&mut self, module: &str, rows: usize, columns: usize, group: usize, cut: Cut) {
        self.push(format!("{module}.weight_packed"), Wanted::I32, &[rows, columns / 8], Part::ExpertsPacked, cut);
        self.push(format!("{module}.weight_scale"), Wanted::Bf16, &[rows, columns / group], Part::ExpertsScales, cut);
        self.push(format!("{module}.weight_shape"), Wanted::I32OrI64, &[2], Part::ExpertsShapes, Cut::NotHeld);
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::tests::kimi;
    use super::*;

    fn full_size() -> TargetConfig {
        TargetConfig::parse("test", &kimi().to_string(), None).unwrap()
    }

    #[test]
    fn the_full_size_inventory_has_the_published_counts_and_bytes() {
        let inventory = Inventory::target(&full_size());
        let sum = |part: Part| {
            let of_part = inventory.tensors.iter().filter(|tensor| tensor.part == part);
            of_part.fold((0, 0), |(count, bytes), tensor| (count + 1, bytes + tensor.bytes()))
        };
        assert_eq!(sum(Part::ExpertsPacked), (69_120, 507_343_011_840));
        assert_eq!(sum(Part::ExpertsScales), (69_120, 63_417_876_480));
        assert_eq!(sum(Part::ExpertsShapes), (69_120, 552_960));
        assert_eq!(sum(Part::Attention), (549, 12_338_888_704));
        assert_eq!(sum(Part::DenseMlp), (3, 792_723_456));
        assert_eq!(sum(Part::Routers), (120, 330_393_600));
        assert_eq!(sum(Part::SharedExperts), (180, 5_284_823_040));
        assert_eq!(sum(Part::EmbedHeadNorm), (3, 4_697_634_816));
        assert_eq!(inventory.tensors.len(), 208_215);
    }

    #[test]
    fn eight_ranks_hold_the_published_bytes_each() {
        assert_eq!(Inventory::target(&full_size()).bytes_per_rank(8), 76_182_593_536);
    }

    #[test]
    fn names_are_read_with_and_without_their_prefix() {
        let target = Inventory { kind: Kind::Target, tensors: vec![] };
        assert_eq!(target.read_name("language_model.model.norm.weight"), Named::Tensor("model.norm.weight"));
        assert_eq!(target.read_name("lm_head.weight"), Named::Tensor("lm_head.weight"));
        assert!(matches!(target.read_name("vision_tower.encoder.final_layernorm.bias"), Named::Skipped(_)));
        let drafter = Inventory { kind: Kind::Drafter, tensors: vec![] };
        assert_eq!(drafter.read_name("model.fc.weight"), Named::Tensor("fc.weight"));
        assert!(matches!(drafter.read_name("lm_head.weight"), Named::Skipped(_)));
    }

    #[test]
    fn numbers_of_ranks_that_do_not_divide_are_named() {
        let config = full_size();
        assert!(config.tp_problems(8).is_empty() && config.tp_problems(16).is_empty());
        let problems = config.tp_problems(7);
        assert!(problems.iter().any(|problem| problem.subject == "num_attention_heads" && problem.found == "64"), "{problems:?}");
        assert_eq!(config.tp_problems(0).len(), 1);
    }
}
