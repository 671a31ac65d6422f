//! What a model needs before it is loaded: tensors and bytes by part and by rank, and how many tokens of KV a card has left for.
//! Reads headers and small files only. Called by `kdtree check`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::chat::ChatTemplate;
use super::checkpoint::Checkpoint;
use super::config::{DraftConfig, TargetConfig};
use super::inventory::{Inventory, Part};
use super::problem::{Problem, Problems};
use super::source::ModelSource;
use super::tokenizer::Tokenizer;

/// Bytes of one cached value.
const KV_VALUE: u64 = 2;
const GIB: f64 = (1_u64 << 30) as f64;

/// The card and how much of it is for weights and KV.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Card {
    /// Memory of one card in GiB; an RTX PRO 6000 reports 95.59.
    pub gib: f64,
    /// Share of it that is used.
    pub usable: f64,
    /// GiB per card for activations, graphs, communication and scratch.
    pub work_gib: f64,
}

impl Default for Card {
    fn default() -> Self {
        Self { gib: 95.59, usable: 0.94, work_gib: 4.5 }
    }
}

/// Everything `kdtree check` tells.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub model: String,
    pub drafter: Option<String>,
    pub ranks: usize,
    /// Parts of target and drafter that the configuration asks for.
    pub parts: Vec<PartSum>,
    /// Tensors and bytes in the target's files that are known and not used.
    pub skipped: SkippedSum,
    pub expert: Option<ExpertCut>,
    /// Bytes of weights one rank holds, drafter included.
    pub bytes_per_rank: u64,
    pub kv: Option<KvEstimate>,
    pub notes: Vec<String>,
    pub problems: Vec<Problem>,
}

/// Tensors and bytes of one part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartSum {
    pub part: Part,
    pub label: &'static str,
    pub tensors: u64,
    pub bytes: u64,
    pub bytes_per_rank: u64,
}

/// Tensors and bytes that are known and not used.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SkippedSum {
    pub tensors: usize,
    pub bytes: u64,
}

/// How a routed expert is cut.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertCut {
    pub width_per_rank: usize,
    /// Quantisation groups of that width: scales are cut with the weights.
    pub groups_per_rank: usize,
}

/// KV tokens on one card; every rank holds the latents of all tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KvEstimate {
    pub card: Card,
    /// Bytes per token and rank, target and drafter.
    pub bytes_per_token: u64,
    /// Bytes left after weights and working memory; negative when the weights alone do not fit.
    pub bytes_left: i64,
    pub tokens: u64,
    /// Longest context the model allows.
    pub max_positions: usize,
}

impl Report {
    /// Inspects a model, and a drafter if one is named, for this many tensor-parallel ranks.
    pub fn new(model: &ModelSource, drafter: Option<&ModelSource>, ranks: usize, card: Card) -> Self {
        let mut report = Self {
            model: model.to_string(),
            drafter: drafter.map(ModelSource::to_string),
            ranks,
            parts: Vec::new(),
            skipped: SkippedSum::default(),
            expert: None,
            bytes_per_rank: 0,
            kv: None,
            notes: Vec::new(),
            problems: Vec::new(),
        };
        match TargetConfig::load(model) {
            Ok(config) => {
                let cut = report.target(model, &config);
                let draft = drafter.and_then(|drafter| report.drafter(drafter, &config));
                if cut && report.ranks > 0 && (drafter.is_none() || draft.is_some()) {
                    report.kv = Some(report.kv_estimate(&config, draft.as_ref(), card));
                }
            }
            Err(problems) => report.add(problems),
        }
        report
    }

    fn add(&mut self, problems: Problems) {
        self.problems.extend(problems.list);
    }

    /// Inspects the target; whether its weights can be cut over the ranks.
    fn target(&mut self, source: &ModelSource, config: &TargetConfig) -> bool {
        let uneven = config.tp_problems(self.ranks);
        let cut = uneven.is_empty();
        self.problems.extend(uneven);
        if cut {
            let width_per_rank = config.moe_intermediate / self.ranks;
            self.expert = Some(ExpertCut { width_per_rank, groups_per_rank: width_per_rank / config.quantization.group_size });
        }
        let (checkpoint, problems) = Checkpoint::inspect(source, Inventory::target(config));
        self.problems.extend(problems);
        self.skipped = SkippedSum { tensors: checkpoint.skipped.tensors, bytes: checkpoint.skipped.bytes };
        self.sum(&checkpoint, cut);
        match Tokenizer::load(source) {
            Ok(tokenizer) => {
                self.problems.extend(tokenizer.fits(config).err());
                match ChatTemplate::load(source, Arc::new(tokenizer)) {
                    Ok(template) if template.is_builtin() => self.notes.push("no chat template: the built-in K2.6 one is used".into()),
                    Ok(_) => {}
                    Err(problems) => self.add(problems),
                }
            }
            Err(problems) => self.add(problems),
        }
        cut
    }

    fn drafter(&mut self, source: &ModelSource, target: &TargetConfig) -> Option<DraftConfig> {
        let config = match DraftConfig::load(source, target) {
            Ok(config) => config,
            Err(problems) => {
                self.add(problems);
                return None;
            }
        };
        let uneven = config.tp_problems(self.ranks);
        let cut = uneven.is_empty();
        self.problems.extend(uneven);
        let (checkpoint, problems) = Checkpoint::inspect(source, Inventory::drafter(&config));
        self.problems.extend(problems);
        self.sum(&checkpoint, cut);
        cut.then_some(config)
    }

