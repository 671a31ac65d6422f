//! The verify kernels on a card beside the dense reference on the same card: inputs with poisoned surroundings, a launch, a comparison.
//!
//! The reference (f32 scores from f64 sums, f64 accumulation, the mask as given) runs on a sample of rows; `tests/gpu.rs` holds it against
//! plain host arithmetic.
#![allow(clippy::neg_cmp_op_on_partial_ord, reason = "a NaN must fail the comparison")]

use cudarc::driver::{CudaFunction, DevicePtr};
use half::bf16;
use kdtree::bench::kernel_inputs::{Cache, Inputs, Lists, Random, RequestShape, Slots, poison};
use kdtree::device::cuda::params::VerifyParams;
use kdtree::device::cuda::{Gpu, Kernel, Limits, Numerics, Tuning, Verify};

/// A card, the dense reference on it, and the numbers of one test.
pub struct Bench {
    pub gpu: Gpu,
    reference: CudaFunction,
    pub random: Random,
}

/// Largest differences seen, over one or many cases.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    abs: f64,
    relative: f64,
    cosine: f64,
    lse: f64,
    failures: usize,
}

/// Elements of two outputs that differ by more than a unit in the last place.
#[derive(Clone, Copy, Debug, Default)]
struct Ulps {
    elements: u64,
    beyond_one: u64,
    worst: f64,
    worst_share: f64,
}

/// What a launch wrote: values, the same as bits, and the log-sum-exp.
pub struct Outputs {
    pub out: Vec<f32>,
    pub bits: Vec<u16>,
    pub lse: Vec<f32>,
}

impl Bench {
    pub fn open() -> Self {
        let mut gpu = Gpu::open(0).unwrap_or_else(|e| panic!("{e}"));
        if let Some(folder) = std::env::var_os("KDTREE_TEST_FATBINS") {
            gpu.try_fatbins(folder.as_ref());
        }
        let reference = gpu.function(&gpu.module("testing_reference").unwrap(), "reference_dense", 0).unwrap();
        Self { gpu, reference, random: Random(2026) }
    }

    pub fn verify(&self, batch: usize, rows: usize, rows_per_request: usize, heads: usize, prefix: usize) -> Verify {
        let limits = Limits { batch, rows, rows_per_request, heads, prefix, exact: true };
        Verify::new(&self.gpu, limits, Tuning::default()).unwrap()
    }

    pub fn inputs(
        &mut self,
        cache: &Cache,
        requests: &[RequestShape],
        slots: Slots,
        heads: usize,
        scale: f32,
        seed: u64,
    ) -> (Lists, Inputs) {
        let start = self.random.below(cache.capacity());
        let lists = cache.lists(requests, slots, start, 5);
        let inputs = Inputs::new(&self.gpu, &lists, heads, 0).unwrap();
        cache.fill_array(&self.gpu, &inputs.q, scale, seed).unwrap();
        cache.poison_all_but(&self.gpu, &lists, &inputs, scale, seed + 1).unwrap();
        (lists, inputs)
    }

    pub fn run(&self, verify: &Verify, kernel: Kernel, numerics: Numerics, cache: &Cache, inputs: &Inputs) -> Outputs {
        poison(&self.gpu, &inputs.out).unwrap();
        // SAFETY: lists were made by `Cache::lists` for this cache and live until the synchronisation below.
        unsafe { verify.launch(&self.gpu, kernel, numerics, &inputs.call(&self.gpu, &cache.rows)).unwrap() };
        self.read(inputs)
    }

    pub fn read(&self, inputs: &Inputs) -> Outputs {
        self.gpu.synchronize().unwrap();
        let bits: Vec<u16> = self.gpu.stream.clone_dtoh(&inputs.out).unwrap();
        let lse = self.gpu.stream.clone_dtoh(&inputs.lse).unwrap();
        Outputs { out: bits.iter().map(|&b| bf16::from_bits(b).to_f32()).collect(), bits, lse }
    }

