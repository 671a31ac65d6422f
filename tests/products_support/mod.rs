//! What the tests of products share: the card, numbers, rows on both devices, and how far apart two results are.
#![allow(dead_code)]

use std::borrow::Cow;
use std::time::Instant;

use cudarc::driver::sys;
use half::bf16;
use kdtree::device::cpu::CpuDevice;
use kdtree::device::cpu::rows::CpuRows;
use kdtree::device::cuda::buffers::CudaAct;
use kdtree::device::cuda::rows::CudaRows;
use kdtree::device::cuda::verify::Numerics;
use kdtree::device::cuda::{CudaDevice, Gpu};
use kdtree::device::host::HostExpert;
use kdtree::device::{Device, Limits, Verify};
use kdtree::model::tensor::{Int4Matrix, Matrix};

pub fn limits() -> Limits {
    Limits { requests: 128, verify_rows: 512, chunk_rows: 1024, context: 4096, slots: 4096, block: 8, vocab: 4096 }
}

/// The card, or `None` with the reason printed.
pub fn card() -> Option<CudaDevice> {
    let mut gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    };
    if let Some(folder) = std::env::var_os("KDTREE_TEST_FATBINS") {
        gpu.try_fatbins(folder.as_ref());
    }
    Some(CudaDevice::new(gpu, Numerics::Exact, Verify::Off, &limits(), None).unwrap())
}

/// A linear congruential generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    /// Uniform in -1 .. 1.
    pub fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
    pub fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    pub fn rounded(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| bf16::from_f32(self.unit() * scale).to_f32()).collect()
    }
    pub fn weights(&mut self, rows: usize, columns: usize) -> Matrix<'static> {
        let scale = 1.0 / (columns as f32).sqrt();
        Matrix { rows, columns, data: Cow::Owned((0..rows * columns).map(|_| bf16::from_f32(self.unit() * scale)).collect()) }
    }
    pub fn int4(&mut self, rows: usize, columns: usize) -> Int4Matrix<'static> {
        let packed = (0..rows * columns / 2).map(|_| self.next() as u8).collect();
        let scale = 0.3 / (columns as f32).sqrt();
        let scales = (0..rows * columns / 32).map(|_| bf16::from_f32((1.0 + 0.5 * self.unit()) * scale)).collect();
        Int4Matrix { rows, columns, group: 32, packed: Cow::Owned(packed), scales: Cow::Owned(scales) }
    }
    pub fn expert(&mut self, inner: usize, hidden: usize) -> HostExpert<'static> {
        HostExpert { gate: self.int4(inner, hidden), up: self.int4(inner, hidden), down: self.int4(hidden, inner) }
    }
}

/// Rows 0 .. `live` of a pass whose launches are sized for `bound`.
pub fn cuda_rows(device: &CudaDevice, live: usize, bound: usize) -> CudaRows {
    let mut rows = device.rows(bound.max(1)).unwrap();
    rows.bound = bound;
    device.gpu.stream.memcpy_htod(&[live as u32, 1], &mut rows.counts).unwrap();
    rows
}

pub fn cpu_rows(count: usize) -> CpuRows {
    let mut rows = CpuRows::with_capacity(count);
    (0..count).for_each(|row| rows.push(row as u32, row, row as u32));
    rows
}

pub fn act(device: &CudaDevice, values: &[f32], width: usize) -> CudaAct {
    let mut act = device.act(values.len() / width, width).unwrap();
    device.gpu.stream.memcpy_htod(values, &mut act.data).unwrap();
    act
}

/// Largest difference over the root mean square of `want`.
pub fn difference(found: &[f32], want: &[f32]) -> f64 {
    assert_eq!(found.len(), want.len());
    let square: f64 = want.iter().map(|&x| f64::from(x).powi(2)).sum();
    let worst = found.iter().zip(want).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    worst.fold(0.0, |worst, x| if x > worst || x.is_nan() { x } else { worst }) / (square / want.len() as f64).sqrt()
}

pub fn cpu() -> CpuDevice {
    CpuDevice::new(Verify::Off, None)
}

/// A few rows of a pass: the first, the last and some between.
pub fn sample(rows: usize, random: &mut Random) -> Vec<usize> {
    let mut picked = vec![0, rows - 1, random.below(rows), random.below(rows)];
    picked.sort_unstable();
    picked.dedup();
    picked
}

pub fn pick(values: &[f32], width: usize, rows: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|&row| values[row * width..(row + 1) * width].to_vec()).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub fn captured(device: &CudaDevice, work: impl FnOnce()) -> cudarc::driver::CudaGraph {
    device.gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    work();
    device.gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().expect("a graph with nodes")
}

/// Microseconds per call of `work(i)` for `calls` calls in one graph, median of several replays.
pub fn time(device: &CudaDevice, calls: usize, work: impl Fn(usize)) -> f64 {
    (0..calls).for_each(&work);
    device.gpu.synchronize().unwrap();
    let graph = captured(device, || (0..calls).for_each(&work));
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let begin = Instant::now();
            graph.launch().unwrap();
            device.gpu.synchronize().unwrap();
            begin.elapsed().as_secs_f64() * 1e6 / calls as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

pub const TIMED_ROWS: [usize; 6] = [1, 4, 8, 16, 32, 64];

pub fn line(what: &str, rows: usize, us: f64, bytes: usize) {
    let rate = bytes as f64 / us / 1e3;
    println!("{what:28} {rows:4} rows {us:9.2} us {rate:7.0} GB/s {:5.1} % of 4600", rate / 46.0);
}
