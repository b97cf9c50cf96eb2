//! ml-03: tied and untied output heads.

use models::{LoadWarning, ModelConfig, ModelError, Weights};
use serde_json::json;

use crate::tiny::{Tiny, assert_error, bf16_tensor, qwen3_config, with};

fn load(tiny: &Tiny) -> Result<(ModelConfig, Vec<LoadWarning>), ModelError> {
    tiny.write_single();
    let config = ModelConfig::load(tiny.path())?;
    let warnings = Weights::open(tiny.path())?.check(&config)?;
    Ok((config, warnings))
}

fn untied() -> Tiny {
    Tiny::new(with(qwen3_config(), [("tie_word_embeddings", Some(json!(false)))]))
}

#[test]
fn tied_model_without_a_head_was_refused() {
    let (config, warnings) = load(&Tiny::new(qwen3_config())).unwrap();
    assert_eq!((config.lm_head(), warnings), ("model.embed_tokens.weight", vec![]));
}

#[test]
fn tied_model_with_an_equal_head_loads_without_a_word() {
    let mut tiny = Tiny::new(qwen3_config());
    tiny.tensors.insert("lm_head.weight".into(), bf16_tensor(&[32, 8], 0.0));
    assert_eq!(tiny.tensors["lm_head.weight"].bytes, tiny.tensors["model.embed_tokens.weight"].bytes);
    let (config, warnings) = load(&tiny).unwrap();
    assert_eq!((config.lm_head(), warnings), ("model.embed_tokens.weight", vec![]));
}

#[test]
fn tied_model_with_a_differing_head_uses_the_embedding_and_warns() {
    let mut tiny = Tiny::new(qwen3_config());
    tiny.tensors.insert("lm_head.weight".into(), bf16_tensor(&[32, 8], 5.0));
    let (config, warnings) = load(&tiny).unwrap();
    assert_eq!((config.lm_head(), warnings), ("model.embed_tokens.weight", vec![LoadWarning::HeadIgnored]));
}

#[test]
fn untied_model_uses_its_head() {
    let (config, warnings) = load(&untied()).unwrap();
    assert_eq!((config.lm_head(), warnings), ("lm_head.weight", vec![]));
}

#[test]
fn untied_model_without_a_head_was_served_with_the_embedding() {
    let mut tiny = untied();
    tiny.tensors.remove("lm_head.weight");
    assert_error(load(&tiny), "missing_tensors", &["lm_head.weight"]);
}

#[test]
fn missing_tie_flag_is_false_as_in_transformers_and_said_so() {
    let mut tiny = untied();
    tiny.config = with(tiny.config, [("tie_word_embeddings", None)]);
    let (config, _) = load(&tiny).unwrap();
    assert_eq!((config.lm_head(), config.warnings), ("lm_head.weight", vec![LoadWarning::TieDefaulted]));
    tiny.tensors.remove("lm_head.weight");
    assert_error(load(&tiny), "missing_tensors", &["lm_head.weight"]);
}
