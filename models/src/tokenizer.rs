//! The tokenizer: text to ids, ids to bytes, and which ids have a token at all.
//!
//! Only byte-level BPE is accepted, which is what Qwen's models have. There every id stands for a fixed
//! string of bytes, whatever is around it; the streaming detokenizer rests on that.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::DecoderWrapper;
use xxhash_rust::xxh3::xxh3_64;

use crate::bpe::{Bpe, byte_alphabet};
use crate::error::ModelError;
use crate::files::{read, read_json};

const FILE: &str = "tokenizer.json";

/// Tokenized both ways when a tokenizer is loaded: words, contractions, digits, runs of spaces, characters that NFC
/// changes, several scripts, and special tokens.
const PROBE: &str = "The quick brown fox's 12 jumps;  they'LL  see.\r\n\r\n\tfn main() { println!(\"\u{e9}t\u{65}\u{301}\"); }   \n \u{3000}\
    \u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c} \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{1100}\u{1161} \u{1f469}\u{200d}\u{1f467} \u{bd} \u{661} I'\u{17f}\
    <|im_start|>user\nHi<|im_end|>\n <|im_start| >antidisestablishmentarianism ";

/// What makes tokens of text.
#[derive(Debug)]
enum Encoder {
    /// For the tokenizers that it knows.
    Ours(Box<Bpe>),
    Library(Box<tokenizers::Tokenizer>),
}

/// A loaded `tokenizer.json` with what `tokenizer_config.json` adds to it. Immutable; share it in an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    encoder: Encoder,
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
        let encoder = match ours(&bytes, &inner) {
            Ok(ours) => {
                tracing::debug!(path = %path.display(), "tokenized by kvferry's own encoder");
                Encoder::Ours(Box::new(ours))
            }
            Err(unknown) => {
                tracing::info!(path = %path.display(), unknown, "tokenized by the `tokenizers` crate, which is slower");
                Encoder::Library(Box::new(inner))
            }
        };
        Ok(Self { encoder, config, pieces, fingerprint: xxh3_64(&bytes), path })
    }

    /// Token ids of `text`. Special tokens that are spelled out in it become those tokens, as in vLLM's
    /// completions. `add_special_tokens` runs the post-processor; Qwen's adds nothing.
    ///
    /// # Errors
    /// The tokenizer itself fails.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ModelError> {
        match &self.encoder {
            // Its post-processor adds nothing.
            Encoder::Ours(ours) => Ok(ours.encode(text)),
            Encoder::Library(library) => {
                let encoding = library.encode_fast(text, add_special_tokens);
                let encoding =
                    encoding.map_err(|error| ModelError::Tokenize { reason: error.to_string() })?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// True where texts are tokenized by our own encoder, false where by the `tokenizers` crate.
    pub fn is_fast(&self) -> bool {
        matches!(self.encoder, Encoder::Ours(_))
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
        self.pieces.find(token)
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

/// Our own encoder, if it knows the tokenizer and gives what the library gives.
fn ours(json: &[u8], inner: &tokenizers::Tokenizer) -> Result<Bpe, String> {
    let ours = Bpe::recognise(json, inner)?;
    let theirs = inner.encode_fast(PROBE, true).map_err(|error| error.to_string())?;
    match ours.encode(PROBE) == theirs.get_ids() {
        true => Ok(ours),
        false => Err("a text that is tokenized otherwise".into()),
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
#[derive(Debug, Default)]
struct Pieces {
    bytes: Vec<u8>,
    /// By id: where its bytes are, or `None` for an id without a token.
    spans: Vec<Option<(u32, u32)>>,
    /// Ids of tokens that are not spelled in the alphabet for bytes, and so stand for their own text.
    plain: HashSet<u32>,
    special: HashMap<u32, String>,
    count: usize,
}

impl Pieces {
    fn new(inner: &tokenizers::Tokenizer) -> Self {
        let alphabet = byte_alphabet();
        let highest = inner.get_vocab(true).into_values().max();
        let mut pieces = Self::default();
        for id in 0..highest.map_or(0, |highest| highest + 1) {
            let Some(token) = inner.id_to_token(id) else {
                pieces.spans.push(None);
                continue;
            };
            let start = pieces.bytes.len();
            // A token with a character outside the alphabet (an added one) stands for its own text.
            match spelled(&alphabet, &token) {
                Some(bytes) => pieces.bytes.extend(bytes),
                None => {
                    pieces.bytes.extend(token.as_bytes());
                    pieces.plain.insert(id);
                }
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

    /// The id of the token that is spelled like this in the vocabulary. Looks at each: for loading.
    fn find(&self, token: &str) -> Option<u32> {
        let bytes = spelled(&byte_alphabet(), token);
        let plain = bytes.is_none();
        let bytes = bytes.as_deref().unwrap_or(token.as_bytes());
        let is_it = |id: &u32| self.plain.contains(id) == plain && self.get(*id) == Some(bytes);
        (0..self.spans.len() as u32).find(is_it)
    }
}

/// The bytes of a token that is spelled in the alphabet for bytes.
fn spelled(alphabet: &HashMap<char, u8>, token: &str) -> Option<Vec<u8>> {
    token.chars().map(|c| alphabet.get(&c).copied()).collect()
}
