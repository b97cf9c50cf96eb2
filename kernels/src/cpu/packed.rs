//! A weight matrix, bf16 or int8, in the order in which the products read it.

use std::io;

use super::arena::{Arena, HugeSlice};
use super::team;
#[cfg(target_arch = "x86_64")]
use super::{Isa, simd};

/// Output columns of a panel: four AVX-512 registers of f32 sums.
pub const COLUMNS: usize = 64;

/// Words of a column come in multiples of this: a step of AMX. Inputs beyond `k` are zero.
pub const STEP: usize = 16;

/// What a word of a [`Packed`] weight holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Inputs `(2i, 2i + 1)`, the first in the low half.
    Bf16,
    /// Inputs `4i` to `4i + 3` as signed bytes, the first lowest; each output has a scale of its own.
    Int8,
}

impl Precision {
    /// Inputs in a word.
    pub fn inputs(self) -> usize {
        match self {
            Precision::Bf16 => 2,
            Precision::Int8 => 4,
        }
    }
}

/// The weight `[n, k]` of a linear layer, repacked once.
///
/// Panels of [`COLUMNS`] outputs, one after another; in a panel, for each group of inputs (see [`Precision`]), one word for
/// each output. So one pass over the memory, in order, serves every kernel. Columns beyond `n` and inputs beyond `k` are
/// zero.
#[derive(Debug)]
pub struct Packed {
    n: usize,
    k: usize,
    gated: bool,
    precision: Precision,
    words: HugeSlice,
    /// For int8, one for each column of the panels.
    scales: Vec<Scale>,
}

/// How a column of signed bytes stands for its weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scale {
    /// A weight is its byte times this.
    pub factor: f32,
    /// The sum of the column's bytes.
    pub sum: i32,
}

impl Packed {
    /// Packs matrices of `k` columns stacked by rows: `parts` are their row-major little-endian bf16 bytes, of any
    /// alignment. Uses all threads.
    ///
    /// Errors: no memory. Panics if a part does not hold whole rows, which is a bug of the caller.
    pub fn new(arena: &mut Arena, parts: &[&[u8]], k: usize, precision: Precision) -> io::Result<Self> {
        let rows = parts.iter().flat_map(|part| rows_of(part, k)).collect::<Vec<&[u8]>>();
        Self::from_panels(arena, &rows.chunks(COLUMNS).collect::<Vec<_>>(), k, precision, false)
    }

    /// Packs the gate's and the up projection's weight, both `[n / 2, k]`, for [`super::matmul::silu_mul`]: their panels
    /// take turns, so that both halves of an output are computed together.
    ///
    /// Errors: no memory. Panics if there are not two parts of equal size, which is a bug of the caller.
    pub fn gated(arena: &mut Arena, parts: &[&[u8]], k: usize, precision: Precision) -> io::Result<Self> {
        let &[gate, up] = parts else { panic!("{} parts of a gate. This is a bug.", parts.len()) };
        assert!(gate.len() == up.len(), "a gate of {} bytes, {} up. This is a bug.", gate.len(), up.len());
        let [gate, up] = [gate, up].map(|part| rows_of(part, k).collect::<Vec<&[u8]>>());
        let panels = gate.chunks(COLUMNS).zip(up.chunks(COLUMNS)).flat_map(|(gate, up)| [gate, up]);
        Self::from_panels(arena, &panels.collect::<Vec<_>>(), k, precision, true)
    }

