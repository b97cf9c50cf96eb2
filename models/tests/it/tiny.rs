//! A tiny checkpoint in a temporary folder, to be damaged by a test.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use models::{ModelConfig, ModelError, required_tensors};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// `config` and `tensors` are written by [`Tiny::write_single`] or [`Tiny::write_sharded`].
pub struct Tiny {
    pub dir: TempDir,
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

pub const INDEX: &str = "model.safetensors.index.json";

pub fn qwen3_config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 4, "intermediate_size": 16, "vocab_size": 32, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": null, "max_position_embeddings": 64,
        "tie_word_embeddings": true, "hidden_act": "silu", "use_sliding_window": false, "eos_token_id": 3,
    })
}

impl Tiny {
    pub fn new(config: Value) -> Self {
        let parsed = parse(config.clone()).unwrap();
        let specs = required_tensors(&parsed).into_iter().enumerate();
        let tensors = specs.map(|(seed, spec)| (spec.name, bf16_tensor(&spec.shape, seed as f32))).collect();
        Self { dir: tempfile::tempdir().unwrap(), config, tensors }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path().join(file), bytes).unwrap();
    }

    pub fn write_single(&self) {
        self.write("config.json", self.config.to_string());
        self.write_shard("model.safetensors", &self.tensors.keys().map(String::as_str).collect::<Vec<_>>());
    }

    /// Two files; returns the weight map for a test to damage and write again.
    pub fn write_sharded(&self) -> BTreeMap<String, String> {
        self.write("config.json", self.config.to_string());
        let names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        let (first, second) = names.split_at(names.len() / 2);
        let mut map = BTreeMap::new();
        for (file, names) in
            [("model-00001-of-00002.safetensors", first), ("model-00002-of-00002.safetensors", second)]
        {
            self.write_shard(file, names);
            map.extend(names.iter().map(|name| (name.to_string(), file.to_owned())));
        }
        self.write_index(&map);
        map
    }

    pub fn write_index(&self, map: &BTreeMap<String, String>) {
        self.write(INDEX, json!({"metadata": {}, "weight_map": map}).to_string());
    }

    pub fn write_shard(&self, file: &str, names: &[&str]) {
        let views = names.iter().map(|name| {
            let tensor = &self.tensors[*name];
            (*name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
        });
        self.write(file, safetensors::serialize(views, None).unwrap());
    }
}

pub fn bf16_tensor(shape: &[usize], seed: f32) -> Tensor {
    let count: usize = shape.iter().product();
    let values = (0..count).map(|i| bf16::from_f32(seed + i as f32 / 64.0));
    Tensor { dtype: Dtype::BF16, shape: shape.to_vec(), bytes: values.flat_map(bf16::to_le_bytes).collect() }
}

pub fn parse(config: Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(Path::new("config.json"), config)
}

/// The config with some keys replaced, or removed where the value is `None`.
pub fn with<const N: usize>(mut config: Value, changes: [(&str, Option<Value>); N]) -> Value {
    let keys = config.as_object_mut().unwrap();
    for (key, value) in changes {
        match value {
            Some(value) => drop(keys.insert(key.to_owned(), value)),
            None => drop(keys.remove(key)),
        }
    }
    config
}

/// The error has this label and its text has all of these parts.
#[track_caller]
pub fn assert_error<T: std::fmt::Debug>(result: Result<T, ModelError>, label: &str, parts: &[&str]) {
    let error = result.expect_err("the fault was accepted");
    let text = error.to_string();
    assert_eq!(error.label(), label, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}
