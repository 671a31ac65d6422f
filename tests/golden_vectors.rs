//! The forward passes against vectors computed by PyTorch in float32: every stored tensor of all thirteen prompts.

mod common;

use std::collections::HashMap;

use common::{options, with_engine};
use kdtree::device::cpu::CpuDevice;
use kdtree::device::{Admission, Device, Limits, Verify};
use kdtree::engine::contract::Sampling;
use kdtree::engine::driver::greedy;
use kdtree::model::checkpoint::Checkpoint;
use kdtree::model::config::{DraftConfig, TargetConfig};
use kdtree::model::drafter::Drafter;
use kdtree::model::progress::Silent;
use kdtree::model::source::ModelSource;
use kdtree::model::target::{Form, Target, rope_table};
use kdtree::model::weights::Stored;
use kdtree::parallel::Rank;
use kdtree::speculate::budget::Budget;
use safetensors::SafeTensors;
use serde_json::Value;

struct Golden {
    bytes: Vec<u8>,
    cases: Vec<Value>,
}

impl Golden {
    fn open() -> Self {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/");
        let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(format!("{folder}golden.json")).unwrap()).unwrap();
        Self { bytes: std::fs::read(format!("{folder}golden.safetensors")).unwrap(), cases }
    }

    fn tensors(&self) -> HashMap<String, Vec<f32>> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        file.iter()
            .map(|(name, view)| {
                let values = view.data().chunks_exact(4).map(|b| b.try_into().unwrap());
                let float = view.dtype() == safetensors::Dtype::F32;
                (name.to_string(), values.map(|b| if float { f32::from_le_bytes(b) } else { i32::from_le_bytes(b) as f32 }).collect())
            })
            .collect()
    }
}

/// Norm of the difference over the norm of the reference.
fn distance(found: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in found.iter().zip(wanted) {
        difference += (f64::from(a) - f64::from(b)).powi(2);
        norm += f64::from(b).powi(2);
    }
    (difference / norm).sqrt()
}

