//! The AVX512-BF16 register tile: products of bf16 pairs, summed in f32.

use std::arch::x86_64::*;

use super::packed::COLUMNS;

/// Rows of the largest tile: 6 x 4 sums, 4 weights and a broadcast use 29 of 32 registers.
pub const ROWS: usize = 6;

/// Words between what is used and what is fetched ahead, into L2: 16 KiB are some 250 ns of a thread's share of 60 GB/s,
/// more than memory's latency on a busy machine.
pub const PREFETCH: usize = 4096;

/// Operands of one tile: `c[i, j] (+)= sum over p of a[i, p] . b[p, j]`, words being pairs of bf16.
#[derive(Clone, Copy)]
pub struct Tile {
    /// Pairs to sum over.
    pub pairs: usize,
    /// Word `(i, p)` is at `a + i * a_row + p`; any alignment.
    pub a: *const u32,
    pub a_row: usize,
    /// [`COLUMNS`] words for each pair, one after another.
    pub b: *const u32,
    /// [`COLUMNS`] sums for each row, `c_row` apart.
    pub c: *mut f32,
    pub c_row: usize,
    /// Start from what the output holds.
    pub add: bool,
    /// Cache lines of each pair's four that are fetched ahead, where `b` comes from memory: `(first, end)`. Tiles that use
    /// the same `b` share them out, so that memory is busy all the time.
    pub prefetch: (usize, usize),
}

impl Tile {
    /// Computes `rows` (1 to [`ROWS`]) rows. For each element the pairs are summed in order, whatever `rows` is.
    ///
    /// # Safety
    /// The CPU has [`super::Isa::Avx512Bf16`] and all of `a`, `b` and `c` that the fields name may be accessed.
    pub unsafe fn run(&self, rows: usize) {
        // SAFETY: passed on from the caller.
        unsafe {
            match rows {
                1 => self.rows::<1>(),
                2 => self.rows::<2>(),
                3 => self.rows::<3>(),
                4 => self.rows::<4>(),
                5 => self.rows::<5>(),
                _ => self.rows::<ROWS>(),
            }
        }
    }

    /// # Safety
    /// As [`Self::run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn rows<const R: usize>(&self) {
        let Tile { pairs, a, a_row, b, c, c_row, add, prefetch } = *self;
        let (first, end) = prefetch;
        let mut sums = [[_mm512_setzero_ps(); 4]; R];
        // SAFETY: all addresses are within what the caller vouches for: rows below R, pairs below `pairs`, 64 columns.
        // A prefetch beyond the end is no access.
        unsafe {
            if add {
                for (i, row) in sums.iter_mut().enumerate() {
                    for (j, sum) in row.iter_mut().enumerate() {
                        *sum = _mm512_loadu_ps(c.add(i * c_row + 16 * j));
                    }
                }
            }
            let mut b_at = b;
            for pair in 0..pairs {
                let weights: [__m512bh; 4] = std::array::from_fn(|j| load(b_at.add(16 * j)));
                for j in first..end {
                    _mm_prefetch::<_MM_HINT_T1>(b_at.wrapping_add(PREFETCH + 16 * j).cast());
                }
                for (i, row) in sums.iter_mut().enumerate() {
                    let input = broadcast(a.add(i * a_row + pair).read_unaligned());
                    for (sum, weight) in row.iter_mut().zip(weights) {
                        *sum = _mm512_dpbf16_ps(*sum, input, weight);
                    }
                }
                b_at = b_at.wrapping_add(COLUMNS);
            }
            for (i, row) in sums.iter().enumerate() {
                for (j, sum) in row.iter().enumerate() {
                    _mm512_storeu_ps(c.add(i * c_row + 16 * j), *sum);
                }
            }
        }
    }
}

/// Sixteen pairs from memory of any alignment.
///
/// # Safety
/// The CPU has AVX512-BF16, and 64 bytes at `from` may be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn load(from: *const u32) -> __m512bh {
    // SAFETY: the caller vouches for the read.
    pairs_of(unsafe { _mm512_loadu_si512(from.cast()) })
}

/// One pair in all sixteen places.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn broadcast(pair: u32) -> __m512bh {
    pairs_of(_mm512_set1_epi32(pair as i32))
}

/// Sixteen words as pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn pairs_of(words: __m512i) -> __m512bh {
    // SAFETY: both types are 512 bits without invalid values.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}
