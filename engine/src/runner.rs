//! Runs one step: forward pass, then a token for each row that wants one.

use std::sync::Arc;

use kernels::KvPool;
use models::qwen::{Batch, Qwen};

use crate::api::TokenId;
use crate::core::Plan;
use crate::sampler::Vocabulary;

/// Computes steps. The engine's thread is the only caller.
pub trait Runner: Send {
    /// Writes the KV of the plan's tokens and returns one token (or why there is none) for each of `plan.samples`.
    ///
    /// Errors: the step failed as a whole; its KV must not be used.
    fn run(&mut self, plan: &Plan) -> Result<Vec<Result<TokenId, String>>, String>;
}

/// A model on its device, with the pool that holds its KV.
pub struct ModelRunner {
    model: Qwen,
    pool: Arc<KvPool>,
    vocabulary: Vocabulary,
}

impl ModelRunner {
    pub fn new(model: Qwen, pool: Arc<KvPool>, vocabulary: Vocabulary) -> Self {
        Self { model, pool, vocabulary }
    }
}

impl Runner for ModelRunner {
    fn run(&mut self, plan: &Plan) -> Result<Vec<Result<TokenId, String>>, String> {
        let batch = Batch {
            tokens: plan.tokens.clone(),
            meta: Arc::new(plan.meta.clone()),
            logits_rows: plan.samples.iter().map(|sample| sample.row).collect(),
        };
        let forward = || -> candle_core::Result<Vec<Vec<f32>>> {
            self.model.forward(&batch, &self.pool)?.map_or(Ok(Vec::new()), |logits| logits.to_vec2())
        };
        let logits = forward().map_err(|error| error.to_string())?;
        let sample = |(row, sample): (&Vec<f32>, &crate::core::SampleRow)| {
            self.vocabulary.sample(row, &sample.params, sample.seed, sample.index)
        };
        Ok(logits.iter().zip(&plan.samples).map(sample).collect())
    }
}
