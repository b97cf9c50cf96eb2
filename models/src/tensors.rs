//! The tensors that an architecture needs, computed from its configuration alone.

use crate::config::ModelConfig;

/// A tensor's name in the checkpoint and its shape (row-major; a linear layer is `[out, in]`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
}

/// Every tensor that a forward pass of `config` reads, in the order of use.
pub fn required_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let hidden = config.hidden_size;
    let mut specs = vec![spec("model.embed_tokens.weight", &[config.vocab_size, hidden])];
    for layer in 0..config.num_hidden_layers {
        specs.extend(layer_tensors(config, layer));
    }
    specs.push(spec("model.norm.weight", &[hidden]));
    if !config.tie_word_embeddings {
        specs.push(spec("lm_head.weight", &[config.vocab_size, hidden]));
    }
    specs
}

fn layer_tensors(config: &ModelConfig, layer: usize) -> Vec<TensorSpec> {
    let (hidden, mlp) = (config.hidden_size, config.intermediate_size);
    let q = config.num_attention_heads * config.head_dim;
    let kv = config.num_key_value_heads * config.head_dim;
    let mut specs = vec![
        spec("input_layernorm.weight", &[hidden]),
        spec("self_attn.q_proj.weight", &[q, hidden]),
        spec("self_attn.k_proj.weight", &[kv, hidden]),
        spec("self_attn.v_proj.weight", &[kv, hidden]),
        spec("self_attn.o_proj.weight", &[hidden, q]),
        spec("post_attention_layernorm.weight", &[hidden]),
        spec("mlp.gate_proj.weight", &[mlp, hidden]),
        spec("mlp.up_proj.weight", &[mlp, hidden]),
        spec("mlp.down_proj.weight", &[hidden, mlp]),
    ];
    if config.qkv_bias {
        specs.push(spec("self_attn.q_proj.bias", &[q]));
        specs.push(spec("self_attn.k_proj.bias", &[kv]));
        specs.push(spec("self_attn.v_proj.bias", &[kv]));
    }
    if config.o_bias {
        specs.push(spec("self_attn.o_proj.bias", &[hidden]));
    }
    if config.qk_norm {
        specs.push(spec("self_attn.q_norm.weight", &[config.head_dim]));
        specs.push(spec("self_attn.k_norm.weight", &[config.head_dim]));
    }
    for spec in &mut specs {
        spec.name.insert_str(0, &format!("model.layers.{layer}."));
    }
    specs
}

fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), shape: shape.to_vec() }
}