#[test]
fn every_stored_tensor_is_reproduced() {
    let golden = Golden::open();
    let tensors = golden.tensors();
    let (source, draft_source) = (ModelSource::directory("models/k26-mini"), ModelSource::directory("models/k26-mini-dflash"));
    let config = TargetConfig::load(&source).unwrap();
    let draft_config = DraftConfig::load(&draft_source, &config).unwrap();
    let checkpoint = Checkpoint::open_target(&source, &config).unwrap();
    let draft_checkpoint = Checkpoint::open_drafter(&draft_source, &draft_config).unwrap();
    let (chunk, context) = (640, 2816);
    let limits = Limits { requests: 1, verify_rows: 64, chunk_rows: chunk, context, slots: context, block: 8, vocab: config.vocab };
    let mut device = CpuDevice::new(Verify::On, None);
    device.set_rope(rope_table(&config.rope, context), Some(rope_table(&draft_config.rope, context))).unwrap();
    device.record_routes();
    let mut target = Target::load(
        &device,
        &Stored { device: &device, checkpoint: &checkpoint },
        &config,
        &draft_config.taps,
        Rank::SOLE,
        &limits,
        &Silent,
    )
    .unwrap();
    let mut drafter =
        Drafter::load(&device, &Stored { device: &device, checkpoint: &draft_checkpoint }, &draft_config, Rank::SOLE, &limits).unwrap();
    let mut latents = device.latents(config.layers, limits.slots, target.shape()).unwrap();
    let mut contexts = device.contexts(drafter.layer_count(), limits.slots, drafter.shape()).unwrap();
    let mut round = device.round(&limits).unwrap();
    let (mut rows, mut blocks) = (device.rows(chunk).unwrap(), device.rows(8).unwrap());
    let (hidden, vocab) = (config.hidden, config.vocab);

    for case in &golden.cases {
        let name = case["name"].as_str().unwrap();
        let ids = ids(&case["ids"]);
        let admission = Admission {
            sampling: Sampling::greedy(),
            suppressed: vec![],
            free_from: 0,
            prompt: ids.clone(),
            slots: (0..context as u32).collect(),
            logprobs: None,
            drafts: true,
        };
        device.admit(&mut round, 0, admission).unwrap();
        let mut found: HashMap<String, Vec<f32>> = HashMap::new();
        let stored = tensors[&format!("{name}.logits")].len() / vocab;
        let mut watched: Vec<Vec<f32>> = vec![Vec::new(); config.layers + 1];
        for (at, tokens) in ids.chunks(chunk).enumerate() {
            device.place_chunk(&round, 0, at * chunk, tokens, &mut rows).unwrap();
            let mut watch = |index: usize, x: &_| {
                watched[index].extend(device.read(x, tokens.len())?);
                Ok(())
            };
            target.forward_watched(&device, &rows, Form::Direct, &mut latents, &mut watch).unwrap();
            found.entry("taps".into()).or_default().extend(device.read(&target.tapped, tokens.len()).unwrap());
            drafter.extend_context(&device, &target.tapped, &rows, &mut contexts).unwrap();
            target.head(&device, &rows).unwrap();
            found.entry("logits".into()).or_default().extend(device.read(&target.logits, tokens.len()).unwrap());
            for (layer, routes) in device.take_routes() {
                found.entry(format!("route.{layer}.ids")).or_default().extend(routes.ids.iter().map(|&id| id as f32));
                found.entry(format!("route.{layer}.weights")).or_default().extend(routes.weights);
            }
        }
        device
            .begin(
                &mut round,
                0,
                ids.len(),
                &{
                    let mut last = device.act(1, vocab).unwrap();
                    last.data.copy_from_slice(&found["logits"][(ids.len() - 1) * vocab..]);
                    last
                },
                None,
            )
            .unwrap();
        let first = device.read_round(&mut round).unwrap()[0].tokens[0];
        assert_eq!(u64::from(first), case["greedy"][0].as_u64().unwrap(), "{name}: first greedy token");
        device.plan(&mut round, &[kdtree::device::Share { request: 0, rows: 64, chain: false }]).unwrap();
        device.place_blocks(&round, drafter.mask_token(), &mut blocks).unwrap();
        drafter.draft(&device, &mut target, &blocks, &contexts).unwrap();
        let draft_logits = device.read(&target.logits, 8).unwrap()[vocab..].to_vec();

        let limit = if ids.len() >= 300 { 1e-4 } else { 2e-5 };
        let mut report = Vec::new();
        let mut check = |what: &str, found: &[f32], width: usize| {
            let wanted = &tensors[&format!("{name}.{what}")];
            let found = &found[found.len() - wanted.len().min(found.len())..];
            assert_eq!(wanted.len() % width, 0);
            let distance = distance(found, wanted);
            report.push(format!("{what} {distance:.1e}"));
            assert!(distance <= limit, "{name}: {what} is {distance:.2e} away, allowed {limit:.0e}");
        };
        check("taps", &found["taps"], 3 * hidden);
        for layer in config.dense_layers..config.layers {
            let (ids_name, weights_name) = (format!("route.{layer}.ids"), format!("route.{layer}.weights"));
            // The order of a row's experts is the reference's own (descending score); compared as it stands.
            check(&ids_name, &found[&ids_name], config.top_k);
            check(&weights_name, &found[&weights_name], config.top_k);
        }
        check("logits", &found["logits"], vocab);
        check("draft_logits", &draft_logits, vocab);
        let all: Vec<f32> = watched.iter().flat_map(|rows| rows[rows.len() - stored * hidden..].to_vec()).collect();
        check("hidden", &all, hidden);

        // The tree of the round in hand must be the reference's.
        for nodes in [7, 15, 31, 63] {
            device.plan(&mut round, &[kdtree::device::Share { request: 0, rows: nodes + 1, chain: false }]).unwrap();
            device.marginals(&mut round, &target.logits).unwrap();
            device.grow(&mut round).unwrap();
            let tree = &device.read_trees(&round).unwrap()[0];
            let wanted = case["draft"][format!("tree{nodes}")].as_array().unwrap();
            let wanted: Vec<(u32, u8)> =
                wanted.iter().map(|node| (node["token"].as_u64().unwrap() as u32, node["parent"].as_u64().unwrap() as u8)).collect();
            let found: Vec<(u32, u8)> = tree.tokens.iter().copied().zip(tree.parents.iter().copied()).skip(1).collect();
            assert_eq!(found, wanted, "{name}: tree of {nodes} nodes");
        }
        println!("{name}: {} tokens: {}", ids.len(), report.join(", "));
    }
}

/// The whole engine, plain and with trees: greedy tokens are the reference's up to the first step that is too close to call.
#[test]
fn greedy_tokens_follow_the_reference() {
    for budget in [Budget::Off, Budget::Tree(32)] {
        let cases = Golden::open().cases;
        let prompts: Vec<Vec<u32>> = cases.iter().map(|case| ids(&case["ids"])).collect();
        let generated = with_engine(options(), move |driver| {
            let requests = prompts.into_iter().map(|prompt| greedy(prompt, 64, Some(budget))).collect();
            driver.generate(requests).unwrap()
        });
        for (case, generated) in cases.iter().zip(&generated) {
            let (name, wanted) = (case["name"].as_str().unwrap(), ids(&case["greedy"]));
            let margins = case["margin"].as_array().unwrap().iter().map(|margin| margin.as_f64().unwrap());
            let sure = margins.take_while(|&margin| margin >= 1e-3).count();
            assert!(sure == wanted.len() || sure > 32, "{name}: only {sure} steps are sure");
            let found = &generated.tokens[..sure.min(generated.tokens.len())];
            assert_eq!(found, &wanted[..sure], "{name}, {budget}");
        }
    }
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}
