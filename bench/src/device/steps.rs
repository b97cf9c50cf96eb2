//! Steps of a model, timed.

use std::sync::Arc;
use std::time::Instant;

use kernels::cuda::Gpu;
use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};
use models::gpu::{GpuLimits, GpuModel};
use models::model::{Batch, Draw, Model};
use models::qwen::{ComputeDtype, Qwen};
use models::{ModelConfig, SourceOptions, Weights};

use crate::error::{BenchError, Result};
use crate::stats::median;

/// Steps before those that are timed: a device captures its graphs, memory is touched.
pub const WARMUP: usize = 4;

const BLOCK_SIZE: usize = 16;

/// What the model and its pool must hold.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Rows of the longest step.
    pub rows: usize,
    pub sequences: usize,
    /// Tokens of each.
    pub context: usize,
}

/// A model with a pool for several sequences.
pub struct Steps {
    pub config: ModelConfig,
    model: Box<dyn Model>,
    pool: Arc<KvPool>,
    /// Blocks of each sequence.
    blocks: usize,
}

impl Steps {
    pub fn load(model: &str, gpu: Option<&Gpu>, size: Size) -> Result<Self> {
        let dir = models::resolve(model, &SourceOptions::from_vars(|name| std::env::var(name).ok()))?;
        let (config, weights) = (ModelConfig::load(&dir)?, Weights::open(&dir)?);
        weights.check(&config)?;
        if size.context > config.max_position_embeddings {
            let limit = config.max_position_embeddings;
            return Err(BenchError::Usage(format!(
                "{} tokens, but the model's limit is {limit}",
                size.context
            )));
        }
        let layout = KvLayout {
            num_layers: config.num_hidden_layers,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            block_size: BLOCK_SIZE,
            dtype: KvDtype::Bf16,
        };
        let blocks = size.context.div_ceil(BLOCK_SIZE);
        let all = blocks * size.sequences;
        let (model, pool): (Box<dyn Model>, _) = match gpu {
            None => {
                let model = Qwen::load(&config, &weights, ComputeDtype::Stored, size.context)?;
                let pool = KvPool::new(layout, all).map_err(BenchError::io("a KV pool"))?;
                (Box::new(model), pool)
            }
            Some(gpu) => {
                let (max_len, max_rows, max_seqs) = (size.context, size.rows, size.sequences);
                let limits = GpuLimits { max_len, max_rows, max_seqs, eager: false };
                let valid = vec![true; config.vocab_size];
                let model = GpuModel::load(gpu, &config, &weights, ComputeDtype::Stored, limits, &valid)?;
                (Box::new(model), KvPool::new_on(gpu, layout, all, 0)?)
            }
        };
        Ok(Self { config, model, pool: Arc::new(pool), blocks })
    }

    /// Milliseconds of a decode step of `batch` sequences with `context` tokens each on average, median over repeats.
    pub fn decode(&mut self, batch: usize, context: usize, steps: usize, repeats: usize) -> Result<f64> {
        let mut times = Vec::new();
        // What the KV holds does not matter to the time; positions grow as in a real answer, the same in each repeat.
        for _ in 0..=repeats {
            let first = context - (WARMUP + steps / 2).min(context - 1);
            (0..WARMUP).try_for_each(|i| self.step(batch, first + i, 1))?;
            let started = Instant::now();
            (0..steps).try_for_each(|i| self.step(batch, first + WARMUP + i, 1))?;
            times.push(started.elapsed().as_secs_f64() * 1e3 / steps as f64);
        }
        // The first repeat pays for the first use of everything.
        median(&times[1..]).ok_or_else(|| BenchError::Usage("--repeats is 0, expected at least 1".into()))
    }

    /// Milliseconds of a prompt of `tokens` in one step, median over repeats.
    pub fn prefill(&mut self, tokens: usize, repeats: usize) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..=repeats {
            let started = Instant::now();
            self.step(1, 0, tokens)?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
        median(&times[1..]).ok_or_else(|| BenchError::Usage("--repeats is 0, expected at least 1".into()))
    }

    /// One step of `new` tokens after `computed` of each of `batch` sequences, each of which samples one greedily.
    fn step(&mut self, batch: usize, computed: usize, new: usize) -> Result<()> {
        let mut meta = BatchMeta::default();
        let (mut tokens, mut logits_rows) = (Vec::new(), Vec::new());
        for sequence in 0..batch {
            let table: Vec<u32> =
                (0..self.blocks).map(|block| (sequence * self.blocks + block) as u32).collect();
            meta.push(&table, computed, new, BLOCK_SIZE);
            tokens.extend(
                (0..new).map(|i| ((computed + i) * 7 + sequence) as u32 % self.config.vocab_size as u32),
            );
            logits_rows.push(tokens.len() as u32 - 1);
        }
        let greedy = Draw { uniform: 0.0, temperature: 0.0, min_p: 0.0, top_p: 1.0, top_k: None };
        let input = Batch { tokens, meta: Arc::new(meta), logits_rows };
        let answer = self.model.step(&input, &vec![Some(greedy); batch], &self.pool, &mut |_| ());
        let answer = answer.map_err(|reason| BenchError::Checks(vec![reason]))?;
        match answer.rows.len() == batch {
            true => Ok(()),
            false => {
                Err(BenchError::Checks(vec![format!("{} of {batch} rows were sampled", answer.rows.len())]))
            }
        }
    }
}
