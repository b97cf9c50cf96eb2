//! The seam between the engine and whatever computes: a model on some device.

use std::fmt::Debug;
use std::sync::Arc;

use kernels::cuda::sample::SampleParams;
use kernels::{BatchMeta, KvPool, ops};

use crate::qwen::Qwen;

/// One step's input.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Packed token ids.
    pub tokens: Vec<u32>,
    pub meta: Arc<BatchMeta>,
    /// Packed rows whose logits are wanted, ascending.
    pub logits_rows: Vec<u32>,
}

/// How a row's token is drawn, where temperature, min-p, top-k, top-p and a random number say all of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// In [0, 1).
    pub uniform: f64,
    /// 0: the likeliest token.
    pub temperature: f32,
    pub min_p: f32,
    pub top_p: f32,
    pub top_k: Option<u32>,
}

impl Draw {
    /// The same for the device's kernel.
    pub(crate) fn params(&self) -> SampleParams {
        SampleParams {
            uniform: self.uniform,
            temperature: self.temperature,
            floor: self.min_p.ln().max(NEGLIGIBLE),
            top_p: self.top_p,
            top_k: self.top_k.map_or(0, |k| i32::try_from(k).unwrap_or(i32::MAX)),
        }
    }
}

/// Tokens less likely than the likeliest by a factor of e^40 are never drawn.
const NEGLIGIBLE: f32 = -40.0;

/// What a model says about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The next row of [`Answer::logits`]: whoever asked samples.
    Logits,
    /// The device sampled; `None` where no logit is finite.
    Token(Option<u32>),
}

/// What a step gives for the rows that were asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub rows: Vec<Row>,
    /// f32 `[rows that are Row::Logits, vocabulary]`.
    pub logits: Vec<f32>,
}

/// A loaded model on its device. One step at a time.
pub trait Model: Send + Debug {
    /// Computes the batch, writes its K and V into the pool, and answers for each of `batch.logits_rows`. A device that
    /// can sample does so for the rows with a draw; every other row's logits are returned.
    ///
    /// Calls `progress(n)` with rising `n` when the KV of layers `..n` is in the pool and can be moved, if ever.
    ///
    /// Errors: the step failed as a whole; its KV must not be used.
    fn step(
        &mut self,
        batch: &Batch,
        draws: &[Option<Draw>],
        pool: &Arc<KvPool>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Answer, String>;

    /// Whether the device still computes, after a step has failed: a GPU's errors may be its last.
    ///
    /// Errors: it does not, and no later step will succeed.
    fn check(&mut self) -> Result<(), String> {
        Ok(())
    }
}

impl Model for Qwen {
    fn step(
        &mut self,
        batch: &Batch,
        _draws: &[Option<Draw>],
        pool: &Arc<KvPool>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Answer, String> {
        let mut forward = || -> candle_core::Result<Vec<f32>> {
            let logits = self.forward_with(batch, pool, progress)?;
            Ok(logits.map(ops::into_vec).transpose()?.unwrap_or_default())
        };
        let logits = forward().map_err(|error| error.to_string())?;
        Ok(Answer { rows: vec![Row::Logits; batch.logits_rows.len()], logits })
    }
}
