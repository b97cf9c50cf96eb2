//! From the joined projection to queries and cached keys and values: norms of heads, rotary embedding and KV write in
//! one pass over each row.

use super::attention::{Output, Rows};
use super::{Element, dispatch, dot, team};
use crate::batch::BatchMeta;
use crate::layout::{Half, KvDtype};
use crate::pool::KvPool;

/// Rows handed to one thread at a time: enough work to pay for the hand-over.
const ROWS: usize = 8;

/// What is done to each row `[q heads | k heads | v heads]` of the joined projection.
pub struct Qkv<'a> {
    pub pool: &'a KvPool,
    pub layer: usize,
    pub meta: &'a BatchMeta,
    /// Query heads.
    pub heads: usize,
    /// RMSNorm weights, `[head_dim]` each, of every head of q and of k (Qwen3 only).
    pub norms: Option<(&'a [f32], &'a [f32])>,
    pub eps: f32,
    /// `[positions, head_dim / 2]`.
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl Qkv<'_> {
    /// Takes rows `first..` of the batch from `qkv` (`[rows, (heads + 2 kv_heads) * head_dim]`): writes their queries to
    /// `q` (`[rows, heads * head_dim]`), and their keys and values to the slots of the batch.
    ///
    /// Norms are RMSNorm (Zhang & Sennrich 2019), then the rotary embedding in the half-split form of GPT-NeoX (Su et al.
    /// 2021), both in f32; what is stored is rounded once.
    ///
    /// # Safety
    /// The caller owns the blocks of the slot mapping: nobody else reads or writes those slots meanwhile.
    pub unsafe fn run(&self, first: usize, qkv: &[f32], q: Output<'_>) {
        match q {
            // SAFETY: passed on from the caller.
            Output::F32(q) => unsafe { self.run_into(first, qkv, q) },
            // SAFETY: passed on from the caller.
            Output::Bf16(q) => unsafe { self.run_into(first, qkv, q) },
        }
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_into<O: Element>(&self, first: usize, qkv: &[f32], q: &mut [O]) {
        let (dim, q_row, kv_row) = (self.pool.layout().head_dim, self.q_row(), self.pool.layout().row());
        let row = q_row + 2 * kv_row;
        let rows = qkv.len() / row;
        let tables = self.cos.len().min(self.sin.len()) / (dim / 2);
        assert!(qkv.len() == rows * row && q.len() == rows * q_row, "qkv rows of {row}. This is a bug.");
        assert!(first + rows <= self.meta.num_tokens(), "{rows} rows from {first}. This is a bug.");
        assert!(
            self.norms.is_none_or(|(q, k)| q.len() == dim && k.len() == dim),
            "norms of {dim}. This is a bug."
        );
        let q = Rows(q.as_mut_ptr());
        let q = &q;
        team::run(rows.div_ceil(ROWS), |task| {
            let mut head = vec![0f32; dim];
            for i in task * ROWS..rows.min((task + 1) * ROWS) {
                let position = self.meta.positions[first + i] as usize;
                assert!(position < tables, "position {position} of {tables}. This is a bug.");
                let turn = position * (dim / 2)..(position + 1) * (dim / 2);
                let turn = (&self.cos[turn.clone()], &self.sin[turn]);
                let (queries, kv) = qkv[i * row..(i + 1) * row].split_at(q_row);
                let (keys, values) = kv.split_at(kv_row);
                // SAFETY: this row of `q`, of `q_row` elements, is this task's alone.
                let to = unsafe { std::slice::from_raw_parts_mut(q.0.add(i * q_row), q_row) };
                turn_heads(queries, self.norms.map(|norms| norms.0), self.eps, turn, &mut head, to);
                let keys = (keys, self.norms.map(|norms| norms.1), turn);
                match self.pool.layout().dtype {
                    // SAFETY: passed on from the caller; the dtype is the pool's.
                    KvDtype::Bf16 => unsafe { self.store::<half::bf16>(first + i, keys, values, &mut head) },
                    // SAFETY: as above.
                    KvDtype::F32 => unsafe { self.store::<f32>(first + i, keys, values, &mut head) },
                }
            }
        });
    }

    fn q_row(&self) -> usize {
        self.heads * self.pool.layout().head_dim
    }

    /// # Safety
    /// As [`Self::run`], and `E` must be the pool's element type.
    unsafe fn store<E: Element>(&self, row: usize, keys: Keys<'_>, values: &[f32], head: &mut [f32]) {
        let layout = self.pool.layout();
        let (width, size) = (layout.row(), layout.block_size as u64);
        let slot = self.meta.slot_mapping[row];
        let (block, offset) = ((slot / size) as u32, (slot % size) as usize);
        let to = |half| {
            let to = self.pool.half_ptr(block, self.layer, half).cast::<E>();
            // SAFETY: the half holds `block_size` rows and `offset` is below that; the caller owns the slot; the pool's
            // base is page-aligned and every half a multiple of the element, so the pointer is aligned.
            unsafe { std::slice::from_raw_parts_mut(to.add(offset * width), width) }
        };
        let (keys, norm, turn) = keys;
        turn_heads(keys, norm, self.eps, turn, head, to(Half::Key));
        narrow_into(values, to(Half::Value));
    }
}

