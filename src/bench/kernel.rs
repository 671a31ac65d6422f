//! `kdtree bench kernel`: what a verify launch costs over a grid of shapes, beside what the card can do at best.
//!
//! A cell is timed as a CUDA graph of many launches over rotated KV buffers, so that DRAM is really read and launch gaps are those
//! of a captured round. The floor of a cell is the larger of bytes / measured read rate and flops / measured mma.sync rate, from
//! micro-benchmarks of the same run. Called by the command line, the criterion bench and the GPU evidence.

use cudarc::driver::{CudaGraph, DevicePtr, sys};
use serde::{Deserialize, Serialize};

use super::kernel_inputs::{Cache, Inputs, Mask, Random, RequestShape, Slots};
use crate::device::cuda::error::{CudaError, During};
use crate::device::cuda::kv::ROW_BYTES;
use crate::device::cuda::{Gpu, Kernel, Limits, Numerics, Tuning, Verify};

/// KV bytes that must pass between two uses of the same buffer: several times any L2.
const ROTATE_BYTES: usize = 512 << 20;
/// The baseline is no question of bandwidth; its cells stop at this many prefix tokens in a launch, where it is hopeless anyway.
const BASELINE_TOKENS: usize = 131_072;
/// A graph holds about this much work, so that its own launch does not count.
const GRAPH_US: f64 = 2000.0;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Grid {
    pub q: Vec<usize>,
    /// Requests and prefix of a cell.
    pub shapes: Vec<(usize, usize)>,
    pub slots: Vec<Slots>,
    pub kernels: Vec<(Kernel, Numerics)>,
    pub heads: usize,
    /// Timed replays of a cell; the median counts.
    pub repeats: usize,
    pub tuning: Tuning,
}

impl Grid {
    /// The published grid: q 1 to 64; B 1, 8, 32; L 1k to 128k (64k at B = 32).
    pub fn full() -> Self {
        let lengths = [1024, 4096, 16384, 65536, 131072];
        let shapes = [1, 8, 32].into_iter().flat_map(|b| lengths.map(|l| (b, l))).filter(|&(b, l)| b * l <= 32 * 65536).collect();
        Self {
            q: vec![1, 4, 8, 16, 32, 64],
            shapes,
            slots: vec![Slots::Random, Slots::Blocks],
            kernels: vec![(Kernel::Tree, Numerics::Fast), (Kernel::Tree, Numerics::Exact), (Kernel::Baseline, Numerics::Exact)],
            heads: 8,
            repeats: 20,
            tuning: Tuning::default(),
        }
    }
}

/// One cell's result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub kernel: Kernel,
    pub numerics: Numerics,
    pub slots: Slots,
    /// Draft rows a request, requests, prefix tokens.
    pub q: usize,
    pub b: usize,
    pub l: usize,
    /// Median microseconds a launch.
    pub us: f64,
    /// KV rows once, queries and outputs once.
    pub bytes: u64,
    /// Multiplications and additions of scores and values, draft rows counted dense.
    pub flops: u64,
    pub floor_us: f64,
}

impl Row {
    /// Bytes over time, in GB/s.
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 / self.us / 1e3
    }
    /// Arithmetic over time, in TFLOP/s.
    pub fn tflops(&self) -> f64 {
        self.flops as f64 / self.us / 1e6
    }
    /// Share of the floor reached, 0 to 1.
    pub fn of_floor(&self) -> f64 {
        self.floor_us / self.us
    }
}

/// A run: the card, its ceilings, and every cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub device: String,
    pub driver: String,
    pub kernel_sha256: String,
    pub read_gbps: f64,
    pub mma_tflops: f64,
    pub rows: Vec<Row>,
}

/// Bytes of a cell: KV once, Q and O once.
pub fn cell_bytes(q: usize, b: usize, l: usize, heads: usize) -> u64 {
    (b * ((l + q) * ROW_BYTES + q * heads * (ROW_BYTES + 1024))) as u64
}

/// Flops of a cell: 2 x rows x keys x (576 + 512).
pub fn cell_flops(q: usize, b: usize, l: usize, heads: usize) -> u64 {
    (2 * b * q * heads * (l + q) * (576 + 512)) as u64
}

