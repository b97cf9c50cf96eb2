//! Few rows in bf16 products (AVX512-BF16).

use std::arch::x86_64::*;

use half::bf16;

use super::super::dp::{broadcast, load, pairs_of};
use super::super::exp::exp2;
use super::super::simd::{transpose, zip};
use super::{Kernel, SPLIT, Step, fetch};

/// Keys whose scores fill a register.
const STEP: usize = 16;

/// bf16 queries, KV, weights and outputs; sums are f32. For heads that [`super::Attention::has_bf16_kernel`].
pub struct Bf16;

impl Kernel<STEP> for Bf16 {
    type Query = bf16;
    type Kv = bf16;
    type Weight = bf16;
    type Out = bf16;
    const NONE: bf16 = bf16::ZERO;

    unsafe fn score(&self, queries: &[&[bf16]], step: &Step<'_, bf16, STEP>, scores: &mut [[f32; SPLIT]]) {
        let (first, mut ahead) = (step.first, &step.ahead[..]);
        for (query, scores) in queries.iter().zip(scores) {
            // SAFETY: passed on from the caller, who checked the CPU.
            unsafe { score(query, &step.rows, ahead, &mut scores[first..first + STEP]) };
            ahead = &[];
        }
    }

    unsafe fn soften(
        &self,
        scores: &mut [f32; SPLIT],
        visible: usize,
        scale: f32,
        weights: &mut [bf16; SPLIT],
    ) -> (f32, f32) {
        // SAFETY: the caller checked the CPU.
        unsafe { soften(scores, visible, scale, weights) }
    }

    /// Two lanes at a time.
    unsafe fn add_values(
        &self,
        step: &Step<'_, bf16, STEP>,
        keys: usize,
        weights: &[[bf16; SPLIT]],
        to: &mut [f32],
    ) {
        let Step { first, rows, ahead } = step;
        let (first, dim, width) = (*first, rows[0].len(), rows[0].len() + 2);
        // An odd last key is paired with itself; its second weight is zero.
        let pairs = keys.div_ceil(2);
        ahead.iter().for_each(|row| fetch(*row, dim));
        let rows = rows.map(|row| row.as_ptr().cast::<u32>());
        for (weights, to) in weights.chunks(2).zip(to.chunks_mut(2 * width)) {
            let mut at = 0;
            while at < dim {
                // SAFETY: passed on from the caller; parts are multiples of 32 elements that end at `dim`.
                at += unsafe {
                    match (dim - at, weights) {
                        (128.., [a, b]) => add_part::<8, 2>(&rows, pairs, [&a[first..], &b[first..]], at, to),
                        (128.., [a, ..]) => add_part::<8, 1>(&rows, pairs, [&a[first..]], at, to),
                        (_, [a, b]) => add_part::<2, 2>(&rows, pairs, [&a[first..], &b[first..]], at, to),
                        (_, [a, ..]) => add_part::<2, 1>(&rows, pairs, [&a[first..]], at, to),
                        (_, []) => dim,
                    }
                };
            }
        }
    }
}

/// `scores[key] = query · rows[key]`.
///
/// # Safety
/// The CPU has AVX512-BF16; the query and all rows have as many elements, a multiple of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn score(query: &[bf16], rows: &[&[bf16]; STEP], ahead: &[*const bf16], scores: &mut [f32]) {
    let mut sums = [_mm512_setzero_ps(); STEP];
    for i in (0..query.len()).step_by(32) {
        ahead.iter().for_each(|row| fetch(row.wrapping_add(i), 32));
        // SAFETY: sixteen pairs of a head, whose size is a multiple of 32.
        unsafe {
            let part = load(query.as_ptr().add(i).cast());
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = _mm512_dpbf16_ps(*sum, part, load(row.as_ptr().add(i).cast()));
            }
        }
    }
    let columns = transpose(sums);
    let sum = columns[1..].iter().fold(columns[0], |sum, column| _mm512_add_ps(sum, *column));
    // SAFETY: the slice is checked to have sixteen places.
    unsafe { _mm512_storeu_ps(scores[..STEP].as_mut_ptr(), sum) };
}

/// Adds `16 R` elements from `at` of the weighted sums over `pairs` of rows to the outputs of `L` lanes, which follow a
/// maximum and a sum in `to`; returns how many elements.
///
/// # Safety
/// The CPU has AVX512-BF16; the elements are inside the rows and the outputs; nobody writes the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn add_part<const R: usize, const L: usize>(
    rows: &[*const u32; STEP],
    pairs: usize,
    weights: [&[bf16]; L],
    at: usize,
    to: &mut [f32],
) -> usize {
    let width = to.len() / L;
    let to: [*mut f32; L] = std::array::from_fn(|lane| to[lane * width + 2 + at..][..16 * R].as_mut_ptr());
    // SAFETY: `16 R` floats of each lane, and as many elements of each row from `at` on.
    unsafe {
        let mut sums: [[__m512; R]; L] =
            std::array::from_fn(|lane| std::array::from_fn(|i| _mm512_loadu_ps(to[lane].add(16 * i))));
        for (pair, rows) in rows.as_chunks::<2>().0[..pairs].iter().enumerate() {
            let [even, odd] = rows.map(|row| row.add(at / 2));
            let weights: [__m512bh; L] = std::array::from_fn(|lane| {
                let [low, high] = [weights[lane][2 * pair], weights[lane][2 * pair + 1]].map(bf16::to_bits);
                broadcast(u32::from(low) | u32::from(high) << 16)
            });
            for i in 0..R / 2 {
                let (even, odd) = (even.add(16 * i), odd.add(16 * i));
                let (low, high) = zip(_mm512_loadu_si512(even.cast()), _mm512_loadu_si512(odd.cast()));
                let (low, high) = (pairs_of(low), pairs_of(high));
                for (sums, weight) in sums.iter_mut().zip(weights) {
                    sums[2 * i] = _mm512_dpbf16_ps(sums[2 * i], low, weight);
                    sums[2 * i + 1] = _mm512_dpbf16_ps(sums[2 * i + 1], high, weight);
                }
            }
        }
        for (sums, to) in sums.iter().zip(to) {
            sums.iter().enumerate().for_each(|(i, sum)| _mm512_storeu_ps(to.add(16 * i), *sum));
        }
    }
    16 * R
}

/// Turns `visible` scores into weights, the rest into none; returns the maximum in units of log2, and the sum.
///
/// # Safety
/// The CPU has AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn soften(scores: &mut [f32], visible: usize, scale: f32, weights: &mut [bf16; SPLIT]) -> (f32, f32) {
    weights[visible..].fill(bf16::ZERO);
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
