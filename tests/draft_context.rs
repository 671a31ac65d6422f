//! A drafter's context that is extended late, by kept taps in one chunk, is the one that is extended every round: bit for bit on the
//! CPU and on a card with exact numerics (skipped, with the reason, where there is none).

use std::sync::Arc;

use kdtree::device::cpu::CpuDevice;
use kdtree::device::cuda::gpu::usable_cards;
use kdtree::device::cuda::{CudaDevice, Gpu, Numerics};
use kdtree::device::{Admission, Device, Limits, Outcome, Share, Verify};
use kdtree::engine::context::DraftContext;
use kdtree::engine::contract::Sampling;
use kdtree::engine::executor::{Chunk, Command, Executor};
use kdtree::model::checkpoint::Checkpoint;
use kdtree::model::config::{DraftConfig, TargetConfig};
use kdtree::model::drafter::Drafter;
use kdtree::model::progress::Silent;
use kdtree::model::source::ModelSource;
use kdtree::model::target::{Target, rope_table};
use kdtree::model::tokenizer::Tokenizer;
use kdtree::model::weights::Stored;
use kdtree::parallel::Rank;

const CONTEXT: usize = 512;

/// Slots and positions of a context: draft rows stand beyond its end.
const REACH: usize = CONTEXT + 64;

fn executor<D: Device>(open: impl FnOnce(&Limits) -> D) -> (Executor<D>, Tokenizer) {
    let folder = |name: &str| ModelSource::directory(format!("{}/models/{name}", env!("CARGO_MANIFEST_DIR")));
    let (source, draft_source) = (folder("k26-mini"), folder("k26-mini-dflash"));
    let config = TargetConfig::load(&source).unwrap();
    let draft = DraftConfig::load(&draft_source, &config).unwrap();
    let checkpoint = Checkpoint::open_target(&source, &config).unwrap();
    let draft_checkpoint = Checkpoint::open_drafter(&draft_source, &draft).unwrap();
    let (block, vocab) = (draft.block_size, config.vocab);
    let limits = Limits { requests: 2, verify_rows: 128, chunk_rows: 64, context: CONTEXT, slots: 2 * REACH, block, vocab };
    let mut device = open(&limits);
    device.set_rope(rope_table(&config.rope, REACH), Some(rope_table(&draft.rope, REACH))).unwrap();
    let stored = |checkpoint| Stored { device: &device, checkpoint };
    let target = Target::load(&device, &stored(&checkpoint), &config, &draft.taps, Rank::SOLE, &limits, &Silent).unwrap();
    let drafter = Drafter::load(&device, &stored(&draft_checkpoint), &draft, Rank::SOLE, &limits).unwrap();
    (Executor::new(device, target, Some(drafter), &limits, draft.taps.len()).unwrap(), Tokenizer::load(&source).unwrap())
}

/// One request on its way: the scheduler's part of a round.
struct Running {
    request: usize,
    context: DraftContext,
    committed: usize,
}

impl Running {
    /// `most`: tokens whose taps are kept before the context is extended.
    fn begin<D: Device>(executor: &mut Executor<D>, request: usize, prompt: &[u32], most: usize) -> Self {
        let slots = (request * REACH..(request + 1) * REACH).map(|slot| slot as u32).collect();
        let prompt: Arc<[u32]> = prompt.into();
        let admission = Admission {
            sampling: Sampling::greedy(),
            suppressed: Vec::new(),
            free_from: 0,
            prompt: prompt.to_vec(),
            slots,
            logprobs: None,
            drafts: true,
        };
        executor.apply(&Command::Admit { request, admission: Arc::new(admission) }).unwrap();
        let chunk = Chunk { request, start: 0, tokens: prompt.clone(), last: true, drafts: true, logprobs: None, mask: None };
        executor.apply(&Command::Prefill(chunk)).unwrap();
        executor.read_round().unwrap();
        let mut context = DraftContext::new(request, most);
        context.prompt(prompt.len());
        Self { request, context, committed: prompt.len() }
    }
}

/// One round of all of `running`, each verifying so many rows. Without `extend`, what is missing stays missing.
fn round<D: Device>(executor: &mut Executor<D>, running: &mut [Running], rows: &[usize], extend: bool) -> Vec<Outcome> {
    let drafting = rows.iter().any(|&rows| rows > 1);
    for one in running.iter_mut() {
        if let Some(missing) = one.context.extend(one.committed, drafting).filter(|_| extend) {
            executor.apply(&Command::Extend(missing)).unwrap();
        }
    }
    let share = |(one, &rows): (&Running, &usize)| Share { request: one.request, rows, chain: false };
    executor.apply(&Command::Draft(running.iter().zip(rows).map(share).collect())).unwrap();
    executor.apply(&Command::Verify(Arc::default())).unwrap();
    if !drafting {
        let kept = running.iter().enumerate().map(|(row, one)| one.context.keep(row, one.committed)).collect();
        executor.apply(&Command::Keep(kept)).unwrap();
    }
    let outcomes = executor.read_round().unwrap();
    for (one, outcome) in running.iter_mut().zip(&outcomes) {
        one.context.advance(outcome.path.len(), drafting);
        one.committed += outcome.path.len();
    }
    outcomes
}

