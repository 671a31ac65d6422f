//! `kdtree bench rank`: one rank of full-size K2.6 on one card, with weights made up on the card, timed part by part beside the time
//! that reading the part's bytes takes. Collectives are counted and left out: the other ranks are not there.
//!
//! Formulas: bytes of a part = its weights read once (of the experts those of the distinct experts chosen) + the KV rows of every
//! request once per layer; floor = bytes / read rate measured in the same run.

mod parts;
pub mod plot;
mod weights;

pub use parts::{Part, Setup};

use serde::{Deserialize, Serialize};

use crate::bench::kernel::read_rate;
use crate::device::cuda::graphs::timed;
use crate::device::cuda::{CudaDevice, Gpu, Numerics};
use crate::device::{Admission, Device, DeviceError, Limits, Result, Share, Verify};
use crate::engine::contract::Sampling;
use crate::engine::executor::{Chunk, Command, Executor};
use crate::model::config::{DraftConfig, TargetConfig};
use crate::model::drafter::Drafter;
use crate::model::progress::Silent;
use crate::model::target::{Form, Target, rope_table};
use crate::parallel::Rank;
use crate::speculate::budget::MAX_ROWS;
use parts::Bytes;
use weights::MadeUp;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Grid {
    pub draft_rows: Vec<usize>,
    pub batches: Vec<usize>,
    pub prefixes: Vec<usize>,
    /// Cells with more prefix tokens in all, or more rows in all, are left out.
    pub most_tokens: usize,
    pub most_rows: usize,
    pub repeats: usize,
    /// Prefixes at which rounds with `off` and `on` are compared (one request).
    pub compare: Vec<usize>,
    /// Prompt lengths whose prefill is timed.
    pub prompts: Vec<usize>,
}

/// One measured part of one cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub draft_rows: usize,
    pub batch: usize,
    pub prefix: usize,
    pub part: Part,
    pub us: f64,
    pub bytes: u64,
    pub floor_us: f64,
    /// Distinct experts chosen in a layer: of the pass the mean over its layers, of the experts alone those of the layer nearest to that
    /// mean, whose choice they were timed with; 0 for parts without experts.
    pub distinct_experts: f64,
}

/// A round with either verify kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    pub draft_rows: usize,
    pub prefix: usize,
    pub off_us: f64,
    pub on_us: f64,
}

/// How fast prompts of one length are prefilled on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prefill {
    pub prompt: usize,
    pub tokens_per_second: f64,
}

/// What `kdtree bench rank --json` writes and tests/evidence/rank-h200.json holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub device: String,
    pub driver: String,
    pub kernel_sha256: String,
    pub read_gbps: f64,
    pub numerics: Numerics,
    pub ranks: usize,
    pub layers: usize,
    /// Bytes of weights of this rank, target and drafter.
    pub weight_bytes: u64,
    /// Sums over ranks that a round of the target would make, and that are not in the times.
    pub collectives_left_out: usize,
    pub rows: Vec<Row>,
    pub comparisons: Vec<Comparison>,
    pub prefill: Vec<Prefill>,
}

/// Free slots beyond the prefix: draft rows, and rounds that advance.
const SLACK: usize = 1024;

/// Rows of the rounds that are compared with `off`, whose time hardly depends on them.
const COMPARED_ROWS: [usize; 3] = [1, 8, 32];

/// A round longer than this is measured three times only.
const LONG_ROUND: std::time::Duration = std::time::Duration::from_millis(300);

/// Prompt rows of a prefill chunk.
const CHUNK: usize = 2048;

/// One rank with everything loaded.
pub struct Bench {
    executor: Executor<CudaDevice>,
    bytes: Bytes,
    grid: Grid,
    layers: usize,
    moe_layers: std::ops::Range<usize>,
    top_k: usize,
    read_gbps: f64,
    limits: Limits,
}

