//! Whether a tokenizer.json is of the one shape that [`super::Bpe`] knows, and its tables.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use super::byte_alphabet;
use super::split::PATTERN;

/// The vocabulary and what is done with it.
pub(super) struct Shape {
    /// The bytes of each token and its id. Tokens that are not spelled in the alphabet for bytes are not among them: no
    /// word is ever one of them.
    pub tokens: Vec<(Vec<u8>, u32)>,
    /// The token of each byte.
    pub bytes: [u32; 256],
    /// Left, right, both together; the earlier goes first.
    pub merges: Vec<(u32, u32, u32)>,
    /// Tokens that are looked for in the text, and their ids.
    pub added: Vec<(String, u32)>,
}

#[derive(Deserialize)]
struct File {
    normalizer: Value,
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
    merges: Vec<Pair>,
    #[serde(flatten)]
    settings: HashMap<String, Value>,
}

/// Both spellings of a merge that exist.
#[derive(Deserialize)]
#[serde(untagged)]
enum Pair {
    Two(String, String),
    Spaced(String),
}

impl Pair {
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Two(left, right) => Some((left, right)),
            Self::Spaced(both) => both.split_once(' ').filter(|(_, right)| !right.contains(' ')),
        }
    }
}

impl Shape {
    /// Reads `json`; the error says what in it is not known.
    pub fn read(json: &[u8], inner: &tokenizers::Tokenizer) -> Result<Self, String> {
        let file: File = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        check_settings(&file)?;
        let vocab = &file.model.vocab;
        let alphabet = byte_alphabet();
        let mut bytes = [0; 256];
        for (c, byte) in &alphabet {
            let id = vocab.get(c.encode_utf8(&mut [0; 4]) as &str);
            bytes[usize::from(*byte)] = *id.ok_or_else(|| format!("byte {byte:#04x} has no token"))?;
        }
        let spelled =
            |token: &str| token.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Vec<u8>>>();
        let mut tokens: Vec<_> =
            vocab.iter().filter_map(|(token, id)| Some((spelled(token)?, *id))).collect();
        tokens.sort_unstable_by_key(|(_, id)| *id);
        if tokens.windows(2).any(|two| two[0].1 == two[1].1) {
            return Err("two tokens have the same id".into());
        }
        let merge = |pair: &Pair| {
            let (left, right) = pair.parts()?;
            Some((*vocab.get(left)?, *vocab.get(right)?, *vocab.get(&format!("{left}{right}"))?))
        };
        let merges = file.model.merges.iter().map(merge).collect::<Option<_>>();
        Ok(Self { tokens, bytes, merges: merges.ok_or("a merge of unknown tokens")?, added: added(inner)? })
    }
}

fn check_settings(file: &File) -> Result<(), String> {
    let normalizer = &file.normalizer;
    if *normalizer != serde_json::json!({"type": "NFC"}) {
        return Err(format!("normalizer {normalizer}"));
    }
    // `trim_offsets` is about offsets, which nobody asks for here.
    let byte_level = |value: &Value| {
        value["type"] == "ByteLevel" && value["add_prefix_space"] == false && value["use_regex"] == false
    };
    let splits = &file.pre_tokenizer["pretokenizers"];
    let known = match splits.as_array().map(Vec::as_slice) {
        Some([split, bytes]) => {
            *split
                == serde_json::json!({
                    "type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": false
                })
                && byte_level(bytes)
        }
        _ => false,
    };
    if file.pre_tokenizer["type"] != "Sequence" || !known {
        return Err(format!("pre_tokenizer {}", file.pre_tokenizer));
    }
    let post = &file.post_processor;
    if !post.is_null() && post["type"] != "ByteLevel" {
        return Err(format!("post_processor {post}"));
    }
    for (key, value) in &file.model.settings {
        let known = match key.as_str() {
            "type" => value == "BPE",
            "unk_token" => value.is_null(),
            "dropout" => value.is_null() || *value == 0.0,
            "continuing_subword_prefix" | "end_of_word_suffix" => value.is_null() || value == "",
            // Every byte has a token, so nothing is unknown.
            "fuse_unk" | "byte_fallback" => true,
            "ignore_merges" => value == false,
            _ => false,
        };
        if !known {
            return Err(format!("model.{key} = {value}"));
        }
    }
    Ok(())
}

fn added(inner: &tokenizers::Tokenizer) -> Result<Vec<(String, u32)>, String> {
    let known = |token: &tokenizers::AddedToken| {
        !(token.normalized || token.single_word || token.lstrip || token.rstrip || token.content.is_empty())
    };
    let mut added = Vec::new();
    for (id, token) in inner.get_added_tokens_decoder() {
        if !known(&token) {
            return Err(format!("added token {:?}", token.content));
        }
        added.push((token.content, id));
    }
    Ok(added)
}
