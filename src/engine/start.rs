//! Starting an engine: configuration and tokenizer first (cheap, and every mistake in them is an immediate error), then the engine
//! thread, which loads the weights, warms up, lets the caller inspect it (the gate) and serves.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::contract::{ModelInfo, Observer};
use super::driver::{Driver, warm_up};
use super::executor::Executor;
use super::handle::{EngineHandle, Health, Inbox, Shared};
use super::loading::Told;
use super::options::{DEFAULT_CACHE_BYTES, DeviceKind, EngineOptions, VERIFY_ROWS, slots_of_request};
use super::scheduler::{Engine, Setup};
use crate::device::cpu::CpuDevice;
use crate::device::cuda::collective::Meeting;
use crate::device::cuda::gpu::{Card, usable_cards};
use crate::device::cuda::{self, CudaDevice, Gpu};
use crate::device::{Device, DeviceError, KernelFault, Limits};
use crate::faults::{Fault, planted};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::{DraftConfig, TargetConfig};
use crate::model::drafter::Drafter;
use crate::model::problem::Problems;
use crate::model::progress::{Progress, Silent};
use crate::model::source::ModelSource;
use crate::model::target::{Target, rope_table};
use crate::model::tokenizer::Tokenizer;
use crate::model::weights::Stored;
use crate::parallel::Rank;
use crate::parallel::collective::Collective;
use crate::parallel::ranks::{Ranks, pool};
use crate::speculate::budget::MAX_ROWS;
use crate::speculate::cost::Prior;

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Model(#[from] Problems),
    #[error("{0}")]
    Options(String),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A model whose configuration was read and whose checkpoint was checked, not loaded yet.
pub struct Prepared {
    pub options: EngineOptions,
    pub config: TargetConfig,
    pub draft: Option<DraftConfig>,
    pub tokenizer: Arc<Tokenizer>,
    pub info: ModelInfo,
    checkpoint: Arc<Checkpoint>,
    draft_checkpoint: Option<Arc<Checkpoint>>,
    limits: Limits,
    place: Place,
}

/// Where the ranks will work.
enum Place {
    Cpu,
    Cuda(Vec<Card>),
}

impl Place {
    /// `auto` takes the cards where they can be used and says why not where they cannot.
    fn choose(options: &EngineOptions) -> Result<Self, StartError> {
        match options.device {
            DeviceKind::Cpu => Ok(Self::Cpu),
            DeviceKind::Cuda => {
                let cards = usable_cards(options.ranks).map_err(|error| StartError::Options(format!("device cuda: {error}")))?;
                Ok(Self::Cuda(cards))
            }
            DeviceKind::Auto => Ok(match usable_cards(options.ranks) {
                Ok(cards) => Self::Cuda(cards),
                Err(error) => {
                    tracing::info!(reason = %error, "serving on the CPU");
                    Self::Cpu
                }
            }),
        }
    }

    /// Bytes of one cached value.
    fn cache_value(&self) -> usize {
        match self {
            Self::Cpu => size_of::<f32>(),
            Self::Cuda(_) => size_of::<half::bf16>(),
        }
    }

    /// Most bytes of cache of a rank whose weights take `weights` bytes, without being asked.
    fn cache_bytes(&self, weights: u64) -> usize {
        match self {
            Self::Cpu => DEFAULT_CACHE_BYTES,
            Self::Cuda(cards) => {
                let memory = cards.iter().map(|card| card.memory).min().unwrap_or(0);
                (memory / 100 * CARD_PERCENT).saturating_sub(weights as usize + CARD_WORK_BYTES)
            }
        }
    }

    /// Why a rank of `weights` bytes with `cache` bytes of KV cache cannot work here.
    fn too_small(&self, weights: u64, cache: usize) -> Option<String> {
        let Self::Cuda(cards) = self else { return None };
        let card = cards.iter().min_by_key(|card| card.memory)?;
        let needed = weights as usize + cache + CARD_WORK_BYTES;
        let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
        (needed > card.memory).then(|| {
            format!(
                "a rank needs {:.1} GiB (weights {:.1}, KV cache {:.1}, working memory {:.1}), but {} has {:.1}: use more ranks, or a \
                 smaller engine.kv_tokens or engine.max_model_len",
                gib(needed),
                gib(weights as usize),
                gib(cache),
                gib(CARD_WORK_BYTES),
                card.name,
                gib(card.memory)
            )
        })
    }
}

/// Share of a card's memory that is used.
const CARD_PERCENT: usize = 94;

/// Memory of a card for activations, logits, scratch and recorded rounds.
const CARD_WORK_BYTES: usize = 6 << 30;

impl Prepared {
    /// Reads configurations, tokenizer and headers.
    pub fn read(options: EngineOptions) -> Result<Self, StartError> {
        if let Some(problem) = options.problems().into_iter().next() {
            return Err(StartError::Options(problem));
        }
        let source = options.target();
        let config = TargetConfig::load(&source)?;
        let tokenizer = Tokenizer::load(&source)?;
        tokenizer.fits(&config).map_err(|problem| Problems::one(source.to_string(), problem))?;
        let checkpoint = Checkpoint::open_target(&source, &config)?;
        let draft_source = options.draft_source();
        let draft = draft_source.as_ref().map(|source| DraftConfig::load(source, &config)).transpose()?;
        let draft_checkpoint = match (&draft_source, &draft) {
            (Some(source), Some(draft)) => Some(Arc::new(Checkpoint::open_drafter(source, draft)?)),
            _ => None,
        };
        let mut cuts = config.tp_problems(options.ranks);
        cuts.extend(draft.iter().flat_map(|draft| draft.tp_problems(options.ranks)));
        Problems::unless_empty(&source.to_string(), cuts, ())?;
        let place = Place::choose(&options)?;
        let of_rank = |checkpoint: &Checkpoint| checkpoint.inventory().bytes_per_rank(options.ranks);
        let weights = of_rank(&checkpoint) + draft_checkpoint.as_deref().map_or(0, of_rank);
        let slot = place.cache_value() * config.cached_values(draft.as_ref(), options.ranks);
        let limits = limits_of(&options, &config, draft.as_ref(), slot, place.cache_bytes(weights));
        if let Some(problem) = place.too_small(weights, limits.slots * slot) {
            return Err(StartError::Options(problem));
        }
        let info = ModelInfo {
            name: served_name(&options, &source),
            vocab_size: config.vocab,
            max_model_len: limits.context,
            stop_ids: config.stop_ids.clone(),
            max_rows: if draft.is_some() { MAX_ROWS } else { 1 },
            max_running: limits.requests,
            kv_slots: limits.slots,
        };
        Ok(Self {
            options,
            tokenizer: Arc::new(tokenizer),
            info,
            checkpoint: Arc::new(checkpoint),
            draft_checkpoint,
            limits,
            place,
            config,
            draft,
        })
    }

    /// Starts the engine thread and returns at once; the handle's health says when it is ready. `before_ready` runs on the engine
    /// thread once everything is loaded and warm; its error keeps the engine from ever serving.
    pub fn start(
        self,
        observer: Arc<dyn Observer>,
        progress: Box<dyn Progress>,
        before_ready: BeforeReady,
    ) -> (EngineHandle, EngineThread) {
        let (handle, inbox) = EngineHandle::new(self.info.clone(), self.tokenizer.clone(), self.options.max_waiting);
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let shared = inbox.shared.clone();
            let _alive = DeathNotice(shared.clone());
            let progress = Arc::new(Told::new(progress, shared.clone()));
            let result = self.work(inbox, observer, progress, before_ready);
            shared.set_health(Health::Dead(result.as_ref().err().map_or("the engine has stopped".into(), ToString::to_string)));
            result
        });
        (handle, thread.expect("the operating system gives one thread"))
    }

    fn work(self, inbox: Inbox, observer: Arc<dyn Observer>, progress: Arc<Told>, before_ready: BeforeReady) -> Result<(), StartError> {
        let shared = inbox.shared.clone();
        shared.loading("loading the model".into());
        if let Some(milliseconds) = planted(Fault::SlowLoad) {
            std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        }
        let threads = match self.options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let per_rank = (threads / self.options.ranks).max(1);
        let _pool = pool(per_rank)?;
        self.checkpoint.scan_values(progress.as_ref())?;
        if let Some(drafter) = &self.draft_checkpoint {
            drafter.scan_values(&Silent)?;
        }
        match &self.place {
            Place::Cpu => {
                let ranks = self.cpu_ranks(per_rank, progress)?;
                self.serve(ranks, inbox, observer, before_ready)
            }
            Place::Cuda(cards) => {
                tracing::info!(ranks = cards.len(), card = cards[0].name, numerics = ?self.options.numerics, "serving on CUDA");
                let ranks = self.cuda_ranks(per_rank, progress)?;
                self.serve(ranks, inbox, observer, before_ready)
            }
        }
    }

    fn serve<D: Device>(
        self,
        ranks: Ranks<D>,
        inbox: Inbox,
        observer: Arc<dyn Observer>,
        before_ready: BeforeReady,
    ) -> Result<(), StartError> {
        let shared = inbox.shared.clone();
        let setup = Setup {
            limits: self.limits,
            tokenizer: self.tokenizer,
            info: self.info,
            budget: self.options.budget,
            prior: prior_of(&self.config, &self.place),
            observer,
            verify: self.options.verify,
        };
        let mut engine = Engine::new(ranks, setup, inbox);
        shared.loading("warming up".into());
        let took = warm_up(&mut engine)?;
        tracing::info!(milliseconds = took.as_millis() as u64, "warm");
        engine.forget_acceptance();
        before_ready(&mut engine).map_err(StartError::Options)?;
        engine.forget_acceptance();
        shared.set_health(Health::Ready);
        engine.run()?;
        Ok(())
    }

    /// Every rank of the CPU device; rank 0 on this thread.
    fn cpu_ranks(&self, threads: usize, progress: Arc<Told>) -> Result<Ranks<CpuDevice>, DeviceError> {
        let size = self.options.ranks;
        let ends: Vec<Option<Collective>> = if size == 1 { vec![None] } else { Collective::group(size).into_iter().map(Some).collect() };
        let (ends, verify) = (std::sync::Mutex::new(ends), self.options.verify);
        self.ranks(threads, progress, move |index| {
            let end = ends.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[index].take();
            let mut device = CpuDevice::new(verify, end);
            device.plant(planted_kernel_fault());
            Ok(device)
        })
    }

    /// Every rank of the CUDA device, rank r on card r.
    fn cuda_ranks(&self, threads: usize, progress: Arc<Told>) -> Result<Ranks<CudaDevice>, DeviceError> {
        let size = self.options.ranks;
        let meeting = if size > 1 { Some(Meeting::new(size)?) } else { None };
        let (limits, verify, numerics) = (self.limits.clone(), self.options.verify, self.options.numerics);
        self.ranks(threads, progress, move |index| {
            let mut gpu = Gpu::open(index)?;
            let collective = meeting.as_ref().map(|meeting| cuda::collective::Collective::join(meeting, index, &mut gpu)).transpose()?;
            let mut device = CudaDevice::new(gpu, numerics, verify, &limits, collective)?;
            device.plant(planted_kernel_fault());
            Ok(device)
        })
    }

    /// Loads every rank on the device that `open` gives it, on the thread that will run it.
    fn ranks<D: Device>(
        &self,
        threads: usize,
        progress: Arc<Told>,
        open: impl Fn(usize) -> Result<D, DeviceError> + Send + Sync + 'static,
    ) -> Result<Ranks<D>, DeviceError> {
        let size = self.options.ranks;
        let (config, draft, limits) = (self.config.clone(), self.draft.clone(), self.limits.clone());
        let (checkpoint, draft_checkpoint) = (self.checkpoint.clone(), self.draft_checkpoint.clone());
        let build = move |index: usize| {
            let rank = Rank { index, size };
            // All ranks load at the same pace: one of them tells.
            let progress: &dyn Progress = if index == 0 { progress.as_ref() } else { &Silent };
            load_rank(open(index)?, &config, draft.as_ref(), &checkpoint, draft_checkpoint.as_deref(), &limits, rank, progress)
        };
        Ranks::start(size, threads, Arc::new(build))
    }
}

