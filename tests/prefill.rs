//! Prefill leaves out what nobody reads, and that changes no bit of what somebody does: cached latents, taps, streams, the logits of
//! the prompt's last row, whatever the chunks.

use std::cell::RefCell;

use kdtree::device::cpu::CpuDevice;
use kdtree::device::cpu::mla::CpuLatents;
use kdtree::device::cpu::rows::CpuRows;
use kdtree::device::{Admission, Device, Limits, Verify};
use kdtree::engine::contract::Sampling;
use kdtree::model::checkpoint::Checkpoint;
use kdtree::model::config::TargetConfig;
use kdtree::model::progress::Silent;
use kdtree::model::source::ModelSource;
use kdtree::model::target::{Form, Readers, Target, rope_table};
use kdtree::model::weights::Stored;
use kdtree::parallel::Rank;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const CONTEXT: usize = 128;

/// A drafter that reads the last layer, and one that does not.
const TAPS: [&[usize]; 2] = [&[0, 1, 3], &[0, 2]];

struct Loaded {
    layers: usize,
    limits: Limits,
    device: CpuDevice,
    /// One for each of `TAPS`.
    targets: [RefCell<Target<CpuDevice>>; 2],
}

/// What a prompt leaves behind.
#[derive(Default)]
struct Left {
    latents: Vec<Vec<f32>>,
    taps: Vec<f32>,
    streams: Vec<f32>,
    logits: Vec<f32>,
}

/// One pass over rows, the last of the prompt or not. Returns the logits of the prompt's last row.
type Pass<'a> = &'a dyn Fn(&mut Target<CpuDevice>, &CpuRows, &mut CpuLatents, bool) -> Option<Vec<f32>>;

impl Loaded {
    fn new() -> Self {
        let source = ModelSource::directory("models/k26-mini");
        let config = TargetConfig::load(&source).unwrap();
        let checkpoint = Checkpoint::open_target(&source, &config).unwrap();
        let (slots, vocab) = (CONTEXT, config.vocab);
        let limits = Limits { requests: 1, verify_rows: 8, chunk_rows: CONTEXT, context: CONTEXT, slots, block: 8, vocab };
        let mut device = CpuDevice::new(Verify::On, None);
        device.set_rope(rope_table(&config.rope, CONTEXT), None).unwrap();
        let weights = Stored { device: &device, checkpoint: &checkpoint };
        let targets = TAPS.map(|taps| RefCell::new(Target::load(&device, &weights, &config, taps, Rank::SOLE, &limits, &Silent).unwrap()));
        Self { layers: config.layers, targets, limits, device }
    }

    /// Reads a prompt in chunks into an empty cache whose slots run backwards.
    fn read(&self, which: usize, prompt: &[u32], chunk: usize, pass: Pass<'_>) -> Left {
        let (device, target) = (&self.device, &mut *self.targets[which].borrow_mut());
        let mut latents = device.latents(self.layers, CONTEXT, target.shape()).unwrap();
        let (mut round, mut rows) = (device.round(&self.limits).unwrap(), device.rows(CONTEXT).unwrap());
        let admission = Admission {
            sampling: Sampling::greedy(),
            suppressed: vec![],
            free_from: 0,
            prompt: prompt.to_vec(),
            slots: (0..CONTEXT as u32).rev().collect(),
            logprobs: None,
            drafts: false,
        };
        device.admit(&mut round, 0, admission).unwrap();
        let mut left = Left::default();
        for (at, tokens) in prompt.chunks(chunk).enumerate() {
            device.place_chunk(&round, 0, at * chunk, tokens, &mut rows).unwrap();
            let logits = pass(target, &rows, &mut latents, at * chunk + tokens.len() == prompt.len());
            left.logits = logits.unwrap_or_default();
            left.taps.extend(device.read(&target.tapped, tokens.len()).unwrap());
            left.streams.extend(device.read(&target.x, tokens.len()).unwrap());
        }
        device.retire(&mut round, 0).unwrap();
        left.latents = latents.layers;
        left
    }

    fn prefill(&self, which: usize, prompt: &[u32], chunk: usize, readers: Readers) -> Left {
        self.read(which, prompt, chunk, &|target, rows, latents, end| {
            let mut last = CpuRows::default();
            target.prefill(&self.device, rows, latents, readers, end.then_some(&mut last)).unwrap();
            end.then(|| self.logits(target, &last))
        })
    }

    /// Every row through every layer; beside it another target gives the last row's logits.
    fn whole(&self, which: usize, prompt: &[u32], chunk: usize) -> Left {
        let readers = Readers { drafter: true, logprobs: true };
        self.read(which, prompt, chunk, &|target, rows, latents, end| {
            let logits = end.then(|| {
                let (other, mut last) = (&mut *self.targets[1 - which].borrow_mut(), CpuRows::default());
                other.prefill(&self.device, rows, latents, readers, Some(&mut last)).unwrap();
                self.logits(other, &last)
            });
            target.forward(&self.device, rows, Form::Direct, latents).unwrap();
            logits
        })
    }

    fn logits(&self, target: &mut Target<CpuDevice>, last: &CpuRows) -> Vec<f32> {
        target.head_of_prompt(&self.device, last).unwrap();
        self.device.read(&target.logits, 1).unwrap()
    }
}

#[test]
fn rows_that_nobody_reads_are_left_out_and_no_bit_of_the_others_changes() {
    let loaded = Loaded::new();
    let prompts = prop::collection::vec(0u32..3000, 1..100);
    let mut runner = TestRunner::new(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() });
    let outcome = runner.run(&(prompts, prop::sample::select(vec![7usize, 16, 33, 128]), 0usize..2), |(prompt, chunk, which)| {
        let want = loaded.whole(which, &prompt, chunk);
        for (drafter, logprobs) in [(false, false), (true, false), (false, true), (true, true)] {
            let got = loaded.prefill(which, &prompt, chunk, Readers { drafter, logprobs });
            prop_assert!(got.latents == want.latents, "latents, drafter {drafter}, logprobs {logprobs}");
            prop_assert!(got.logits == want.logits, "logits, drafter {drafter}, logprobs {logprobs}");
            prop_assert!(!drafter || got.taps == want.taps, "taps, logprobs {logprobs}");
            prop_assert!(!logprobs || got.streams == want.streams, "streams, drafter {drafter}");
        }
        let at_once = loaded.prefill(which, &prompt, CONTEXT, Readers::default());
        prop_assert!(at_once.latents == want.latents && at_once.logits == want.logits, "one chunk or chunks of {chunk}");
        Ok(())
    });
    outcome.unwrap();
}
