//! Paged attention: which kernel computes which sequence.

use std::borrow::Cow;

use half::bf16;

use super::matmul::Input;
use super::{Element, Isa, blocked, decode, exact, widen_into};
use crate::batch::{BatchMeta, SeqSpan};
use crate::layout::{Half, KvDtype};
use crate::pool::KvPool;

/// Query rows x heads of a group up to which reading the context is the work.
pub const FEW_LANES: usize = 8;

/// One layer's attention: what all its tasks share.
pub struct Attention<'a> {
    pub pool: &'a KvPool,
    pub layer: usize,
    pub meta: &'a BatchMeta,
    /// Query heads.
    pub heads: usize,
}

/// Where a kernel writes, row-major.
#[derive(Debug)]
pub enum Output<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

impl Output<'_> {
    pub fn len(&self) -> usize {
        match self {
            Output::F32(out) => out.len(),
            Output::Bf16(out) => out.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Attention<'_> {
    pub fn head_dim(&self) -> usize {
        self.pool.layout().head_dim
    }

    pub fn kv_heads(&self) -> usize {
        self.pool.layout().num_kv_heads
    }

    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads()
    }

    /// Causal attention of each packed row over its sequence's blocks, grouped-query heads.
    ///
    /// `q` and `out`: `[tokens, heads * head_dim]`; scores are scaled by `1 / sqrt(head_dim)`. With bf16 queries, output
    /// and KV where [`Isa::computes_bf16`], products are of bf16 pairs; otherwise everything is computed in f32. A row's
    /// result depends on its own sequence's span only, not on the rest of the batch.
    ///
    /// # Safety
    /// Nobody may write the blocks of the batch's tables meanwhile.
    pub unsafe fn run(&self, isa: Isa, q: Input<'_>, mut out: Output<'_>) {
        let row = self.heads * self.head_dim();
        assert!(
            q.len() == self.meta.num_tokens() * row && out.len() == q.len(),
            "rows of {row}. This is a bug."
        );
        assert!(self.heads.is_multiple_of(self.kv_heads()), "{} heads in groups. This is a bug.", self.heads);
        assert!(isa.is_available(), "no {} here. This is a bug.", isa.as_str());
        // bf16 queries say that rounding is wanted; f32 ones are computed with exactly.
        let narrow = matches!(q, Input::Bf16(_)) && self.has_bf16_kernel(isa);
        let isa = if narrow { isa } else { isa.min(Isa::Avx512) };
        // Sequences with few rows are limited by memory, the others by arithmetic.
        let few_lanes = |seq: &&SeqSpan| seq.q_len * self.group() <= FEW_LANES;
        let (short, long): (Vec<&SeqSpan>, Vec<&SeqSpan>) = self.meta.seqs.iter().partition(few_lanes);
        // SAFETY: passed on from the caller; the kernels write the rows of different sequences.
        unsafe {
            match (q, &mut out) {
                _ if short.is_empty() => {}
                #[cfg(target_arch = "x86_64")]
                (Input::Bf16(q), Output::Bf16(out)) if narrow => {
                    decode::attend(&decode::Bf16, self, q, &Rows(out.as_mut_ptr()), &short);
                }
                (q, Output::F32(out)) => self.few_rows(isa, &widened(q), &Rows(out.as_mut_ptr()), &short),
                (q, Output::Bf16(out)) => self.few_rows(isa, &widened(q), &Rows(out.as_mut_ptr()), &short),
            }
            match self.pool.layout().dtype {
                _ if long.is_empty() => {}
                KvDtype::Bf16 => blocked::attend(isa, self, q, &mut out, &long),
                KvDtype::F32 => exact::attend(self, &widened(q), &mut out, &long),
            }
        }
    }

    /// Computes the rows of `seqs` in f32.
    ///
    /// # Safety
    /// As [`Self::run`]; `out` is as long as `q`.
    unsafe fn few_rows<O: Element>(&self, isa: Isa, q: &[f32], out: &Rows<O>, seqs: &[&SeqSpan]) {
        // SAFETY: passed on from the caller; the dtype is the pool's.
        unsafe {
            match self.pool.layout().dtype {
                KvDtype::Bf16 => decode::attend(&decode::Wide::<bf16, O>::new(isa), self, q, out, seqs),
                KvDtype::F32 => decode::attend(&decode::Wide::<f32, O>::new(isa), self, q, out, seqs),
            }
        }
    }

    /// True if bf16 queries are computed with as they are. Rows must fill registers of 32 elements.
    pub fn has_bf16_kernel(&self, isa: Isa) -> bool {
        let layout = self.pool.layout();
        let fits = layout.head_dim.is_multiple_of(32) && layout.head_dim <= 256;
        isa.computes_bf16() && layout.dtype == KvDtype::Bf16 && fits
    }

    /// The elements of one head of the token at `position` of the sequence whose block table starts at `table_start`.
    ///
    /// Panics if the table names a block that the pool lacks, which is a bug of the engine.
    #[inline]
    pub fn token<E: Element>(
        &self,
        table_start: usize,
        position: usize,
        half: Half,
        kv_head: usize,
    ) -> *const E {
        let layout = self.pool.layout();
        let block = self.meta.block_tables[table_start + position / layout.block_size];
        let offset = position % layout.block_size * layout.row() + kv_head * layout.head_dim;
        // The offset is inside the half: the position is below the block size and the head below the number of heads.
        self.pool.half_ptr(block, self.layer, half).cast::<E>().wrapping_add(offset)
    }
}