    fn from_panels(
        arena: &mut Arena,
        panels: &[&[&[u8]]],
        k: usize,
        precision: Precision,
        gated: bool,
    ) -> io::Result<Self> {
        let panel_words = depth(k, precision) * COLUMNS;
        let mut words = arena.alloc(panels.len() * panel_words)?;
        let mut scales = match precision {
            Precision::Bf16 => Vec::new(),
            Precision::Int8 => vec![Scale::default(); panels.len() * COLUMNS],
        };
        let (base, to_scales) = (Shared(words.as_mut_ptr()), Shared(scales.as_mut_ptr()));
        team::run(panels.len(), |panel| {
            // SAFETY: the allocation holds this many panels and each is filled by one task.
            let to = unsafe { base.part(panel, panel_words) };
            match precision {
                Precision::Bf16 => pack_panel(panels[panel], to),
                Precision::Int8 => {
                    // SAFETY: as above, a scale for each column.
                    let scales = unsafe { to_scales.part(panel, COLUMNS) };
                    super::int8::pack_panel(panels[panel], to, scales);
                }
            }
        });
        let n = panels.iter().map(|rows| rows.len()).sum();
        Ok(Self { n, k, gated, precision, words, scales })
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// True if made by [`Self::gated`].
    pub fn is_gated(&self) -> bool {
        self.gated
    }

    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Words of a column, a multiple of [`STEP`].
    pub fn depth(&self) -> usize {
        depth(self.k, self.precision)
    }

    /// Panels of [`COLUMNS`] outputs.
    pub fn panels(&self) -> usize {
        self.words.len() / (self.depth() * COLUMNS)
    }

    /// Bytes of the packed form.
    pub fn bytes(&self) -> usize {
        self.words.len() * size_of::<u32>()
    }

    /// All panels.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The scales of a panel's columns; none for bf16.
    pub fn scales(&self, panel: usize) -> Option<&[Scale]> {
        (self.precision == Precision::Int8).then(|| &self.scales[panel * COLUMNS..(panel + 1) * COLUMNS])
    }

    /// Widens row `row` (the weights of one output) into `out[k]`: a lookup, when the matrix is an embedding table.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k, "row {row} of {}. This is a bug.", self.n);
        assert!(!self.gated && self.precision == Precision::Bf16, "rows of a table only. This is a bug.");
        let panel = &self.words[row / COLUMNS * self.depth() * COLUMNS..][..self.depth() * COLUMNS];
        let column = panel[row % COLUMNS..].iter().step_by(COLUMNS);
        for (pair, word) in out.chunks_mut(2).zip(column) {
            pair[0] = f32::from_bits(word << 16);
            if let Some(odd) = pair.get_mut(1) {
                *odd = f32::from_bits(word & 0xffff_0000);
            }
        }
    }
}

fn rows_of(part: &[u8], k: usize) -> impl Iterator<Item = &[u8]> {
    assert!(k > 0 && part.len().is_multiple_of(2 * k), "{} bytes in rows of {k}. This is a bug.", part.len());
    part.chunks_exact(2 * k)
}

fn depth(k: usize, precision: Precision) -> usize {
    k.div_ceil(STEP * precision.inputs()) * STEP
}

/// The start of what threads fill in parts.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: each task takes a part of its own.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// The part must lie inside the allocation and be nobody else's.
    #[expect(clippy::mut_from_ref, reason = "parts are disjoint, which the caller vouches for")]
    unsafe fn part(&self, part: usize, len: usize) -> &mut [T] {
        // SAFETY: passed on from the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(part * len), len) }
    }
}

/// Transposes up to [`COLUMNS`] rows, sixteen words of each at a time: 4 KiB, which stay in L1.
fn pack_panel(rows: &[&[u8]], panel: &mut [u32]) {
    const WORDS: usize = 16;
    for (index, block) in panel.chunks_mut(WORDS * COLUMNS).enumerate() {
        #[cfg(target_arch = "x86_64")]
        if rows.len() == COLUMNS && Isa::detect() >= Isa::Avx512 && rows[0].len() >= (index + 1) * WORDS * 4 {
            for (group, rows) in rows.as_chunks::<16>().0.iter().enumerate() {
                let from = rows.map(|row| row[index * WORDS * 4..][..WORDS * 4].as_ptr().cast());
                // SAFETY: the CPU has AVX-512; each row has sixteen words here, the block sixteen rows of a panel.
                unsafe { simd::transpose_words(from, block[16 * group..].as_mut_ptr(), COLUMNS) };
            }
            continue;
        }
        for (column, row) in rows.iter().enumerate() {
            let bytes = &row[row.len().min(index * WORDS * 4)..row.len().min((index + 1) * WORDS * 4)];
            let (words, rest) = bytes.as_chunks::<4>();
            for (line, word) in block.chunks_exact_mut(COLUMNS).zip(words) {
                line[column] = u32::from_le_bytes(*word);
            }
            if let &[low, high] = rest {
                block[words.len() * COLUMNS + column] = u32::from(u16::from_le_bytes([low, high]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn rows_come_back_whatever_the_shape() {
        for (n, k) in [(1, 1), (3, 7), (64, 32), (65, 33), (130, 70), (200, 31)] {
            let weights: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32(i as f32 % 251.0 - 100.0)).collect();
            let bytes: &[u8] = bytemuck::cast_slice(&weights);
            let (first, second) = bytes.split_at(n / 3 * k * 2);
            let packed = Packed::new(&mut Arena::default(), &[first, second], k, Precision::Bf16).unwrap();
            let mut row = vec![f32::NAN; k];
            for (i, expected) in weights.chunks_exact(k).enumerate() {
                packed.row(i, &mut row);
                assert!(row.iter().zip(expected).all(|(a, b)| *a == b.to_f32()), "{n}x{k} row {i}");
            }
        }
    }
}