impl Bench {
    /// Makes the rank. `gpu` must have room for its weights and `grid.most_tokens` tokens of cache.
    pub fn new(gpu: Gpu, setup: &Setup, numerics: Numerics, grid: Grid) -> Result<(Self, Report)> {
        let (config, draft) = (&setup.target, &setup.drafter);
        let rank = Rank { index: 0, size: setup.ranks };
        let read_gbps = read_rate(&gpu)?;
        let requests = grid.batches.iter().copied().max().unwrap_or(1);
        let longest = grid.prefixes.iter().chain(&grid.prompts).chain(&grid.compare).copied().max().unwrap_or(0);
        let context = longest + SLACK;
        let limits = Limits {
            requests,
            verify_rows: grid.most_rows.max(MAX_ROWS),
            chunk_rows: CHUNK,
            context,
            slots: (grid.most_tokens.max(longest) + requests * (SLACK + MAX_ROWS)).next_multiple_of(16),
            block: draft.block_size,
            vocab: config.vocab,
        };
        let mut report = Report {
            device: gpu.name.clone(),
            driver: format!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10),
            // Of fatbins that are only tried, none.
            kernel_sha256: if gpu.kernel_sha256().is_empty() { String::new() } else { crate::device::cuda::image::all_sha256() },
            read_gbps,
            numerics,
            ranks: setup.ranks,
            layers: config.layers,
            weight_bytes: 0,
            collectives_left_out: 2 + 2 * config.layers,
            rows: Vec::new(),
            comparisons: Vec::new(),
            prefill: Vec::new(),
        };
        let executor = load(gpu, config, draft, rank, numerics, &limits)?;
        executor.device.set_uniform_routing(true);
        let bytes = Bytes::new(config, draft, setup.ranks);
        report.weight_bytes = bytes.weights;
        let moe_layers = config.dense_layers..config.layers;
        Ok((Self { executor, bytes, grid, layers: config.layers, moe_layers, top_k: config.top_k, read_gbps, limits }, report))
    }

    /// Measures every cell; `tell` gets each row as it comes, `save` the report after every cell, so that an interrupted run is not lost.
    pub fn run(&mut self, report: &mut Report, mut tell: impl FnMut(&Row), mut save: impl FnMut(&Report)) -> Result<()> {
        let grid = self.grid.clone();
        for &prefix in &grid.prefixes {
            for &batch in grid.batches.iter().filter(|&&batch| batch * prefix <= grid.most_tokens) {
                self.admit(batch, prefix)?;
                for &rows in grid.draft_rows.iter().filter(|&&rows| batch * rows <= grid.most_rows) {
                    for row in self.cell(rows, batch, prefix)? {
                        tell(&row);
                        report.rows.push(row);
                    }
                    save(report);
                }
                self.retire(batch)?;
            }
        }
        for &prompt in &grid.prompts {
            report.prefill.push(self.prefill(prompt)?);
            save(report);
        }
        for &prefix in &grid.compare {
            for &draft_rows in grid.draft_rows.iter().filter(|rows| COMPARED_ROWS.contains(rows)) {
                let times = [Verify::Off, Verify::On].map(|mode| self.round(draft_rows, prefix, mode));
                let [off_us, on_us] = times;
                report.comparisons.push(Comparison { draft_rows, prefix, off_us: off_us?, on_us: on_us? });
                save(report);
            }
        }
        Ok(())
    }

    /// Takes in `batch` requests whose prefix of `prefix` tokens is taken as cached.
    fn admit(&mut self, batch: usize, prefix: usize) -> Result<()> {
        let each = prefix + SLACK;
        for request in 0..batch {
            let first = request * each;
            let admission = Admission {
                sampling: Sampling::greedy(),
                suppressed: Vec::new(),
                free_from: 0,
                prompt: vec![0],
                slots: (first..first + each).map(|slot| slot as u32).collect(),
                logprobs: None,
                drafts: true,
            };
            let Executor { device, round, target, .. } = &mut self.executor;
            device.admit(round, request, admission)?;
            device.begin(round, request, prefix, &target.logits, None)?;
            device.read_round(round)?;
        }
        Ok(())
    }

    fn retire(&mut self, batch: usize) -> Result<()> {
        (0..batch).try_for_each(|request| self.executor.apply(&Command::Retire { request }))
    }

    fn cell(&mut self, draft_rows: usize, batch: usize, prefix: usize) -> Result<Vec<Row>> {
        let shares: Vec<Share> = (0..batch).map(|request| Share { request, rows: draft_rows, chain: false }).collect();
        let (repeats, layers, moe) = (self.grid.repeats, self.layers, self.moe_layers.clone());
        self.executor.apply(&Command::Draft(shares.clone().into()))?;
        let Executor { device, round, target, drafter, latents, contexts, block_rows, tree_rows, accepted, .. } = &mut self.executor;
        device.place_trees(round, tree_rows)?;
        let gpu = &device.gpu;
        // The pass itself first: it leaves activations of the right kind behind for the parts, which overwrite only their own.
        let mut us = Vec::new();
        let total = timed(gpu, repeats, || {
            target.forward(device, tree_rows, Form::Absorbed, latents)?;
            target.head(device, tree_rows)
        })?;
        // Layers choose differently: a pass reads the mean, and the experts alone are timed with the choice of a layer near it.
        let mut chosen = Vec::with_capacity(moe.len());
        for layer in moe.clone() {
            let Some((weights, h, _)) = target.moe(layer) else { continue };
            device.moe_route(weights, h, tree_rows, layer)?;
            chosen.push((layer, device.read_routes(tree_rows.bound, draft_rows * batch, self.top_k)?.experts.len() as f64));
        }
        let (mean, (usual, usual_count)) = mean_and_nearest(&chosen);
        us.push((Part::Total, total));
        us.push((
            Part::Projections,
            timed(gpu, repeats, || {
                (0..layers).try_for_each(|layer| {
                    target.project(device, layer, tree_rows, latents, layer > 0)?;
                    target.output(device, layer, tree_rows)
                })
            })?,
        ));
        us.push((
            Part::Attention,
            timed(gpu, repeats, || (0..layers).try_for_each(|layer| target.attend(device, layer, tree_rows, Form::Absorbed, latents)))?,
        ));
        let all = timed(gpu, repeats, || moe.clone().try_for_each(|layer| target.mlp(device, layer, tree_rows)))?;
        let routed = target.moe(usual).map(|(moe, h, _)| device.moe_route(moe, h, tree_rows, usual)).transpose()?;
        let experts = timed(gpu, repeats, || {
            moe.clone().try_for_each(|layer| match (target.moe(layer), &routed) {
                (Some((moe, _, out)), Some(routed)) => device.moe_experts(moe, routed, out).map(drop),
                _ => Ok(()),
            })
        })?;
        us.push((Part::Experts, experts));
        us.push((Part::Shared, all - experts));
        us.push((Part::Head, timed(gpu, repeats, || target.head(device, tree_rows))?));
        if let (Some(drafter), Some(contexts), true) = (drafter, contexts, draft_rows > 1) {
            device.place_blocks(round, drafter.mask_token(), block_rows)?;
            us.push((Part::Drafter, timed(gpu, repeats, || drafter.draft(device, target, block_rows, contexts))?));
        }
        let tree = timed(gpu, repeats.min(20), || {
            if draft_rows > 1 {
                device.marginals(round, &target.logits)?;
            }
            device.grow(round)?;
            device.place_trees(round, tree_rows)?;
            device.sample(round, &target.logits)?;
            device.walk_and_commit(round, latents, accepted)
        })?;
        us.push((Part::Tree, tree));
        device.read_round(round)?;
        Ok(us
            .into_iter()
            .map(|(part, us)| {
                let distinct_experts = match part {
                    Part::Total => mean,
                    Part::Experts => usual_count,
                    _ => 0.0,
                };
                let bytes = self.bytes.of(part, draft_rows, batch, prefix, distinct_experts);
                let floor_us = bytes as f64 / self.read_gbps / 1e3;
                Row { draft_rows, batch, prefix, part, us, bytes, floor_us, distinct_experts }
            })
            .collect())
    }

    /// Median microseconds of a whole round of one request, host and all, with one verify kernel.
    fn round(&mut self, draft_rows: usize, prefix: usize, mode: Verify) -> Result<f64> {
        self.admit(1, prefix)?;
        self.executor.apply(&Command::SetVerify(mode))?;
        let shares: std::sync::Arc<[Share]> = [Share { request: 0, rows: draft_rows, chain: false }].into();
        let mut times = Vec::new();
        for counted in 0..self.grid.repeats.min(12) {
            let began = std::time::Instant::now();
            self.executor.apply(&Command::Draft(shares.clone()))?;
            self.executor.apply(&Command::Verify(std::sync::Arc::default()))?;
            self.executor.read_round()?;
            if counted >= 1 {
                times.push(began.elapsed().as_secs_f64() * 1e6);
            }
            if counted >= 3 && began.elapsed() > LONG_ROUND {
                break;
            }
        }
        self.executor.apply(&Command::SetVerify(Verify::On))?;
        self.retire(1)?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// Prefills one prompt of `prompt` tokens, chunk after chunk.
    fn prefill(&mut self, prompt: usize) -> Result<Prefill> {
        let slots: Vec<u32> = (0..(prompt + SLACK) as u32).collect();
        let admission = Admission {
            sampling: Sampling::greedy(),
            suppressed: Vec::new(),
            free_from: 0,
            prompt: vec![0; prompt],
            slots,
            logprobs: None,
            drafts: true,
        };
        self.executor.apply(&Command::Admit { request: 0, admission: admission.into() })?;
        let began = std::time::Instant::now();
        for start in (0..prompt).step_by(CHUNK) {
            let end = prompt.min(start + CHUNK);
            let tokens = (start..end).map(|at| (at * 7919 % self.limits.vocab) as u32).collect();
            let chunk = Chunk { request: 0, start, tokens, last: end == prompt, drafts: true, logprobs: None, mask: None };
            self.executor.apply(&Command::Prefill(chunk))?;
        }
        self.executor.read_round()?;
        let tokens_per_second = prompt as f64 / began.elapsed().as_secs_f64();
        self.retire(1)?;
        Ok(Prefill { prompt, tokens_per_second })
    }
}