/// Tokens, and tokens and probabilities of every tree, of two requests side by side. Rows verified go by round; taps of `most`
/// tokens are kept before a context is extended.
fn text_and_trees<D: Device>(
    executor: &mut Executor<D>,
    prompts: &[Vec<u32>; 2],
    most: usize,
    rounds: &[[usize; 2]],
    extend: bool,
) -> (Vec<u32>, Vec<u64>) {
    let mut running: Vec<Running> =
        prompts.iter().enumerate().map(|(request, prompt)| Running::begin(executor, request, prompt, most)).collect();
    let (mut tokens, mut trees) = (Vec::new(), Vec::new());
    for rows in rounds {
        for outcome in round(executor, &mut running, rows, extend) {
            let tree = outcome.tree.unwrap();
            if tree.rows > 1 {
                trees.extend(tree.token[..tree.rows].iter().map(|&token| u64::from(token)));
                trees.extend(tree.logprob[..tree.rows].iter().map(|logprob| logprob.to_bits()));
            }
            tokens.extend(outcome.tokens);
        }
    }
    (0..2).for_each(|request| executor.apply(&Command::Retire { request }).unwrap());
    (tokens, trees)
}

/// Plain rounds, fewer and more than can be kept, between rounds in which one or both draft.
fn rounds(most: usize) -> Vec<[usize; 2]> {
    let mut rounds = vec![[16, 8]];
    for (plain, drafting) in [(1, [16, 16]), (5, [8, 1]), (3, [1, 32]), (most, [16, 16]), (most + 7, [32, 1]), (70, [1, 64]), (2, [64, 64])]
    {
        rounds.extend(std::iter::repeat_n([1, 1], plain));
        rounds.extend([drafting, [16, 16]]);
    }
    rounds
}

fn prompts(tokenizer: &Tokenizer) -> [Vec<u32>; 2] {
    ["Once upon a time there was a king who had three sons.", "1, 2, 3, 4, 5,"].map(|text| tokenizer.encode_prompt(text))
}

#[test]
fn drafts_are_the_same_whether_the_context_is_extended_late_or_at_once() {
    let (mut executor, tokenizer) = executor(|_| CpuDevice::new(Verify::On, None));
    let (prompts, most) = (prompts(&tokenizer), executor.kept_taps());
    assert_eq!(most, 64, "as much as a chunk holds");
    let rounds = rounds(most);
    let (text, at_once) = text_and_trees(&mut executor, &prompts, 1, &rounds, true);
    let (late_text, late) = text_and_trees(&mut executor, &prompts, most, &rounds, true);
    assert!(text == late_text && at_once.len() > 200);
    assert!(at_once == late, "a late extension gives another context");
    // A context that lacks what plain rounds accepted (its slots hold the other request's) grows other trees: the comparison can tell.
    let [first, second] = prompts;
    let swapped = [second, first];
    text_and_trees(&mut executor, &swapped, most, &rounds[..4], true);
    let [first, second] = swapped;
    let (_, lacking) = text_and_trees(&mut executor, &[second, first], most, &rounds[..4], false);
    assert!(at_once[..lacking.len()] != lacking, "nothing was missing");
}

#[test]
fn a_card_extends_late_as_at_once() {
    if let Err(error) = usable_cards(1) {
        println!("skipped: {error}");
        return;
    }
    for numerics in [Numerics::Fast, Numerics::Exact] {
        let (mut executor, tokenizer) =
            executor(|limits| CudaDevice::new(Gpu::open(0).unwrap(), numerics, Verify::On, limits, None).unwrap());
        let (prompts, most) = (prompts(&tokenizer), executor.kept_taps());
        let rounds = rounds(most);
        let (text, at_once) = text_and_trees(&mut executor, &prompts, 1, &rounds, true);
        let (late_text, late) = text_and_trees(&mut executor, &prompts, most, &rounds, true);
        let same = at_once.iter().zip(&late).filter(|(a, b)| a == b).count();
        println!("{numerics:?}: {same} of {} tokens and probabilities have the same bits", at_once.len());
        assert!(numerics == Numerics::Fast || (text == late_text && at_once == late), "a late extension gives another context");
    }
}
