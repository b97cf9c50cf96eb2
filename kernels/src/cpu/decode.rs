//! Attention of a few query rows over bf16 KV, with bf16 products (AVX512-BF16): the speed of memory is the limit.
//!
//! The context is split at fixed positions, so that threads share a long one and the result depends on the sequence
//! alone. Each split gives a partial softmax; one pass at the end joins them (Flash-Decoding, Dao et al. 2023).

use std::arch::x86_64::*;

use half::bf16;

use super::attention::{Attention, Rows};
use super::dp::{broadcast, load};
use super::exp::exp2;
use super::simd::{transpose, zip};
use super::team;
use crate::batch::SeqSpan;
use crate::layout::Half;

/// Query rows x heads of a group that are computed here; more are a tile of prefill's kernel.
pub const MAX_LANES: usize = 8;

/// Keys of a split: 128 KiB of K and as much of V for heads of 128, enough to pay for the partial result.
const SPLIT: usize = 512;

/// Computes the rows of `seqs`, each of at most [`MAX_LANES`] lanes.
///
/// # Safety
/// As [`Attention::run`], which checked the lengths, and [`Attention::has_bf16_kernel`]. `out` is as long as `q`.
pub unsafe fn attend(task: &Attention<'_>, q: &[bf16], out: &Rows<bf16>, seqs: &[&SeqSpan]) {
    let dim = task.head_dim();
    let mut parts = Vec::new();
    for seq in seqs {
        for kv_head in 0..task.kv_heads() {
            parts.extend((0..seq.context_len).step_by(SPLIT).map(|first| Part { seq, kv_head, first }));
        }
    }
    let mut partials = vec![0f32; parts.len() * MAX_LANES * (dim + 2)];
    let partial = Rows(partials.as_mut_ptr());
    let slot = |index: usize| {
        let partial = &partial;
        // SAFETY: inside `partials`; each part has a slot of its own, and reads follow all writes.
        unsafe {
            std::slice::from_raw_parts_mut(
                partial.0.add(index * MAX_LANES * (dim + 2)),
                MAX_LANES * (dim + 2),
            )
        }
    };
    // SAFETY: passed on from the caller.
    team::run(parts.len(), |index| unsafe { parts[index].attend(task, q, slot(index)) });
    let mut index = 0;
    while index < parts.len() {
        let part = &parts[index];
        let count = part.seq.context_len.div_ceil(SPLIT);
        for lane in 0..part.lanes(task) {
            let splits =
                (index..index + count).map(|index| &slot(index)[lane * (dim + 2)..(lane + 1) * (dim + 2)]);
            // SAFETY: one lane's head, inside `out`, written by nobody else.
            let to = unsafe { std::slice::from_raw_parts_mut(out.0.add(part.at(task, lane)), dim) };
            join(splits, to);
        }
        index += count;
    }
}

/// Joins partial results `[max, sum, output…]`, maxima in units of log2.
fn join<'a>(splits: impl Iterator<Item = &'a [f32]> + Clone, out: &mut [bf16]) {
    let max = splits.clone().map(|split| split[0]).fold(f32::NEG_INFINITY, f32::max);
    let (mut sum, mut output) = (0f32, [0f32; 256]);
    for split in splits {
        let weight = (split[0] - max).exp2();
        sum += split[1] * weight;
        output.iter_mut().zip(&split[2..]).for_each(|(output, value)| *output += value * weight);
    }
    out.iter_mut().zip(output).for_each(|(out, value)| *out = bf16::from_f32(value / sum));
}

/// One split of one sequence, for one KV head.
struct Part<'a> {
    seq: &'a SeqSpan,
    kv_head: usize,
    /// Position of its first key.
    first: usize,
}