/// Measures the card and every cell of `grid`; `progress` is told each row as it comes.
pub fn run(gpu: &Gpu, grid: &Grid, mut progress: impl FnMut(&Row)) -> Result<Report, CudaError> {
    let (read_gbps, mma_tflops) = (read_rate(gpu)?, mma_rate(gpu)?);
    let mut random = Random(7);
    let largest = grid.shapes.iter().map(|&(b, l)| b * (l + 80)).max().unwrap_or(0);
    let slots = (largest + ROTATE_BYTES / ROW_BYTES + 4096).next_multiple_of(16);
    let cache = Cache::new(gpu, slots, &mut random)?;
    cache.fill(gpu, 1.0, 1)?;
    let mut report = Report {
        device: gpu.name.clone(),
        driver: format!("CUDA {}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10),
        kernel_sha256: gpu.kernel_sha256().into(),
        read_gbps,
        mma_tflops,
        rows: Vec::new(),
    };
    for &q in &grid.q {
        for &(b, l) in &grid.shapes {
            for &slots in &grid.slots {
                let cell = Cell::new(gpu, &cache, grid, (q, b, l), slots, &mut random)?;
                for &(kernel, numerics) in &grid.kernels {
                    if kernel == Kernel::Baseline && b * l > BASELINE_TOKENS {
                        continue;
                    }
                    let us = cell.measure(gpu, kernel, numerics, grid.repeats)?;
                    let (bytes, flops) = (cell_bytes(q, b, l, grid.heads), cell_flops(q, b, l, grid.heads));
                    let floor_us = (bytes as f64 / read_gbps / 1e3).max(flops as f64 / mma_tflops / 1e6);
                    let row = Row { kernel, numerics, slots, q, b, l, us, bytes, flops, floor_us };
                    progress(&row);
                    report.rows.push(row);
                }
            }
        }
    }
    Ok(report)
}

/// Everything of one cell on the card: as many input sets as it takes to leave L2.
pub struct Cell<'a> {
    cache: &'a Cache,
    sets: Vec<Inputs>,
    verify: Verify,
}

impl<'a> Cell<'a> {
    /// Input sets for `shape` = (q, B, L) in `cache`, with random trees.
    pub fn new(
        gpu: &Gpu,
        cache: &'a Cache,
        grid: &Grid,
        shape: (usize, usize, usize),
        slots: Slots,
        random: &mut Random,
    ) -> Result<Self, CudaError> {
        let (q, b, l) = shape;
        let exact = grid.kernels.iter().any(|&(kernel, numerics)| kernel == Kernel::Tree && numerics == Numerics::Exact);
        let limits = Limits { batch: b, rows: b * q, rows_per_request: q, heads: grid.heads, prefix: l, exact };
        let verify = Verify::new(gpu, limits, grid.tuning)?;
        let set_rows = b * (l.next_multiple_of(16) + q.next_multiple_of(16));
        let sets = (0..(ROTATE_BYTES / (set_rows * ROW_BYTES)).max(1))
            .map(|i| {
                let requests: Vec<_> = (0..b).map(|_| RequestShape { prefix: l, mask: Mask::Tree.rows(q, random) }).collect();
                let lists = cache.lists(&requests, slots, i * set_rows, 0);
                let inputs = Inputs::new(gpu, &lists, grid.heads, 0)?;
                cache.fill_array(gpu, &inputs.q, 1.0, i as u64)?;
                Ok(inputs)
            })
            .collect::<Result<Vec<_>, CudaError>>()?;
        gpu.synchronize()?;
        Ok(Self { cache, sets, verify })
    }

    /// A graph of `launches` launches over the rotated sets.
    pub fn graph(&self, gpu: &Gpu, kernel: Kernel, numerics: Numerics, launches: usize) -> Result<CudaGraph, CudaError> {
        let calls: Vec<_> = self.sets.iter().map(|set| set.call(gpu, &self.cache.rows)).collect();
        gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).during("starting a capture")?;
        let enqueued = (0..launches).try_for_each(|i| {
            // SAFETY: lists of `Cache::lists` for this cache; sets, cache and scratch outlive the graph, which lives in `measure`
            // or in the caller that holds this cell.
            unsafe { self.verify.launch(gpu, kernel, numerics, &calls[i % calls.len()]) }
        });
        let graph = gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).during("ending a capture")?;
        enqueued?;
        graph.ok_or(CudaError::Limit { what: "launches in a graph", found: 0, wanted: "at least 1".into() })
    }

    /// Microseconds of one replay of `graph`.
    pub fn replay_us(&self, gpu: &Gpu, graph: &CudaGraph) -> Result<f64, CudaError> {
        time_us(gpu, || graph.launch().during("launching a graph"))
    }

    /// Median microseconds a launch over `repeats` replays.
    fn measure(&self, gpu: &Gpu, kernel: Kernel, numerics: Numerics, repeats: usize) -> Result<f64, CudaError> {
        let probe = self.graph(gpu, kernel, numerics, 1)?;
        self.replay_us(gpu, &probe)?;
        let once = self.replay_us(gpu, &probe)?;
        let worth = ((GRAPH_US / once) as usize).max(1);
        // All sets in turn, so that every launch meets cold KV; the baseline reads each row many times and need not.
        let launches = if kernel == Kernel::Baseline { worth } else { worth.max(self.sets.len()) }.clamp(1, 512);
        let graph = self.graph(gpu, kernel, numerics, launches)?;
        self.replay_us(gpu, &graph)?;
        let times = (0..repeats).map(|_| self.replay_us(gpu, &graph)).collect::<Result<Vec<_>, _>>()?;
        Ok(median(times) / launches as f64)
    }
}

