//! Attention of a few query rows: the speed of memory is the limit.
//!
//! The context is split at fixed positions, so that threads share a long one and the result depends on the sequence
//! alone. A task reads the keys of its split in the order of memory, all heads of a token together, then the values.
//! Each split gives a partial softmax; one pass at the end joins them (Flash-Decoding, Dao et al. 2023).

#[cfg(target_arch = "x86_64")]
mod bf16;
mod wide;

use std::cell::RefCell;

use super::attention::{Attention, Rows};
use super::{Element, team};
use crate::batch::SeqSpan;
use crate::layout::Half;

#[cfg(target_arch = "x86_64")]
pub use bf16::Bf16;
pub use wide::Wide;

/// Keys of a split: a context of 512 gives two threads two tasks each.
const SPLIT: usize = 128;

/// How many keys ahead memory is asked: 32 KiB of Qwen3's.
const AHEAD: usize = 16;

/// The arithmetic of a part, which reads `STEP` keys for all heads before the next ones. All functions: the CPU has the
/// kernel's instructions, and rows and queries are as long as a head, which the kernel takes; keys of a split are
/// numbered from its first.
pub trait Kernel<const STEP: usize>: Sync {
    type Query: Copy + Sync;
    type Kv: Element;
    /// A softmax weight.
    type Weight: Copy;
    type Out: Element;
    const NONE: Self::Weight;

    /// `scores[lane][first + i] = queries[lane] · rows[i]`.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn score(
        &self,
        queries: &[&[Self::Query]],
        step: &Step<'_, Self::Kv, STEP>,
        scores: &mut [[f32; SPLIT]],
    );

    /// Turns `visible` scores into weights, the rest into none; returns the maximum in units of log2, and the sum.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn soften(
        &self,
        scores: &mut [f32; SPLIT],
        visible: usize,
        scale: f32,
        weights: &mut [Self::Weight; SPLIT],
    ) -> (f32, f32);

    /// Adds the values of the step's first `keys` keys, weighted, to each lane's outputs, which follow a maximum and a sum in
    /// `to`. Later rows repeat a key; a weight there is none.
    ///
    /// # Safety
    /// See the trait.
    unsafe fn add_values(
        &self,
        step: &Step<'_, Self::Kv, STEP>,
        keys: usize,
        weights: &[[Self::Weight; SPLIT]],
        to: &mut [f32],
    );
}

/// What a kernel computes with at a time: one head of some keys, or of their values.
pub struct Step<'a, E, const N: usize> {
    /// Number of the first key within its split.
    first: usize,
    rows: [&'a [E]; N],
    /// As much that comes later: memory is asked for it meanwhile.
    ahead: [*const E; N],
}

/// Computes the rows of `seqs`, each of at most [`super::attention::FEW_LANES`] lanes for each KV head.
///
/// # Safety
/// As [`Attention::run`], which checked the lengths; the CPU and the pool are the kernel's. `out` is as long as `q`.
pub unsafe fn attend<K: Kernel<STEP>, const STEP: usize>(
    kernel: &K,
    task: &Attention<'_>,
    q: &[K::Query],
    out: &Rows<K::Out>,
    seqs: &[&SeqSpan],
) {
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
        team::run(parts.len(), |index| unsafe { parts[index].attend(kernel, task, q, slot(&parts[index])) });
        let groups: Vec<&[Part<'_>]> = parts.chunk_by(|a, b| a.index == b.index).collect();
        team::run(groups.len(), |index| {
            let mut output = vec![0f32; task.head_dim()];
            for lane in 0..groups[index][0].lanes(task) {
                let splits = groups[index].iter().map(|part| &slot(part)[lane * width..(lane + 1) * width]);
                // SAFETY: one lane's head, inside `out`, written by nobody else.
                let to = unsafe { out.0.add(groups[index][0].at(task, lane)) };
                // SAFETY: as above; a head has `head_dim` elements.
                join(splits, &mut output, unsafe { std::slice::from_raw_parts_mut(to, task.head_dim()) });
            }
        });
    });
}

