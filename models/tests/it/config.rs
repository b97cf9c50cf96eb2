//! ml-05 and the rest of `config.json`: what the forward pass lacks is refused by name.

use models::{Architecture, ModelConfig};
use serde_json::{Value, json};

use crate::tiny::{assert_error, parse, qwen3_config, with};

#[test]
fn official_qwen3_config_parses() {
    let config = parse(json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
    }));
    let expected = ModelConfig {
        architecture: Architecture::Qwen3,
        hidden_size: 1024,
        num_hidden_layers: 28,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        head_dim: 128,
        intermediate_size: 3072,
        vocab_size: 151936,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        max_position_embeddings: 40960,
        tie_word_embeddings: true,
        qkv_bias: false,
        o_bias: false,
        qk_norm: true,
        eos_token_ids: vec![151645],
        warnings: vec![],
    };
    assert_eq!(config.unwrap(), expected);
}

#[test]
fn biases_and_norms_follow_the_architecture() {
    let flags = |name: &str, bias: bool| {
        let changes = [("architectures", Some(json!([name]))), ("attention_bias", Some(json!(bias)))];
        let config = parse(with(qwen3_config(), changes)).unwrap();
        (config.qkv_bias, config.o_bias, config.qk_norm)
    };
    assert_eq!(flags("Qwen3ForCausalLM", false), (false, false, true));
    assert_eq!(flags("Qwen3ForCausalLM", true), (true, true, true));
    assert_eq!(flags("Qwen2ForCausalLM", false), (true, false, false));
}

#[test]
fn head_dim_that_is_not_given_follows_transformers() {
    let head_dim = |name: &str, value: Option<Value>| {
        let changes = [("architectures", Some(json!([name]))), ("head_dim", value)];
        parse(with(qwen3_config(), changes)).unwrap().head_dim
    };
    assert_eq!(head_dim("Qwen3ForCausalLM", Some(json!(6))), 6);
    assert_eq!(head_dim("Qwen3ForCausalLM", Some(Value::Null)), 2);
    assert_eq!(head_dim("Qwen3ForCausalLM", None), 128);
    assert_eq!(head_dim("Qwen2ForCausalLM", None), 2);
}

#[test]
fn other_architectures_are_refused_with_the_names() {
    for (architectures, found) in [
        (json!(["Qwen3MoeForCausalLM"]), "Qwen3MoeForCausalLM"),
        (json!(["LlamaForCausalLM"]), "LlamaForCausalLM"),
        (json!(["Qwen3ForCausalLM", "Other"]), "Qwen3ForCausalLM, Other"),
        (json!([]), "(none)"),
        (Value::Null, "(none)"),
    ] {
        let config = with(qwen3_config(), [("architectures", Some(architectures))]);
        let parts = ["config.json", found, "expected Qwen3ForCausalLM or Qwen2ForCausalLM"];
        assert_error(parse(config), "unsupported_architecture", &parts);
    }
}

#[test]
fn rope_scaling_was_ignored() {
    for (scaling, name) in [
        (json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), "yarn"),
        (json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (json!({"type": "dynamic", "factor": 2}), "dynamic"),
        (json!({"type": "made-up"}), "made-up"),
    ] {
        for key in ["rope_scaling", "rope_parameters"] {
            let config = with(qwen3_config(), [(key, Some(scaling.clone()))]);
            assert_error(parse(config), "unsupported_config", &[key, name]);
        }
    }
    for odd in [json!("yarn"), json!({"rope_type": 3}), json!({"full_attention": {"rope_type": "yarn"}})] {
        assert_error(
            parse(with(qwen3_config(), [("rope_scaling", Some(odd))])),
            "invalid_config",
            &["rope_scaling"],
        );
    }
}

#[test]
fn rope_theta_is_read_from_each_place() {
    let theta = |changes| parse(with(qwen3_config(), changes)).unwrap().rope_theta;
    let nested = json!({"rope_type": "default", "rope_theta": 5e5});
    assert_eq!(theta([("rope_theta", Some(json!(1_000_000))), ("x", None)]), 1e6);
    assert_eq!(theta([("rope_theta", None), ("rope_parameters", Some(nested.clone()))]), 5e5);
    assert_eq!(theta([("rope_theta", Some(json!(7.0))), ("rope_parameters", Some(nested.clone()))]), 5e5);
    assert_eq!(theta([("rope_theta", None), ("rope_scaling", Some(nested))]), 5e5);
    assert_eq!(theta([("rope_theta", None), ("rope_scaling", Some(json!({"type": "default"})))]), 10_000.0);
}

#[test]
fn variants_that_would_be_computed_wrongly_are_refused_by_name() {
    for (key, value) in [
        ("use_sliding_window", json!(true)),
        ("hidden_act", json!("gelu")),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("quantization_config", json!({"quant_method": "awq"})),
        ("partial_rotary_factor", json!(0.5)),
    ] {
        assert_error(parse(with(qwen3_config(), [(key, Some(value))])), "unsupported_config", &[key]);
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_with_their_values() {
    for (key, value, part) in [
        ("hidden_size", json!(0), "hidden_size = 0"),
        ("num_attention_heads", json!(0), "num_attention_heads = 0"),
        ("num_key_value_heads", json!(0), "num_key_value_heads = 0"),
        ("num_key_value_heads", json!(3), "a divisor of num_attention_heads = 4"),
        ("num_key_value_heads", json!(8), "num_key_value_heads = 8"),
        ("head_dim", json!(5), "head_dim = 5"),
        ("num_hidden_layers", json!(1u64 << 60), "num_hidden_layers"),
        ("rms_norm_eps", json!(0.0), "rms_norm_eps = 0"),
        ("rope_theta", json!(-1.0), "rope_theta = -1"),
        ("eos_token_id", json!("x"), "eos_token_id"),
    ] {
        assert_error(
            parse(with(qwen3_config(), [(key, Some(value))])),
            "invalid_config",
            &["config.json", part],
        );
    }
}

#[test]
fn missing_or_mistyped_sizes_are_named() {
    assert_error(parse(with(qwen3_config(), [("hidden_size", None)])), "json", &["hidden_size"]);
    assert_error(
        parse(with(qwen3_config(), [("vocab_size", Some(json!(-1)))])),
        "json",
        &["config.json", "-1"],
    );
}

#[test]
fn missing_or_broken_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    assert_error(ModelConfig::load(dir.path()), "missing_file", &["config.json"]);
    std::fs::write(dir.path().join("config.json"), "{\"a\": ").unwrap();
    assert_error(ModelConfig::load(dir.path()), "json", &["config.json"]);
}
