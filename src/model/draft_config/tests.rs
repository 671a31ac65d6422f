use serde_json::json;

use super::*;

const MINI: &str = include_str!("../../../models/k26-mini-dflash/config.json");
const TARGET: &str = include_str!("../../../models/k26-mini/config.json");

fn target() -> TargetConfig {
    TargetConfig::parse("k26-mini", TARGET, None).unwrap()
}

fn mini() -> Value {
    serde_json::from_str(MINI).unwrap()
}

fn parse(config: &Value) -> Result<DraftConfig, Problems> {
    DraftConfig::parse("test", &config.to_string(), &target())
}

fn changed(change: impl FnOnce(&mut Value)) -> Result<DraftConfig, Problems> {
    let mut config = mini();
    change(&mut config);
    parse(&config)
}

#[test]
fn the_small_drafter_reads_as_its_file_says() {
    let draft = parse(&mini()).unwrap();
    assert_eq!((draft.hidden, draft.heads, draft.kv_heads, draft.head_dim, draft.intermediate), (256, 4, 2, 64, 512));
    assert_eq!((draft.block_size, draft.mask_token_id, &draft.taps[..]), (8, 4094, &[0, 1, 3][..]));
    let sliding = DraftLayer { window: Some(256), causal_block: false };
    assert_eq!(draft.layers, [sliding, sliding, DraftLayer { window: None, causal_block: false }]);
    assert_eq!((draft.rope.dim, draft.rope.magnitude, draft.rms_norm_eps, draft.slot_width()), (64, 1.0, 1e-5, 768));
}

#[test]
fn default_taps_of_kimi_match_its_published_list() {
    assert_eq!(default_taps(61, 6), [1, 12, 24, 35, 47, 58]);
    assert_eq!(default_taps(36, 1), [18]);
    // 1 + 1.5 = 2.5 rounds to the even 2, 1 + 3 * 1.5 = 5.5 to 6.
    assert_eq!(default_taps(10, 5), [1, 2, 4, 6, 7]);
}

#[test]
fn a_missing_tap_list_means_the_default_formula() {
    let draft = changed(|config| _ = config["dflash_config"].as_object_mut().unwrap().remove("target_layer_ids")).unwrap_err();
    // Four target layers and three draft layers give 1 three times, which no checkpoint can mean.
    assert!(draft.to_string().contains("target_layer_ids: found 1 twice"), "{draft}");
}

#[test]
fn sliding_layers_are_causal_in_their_block_unless_the_file_decides() {
    let causal = |value: Option<bool>| -> Vec<bool> {
        let draft = changed(|config| {
            let dflash = config["dflash_config"].as_object_mut().unwrap();
            dflash.remove("is_causal");
            value.map(|value| dflash.insert("causal".into(), json!(value)));
        });
        draft.unwrap().layers.iter().map(|layer| layer.causal_block).collect()
    };
    assert_eq!(causal(None), [true, true, false]);
    assert_eq!(causal(Some(false)), [false; 3]);
    assert_eq!(causal(Some(true)), [true; 3]);
    assert!(changed(|config| config["dflash_config"]["causal"] = json!(true)).is_err(), "contradiction with is_causal");
}

#[test]
fn block_size_comes_from_the_newer_place_first() {
    assert_eq!(changed(|config| config["dflash_config"]["block_size"] = json!(4)).unwrap().block_size, 4);
    assert_eq!(changed(|config| _ = config.as_object_mut().unwrap().remove("block_size")).unwrap().block_size, 16);
}

#[test]
fn speculators_ids_count_layers_already_run() {
    let mini = mini();
    let config = json!({
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": mini, "block_size": 8, "mask_token_id": 4094, "aux_hidden_state_layer_ids": [1, 2, 4],
        "draft_vocab_size": 4096,
    });
    let draft = parse(&config).unwrap();
    assert_eq!((draft.taps, draft.mask_token_id, draft.hidden), (vec![0, 1, 3], 4094, 256));
    let mut smaller = config.clone();
    smaller["draft_vocab_size"] = json!(1024);
    assert!(parse(&smaller).unwrap_err().to_string().contains("found 1024, wanted the target's 4096"));
    let mut zero = config;
    zero["aux_hidden_state_layer_ids"] = json!([0, 2, 4]);
    assert!(parse(&zero).is_err());
}

#[test]
fn a_drafter_for_another_target_is_refused_with_both_numbers() {
    let cases: [(&str, Value, &str); 10] = [
        ("/hidden_size", json!(512), "hidden_size: found 512, wanted the target's 256"),
        ("/vocab_size", json!(8192), "vocab_size: found 8192, wanted the target's 4096"),
        ("/num_target_layers", json!(61), "num_target_layers: found 61, wanted the target's 4 layers"),
        ("/dflash_config/target_layer_ids", json!([0, 1, 4]), "target_layer_ids: found 4, wanted 0 to 3"),
        ("/dflash_config/mask_token_id", json!(4096), "mask_token_id: found 4096"),
        ("/block_size", json!(1), "block_size: found 1, wanted 2 to 64"),
        ("/block_size", json!(0), "block_size: found 0"),
        ("/block_size", json!(65), "block_size: found 65, wanted 2 to 64"),
        ("/num_key_value_heads", json!(3), "num_key_value_heads: found 3"),
        ("/layer_types", json!(["full_attention"]), "layer_types: found 1 entries"),
    ];
    for (pointer, value, wanted) in cases {
        let error = changed(|config| *config.pointer_mut(pointer).unwrap() = value).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn other_kinds_of_drafters_are_refused_by_name() {
    for key in UNSUPPORTED {
        for place in ["", "/dflash_config"] {
            let result = changed(|config| config.pointer_mut(place).unwrap()[key] = json!(16));
            assert!(result.unwrap_err().to_string().contains(key), "{place} {key}");
            assert!(changed(|config| config.pointer_mut(place).unwrap()[key] = json!(null)).is_ok());
        }
    }
    for name in ["DFlash2DraftModel", "DSparkDraftModel", "LlamaForCausalLM"] {
        assert!(changed(|config| config["architectures"] = json!([name])).unwrap_err().to_string().contains(name));
    }
}

#[test]
fn more_layers_than_could_be_listed_are_refused_at_once() {
    let refused = changed(|config| {
        config["num_hidden_layers"] = json!(1_u64 << 31);
        config.as_object_mut().unwrap().remove("layer_types");
    });
    assert!(refused.unwrap_err().list.iter().any(|problem| problem.subject == "num_hidden_layers"));
}

#[test]
fn sliding_layers_need_a_window() {
    assert!(changed(|config| config["sliding_window"] = Value::Null).unwrap_err().to_string().contains("sliding_window"));
    assert!(changed(|config| config["use_sliding_window"] = json!(false)).unwrap_err().to_string().contains("use_sliding_window"));
}

#[test]
fn without_layer_types_qwen3s_rule_decides() {
    let windows = |first: usize| -> Vec<bool> {
        let draft = changed(|config| {
            config.as_object_mut().unwrap().remove("layer_types");
            config["max_window_layers"] = json!(first);
        });
        draft.unwrap().layers.iter().map(|layer| layer.window.is_some()).collect()
    };
    assert_eq!(windows(3), [false; 3]);
    assert_eq!(windows(1), [false, true, true]);
}
