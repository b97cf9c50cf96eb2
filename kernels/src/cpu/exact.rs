//! Attention of many query rows over f32 KV, on any CPU: exact up to f32's own rounding.

use super::attention::{Attention, Output, Rows};
use super::{Element, dispatch, dot, scale_add, team};
use crate::batch::SeqSpan;
use crate::layout::Half;

/// Query rows that share one pass over the context: each K/V block is copied once for all of them.
const TILE: usize = 16;

/// Computes the rows of `seqs`. Softmax is online over blocks (Milakov & Gimelshein 2018), so the order of additions
/// depends on positions only, not on the batch.
///
/// # Safety
/// As [`Attention::run`], which also checked the lengths; the pool's KV is f32.
pub unsafe fn attend(task: &Attention<'_>, q: &[f32], out: &mut Output<'_>, seqs: &[&SeqSpan]) {
    match out {
        // SAFETY: passed on from the caller.
        Output::F32(out) => unsafe { attend_into(task, q, &Rows(out.as_mut_ptr()), seqs) },
        // SAFETY: passed on from the caller.
        Output::Bf16(out) => unsafe { attend_into(task, q, &Rows(out.as_mut_ptr()), seqs) },
    }
}

/// # Safety
/// As [`attend`].
unsafe fn attend_into<O: Element>(task: &Attention<'_>, q: &[f32], out: &Rows<O>, seqs: &[&SeqSpan]) {
    let tiles: Vec<Tile> = seqs.iter().flat_map(|seq| Tile::split(seq, task.kv_heads())).collect();
    // SAFETY: passed on from the caller.
    team::run(tiles.len(), |index| unsafe { tiles[index].attend(task, q, out) });
}

/// Up to [`TILE`] consecutive rows of one sequence, for one KV head.
struct Tile {
    kv_head: usize,
    first_row: usize,
    rows: usize,
    /// Tokens that the first row sees, itself included.
    first_context: usize,
    table_start: usize,
}

impl Tile {
    fn split(seq: &SeqSpan, kv_heads: usize) -> impl Iterator<Item = Tile> + '_ {
        (0..seq.q_len).step_by(TILE).flat_map(move |start| {
            (0..kv_heads).map(move |kv_head| Tile {
                kv_head,
                first_row: seq.q_start + start,
                rows: TILE.min(seq.q_len - start),
                first_context: seq.context_len - seq.q_len + start + 1,
                table_start: seq.table_start,
            })
        })
    }
}

/// Online softmax of one query row.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    sum: f32,
}

impl Tile {
    /// # Safety
    /// As [`attend`].
    unsafe fn attend<O: Element>(&self, task: &Attention<'_>, q: &[f32], out: &Rows<O>) {
        let (dim, block_size, group) = (task.head_dim(), task.pool.layout().block_size, task.group());
        let lanes = self.rows * group;
        let mut acc = vec![0f32; lanes * dim];
        let mut state = vec![Softmax { max: f32::NEG_INFINITY, sum: 0.0 }; lanes];
        let (mut keys, mut values) = (vec![0f32; block_size * dim], vec![0f32; block_size * dim]);
        let last_context = self.first_context + self.rows - 1;
        let at = |lane: usize| {
            ((self.first_row + lane / group) * task.heads + self.kv_head * group + lane % group) * dim
        };
        for first_token in (0..last_context).step_by(block_size) {
            let tokens = block_size.min(last_context - first_token);
            for token in 0..tokens {
                let to = token * dim..(token + 1) * dim;
                for (half, to) in [(Half::Key, &mut keys[to.clone()]), (Half::Value, &mut values[to])] {
                    let from = task.token::<f32>(self.table_start, first_token + token, half, self.kv_head);
                    // SAFETY: one head of a token of the pool, whose type is f32; nobody writes it meanwhile.
                    to.copy_from_slice(unsafe { std::slice::from_raw_parts(from, dim) });
                }
            }
            for lane in 0..lanes {
                let visible = (self.first_context + lane / group).saturating_sub(first_token).min(tokens);
                if visible > 0 {
                    let acc = &mut acc[lane * dim..(lane + 1) * dim];
                    accumulate(&q[at(lane)..at(lane) + dim], &keys, &values, visible, &mut state[lane], acc);
                }
            }
        }
        for lane in 0..lanes {
            let inverse = 1.0 / state[lane].sum;
            for (i, value) in acc[lane * dim..(lane + 1) * dim].iter().enumerate() {
                // SAFETY: this lane is a (row, head) of this tile, inside `out`, and no other tile writes it.
                unsafe { *out.0.add(at(lane) + i) = O::narrow(value * inverse) };
            }
        }
    }
}

dispatch! {
    /// Adds `visible` keys and values of a block to one query row's running softmax.
    fn accumulate(q: &[f32], keys: &[f32], values: &[f32], visible: usize, state: &mut Softmax, acc: &mut [f32]) -> () {
        let dim = q.len();
        let scale = 1.0 / (dim as f32).sqrt();
        let mut scores = [0f32; 64];
        // Blocks hold at most 64 tokens for this stack buffer; longer ones are taken in parts.
        let mut start = 0;
        while start < visible {
            let count = (visible - start).min(64);
            let mut max = state.max;
            for (i, score) in scores[..count].iter_mut().enumerate() {
                let at = (start + i) * dim;
                *score = dot(q, &keys[at..at + dim]) * scale;
                max = max.max(*score);
            }
            let keep = (state.max - max).exp();
            state.sum *= keep;
            for (i, score) in scores[..count].iter().enumerate() {
                let weight = (score - max).exp();
                state.sum += weight;
                let at = (start + i) * dim;
                scale_add(acc, if i == 0 { keep } else { 1.0 }, weight, &values[at..at + dim]);
            }
            state.max = max;
            start += count;
        }
    }
}
