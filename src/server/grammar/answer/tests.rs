use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::engine::contract::ModelInfo;
use crate::model::source::ModelSource;
use crate::model::tokenizer::Tokenizer;
use crate::server::grammar::Grammars;

const VOCAB: usize = 4096;
const WORDS: usize = VOCAB / 32;
const END: u32 = 3842;

fn tokenizer() -> &'static Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini");
        Arc::new(Tokenizer::load(&ModelSource::directory(folder)).unwrap())
    })
}

fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| {
        let info = ModelInfo {
            name: "m".into(),
            vocab_size: VOCAB,
            max_model_len: 1024,
            stop_ids: vec![END, 3841],
            max_rows: 64,
            max_running: 1,
            kv_slots: 1024,
        };
        Grammars::new(tokenizer().clone(), &info)
    })
}

fn markers() -> Markers {
    Markers::of(tokenizer()).unwrap()
}

fn weather() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
           "required": ["city"], "additionalProperties": false})
}

fn rules(form: AnswerForm, thinking: bool, tools: &[&str], parallel: bool) -> AnswerRules {
    let tool = |name: &&str| ToolRule { name: (*name).into(), arguments: grammars().json(&weather()).unwrap() };
    AnswerRules {
        markers: Some(markers()),
        thinking,
        form,
        tools: tools.iter().map(tool).collect(),
        parallel,
        first_call: 2,
        ends: vec![END, 3841],
    }
}

fn constraint(rules: AnswerRules) -> Box<dyn Constraint> {
    grammars().constraint(rules).unwrap()
}

fn mask(constraint: &mut dyn Constraint) -> Vec<u32> {
    let mut mask = vec![0; WORDS];
    constraint.mask_tree(&[0], &[0], WORDS, &mut mask).unwrap();
    mask
}

fn allowed(mask: &[u32]) -> Vec<u32> {
    (0..VOCAB as u32).filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1).collect()
}

/// A tiny generator, so that a walk is a function of its seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// Prefers tokens that end something, so that walks end.
fn choose(dice: &mut Dice, allowed: &[u32]) -> u32 {
    let m = markers();
    let closing = allowed.iter().find(|token| [END, m.call_end, m.section_end, m.think_end].contains(token));
    match closing {
        Some(token) if dice.roll(3) == 0 => *token,
        _ => allowed[dice.roll(allowed.len())],
    }
}

/// Follows the masks at random; the tokens of the answer, its end included, or `None` if it did not end within `most`.
fn walk(constraint: &mut dyn Constraint, seed: u64, most: usize) -> Option<Vec<u32>> {
    let mut dice = Dice(seed);
    let mut tokens = Vec::new();
    for _ in 0..most {
        let allowed = allowed(&mask(constraint));
        assert!(!allowed.is_empty(), "nothing may follow {:?}", tokenizer().decode(&tokens, false));
        let token = choose(&mut dice, &allowed);
        tokens.push(token);
        let over = constraint.commit(token).unwrap();
        if token == END || token == 3841 {
            return Some(tokens);
        }
        if over {
            let rest = self::allowed(&mask(constraint));
            assert!(rest.iter().all(|token| [END, 3841].contains(token)), "{rest:?}");
        }
    }
    None
}

fn text(tokens: &[u32]) -> String {
    tokenizer().decode(&tokens[..tokens.len() - 1], false)
}

#[test]
fn whatever_follows_the_masks_is_valid_json() {
    let schema = json!({"type": "object", "properties": {"state": {"enum": ["done", "open"]},
        "nums": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3}},
        "required": ["state", "nums"], "additionalProperties": false});
    let mut ended = 0;
    for seed in 0..40 {
        let mut constraint = constraint(rules(AnswerForm::Json(Box::new(grammars().json(&schema).unwrap())), false, &[], true));
        let Some(tokens) = walk(constraint.as_mut(), seed, 400) else { continue };
        let value: Value = serde_json::from_str(&text(&tokens)).unwrap();
        assert!(["done", "open"].contains(&value["state"].as_str().unwrap()));
        assert!((1..=3).contains(&value["nums"].as_array().unwrap().len()));
        ended += 1;
    }
    assert!(ended >= 30, "{ended} of 40 walks ended");
}

#[test]
fn forced_calls_name_a_tool_count_on_and_have_valid_arguments() {
    let mut ended = 0;
    for seed in 0..30 {
        let mut constraint = constraint(rules(AnswerForm::Calls, false, &["get_weather", "get_wind"], true));
        let Some(tokens) = walk(constraint.as_mut(), seed, 600) else { continue };
        let text = text(&tokens);
        let inner = text.strip_prefix("<|tool_calls_section_begin|>").unwrap().strip_suffix("<|tool_calls_section_end|>").unwrap();
        for (index, call) in inner.split("<|tool_call_begin|>").skip(1).enumerate() {
            let (id, arguments) = call.strip_suffix("<|tool_call_end|>").unwrap().split_once("<|tool_call_argument_begin|>").unwrap();
            assert!(id == format!("functions.get_weather:{}", index + 2) || id == format!("functions.get_wind:{}", index + 2), "{id}");
            assert!(serde_json::from_str::<Value>(arguments).unwrap()["city"].is_string());
        }
        ended += 1;
    }
    assert!(ended >= 20, "{ended} of 30 walks ended");
}

#[test]
fn a_single_call_closes_the_section() {
    let mut constraint = constraint(rules(AnswerForm::Calls, false, &["f"], false));
    let m = markers();
    let ids = [
        vec![m.section_begin, m.call_begin],
        tokenizer().encode("functions.f:2"),
        vec![m.argument_begin],
        tokenizer().encode("{\"city\":\"x\"}"),
    ];
    for token in ids.concat() {
        assert!(!constraint.commit(token).unwrap());
    }
    assert!(!constraint.commit(m.call_end).unwrap());
    assert_eq!(allowed(&mask(constraint.as_mut())), [m.section_end]);
    assert!(constraint.commit(m.section_end).unwrap());
    assert_eq!(allowed(&mask(constraint.as_mut())), [3841, END]);
}

