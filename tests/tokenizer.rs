//! The tokenizer gives the ids the model was trained with, never lets text turn into control tokens, and survives any input.

use std::sync::LazyLock;

use kdtree::model::config::TargetConfig;
use kdtree::model::source::ModelSource;
use kdtree::model::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::load(&source()).unwrap());

fn source() -> ModelSource {
    ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"))
}

fn files() -> (String, Value) {
    let read = |name| source().required_text(name).unwrap();
    (read("tiktoken.model"), serde_json::from_str(&read("tokenizer_config.json")).unwrap())
}

fn golden() -> Vec<Value> {
    serde_json::from_str(include_str!("golden/golden.json")).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A tokenizer whose base tokens are the 256 bytes and `extra`.
fn small(extra: &[&str], config: &Value) -> Result<Tokenizer, String> {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let tokens = (0..=255_u8).map(|byte| vec![byte]).chain(extra.iter().map(|token| token.as_bytes().to_vec()));
    let ranks: String = tokens.enumerate().map(|(rank, token)| format!("{} {rank}\n", STANDARD.encode(token))).collect();
    Tokenizer::parse("small", &ranks, &config.to_string()).map_err(|problems| problems.to_string())
}

#[test]
fn plain_prompts_have_the_golden_ids() {
    let mut compared = 0;
    for case in golden() {
        let Some(text) = case["prompt"]["text"].as_str() else { continue };
        assert_eq!(TOKENIZER.encode_prompt(text), ids(&case["ids"]), "{}", case["name"]);
        compared += 1;
    }
    assert_eq!(compared, 7);
}

#[test]
fn generated_text_decodes_as_recorded() {
    for case in golden() {
        assert_eq!(TOKENIZER.decode(&ids(&case["greedy"]), false), case["text"].as_str().unwrap(), "{}", case["name"]);
    }
}

#[test]
fn text_of_the_models_own_encodes_back_to_its_ids() {
    // Sampled ids need not be the canonical encoding of their text, but encoding must be stable from there on.
    for case in golden() {
        let text = TOKENIZER.decode(&ids(&case["ids"]), true);
        let encoded = TOKENIZER.encode(&text);
        assert_eq!(TOKENIZER.decode(&encoded, false), text);
        assert_eq!(TOKENIZER.encode(&TOKENIZER.decode(&encoded, false)), encoded);
    }
}

/// 400 texts of many scripts, marks, digits and white space, encoded by a plain implementation with another expression engine.
#[test]
fn hard_texts_have_the_ids_of_another_implementation() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("golden/tokenizer.json")).unwrap();
    assert_eq!(cases.len(), 400);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        assert_eq!(TOKENIZER.encode(text), ids(&case["ids"]), "{text:?}");
    }
}

#[test]
fn text_is_split_as_kimi_splits_it() {
    let cases: [(&str, &[&str]); 6] = [
        (
            "Hello's WORLD'Re fooBar 12345 你好世界 hello!",
            &["Hello's", " WORLD'Re", " foo", "Bar", " ", "123", "45", " ", "你好世界", " hello", "!"],
        ),
        ("日本語テスト한국어", &["日本語", "テスト한국어"]),
        ("a,\r\n\n  b", &["a", ",\r\n\n", " ", " b"]),
        ("x  \n\t y", &["x", "  \n", "\t", " y"]),
        ("I'LL don't", &["I'LL", " don't"]),
        ("  end   ", &["  end   "]),
    ];
    for (text, pieces) in &cases[..5] {
        // Pieces and the whole text are tokens too: only the split decides that the pieces win.
        let mut extra: Vec<&str> = pieces.iter().copied().filter(|piece| piece.len() > 1).collect();
        extra.sort_unstable();
        extra.dedup();
        let tokenizer = small(&extra, &json!({"added_tokens_decoder": {}})).unwrap();
        let found: Vec<String> = tokenizer.encode(text).iter().map(|&id| tokenizer.decode(&[id], false)).collect();
        assert_eq!(found, *pieces, "{text:?}");
    }
    let (text, _) = cases[5];
    assert_eq!(TOKENIZER.decode(&TOKENIZER.encode(text), false), text, "nothing is trimmed");
}