/// Microseconds between two events around `work`.
fn time_us(gpu: &Gpu, work: impl FnOnce() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let start = gpu.stream.record_event(flags).during("recording an event")?;
    work()?;
    let end = gpu.stream.record_event(flags).during("recording an event")?;
    let ms = start.elapsed_ms(&end).during("timing")?;
    gpu.context.check_err().during("timed work")?;
    Ok(f64::from(ms) * 1e3)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// GB/s of reading 2 GB once, coalesced: the best of a few launch shapes, each the median of 20.
pub fn read_rate(gpu: &Gpu) -> Result<f64, CudaError> {
    let function = gpu.function(&gpu.module("bench_ceilings")?, "ceiling_read", 0)?;
    let bytes = 2usize << 30;
    let data = gpu.stream.alloc_zeros::<u8>(bytes).during("allocating a read buffer")?;
    let sink = gpu.stream.alloc_zeros::<u32>(1).during("allocating a sink")?;
    let mut best: f64 = 0.0;
    for blocks_per_sm in [2, 4, 8] {
        let (mut ptr, mut count, mut out) = (data.device_ptr(&gpu.stream).0, (bytes / 16) as i64, sink.device_ptr(&gpu.stream).0);
        let mut once = || {
            let arguments = &mut [(&raw mut ptr).cast(), (&raw mut count).cast(), (&raw mut out).cast()];
            // SAFETY: types as in kernels/bench/ceilings.cu; `count` words of 16 bytes are in the buffer.
            unsafe { gpu.launch(&function, (blocks_per_sm * gpu.sms, 1, 1), 512, 0, arguments) }
        };
        once()?;
        let times = (0..20).map(|_| time_us(gpu, &mut once)).collect::<Result<Vec<_>, _>>()?;
        best = best.max(bytes as f64 / median(times) / 1e3);
    }
    Ok(best)
}

/// TFLOP/s of mma.sync m16n8k16 bf16 on random operands in registers: the median of 20 launches of 8 or 16 warps an SM.
pub fn mma_rate(gpu: &Gpu) -> Result<f64, CudaError> {
    let function = gpu.function(&gpu.module("bench_ceilings")?, "ceiling_mma", 0)?;
    let mut random = Random(3);
    // Exponents near 1: operands of ordinary size.
    let words: Vec<u32> = (0..256 * 16).map(|_| (random.word() as u32 & 0x80ff_80ff) | 0x3f00_3f00).collect();
    let data = gpu.stream.clone_htod(&words).during("uploading operands")?;
    let sink = gpu.stream.alloc_zeros::<f32>(1).during("allocating a sink")?;
    let mut best: f64 = 0.0;
    for blocks_per_sm in [1, 2] {
        let (mut ptr, mut steps, mut out) = (data.device_ptr(&gpu.stream).0, 8192i32, sink.device_ptr(&gpu.stream).0);
        let mut once = || {
            let arguments = &mut [(&raw mut ptr).cast(), (&raw mut steps).cast(), (&raw mut out).cast()];
            // SAFETY: types as in kernels/bench/ceilings.cu; 256 threads read 16 words each.
            unsafe { gpu.launch(&function, (blocks_per_sm * gpu.sms, 1, 1), 256, 0, arguments) }
        };
        once()?;
        let times = (0..20).map(|_| time_us(gpu, &mut once)).collect::<Result<Vec<_>, _>>()?;
        let flops = f64::from(blocks_per_sm * gpu.sms) * 8.0 * 8192.0 * 8.0 * 4096.0;
        best = best.max(flops / median(times) / 1e6);
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_flops_of_a_cell_are_those_of_the_roofline() {
        // One row, no prefix: one KV row, 8 queries of 1152 bytes, 8 outputs of 1024.
        assert_eq!(cell_bytes(1, 1, 0, 8), 1152 + 8 * (1152 + 1024));
        assert_eq!(cell_flops(1, 1, 0, 8), 2176 * 8);
        assert_eq!(cell_flops(16, 8, 131072, 8), 2176 * 8 * 16 * 8 * (131072 + 16));
    }

    #[test]
    fn the_full_grid_is_the_published_one() {
        let grid = Grid::full();
        assert_eq!(grid.shapes.len(), 14);
        assert_eq!(grid.q, [1, 4, 8, 16, 32, 64]);
        assert!(grid.repeats >= 20);
    }

    #[test]
    fn the_median_of_an_even_count_is_the_middle_of_two() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(vec![9.0, 1.0, 3.0]), 3.0);
    }
}