/// The mean of (layer, experts chosen) over the layers, and the layer that comes nearest to it with its own number; of none, zeros.
fn mean_and_nearest(chosen: &[(usize, f64)]) -> (f64, (usize, f64)) {
    let mean = chosen.iter().map(|(_, count)| count).sum::<f64>() / chosen.len().max(1) as f64;
    let off = |count: f64| (count - mean).abs();
    let nearest = chosen.iter().min_by(|a, b| off(a.1).total_cmp(&off(b.1)));
    (mean, nearest.copied().unwrap_or_default())
}

fn load(
    gpu: Gpu,
    config: &TargetConfig,
    draft: &DraftConfig,
    rank: Rank,
    numerics: Numerics,
    limits: &Limits,
) -> Result<Executor<CudaDevice>> {
    let mut device = CudaDevice::new(gpu, numerics, Verify::On, limits, None)?;
    let positions = crate::engine::options::slots_of_request(limits.context);
    device.set_rope(rope_table(&config.rope, positions), Some(rope_table(&draft.rope, positions)))?;
    let weights = MadeUp::new(&device);
    let target = Target::load(&device, &weights, config, &draft.taps, rank, limits, &Silent)?;
    let drafter = Drafter::load(&device, &weights, draft, rank, limits)?;
    let executor = Executor::new(device, target, Some(drafter), limits, draft.taps.len())?;
    executor.device.gpu.synchronize()?;
    Ok(executor)
}

impl From<crate::model::problem::Problems> for DeviceError {
    fn from(problems: crate::model::problem::Problems) -> Self {
        Self(problems.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::mean_and_nearest;

    #[test]
    fn the_layer_nearest_to_the_mean_stands_for_all() {
        assert_eq!(mean_and_nearest(&[(1, 57.0), (2, 62.0), (3, 59.0), (4, 56.0)]), (58.5, (3, 59.0)));
        assert_eq!(mean_and_nearest(&[]), (0.0, (0, 0.0)));
    }
}
