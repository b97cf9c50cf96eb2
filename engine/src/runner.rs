//! Runs one step: forward pass, then a token for each row that wants one.

use std::sync::Arc;

use kernels::KvPool;
use models::qwen::{Batch, Qwen};

use crate::core::Plan;
use crate::sampler::{Sampled, Vocabulary};

/// Computes steps. The engine's thread is the only caller.
pub trait Runner: Send {
    /// Writes the KV of the plan's tokens and returns one token (or why there is none) for each of `plan.samples`.
    ///
    /// Calls `progress(n)` with rising `n` when the KV of layers `..n` is in the pool and can be moved; how often, and
    /// whether at all, is its choice.
    ///
    /// Errors: the step failed as a whole; its KV must not be used.
    fn run(&mut self, plan: &Plan, progress: Progress<'_>) -> Result<Vec<Result<Sampled, String>>, String>;
}

/// Told of layers that are finished while a step computes.
pub type Progress<'a> = &'a mut dyn FnMut(usize);

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
    fn run(&mut self, plan: &Plan, progress: Progress<'_>) -> Result<Vec<Result<Sampled, String>>, String> {
        let batch = Batch {
            tokens: plan.tokens.clone(),
            meta: Arc::new(plan.meta.clone()),
            logits_rows: plan.samples.iter().map(|sample| sample.row).collect(),
        };
        let mut forward = || -> candle_core::Result<Option<Vec<f32>>> {
            let logits = self.model.forward_with(&batch, &self.pool, progress)?;
            logits.map(|logits| logits.flatten_all()?.to_vec1()).transpose()
        };
        let mut logits = forward().map_err(|error| error.to_string())?.unwrap_or_default();
        let rows = logits.chunks_exact_mut(self.vocabulary.size());
        Ok(rows.zip(&plan.samples).map(|(row, sample)| self.vocabulary.sample(row, sample)).collect())
    }
}
