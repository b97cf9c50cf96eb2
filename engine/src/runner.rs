//! Runs one step: forward pass, then a token for each row that wants one.

use std::sync::{Arc, Mutex, PoisonError};

use kernels::KvPool;
use kernels::cpu::team;
use models::model::{Batch, Draw, Model, Row};

use crate::core::{Plan, SampleRow};
use crate::sampler::{Sampled, Vocabulary, uniform};

/// Computes steps. The engine's thread is the only caller.
pub trait Runner: Send {
    /// Writes the KV of the plan's tokens and returns one token (or why there is none) for each of `plan.samples`.
    ///
    /// Calls `progress(n)` with rising `n` when the KV of layers `..n` is in the pool and can be moved; how often, and
    /// whether at all, is its choice.
    ///
    /// Errors: the step failed as a whole; its KV must not be used.
    fn run(&mut self, plan: &Plan, progress: Progress<'_>) -> Result<Vec<Result<Sampled, String>>, String>;

    /// Whether the device still computes, after a step has failed.
    ///
    /// Errors: it does not, and no later step will succeed.
    fn check(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// Told of layers that are finished while a step computes.
pub type Progress<'a> = &'a mut dyn FnMut(usize);

/// A model on its device, with the pool that holds its KV.
pub struct ModelRunner {
    model: Box<dyn Model>,
    pool: Arc<KvPool>,
    vocabulary: Vocabulary,
}

impl ModelRunner {
    pub fn new(model: Box<dyn Model>, pool: Arc<KvPool>, vocabulary: Vocabulary) -> Self {
        Self { model, pool, vocabulary }
    }
}

impl Runner for ModelRunner {
    fn check(&mut self) -> Result<(), String> {
        self.model.check()
    }

    fn run(&mut self, plan: &Plan, progress: Progress<'_>) -> Result<Vec<Result<Sampled, String>>, String> {
        let batch = Batch {
            tokens: plan.tokens.clone(),
            meta: Arc::new(plan.meta.clone()),
            logits_rows: plan.samples.iter().map(|sample| sample.row).collect(),
        };
        let draws: Vec<Option<Draw>> = plan.samples.iter().map(draw).collect();
        let mut answer = self.model.step(&batch, &draws, &self.pool, progress)?;
        let mut logits = answer.logits.chunks_exact_mut(self.vocabulary.size());
        let outcome = |row: &Row| match row {
            Row::Token(token) => {
                let token = token.ok_or_else(|| "the model gave no finite logit for any token".to_owned());
                Outcome::Sampled(token.map(|token| Sampled { token, logprobs: None }))
            }
            Row::Logits => {
                let logits = logits.next();
                Outcome::Logits(logits.expect("a model returns the logits that it says. This is a bug."))
            }
        };
        let outcomes: Vec<_> = answer.rows.iter().map(outcome).map(Mutex::new).collect();
        // A row is a vocabulary long: some hundred microseconds, of which a step of many rows would wait for each.
        team::run(outcomes.len(), |index| {
            let mut outcome = outcomes[index].lock().unwrap_or_else(PoisonError::into_inner);
            if let Outcome::Logits(logits) = &mut *outcome {
                *outcome = Outcome::Sampled(self.vocabulary.sample(logits, &plan.samples[index]));
            }
        });
        let sampled = |outcome: Mutex<Outcome<'_>>| match outcome.into_inner() {
            Ok(Outcome::Sampled(sampled)) => sampled,
            _ => unreachable!("every row was sampled above. This is a bug."),
        };
        Ok(outcomes.into_iter().map(sampled).collect())
    }
}

/// A row before and after it is sampled.
enum Outcome<'a> {
    Logits(&'a mut [f32]),
    Sampled(Result<Sampled, String>),
}

/// How a device may sample the row, if nothing is asked for that only the sampler here does.
fn draw(row: &SampleRow) -> Option<Draw> {
    let params = &row.params;
    let plain = params.logprobs.is_none()
        && params.logit_bias.is_empty()
        && !params.has_penalties()
        && row.suppressed.is_empty();
    plain.then(|| Draw {
        uniform: uniform(row.seed, row.index),
        temperature: params.temperature,
        min_p: params.min_p,
        top_p: params.top_p,
        top_k: params.top_k,
    })
}
