//! Attention of many query rows over bf16 KV, by blocks.
//!
//! The *lanes* of a tile are some query rows x the heads of one KV head's group. Scores of a span of keys are one product
//! of the lanes' queries with the packed keys, outputs one of the softmax weights with the packed values, both on the
//! instruction set's own tiles. Softmax is online over spans (FlashAttention, Dao et al. 2022), in rows: each lane has
//! a scale of its own, so a row's result does not depend on the rest of its tile.

use std::cell::RefCell;

use half::bf16;

use super::attention::{Attention, Output, Rows};
use super::context::{Context, Shape, row_words};
use super::matmul::{Input, narrow};
use super::packed::{COLUMNS, Precision, STEP};
use super::soften::{Softmax, Weights};
use super::tiles::{Ahead, Piece, ROWS, Tiles, Words, floats};
use super::{Isa, dispatch, team};
use crate::batch::SeqSpan;

/// Lanes of a tile: more where weights are widened once for all of them, of whole register tiles.
fn lanes(isa: Isa) -> usize {
    if isa.computes_bf16() { 64 } else { 16 * ROWS }
}
/// Keys between two rounds of softmax: outputs are loaded and stored once for each. 256 x 64 scores are 64 KiB of L2,
/// 256 x 96 are 96 KiB.
const SPAN: usize = 256;
/// Words of contexts that are packed at a time: 32 MiB, all heads of Qwen3-0.6B at 8,000 tokens. Longer ones go in turn.
const PACKED_WORDS: usize = 8 << 20;

/// Computes the rows of `seqs`.
///
/// # Safety
/// As [`Attention::run`], which checked the lengths and the CPU; the pool's KV is bf16. `out` is as long as `q`.
pub unsafe fn attend(isa: Isa, task: &Attention<'_>, q: Input<'_>, out: &mut Output<'_>, seqs: &[&SeqSpan]) {
    thread_local!(static PACKED: RefCell<Words> = RefCell::default());
    let shape = |seq: &SeqSpan| Shape::new(seq.context_len, task.head_dim());
    let out = match out {
        Output::F32(out) => To::F32(Rows(out.as_mut_ptr())),
        Output::Bf16(out) => To::Bf16(Rows(out.as_mut_ptr())),
    };
    let heads = seqs.iter().flat_map(|seq| (0..task.kv_heads()).map(move |kv_head| (*seq, kv_head)));
    let mut heads = heads.peekable();
    while heads.peek().is_some() {
        let (mut some, mut words) = (Vec::new(), 0);
        while let Some((seq, kv_head)) =
            heads.next_if(|(seq, _)| words == 0 || words + shape(seq).words() <= PACKED_WORDS)
        {
            some.push((seq, kv_head, words));
            words += shape(seq).words();
        }
        PACKED.with_borrow_mut(|packed| {
            let base = packed.get(words).as_mut_ptr();
            let context = |(seq, kv_head, first)| Context {
                seq,
                kv_head,
                shape: shape(seq),
                words: base.wrapping_add(first),
            };
            let contexts: Vec<Context<'_>> = some.into_iter().map(context).collect();
            // SAFETY: passed on from the caller; each context has words of its own.
            unsafe { run(isa, task, q, &out, &contexts) };
            packed.shrink(PACKED_WORDS);
        });
    }
}

/// Where outputs go.
enum To {
    F32(Rows<f32>),
    Bf16(Rows<bf16>),
}

/// Packs the contexts and then computes all their rows.
///
/// # Safety
/// As [`attend`], and the contexts' words are there, each for one of them.
unsafe fn run(isa: Isa, task: &Attention<'_>, q: Input<'_>, out: &To, contexts: &[Context<'_>]) {
    let contexts = &Shared(contexts);
    let parts: Vec<(usize, usize)> = (0..contexts.0.len())
        .flat_map(|i| (0..contexts.0[i].shape.keys).step_by(COLUMNS).map(move |key| (i, key)))
        .collect();
    team::run(parts.len(), |part| {
        let (context, key) = parts[part];
        // SAFETY: passed on from the caller; parts are disjoint.
        unsafe { contexts.get(context).pack(isa, task, key) };
    });
    let rows = (lanes(isa) / task.group()).max(1);
    // The longest first: threads then end together.
    let mut lanes: Vec<Lanes> = (0..contexts.0.len())
        .flat_map(|i| (0..contexts.0[i].seq.q_len).step_by(rows).map(move |row| (i, row)))
        .map(|(context, row)| Lanes::new(contexts.0[context].seq, context, row, rows))
        .collect();
    lanes.sort_by_key(|lanes| std::cmp::Reverse(lanes.first_context / SPAN));
    thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
    team::run(lanes.len(), |index| {
        SCRATCH.with_borrow_mut(|scratch| {
            let lanes = &lanes[index];
            let tile = Tile { isa, task, context: contexts.get(lanes.context), lanes };
            // SAFETY: passed on from the caller; tiles are disjoint in rows and heads.
            unsafe { tile.attend(q, out, scratch) };
        });
    });
}

/// Contexts that all threads read.
struct Shared<'a>(&'a [Context<'a>]);

// SAFETY: their words are written in disjoint parts, and read only after all writes.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    fn get(&self, index: usize) -> &Context<'_> {
        &self.0[index]
    }
}

