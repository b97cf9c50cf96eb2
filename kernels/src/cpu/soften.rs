//! Softmax weights of one row of scores.

use half::bf16;

use super::exp::exp;
use super::{Element, Isa, dispatch};

/// How far the largest score may rise above the one that weights are relative to before the latter follows, in units of
/// log2: weights then reach 256, which loses nothing in f32 or bf16, and outputs are rarely rescaled.
const SLACK: f32 = 8.0;

/// A row's online softmax (Milakov & Gimelshein 2018).
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// What weights are relative to: a score times [`Self::scale`].
    base: f32,
    sum: f32,
    /// Scores to units of log2.
    scale: f32,
}

/// Where weights go: as many as scores, in the form that products take.
pub enum Weights<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

impl Softmax {
    pub fn new(head_dim: usize) -> Self {
        let scale = std::f32::consts::LOG2_E / (head_dim as f32).sqrt();
        Self { base: f32::NEG_INFINITY, sum: 0.0, scale }
    }

    /// The sum of all weights so far.
    pub fn sum(&self) -> f32 {
        self.sum
    }

    /// Turns the first `visible` scores into weights and the others into none. Returns what the outputs so far are to be
    /// multiplied with.
    pub fn add(&mut self, isa: Isa, scores: &[f32], visible: usize, weights: Weights<'_>) -> f32 {
        let (seen, hidden) = scores.split_at(visible);
        if seen.is_empty() {
            match weights {
                Weights::F32(weights) => weights[..hidden.len()].fill(0.0),
                Weights::Bf16(weights) => weights[..hidden.len()].fill(bf16::ZERO),
            }
            return 1.0;
        }
        let highest = largest(seen) * self.scale;
        let mut keep = 1.0;
        if highest > self.base + SLACK || self.base == f32::NEG_INFINITY {
            keep = (self.base - highest).exp2();
            self.base = highest;
        }
        let sum = match weights {
            #[cfg(target_arch = "x86_64")]
            Weights::Bf16(weights) if isa.computes_bf16() => {
                weights[visible..scores.len()].fill(bf16::ZERO);
                // SAFETY: the CPU has what `isa` says, and there are as many weights as scores.
                unsafe { wide(seen, self.scale, self.base, &mut weights[..visible]) }
            }
            Weights::Bf16(weights) => {
                weights[visible..scores.len()].fill(bf16::ZERO);
                soften(seen, self.scale, self.base, &mut weights[..visible])
            }
            Weights::F32(weights) => {
                weights[visible..scores.len()].fill(0.0);
                soften(seen, self.scale, self.base, &mut weights[..visible])
            }
        };
        let _ = isa;
        self.sum = self.sum * keep + sum;
        keep
    }
}

dispatch! {
    /// The largest of some scores; NaN is passed over, and minus infinity where there is nothing else.
    pub fn largest(scores: &[f32]) -> f32 {
        const LANES: usize = 64;
        // What f32::max does about NaN costs three instructions.
        let higher = |a: f32, b: f32| if a > b { a } else { b };
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = scores.as_chunks::<LANES>();
        for chunk in chunks {
            (0..LANES).for_each(|i| lanes[i] = higher(chunk[i], lanes[i]));
        }
        (0..rest.len()).for_each(|i| lanes[i] = higher(rest[i], lanes[i]));
        let mut width = LANES / 2;
        while width > 0 {
            (0..width).for_each(|i| lanes[i] = higher(lanes[i + width], lanes[i]));
            width /= 2;
        }
        lanes[0]
    }
}

dispatch! {
    /// Weights `2^(score * scale - base)`; returns their sum.
    pub fn soften<E: Element>(scores: &[f32], scale: f32, base: f32, weights: &mut [E]) -> f32 {
        let mut sums = [0f32; 16];
        let weight = |score: f32| exp((score * scale - base) * std::f32::consts::LN_2);
        let (scores, scores_rest) = scores.as_chunks::<16>();
        let (weights, weights_rest) = weights.as_chunks_mut::<16>();
        for (scores, weights) in scores.iter().zip(weights) {
            for i in 0..16 {
                let weight = weight(scores[i]);
                sums[i] += weight;
                weights[i] = E::narrow(weight);
            }
        }
        for ((score, to), sum) in scores_rest.iter().zip(weights_rest).zip(&mut sums) {
            let weight = weight(*score);
            *sum += weight;
            *to = E::narrow(weight);
        }
        sums.iter().sum()
    }
}

/// [`soften`] by sixteen.
///
/// # Safety
/// The CPU has AVX512-BF16; there are as many weights as scores.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn wide(scores: &[f32], scale: f32, base: f32, weights: &mut [bf16]) -> f32 {
    use super::exp::exp2;
    use std::arch::x86_64::*;
    let (scale, base) = (_mm512_set1_ps(scale), _mm512_set1_ps(base));
    let mut sums = [_mm512_setzero_ps(); 2];
    for (i, (scores, weights)) in scores.chunks(16).zip(weights.chunks_mut(16)).enumerate() {
        let mask = ((1u32 << scores.len()) - 1) as u16;
        // SAFETY: the mask has a bit for each score and weight.
        unsafe {
            let scores = _mm512_maskz_loadu_ps(mask, scores.as_ptr());
            let weight = _mm512_maskz_mov_ps(mask, exp2(_mm512_fmsub_ps(scores, scale, base)));
            sums[i % 2] = _mm512_add_ps(sums[i % 2], weight);
            let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weight));
            _mm256_mask_storeu_epi16(weights.as_mut_ptr().cast(), mask, halves);
        }
    }
    _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_in_parts_agree_with_f64_whole() {
        for isa in Isa::available() {
            for (len, step, rise) in [(1, 1, 0.0), (40, 16, 0.0), (300, 64, 0.3), (513, 128, -0.1)] {
                let scores: Vec<f32> =
                    (0..len).map(|i| (i * 37 % 101) as f32 / 10.0 + rise * i as f32).collect();
                let (mut softmax, mut output, exact) =
                    (Softmax::new(4), 0f64, |score: f32| (f64::from(score) / 2.0).exp());
                for scores in scores.chunks(step) {
                    let mut weights = vec![f32::NAN; scores.len() + 3];
                    let mut padded = scores.to_vec();
                    padded.extend([f32::NAN; 3]);
                    let keep = softmax.add(isa, &padded, scores.len(), Weights::F32(&mut weights));
                    assert_eq!(weights[scores.len()..], [0.0; 3]);
                    output = output * f64::from(keep) + weights.iter().map(|w| f64::from(*w)).sum::<f64>();
                    let mut rounded = vec![bf16::NAN; scores.len()];
                    softmax.clone().add(isa, scores, scores.len(), Weights::Bf16(&mut rounded));
                    for (a, b) in weights.iter().zip(&rounded) {
                        assert!((a - b.to_f32()).abs() <= a.abs() / 250.0, "{isa:?} {a} {b}");
                    }
                }
                let total: f64 = scores.iter().map(|s| exact(*s)).sum();
                let base = exact(softmax.base / softmax.scale);
                for sum in [f64::from(softmax.sum()), output] {
                    assert!((sum * base / total - 1.0).abs() < 1e-5, "{isa:?} {len}: {sum} {base} {total}");
                }
            }
        }
    }
}
