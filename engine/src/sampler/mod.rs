//! From a row of logits to a token.
//!
//! Deterministic: the random number of a token depends on the request's seed and the token's index in the answer only,
//! so a request gives the same text alone or in a batch, after preemption, and across the handoff.
//!
//! Order, as in vLLM: log-probabilities of the plain logits; suppressed tokens and bias; penalties; then greedy, or
//! temperature, min-p, top-k, top-p and a draw.

mod draw;
mod logprobs;
mod penalties;

pub use draw::uniform;

use kernels::cpu::largest;

use crate::api::{Logprobs, TokenId};
use crate::core::SampleRow;

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: TokenId,
    /// If the request asked for them.
    pub logprobs: Option<Box<Logprobs>>,
}

/// Which rows of the vocabulary have a token. Rows without one (padding of the embedding) are never sampled.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    size: usize,
    /// Few, if any.
    without_token: Vec<TokenId>,
}

impl Vocabulary {
    /// `valid[id]` says whether row `id` has a token. Panics if none has.
    pub fn new(valid: Vec<bool>) -> Self {
        assert!(valid.iter().any(|&valid| valid), "a vocabulary without a token. This is a bug.");
        let without_token = (0..).zip(&valid).filter(|(_, valid)| !**valid).map(|(id, _)| id).collect();
        Self { size: valid.len(), without_token }
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// The next token for one row of logits, which is changed on the way.
    ///
    /// Errors: every logit is NaN or minus infinity, so that no token can be told from another.
    pub fn sample(&self, logits: &mut [f32], row: &SampleRow) -> Result<Sampled, String> {
        assert_eq!(logits.len(), self.size, "a row of logits is the vocabulary's size. This is a bug.");
        self.without_token.iter().for_each(|&id| logits[id as usize] = f32::NEG_INFINITY);
        for logit in logits.iter_mut() {
            *logit = if logit.is_nan() { f32::NEG_INFINITY } else { *logit };
        }
        if largest(logits) == f32::NEG_INFINITY {
            return Err("the model gave no finite logit for any token".into());
        }
        let plain = row.params.logprobs.map(|count| logprobs::Plain::of(logits, count as usize));
        // What is asked for explicitly wins over least length: if nothing else is left, the end may come early.
        let before = row.suppressed.iter().map(|&id| (id, logits[id as usize])).collect::<Vec<_>>();
        row.suppressed.iter().for_each(|&id| logits[id as usize] = f32::NEG_INFINITY);
        if !before.is_empty() && largest(logits) == f32::NEG_INFINITY {
            before.into_iter().for_each(|(id, logit)| logits[id as usize] = logit);
        }
        row.params.logit_bias.iter().for_each(|&(id, bias)| logits[id as usize] += bias);
        penalties::apply(logits, row);
        let best = argmax(logits).ok_or("penalties and bias left no token with a finite logit")?;
        let token = match row.params.temperature == 0.0 || row.params.top_k == Some(1) {
            true => best,
            false => draw::draw(logits, best, row),
        };
        let logprobs = plain.map(|plain| Box::new(plain.with(token)));
        Ok(Sampled { token, logprobs })
    }
}

/// The first of the largest logits; `None` if all are NaN or minus infinity.
fn argmax(logits: &[f32]) -> Option<TokenId> {
    const CHUNK: usize = 16;
    let top = largest(logits);
    if top == f32::NEG_INFINITY {
        return None;
    }
    // A chunk without an early end is vector code.
    let holds_it = |chunk: &[f32]| chunk.iter().fold(false, |holds, logit| holds | (*logit == top));
    let chunk = logits.chunks(CHUNK).position(holds_it)?;
    let within = logits[chunk * CHUNK..].iter().position(|logit| *logit == top)?;
    Some((chunk * CHUNK + within) as TokenId)
}

#[cfg(test)]
mod tests;
