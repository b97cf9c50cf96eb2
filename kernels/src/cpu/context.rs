//! One KV head's keys and values of a sequence, in the order in which products read a weight.
//!
//! Attention of many rows is two products, with the keys and with the values as the "weight". Both are gathered from the
//! pool's blocks once for all rows, in the form of [`super::Packed`].

use half::bf16;

use super::attention::Attention;
use super::packed::{COLUMNS, STEP};
#[cfg(target_arch = "x86_64")]
use super::simd;
use super::{Isa, tiles};
use crate::batch::SeqSpan;
use crate::layout::Half;

/// Sizes of a packed context.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Keys, padded to whole panels.
    pub keys: usize,
    /// Pairs of a head's elements, padded to [`STEP`].
    pub pairs: usize,
    /// Panels that a head's elements fill.
    pub value_panels: usize,
}

impl Shape {
    pub fn new(context: usize, head_dim: usize) -> Self {
        Self {
            keys: context.next_multiple_of(COLUMNS),
            pairs: head_dim.div_ceil(2).next_multiple_of(STEP),
            value_panels: head_dim.div_ceil(COLUMNS),
        }
    }

    /// Words of the keys: for each panel of [`COLUMNS`] keys, `pairs` rows with a word for each key.
    pub fn key_words(&self) -> usize {
        self.keys * self.pairs
    }

    /// Words of the values: for each panel of [`COLUMNS`] elements, a row for each pair of keys, with a word for each
    /// element.
    pub fn value_words(&self) -> usize {
        self.value_panels * self.keys / 2 * COLUMNS
    }

    pub fn words(&self) -> usize {
        self.key_words() + self.value_words()
    }
}

/// A head's context, being packed or read: `words` are [`Shape::words`] many.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub seq: &'a SeqSpan,
    pub kv_head: usize,
    pub shape: Shape,
    pub words: *mut u32,
}

impl Context<'_> {
    /// The panel of keys from `key` on, a multiple of [`COLUMNS`].
    pub fn keys(&self, key: usize) -> *mut u32 {
        self.words.wrapping_add(key * self.shape.pairs)
    }

    /// Values in `panel` of the pairs of keys from `key` on, an even number.
    pub fn values(&self, panel: usize, key: usize) -> *mut u32 {
        let row = panel * self.shape.keys / 2 + key / 2;
        self.words.wrapping_add(self.shape.key_words() + row * COLUMNS)
    }

    /// Fills the part for [`COLUMNS`] keys from `first` on; those beyond the context become zero.
    ///
    /// # Safety
    /// The pool's KV is bf16 and nobody writes the sequence's blocks; the words are there, and this part nobody else's.
    pub unsafe fn pack(&self, isa: Isa, task: &Attention<'_>, first: usize) {
        let keys = COLUMNS.min(self.seq.context_len - first);
        let dim = task.head_dim();
        let token = |half, key| task.token::<bf16>(self.seq.table_start, first + key, half, self.kv_head);
        // SAFETY: passed on from the caller: a head of each of these tokens, `pairs * COLUMNS` words of the keys' panel, and
        // as many rows of each values' panel as there are pairs of keys in it.
        unsafe {
            let to = std::slice::from_raw_parts_mut(self.keys(first), self.shape.pairs * COLUMNS);
            let rows: [&[bf16]; COLUMNS] = std::array::from_fn(|key| match key < keys {
                true => std::slice::from_raw_parts(token(Half::Key, key), dim),
                false => &[],
            });
            transpose(isa, &rows, to);
            let rows: [&[bf16]; COLUMNS] = std::array::from_fn(|key| match key < keys {
                true => std::slice::from_raw_parts(token(Half::Value, key), dim),
                false => &[],
            });
            for (pair, rows) in rows.as_chunks::<2>().0.iter().enumerate() {
                for panel in 0..self.shape.value_panels {
                    let to = std::slice::from_raw_parts_mut(self.values(panel, first + 2 * pair), COLUMNS);
                    let [even, odd] = rows.map(|row| &row[row.len().min(panel * COLUMNS)..]);
                    zip(isa, even, odd, to);
                }
            }
        }
    }
}

/// `to[pair][column]` is the pair of elements of row `column`; zero beyond a row's end.
fn transpose(isa: Isa, rows: &[&[bf16]; COLUMNS], to: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 && rows.iter().all(|row| row.len() == rows[0].len() && row.len().is_multiple_of(32))
    {
        to[rows[0].len() / 2 * COLUMNS..].fill(0);
        for (columns, rows) in rows.as_chunks::<16>().0.iter().enumerate() {
            for first in (0..rows[0].len()).step_by(32) {
                let to = &mut to[first / 2 * COLUMNS + 16 * columns..][..15 * COLUMNS + 16];
                let from = rows.map(|row| row[first..first + 32].as_ptr().cast());
                // SAFETY: the CPU has AVX-512; each row has 32 elements from `first`, `to` sixteen rows of a panel.
                unsafe { simd::transpose_words(from, to.as_mut_ptr(), COLUMNS) };
            }
        }
        return;
    }
    let _ = isa;
    for (pair, to) in to.chunks_exact_mut(COLUMNS).enumerate() {
        for (to, row) in to.iter_mut().zip(rows) {
            *to = word(row.get(2 * pair), row.get(2 * pair + 1));
        }
    }
}

/// `to[i]` is the pair `(even[i], odd[i])`; zero beyond a row's end.
fn zip(isa: Isa, even: &[bf16], odd: &[bf16], to: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 && even.len() >= to.len() && odd.len() >= to.len() {
        // SAFETY: the CPU has AVX-512, and all have `to.len()` elements, a multiple of 32.
        return unsafe { simd::zip_rows(even.as_ptr(), odd.as_ptr(), to) };
    }
    let _ = isa;
    for (i, to) in to.iter_mut().enumerate() {
        *to = word(even.get(i), odd.get(i));
    }
}

fn word(low: Option<&bf16>, high: Option<&bf16>) -> u32 {
    let bits = |x: Option<&bf16>| u32::from(x.map_or(0, |x| x.to_bits()));
    bits(low) | bits(high) << 16
}

/// Rows of lanes' pairs: as many words as [`tiles::Piece::a`] wants.
pub fn row_words(isa: Isa, pairs: usize) -> usize {
    pairs * isa.pair_words()
}

const _: () = assert!(COLUMNS.is_multiple_of(2 * STEP) && tiles::ROWS < COLUMNS);
