//! Temperature, min-p, top-k, top-p and the draw.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::api::TokenId;
use crate::core::SampleRow;

/// Candidates less likely than the best by this factor's exponential are dropped: 150,000 of them together have a
/// probability below 1e-12.
const NEGLIGIBLE: f32 = 40.0;

/// A token drawn from `logits`, whose largest is at `best`.
pub fn draw(logits: &[f32], best: TokenId, row: &SampleRow) -> TokenId {
    let params = &row.params;
    let top = logits[best as usize];
    // ln(min_p) below the best at most; min_p of 0 gives minus infinity.
    let floor = params.min_p.ln().max(-NEGLIGIBLE);
    let mut candidates: Vec<(f32, TokenId)> = (0..)
        .zip(logits)
        .map(|(id, &logit)| ((logit - top) / params.temperature, id))
        .filter(|(scaled, _)| *scaled >= floor)
        .collect();
    if let Some(k) = params.top_k {
        keep_likeliest(&mut candidates, k as usize);
    }
    if params.top_p < 1.0 {
        keep_nucleus(&mut candidates, f64::from(params.top_p));
    }
    // Whatever was dropped, tokens are drawn in the order of their ids: a device need not sort to draw the same.
    candidates.sort_unstable_by_key(|(_, id)| *id);
    let mass: f64 = candidates.iter().map(|(scaled, _)| weight(*scaled)).sum();
    let mut left = uniform(row.seed, row.index) * mass;
    for (scaled, id) in &candidates {
        left -= weight(*scaled);
        if left < 0.0 {
            return *id;
        }
    }
    // Rounding left a rest: the draw was at the very end.
    candidates.last().map_or(best, |(_, id)| *id)
}

fn weight(scaled: f32) -> f64 {
    f64::from(scaled).exp()
}

/// Likelier first; equal ones by id, so that the order depends on nothing else.
fn likelier(a: &(f32, TokenId), b: &(f32, TokenId)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

fn keep_likeliest(candidates: &mut Vec<(f32, TokenId)>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, likelier);
        candidates.truncate(count);
    }
}

/// Keeps the fewest likeliest candidates whose share is at least `top_p`; at least one.
///
/// Sorts no more than it keeps, by doubling: a nucleus is small, a vocabulary is not.
fn keep_nucleus(candidates: &mut Vec<(f32, TokenId)>, top_p: f64) {
    let target = top_p * candidates.iter().map(|(scaled, _)| weight(*scaled)).sum::<f64>();
    let mut sorted = 0;
    let mut sum = 0.0;
    while sorted < candidates.len() {
        let next = (sorted.max(64) * 2).min(candidates.len());
        if next < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(next - sorted, likelier);
        }
        candidates[sorted..next].sort_unstable_by(likelier);
        for index in sorted..next {
            sum += weight(candidates[index].0);
            if sum >= target {
                return candidates.truncate(index + 1);
            }
        }
        sorted = next;
    }
}

/// A number in [0, 1) that depends on the seed and the index only.
pub fn uniform(seed: u64, index: u64) -> f64 {
    (xxh3_64_with_seed(&index.to_le_bytes(), seed) >> 11) as f64 / (1u64 << 53) as f64
}
