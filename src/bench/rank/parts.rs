//! The parts of a round and the bytes each has to read.

use serde::{Deserialize, Serialize};

use crate::model::config::{DraftConfig, TargetConfig};
use crate::model::problem::Problems;
use crate::model::synthetic::{DraftSizes, TargetSizes};

/// Parts of a round. `Total` = the target pass: projections, attention, experts, shared, head and the dense layers; the drafter and
/// the tree stand beside it. `Experts` = the two grouped INT4 products; `Shared` = the rest of a layer's MLP: norm, router, choice, shared
/// expert, weighted sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    Total,
    Projections,
    Attention,
    Experts,
    Shared,
    Head,
    Drafter,
    Tree,
}

impl Part {
    /// The name in tables; that in JSON is the same.
    pub fn name(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::Projections => "projections",
            Self::Attention => "attention",
            Self::Experts => "experts",
            Self::Shared => "shared",
            Self::Head => "head",
            Self::Drafter => "drafter",
            Self::Tree => "tree",
        }
    }
}

/// Which rank of which model.
pub struct Setup {
    pub target: TargetConfig,
    pub drafter: DraftConfig,
    pub ranks: usize,
}

impl Setup {
    /// Kimi K2.6 and its drafter over `ranks` cards, with `layers` of the 61 layers.
    ///
    /// # Errors
    /// The model cannot be cut that way.
    pub fn kimi(ranks: usize, layers: usize) -> Result<Self, Problems> {
        let sizes = TargetSizes { layers, ..TargetSizes::kimi() };
        let target = TargetConfig::parse("K2.6", &sizes.config().to_string(), None)?;
        let mut draft = DraftSizes::kimi();
        draft.taps.iter_mut().for_each(|tap| *tap = (*tap).min(layers - 1));
        draft.taps.dedup();
        let drafter = DraftConfig::parse("K2.6 drafter", &draft.config(&target).to_string(), &target)?;
        let mut cuts = target.tp_problems(ranks);
        cuts.extend(drafter.tp_problems(ranks));
        Problems::unless_empty("K2.6", cuts, Self { target, drafter, ranks })
    }
}

/// Bytes of one rank's parts.
pub(super) struct Bytes {
    pub weights: u64,
    projections: u64,
    /// `kv_b_proj` in the layout of absorbed attention.
    absorbed: u64,
    expert: u64,
    router: u64,
    shared: u64,
    dense: u64,
    head: u64,
    drafter: u64,
    layers: u64,
    moe_layers: u64,
    slot: u64,
    draft_slot: u64,
}

const BF16: u64 = 2;

impl Bytes {
    /// The bytes of one of `ranks` ranks of this model and drafter.
    pub fn new(config: &TargetConfig, draft: &DraftConfig, ranks: usize) -> Self {
        let heads = config.heads / ranks;
        let of = |n: usize, k: usize| (n * k) as u64 * BF16;
        let projections = of(config.q_lora_rank, config.hidden)
            + of(config.slot_width(), config.hidden)
            + of(heads * config.qk_dim(), config.q_lora_rank)
            + of(config.hidden, heads * config.v_dim);
        // INT4 and a bf16 scale per group of 32: 4.5 bits a weight.
        let expert = 3 * (config.hidden * config.moe_intermediate / ranks) as u64 * 9 / 16;
        let mlp = |inner: usize, hidden: usize| 3 * of(inner / ranks, hidden);
        let kv_heads = (draft.kv_heads / ranks).max(1);
        let draft_attention = (2 * draft.heads / ranks + 2 * kv_heads) * draft.head_dim;
        let drafter = draft.layers.len() as u64 * (of(draft_attention, draft.hidden) + mlp(draft.intermediate, draft.hidden));
        let (layers, moe_layers) = (config.layers as u64, config.moe_layers() as u64);
        let bytes = Self {
            weights: 0,
            projections,
            absorbed: of(heads * (config.nope_dim + config.v_dim), config.kv_lora_rank),
            expert,
            router: of(config.experts, config.hidden),
            shared: mlp(config.shared_intermediate(), config.hidden),
            dense: mlp(config.dense_intermediate, config.hidden),
            head: of(config.vocab / ranks, config.hidden),
            drafter,
            layers,
            moe_layers,
            slot: config.slot_width() as u64 * BF16,
            draft_slot: (2 * kv_heads * draft.head_dim * draft.layers.len()) as u64 * BF16,
        };
        let target = layers * (bytes.projections + bytes.absorbed)
            + moe_layers * (config.experts as u64 * expert + bytes.router + bytes.shared)
            + (layers - moe_layers) * bytes.dense
            + 2 * bytes.head;
        Self { weights: target + drafter + of(draft.hidden, draft.taps.len() * draft.hidden), ..bytes }
    }

    /// Bytes that `part` reads in one pass over `batch` requests of `draft_rows` rows.
    pub fn of(&self, part: Part, draft_rows: usize, batch: usize, prefix: usize, distinct: f64) -> u64 {
        let tokens = (batch * (prefix + draft_rows)) as u64;
        match part {
            Part::Projections => self.layers * self.projections,
            Part::Attention => self.layers * (self.absorbed + tokens * self.slot),
            Part::Experts => self.moe_layers * (distinct * self.expert as f64) as u64,
            Part::Shared => self.moe_layers * (self.router + self.shared),
            Part::Head => self.head,
            Part::Drafter => self.drafter + self.head + (batch * prefix) as u64 * self.draft_slot,
            Part::Tree => 0,
            Part::Total => {
                let parts = [Part::Projections, Part::Attention, Part::Experts, Part::Shared, Part::Head];
                let sum: u64 = parts.iter().map(|&part| self.of(part, draft_rows, batch, prefix, distinct)).sum();
                sum + (self.layers - self.moe_layers) * self.dense
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_rank_are_those_of_the_inventory() {
        let setup = Setup::kimi(8, 61).unwrap();
        let bytes = Bytes::new(&setup.target, &setup.drafter, 8);
        let inventory = crate::model::inventory::Inventory::target(&setup.target).bytes_per_rank(8)
            + crate::model::inventory::Inventory::drafter(&setup.drafter).bytes_per_rank(8);
        // Norms and biases are not counted: a few thousandths.
        let ratio = bytes.weights as f64 / inventory as f64;
        assert!((0.995..=1.0).contains(&ratio), "{} of {inventory}", bytes.weights);
    }

    #[test]
    fn a_pass_reads_its_parts_once() {
        let setup = Setup::kimi(8, 61).unwrap();
        let bytes = Bytes::new(&setup.target, &setup.drafter, 8);
        // Eight experts of 3 x 7168 x 256 INT4 weights in 60 layers.
        assert_eq!(bytes.of(Part::Experts, 1, 1, 1024, 8.0), 60 * 8 * 3 * 7168 * 256 * 9 / 16);
        assert_eq!(bytes.of(Part::Head, 1, 1, 0, 0.0), 20480 * 7168 * 2);
    }
}