fn widened(q: Input<'_>) -> Cow<'_, [f32]> {
    match q {
        Input::F32(q) => Cow::Borrowed(q),
        Input::Bf16(q) => {
            let mut wide = vec![0f32; q.len()];
            widen_into(q, &mut wide);
            Cow::Owned(wide)
        }
    }
}

/// Where rows of the output start, shared by threads that write different (row, head) parts of it.
pub struct Rows<E>(pub *mut E);

// SAFETY: tasks write disjoint parts.
unsafe impl<E> Sync for Rows<E> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvLayout;

    struct Case {
        /// Tokens before and in the batch, for each sequence.
        seqs: Vec<(usize, usize)>,
        heads: usize,
        layout: KvLayout,
    }

    fn random(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Wide enough that some softmaxes are sharp.
            ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 2.0
        };
        (0..len).map(|_| bf16::from_f32(next()).to_f32()).collect()
    }

    /// Largest difference from f64 on `isa`, with queries and output in bf16 or in f32.
    fn error(case: &Case, isa: Isa, narrow: bool) -> f64 {
        let layout = case.layout;
        let (dim, size, layer) = (layout.head_dim, layout.block_size, layout.num_layers - 1);
        let blocks = case.seqs.iter().map(|(before, new)| (before + new).div_ceil(size)).sum::<usize>();
        let pool = KvPool::new(layout, blocks).unwrap();
        let (mut meta, mut next) = (BatchMeta::default(), 0);
        let mut kv = Vec::new();
        for (i, &(before, new)) in case.seqs.iter().enumerate() {
            let count = (before + new).div_ceil(size);
            let table: Vec<u32> = (0..count as u32).map(|b| next + count as u32 - 1 - b).collect();
            next += count as u32;
            meta.push(&table, before, new, size);
            kv.push([Half::Key, Half::Value].map(|half| {
                let values =
                    random((before + new) * layout.row(), 7 + i as u32 + 100 * (half == Half::Value) as u32);
                for (position, row) in values.chunks_exact(layout.row()).enumerate() {
                    let to = pool.half_ptr(table[position / size], layer, half);
                    for (j, value) in row.iter().enumerate() {
                        let at = position % size * layout.row() + j;
                        // SAFETY: inside the half, of the pool's type, and the pool is this test's.
                        unsafe {
                            match layout.dtype {
                                KvDtype::Bf16 => *to.cast::<bf16>().add(at) = bf16::from_f32(*value),
                                KvDtype::F32 => *to.cast::<f32>().add(at) = *value,
                            }
                        }
                    }
                }
                values
            }));
        }
        let q = random(meta.num_tokens() * case.heads * dim, 1);
        let attention = Attention { pool: &pool, layer, meta: &meta, heads: case.heads };
        let mut out = vec![f32::NAN; q.len()];
        if narrow {
            let q: Vec<bf16> = q.iter().map(|x| bf16::from_f32(*x)).collect();
            let mut rounded = vec![bf16::NAN; q.len()];
            // SAFETY: the pool is this test's.
            unsafe { attention.run(isa, Input::Bf16(&q), Output::Bf16(&mut rounded)) };
            out = rounded.iter().map(|x| x.to_f32()).collect();
        } else {
            // SAFETY: the pool is this test's.
            unsafe { attention.run(isa, Input::F32(&q), Output::F32(&mut out)) };
        }
        let mut worst = 0f64;
        let group = case.heads / layout.num_kv_heads;
        for (seq, [keys, values]) in meta.seqs.iter().zip(&kv) {
            for row in 0..seq.q_len {
                for head in 0..case.heads {
                    let at = ((seq.q_start + row) * case.heads + head) * dim;
                    let context = seq.context_len - seq.q_len + row + 1;
                    let part = |t: usize| t * layout.row() + head / group * dim;
                    let product = |t: usize| -> f64 {
                        (0..dim).map(|i| f64::from(q[at + i]) * f64::from(keys[part(t) + i])).sum()
                    };
                    let scores: Vec<f64> = (0..context).map(|t| product(t) / (dim as f64).sqrt()).collect();
                    let max = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for i in 0..dim {
                        let value = |t: usize| weights[t] / sum * f64::from(values[part(t) + i]);
                        let exact: f64 = (0..context).map(value).sum();
                        let error = (exact - f64::from(out[at + i])).abs();
                        assert!(!error.is_nan(), "{:?} row {row} head {head} is not a number", case.seqs);
                        worst = worst.max(error);
                    }
                }
            }
        }
        worst
    }

    fn cases(dtype: KvDtype) -> Vec<Case> {
        let shapes =
            [(2, 1, 32, 16), (4, 2, 128, 16), (7, 1, 64, 8), (8, 8, 32, 5), (3, 1, 96, 32), (4, 2, 48, 16)];
        let seqs: [&[(usize, usize)]; 6] = [
            &[(0, 1)],
            &[(0, 150), (0, 33)],
            &[(16, 1), (511, 1), (0, 5), (600, 3)],
            &[(130, 70), (1099, 1)],
            &[(127, 1), (128, 1), (0, 128)],
            &[(5, 4), (64, 64)],
        ];
        let layout = |(heads, num_kv_heads, head_dim, block_size)| {
            (heads, KvLayout { num_layers: 2, num_kv_heads, head_dim, block_size, dtype })
        };
        let case = |shape| {
            let (heads, layout) = layout(shape);
            seqs.iter().map(move |seqs| Case { seqs: seqs.to_vec(), heads, layout })
        };
        shapes.into_iter().flat_map(case).collect()
    }

    #[test]
    fn attention_in_f32_agrees_with_f64() {
        for (dtype, isa) in [KvDtype::F32, KvDtype::Bf16]
            .into_iter()
            .flat_map(|dtype| Isa::available().map(move |isa| (dtype, isa)))
        {
            for case in cases(dtype) {
                let error = error(&case, isa, false);
                assert!(error < 2e-5, "{isa:?} {:?} {:?}: {error:e}", case.seqs, case.layout);
            }
        }
    }

    #[test]
    fn attention_in_bf16_agrees_with_f64_within_its_rounding() {
        for isa in Isa::available() {
            for case in cases(KvDtype::Bf16) {
                // Values are below 2, and half a unit in the last place of bf16 is 2^-9 of them.
                let error = error(&case, isa, true);
                assert!(error < 1.5e-2, "{isa:?} {:?} {:?}: {error:e}", case.seqs, case.layout);
            }
        }
    }
}