    /// Output and LSE of `samples` (row x heads + head) by the dense reference.
    pub fn dense(&self, cache: &Cache, lists: &Lists, inputs: &Inputs, samples: &[i32]) -> (Vec<f32>, Vec<f32>) {
        let longest = (0..inputs.batch).map(|r| lists.kv_len[r] + lists.qo_indptr[r + 1] - lists.qo_indptr[r]).max().unwrap_or(0);
        let call = inputs.call(&self.gpu, &cache.rows);
        let mut params = VerifyParams {
            q: call.q,
            kv: cache.rows.base,
            qo_indptr: call.qo_indptr,
            kv_begin: call.kv_begin,
            kv_len: call.kv_len,
            kv_indices: call.kv_indices,
            draft_slots: call.draft_slots,
            mask: call.mask,
            batch: call.batch as i32,
            heads_log2: inputs.heads.ilog2() as i32,
            scale_log2: call.scale * std::f32::consts::LOG2_E,
            ..VerifyParams::default()
        };
        let stream = &self.gpu.stream;
        let list = stream.clone_htod(samples).unwrap();
        let scratch = stream.alloc_zeros::<f32>(samples.len() * longest.max(1) as usize).unwrap();
        let out = stream.alloc_zeros::<f32>(samples.len() * 512).unwrap();
        let lse = stream.alloc_zeros::<f32>(samples.len()).unwrap();
        let mut pointers = [list.device_ptr(stream).0, scratch.device_ptr(stream).0, out.device_ptr(stream).0, lse.device_ptr(stream).0];
        let mut keys = i64::from(longest.max(1));
        let [a, b, c, d] = &mut pointers;
        let arguments = &mut [
            (&raw mut params).cast(),
            (&raw mut *a).cast(),
            (&raw mut *b).cast(),
            (&raw mut keys).cast(),
            (&raw mut *c).cast(),
            (&raw mut *d).cast(),
        ];
        // SAFETY: types as in kernels/testing/reference.cu; all buffers live until the synchronising copies below.
        unsafe { self.gpu.launch(&self.reference, (samples.len() as u32, 1, 1), 512, 0, arguments).unwrap() };
        (stream.clone_dtoh(&out).unwrap(), stream.clone_dtoh(&lse).unwrap())
    }

    /// First, last and random row x head products, at most `most`.
    fn samples(&mut self, inputs: &Inputs, lists: &Lists, most: usize) -> Vec<i32> {
        let total = lists.draft_slots.len() * inputs.heads;
        if total <= most {
            return (0..total as i32).collect();
        }
        let mut picked: Vec<i32> = (0..most - 2).map(|_| self.random.below(total) as i32).collect();
        picked.extend([0, total as i32 - 1]);
        picked
    }
}

/// Rows that see fewer keys than FlashMLA's shortest test (20): bf16 probabilities hardly average out there.
const FEW_KEYS: usize = 20;

/// Compares with the reference by FlashMLA's rule at inputs x 0.1 (absolute 8e-4 or relative 2.01 / 128, cosine difference 5e-6),
/// FlashInfer's at plain normal inputs (1e-2); LSE within 1e-5 relative. Where a row sees fewer than 20 keys the first is 1e-3.
fn compare(got: &Outputs, samples: &[i32], want: &(Vec<f32>, Vec<f32>), scale: f32, keys: impl Fn(i32) -> usize) -> Worst {
    let rel_limit = if scale < 0.5 { 2.01 / 128.0 } else { 1e-2 };
    let mut worst = Worst::default();
    let (mut dot, mut xx, mut yy) = (0.0f64, 0.0f64, 0.0f64);
    for (i, &sample) in samples.iter().enumerate() {
        let abs_limit = match (scale < 0.5, keys(sample) < FEW_KEYS) {
            (true, false) => 8e-4,
            (true, true) => 1e-3,
            (false, _) => 1e-2,
        };
        for c in 0..512 {
            let (x, y) = (f64::from(got.out[sample as usize * 512 + c]), f64::from(want.0[i * 512 + c]));
            let abs = (x - y).abs();
            let relative = abs / y.abs().max(1e-9);
            // A NaN fails this comparison.
            let fine = abs <= abs_limit || relative <= rel_limit;
            worst.failures += usize::from(!fine);
            worst.abs = worst.abs.max(abs);
            if abs > abs_limit {
                worst.relative = worst.relative.max(relative);
            }
            (dot, xx, yy) = (dot + x * y, xx + x * x, yy + y * y);
        }
        let (x, y) = (f64::from(got.lse[sample as usize]), f64::from(want.1[i]));
        let off = if x == y { 0.0 } else { (x - y).abs() / y.abs().max(1.0) };
        worst.lse = worst.lse.max(off);
        worst.failures += usize::from(!(off <= 1e-5));
    }
    worst.cosine = if xx + yy > 0.0 { 1.0 - 2.0 * dot / (xx + yy) } else { 0.0 };
    let cosine_limit = if scale < 0.5 { 5e-6 } else { 1e-5 };
    worst.failures += usize::from(!(worst.cosine <= cosine_limit));
    worst
}

/// Differences in units in the last place of the larger of two bf16 values.
fn ulps(a: &Outputs, b: &Outputs, into: &mut Ulps) {
    let mut beyond = 0;
    for (x, y) in a.out.iter().zip(&b.out) {
        let larger = x.abs().max(y.abs());
        if x != y {
            let ulp = 2f32.powi(larger.log2().floor() as i32 - 7);
            let off = f64::from((x - y).abs() / ulp);
            into.worst = into.worst.max(off);
            beyond += u64::from(!(off <= 1.0));
        }
    }
    into.elements += a.out.len() as u64;
    into.beyond_one += beyond;
    into.worst_share = into.worst_share.max(beyond as f64 / a.out.len().max(1) as f64);
}