/// A row's keys, their norm, and the cosines and sines of its position.
type Keys<'a> = (&'a [f32], Option<&'a [f32]>, (&'a [f32], &'a [f32]));

dispatch! {
    fn narrow_into<E: Element>(from: &[f32], to: &mut [E]) -> () {
        for (to, from) in to.iter_mut().zip(from) {
            *to = E::narrow(*from);
        }
    }
}

dispatch! {
    /// Normalises (if there is a norm) and rotates each head of a row. `head` is room for one.
    fn turn_heads<E: Element>(row: &[f32], norm: Option<&[f32]>, eps: f32, turn: (&[f32], &[f32]), head: &mut [f32], to: &mut [E]) -> () {
        let (cos, sin) = turn;
        for (from, to) in row.chunks_exact(head.len()).zip(to.chunks_exact_mut(head.len())) {
            match norm {
                Some(weight) => {
                    let scale = 1.0 / (dot(from, from) / from.len() as f32 + eps).sqrt();
                    for ((head, from), weight) in head.iter_mut().zip(from).zip(weight) {
                        *head = from * scale * weight;
                    }
                }
                None => head.copy_from_slice(from),
            }
            let (low, high) = head.split_at(cos.len());
            let (to_low, to_high) = to.split_at_mut(cos.len());
            for (i, (to_low, to_high)) in to_low.iter_mut().zip(to_high).enumerate() {
                *to_low = E::narrow(low[i] * cos[i] - high[i] * sin[i]);
                *to_high = E::narrow(high[i] * cos[i] + low[i] * sin[i]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvLayout;

    #[test]
    fn a_quarter_turn_swaps_the_halves_and_reaches_the_slot() {
        let layout =
            KvLayout { num_layers: 2, num_kv_heads: 1, head_dim: 4, block_size: 2, dtype: KvDtype::F32 };
        let pool = KvPool::new(layout, 3).unwrap();
        let mut meta = BatchMeta::default();
        meta.push(&[2], 0, 2, 2);
        let (cos, sin) = ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]);
        let norm = [2.0, 1.0, 1.0, 1.0];
        let qkv = Qkv {
            pool: &pool,
            layer: 1,
            meta: &meta,
            heads: 2,
            norms: Some((&norm, &[1.0; 4])),
            eps: 0.0,
            cos: &cos,
            sin: &sin,
        };
        // The second row of the batch: two query heads, a key and a value.
        let row = [1.0, 1.0, 1.0, 1.0, 3.0, -3.0, 3.0, 3.0, 2.0, 2.0, -2.0, 2.0, 9.0, 8.0, 7.0, 6.0];
        let mut q = [0.0; 8];
        // SAFETY: the pool is this test's.
        unsafe { qkv.run(1, &row, Output::F32(&mut q)) };
        assert_eq!(q, [-1.0, -1.0, 2.0, 1.0, -1.0, -1.0, 2.0, -1.0]);
        let block: Vec<f32> =
            pool.read_block(2).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        // [layer][K|V][token][head][dim]: layer 1, token 1.
        assert_eq!(block[20..24], [1.0, -1.0, 1.0, 1.0]);
        assert_eq!(block[28..32], [9.0, 8.0, 7.0, 6.0]);
        assert!(block[..20].iter().chain(&block[24..28]).all(|x| *x == 0.0));
    }
}
