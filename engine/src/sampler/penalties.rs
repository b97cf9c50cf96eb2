//! Penalties for tokens that were there before.

use std::collections::HashMap;

use crate::api::TokenId;
use crate::core::SampleRow;

/// Changes the logits of tokens in the row's history as the request's penalties say.
pub fn apply(logits: &mut [f32], row: &SampleRow) {
    let params = &row.params;
    if !params.has_penalties() {
        return;
    }
    let (prompt, answer) = row.history.split_at(row.prompt_len);
    let mut counts: HashMap<TokenId, u32> = prompt.iter().map(|&id| (id, 0)).collect();
    answer.iter().for_each(|&id| *counts.entry(id).or_default() += 1);
    for (id, count) in counts {
        let logit = &mut logits[id as usize];
        match *logit > 0.0 {
            true => *logit /= params.repetition_penalty,
            false => *logit *= params.repetition_penalty,
        }
        if count > 0 {
            *logit -= params.presence_penalty + params.frequency_penalty * count as f32;
        }
    }
}
