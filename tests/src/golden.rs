//! Our forward pass against logits that another implementation computed.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use kernels::cuda::Gpu;
use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};
use models::gpu::{GpuLimits, GpuModel};
use models::model::{Batch, Model};
use models::qwen::{ComputeDtype, Qwen};
use models::{ModelConfig, Weights};
use serde::Deserialize;

/// Tokens in a block of the pools made here.
pub const BLOCK_SIZE: usize = 16;

/// What `transformers` computed for a checkpoint (see models/demo/train/golden.py).
#[derive(Debug, Deserialize)]
pub struct Golden {
    /// Ids below this have a token; rows beyond it are never chosen in `greedy`. Default: all.
    #[serde(default)]
    pub tokens: Option<usize>,
    pub prompts: Vec<Prompt>,
}

/// One prompt with its reference: f32 weights (widened from bf16), f32 activations, eager attention.
#[derive(Debug, Deserialize)]
pub struct Prompt {
    pub name: String,
    pub input_ids: Vec<u32>,
    /// Logits after the last token, one for each row of the vocabulary.
    pub last_logits: Vec<f32>,
    /// The likeliest next token after each position. May be empty.
    #[serde(default)]
    pub argmax: Vec<u32>,
    /// 32 tokens that follow, end-of-sequence tokens included like any others.
    pub greedy: Vec<u32>,
}

impl Golden {
    pub fn load(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not a golden file", path.display()))
    }
}

/// A model with a pool for one sequence, in blocks that are not in order.
pub struct Bench {
    model: Mutex<Box<dyn Model>>,
    pool: Arc<KvPool>,
    table: Vec<u32>,
    vocab_size: usize,
}

impl Bench {
    /// Room for `max_len` tokens.
    pub fn load(dir: &Path, weights: ComputeDtype, kv: KvDtype, max_len: usize) -> Result<Self> {
        let (config, files) = open(dir)?;
        let model = Box::new(Qwen::load(&config, &files, weights, max_len)?);
        let blocks = max_len.div_ceil(BLOCK_SIZE) + 1;
        Ok(Self::new(model, KvPool::new(layout(&config, kv), blocks)?, &config))
    }

    /// The same on a CUDA device, in bf16.
    pub fn load_on(gpu: &Gpu, dir: &Path, max_len: usize) -> Result<Self> {
        let (config, files) = open(dir)?;
        let limits = GpuLimits { max_len, max_rows: 64, max_seqs: 4, eager: false };
        let valid = vec![true; config.vocab_size];
        let model = GpuModel::load(gpu, &config, &files, ComputeDtype::Stored, limits, &valid)?;
        let blocks = max_len.div_ceil(BLOCK_SIZE) + 1;
        let pool = KvPool::new_on(gpu, layout(&config, KvDtype::Bf16), blocks, 0)?;
        Ok(Self::new(Box::new(model), pool, &config))
    }

    fn new(model: Box<dyn Model>, pool: KvPool, config: &ModelConfig) -> Self {
        let blocks = pool.num_blocks() as u32 - 1;
        // Odd blocks downwards, then even ones upwards: neighbours in the sequence are not neighbours in the pool.
        let table =
            (0..=blocks).rev().filter(|b| b % 2 == 1).chain((0..=blocks).filter(|b| b % 2 == 0)).collect();
        Self { model: Mutex::new(model), pool: Arc::new(pool), table, vocab_size: config.vocab_size }
    }

    /// Logits after each of `tokens`, which follow `computed` tokens that were run before.
    pub fn run(&self, computed: usize, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        let mut meta = BatchMeta::default();
        meta.push(&self.table, computed, tokens.len(), BLOCK_SIZE);
        let logits_rows = (0..tokens.len() as u32).collect();
        let batch = Batch { tokens: tokens.to_vec(), meta: Arc::new(meta), logits_rows };
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = model
            .step(&batch, &vec![None; tokens.len()], &self.pool, &mut |_| ())
            .map_err(anyhow::Error::msg)?;
        let expected = tokens.len() * self.vocab_size;
        ensure!(answer.logits.len() == expected, "{} logits, expected {expected}", answer.logits.len());
        Ok(answer.logits.chunks(self.vocab_size).map(<[f32]>::to_vec).collect())
    }

    /// Logits after each token of a prompt that is computed in chunks.
    pub fn prompt(&self, tokens: &[u32], chunk: usize) -> Result<Vec<Vec<f32>>> {
        let mut logits = Vec::new();
        for (index, part) in tokens.chunks(chunk).enumerate() {
            logits.extend(self.run(index * chunk, part)?);
        }
        Ok(logits)
    }

    /// The tokens that follow a prompt greedily, one step each, out of the first `rows` of the vocabulary.
    pub fn greedy(&self, prompt: &[u32], count: usize, rows: Option<usize>) -> Result<Vec<u32>> {
        let rows = rows.unwrap_or(self.vocab_size);
        let mut next = argmax(&self.prompt(prompt, prompt.len())?.last().context("an empty prompt")?[..rows]);
        let mut tokens = vec![next];
        while tokens.len() < count {
            next = argmax(&self.run(prompt.len() + tokens.len() - 1, &[next])?[0][..rows]);
            tokens.push(next);
        }
        Ok(tokens)
    }
}

fn open(dir: &Path) -> Result<(ModelConfig, Weights)> {
    let config = ModelConfig::load(dir)?;
    let files = Weights::open(dir)?;
    files.check(&config)?;
    Ok((config, files))
}

/// The layout of a pool for this model.
pub fn layout(config: &ModelConfig, dtype: KvDtype) -> KvLayout {
    KvLayout {
        num_layers: config.num_hidden_layers,
        num_kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        block_size: BLOCK_SIZE,
        dtype,
    }
}

/// The first of the largest values.
pub fn argmax(logits: &[f32]) -> u32 {
    let better = |best: usize, index: usize| if logits[index] > logits[best] { index } else { best };
    (0..logits.len()).fold(0, better) as u32
}

/// Largest absolute difference.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "rows of different length");
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Euclidean length of the difference, relative to that of the reference.
pub fn relative_error(ours: &[f32], reference: &[f32]) -> f32 {
    assert_eq!(ours.len(), reference.len(), "rows of different length");
    let difference: f64 = ours.iter().zip(reference).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let length: f64 = reference.iter().map(|b| f64::from(*b).powi(2)).sum();
    (difference / length).sqrt() as f32
}
