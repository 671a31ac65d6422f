use serde_json::{Value, json};

use super::*;

const MINI: &str = include_str!("../../../models/k26-mini/config.json");
const MINI_GENERATION: &str = include_str!("../../../models/k26-mini/generation_config.json");

/// K2.6's text configuration as its public values give it, inside the wrapper.
pub(crate) fn kimi() -> Value {
    let mut config: Value = serde_json::from_str(MINI).unwrap();
    let sizes = json!({
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "vocab_size": 163840, "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839,
    });
    for (key, value) in sizes.as_object().unwrap() {
        config["text_config"][key] = value.clone();
    }
    for key in ["bos_token_id", "pad_token_id"] {
        config[key] = config["text_config"][key].clone();
    }
    config["eos_token_id"] = json!(163586);
    config
}

fn parse(config: &Value) -> Result<TargetConfig, Problems> {
    TargetConfig::parse("test", &config.to_string(), None)
}

/// The one problem that a changed configuration has.
fn refusal(change: impl FnOnce(&mut Value)) -> Problem {
    let mut config = kimi();
    change(&mut config);
    let problems = parse(&config).expect_err("the change must be refused").list;
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems.into_iter().next().unwrap()
}

#[test]
fn the_small_model_reads_as_its_file_says() {
    let config = TargetConfig::parse("k26-mini", MINI, Some(MINI_GENERATION)).unwrap();
    assert_eq!((config.hidden, config.layers, config.heads, config.q_lora_rank, config.kv_lora_rank), (256, 4, 8, 128, 512));
    assert_eq!((config.nope_dim, config.rope_dim, config.v_dim), (128, 64, 128));
    assert_eq!((config.dense_intermediate, config.moe_intermediate, config.experts, config.top_k), (768, 128, 32, 4));
    assert_eq!((config.shared_experts, config.dense_layers, config.vocab, config.quantization.group_size), (1, 1, 4096, 32));
    assert_eq!((config.rms_norm_eps, config.routed_scaling, config.rope.theta), (1e-5, 2.827, 50000.0));
    assert_eq!((config.bos, config.pad, &config.stop_ids[..]), (Some(3840), Some(4095), &[3841, 3842][..]));
    assert_eq!((config.slot_width(), config.qk_dim(), config.max_positions), (576, 192, 262144));
}

#[test]
fn the_full_size_model_has_the_published_scale_and_both_stop_ids() {
    let config = parse(&kimi()).unwrap();
    assert!((config.softmax_scale() - 0.14467962580269).abs() < 1e-13);
    assert_eq!(config.stop_ids, [163585, 163586]);
    assert_eq!(config.moe_layers(), 60);
}

#[test]
fn a_bare_text_configuration_reads_like_the_wrapped_one() {
    let bare = parse(&kimi()["text_config"]).unwrap();
    assert_eq!((bare.hidden, bare.stop_ids), (7168, vec![163585]));
}

#[test]
fn quantisation_is_found_inside_and_outside_the_text_configuration() {
    for place in ["inner", "outer"] {
        let mut config = kimi();
        let object = if place == "inner" { &mut config } else { &mut config["text_config"] };
        object.as_object_mut().unwrap().remove("quantization_config");
        assert_eq!(parse(&config).unwrap().quantization.group_size, 32, "{place}");
    }
    let problem = refusal(|config| config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = json!(64));
    assert_eq!(problem.subject, "quantization_config");
}

#[test]
fn ignore_patterns_match_with_and_without_the_wrapper_prefix() {
    let entries = [
        json!("re:.*self_attn.*"),
        json!("re:language_model\\.model\\.layers\\.\\d+\\.self_attn\\..*"),
        json!("re:model\\.layers\\.\\d+\\.self_attn\\..*"),
    ];
    for entry in entries {
        let mut config = kimi();
        for object in ["outer", "inner"] {
            let object = if object == "outer" { &mut config } else { &mut config["text_config"] };
            object["quantization_config"]["ignore"][0] = entry.clone();
        }
        let config = parse(&config).unwrap_or_else(|error| panic!("{entry}: {error}"));
        assert!(config.quantization.is_ignored("model.layers.3.self_attn.q_a_proj"));
        assert!(!config.quantization.is_ignored("model.layers.3.mlp.experts.0.gate_proj"));
    }
}

#[test]
fn more_experts_than_could_be_listed_are_refused_at_once() {
    let problem = refusal(|config| {
        config["text_config"]["num_hidden_layers"] = json!(1_u64 << 31);
        config["text_config"]["n_routed_experts"] = json!(1_u64 << 31);
    });
    assert_eq!(problem.subject, "n_routed_experts");
}

