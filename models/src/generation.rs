//! `generation_config.json`: where generation ends, and the sampling that the model's authors recommend.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::config::ModelConfig;
use crate::eos::eos_ids;
use crate::error::{LoadWarning, ModelError};
use crate::files::read_json;

const FILE: &str = "generation_config.json";

/// Defaults of generation. A missing file gives the end ids of `config.json` and no sampling defaults.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationConfig {
    /// Union of both files' ids, sorted. Ids outside the vocabulary are left out, with a warning.
    pub eos_token_ids: Vec<u32>,
    pub sampling: SamplingDefaults,
    /// What was ignored.
    pub warnings: Vec<LoadWarning>,
}

/// What a request gets for the sampling parameters that it does not name; `None` where the file is silent.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SamplingDefaults {
    /// 0 is greedy: `do_sample: false` gives that, whatever temperature stands beside it.
    pub temperature: Option<f32>,
    /// The `k` most likely tokens; 0 in the file (no limit) is `None` here.
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads `dir/generation_config.json` beside an already read `config.json`.
    ///
    /// # Errors
    /// Invalid JSON, or a value out of its range; both name the file.
    pub fn load(dir: &Path, config: &ModelConfig) -> Result<Self, ModelError> {
        let path = dir.join(FILE);
        match read_json(&path)? {
            Some(value) => Self::from_json(&path, value, config),
            None => Ok(Self::new(Vec::new(), SamplingDefaults::default(), Vec::new(), config)),
        }
    }

    /// True when `id` ends a generation.
    pub fn is_eos(&self, id: u32) -> bool {
        self.eos_token_ids.binary_search(&id).is_ok()
    }

    fn from_json(path: &Path, value: Value, config: &ModelConfig) -> Result<Self, ModelError> {
        let eos = value.get("eos_token_id").cloned().unwrap_or(Value::Null);
        let (ids, outside) = eos_ids(path, &eos, config.vocab_size)?;
        let raw: RawGeneration = serde_json::from_value(value)
            .map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
        let warnings = match outside.is_empty() {
            true => Vec::new(),
            false => vec![LoadWarning::EosOutsideVocabulary {
                file: FILE,
                ids: outside,
                vocab_size: config.vocab_size,
            }],
        };
        Ok(Self::new(ids, raw.sampling(path)?, warnings, config))
    }

    fn new(
        mut ids: Vec<u32>,
        sampling: SamplingDefaults,
        mut warnings: Vec<LoadWarning>,
        config: &ModelConfig,
    ) -> Self {
        ids.extend(&config.eos_token_ids);
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            warnings.push(LoadWarning::NoEos);
        }
        Self { eos_token_ids: ids, sampling, warnings }
    }
}

#[derive(Deserialize)]
struct RawGeneration {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl RawGeneration {
    fn sampling(&self, path: &Path) -> Result<SamplingDefaults, ModelError> {
        let check = |key, value: Option<f32>, ok: fn(f32) -> bool, expected: &str| match value {
            Some(found) if !ok(found) => Err(ModelError::InvalidConfig {
                path: path.to_owned(),
                key,
                found: found.to_string(),
                expected: expected.to_owned(),
            }),
            value => Ok(value),
        };
        let temperature =
            check("temperature", self.temperature, |t| t >= 0.0 && t.is_finite(), "a number of at least 0")?;
        Ok(SamplingDefaults {
            temperature: if self.do_sample == Some(false) { Some(0.0) } else { temperature },
            top_k: self.top_k.filter(|k| *k > 0),
            top_p: check("top_p", self.top_p, |p| p > 0.0 && p <= 1.0, "a number above 0, at most 1")?,
            min_p: check("min_p", self.min_p, |p| (0.0..=1.0).contains(&p), "a number from 0 to 1")?,
            repetition_penalty: check(
                "repetition_penalty",
                self.repetition_penalty,
                |p| p > 0.0 && p.is_finite(),
                "a number above 0",
            )?,
        })
    }
}
