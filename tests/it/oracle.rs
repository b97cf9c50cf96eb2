//! The forward pass against candle-transformers' Qwen3, for random checkpoints of many shapes.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3::{Config, ModelForCausalLM};
use kernels::KvDtype;
use models::qwen::ComputeDtype;
use models::{ModelConfig, required_tensors};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tests::golden::{Bench, max_difference, relative_error};

/// Heads, KV heads, head size, hidden size, MLP size, layers, tied.
type Shape = (usize, usize, usize, usize, usize, usize, bool);

const SHAPES: [Shape; 5] = [
    (1, 1, 8, 8, 16, 1, true),
    (4, 2, 16, 24, 40, 2, false),
    (6, 2, 32, 64, 96, 3, true),
    (8, 8, 10, 33, 70, 2, false),
    (16, 8, 128, 96, 64, 2, true),
];

fn write_checkpoint(dir: &Path, shape: Shape, rng: &mut StdRng) -> serde_json::Value {
    let (heads, kv_heads, head_dim, hidden, mlp, layers, tied) = shape;
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": head_dim, "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": mlp, "max_position_embeddings": 512, "max_window_layers": layers,
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": null, "tie_word_embeddings": tied,
        "use_sliding_window": false, "vocab_size": 101, "eos_token_id": 1
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut tensors = HashMap::new();
    for spec in required_tensors(&ModelConfig::load(dir).unwrap()) {
        let near_one = spec.shape.len() == 1;
        let count = spec.shape.iter().product();
        let mut value = || rng.random_range(-0.3f32..0.3) + if near_one { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..count).map(|_| value()).collect();
        tensors.insert(spec.name, Tensor::from_vec(values, spec.shape, &Device::Cpu).unwrap());
    }
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors")).unwrap();
    config
}

#[test]
fn random_checkpoints_give_the_logits_of_candle_transformers() {
    for (index, shape) in SHAPES.into_iter().enumerate() {
        let mut rng = StdRng::seed_from_u64(index as u64);
        let dir = tempfile::tempdir().unwrap();
        let config = write_checkpoint(dir.path(), shape, &mut rng);
        let config: Config = serde_json::from_value(config).unwrap();
        let files = [dir.path().join("model.safetensors")];
        // SAFETY: the file was written by this test and nobody changes it.
        let weights =
            unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu) }.unwrap();
        let bench = Bench::load(dir.path(), ComputeDtype::Stored, KvDtype::F32, 300).unwrap();
        for len in [1, 15, 16, 17, 100, 260] {
            let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(0..101)).collect();
            let mut oracle = ModelForCausalLM::new(&config, weights.clone()).unwrap();
            let input = Tensor::from_slice(&tokens, (1, len), &Device::Cpu).unwrap();
            let expected =
                oracle.forward(&input, 0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let ours = bench.prompt(&tokens, 33).unwrap();
            let difference = max_difference(ours.last().unwrap(), &expected);
            assert!(difference <= 1e-3, "{shape:?}, {len} tokens: {difference}");
        }
    }
}

/// Wide enough for the kernels that round activations to bf16, which the small checkpoints of `golden` are not.
#[test]
fn bf16_and_int8_products_stay_close_to_the_f32_oracle() {
    let shape = (8, 4, 64, 576, 1088, 2, true);
    let mut rng = StdRng::seed_from_u64(9);
    let dir = tempfile::tempdir().unwrap();
    let config = write_checkpoint(dir.path(), shape, &mut rng);
    let file = dir.path().join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    // Weights as models have them: small, and in bf16.
    let narrow = |tensor: Tensor| match tensor.dims().len() {
        1 => tensor.to_dtype(DType::BF16).unwrap(),
        _ => (tensor * 0.15).unwrap().to_dtype(DType::BF16).unwrap(),
    };
    let tensors: HashMap<_, _> = tensors.into_iter().map(|(name, tensor)| (name, narrow(tensor))).collect();
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let config: Config = serde_json::from_value(config).unwrap();
    // SAFETY: the file was written by this test and nobody changes it.
    let weights = unsafe { VarBuilder::from_mmaped_safetensors(&[&file], DType::F32, &Device::Cpu) }.unwrap();
    let bench = |dtype| Bench::load(dir.path(), dtype, KvDtype::Bf16, 300).unwrap();
    // Measured: 3.8 % in int8 with AMX, 4.1 % with AVX2.
    let benches =
        [(ComputeDtype::Stored, 1e-2), (ComputeDtype::Int8, 6e-2)].map(|(d, most)| (bench(d), d, most));
    let mut worst = [0f64; 2];
    for len in [1, 2, 7, 16, 33, 150, 260] {
        let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(0..101)).collect();
        let mut oracle = ModelForCausalLM::new(&config, weights.clone()).unwrap();
        let input = Tensor::from_slice(&tokens, (1, len), &Device::Cpu).unwrap();
        let expected = oracle.forward(&input, 0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for ((bench, dtype, most), worst) in benches.iter().zip(&mut worst) {
            for chunk in [len, 64, 5] {
                let ours = bench.prompt(&tokens, chunk).unwrap();
                let error = relative_error(ours.last().unwrap(), &expected);
                assert!(error <= *most, "{dtype:?}, {len} tokens in chunks of {chunk}: {error}");
                *worst = worst.max(error.into());
            }
        }
    }
    println!("relative error of logits: {:.4} in bf16, {:.4} in int8", worst[0], worst[1]);
}
