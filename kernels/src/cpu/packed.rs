//! A bf16 weight matrix in the order in which the products read it.

use std::io;

use super::arena::{Arena, HugeSlice};
use super::team;

/// Output columns of a panel: four AVX-512 registers of f32 sums.
pub const COLUMNS: usize = 64;

/// Pairs of inputs come in multiples of this: a step of AMX. Those beyond `k` are zero.
pub const PAIRS: usize = 16;

/// The weight `[n, k]` of a linear layer, repacked once.
///
/// Panels of [`COLUMNS`] outputs, one after another; in a panel, for each pair of inputs `(2i, 2i + 1)`, one word for each
/// output: the bf16 weight of input `2i` in its low half, of `2i + 1` in its high half. So one pass over the memory, in
/// order, serves every kernel. Columns beyond `n` and inputs beyond `k` are zero.
#[derive(Debug)]
pub struct PackedBf16 {
    n: usize,
    k: usize,
    gated: bool,
    words: HugeSlice,
}

impl PackedBf16 {
    /// Packs matrices of `k` columns stacked by rows: `parts` are their row-major little-endian bf16 bytes, of any
    /// alignment. Uses all threads.
    ///
    /// Errors: no memory. Panics if a part does not hold whole rows, which is a bug of the caller.
    pub fn new(arena: &mut Arena, parts: &[&[u8]], k: usize) -> io::Result<Self> {
        let rows = parts.iter().flat_map(|part| rows_of(part, k)).collect::<Vec<&[u8]>>();
        Self::from_panels(arena, &rows.chunks(COLUMNS).collect::<Vec<_>>(), k, false)
    }

    /// Packs the gate's and the up projection's weight, both `[n / 2, k]`, for [`super::matmul::silu_mul`]: their panels
    /// take turns, so that both halves of an output are computed together.
    ///
    /// Errors: no memory. Panics if the parts are not of equal size, which is a bug of the caller.
    pub fn gated(arena: &mut Arena, gate: &[u8], up: &[u8], k: usize) -> io::Result<Self> {
        assert!(gate.len() == up.len(), "a gate of {} bytes, {} up. This is a bug.", gate.len(), up.len());
        let [gate, up] = [gate, up].map(|part| rows_of(part, k).collect::<Vec<&[u8]>>());
        let panels = gate.chunks(COLUMNS).zip(up.chunks(COLUMNS)).flat_map(|(gate, up)| [gate, up]);
        Self::from_panels(arena, &panels.collect::<Vec<_>>(), k, true)
    }

    fn from_panels(arena: &mut Arena, panels: &[&[&[u8]]], k: usize, gated: bool) -> io::Result<Self> {
        let panel_words = k.div_ceil(2 * PAIRS) * PAIRS * COLUMNS;
        let mut words = arena.alloc(panels.len() * panel_words)?;
        let base = Words(words.as_mut_ptr());
        team::run(panels.len(), |panel| {
            // SAFETY: the allocation holds this many panels and each is filled by one task.
            let panel_words = unsafe { base.panel(panel, panel_words) };
            pack_panel(panels[panel], panel_words);
        });
        Ok(Self { n: panels.iter().map(|rows| rows.len()).sum(), k, gated, words })
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

    /// Pairs of inputs, a multiple of [`PAIRS`].
    pub fn pairs(&self) -> usize {
        self.k.div_ceil(2 * PAIRS) * PAIRS
    }

    /// Panels of [`COLUMNS`] outputs.
    pub fn panels(&self) -> usize {
        self.words.len() / (self.pairs() * COLUMNS)
    }

    /// Bytes of the packed form.
    pub fn bytes(&self) -> usize {
        self.words.len() * size_of::<u32>()
    }

    /// All panels.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Widens row `row` (the weights of one output) into `out[k]`: a lookup, when the matrix is an embedding table.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k && !self.gated, "row {row} of {}. This is a bug.", self.n);
        let panel = &self.words[row / COLUMNS * self.pairs() * COLUMNS..][..self.pairs() * COLUMNS];
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

/// The start of the panels, shared by the threads that fill them.
#[derive(Clone, Copy)]
struct Words(*mut u32);

// SAFETY: each task takes a panel of its own.
unsafe impl Sync for Words {}

impl Words {
    /// # Safety
    /// The panel must lie inside the allocation and be nobody else's.
    unsafe fn panel<'a>(self, panel: usize, len: usize) -> &'a mut [u32] {
        // SAFETY: passed on from the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(panel * len), len) }
    }
}

/// Transposes up to [`COLUMNS`] rows, sixteen words of each at a time: 4 KiB, which stay in L1.
fn pack_panel(rows: &[&[u8]], panel: &mut [u32]) {
    const WORDS: usize = 16;
    for (index, block) in panel.chunks_mut(WORDS * COLUMNS).enumerate() {
        for (column, row) in rows.iter().enumerate() {
            let bytes = &row[index * WORDS * 4..row.len().min((index + 1) * WORDS * 4)];
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
            let packed = PackedBf16::new(&mut Arena::default(), &[first, second], k).unwrap();
            let mut row = vec![f32::NAN; k];
            for (i, expected) in weights.chunks_exact(k).enumerate() {
                packed.row(i, &mut row);
                assert!(row.iter().zip(expected).all(|(a, b)| *a == b.to_f32()), "{n}x{k} row {i}");
            }
        }
    }
}