impl Part<'_> {
    fn lanes(&self, task: &Attention<'_>) -> usize {
        self.seq.q_len * task.group()
    }

    /// Index in `q` and `out` of the first element of a lane.
    fn at(&self, task: &Attention<'_>, lane: usize) -> usize {
        let (row, head) =
            (self.seq.q_start + lane / task.group(), self.kv_head * task.group() + lane % task.group());
        (row * task.heads + head) * task.head_dim()
    }

    /// Keys of this split that a lane sees.
    fn visible(&self, task: &Attention<'_>, lane: usize) -> usize {
        let context = self.seq.context_len - self.seq.q_len + lane / task.group() + 1;
        SPLIT.min(context.saturating_sub(self.first))
    }

    /// Writes `[max, sum, output…]` of each lane into `to`.
    ///
    /// # Safety
    /// As [`attend`].
    unsafe fn attend(&self, task: &Attention<'_>, q: &[bf16], to: &mut [f32]) {
        let (dim, lanes) = (task.head_dim(), self.lanes(task));
        let keys = SPLIT.min(self.seq.context_len - self.first);
        let mut scores = [[0f32; SPLIT]; MAX_LANES];
        let mut weights = [[bf16::ZERO; SPLIT]; MAX_LANES];
        let scale = std::f32::consts::LOG2_E / (dim as f32).sqrt();
        // SAFETY: passed on from the caller.
        unsafe { self.score(task, q, keys, &mut scores[..lanes]) };
        for lane in 0..lanes {
            let visible = self.visible(task, lane);
            // SAFETY: the CPU has AVX512-BF16.
            let stats = unsafe { soften(&mut scores[lane][..], visible, scale, &mut weights[lane]) };
            (to[lane * (dim + 2)], to[lane * (dim + 2) + 1]) = stats;
        }
        for (first, weights) in weights[..lanes].chunks(2).enumerate() {
            let to = &mut to[2 * first * (dim + 2)..];
            let mut at = 0;
            while at < dim {
                // SAFETY: passed on from the caller; parts are multiples of 32 that end at `dim`.
                at += unsafe {
                    match (dim - at, weights) {
                        (128.., [a, b]) => self.sum_values::<8, 2>(task, keys, [a, b], at, to),
                        (128.., [a, ..]) => self.sum_values::<8, 1>(task, keys, [a], at, to),
                        (_, [a, b]) => self.sum_values::<2, 2>(task, keys, [a, b], at, to),
                        (_, [a, ..]) => self.sum_values::<2, 1>(task, keys, [a], at, to),
                        (_, []) => dim,
                    }
                };
            }
        }
    }

    /// `scores[lane][key] = Q[lane] · K[first + key]`, sixteen keys at a time; the last sixteen may repeat a key.
    ///
    /// # Safety
    /// As [`attend`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn score(&self, task: &Attention<'_>, q: &[bf16], keys: usize, scores: &mut [[f32; SPLIT]]) {
        let dim = task.head_dim();
        let key = |key: usize| self.token(task, Half::Key, key.min(keys - 1));
        for first in (0..keys).step_by(16) {
            let rows: [*const u32; 16] = std::array::from_fn(|i| key(first + i));
            for (lane, scores) in scores.iter_mut().enumerate() {
                let q = q[self.at(task, lane)..][..dim].as_ptr().cast::<u32>();
                let mut sums = [_mm512_setzero_ps(); 16];
                for i in (0..dim / 2).step_by(16) {
                    // SAFETY: sixteen pairs of a head of `dim` elements, a multiple of 32, which nobody writes.
                    unsafe {
                        let query = load(q.add(i));
                        for (sum, row) in sums.iter_mut().zip(rows) {
                            *sum = _mm512_dpbf16_ps(*sum, query, load(row.add(i)));
                        }
                    }
                }
                let columns = transpose(sums);
                let sum = columns[1..].iter().fold(columns[0], |sum, column| _mm512_add_ps(sum, *column));
                // SAFETY: `first + 16 <= SPLIT`, both multiples of 16.
                unsafe { _mm512_storeu_ps(scores.as_mut_ptr().add(first), sum) };
            }
        }
    }

    /// `32 R / 2` elements from `at` of the weighted sums of values of `L` lanes; returns how many.
    ///
    /// # Safety
    /// As [`attend`]; the elements are inside the head.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn sum_values<const R: usize, const L: usize>(
        &self,
        task: &Attention<'_>,
        keys: usize,
        weights: [&[bf16; SPLIT]; L],
        at: usize,
        to: &mut [f32],
    ) -> usize {
        let mut sums = [[_mm512_setzero_ps(); R]; L];
        for key in (0..keys).step_by(2) {
            // An odd last key is paired with itself; its second weight is zero.
            let [even, odd] = [key, (key + 1).min(keys - 1)].map(|key| self.token(task, Half::Value, key));
            let pairs: [__m512bh; L] = std::array::from_fn(|lane| {
                let [low, high] =
                    [weights[lane][key], weights[lane][key + 1]].map(|weight| u32::from(weight.to_bits()));
                broadcast(low | high << 16)
            });
            for i in 0..R / 2 {
                // SAFETY: sixteen pairs inside the head, which nobody writes. Registers of the same size.
                let (low, high): (__m512bh, __m512bh) = unsafe {
                    let from = at / 2 + 16 * i;
                    let (low, high) = zip(
                        _mm512_loadu_si512(even.add(from).cast()),
                        _mm512_loadu_si512(odd.add(from).cast()),
                    );
                    (std::mem::transmute(low), std::mem::transmute(high))
                };
                for (sums, pair) in sums.iter_mut().zip(pairs) {
                    sums[2 * i] = _mm512_dpbf16_ps(sums[2 * i], low, pair);
                    sums[2 * i + 1] = _mm512_dpbf16_ps(sums[2 * i + 1], high, pair);
                }
            }
        }
        for (lane, sums) in sums.iter().enumerate() {
            let to = &mut to[lane * (task.head_dim() + 2) + 2 + at..][..16 * R];
            for (to, sum) in to.chunks_exact_mut(16).zip(sums) {
                // SAFETY: sixteen floats.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), *sum) };
            }
        }
        16 * R
    }

    /// The head of a key of this split, as pairs.
    #[inline]
    fn token(&self, task: &Attention<'_>, half: Half, key: usize) -> *const u32 {
        task.token::<bf16>(self.seq.table_start, self.first + key, half, self.kv_head).cast()
    }
}

