//! Attention of a few query rows over bf16 KV, with bf16 products (AVX512-BF16): the speed of memory is the limit.
//!
//! The context is split at fixed positions, so that threads share a long one and the result depends on the sequence
//! alone. A task reads the keys of its split in the order of memory, all heads of a token together, then the values.
//! Each split gives a partial softmax; one pass at the end joins them (Flash-Decoding, Dao et al. 2023).

use std::arch::x86_64::*;
use std::cell::RefCell;

use half::bf16;

use super::attention::{Attention, Rows};
use super::dp::{broadcast, load, pairs_of};
use super::exp::exp2;
use super::simd::{transpose, zip};
use super::team;
use crate::batch::SeqSpan;
use crate::layout::Half;

/// Keys of a split: a context of 512 gives two threads two tasks each.
const SPLIT: usize = 128;

/// Keys that all heads are computed for before the next ones are read.
const STEP: usize = 16;

/// Computes the rows of `seqs`, each of at most [`super::attention::FEW_LANES`] lanes for each KV head.
///
/// # Safety
/// As [`Attention::run`], which checked the lengths, and [`Attention::has_bf16_kernel`]. `out` is as long as `q`.
pub unsafe fn attend(task: &Attention<'_>, q: &[bf16], out: &Rows<bf16>, seqs: &[&SeqSpan]) {
    thread_local!(static PARTIALS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
    let width = task.head_dim() + 2;
    let (mut parts, mut floats) = (Vec::new(), 0);
    for (index, seq) in seqs.iter().enumerate() {
        for first in (0..seq.context_len).step_by(SPLIT) {
            let part = Part { seq, index, first, slot: floats };
            floats += part.lanes(task) * width;
            parts.push(part);
        }
    }
    PARTIALS.with_borrow_mut(|partials| {
        partials.resize(floats.max(partials.len()), 0.0);
        let base = Rows(partials.as_mut_ptr());
        // SAFETY: each part has a slot of its own inside `partials`, and reads follow all writes.
        let slot = |part: &Part<'_>| unsafe {
            let base = &base;
            std::slice::from_raw_parts_mut(base.0.add(part.slot), part.lanes(task) * width)
        };
        // SAFETY: passed on from the caller.
        team::run(parts.len(), |index| unsafe { parts[index].attend(task, q, slot(&parts[index])) });
        let groups: Vec<&[Part<'_>]> = parts.chunk_by(|a, b| a.index == b.index).collect();
        team::run(groups.len(), |index| {
            for lane in 0..groups[index][0].lanes(task) {
                let splits = groups[index].iter().map(|part| &slot(part)[lane * width..(lane + 1) * width]);
                // SAFETY: one lane's head, inside `out`, written by nobody else.
                let to = unsafe { out.0.add(groups[index][0].at(task, lane)) };
                // SAFETY: as above; a head has `head_dim` elements.
                join(splits, unsafe { std::slice::from_raw_parts_mut(to, task.head_dim()) });
            }
        });
    });
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

/// One split of one sequence. Its lanes: query rows x heads of the first KV head, then those of the second, …
struct Part<'a> {
    seq: &'a SeqSpan,
    /// Which of the sequences.
    index: usize,
    /// Position of its first key.
    first: usize,
    /// Where its partial results are.
    slot: usize,
}

/// A part's lanes with what they share.
struct Lanes<'a> {
    /// Of the part.
    keys: usize,
    /// Lanes of one KV head.
    group: usize,
    /// First query element of each lane.
    queries: &'a [*const u32],
    scores: &'a mut [[f32; SPLIT]],
    weights: &'a mut [[bf16; SPLIT]],
}

