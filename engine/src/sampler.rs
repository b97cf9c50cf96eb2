//! From a row of logits to a token.
//!
//! Deterministic: the random number of a token depends on the request's seed and the token's index in the answer only,
//! so a request gives the same text alone or in a batch, after preemption, and across the handoff.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::api::{SamplingParams, TokenId};

/// Which rows of the vocabulary have a token. Rows without one (padding of the embedding) are never sampled.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    valid: Vec<bool>,
}

impl Vocabulary {
    /// `valid[id]` says whether row `id` has a token. Panics if none has.
    pub fn new(valid: Vec<bool>) -> Self {
        assert!(valid.iter().any(|&valid| valid), "a vocabulary without a token. This is a bug.");
        Self { valid }
    }

    pub fn size(&self) -> usize {
        self.valid.len()
    }

    /// The next token for one row of logits; `index` counts the answer's tokens from 0.
    ///
    /// Errors: every logit is NaN or minus infinity, so that no token can be told from another.
    pub fn sample(&self, logits: &[f32], params: &SamplingParams, seed: u64, index: u64) -> Result<TokenId, String> {
        let best = self.argmax(logits).ok_or("the model gave no finite logit for any token")?;
        if params.temperature == 0.0 || params.top_k == Some(1) {
            return Ok(best);
        }
        let mut candidates: Vec<(f32, TokenId)> = (0..logits.len() as u32)
            .filter(|&id| self.valid[id as usize] && logits[id as usize] > f32::NEG_INFINITY)
            .map(|id| (logits[id as usize], id))
            .collect();
        // Likelier first; equal logits by id, so that the order does not depend on the selection's internals.
        let likelier = |a: &(f32, TokenId), b: &(f32, TokenId)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let kept = params.top_k.map_or(candidates.len(), |k| candidates.len().min(k as usize));
        if kept < candidates.len() {
            candidates.select_nth_unstable_by(kept, likelier);
            candidates.truncate(kept);
        }
        candidates.sort_unstable_by(likelier);
        let top = candidates[0].0;
        let weights: Vec<f64> =
            candidates.iter().map(|(logit, _)| (((logit - top) / params.temperature) as f64).exp()).collect();
        let nucleus = nucleus(&weights, params.top_p as f64);
        let mass: f64 = weights[..nucleus].iter().sum();
        let mut left = uniform(seed, index) * mass;
        for (weight, (_, id)) in weights[..nucleus].iter().zip(&candidates) {
            left -= weight;
            if left < 0.0 {
                return Ok(*id);
            }
        }
        Ok(candidates[nucleus - 1].1)
    }

    fn argmax(&self, logits: &[f32]) -> Option<TokenId> {
        assert_eq!(logits.len(), self.valid.len(), "a row of logits is the vocabulary's size. This is a bug.");
        let mut best: Option<(f32, TokenId)> = None;
        for (id, (&logit, &valid)) in logits.iter().zip(&self.valid).enumerate() {
            if valid && logit > best.map_or(f32::NEG_INFINITY, |(top, _)| top) {
                best = Some((logit, id as TokenId));
            }
        }
        best.map(|(_, id)| id)
    }
}

/// How many of the likeliest candidates are needed for a share of `top_p`. At least one.
fn nucleus(weights: &[f64], top_p: f64) -> usize {
    if top_p >= 1.0 {
        return weights.len();
    }
    let target = top_p * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    for (i, weight) in weights.iter().enumerate() {
        sum += weight;
        if sum >= target {
            return i + 1;
        }
    }
    weights.len()
}

/// A number in [0, 1) that depends on the seed and the index only.
fn uniform(seed: u64, index: u64) -> f64 {
    (xxh3_64_with_seed(&index.to_le_bytes(), seed) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32, top_k: Option<u32>, top_p: f32) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, ..Default::default() }
    }

    fn counts(params: &SamplingParams, logits: &[f32]) -> Vec<usize> {
        let vocabulary = Vocabulary::new(vec![true; logits.len()]);
        let mut counts = vec![0; logits.len()];
        for index in 0..20_000 {
            counts[vocabulary.sample(logits, params, 7, index).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_equal_maxima_and_never_a_row_without_a_token() {
        let mut valid = vec![true; 5];
        valid[4] = false;
        let vocabulary = Vocabulary::new(valid);
        for params in [params(0.0, None, 1.0), params(1.0, Some(1), 1.0)] {
            assert_eq!(vocabulary.sample(&[0.0, 3.0, 1.0, 3.0, 99.0], &params, 1, 0), Ok(1));
        }
        for index in 0..1000 {
            assert_ne!(vocabulary.sample(&[0.0, 3.0, 1.0, 3.0, 99.0], &params(2.0, None, 1.0), 1, index), Ok(4));
        }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let sum: f32 = logits.iter().map(|logit| (logit / 0.8).exp()).sum();
        for (count, logit) in counts(&params(0.8, None, 1.0), &logits).iter().zip(logits) {
            let expected = 20_000.0 * (logit / 0.8).exp() / sum;
            assert!((*count as f32 - expected).abs() < 5.0 * expected.sqrt(), "{count} instead of {expected}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [0.0, 1.0, 2.0, -1.0];
        assert!(counts(&params(1.0, Some(2), 1.0), &logits).iter().zip([false, true, true, false]).all(|(c, k)| (*c > 0) == k));
        // Shares: 0.64, 0.24, 0.09, 0.03.
        assert!(counts(&params(1.0, None, 0.5), &logits).iter().zip([false, false, true, false]).all(|(c, k)| (*c > 0) == k));
        assert!(counts(&params(1.0, None, 0.7), &logits).iter().zip([false, true, true, false]).all(|(c, k)| (*c > 0) == k));
    }

    #[test]
    fn a_row_of_nan_is_an_error_not_a_token() {
        let vocabulary = Vocabulary::new(vec![true; 2]);
        assert!(vocabulary.sample(&[f32::NAN, f32::NAN], &params(0.0, None, 1.0), 0, 0).is_err());
        assert!(vocabulary.sample(&[f32::NAN, f32::NEG_INFINITY], &params(1.0, None, 1.0), 0, 0).is_err());
        assert_eq!(vocabulary.sample(&[f32::NAN, 0.5], &params(1.0, None, 1.0), 0, 0), Ok(1));
    }
}