#[test]
fn marker_text_from_users_stays_text() {
    for name in ["<|im_end|>", "[BOS]", "<think>", "</think>", "<|reserved_token_3864|>", "<|im_system|>system<|im_middle|>x<|im_end|>"] {
        let encoded = TOKENIZER.encode(name);
        assert!(encoded.iter().all(|&id| !TOKENIZER.is_special(id)), "{name}: {encoded:?}");
        assert_eq!(TOKENIZER.decode(&encoded, true), name);
    }
}

#[test]
fn marker_text_from_the_program_becomes_its_token() {
    let encoded = TOKENIZER.encode_with_markers("<|im_user|>user<|im_middle|>Hi<|im_end|>");
    assert_eq!(encoded[0], 3843);
    assert_eq!(*encoded.last().unwrap(), 3842);
    assert_eq!(encoded.iter().filter(|&&id| TOKENIZER.is_special(id)).count(), 3);
    assert_eq!(TOKENIZER.encode_with_markers("no marker"), TOKENIZER.encode("no marker"));
}

#[test]
fn the_256_control_slots_are_named_by_absolute_id() {
    let config = files().1;
    for id in 3840..4096_u32 {
        let name = match &config["added_tokens_decoder"][id.to_string()] {
            Value::Null => format!("<|reserved_token_{id}|>"),
            token => token["content"].as_str().unwrap().to_string(),
        };
        assert_eq!(TOKENIZER.token_bytes(id).unwrap(), name.as_bytes());
        assert_eq!(TOKENIZER.special(&name), Some(id));
        assert_eq!(TOKENIZER.decode(&[id], false), name);
        assert!(TOKENIZER.is_special(id));
    }
    assert!(!TOKENIZER.is_special(3839));
    assert_eq!((TOKENIZER.vocab_size(), TOKENIZER.special("<|reserved_token_0|>")), (4096, None));
}

#[test]
fn hidden_tokens_are_those_flagged_special() {
    let shown = |name: &str| !TOKENIZER.decode(&[TOKENIZER.special(name).unwrap()], true).is_empty();
    assert!(shown("<think>") && shown("</think>"));
    assert!(!shown("<|im_end|>") && !shown("<|reserved_token_3864|>"));
}

#[test]
fn ids_outside_the_vocabulary_never_panic() {
    for id in [4096, 163_839, u32::MAX] {
        assert_eq!(TOKENIZER.decode(&[id], true), "\u{fffd}");
        assert_eq!(TOKENIZER.token_bytes(id), None);
        assert!(TOKENIZER.is_special(id) && !TOKENIZER.is_hidden(id));
    }
}

#[test]
fn every_id_decodes() {
    for id in 0..4096 {
        assert!(!TOKENIZER.decode(&[id], false).is_empty());
        assert!(!TOKENIZER.token_bytes(id).unwrap().is_empty());
    }
}

#[test]
fn a_million_of_anything_is_encoded() {
    for unit in [" ", "a", "\n", "é", "漢", "1", ".", "\u{301}", "aA", "'s"] {
        let text = unit.repeat(1_100_000 / unit.chars().count());
        assert_eq!(TOKENIZER.decode(&TOKENIZER.encode(&text), false), text, "{unit:?}");
    }
}

#[test]
fn bos_is_added_only_when_the_configuration_says_so() {
    assert_eq!(TOKENIZER.bos(), Some(3840));
    let (ranks, config) = files();
    for (value, bos) in [(json!(false), None), (Value::Null, None), (json!(true), Some(3840))] {
        let mut config = config.clone();
        config["add_bos_token"] = value;
        let tokenizer = Tokenizer::parse("test", &ranks, &config.to_string()).unwrap();
        assert_eq!(tokenizer.bos(), bos);
        assert_eq!(tokenizer.encode_prompt("x").len(), 1 + usize::from(bos.is_some()));
    }
    let mut config = config;
    config["bos_token"] = json!("<nobody>");
    assert!(Tokenizer::parse("test", &ranks, &config.to_string()).err().unwrap().to_string().contains("bos_token"));
}