fn merge(into: &mut Worst, one: Worst) {
    into.abs = into.abs.max(one.abs);
    into.relative = into.relative.max(one.relative);
    into.cosine = into.cosine.max(one.cosine);
    into.lse = into.lse.max(one.lse);
    into.failures += one.failures;
}

/// Runs tree (both numerics) and, where it is affordable, the baseline on one case after the other; `finish` fails with all that differed.
pub struct Checker {
    pub bench: Bench,
    worst: [Worst; 3],
    ulps: Ulps,
    cases: usize,
    failed: Vec<String>,
}

impl Checker {
    pub fn new() -> Self {
        Self { bench: Bench::open(), worst: Default::default(), ulps: Ulps::default(), cases: 0, failed: Vec::new() }
    }

    pub fn case(&mut self, name: &str, cache: &Cache, requests: &[RequestShape], slots: Slots, heads: usize, scale: f32) {
        let rows: usize = requests.iter().map(|r| r.mask.len()).sum();
        let per = requests.iter().map(|r| r.mask.len()).max().unwrap_or(0).max(1);
        let prefix = requests.iter().map(|r| r.prefix).max().unwrap_or(0);
        let seed = self.bench.random.word();
        let (lists, inputs) = self.bench.inputs(cache, requests, slots, heads, scale, seed);
        if rows == 0 {
            return;
        }
        // Scratch of `exact` for very many long requests is not worth its memory here; they run in `fast`.
        let exact = rows * heads / 64 * (prefix / 512 + 64) < 200_000;
        let limits = Limits { batch: requests.len(), rows: rows.max(per), rows_per_request: per, heads, prefix, exact };
        let verify = Verify::new(&self.bench.gpu, limits, Tuning::default()).unwrap();
        let samples = self.bench.samples(&inputs, &lists, if prefix > 5000 { 24 } else { 96 });
        let want = self.bench.dense(cache, &lists, &inputs, &samples);
        let mut runs = vec![(0, Kernel::Tree, Numerics::Fast)];
        if exact {
            runs.push((1, Kernel::Tree, Numerics::Exact));
        }
        if rows * prefix <= 70_000_000 {
            runs.push((2, Kernel::Baseline, Numerics::Fast));
        }
        let mut fast = None;
        for (i, kernel, numerics) in runs {
            let got = self.bench.run(&verify, kernel, numerics, cache, &inputs);
            let keys = |sample: i32| {
                let row = sample as usize / heads;
                let request = lists.qo_indptr.partition_point(|&first| first as usize <= row) - 1;
                lists.kv_len[request] as usize + lists.mask[row].count_ones() as usize
            };
            let mut worst = compare(&got, &samples, &want, scale, keys);
            worst.failures += got.out.iter().filter(|x| !x.is_finite()).count();
            if worst.failures > 0 {
                self.failed.push(format!("{name} {kernel:?} {numerics:?}: {worst:?}"));
            }
            merge(&mut self.worst[i], worst);
            match (&fast, kernel) {
                (Some(tree), Kernel::Baseline) => ulps(tree, &got, &mut self.ulps),
                (None, _) => fast = Some(got),
                _ => {}
            }
        }
        self.cases += 1;
    }

    pub fn finish(self, title: &str) {
        println!("{title}: {} cases", self.cases);
        for (name, worst) in ["tree fast", "tree exact", "baseline"].iter().zip(self.worst) {
            println!(
                "  {name}: worst abs {:.2e}, relative beyond the absolute limit {:.2e}, 1 - cosine {:.2e}, LSE {:.2e}",
                worst.abs, worst.relative, worst.cosine, worst.lse
            );
        }
        println!(
            "  baseline and tree: {} of {} elements beyond one bf16 ulp of the larger ({:.5} %; worst case {:.4} %), worst {:.1} ulp",
            self.ulps.beyond_one,
            self.ulps.elements,
            100.0 * self.ulps.beyond_one as f64 / self.ulps.elements.max(1) as f64,
            100.0 * self.ulps.worst_share,
            self.ulps.worst
        );
        for line in self.failed.iter().take(40) {
            println!("  FAILED {line}");
        }
        assert!(self.failed.is_empty(), "{} of {} cases failed", self.failed.len(), self.cases);
        assert!(self.ulps.beyond_one * 1000 <= self.ulps.elements, "more than 0.1 % of elements beyond one ulp");
    }
}
