//! KV write and paged attention.

use half::bf16;
use rayon::prelude::*;

use super::{Element, dispatch, dot, scale_add, widen_into};
use crate::batch::{BatchMeta, SeqSpan};
use crate::layout::{Half, KvDtype};
use crate::pool::KvPool;

/// Query rows that share one pass over the context: each K/V block is widened once for all of them.
const TILE: usize = 16;

/// Stores each row's keys and values (`[tokens, kv_heads * head_dim]`) in the slots of `meta`.
///
/// # Safety
/// The caller must own the blocks of the slot mapping: nobody else reads or writes those slots meanwhile.
pub unsafe fn write_kv(pool: &KvPool, layer: usize, meta: &BatchMeta, keys: &[f32], values: &[f32]) {
    match pool.layout().dtype {
        // SAFETY: passed on from the caller.
        KvDtype::Bf16 => unsafe { write_as::<bf16>(pool, layer, meta, keys, values) },
        // SAFETY: passed on from the caller.
        KvDtype::F32 => unsafe { write_as::<f32>(pool, layer, meta, keys, values) },
    }
}

/// # Safety
/// As [`write_kv`], and `E` must be the pool's element type.
unsafe fn write_as<E: Element>(pool: &KvPool, layer: usize, meta: &BatchMeta, keys: &[f32], values: &[f32]) {
    let (row, block_size) = (pool.layout().row(), pool.layout().block_size);
    assert!(
        keys.len() == meta.num_tokens() * row && values.len() == keys.len(),
        "KV rows of {row}. This is a bug."
    );
    for (i, &slot) in meta.slot_mapping.iter().enumerate() {
        let (block, offset) = ((slot / block_size as u64) as u32, (slot % block_size as u64) as usize);
        for (half, source) in [(Half::Key, keys), (Half::Value, values)] {
            let to = pool.half_ptr(block, layer, half).cast::<E>();
            // SAFETY: the half holds `block_size` rows and `offset < block_size`; the caller owns the slot; the
            // pool's base is page-aligned and every half a multiple of the element, so the pointer is aligned.
            let to = unsafe { std::slice::from_raw_parts_mut(to.add(offset * row), row) };
            to.iter_mut().zip(&source[i * row..(i + 1) * row]).for_each(|(to, &from)| *to = E::narrow(from));
        }
    }
}

/// Causal attention of each packed row over its sequence's blocks, grouped-query heads.
///
/// `q` and `out`: `[tokens, heads * head_dim]`; scores are scaled by `1 / sqrt(head_dim)`. Softmax is online over
/// blocks (Milakov & Gimelshein 2018), so the order of additions depends on positions only, not on the batch.
///
/// # Safety
/// Nobody may write the blocks of `meta`'s tables meanwhile.
pub unsafe fn paged_attention(
    pool: &KvPool,
    layer: usize,
    meta: &BatchMeta,
    heads: usize,
    q: &[f32],
    out: &mut [f32],
) {
    let layout = pool.layout();
    let row = heads * layout.head_dim;
    assert!(
        q.len() == meta.num_tokens() * row && out.len() == q.len(),
        "attention rows of {row}. This is a bug."
    );
    assert!(
        heads.is_multiple_of(layout.num_kv_heads),
        "{heads} heads in {} groups. This is a bug.",
        layout.num_kv_heads
    );
    let tiles: Vec<Tile> = meta.seqs.iter().flat_map(|seq| Tile::split(seq, layout.num_kv_heads)).collect();
    let task = Task { pool, layer, meta, heads, q, out: out.as_mut_ptr() };
    tiles.par_iter().for_each(|tile| match layout.dtype {
        // SAFETY: passed on from the caller; the dtype is the pool's.
        KvDtype::Bf16 => unsafe { task.attend::<bf16>(tile) },
        // SAFETY: passed on from the caller; the dtype is the pool's.
        KvDtype::F32 => unsafe { task.attend::<f32>(tile) },
    });
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

struct Task<'a> {
    pool: &'a KvPool,
    layer: usize,
    meta: &'a BatchMeta,
    heads: usize,
    q: &'a [f32],
    out: *mut f32,
}

// SAFETY: tiles write disjoint (row, head) parts of `out`, and only read everything else.
unsafe impl Sync for Task<'_> {}

/// Online softmax of one query row.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    sum: f32,
}

impl Task<'_> {
    /// # Safety
    /// As [`paged_attention`], and `E` must be the pool's element type.
    unsafe fn attend<E: Element>(&self, tile: &Tile) {
        let layout = self.pool.layout();
        let (dim, block_size) = (layout.head_dim, layout.block_size);
        let group = self.heads / layout.num_kv_heads;
        let lanes = tile.rows * group;
        let mut acc = vec![0f32; lanes * dim];
        let mut state = vec![Softmax { max: f32::NEG_INFINITY, sum: 0.0 }; lanes];
        let (mut keys, mut values) = (vec![0f32; block_size * dim], vec![0f32; block_size * dim]);
        let last_context = tile.first_context + tile.rows - 1;
        for index in 0..last_context.div_ceil(block_size) {
            let block = self.meta.block_tables[tile.table_start + index];
            let first_token = index * block_size;
            let tokens = block_size.min(last_context - first_token);
            // SAFETY: passed on from the caller.
            unsafe {
                self.load::<E>(block, Half::Key, tile.kv_head, tokens, &mut keys);
                self.load::<E>(block, Half::Value, tile.kv_head, tokens, &mut values);
            }
            for row in 0..tile.rows {
                let visible = (tile.first_context + row).saturating_sub(first_token).min(tokens);
                if visible == 0 {
                    continue;
                }
                for lane in row * group..(row + 1) * group {
                    let at = (tile.first_row + row) * self.heads + tile.kv_head * group + lane % group;
                    let acc = &mut acc[lane * dim..(lane + 1) * dim];
                    accumulate(
                        &self.q[at * dim..(at + 1) * dim],
                        &keys,
                        &values,
                        visible,
                        &mut state[lane],
                        acc,
                    );
                }
            }
        }
        for lane in 0..lanes {
            let at = (tile.first_row + lane / group) * self.heads + tile.kv_head * group + lane % group;
            let inverse = 1.0 / state[lane].sum;
            for (i, value) in acc[lane * dim..(lane + 1) * dim].iter().enumerate() {
                // SAFETY: `at` is a (row, head) of this tile, inside `out`, and no other tile writes it.
                unsafe { *self.out.add(at * dim + i) = value * inverse };
            }
        }
    }

    /// Widens `tokens` rows of one head of a block half into `into`.
    ///
    /// # Safety
    /// As [`paged_attention`], and `E` must be the pool's element type.
    unsafe fn load<E: Element>(
        &self,
        block: u32,
        half: Half,
        kv_head: usize,
        tokens: usize,
        into: &mut [f32],
    ) {
        let layout = self.pool.layout();
        let (dim, row) = (layout.head_dim, layout.row());
        let from = self.pool.half_ptr(block, self.layer, half).cast::<E>();
        for token in 0..tokens {
            // SAFETY: token < block_size and the head lies inside the row, so the slice is inside the half; nobody
            // writes it meanwhile, by the caller's contract.
            let source = unsafe { std::slice::from_raw_parts(from.add(token * row + kv_head * dim), dim) };
            widen_into(source, &mut into[token * dim..(token + 1) * dim]);
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