#[test]
fn reasoning_is_free_but_may_not_end_a_bound_answer() {
    let schema = grammars().json(&weather()).unwrap();
    let mut constraint = constraint(rules(AnswerForm::Json(Box::new(schema)), true, &[], true));
    let free = allowed(&mask(constraint.as_mut()));
    let m = markers();
    assert!([END, 3841, m.section_begin, m.call_begin].iter().all(|token| !free.contains(token)));
    assert_eq!(free.len(), VOCAB - 4);
    for token in tokenizer().encode("let me think {") {
        assert!(!constraint.commit(token).unwrap());
    }
    constraint.commit(m.think_end).unwrap();
    let opening = allowed(&mask(constraint.as_mut()));
    assert!(opening.iter().all(|token| tokenizer().token_bytes(*token).unwrap().starts_with(b"{")), "{opening:?}");
}

#[test]
fn a_free_answer_is_bound_only_inside_calls() {
    let mut constraint = constraint(rules(AnswerForm::Free, false, &["f"], true));
    assert_eq!(allowed(&mask(constraint.as_mut())).len(), VOCAB);
    let m = markers();
    constraint.commit(m.section_begin).unwrap();
    assert_eq!(allowed(&mask(constraint.as_mut())), [m.call_begin]);
    constraint.commit(m.call_begin).unwrap();
    let letters = allowed(&mask(constraint.as_mut()));
    assert!(letters.iter().all(|token| b"functions.f:2".starts_with(tokenizer().token_bytes(*token).unwrap())));
    assert!(constraint.commit(END).is_err());
}

#[test]
fn json_or_a_call_instead_when_both_are_offered() {
    let m = markers();
    let both = || constraint(rules(AnswerForm::Json(Box::new(grammars().json(&weather()).unwrap())), false, &["f"], true));
    let mut calls = both();
    assert!(allowed(&mask(calls.as_mut())).contains(&m.section_begin));
    calls.commit(m.section_begin).unwrap();
    assert_eq!(allowed(&mask(calls.as_mut())), [m.call_begin]);
    let mut json = both();
    json.commit(tokenizer().encode("{")[0]).unwrap();
    assert!(!allowed(&mask(json.as_mut())).contains(&m.section_begin));
}

#[test]
fn a_schema_that_cannot_be_honoured_is_refused() {
    for schema in [json!(false), json!(5), json!({"type": "strnig"}), json!({"enum": []})] {
        assert!(grammars().json(&schema).is_err(), "{schema}");
    }
    assert!(grammars().json(&json!({})).is_ok());
    let lenient = json!({"type": "string", "pattern": "(?=x)x", "x-guidance": {"lenient": true}});
    assert!(grammars().json(&lenient).is_err(), "a client must not loosen its own schema's rules");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The mask of a tree row equals the mask after committing the row's path one by one, and asking changes nothing.
    #[test]
    fn a_tree_is_judged_as_its_paths_one_by_one(seed in any::<u64>(), before in 0usize..30, kind in 0usize..4) {
        let fresh = || {
            let json = || AnswerForm::Json(Box::new(grammars().json(&weather()).unwrap()));
            constraint(match kind {
                0 => rules(json(), false, &[], true),
                1 => rules(AnswerForm::Calls, true, &["get_weather", "get_wind"], true),
                2 => rules(AnswerForm::Free, false, &["get_weather"], false),
                _ => rules(json(), true, &["get_weather"], true),
            })
        };
        let mut dice = Dice(seed);
        let mut tree_side = fresh();
        let mut path: Vec<u32> = Vec::new();
        for _ in 0..before {
            let token = choose(&mut dice, &allowed(&mask(tree_side.as_mut())));
            if token == END || token == 3841 { break; }
            tree_side.commit(token).unwrap();
            path.push(token);
        }
        // Mostly allowed tokens, so that the tree is deep; some that are not.
        let (mut tokens, mut parents, mut paths) = (vec![0u32], vec![0u8], vec![Some(path.clone())]);
        for row in 1..16usize {
            let parent = dice.roll(row.min(4)).max(row.saturating_sub(3)).min(row - 1);
            let (token, reached) = match &paths[parent] {
                Some(above) => {
                    let mut alone = fresh();
                    above.iter().for_each(|token| { alone.commit(*token).unwrap(); });
                    let here = allowed(&mask(alone.as_mut()));
                    let token = if dice.roll(5) == 0 { dice.roll(VOCAB) as u32 } else { choose(&mut dice, &here) };
                    (token, here.contains(&token).then(|| [above.clone(), vec![token]].concat()))
                }
                None => (dice.roll(VOCAB) as u32, None),
            };
            tokens.push(token);
            parents.push(parent as u8);
            paths.push(reached);
        }
        for _ in 0..2 {
            let mut masks = vec![0; tokens.len() * WORDS];
            tree_side.mask_tree(&tokens, &parents, WORDS, &mut masks).unwrap();
            for (row, path) in paths.iter().enumerate() {
                let of_row = &masks[row * WORDS..(row + 1) * WORDS];
                match path {
                    Some(path) => {
                        let mut alone = fresh();
                        path.iter().for_each(|token| { alone.commit(*token).unwrap(); });
                        prop_assert_eq!(of_row, &mask(alone.as_mut())[..], "row {}", row);
                    }
                    None => prop_assert!(of_row.iter().all(|word| *word == u32::MAX)),
                }
            }
        }
    }
}