/// Runs on the engine thread before it reports ready.
pub type BeforeReady = Box<dyn FnOnce(&mut dyn Driver) -> Result<(), String> + Send>;

/// The engine thread; its result says why it ended.
pub type EngineThread = JoinHandle<Result<(), StartError>>;

/// Turns health red when the engine thread ends in any way, a panic included.
struct DeathNotice(Arc<Shared>);

impl Drop for DeathNotice {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.set_health(Health::Dead("the engine thread panicked".into()));
        }
    }
}

/// Target and drafter of one rank on its device.
#[allow(clippy::too_many_arguments)]
fn load_rank<D: Device>(
    mut device: D,
    config: &TargetConfig,
    draft: Option<&DraftConfig>,
    checkpoint: &Checkpoint,
    draft_checkpoint: Option<&Checkpoint>,
    limits: &Limits,
    rank: Rank,
    progress: &dyn Progress,
) -> Result<Executor<D>, DeviceError> {
    // Draft rows stand up to a block beyond the context limit.
    let positions = slots_of_request(limits.context);
    device.set_rope(rope_table(&config.rope, positions), draft.map(|draft| rope_table(&draft.rope, positions)))?;
    let taps = draft.map_or(&[][..], |draft| &draft.taps);
    let stored = |checkpoint| Stored { device: &device, checkpoint };
    let target = Target::load(&device, &stored(checkpoint), config, taps, rank, limits, progress)?;
    let drafter = match (draft, draft_checkpoint) {
        (Some(draft), Some(checkpoint)) => Some(Drafter::load(&device, &stored(checkpoint), draft, rank, limits)?),
        _ => None,
    };
    Executor::new(device, target, drafter, limits, taps.len())
}

