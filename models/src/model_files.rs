//! Everything that a model's folder holds, loaded and checked against each other.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::chat::ChatTemplate;
use crate::config::ModelConfig;
use crate::error::{LoadWarning, ModelError};
use crate::generation::GenerationConfig;
use crate::tensors::required_tensors;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;

/// How many bytes of each tensor the fingerprint reads. A page of the file is read for them in any case.
const SAMPLE: usize = 64;

/// What a process needs that handles text but computes nothing (a frontend).
#[derive(Debug)]
pub struct TextFiles {
    pub dir: PathBuf,
    pub config: ModelConfig,
    pub generation: GenerationConfig,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_template: Option<ChatTemplate>,
}

/// What a worker needs.
#[derive(Debug)]
pub struct ModelFiles {
    pub dir: PathBuf,
    pub config: ModelConfig,
    pub generation: GenerationConfig,
    /// Checked: every required tensor is there. Drop it once the weights are copied out.
    pub weights: Weights,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_template: Option<ChatTemplate>,
    /// See [`fingerprint`].
    pub fingerprint: String,
    /// What was ignored or assumed; already logged.
    pub warnings: Vec<LoadWarning>,
}

impl TextFiles {
    /// # Errors
    /// The first file that is missing, broken or at odds with another.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let config = ModelConfig::load(dir)?;
        let generation = GenerationConfig::load(dir, &config)?;
        let tokenizer = Tokenizer::load(dir)?;
        tokenizer.check_vocab_size(config.vocab_size)?;
        let chat_template = ChatTemplate::load(dir, tokenizer.config())?;
        Ok(Self { dir: dir.to_owned(), config, generation, tokenizer: Arc::new(tokenizer), chat_template })
    }
}

impl ModelFiles {
    /// Loads and checks all of `dir`, and logs what was ignored. The weights are mapped, not read.
    ///
    /// # Errors
    /// As [`TextFiles::load`], [`Weights::open`] and [`Weights::check`].
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        // The weights come before the tokenizer: they are what is most often incomplete, and fail in
        // milliseconds.
        let config = ModelConfig::load(dir)?;
        let weights = Weights::open(dir)?;
        let leftovers = weights.check(&config)?;
        let text = TextFiles::load(dir)?;

        let warnings = [&config.warnings, &text.generation.warnings, &leftovers];
        let warnings: Vec<LoadWarning> = warnings.into_iter().flatten().cloned().collect();
        for warning in &warnings {
            tracing::warn!(dir = %dir.display(), "{warning}");
        }
        let fingerprint = fingerprint(&config, &weights)?;
        let TextFiles { dir, config, generation, tokenizer, chat_template } = text;
        Ok(Self { dir, config, generation, weights, tokenizer, chat_template, fingerprint, warnings })
    }
}

/// A name for what a model computes: 32 hex digits over the configuration and each required tensor's name,
/// dtype, shape and first 64 bytes. Two workers that differ in it serve different models. It does not depend
/// on how the checkpoint is cut into files, and does not see a change deep inside a tensor alone.
pub fn fingerprint(config: &ModelConfig, weights: &Weights) -> Result<String, ModelError> {
    let mut hash = Xxh3::new();
    let mut field = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(config.architecture.name().as_bytes());
    field(&config.rms_norm_eps.to_le_bytes());
    field(&config.rope_theta.to_le_bytes());
    field(&[u8::from(config.tie_word_embeddings)]);
    let sizes = [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
    for size in sizes {
        field(&(size as u64).to_le_bytes());
    }
    for spec in required_tensors(config) {
        let view = weights.expect(&spec.name, &spec.shape)?;
        field(spec.name.as_bytes());
        field(format!("{:?} {:?}", view.dtype, view.shape).as_bytes());
        field(&view.bytes[..view.bytes.len().min(SAMPLE)]);
    }
    Ok(format!("{:032x}", hash.digest128()))
}
