//! ml-01 and ml-06: every tensor is there exactly once, from the file that the index names, and usable.

use half::{bf16, f16};
use models::{LoadWarning, ModelConfig, ModelError, WeightDtype, Weights, fingerprint};
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::tiny::{INDEX, Tiny, assert_error, bf16_tensor, qwen3_config, with};

fn load(tiny: &Tiny) -> Result<(Weights, Vec<LoadWarning>), ModelError> {
    let config = ModelConfig::load(tiny.path())?;
    let weights = Weights::open(tiny.path())?;
    let warnings = weights.check(&config)?;
    Ok((weights, warnings))
}

fn assert_same_values(tiny: &Tiny, weights: &Weights) {
    for (name, tensor) in &tiny.tensors {
        let view = weights.expect(name, &tensor.shape).unwrap();
        assert_eq!((view.dtype, view.bytes), (WeightDtype::BF16, &tensor.bytes[..]), "{name}");
    }
}

#[test]
fn single_file_without_index_loads() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write_single();
    let (weights, warnings) = load(&tiny).unwrap();
    assert_same_values(&tiny, &weights);
    assert_eq!(warnings, []);
}

#[test]
fn sharded_checkpoint_loads() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write_sharded();
    let (weights, warnings) = load(&tiny).unwrap();
    assert_same_values(&tiny, &weights);
    assert_eq!((weights.files().count(), warnings), (2, vec![]));
}

#[test]
fn shard_named_by_the_index_was_skipped_when_absent() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write_sharded();
    std::fs::remove_file(tiny.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert_error(load(&tiny), "missing_shards", &["model-00002-of-00002.safetensors", INDEX]);
}

#[test]
fn tensor_that_the_index_places_in_the_wrong_shard_was_taken() {
    let tiny = Tiny::new(qwen3_config());
    let mut map = tiny.write_sharded();
    map.insert("model.norm.weight".into(), "model-00001-of-00002.safetensors".into());
    tiny.write_index(&map);
    assert_error(load(&tiny), "misplaced_tensors", &["model.norm.weight is not in model-00001-of-00002"]);
}

#[test]
fn stray_consolidated_file_won_over_the_index() {
    let mut tiny = Tiny::new(qwen3_config());
    let values = tiny.tensors["model.norm.weight"].bytes.clone();
    tiny.tensors.insert("model.norm.weight".into(), bf16_tensor(&[8], 99.0));
    tiny.write_single();
    let other = std::mem::replace(&mut tiny.tensors.get_mut("model.norm.weight").unwrap().bytes, values);
    tiny.write_sharded();
    let (weights, warnings) = load(&tiny).unwrap();
    assert_same_values(&tiny, &weights);
    assert_ne!(weights.view("model.norm.weight").unwrap().bytes, other);
    assert!(matches!(&warnings[..], [LoadWarning::StrayFiles(files)] if files.0 == ["model.safetensors"]));
}

#[test]
fn missing_q_norm_left_the_layer_uninitialised() {
    let mut tiny = Tiny::new(qwen3_config());
    tiny.tensors.remove("model.layers.1.self_attn.q_norm.weight");
    tiny.write_sharded();
    assert_error(load(&tiny), "missing_tensors", &["1 tensors", "model.layers.1.self_attn.q_norm.weight"]);
}

#[test]
fn all_missing_tensors_are_named_up_to_ten() {
    let mut tiny = Tiny::new(qwen3_config());
    tiny.tensors.retain(|name, _| !name.contains("layers"));
    tiny.write_single();
    let parts = ["22 tensors", "model.layers.0.input_layernorm.weight", "; and 12 more"];
    assert_error(load(&tiny), "missing_tensors", &parts);
}

#[test]
fn tensor_of_the_wrong_shape_was_read_as_if_it_fit() {
    let mut tiny = Tiny::new(qwen3_config());
    let name = "model.layers.0.self_attn.k_proj.weight";
    tiny.tensors.insert(name.into(), bf16_tensor(&[4, 8], 0.0));
    tiny.write_single();
    assert_error(load(&tiny), "wrong_shape", &[name, "[4, 8]", "expected [8, 8]"]);
}

#[test]
fn tensor_of_an_unusable_dtype_failed_only_at_the_first_request() {
    let mut tiny = Tiny::new(qwen3_config());
    let tensor = tiny.tensors.get_mut("model.norm.weight").unwrap();
    tensor.dtype = Dtype::I16;
    tiny.write_single();
    assert_error(load(&tiny), "wrong_dtype", &["model.norm.weight is I16", "BF16, F16 or F32"]);
}

#[test]
fn unknown_extra_tensor_is_ignored_with_a_warning() {
    let mut tiny = Tiny::new(qwen3_config());
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    tiny.tensors.insert(name.into(), bf16_tensor(&[2], 0.0));
    tiny.write_single();
    let (_, warnings) = load(&tiny).unwrap();
    assert!(matches!(&warnings[..], [LoadWarning::UnknownTensors(names)] if names.0 == [name]));
}

#[test]
fn tensor_that_the_index_omits_was_found_by_accident() {
    let tiny = Tiny::new(qwen3_config());
    let mut map = tiny.write_sharded();
    map.remove("model.norm.weight");
    tiny.write_index(&map);
    assert_error(load(&tiny), "missing_tensors", &["model.norm.weight"]);
}

#[test]
fn truncated_index_is_named() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write_sharded();
    let whole = std::fs::read(tiny.path().join(INDEX)).unwrap();
    tiny.write(INDEX, &whole[..whole.len() / 2]);
    assert_error(load(&tiny), "json", &[INDEX]);
}

