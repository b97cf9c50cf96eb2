//! ml-04: where a generation ends, and the sampling defaults.

use models::{GenerationConfig, LoadWarning, ModelError, SamplingDefaults};
use serde_json::json;

use crate::tiny::{assert_error, parse, qwen3_config, with};

/// The tiny config ends at 3 and has 32 ids.
fn load(generation: Option<&str>) -> Result<GenerationConfig, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    if let Some(text) = generation {
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
    }
    GenerationConfig::load(dir.path(), &parse(qwen3_config()).unwrap())
}

#[test]
fn list_of_end_ids_was_not_read() {
    let generation = load(Some(r#"{"eos_token_id": [7, 3, 5]}"#)).unwrap();
    assert_eq!(generation.eos_token_ids, [3, 5, 7]);
    assert!(generation.is_eos(5) && generation.is_eos(3) && !generation.is_eos(4));
}

#[test]
fn single_null_and_absent_end_ids_join_those_of_the_config() {
    for (file, expected) in [
        (Some(r#"{"eos_token_id": 5}"#), vec![3, 5]),
        (Some(r#"{"eos_token_id": null}"#), vec![3]),
        (Some(r#"{"eos_token_id": []}"#), vec![3]),
        (Some("{}"), vec![3]),
        (None, vec![3]),
    ] {
        let generation = load(file).unwrap();
        assert_eq!((generation.eos_token_ids, generation.warnings), (expected, vec![]), "{file:?}");
    }
}

#[test]
fn end_ids_outside_the_vocabulary_are_ignored_with_a_warning() {
    let generation = load(Some(r#"{"eos_token_id": [999999999, 5, -1]}"#)).unwrap();
    assert_eq!(generation.eos_token_ids, [3, 5]);
    let file = "generation_config.json";
    let ids = vec![999_999_999, -1];
    assert_eq!(generation.warnings, [LoadWarning::EosOutsideVocabulary { file, ids, vocab_size: 32 }]);
}

#[test]
fn no_end_id_anywhere_is_said() {
    let config = parse(with(qwen3_config(), [("eos_token_id", None)])).unwrap();
    let generation = GenerationConfig::load(std::path::Path::new("/nowhere"), &config).unwrap();
    assert_eq!((generation.eos_token_ids, generation.warnings), (vec![], vec![LoadWarning::NoEos]));
}

#[test]
fn broken_file_is_named() {
    assert_error(load(Some("{\"eos_token_id\": [1,")), "json", &["generation_config.json"]);
    assert_error(
        load(Some(r#"{"eos_token_id": "x"}"#)),
        "invalid_config",
        &["generation_config.json", "\"x\""],
    );
    assert_error(load(Some(r#"{"eos_token_id": [1.5]}"#)), "invalid_config", &["1.5"]);
    assert_error(load(Some(r#"{"temperature": -1}"#)), "invalid_config", &["temperature = -1"]);
    assert_error(load(Some(r#"{"top_p": 0}"#)), "invalid_config", &["top_p = 0"]);
}

#[test]
fn sampling_defaults_are_read() {
    let official = r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}"#;
    let expected = SamplingDefaults {
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        ..SamplingDefaults::default()
    };
    assert_eq!(load(Some(official)).unwrap().sampling, expected);
    assert_eq!(load(None).unwrap().sampling, SamplingDefaults::default());
    let zero_k = load(Some(&json!({"top_k": 0}).to_string())).unwrap();
    assert_eq!(zero_k.sampling.top_k, None);
}

#[test]
fn do_sample_false_is_greedy_whatever_the_temperature() {
    let sampling = load(Some(r#"{"do_sample": false, "temperature": 0.7}"#)).unwrap().sampling;
    assert_eq!(sampling.temperature, Some(0.0));
}