/// Joins partial results `[max, sum, output…]`, maxima in units of log2.
fn join<'a, O: Element>(splits: impl Iterator<Item = &'a [f32]> + Clone, output: &mut [f32], out: &mut [O]) {
    let max = splits.clone().map(|split| split[0]).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0f32;
    output.fill(0.0);
    for split in splits {
        let weight = (split[0] - max).exp2();
        sum += split[1] * weight;
        output.iter_mut().zip(&split[2..]).for_each(|(output, value)| *output += value * weight);
    }
    out.iter_mut().zip(output).for_each(|(out, value)| *out = O::narrow(*value / sum));
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
    unsafe fn attend<K: Kernel<STEP>, const STEP: usize>(
        &self,
        kernel: &K,
        task: &Attention<'_>,
        q: &[K::Query],
        to: &mut [f32],
    ) {
        let (count, dim, width) = (self.lanes(task), task.head_dim(), task.head_dim() + 2);
        let (keys, group) = (SPLIT.min(self.seq.context_len - self.first), self.seq.q_len * task.group());
        let start: [*const K::Kv; AHEAD] = self.rows(task, Half::Key, keys, 0);
        start.iter().for_each(|row| fetch(*row, task.kv_heads() * dim));
        to.fill(0.0);
        let queries: Vec<&[K::Query]> = (0..count).map(|lane| &q[self.at(task, lane)..][..dim]).collect();
        let mut scores = vec![[0f32; SPLIT]; count];
        let mut weights = vec![[K::NONE; SPLIT]; count];
        let of_head = |head: usize| head * group..(head + 1) * group;
        // SAFETY: passed on from the caller, and rows are heads of the pool.
        self.each_step::<K::Kv, STEP>(task, Half::Key, keys, Some(Half::Value), |head, step| unsafe {
            kernel.score(&queries[of_head(head)], step, &mut scores[of_head(head)]);
        });
        let scale = std::f32::consts::LOG2_E / (dim as f32).sqrt();
        for (lane, (scores, weights)) in scores.iter_mut().zip(&mut weights).enumerate() {
            // SAFETY: passed on from the caller.
            let stats = unsafe { kernel.soften(scores, self.visible(task, lane), scale, weights) };
            (to[lane * width], to[lane * width + 1]) = stats;
        }
        self.each_step::<K::Kv, STEP>(task, Half::Value, keys, None, |head, step| {
            let (of_head, of_step) = (of_head(head), STEP.min(keys - step.first));
            let to = &mut to[of_head.start * width..of_head.end * width];
            // SAFETY: as above.
            unsafe { kernel.add_values(step, of_step, &weights[of_head], to) };
        });
    }

    /// Calls `each(kv_head, its step)` in the order of memory. After the last key come those of `after`. Steps beyond the last
    /// key repeat it.
    fn each_step<E: Element, const STEP: usize>(
        &self,
        task: &Attention<'_>,
        half: Half,
        keys: usize,
        after: Option<Half>,
        mut each: impl FnMut(usize, &Step<'_, E, STEP>),
    ) {
        let (dim, heads) = (task.head_dim(), task.kv_heads());
        for first in (0..keys).step_by(STEP) {
            let now: [*const E; STEP] = self.rows(task, half, keys, first);
            let later = match (first + AHEAD, after) {
                (key, _) if key < keys => self.rows(task, half, keys, key),
                (key, Some(half)) => self.rows(task, half, keys, key - keys),
                (_, None) => now,
            };
            // Token by token, as they lie in memory: what is read head by head is no stream that the CPU would see.
            let (mut token, mut part) = (0, 0);
            for head in 0..heads {
                // SAFETY: a head of a token of the pool, whose type the caller vouched for; nobody writes it meanwhile.
                let rows = now.map(|row| unsafe { std::slice::from_raw_parts(row.add(head * dim), dim) });
                let ahead = std::array::from_fn(|_| {
                    let at = later[token].wrapping_add(part * dim);
                    (token, part) = if part + 1 == heads { (token + 1, 0) } else { (token, part + 1) };
                    at
                });
                each(head, &Step { first, rows, ahead });
            }
        }
    }

    /// All heads of the keys (or values) from `first` on; the last's for those beyond it.
    fn rows<E: Element, const N: usize>(
        &self,
        task: &Attention<'_>,
        half: Half,
        keys: usize,
        first: usize,
    ) -> [*const E; N] {
        std::array::from_fn(|i| {
            let key = self.first + (first + i).min(keys - 1);
            task.token(self.seq.table_start, key, half, 0)
        })
    }
}

/// Asks for `len` elements to be brought into L2.
#[inline]
fn fetch<E>(from: *const E, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for byte in (0..len * size_of::<E>()).step_by(64) {
        use std::arch::x86_64::*;
        // SAFETY: a prefetch is no access.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast::<i8>().wrapping_add(byte)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, len);
}