#[test]
fn index_without_a_usable_weight_map_is_named() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write_sharded();
    for (index, part) in [
        (json!({"metadata": {}}), "no weight_map"),
        (json!({"weight_map": []}), "not an object"),
        (json!({"weight_map": {}}), "empty"),
        (json!({"weight_map": {"a": 1}}), "not a string"),
        (json!([]), "no weight_map"),
    ] {
        tiny.write(INDEX, index.to_string());
        assert_error(load(&tiny), "bad_index", &[INDEX, part]);
    }
}

#[test]
fn index_that_points_out_of_the_folder_was_followed() {
    let outside = Tiny::new(qwen3_config());
    outside.write_single();
    let tiny = Tiny::new(qwen3_config());
    let absolute = outside.path().join("model.safetensors");
    for file in
        ["../x.safetensors", "a/x.safetensors", "./x.safetensors", "..", "", absolute.to_str().unwrap()]
    {
        let mut map = tiny.write_sharded();
        map.insert("model.norm.weight".into(), file.into());
        tiny.write_index(&map);
        assert_error(load(&tiny), "bad_index", &[INDEX, "model.norm.weight", &format!("{file:?}")]);
    }
}

#[test]
fn truncated_file_is_named() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write_single();
    let whole = std::fs::read(tiny.path().join("model.safetensors")).unwrap();
    for length in [0, 5, 100, whole.len() - 1] {
        tiny.write("model.safetensors", &whole[..length]);
        assert_error(load(&tiny), "bad_shard", &["model.safetensors", &format!("({length} bytes)")]);
    }
    tiny.write("model.safetensors", [&whole[..], b"x"].concat());
    assert_error(load(&tiny), "bad_shard", &["model.safetensors"]);
}

#[test]
fn folder_without_safetensors_says_what_it_found() {
    let tiny = Tiny::new(qwen3_config());
    tiny.write("config.json", tiny.config.to_string());
    assert_error(load(&tiny), "no_weights", &["found no weight file"]);
    tiny.write("pytorch_model.bin", "x");
    assert_error(load(&tiny), "no_weights", &["pytorch_model.bin", "model.safetensors"]);
}

#[test]
fn qwen2_needs_qkv_biases_and_no_norms() {
    let config = with(qwen3_config(), [("architectures", Some(json!(["Qwen2ForCausalLM"])))]);
    let mut tiny = Tiny::new(config);
    assert!(!tiny.tensors.keys().any(|name| name.contains("q_norm")));
    tiny.write_single();
    load(&tiny).unwrap();
    tiny.tensors.remove("model.layers.0.self_attn.v_proj.bias");
    tiny.write_single();
    assert_error(load(&tiny), "missing_tensors", &["model.layers.0.self_attn.v_proj.bias"]);
}

#[test]
fn mixed_dtypes_convert_exactly_to_f32_and_by_rounding_to_bf16() {
    let mut tiny = Tiny::new(qwen3_config());
    // 1 + 2^-8 lies half-way between two bf16 numbers: the even one is 1; 1 + 3 * 2^-8 rounds up to even.
    let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -0.0, 65504.0, 6e-8, 0.5, -3.0, 2.0f32];
    let rounded = [1.0, 1.015625, -0.0, 65536.0, 5.9604645e-8, 0.5, -3.0, 2.0f32];
    let halves: Vec<f16> = values.map(f16::from_f32).to_vec();
    let norm = tiny.tensors.get_mut("model.norm.weight").unwrap();
    (norm.dtype, norm.bytes) = (Dtype::F16, halves.iter().flat_map(|x| x.to_le_bytes()).collect());
    let other = tiny.tensors.get_mut("model.layers.0.input_layernorm.weight").unwrap();
    (other.dtype, other.bytes) = (Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect());
    tiny.write_single();

    let (weights, _) = load(&tiny).unwrap();
    let exact: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
    assert_eq!(weights.tensor_f32("model.norm.weight").unwrap(), exact);
    assert_eq!(weights.tensor_f32("model.layers.0.input_layernorm.weight").unwrap(), values);
    assert_eq!(weights.tensor_bf16("model.norm.weight").unwrap(), rounded.map(bf16::from_f32));
    let from_f32 = weights.tensor_bf16("model.layers.0.input_layernorm.weight").unwrap();
    assert_eq!(from_f32[..4], rounded.map(bf16::from_f32)[..4]);
    assert_error(weights.expect("model.norm.weight", &[7]), "wrong_shape", &["[8]", "expected [7]"]);
    assert_error(weights.view("nothing"), "missing_tensors", &["nothing"]);
}

#[test]
fn fingerprint_tells_models_apart_and_not_their_files() {
    let print = |tiny: &Tiny| {
        let (weights, _) = load(tiny).unwrap();
        fingerprint(&ModelConfig::load(tiny.path()).unwrap(), &weights).unwrap()
    };
    let mut tiny = Tiny::new(qwen3_config());
    tiny.write_single();
    let single = print(&tiny);
    tiny.write_sharded();
    assert_eq!(print(&tiny), single);

    tiny.config = with(qwen3_config(), [("rope_theta", Some(json!(1_000_000)))]);
    tiny.write_sharded();
    assert_ne!(print(&tiny), single);

    tiny.config = qwen3_config();
    tiny.tensors.insert("model.norm.weight".into(), bf16_tensor(&[8], 99.0));
    tiny.write_sharded();
    assert_ne!(print(&tiny), single);
}
