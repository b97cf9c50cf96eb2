//! How long a step takes on a device that is not here.

use std::time::Duration;

use kernels::BatchMeta;
use serde::{Deserialize, Serialize};

/// Coefficients of a step's time, in seconds:
/// `base + prefill · T + attention · Σ q·context + decode · sequences + context · Σ context`.
///
/// `T` are the tokens of sequences with more than one new token, `sequences` those with one. Measured by
/// `bench profile` on a real engine, or derived from a GPU's data sheet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// A step with next to nothing to do: launch overhead and one pass over the weights.
    pub base_s: f64,
    /// Each prompt token.
    pub prefill_s_per_token: f64,
    /// Each pair of prompt token and token that it sees.
    pub attention_s_per_pair: f64,
    /// Each decoding sequence.
    pub decode_s_per_sequence: f64,
    /// Each token of a decoding sequence's context.
    pub decode_s_per_context_token: f64,
}

/// What is wrong with a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{name:?} is not a profile; built in are {}", GPUS.map(|gpu| gpu.0).join(", "))]
    Unknown { name: String },
    #[error("{field} is {value}, expected a finite number of seconds, at least 0")]
    BadValue { field: &'static str, value: f64 },
    #[error("not a profile: {0}")]
    Json(#[from] serde_json::Error),
}

/// Name, dense bf16 TFLOP/s and memory GB/s of the data sheets. Half of the one and three quarters of the other are what
/// good kernels reach; both are rough, `bench profile` measures.
const GPUS: [(&str, f64, f64); 5] = [
    ("h200", 989.0, 4800.0),
    ("h100", 989.0, 3350.0),
    ("a100", 312.0, 2039.0),
    ("l40s", 362.0, 864.0),
    ("l4", 121.0, 300.0),
];

/// Launch overhead of a step, with CUDA graphs.
const OVERHEAD_S: f64 = 0.5e-3;

/// What of a model decides the time of its steps.
#[derive(Clone, Copy, Debug)]
pub struct ModelSize {
    /// Weights that every token is multiplied with, the head included.
    pub parameters: f64,
    /// Layers times query heads times head size.
    pub attention_width: f64,
    /// Bytes of a token's KV.
    pub kv_bytes_per_token: f64,
}

impl Profile {
    /// The names of built-in profiles.
    pub fn names() -> [&'static str; 5] {
        GPUS.map(|gpu| gpu.0)
    }

    /// A GPU of [`Self::names`] with a model of this size in bf16.
    pub fn gpu(name: &str, size: &ModelSize) -> Result<Self, ProfileError> {
        let gpu = GPUS.iter().find(|gpu| gpu.0 == name);
        let &(_, tflops, gbs) = gpu.ok_or_else(|| ProfileError::Unknown { name: name.to_owned() })?;
        let (flops, bytes) = (tflops * 1e12 * 0.5, gbs * 1e9 * 0.75);
        Ok(Self {
            base_s: OVERHEAD_S + 2.0 * size.parameters / bytes,
            prefill_s_per_token: 2.0 * size.parameters / flops,
            attention_s_per_pair: 4.0 * size.attention_width / flops,
            decode_s_per_sequence: 2.0 * size.parameters / flops,
            decode_s_per_context_token: size.kv_bytes_per_token / bytes,
        })
    }

    /// From the JSON that `bench profile` writes.
    pub fn from_json(text: &str) -> Result<Self, ProfileError> {
        let profile: Self = serde_json::from_str(text)?;
        for (field, value) in [
            ("base_s", profile.base_s),
            ("prefill_s_per_token", profile.prefill_s_per_token),
            ("attention_s_per_pair", profile.attention_s_per_pair),
            ("decode_s_per_sequence", profile.decode_s_per_sequence),
            ("decode_s_per_context_token", profile.decode_s_per_context_token),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(ProfileError::BadValue { field, value });
            }
        }
        Ok(profile)
    }

    /// Steps take no time.
    pub fn instant() -> Self {
        Self {
            base_s: 0.0,
            prefill_s_per_token: 0.0,
            attention_s_per_pair: 0.0,
            decode_s_per_sequence: 0.0,
            decode_s_per_context_token: 0.0,
        }
    }

    /// How long a step of this shape takes.
    pub fn step(&self, meta: &BatchMeta) -> Duration {
        let mut seconds = self.base_s;
        for seq in &meta.seqs {
            let (new, context) = (seq.q_len as f64, seq.context_len as f64);
            seconds += match seq.q_len {
                1 => self.decode_s_per_sequence + self.decode_s_per_context_token * context,
                // Causal: the first new token sees all before it, the last sees the whole context.
                _ => self.prefill_s_per_token * new + self.attention_s_per_pair * new * (context - new / 2.0),
            };
        }
        Duration::from_secs_f64(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen3-0.6B: 440.4 M multiplied weights and a head of 155.6 M.
    const QWEN3_0_6B: ModelSize =
        ModelSize { parameters: 596e6, attention_width: 28.0 * 2048.0, kv_bytes_per_token: 114_688.0 };

    fn step(profile: &Profile, computed: usize, new: usize) -> f64 {
        let mut meta = BatchMeta::default();
        let table: Vec<u32> = (0..1000).collect();
        meta.push(&table, computed, new, 16);
        profile.step(&meta).as_secs_f64()
    }

    #[test]
    fn a_gpu_is_as_fast_as_its_data_sheet_allows() {
        let profile = Profile::gpu("h200", &QWEN3_0_6B).unwrap();
        let decode = step(&profile, 512, 1);
        assert!((0.8e-3..1.2e-3).contains(&decode), "{decode}");
        let prefill = step(&profile, 0, 3000);
        assert!((7e-3..13e-3).contains(&prefill), "{prefill}");
        assert!(step(&profile, 3000, 1) > decode);
    }

    #[test]
    fn bad_profiles_are_refused_by_name() {
        let error = Profile::gpu("h300", &QWEN3_0_6B).unwrap_err().to_string();
        assert_eq!(error, "\"h300\" is not a profile; built in are h200, h100, a100, l40s, l4");
        let mut profile = Profile::instant();
        profile.base_s = -1.0;
        let error = Profile::from_json(&serde_json::to_string(&profile).unwrap()).unwrap_err().to_string();
        assert_eq!(error, "base_s is -1, expected a finite number of seconds, at least 0");
        assert!(
            Profile::from_json("{\"base_s\": 1}")
                .unwrap_err()
                .to_string()
                .starts_with("not a profile: missing field")
        );
    }
}
