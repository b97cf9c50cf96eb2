//! The demo's tokenizer and the streaming detokenizer (api-01, api-03).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::{Detokenizer, ModelFiles, StopMatcher, TextFiles, Tokenizer};
use proptest::prelude::*;

use crate::tiny::assert_error;

pub fn demo_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo")
}

fn demo() -> Arc<Tokenizer> {
    static DEMO: std::sync::OnceLock<Arc<Tokenizer>> = std::sync::OnceLock::new();
    Arc::clone(DEMO.get_or_init(|| Arc::new(Tokenizer::load(&demo_dir()).unwrap())))
}

/// The same file, decoded by the library itself.
fn library() -> &'static tokenizers::Tokenizer {
    static LIBRARY: std::sync::OnceLock<tokenizers::Tokenizer> = std::sync::OnceLock::new();
    LIBRARY.get_or_init(|| tokenizers::Tokenizer::from_file(demo_dir().join("tokenizer.json")).unwrap())
}

fn deltas(ids: &[u32], skip: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(demo(), skip);
    let mut deltas: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
    deltas.push(detokenizer.flush());
    deltas
}

#[test]
fn demo_loads_whole() {
    let files = ModelFiles::load(&demo_dir()).unwrap();
    assert_eq!(files.warnings, []);
    assert!(files.chat_template.is_some());
    assert_eq!(files.fingerprint.len(), 32);
    let end = files.tokenizer.token_to_id("<|im_end|>").unwrap();
    assert!(files.generation.is_eos(end));
}

#[test]
fn characters_over_several_tokens_came_out_as_replacement_characters() {
    let text = "🫠🥹龜𠮷 👨‍👩‍👧‍👦 T́";
    let ids = demo().encode(text, false).unwrap();
    let deltas = deltas(&ids, true);
    assert_eq!(deltas.concat(), demo().decode(&ids, true));
    assert!(deltas.iter().all(|delta| !delta.contains('\u{FFFD}')));
    assert!(deltas[..ids.len() - 1].iter().any(|delta| !delta.is_empty()));
}

#[test]
fn text_cut_inside_a_character_ends_as_the_plain_decode_does() {
    let ids = demo().encode("ok 🫠", false).unwrap();
    let cut = &ids[..ids.len() - 1];
    assert_eq!(deltas(cut, true).concat(), demo().decode(cut, true));
    assert_eq!(demo().decode(cut, true), library().decode(cut, true).unwrap());
}

proptest! {
    #[test]
    fn joined_deltas_are_the_decode_of_any_ids(
        ids in proptest::collection::vec(0u32..4300, 0..60),
        skip in any::<bool>(),
    ) {
        let expected = library().decode(&ids, skip).unwrap();
        prop_assert_eq!(demo().decode(&ids, skip), expected.clone());
        prop_assert_eq!(deltas(&ids, skip).concat(), expected);
    }

    #[test]
    fn encoded_text_streams_back(text in ".{0,40}", skip in any::<bool>()) {
        let ids = demo().encode(&text, false).unwrap();
        let expected = library().decode(&ids, skip).unwrap();
        prop_assert_eq!(deltas(&ids, skip).concat(), expected);
    }

    #[test]
    fn stop_strings_cut_a_token_stream_where_they_cut_the_text(
        text in "[abc 🫠é]{0,40}",
        stop in "[abc 🫠é]{1,5}",
    ) {
        let ids = demo().encode(&text, false).unwrap();
        let whole = demo().decode(&ids, true);
        let expected = whole.find(&stop).map_or(&whole[..], |at| &whole[..at]);
        let mut matcher = StopMatcher::new(vec![stop.clone()]).unwrap();
        let mut streamed = String::new();
        for delta in deltas(&ids, true) {
            streamed.push_str(&matcher.push(&delta).text);
            prop_assert!(expected.starts_with(&streamed));
        }
        streamed.push_str(&matcher.flush());
        prop_assert_eq!(streamed, expected);
    }
}

/// The pattern that splits words has a lookahead, for which the regex engine backtracks, up to a limit.
#[test]
fn long_run_of_whitespace_was_split_otherwise_than_a_short_one() {
    let encode = |spaces: usize| demo().encode(&(" ".repeat(spaces) + "a"), false).unwrap();
    let (short, long) = (encode(100), encode(2_000_000));
    assert_eq!(short.last(), demo().encode(" a", false).unwrap().last());
    assert_eq!(short.last(), long.last());
    assert_eq!(demo().decode(&long, true).len(), 2_000_001);
}

#[test]
fn special_tokens_in_text_become_those_tokens() {
    let tokenizer = demo();
    let ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", false).unwrap();
    let special = |name| tokenizer.token_to_id(name).unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1]), (special("<|im_start|>"), special("<|im_end|>")));
    assert_eq!(tokenizer.decode(&ids, true), "user\nHi");
    assert_eq!(tokenizer.decode(&ids, false), "<|im_start|>user\nHi<|im_end|>");
    assert_eq!(ids, tokenizer.encode("<|im_start|>user\nHi<|im_end|>", true).unwrap());
}

#[test]
fn rows_without_a_token_could_be_sampled() {
    let text = TextFiles::load(&demo_dir()).unwrap();
    let (tokenizer, vocab_size) = (&text.tokenizer, text.config.vocab_size);
    let mask = tokenizer.valid_token_mask(vocab_size);
    assert_eq!(mask.len(), vocab_size);
    assert_eq!(mask.iter().filter(|valid| **valid).count(), tokenizer.num_tokens());
    let first = tokenizer.first_id_without_token();
    assert_eq!(first as usize, tokenizer.num_tokens());
    assert!(!mask.get(first as usize).copied().unwrap_or(false));
    assert_eq!(tokenizer.token_bytes(first), None);
    assert_eq!(tokenizer.decode(&[first, u32::MAX], false), "");
}

#[test]
fn tokenizer_of_another_model_is_refused() {
    assert_error(demo().check_vocab_size(100), "tokenizer_too_large", &["100 rows", "tokenizer.json"]);
}

#[test]
fn missing_or_broken_tokenizer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    assert_error(Tokenizer::load(dir.path()), "missing_file", &["tokenizer.json"]);
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert_error(Tokenizer::load(dir.path()), "bad_tokenizer", &["tokenizer.json"]);
    let other = r#"{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;
    std::fs::write(dir.path().join("tokenizer.json"), other).unwrap();
    assert_error(Tokenizer::load(dir.path()), "bad_tokenizer", &["ByteLevel"]);
}
