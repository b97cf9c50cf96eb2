//! What a step must move and compute at least.

use models::ModelConfig;

/// Sizes of a bf16 model.
#[derive(Clone, Copy, Debug)]
pub struct ModelCost {
    /// Parameters of all layers' matrices.
    layers: f64,
    head: f64,
    /// Elements of a row of queries, over all layers.
    q: f64,
    kv_bytes_per_token: f64,
}

const BF16: f64 = 2.0;

impl ModelCost {
    pub fn of(config: &ModelConfig) -> Self {
        let (hidden, mlp) = (config.hidden_size as f64, config.intermediate_size as f64);
        let layers = config.num_hidden_layers as f64;
        let q = (config.num_attention_heads * config.head_dim) as f64;
        let kv = (config.num_key_value_heads * config.head_dim) as f64;
        Self {
            layers: layers * (hidden * (2.0 * q + 2.0 * kv) + 3.0 * hidden * mlp),
            head: hidden * config.vocab_size as f64,
            q: q * layers,
            kv_bytes_per_token: layers * 2.0 * kv * BF16,
        }
    }

    /// Bytes that a decode step reads: every weight once, and every sequence's KV.
    pub fn decode_bytes(&self, batch: usize, context: usize) -> f64 {
        BF16 * (self.layers + self.head) + (batch * context) as f64 * self.kv_bytes_per_token
    }

    /// Floating-point operations of a prompt of which one row's logits are wanted; causal attention.
    pub fn prefill_flop(&self, tokens: usize) -> f64 {
        let tokens = tokens as f64;
        2.0 * self.layers * tokens + 2.0 * self.q * tokens * tokens + 2.0 * self.head
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn qwen3_0_6b_costs_what_is_published() {
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
            "vocab_size": 151_936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960,
            "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false,
        });
        let config = ModelConfig::from_json(std::path::Path::new("config.json"), config).unwrap();
        let cost = ModelCost::of(&config);
        assert!((cost.layers - 440.4e6).abs() < 1e5, "{cost:?}");
        assert_eq!(cost.kv_bytes_per_token, 114_688.0);
        assert_eq!(cost.q * 2.0, 114_688.0);
    }
}