/// Consecutive rows of a sequence.
struct Lanes {
    context: usize,
    first_row: usize,
    rows: usize,
    /// Tokens that the first row sees, itself included.
    first_context: usize,
}

impl Lanes {
    fn new(seq: &SeqSpan, context: usize, row: usize, rows: usize) -> Self {
        Self {
            context,
            first_row: seq.q_start + row,
            rows: rows.min(seq.q_len - row),
            first_context: seq.context_len - seq.q_len + row + 1,
        }
    }
}

/// Buffers of one thread, all in L2 together: some 200 or 300 KiB for heads of 128.
#[derive(Default)]
struct Scratch {
    /// `[lanes]` rows of a head's pairs.
    queries: Words,
    /// `[lanes][SPAN]`.
    scores: Words,
    /// `[lanes]` rows of the span's pairs.
    weights: Words,
    /// `[lanes][value panels * COLUMNS]`.
    output: Words,
}

/// Lanes of one KV head: `row * group + head`.
struct Tile<'a> {
    isa: Isa,
    task: &'a Attention<'a>,
    context: &'a Context<'a>,
    lanes: &'a Lanes,
}

impl Tile<'_> {
    /// # Safety
    /// As [`attend`].
    unsafe fn attend(&self, q: Input<'_>, out: &To, scratch: &mut Scratch) {
        let (shape, count) = (self.context.shape, self.count());
        let width = shape.value_panels * COLUMNS;
        let queries = scratch.queries.get(count * row_words(self.isa, shape.pairs));
        self.take_queries(q, queries);
        let scores = floats(scratch.scores.get(count * SPAN));
        let weights = scratch.weights.get(count * row_words(self.isa, SPAN / 2));
        let output = floats(scratch.output.get(count * width));
        let mut softmax = vec![Softmax::new(self.task.head_dim()); count];
        // SAFETY: the caller checked the CPU, and a thread is in one task at a time.
        let mut tiles = unsafe { Tiles::new(self.isa) };
        let context = self.lanes.first_context + self.lanes.rows - 1;
        for first in (0..context).step_by(SPAN) {
            // Whole steps of the products; the context is packed with zeros up to there.
            let keys = SPAN.min(context - first).next_multiple_of(2 * STEP);
            // SAFETY: the span is inside the packed context, and the buffers were sized for it.
            unsafe { self.score(&mut tiles, first, keys, queries, scores) };
            for (lane, softmax) in softmax.iter_mut().enumerate() {
                let seen = self.lanes.first_context + lane / self.task.group();
                let visible = seen.saturating_sub(first).min(keys);
                let keep = softmax.add(
                    self.isa,
                    &scores[lane * SPAN..][..keys],
                    visible,
                    self.weights_of(weights, lane),
                );
                if keep != 1.0 && first > 0 {
                    scale(&mut output[lane * width..][..width], keep);
                }
            }
            // SAFETY: as above.
            unsafe { self.add_values(&mut tiles, first, keys, weights, output) };
        }
        for (lane, (row, softmax)) in output.chunks_exact_mut(width).zip(&softmax).enumerate() {
            let row = &mut row[..self.task.head_dim()];
            // SAFETY: one lane's head, inside `out`, written by nobody else.
            unsafe { out.write(self.at(lane), row, 1.0 / softmax.sum()) };
        }
    }

    fn count(&self) -> usize {
        self.lanes.rows * self.task.group()
    }

    /// Index in `q` and `out` of the first element of a lane.
    fn at(&self, lane: usize) -> usize {
        let group = self.task.group();
        let (row, head) = (self.lanes.first_row + lane / group, self.context.kv_head * group + lane % group);
        (row * self.task.heads + head) * self.task.head_dim()
    }

    /// Copies the lanes' queries in the form that products take, padded with zeros.
    fn take_queries(&self, q: Input<'_>, to: &mut [u32]) {
        let dim = self.task.head_dim();
        for (lane, to) in to.chunks_exact_mut(row_words(self.isa, self.context.shape.pairs)).enumerate() {
            let at = self.at(lane)..self.at(lane) + dim;
            to.fill(0);
            match (q, self.isa.computes_bf16()) {
                (Input::F32(q), false) => floats(to)[..dim].copy_from_slice(&q[at]),
                (Input::Bf16(q), false) => super::widen_into(&q[at], &mut floats(to)[..dim]),
                (Input::F32(q), true) => narrow(&q[at], &mut bytemuck::cast_slice_mut(to)[..dim]),
                (Input::Bf16(q), true) => bytemuck::cast_slice_mut(to)[..dim].copy_from_slice(&q[at]),
            }
        }
    }

    /// `scores[lane][key] = Q[lane] · K[first + key]`, panel by panel.
    ///
    /// # Safety
    /// As [`attend`], and the span is inside the context.
    unsafe fn score(
        &self,
        tiles: &mut Tiles,
        first: usize,
        keys: usize,
        queries: &[u32],
        scores: &mut [f32],
    ) {
        let pairs = self.context.shape.pairs;
        for panel in (0..keys).step_by(COLUMNS) {
            let next = match panel + COLUMNS < keys {
                true => self.context.keys(first + panel + COLUMNS),
                false => self.context.values(0, first),
            };
            let piece = Piece {
                precision: Precision::Bf16,
                depth: pairs,
                a: queries.as_ptr(),
                a_row: row_words(self.isa, pairs),
                b: self.context.keys(first + panel),
                c: scores[panel..].as_mut_ptr().cast(),
                c_row: SPAN,
                add: false,
                ahead: Ahead::Piece(next),
            };
            // SAFETY: passed on from the caller; whole panels of keys are packed, and the scores have room for them.
            unsafe { tiles.product(self.count(), &piece) };
        }
    }

    /// `output[lane][i] += sum over keys of weights[lane][key] * V[first + key][i]`; the first span starts it.
    ///
    /// # Safety
    /// As [`attend`], and the span is inside the context.
    unsafe fn add_values(
        &self,
        tiles: &mut Tiles,
        first: usize,
        keys: usize,
        weights: &[u32],
        output: &mut [f32],
    ) {
        let shape = self.context.shape;
        for panel in 0..shape.value_panels {
            let next = match panel + 1 < shape.value_panels {
                true => self.context.values(panel + 1, first),
                false => self.context.keys(first + SPAN),
            };
            let piece = Piece {
                precision: Precision::Bf16,
                depth: keys / 2,
                a: weights.as_ptr(),
                a_row: row_words(self.isa, SPAN / 2),
                b: self.context.values(panel, first),
                c: output[panel * COLUMNS..].as_mut_ptr().cast(),
                c_row: shape.value_panels * COLUMNS,
                add: first > 0,
                ahead: Ahead::Piece(next),
            };
            // SAFETY: passed on from the caller; the keys' pairs are packed, and the output has room for whole panels.
            unsafe { tiles.product(self.count(), &piece) };
        }
    }

    fn weights_of<'a>(&self, weights: &'a mut [u32], lane: usize) -> Weights<'a> {
        let words = row_words(self.isa, SPAN / 2);
        let row = &mut weights[lane * words..(lane + 1) * words];
        match self.isa.computes_bf16() {
            true => Weights::Bf16(bytemuck::cast_slice_mut(row)),
            false => Weights::F32(floats(row)),
        }
    }
}

impl To {
    /// # Safety
    /// `row` many elements from `at` on are inside the output and nobody else's.
    unsafe fn write(&self, at: usize, row: &mut [f32], factor: f32) {
        scale(row, factor);
        // SAFETY: passed on from the caller.
        unsafe {
            match self {
                To::F32(out) => std::slice::from_raw_parts_mut(out.0.add(at), row.len()).copy_from_slice(row),
                To::Bf16(out) => narrow(row, std::slice::from_raw_parts_mut(out.0.add(at), row.len())),
            }
        }
    }
}

dispatch! {
    fn scale(row: &mut [f32], factor: f32) -> () {
        row.iter_mut().for_each(|x| *x *= factor);
    }
}
