//! The tokenizer: text to ids, ids to bytes, and which ids have a token at all.
//!
//! Only byte-level BPE is accepted, which is what Qwen's models have. There every id stands for a fixed
//! string of bytes, whatever is around it; the streaming detokenizer rests on that.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::DecoderWrapper;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::ModelError;
use crate::files::{read, read_json};

const FILE: &str = "tokenizer.json";

/// A loaded `tokenizer.json` with what `tokenizer_config.json` adds to it. Immutable; share it in an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    config: TokenizerConfig,
    pieces: Pieces,
    fingerprint: u64,
}

/// The part of `tokenizer_config.json` that serving needs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenizerConfig {
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub pad_token: Option<String>,
    /// A template, or a list of `{name, template}`. `chat_template.jinja` has precedence.
    pub chat_template: Option<Value>,
}

impl Tokenizer {
    /// Reads `dir/tokenizer.json`, and `dir/tokenizer_config.json` where there is one.
    ///
    /// # Errors
    /// A missing or broken file, or a tokenizer that is not byte-level.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join(FILE);
        let bytes = read(&path)?.ok_or_else(|| ModelError::MissingFile {
            dir: dir.to_owned(),
            file: FILE,
            hint: String::new(),
        })?;
        let bad = |reason: String| ModelError::BadTokenizer { path: path.clone(), reason };
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| bad(error.to_string()))?;
        match inner.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => {}
            _ => return Err(bad("its decoder is not ByteLevel; only byte-level BPE is supported".into())),
        }
        // As in transformers, these two are a caller's choice, and no caller here wants them.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        let pieces = Pieces::new(&inner);
        let config = TokenizerConfig::load(dir)?;
        Ok(Self { inner, config, pieces, fingerprint: xxh3_64(&bytes), path })
    }

    /// Token ids of `text`. Special tokens that are spelled out in it become those tokens, as in vLLM's
    /// completions. `add_special_tokens` runs the post-processor; Qwen's adds nothing.
    ///
    /// # Errors
    /// The tokenizer itself fails.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, add_special_tokens);
        let encoding = encoding.map_err(|error| ModelError::Tokenize { reason: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids without a token are skipped.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let kept = ids.iter().filter(|id| !(skip_special_tokens && self.is_special(**id)));
        let bytes: Vec<u8> = kept.filter_map(|id| self.token_bytes(*id)).flatten().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that `id` stands for, or `None` when no token has this id. They may be part of a character.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id)
    }

    /// True for control tokens such as `<|im_end|>`, which `skip_special_tokens` leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.special.contains_key(&id)
    }

    /// The id of a token, special or not, by its exact spelling in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// How many ids have a token.
    pub fn num_tokens(&self) -> usize {
        self.pieces.count
    }

    /// The highest id that has a token.
    pub fn max_id(&self) -> u32 {
        self.pieces.spans.len().saturating_sub(1) as u32
    }

    /// For each of `vocab_size` logits, whether its id has a token. The others must never be sampled.
    pub fn valid_token_mask(&self, vocab_size: usize) -> Vec<bool> {
        (0..vocab_size as u32).map(|id| self.token_bytes(id).is_some()).collect()
    }

    /// The lowest id without a token. From there to the end of the embedding, rows are padding, as long as
    /// it equals [`Self::num_tokens`], which says that there are no holes.
    pub fn first_id_without_token(&self) -> u32 {
        (0..).find(|id| self.token_bytes(*id).is_none()).expect("ids are finite. This is a bug.")
    }

    /// Refuses a tokenizer that can produce ids without an embedding row.
    pub fn check_vocab_size(&self, vocab_size: usize) -> Result<(), ModelError> {
        match self.max_id() as usize >= vocab_size {
            true => Err(ModelError::TokenizerTooLarge {
                path: self.path.clone(),
                max_id: self.max_id(),
                vocab_size,
            }),
            false => Ok(()),
        }
    }

    /// What `tokenizer_config.json` says.
    pub fn config(&self) -> &TokenizerConfig {
        &self.config
    }

    /// A hash of `tokenizer.json`, the same in every process.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

impl TokenizerConfig {
    fn load(dir: &Path) -> Result<Self, ModelError> {
        let Some(value) = read_json(&dir.join("tokenizer_config.json"))? else { return Ok(Self::default()) };
        // A token is its text, or an object that describes how it is matched.
        let token = |key: &str| {
            let token = value.get(key)?;
            token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
        };
        Ok(Self {
            bos_token: token("bos_token"),
            eos_token: token("eos_token"),
            pad_token: token("pad_token"),
            chat_template: value.get("chat_template").filter(|template| !template.is_null()).cloned(),
        })
    }
}

/// The bytes of every token, end to end: two allocations instead of one for each of 150,000 tokens.
#[derive(Debug)]
struct Pieces {
    bytes: Vec<u8>,
    /// By id: where its bytes are, or `None` for an id without a token.
    spans: Vec<Option<(u32, u32)>>,
    special: HashMap<u32, String>,
    count: usize,
}

impl Pieces {
    fn new(inner: &tokenizers::Tokenizer) -> Self {
        let alphabet = byte_alphabet();
        let highest = inner.get_vocab(true).into_values().max();
        let mut pieces = Self { bytes: Vec::new(), spans: Vec::new(), special: HashMap::new(), count: 0 };
        for id in 0..highest.map_or(0, |highest| highest + 1) {
            let Some(token) = inner.id_to_token(id) else {
                pieces.spans.push(None);
                continue;
            };
            let start = pieces.bytes.len();
            let mapped: Option<Vec<u8>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
            // A token with a character outside the alphabet (an added one) stands for its own text.
            match mapped {
                Some(bytes) => pieces.bytes.extend(bytes),
                None => pieces.bytes.extend(token.as_bytes()),
            }
            pieces.spans.push(Some((start as u32, pieces.bytes.len() as u32)));
            pieces.count += 1;
            if inner.get_added_vocabulary().is_special_token(&token) {
                pieces.special.insert(id, token);
            }
        }
        pieces
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let (start, end) = (*self.spans.get(id as usize)?)?;
        Some(&self.bytes[start as usize..end as usize])
    }
}

/// GPT-2's printable alphabet for bytes: printable Latin-1 stands for itself, the other 68 bytes are
/// U+0100 and on, in their order.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let shown = (0..=255u8).filter(printable).map(|byte| (char::from(byte), byte));
    let hidden = (0..=255u8).filter(|byte| !printable(byte));
    shown.chain(('\u{100}'..).zip(hidden)).collect()
}