    /// Adds the parts of an inventory; bytes per rank only where the cut comes out even.
    fn sum(&mut self, checkpoint: &Checkpoint, cut: bool) {
        let mut parts: BTreeMap<Part, PartSum> = BTreeMap::new();
        for spec in &checkpoint.inventory().tensors {
            let empty = PartSum { part: spec.part, label: spec.part.label(), tensors: 0, bytes: 0, bytes_per_rank: 0 };
            let sum = parts.entry(spec.part).or_insert(empty);
            sum.tensors += 1;
            sum.bytes += spec.bytes();
            if cut {
                sum.bytes_per_rank += spec.cut.bytes_per_rank(spec.bytes(), self.ranks);
            }
        }
        self.bytes_per_rank += parts.values().map(|part| part.bytes_per_rank).sum::<u64>();
        self.parts.extend(parts.into_values());
        self.notes.extend(checkpoint.skipped.notes.iter().map(|note| format!("not used: {note}")));
    }

    /// Tokens = (usable memory - weights - working memory) / bytes per token. Every rank keeps the whole latent of the target; the drafter's
    /// keys and values are cut by heads.
    fn kv_estimate(&self, target: &TargetConfig, draft: Option<&DraftConfig>, card: Card) -> KvEstimate {
        let bytes_per_token = target.cached_values(draft, self.ranks) as u64 * KV_VALUE;
        let bytes_left = ((card.gib * card.usable - card.work_gib) * GIB) as i64 - self.bytes_per_rank as i64;
        let tokens = bytes_left.max(0) as u64 / bytes_per_token;
        KvEstimate { card, bytes_per_token, bytes_left, tokens, max_positions: target.max_positions }
    }

    /// Tensors and bytes that the configuration asks for, target and drafter.
    pub fn total(&self) -> (u64, u64) {
        self.parts.iter().fold((0, 0), |(tensors, bytes), part| (tensors + part.tensors, bytes + part.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synthetic::{DraftSizes, Fill, Layout, TargetSizes, write_drafter, write_target};

    fn full_size() -> (tempfile::TempDir, tempfile::TempDir) {
        let (target, drafter) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let layout = Layout { fill: Fill::Holes, shards: 64, vision: true };
        let config = write_target(target.path(), &TargetSizes::kimi(), layout).unwrap();
        write_drafter(drafter.path(), &DraftSizes::kimi(), &config, Fill::Holes).unwrap();
        (target, drafter)
    }

    #[test]
    fn the_full_size_model_needs_what_was_published() {
        let (target, drafter) = full_size();
        let (target, drafter) = (ModelSource::directory(target.path()), ModelSource::directory(drafter.path()));
        let report = Report::new(&target, None, 8, Card { work_gib: 3.0, ..Card::default() });
        assert_eq!(report.problems, []);
        let sums: Vec<(u64, u64)> = report.parts.iter().map(|part| (part.tensors, part.bytes)).collect();
        let wanted = [
            (69_120, 507_343_011_840),
            (69_120, 63_417_876_480),
            (69_120, 552_960),
            (549, 12_338_888_704),
            (3, 792_723_456),
            (120, 330_393_600),
            (180, 5_284_823_040),
            (3, 4_697_634_816),
        ];
        assert_eq!(sums, wanted);
        assert_eq!(report.total(), (208_215, 594_205_904_896));
        assert_eq!(report.skipped, SkippedSum { tensors: 335, bytes: 942_287_840 });
        assert_eq!(report.total().1 + report.skipped.bytes, 595_148_192_736, "554.275 GiB with the vision tower");
        assert_eq!(report.bytes_per_rank, 76_182_593_536, "70.95 GiB");
        assert_eq!(report.expert, Some(ExpertCut { width_per_rank: 256, groups_per_rank: 8 }));
        let kv = report.kv.unwrap();
        assert_eq!((kv.bytes_per_token, kv.tokens / 1000), (70_272, 243));
        let least = Report::new(&target, None, 8, Card { work_gib: 6.0, ..Card::default() }).kv.unwrap();
        assert_eq!(least.tokens / 1000, 197);

        let report = Report::new(&target, Some(&drafter), 8, Card::default());
        assert_eq!(report.problems, []);
        let drafted = report.parts.last().unwrap();
        assert_eq!((drafted.part, drafted.tensors), (Part::Drafter, 69));
        assert_eq!((drafted.bytes as f64 / GIB * 100.0).round(), 648.0, "6.48 GiB");
        assert_eq!(report.kv.unwrap().bytes_per_token, 70_272 + 24_576 / 8);
    }

    #[test]
    fn weights_that_do_not_fit_leave_no_tokens() {
        let source = ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"));
        let kv = Report::new(&source, None, 1, Card { gib: 1.0, ..Card::default() }).kv.unwrap();
        assert!(kv.bytes_left < 0 && kv.tokens == 0);
    }

    #[test]
    fn an_uneven_number_of_ranks_is_a_problem_and_gives_no_estimate() {
        let source = ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"));
        for ranks in [0, 3] {
            let report = Report::new(&source, None, ranks, Card::default());
            assert!(!report.problems.is_empty() && report.kv.is_none() && report.bytes_per_rank == 0, "{ranks} ranks");
        }
    }
}
