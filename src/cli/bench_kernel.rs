//! `kdtree bench kernel`: the verify kernels on this machine's card, beside the card's own ceilings.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use super::output::{print, write};
use crate::bench::kernel::{self, Grid};
use crate::bench::kernel_inputs::Slots;
use crate::bench::kernel_report;
use crate::device::cuda::{Gpu, Kernel, Numerics, Tuning};

/// Time the verify kernels over a grid of shapes and compare them with the card's read rate and mma.sync peak.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Card to use, as the driver numbers them.
    #[arg(long, default_value_t = 0)]
    card: usize,
    /// Draft rows a request.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8, 16, 32, 64])]
    q: Vec<usize>,
    /// Requests in a launch.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32])]
    batch: Vec<usize>,
    /// Prefix tokens a request.
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 4096, 16384, 65536, 131072])]
    prefix: Vec<usize>,
    /// Most prefix tokens in a launch; larger cells are left out.
    #[arg(long, default_value_t = 32 * 65536)]
    most_tokens: usize,
    /// How the KV lies in the cache (both if not given).
    #[arg(long, value_delimiter = ',')]
    slots: Vec<Slots>,
    /// Kernels to time (both if not given).
    #[arg(long, value_delimiter = ',')]
    kernel: Vec<Kernel>,
    /// Numerics of the tree kernel (both if not given). The baseline is always exact.
    #[arg(long, value_delimiter = ',')]
    numerics: Vec<Numerics>,
    /// Query heads per rank.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Timed replays of a cell; the median counts.
    #[arg(long, default_value_t = 20)]
    repeats: usize,
    /// Write the run as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a roofline plot.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Try the fatbins in this folder instead of those in the binary (a run that is no evidence).
    #[arg(long, value_name = "FOLDER")]
    fatbins: Option<PathBuf>,
    /// What starting a piece costs, in tiles (scheduler of `fast`).
    #[arg(long, default_value_t = Tuning::default().item_cost)]
    item_cost: i32,
    /// Shortest piece, in tiles (scheduler of `fast`).
    #[arg(long, default_value_t = Tuning::default().min_tiles)]
    min_tiles: i32,
    /// At most this x sqrt(prefix) pieces a request (scheduler of `fast`).
    #[arg(long, default_value_t = Tuning::default().split_root)]
    split_root: f32,
}

impl Args {
    fn grid(&self) -> anyhow::Result<Grid> {
        for (name, values) in [("--q", &self.q), ("--batch", &self.batch)] {
            anyhow::ensure!(values.iter().all(|&v| v > 0), "{name}: found 0, wanted at least 1");
        }
        anyhow::ensure!(self.repeats > 0, "--repeats: found 0, wanted at least 1");
        anyhow::ensure!(
            self.split_root > 0.0 && self.min_tiles > 0 && self.item_cost >= 0,
            "--split-root and --min-tiles must be above 0, --item-cost not below"
        );
        let or_all = |given: &[Numerics]| if given.is_empty() { vec![Numerics::Fast, Numerics::Exact] } else { given.to_vec() };
        let mut kernels = Vec::new();
        if self.kernel.is_empty() || self.kernel.contains(&Kernel::Tree) {
            kernels.extend(or_all(&self.numerics).into_iter().map(|n| (Kernel::Tree, n)));
        }
        if self.kernel.is_empty() || self.kernel.contains(&Kernel::Baseline) {
            kernels.push((Kernel::Baseline, Numerics::Exact));
        }
        let shapes = self.batch.iter().flat_map(|&b| self.prefix.iter().map(move |&l| (b, l)));
        Ok(Grid {
            q: self.q.clone(),
            shapes: shapes.filter(|&(b, l)| b * l <= self.most_tokens).collect(),
            slots: if self.slots.is_empty() { vec![Slots::Random, Slots::Blocks] } else { self.slots.clone() },
            kernels,
            heads: self.heads,
            repeats: self.repeats,
            tuning: Tuning { item_cost: self.item_cost, min_tiles: self.min_tiles, split_root: self.split_root },
        })
    }
}

/// Runs the grid; rows are printed to stderr as they come, the table to stdout at the end.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let grid = args.grid()?;
    let mut gpu = Gpu::open(args.card).context("kdtree bench kernel needs a card")?;
    if let Some(folder) = &args.fatbins {
        gpu.try_fatbins(folder);
    }
    let report = kernel::run(&gpu, &grid, |row| eprintln!("{}", kernel_report::line(row).join(" ")))?;
    print(kernel_report::table(&report))?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string(&report)?.replace("{\"kernel\"", "\n{\"kernel\"") + "\n";
        write(path, text)?;
    }
    if let Some(path) = &args.svg {
        let svg = kernel_report::roofline(&report).map_err(anyhow::Error::msg)?;
        write(path, svg)?;
    }
    Ok(ExitCode::SUCCESS)
}
