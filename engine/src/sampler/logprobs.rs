//! Log-probabilities of the model's plain logits.

use crate::api::{Logprobs, TokenId};

/// Taken before anything changes the logits.
pub struct Plain {
    logits: Vec<f32>,
    log_sum: f32,
    top: Vec<(TokenId, f32)>,
}

impl Plain {
    /// Softmax over `logits` and its `count` likeliest tokens.
    pub fn of(logits: &[f32], count: usize) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
        let log_sum = max + sum.ln() as f32;
        Self { logits: logits.to_vec(), log_sum, top: likeliest(logits, count, log_sum) }
    }

    /// The report for the token that was sampled in the end.
    pub fn with(self, token: TokenId) -> Logprobs {
        Logprobs { logprob: self.logits[token as usize] - self.log_sum, top: self.top }
    }
}

/// The `count` largest, largest first, equal ones by id. One pass: `count` is at most 20.
fn likeliest(logits: &[f32], count: usize, log_sum: f32) -> Vec<(TokenId, f32)> {
    let mut top: Vec<(TokenId, f32)> = Vec::with_capacity(count + 1);
    for (id, &logit) in (0..).zip(logits) {
        if logit == f32::NEG_INFINITY
            || (top.len() == count && top.last().is_none_or(|(_, least)| logit <= *least))
        {
            continue;
        }
        let at = top.partition_point(|(_, other)| *other >= logit);
        top.insert(at, (id, logit));
        top.truncate(count);
    }
    top.iter_mut().for_each(|(_, logit)| *logit -= log_sum);
    top
}
