//! `config.json`: what a checkpoint says about its shape, checked before a byte of weights is read.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::eos::eos_ids;
use crate::error::{LoadWarning, ModelError};
use crate::files::read_json;

/// The architectures that the forward pass knows, by the name in `architectures`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `Qwen3ForCausalLM`: RMS norm on each head of q and k, biases only if `attention_bias`.
    Qwen3,
    /// `Qwen2ForCausalLM`: biases on q, k and v, no norm on them.
    Qwen2,
}

impl Architecture {
    const ALL: [Self; 2] = [Self::Qwen3, Self::Qwen2];

    /// The name that `config.json` gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
        }
    }
}

/// The shape of a model, from `config.json`. Every size is at least one and they fit each other.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// Divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Even, for RoPE rotates pairs.
    pub head_dim: usize,
    pub intermediate_size: usize,
    /// Rows of the embedding; the tokenizer may have fewer tokens.
    pub vocab_size: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias (Qwen3 with `attention_bias`).
    pub o_bias: bool,
    /// q and k are normalised per head.
    pub qk_norm: bool,
    /// End-of-sequence ids of this file alone; [`crate::GenerationConfig`] has the union.
    pub eos_token_ids: Vec<u32>,
    /// What was assumed or ignored in this file.
    pub warnings: Vec<LoadWarning>,
}

impl ModelConfig {
    /// Reads and checks `dir/config.json`.
    ///
    /// # Errors
    /// Names the file, the key, the value found and what was expected: no file, invalid JSON, another
    /// architecture, a RoPE or attention variant that the forward pass does not have, sizes that do not fit.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let value = read_json(&path)?.ok_or_else(|| ModelError::MissingFile {
            dir: dir.to_owned(),
            file: "config.json",
            hint: String::new(),
        })?;
        Self::from_json(&path, value)
    }

    /// As [`Self::load`], from parsed JSON; `path` is only for the errors.
    pub fn from_json(path: &Path, value: Value) -> Result<Self, ModelError> {
        let architecture = architecture(path, &value)?;
        let eos = value.get("eos_token_id").cloned().unwrap_or(Value::Null);
        // A missing head_dim means 128 to transformers' Qwen3Config; an explicit null means hidden / heads.
        let head_dim_missing = value.get("head_dim").is_none();
        let raw: RawConfig = serde_json::from_value(value)
            .map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
        raw.refuse_variants(path)?;

        let qwen3 = architecture == Architecture::Qwen3;
        let head_dim = match raw.head_dim {
            Some(dim) => dim,
            None if qwen3 && head_dim_missing => 128,
            None => raw.hidden_size.checked_div(raw.num_attention_heads).unwrap_or(0),
        };
        let (eos_token_ids, ignored) = eos_ids(path, &eos, raw.vocab_size)?;
        let mut warnings = Vec::new();
        if raw.tie_word_embeddings.is_none() {
            warnings.push(LoadWarning::TieDefaulted);
        }
        if !ignored.is_empty() {
            warnings.push(LoadWarning::EosOutsideVocabulary {
                file: "config.json",
                ids: ignored,
                vocab_size: raw.vocab_size,
            });
        }
        let config = Self {
            architecture,
            hidden_size: raw.hidden_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: raw.num_attention_heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim,
            intermediate_size: raw.intermediate_size,
            vocab_size: raw.vocab_size,
            rms_norm_eps: raw.rms_norm_eps,
            rope_theta: raw.rope_theta(path)?,
            max_position_embeddings: raw.max_position_embeddings,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            qkv_bias: !qwen3 || raw.attention_bias,
            o_bias: qwen3 && raw.attention_bias,
            qk_norm: qwen3,
            eos_token_ids,
            warnings,
        };
        config.check(path)?;
        Ok(config)
    }

    /// The tensor that turns the last hidden state into logits.
    pub fn lm_head(&self) -> &'static str {
        if self.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" }
    }

    fn check(&self, path: &Path) -> Result<(), ModelError> {
        let invalid = |key, found: String, expected: String| {
            Err(ModelError::InvalidConfig { path: path.to_owned(), key, found, expected })
        };
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (key, size) in sizes {
            // The upper bound keeps every product of two sizes far from overflow.
            if !(1..=1 << 28).contains(&size) {
                return invalid(key, size.to_string(), "a size of at least 1 (and at most 2^28)".into());
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads = {}", self.num_attention_heads);
            return invalid("num_key_value_heads", self.num_key_value_heads.to_string(), expected);
        }
        if !self.head_dim.is_multiple_of(2) {
            return invalid(
                "head_dim",
                self.head_dim.to_string(),
                "an even number (RoPE rotates pairs)".into(),
            );
        }
        for (key, number) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)] {
            if !(number.is_finite() && number > 0.0) {
                return invalid(key, number.to_string(), "a positive number".into());
            }
        }
        Ok(())
    }
}

