//! What `Config::from_json` reads, and what it says of every setting that it cannot accept.

use lily_checkpoint::testing::shared;
use lily_checkpoint::{Config, Error};
use serde_json::{Value, json};

/// The full model's config as a value to spoil.
fn full() -> Value {
    serde_json::from_str(&Config::full().to_json()).unwrap()
}

fn problems(value: &Value) -> Vec<String> {
    match Config::from_json(&value.to_string()) {
        Ok(_) => Vec::new(),
        Err(Error::Config(problems)) => problems,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_written_config_reads_back() {
    let full = Config::full();
    assert_eq!(Config::from_json(&full.to_json()).unwrap(), full);
    let small = Config {
        vocab: 320,
        dim: 64,
        layers: 3,
        attention_every: 2,
        q_heads: 2,
        kv_heads: 1,
        head_dim: 32,
        rotary_dim: 8,
        rope_theta: 1e4,
        delta_k_heads: 1,
        delta_v_heads: 2,
        delta_head_dim: 32,
        experts: 4,
        experts_per_token: 2,
        expert_hidden: 64,
        eps: 1e-5,
        max_positions: 128,
        stop_ids: vec![7],
    };
    assert_eq!(Config::from_json(&small.to_json()).unwrap(), small);
    assert!(full.other_sizes().is_empty());
    assert!(small.other_sizes().contains(&("hidden_size", 64, 2048)));
}

#[test]
fn each_deviation_is_named() {
    // (path, value to set; null removes, what the one problem must say)
    let cases: &[(&str, Value, &str)] = &[
        ("/model_type", json!("llama"), r#"model_type: expected "qwen3_5_moe", found "llama""#),
        ("/model_type", Value::Null, "model_type: missing"),
        ("/text_config", Value::Null, "text_config: missing"),
        ("/text_config", json!([1]), "text_config: expected an object, found [1]"),
        ("/tie_word_embeddings", json!(true), "tie_word_embeddings: expected false, found true"),
        ("/text_config/model_type", json!("x"), "text_config.model_type"),
        ("/text_config/hidden_act", json!("gelu"), r#"hidden_act: expected "silu", found "gelu""#),
        ("/text_config/attn_output_gate", json!(false), "attn_output_gate: expected true"),
        ("/text_config/attention_bias", json!(true), "attention_bias: expected false"),
        ("/text_config/norm_topk_prob", json!(false), "norm_topk_prob: expected true"),
        ("/text_config/decoder_sparse_step", json!(2), "decoder_sparse_step: expected 1"),
        ("/text_config/mlp_only_layers", json!([0]), "mlp_only_layers: expected an empty list"),
        ("/text_config/rope_scaling", json!({"type": "yarn"}), "rope_scaling: expected nothing"),
        ("/text_config/linear_conv_kernel_dim", json!(3), "linear_conv_kernel_dim: expected 4"),
        ("/text_config/linear_value_head_dim", json!(64), "linear_value_head_dim: expected 128"),
        (
            "/text_config/shared_expert_intermediate_size",
            json!(1024),
            "shared_expert_intermediate_size: expected 512",
        ),
        ("/text_config/num_experts_per_tok", json!(257), "num_experts_per_tok: expected at most"),
        ("/text_config/num_key_value_heads", json!(3), "num_attention_heads: expected a multiple"),
        ("/text_config/linear_num_key_heads", json!(5), "linear_num_value_heads: expected a mult"),
        ("/text_config/hidden_size", json!(2047), "hidden_size is 2047, expected a multiple"),
        ("/text_config/hidden_size", json!(0), "hidden_size: expected a whole number from 1"),
        ("/text_config/hidden_size", json!(-2048), "found -2048"),
        ("/text_config/hidden_size", json!(2048.5), "found 2048.5"),
        ("/text_config/hidden_size", json!("2048"), r#"found "2048""#),
        ("/text_config/hidden_size", json!(u64::MAX), "found 18446744073709551615"),
        ("/text_config/hidden_size", Value::Null, "hidden_size: missing"),
        ("/text_config/rms_norm_eps", json!(0.0), "rms_norm_eps: expected a number"),
        ("/text_config/rms_norm_eps", json!(-1e-6), "rms_norm_eps: expected a number"),
        ("/text_config/rms_norm_eps", json!("NaN"), "rms_norm_eps: expected a number"),
        ("/text_config/rms_norm_eps", json!(1e300), "rms_norm_eps: expected a number"),
        ("/text_config/rope_parameters", Value::Null, "rope_parameters: missing"),
        (
            "/text_config/rope_parameters/rope_type",
            json!("yarn"),
            r#"rope_parameters.rope_type: expected "default", found "yarn""#,
        ),
        ("/text_config/rope_parameters/type", json!("linear"), "rope_parameters.type"),
        ("/text_config/rope_parameters/rope_theta", json!(0), "rope_theta: expected a number"),
        (
            "/text_config/rope_parameters/partial_rotary_factor",
            json!(0.3),
            "partial_rotary_factor: head_dim * factor is 76.8, expected an even number",
        ),
        ("/text_config/rope_parameters/partial_rotary_factor", json!(2), "at most 1, found 2"),
        ("/text_config/layer_types", json!("x"), "layer_types: expected a list"),
        ("/text_config/layer_types/3", json!("linear_attention"), "layer_types[3]: expected"),
        ("/text_config/full_attention_interval", json!(2), "layer_types[1]: expected"),
        ("/eos_token_id", json!([248046, 248320]), "eos_token_id: expected ids below vocab_size"),
        ("/eos_token_id", json!(-1), "eos_token_id: expected ids below"),
        ("/eos_token_id", json!([]), "eos_token_id: expected 1 to 64 ids, found 0"),
        ("/eos_token_id", Value::Null, "eos_token_id: missing"),
        ("/quantization/bits", json!(8), "quantization.bits: expected 4, found 8"),
        ("/quantization/group_size", json!(32), "quantization.group_size: expected 64, found 32"),
        ("/quantization/mode", json!("mxfp4"), r#"mode: expected "affine", found "mxfp4""#),
        (
            "/quantization/language_model.model.layers.3.mlp.gate/bits",
            json!(4),
            "layers.3.mlp.gate: expected 8 bits, group size 64, found",
        ),
        (
            "/quantization/language_model.model.layers.3.mlp.gate",
            Value::Null,
            "layers.3.mlp.gate: expected an override to 8 bits, found none",
        ),
        (
            "/quantization/language_model.lm_head",
            json!({"group_size": 64, "bits": 6}),
            "lm_head: expected 4 bits, group size 64, found",
        ),
        (
            "/quantization/language_model.lm_head",
            json!(false),
            "lm_head: expected 4 bits, group size 64, found false",
        ),
    ];
    for (path, new, expected) in cases {
        let mut value = full();
        let (parent, key) = path.rsplit_once('/').unwrap();
        let parent = value.pointer_mut(parent).unwrap();
        match (parent, new) {
            (Value::Object(object), Value::Null) => drop(object.remove(key)),
            (Value::Object(object), new) => drop(object.insert(key.into(), new.clone())),
            (Value::Array(array), new) => array[key.parse::<usize>().unwrap()] = new.clone(),
            (other, _) => panic!("{path}: {other}"),
        }
        let found = problems(&value);
        assert_eq!(found.len(), 1, "{path} = {new}: {found:#?}");
        assert!(found[0].contains(expected), "{path} = {new}: {}", found[0]);
    }
}

#[test]
fn all_deviations_come_at_once() {
    let mut value = full();
    value["text_config"]["hidden_act"] = json!("gelu");
    value["text_config"]["vocab_size"] = json!(0);
    value["quantization"]["bits"] = json!(8);
    let found = problems(&value);
    assert_eq!(found.len(), 3, "{found:#?}");
}

#[test]
fn missing_overrides_are_one_line_a_module() {
    let mut value = full();
    value["quantization"] = json!({"group_size": 64, "bits": 4});
    let found = problems(&value);
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found[0].contains("(layers 0-39)"), "{}", found[0]);
}

#[test]
fn an_override_that_repeats_the_default_or_concerns_vision_is_accepted() {
    let mut value = full();
    value["quantization"]["language_model.lm_head"] = json!({"group_size": 64, "bits": 4});
    value["quantization"]["language_model.model.embed_tokens"] = json!(true);
    value["quantization"]["vision_tower.blocks.0.attn.qkv"] = json!(false);
    assert!(problems(&value).is_empty());
}

#[test]
fn other_quantisers_are_named() {
    let mut value = full();
    value.as_object_mut().unwrap().remove("quantization");
    value["quantization_config"] = json!({"quant_method": "awq", "bits": 4, "group_size": 128});
    assert_eq!(
        problems(&value),
        [r#"quantization_config.quant_method: expected MLX affine quantisation, found "awq""#]
    );
    value.as_object_mut().unwrap().remove("quantization_config");
    assert!(problems(&value)[0].starts_with("quantization: missing"));
}

#[test]
fn stop_ids_come_from_the_top_level() {
    let mut value = full();
    value["text_config"]["eos_token_id"] = json!(248_044);
    let stop_ids = |value: &Value| Config::from_json(&value.to_string()).unwrap().stop_ids;
    assert_eq!(stop_ids(&value), [248_046, 248_044]);
    value["eos_token_id"] = json!(5);
    assert_eq!(stop_ids(&value), [5]);
    // Qwen's text_config alone would never end a turn.
    value["eos_token_id"] = Value::Null;
    assert_eq!(stop_ids(&value), [248_046, 248_044]);
    value["text_config"]["eos_token_id"] = json!([9, 9, 8]);
    assert_eq!(stop_ids(&value), [9, 8]);
}

#[test]
fn text_that_is_no_object_is_an_error() {
    for (text, expected) in [
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("[]", "expected a JSON object, found []"),
        ("{", "not valid JSON"),
        ("{\"a\": NaN}", "not valid JSON"),
        ("{\"a\": 1e999}", "not valid JSON"),
        (&"[".repeat(100_000), "not valid JSON"),
    ] {
        let error = Config::from_json(text).unwrap_err().to_string();
        assert!(error.starts_with("config.json: "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_published_configs_read() {
    let Some(shared) = shared() else { return };
    let read = |path: &str| {
        Config::from_json(&std::fs::read_to_string(shared.join(path)).unwrap()).unwrap()
    };
    assert_eq!(read("spec/mlx_config.json"), Config::full());
    let tiny = read("spec/tiny/config.json");
    assert_eq!((tiny.vocab, tiny.rotary_dim, tiny.stop_ids), (512, 16, vec![0]));
    let smoke = read("demo-lab/smoke_mlx4/config.json");
    assert_eq!((smoke.vocab, smoke.rotary_dim, smoke.experts), (1792, 32, 16));
    // What the unconverted one lacks is its quantisation alone.
    let hf = std::fs::read_to_string(shared.join("spec/hf_config.json")).unwrap();
    let problems = problems(&serde_json::from_str(&hf).unwrap());
    assert_eq!(problems.len(), 1, "{problems:#?}");
    assert!(problems[0].starts_with("quantization: missing"));
}