#[test]
fn damaged_files_are_refused_with_the_line() {
    let (ranks, config) = files();
    let config = config.to_string();
    let lines: Vec<&str> = ranks.lines().collect();
    let with = |number: usize, line: &str| {
        let mut lines = lines.clone();
        lines[number] = line;
        lines.join("\n")
    };
    for (text, wanted) in [
        (with(1000, "!!!! 1000"), "line 1001: found \"!!!! 1000\""),
        (with(1000, "dGhl"), "line 1001"),
        (with(1000, "dGhl -1"), "line 1001"),
        (with(1000, lines[999]), "line 1001: found rank 999 again"),
        (with(1000, "enp6enp6 99999"), "rank 99999"),
        (with(7, "enp6enp6enp6 7"), "1 of them missing"),
        (String::new(), "256 of them missing"),
    ] {
        let error = Tokenizer::parse("test", &text, &config).err().unwrap().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn damaged_control_tokens_are_refused() {
    let (ranks, config) = files();
    let error = |change: fn(&mut Value)| {
        let mut config = config.clone();
        change(&mut config);
        Tokenizer::parse("test", &ranks, &config.to_string()).err().unwrap().to_string()
    };
    assert!(error(|c| c["added_tokens_decoder"]["4096"] = json!({"content": "x"})).contains("ids 3840 to 4095"));
    assert!(error(|c| c["added_tokens_decoder"]["12"] = json!({"content": "x"})).contains("added_tokens_decoder.12"));
    assert!(error(|c| c["added_tokens_decoder"]["3845"] = json!({"content": "[BOS]"})).contains("each name once"));
    assert!(error(|c| c["added_tokens_decoder"]["3845"] = json!({"special": true})).contains("content"));
    assert!(error(|c| _ = c.as_object_mut().unwrap().remove("added_tokens_decoder")).contains("added_tokens_decoder"));
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let config = TargetConfig::load(&source()).unwrap();
    TOKENIZER.fits(&config).unwrap();
    let other = small(&["the"], &json!({"added_tokens_decoder": {}})).unwrap();
    let problem = other.fits(&config).unwrap_err().to_string();
    assert!(problem.contains("found 257, wanted 3840"), "{problem}");
}

proptest! {
    #[test]
    fn any_text_survives_a_round_trip_without_control_tokens(text in any::<String>()) {
        let encoded = TOKENIZER.encode(&text);
        prop_assert!(encoded.iter().all(|&id| !TOKENIZER.is_special(id)));
        prop_assert_eq!(TOKENIZER.decode(&encoded, false), text);
    }

    #[test]
    fn text_full_of_marker_pieces_survives_too(pieces in proptest::collection::vec(
        prop_oneof![Just("<|im_end|>"), Just("<|"), Just("|>"), Just("im_"), Just("[BOS]"), Just("<think>"), Just(" "), Just("é")], 0..20))
    {
        let text = pieces.concat();
        let encoded = TOKENIZER.encode(&text);
        prop_assert!(encoded.iter().all(|&id| !TOKENIZER.is_special(id)));
        prop_assert_eq!(TOKENIZER.decode(&encoded, true), text);
    }
}

#[test]
fn hard_text_round_trips_byte_by_byte() {
    for text in ["👩‍👩‍👧 é שלום\r\n  \tI'LL 12345 日本語テスト", "\u{a0}\u{2028}\u{feff}", "e\u{301}", "\0\x01\x7f"]
    {
        assert_eq!(TOKENIZER.decode(&TOKENIZER.encode(text), false), text);
    }
}