/// `slot`: bytes of cache a token; `most`: bytes of cache taken without being asked.
fn limits_of(options: &EngineOptions, config: &TargetConfig, draft: Option<&DraftConfig>, slot: usize, most: usize) -> Limits {
    let context = options.context(config.max_positions);
    Limits {
        requests: options.max_running,
        verify_rows: VERIFY_ROWS.max(options.max_running),
        chunk_rows: options.chunk_tokens,
        context,
        slots: options.slots(context, slot, most),
        block: draft.map_or(1, |draft| draft.block_size),
        vocab: config.vocab,
    }
}

fn served_name(options: &EngineOptions, source: &ModelSource) -> String {
    if !options.served_name.is_empty() {
        return options.served_name.clone();
    }
    match source {
        ModelSource::Directory(path) => path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into()),
        _ => "k26-mini".into(),
    }
}

/// A first guess of what rounds cost, from bytes at 20 GB/s (a CPU) or 2 TB/s (a card); measured rounds replace it.
fn prior_of(config: &TargetConfig, place: &Place) -> Prior {
    let per_microsecond = if matches!(place, Place::Cpu) { 20_000.0 } else { 2_000_000.0 };
    let expert = 3.0 * (config.hidden * config.moe_intermediate) as f64 * 0.5625;
    let attention = config.hidden * (config.q_lora_rank + config.slot_width())
        + config.heads * (config.qk_dim() * config.q_lora_rank + (config.nope_dim + config.v_dim) * config.kv_lora_rank)
        + config.heads * config.v_dim * config.hidden;
    let dense = 2.0 * (config.layers * attention + config.vocab * config.hidden) as f64;
    Prior {
        fixed_us: dense / per_microsecond,
        experts_us: (config.moe_layers() * config.experts) as f64 * expert / per_microsecond,
        experts: config.experts as u32,
        active: config.top_k as u32,
        row_us: dense / per_microsecond / 16.0,
        token_us: (config.layers * config.slot_width() * 4) as f64 / per_microsecond,
    }
}

/// `kernel-error=1`, `2` or `3` in a build with faults.
fn planted_kernel_fault() -> Option<KernelFault> {
    planted(Fault::KernelError).map(|which| match which {
        1 => KernelFault::MissingDraftKeys,
        2 => KernelFault::MaskStride,
        _ => KernelFault::DroppedSplit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_does_not_fit_its_card_is_refused_by_numbers() {
        let card = |gib: usize| Card { ordinal: 0, name: "a card".into(), capability: (12, 0), target: None, memory: gib << 30 };
        let place = Place::Cuda(vec![card(141), card(96)]);
        assert_eq!(place.too_small(71 << 30, 15 << 30), None, "71 + 15 + 6 of 96");
        let refused = place.too_small(71 << 30, 30 << 30).unwrap();
        assert!(refused.contains("107.0 GiB (weights 71.0, KV cache 30.0") && refused.contains("a card has 96.0"), "{refused}");
        assert_eq!(place.cache_bytes(100 << 30), 0, "no cache is promised beyond the card");
        assert_eq!(Place::Cpu.too_small(1 << 50, 1 << 50), None, "the CPU has what the system gives");
    }
}