/// Turns `visible` scores into weights, the rest into none; returns the maximum in units of log2, and the sum.
///
/// # Safety
/// The CPU has AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn soften(scores: &mut [f32], visible: usize, scale: f32, weights: &mut [bf16; SPLIT]) -> (f32, f32) {
    if visible == 0 {
        return (f32::NEG_INFINITY, 0.0);
    }
    let end = visible.next_multiple_of(16);
    scores[visible..end].fill(f32::NEG_INFINITY);
    let mut max = _mm512_set1_ps(f32::NEG_INFINITY);
    for scores in scores[..end].chunks_exact(16) {
        // SAFETY: sixteen floats.
        max = _mm512_max_ps(max, unsafe { _mm512_loadu_ps(scores.as_ptr()) });
    }
    let max = _mm512_reduce_max_ps(max) * scale;
    let mut sum = _mm512_setzero_ps();
    for (scores, weights) in scores[..end].chunks_exact(16).zip(weights.chunks_exact_mut(16)) {
        // SAFETY: sixteen floats and sixteen bf16.
        unsafe {
            let scores = _mm512_loadu_ps(scores.as_ptr());
            let weight = exp2(_mm512_fmsub_ps(scores, _mm512_set1_ps(scale), _mm512_set1_ps(max)));
            sum = _mm512_add_ps(sum, weight);
            weights.as_mut_ptr().cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(weight));
        }
    }
    (max, _mm512_reduce_add_ps(sum))
}