#[test]
fn a_quantised_attention_is_refused() {
    let change = |config: &mut Value| {
        config.as_object_mut().unwrap().remove("quantization_config");
        config["text_config"]["quantization_config"]["ignore"].as_array_mut().unwrap().remove(0);
    };
    let mut config = kimi();
    change(&mut config);
    let problems = parse(&config).unwrap_err().list;
    assert!(problems.iter().all(|problem| problem.found.contains("self_attn")), "{problems:?}");
    assert_eq!(problems.len(), 5);
}

#[test]
fn every_switch_that_changes_the_arithmetic_is_refused_by_name() {
    let text = [
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("n_group", json!(8)),
        ("topk_group", json!(4)),
        ("norm_topk_prob", json!(false)),
        ("moe_layer_freq", json!(2)),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("num_nextn_predict_layers", json!(1)),
        ("tie_word_embeddings", json!(true)),
        ("rope_interleave", json!(false)),
        ("index_topk", json!(2048)),
        ("model_type", json!("llama")),
        ("dtype", json!("float16")),
        ("num_key_value_heads", json!(8)),
        ("n_shared_experts", json!(0)),
        ("q_lora_rank", Value::Null),
        ("hidden_size", json!("7168")),
        ("vocab_size", json!(-1)),
    ];
    for (key, value) in text {
        let shown = value.to_string();
        let problem = refusal(|config| config["text_config"][key] = value);
        assert_eq!((problem.file.as_str(), problem.subject), ("config.json", format!("text_config.{key}")), "{shown}");
    }
    for key in ["n_group", "topk_group"] {
        let problem = refusal(|config| _ = config["text_config"].as_object_mut().unwrap().remove(key));
        assert_eq!((problem.subject, problem.found.as_str()), (format!("text_config.{key}"), "nothing"));
    }
}

#[test]
fn other_rotary_embeddings_are_refused_by_name() {
    let rope = [
        ("type", json!("linear"), "rope_type"),
        ("mscale", json!(0.5), "rope_scaling.mscale"),
        ("factor", json!(0), "factor"),
        ("truncate", json!(false), "truncate"),
    ];
    for (key, value, subject) in rope {
        let problem = refusal(|config| config["text_config"]["rope_scaling"][key] = value);
        assert!(problem.subject.ends_with(subject), "{problem}");
    }
}

#[test]
fn other_quantisations_are_refused_by_name() {
    let changes: [(&str, Value); 6] = [
        ("/quant_method", json!("fp8")),
        ("/format", json!("nvfp4-pack-quantized")),
        ("/config_groups/group_0/weights/num_bits", json!(8)),
        ("/config_groups/group_0/weights/symmetric", json!(false)),
        ("/config_groups/group_0/weights/actorder", json!("group")),
        ("/config_groups/group_0/weights/group_size", json!(12)),
    ];
    for (pointer, value) in changes {
        let problem = refusal(|config| {
            config.as_object_mut().unwrap().remove("quantization_config");
            *config["text_config"]["quantization_config"].pointer_mut(pointer).unwrap() = value;
        });
        assert!(problem.subject.ends_with(pointer.rsplit('/').next().unwrap()), "{problem}");
    }
}

#[test]
fn all_problems_are_reported_together() {
    let mut config = kimi();
    config["text_config"]["n_group"] = json!(8);
    config["text_config"]["hidden_act"] = json!("relu");
    config["text_config"].as_object_mut().unwrap().remove("kv_lora_rank");
    let text = parse(&config).unwrap_err().to_string();
    for part in
        ["text_config.n_group: found 8, wanted 1", "text_config.hidden_act: found \"relu\"", "text_config.kv_lora_rank: found nothing"]
    {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn sizes_that_do_not_fit_together_are_refused() {
    for (key, value) in
        [("num_experts_per_tok", 385), ("first_k_dense_replace", 62), ("moe_intermediate_size", 2040), ("bos_token_id", 163840)]
    {
        assert_eq!(refusal(|config| config["text_config"][key] = json!(value)).subject, key);
    }
}

#[test]
fn a_file_that_is_no_json_object_is_refused() {
    for text in ["", "[]", "{", "null"] {
        assert!(TargetConfig::parse("test", text, None).is_err(), "{text:?}");
    }
    assert!(TargetConfig::parse("test", &kimi().to_string(), Some("[")).is_err());
}

#[test]
fn a_wrong_path_is_named_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for (path, part) in [
        ("/does/not/exist".into(), "no such directory /does/not/exist"),
        ("moonshotai/Kimi-K2.6".into(), "never downloaded"),
        (file.display().to_string(), "is not a directory"),
        (directory.path().display().to_string(), "no such file in"),
    ] {
        let error = TargetConfig::load(&ModelSource::directory(&path)).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains(&path), "{error}");
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn the_embedded_model_loads() {
    let target = TargetConfig::load(&ModelSource::EmbeddedTarget).unwrap();
    let draft = DraftConfig::load(&ModelSource::EmbeddedDrafter, &target).unwrap();
    assert_eq!((target.vocab, draft.vocab), (4096, 4096));
}