/// The keys that matter, as they stand in the file. Defaults are those of transformers' Qwen3Config and
/// Qwen2Config; sizes have none, because a default size would be a guess.
#[derive(Deserialize)]
struct RawConfig {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    #[serde(default = "default_rms_norm_eps")]
    rms_norm_eps: f64,
    #[serde(default = "default_hidden_act")]
    hidden_act: String,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Value>,
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

fn default_hidden_act() -> String {
    "silu".to_owned()
}

impl RawConfig {
    /// Refuses by name what the forward pass would silently compute wrongly.
    fn refuse_variants(&self, path: &Path) -> Result<(), ModelError> {
        let refuse = |key, found: String, why| {
            Err(ModelError::UnsupportedConfig { path: path.to_owned(), key, found, why })
        };
        if self.hidden_act != "silu" {
            return refuse("hidden_act", self.hidden_act.clone(), "the MLP here is SwiGLU, with silu");
        }
        if self.use_sliding_window {
            let why = "every layer here attends to the whole context, and these weights expect a window; \
                       if the window never applies in your use, set it to false";
            return refuse("use_sliding_window", "true".into(), why);
        }
        let types = self.layer_types.iter().flatten();
        if let Some(other) = types.into_iter().find(|kind| *kind != "full_attention") {
            return refuse("layer_types", other.clone(), "only full_attention is implemented");
        }
        if let Some(quantization) = &self.quantization_config {
            return refuse(
                "quantization_config",
                quantization.to_string(),
                "weights must be BF16, F16 or F32",
            );
        }
        for (key, rope) in [("rope_scaling", &self.rope_scaling), ("rope_parameters", &self.rope_parameters)]
        {
            if let Some(rope) = rope {
                let kind = rope_type(path, key, rope)?;
                if kind != "default" {
                    return refuse(
                        key,
                        kind,
                        "only the plain rotary embedding (type \"default\") is implemented",
                    );
                }
            }
        }
        let nested =
            self.nested_rope().and_then(|rope| rope.get("partial_rotary_factor")).and_then(Value::as_f64);
        if let Some(factor) = nested.or(self.partial_rotary_factor)
            && factor != 1.0
        {
            return refuse("partial_rotary_factor", factor.to_string(), "whole heads are rotated here");
        }
        Ok(())
    }

    /// Newer configs nest the rotary parameters; as in transformers, `rope_scaling` wins over `rope_parameters`.
    fn nested_rope(&self) -> Option<&Value> {
        self.rope_scaling.as_ref().or(self.rope_parameters.as_ref())
    }

    /// Nested first, then the top level, then transformers' default of 10,000.
    fn rope_theta(&self, path: &Path) -> Result<f64, ModelError> {
        match self.nested_rope().and_then(|rope| rope.get("rope_theta")) {
            None | Some(Value::Null) => Ok(self.rope_theta.unwrap_or(10_000.0)),
            Some(theta) => theta.as_f64().ok_or_else(|| ModelError::InvalidConfig {
                path: path.to_owned(),
                key: "rope_theta",
                found: theta.to_string(),
                expected: "a positive number".into(),
            }),
        }
    }
}

/// `rope_type`, or the older `type`; an object with neither is the default type.
fn rope_type(path: &Path, key: &'static str, rope: &Value) -> Result<String, ModelError> {
    let invalid = || ModelError::InvalidConfig {
        path: path.to_owned(),
        key,
        found: rope.to_string(),
        expected: "null or an object with rope_type".into(),
    };
    let fields = rope.as_object().ok_or_else(invalid)?;
    // One object per layer type is another form of the same key; nothing in it may be overlooked.
    if fields.values().any(Value::is_object) {
        return Err(invalid());
    }
    match fields.get("rope_type").or_else(|| fields.get("type")) {
        None | Some(Value::Null) => Ok("default".to_owned()),
        Some(kind) => kind.as_str().map(str::to_owned).ok_or_else(invalid),
    }
}

fn architecture(path: &Path, config: &Value) -> Result<Architecture, ModelError> {
    let names = config.get("architectures").and_then(Value::as_array);
    let names: Vec<&str> = names.into_iter().flatten().filter_map(Value::as_str).collect();
    let known = Architecture::ALL.into_iter().find(|known| names == [known.name()]);
    known.ok_or_else(|| ModelError::UnsupportedArchitecture {
        path: path.to_owned(),
        found: if names.is_empty() { "(none)".to_owned() } else { names.join(", ") },
        expected: Architecture::ALL.map(Architecture::name).join(" or "),
    })
}
