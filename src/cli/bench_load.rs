//! `kdtree bench load`: loads one rank's weights from disk, cold and warm, and can make a checkpoint of any size to do it with.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::ValueEnum;
use comfy_table::{Cell, Table};

use super::output::{print, write};
use crate::bench::load::{self, Report, Step};
use crate::device::cpu::CpuDevice;
use crate::device::cuda::{CudaDevice, Gpu, Numerics};
use crate::device::{Verify, cuda};
use crate::engine::options::DeviceKind;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TargetConfig;
use crate::model::progress::{self, Progress};
use crate::model::source::ModelSource;
use crate::model::synthetic::{Fill, Layout, TargetSizes, write_target};
use crate::parallel::Rank;

/// Time how one rank's weights come from disk onto its device, beside the disk's own rate.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Directory of the checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// First write a checkpoint of these sizes with made-up weights into the directory, which must be empty or missing
    #[arg(long, value_enum, value_name = "SIZES")]
    make: Option<Sizes>,
    /// With --make: layers of the model (of K2.6, each but the first takes 9.6 GB)
    #[arg(long, default_value_t = 3, requires = "make")]
    layers: usize,
    /// Ranks the model is cut over
    #[arg(long, default_value_t = 8)]
    tp: usize,
    /// The rank that is loaded, from 0
    #[arg(long, default_value_t = 0)]
    rank: usize,
    /// Where the weights go
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    device: DeviceKind,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Sizes of a made-up checkpoint.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Sizes {
    /// Kimi K2.6: its names and shapes
    #[value(name = "k2.6")]
    Kimi,
    /// The smallest that eight ranks can share
    Small,
}

/// The table goes to stdout, progress to stderr.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(args.rank < args.tp, "--rank: found {}, wanted less than --tp {}", args.rank, args.tp);
    let mut steps = Vec::new();
    if let Some(sizes) = args.make {
        steps.push(make(args, sizes)?);
    }
    let source = ModelSource::directory(&args.model);
    let config = TargetConfig::load(&source)?;
    let cuts = config.tp_problems(args.tp);
    crate::model::problem::Problems::unless_empty(&source.to_string(), cuts, ())?;
    let shards = load::shards(&args.model).with_context(|| format!("reading {}", args.model.display()))?;
    load::evict(&shards).context("dropping the shards from the page cache")?;
    let (disk, direct) = load::read_disk(&shards).context("reading the shards")?;
    steps.push(disk);
    load::evict(&shards).context("dropping the shards from the page cache")?;
    let start = Instant::now();
    let checkpoint = Checkpoint::open_target(&source, &config)?;
    tracing::info!(milliseconds = start.elapsed().as_millis() as u64, "headers read");
    let mut report = Report {
        device: String::new(),
        ranks: args.tp,
        rank: args.rank,
        layers: config.layers,
        checkpoint_bytes: checkpoint.bytes(),
        rank_bytes: checkpoint.inventory().bytes_per_rank(args.tp),
        direct,
        steps,
    };
    on_device(args, &checkpoint, &config, &mut report)?;
    print(table(&report))?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        write(path, text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Loads cold, checks the values as a server does at start, and loads again from memory.
fn on_device(args: &Args, checkpoint: &Checkpoint, config: &TargetConfig, report: &mut Report) -> anyhow::Result<()> {
    let progress = progress::for_this_process();
    let rank = Rank { index: args.rank, size: args.tp };
    let card = match args.device {
        DeviceKind::Cpu => None,
        DeviceKind::Cuda => Some(Gpu::open(0).context("--device cuda")?),
        DeviceKind::Auto => Gpu::open(0).ok(),
    };
    let Some(gpu) = card else {
        report.device = "cpu".into();
        let device = CpuDevice::new(Verify::On, None);
        return steps(report, checkpoint, progress.as_ref(), |what| {
            load::load(&device, || Ok(()), checkpoint, config, rank, what, progress.as_ref())
        });
    };
    report.device = gpu.name.clone();
    let device: CudaDevice = cuda::CudaDevice::new(gpu, Numerics::Fast, Verify::On, &load::limits(config), None)?;
    steps(report, checkpoint, progress.as_ref(), |what| {
        let wait = || Ok(device.gpu.synchronize()?);
        load::load(&device, wait, checkpoint, config, rank, what, progress.as_ref())
    })
}

fn steps(
    report: &mut Report,
    checkpoint: &Checkpoint,
    progress: &dyn Progress,
    load: impl Fn(&'static str) -> crate::device::Result<Step>,
) -> anyhow::Result<()> {
    report.steps.push(load("loading, cold")?);
    let start = Instant::now();
    checkpoint.scan_values(progress)?;
    let bytes = checkpoint.float_bytes();
    report.steps.push(Step { what: "checking values", bytes, seconds: start.elapsed().as_secs_f64() });
    report.steps.push(load("loading, from memory")?);
    Ok(())
}

fn make(args: &Args, sizes: Sizes) -> anyhow::Result<Step> {
    let directory: &Path = &args.model;
    let sizes = match sizes {
        Sizes::Kimi => TargetSizes { layers: args.layers, ..TargetSizes::kimi() },
        Sizes::Small => TargetSizes { layers: args.layers, ..TargetSizes::eight_ranks() },
    };
    anyhow::ensure!((2..=61).contains(&sizes.layers), "--layers: found {}, wanted 2 to 61", sizes.layers);
    std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    let empty = std::fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?.next().is_none();
    anyhow::ensure!(empty, "--make: {} is not empty, wanted an empty or missing directory", directory.display());
    let start = Instant::now();
    // As many files a layer as let every core write and read one.
    let layout = Layout { fill: Fill::Repeated(1), shards: 8 * sizes.layers, vision: false };
    write_target(directory, &sizes, layout).with_context(|| format!("writing a checkpoint into {}", directory.display()))?;
    let shards = load::shards(directory)?;
    load::evict(&shards)?;
    let lengths = shards.iter().map(|path| std::fs::metadata(path).map(|file| file.len()));
    let bytes = lengths.sum::<std::io::Result<u64>>()?;
    Ok(Step { what: "writing the checkpoint", bytes, seconds: start.elapsed().as_secs_f64() })
}

fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["step", "GB of files", "seconds", "GB/s"]);
    for step in &report.steps {
        let numbers = [step.bytes as f64 / 1e9, step.seconds, step.gbps()].map(|number| Cell::new(format!("{number:.2}")));
        table.add_row([Cell::new(step.what)].into_iter().chain(numbers));
    }
    format!(
        "rank {} of {} on {}, {} layers, {:.1} GB of {:.1}; the disk alone {} the page cache\n\n{table}\n",
        report.rank,
        report.ranks,
        report.device,
        report.layers,
        report.rank_bytes as f64 / 1e9,
        report.checkpoint_bytes as f64 / 1e9,
        if report.direct { "past" } else { "through" }
    )
}