impl Part<'_> {
    fn lanes(&self, task: &Attention<'_>) -> usize {
        self.seq.q_len * task.heads
    }

    /// Index in `q` and `out` of the first element of a lane.
    fn at(&self, task: &Attention<'_>, lane: usize) -> usize {
        let group = task.group();
        let (kv_head, lane) = (lane / (self.seq.q_len * group), lane % (self.seq.q_len * group));
        let (row, head) = (self.seq.q_start + lane / group, kv_head * group + lane % group);
        (row * task.heads + head) * task.head_dim()
    }

    /// Keys of this split that a lane sees.
    fn visible(&self, task: &Attention<'_>, lane: usize) -> usize {
        let row = lane % (self.seq.q_len * task.group()) / task.group();
        let context = self.seq.context_len - self.seq.q_len + row + 1;
        SPLIT.min(context.saturating_sub(self.first))
    }

    /// Writes `[max, sum, output…]` of each lane into `to`.
    ///
    /// # Safety
    /// As [`attend`].
    unsafe fn attend(&self, task: &Attention<'_>, q: &[bf16], to: &mut [f32]) {
        type Buffers = (Vec<[f32; SPLIT]>, Vec<[bf16; SPLIT]>);
        thread_local!(static BUFFERS: RefCell<Buffers> = const { RefCell::new((Vec::new(), Vec::new())) });
        let (count, width) = (self.lanes(task), task.head_dim() + 2);
        to.fill(0.0);
        let queries: Vec<*const u32> =
            (0..count).map(|lane| q[self.at(task, lane)..].as_ptr().cast()).collect();
        BUFFERS.with_borrow_mut(|(scores, weights)| {
            scores.resize(count.max(scores.len()), [0.0; SPLIT]);
            weights.resize(count.max(weights.len()), [bf16::ZERO; SPLIT]);
            let mut lanes = Lanes {
                keys: SPLIT.min(self.seq.context_len - self.first),
                group: self.seq.q_len * task.group(),
                queries: &queries,
                scores: &mut scores[..count],
                weights: &mut weights[..count],
            };
            self.each_step(task, Half::Key, lanes.keys, |head, first, rows| {
                // SAFETY: passed on from the caller; the rows are those of the step.
                unsafe { self.score(task, head, first, rows, &mut lanes) };
            });
            let scale = std::f32::consts::LOG2_E / (task.head_dim() as f32).sqrt();
            for lane in 0..count {
                let (scores, weights) = (&mut lanes.scores[lane], &mut lanes.weights[lane]);
                // SAFETY: the CPU has AVX512-BF16.
                let stats = unsafe { soften(scores, self.visible(task, lane), scale, weights) };
                (to[lane * width], to[lane * width + 1]) = stats;
            }
            self.each_step(task, Half::Value, lanes.keys, |head, first, rows| {
                // SAFETY: passed on from the caller; the rows are those of the step.
                unsafe { self.add_values(task, head, first, rows, &lanes, to) };
            });
        });
    }

    /// Calls `each(kv_head, first key, rows of that head)` in the order of memory, and asks for a step's rows while the one
    /// before it is computed. Steps beyond the last key repeat it.
    fn each_step(
        &self,
        task: &Attention<'_>,
        half: Half,
        keys: usize,
        mut each: impl FnMut(usize, usize, &[*const u32; STEP]),
    ) {
        let rows = |first: usize| -> [*const u32; STEP] {
            std::array::from_fn(|i| self.token(task, half, (first + i).min(keys - 1), 0))
        };
        let head_words = task.head_dim() / 2;
        let mut next = rows(0);
        for first in (0..keys).step_by(STEP) {
            let now = std::mem::replace(&mut next, rows(first + STEP));
            for head in 0..task.kv_heads() {
                let of_head = |row: *const u32| row.wrapping_add(head * head_words);
                if first + STEP < keys {
                    for row in next.map(of_head) {
                        for word in (0..head_words).step_by(16) {
                            // SAFETY: a prefetch is no access.
                            unsafe { _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(word).cast()) };
                        }
                    }
                }
                each(head, first, &now.map(of_head));
            }
        }
    }

    /// `scores[lane][key] = Q[lane] · K[key]` for [`STEP`] keys from `first`, the last of which may repeat a key.
    ///
    /// # Safety
    /// As [`attend`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn score(
        &self,
        task: &Attention<'_>,
        kv_head: usize,
        first: usize,
        rows: &[*const u32; STEP],
        lanes: &mut Lanes<'_>,
    ) {
        for lane in kv_head * lanes.group..(kv_head + 1) * lanes.group {
            let mut sums = [_mm512_setzero_ps(); STEP];
            for i in (0..task.head_dim() / 2).step_by(16) {
                // SAFETY: sixteen pairs of a head, whose size is a multiple of 32, which nobody writes.
                unsafe {
                    let query = load(lanes.queries[lane].add(i));
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        *sum = _mm512_dpbf16_ps(*sum, query, load(row.add(i)));
                    }
                }
            }
            let columns = transpose(sums);
            let sum = columns[1..].iter().fold(columns[0], |sum, column| _mm512_add_ps(sum, *column));
            // SAFETY: `first + 16 <= SPLIT`, both multiples of 16.
            unsafe { _mm512_storeu_ps(lanes.scores[lane].as_mut_ptr().add(first), sum) };
        }
    }

    /// Adds the weighted values of [`STEP`] keys from `first` to the outputs of a KV head's lanes, two at a time.
    ///
    /// # Safety
    /// As [`attend`].
    #[expect(clippy::too_many_arguments, reason = "the loop's places, kept in registers")]
    unsafe fn add_values(
        &self,
        task: &Attention<'_>,
        kv_head: usize,
        first: usize,
        rows: &[*const u32; STEP],
        lanes: &Lanes<'_>,
        to: &mut [f32],
    ) {
        let (dim, width) = (task.head_dim(), task.head_dim() + 2);
        let last = STEP.min(lanes.keys - first) - 1;
        // An odd last key is paired with itself; its second weight is zero.
        let pairs = (last + 2) / 2;
        let of_head = kv_head * lanes.group..(kv_head + 1) * lanes.group;
        let to = &mut to[of_head.start * width..of_head.end * width];
        for (weights, to) in lanes.weights[of_head].chunks(2).zip(to.chunks_mut(2 * width)) {
            let mut at = 0;
            while at < dim {
                // SAFETY: passed on from the caller; parts are multiples of 32 elements that end at `dim`.
                at += unsafe {
                    match (dim - at, weights) {
                        (128.., [a, b]) => add_part::<8, 2>(rows, pairs, [&a[first..], &b[first..]], at, to),
                        (128.., [a, ..]) => add_part::<8, 1>(rows, pairs, [&a[first..]], at, to),
                        (_, [a, b]) => add_part::<2, 2>(rows, pairs, [&a[first..], &b[first..]], at, to),
                        (_, [a, ..]) => add_part::<2, 1>(rows, pairs, [&a[first..]], at, to),
                        (_, []) => dim,
                    }
                };
            }
        }
    }

    /// The first of `kv_head`'s pairs of a key of this split.
    #[inline]
    fn token(&self, task: &Attention<'_>, half: Half, key: usize, kv_head: usize) -> *const u32 {
        task.token::<bf16>(self.seq.table_start, self.first + key, half, kv_head).cast()
    }
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
