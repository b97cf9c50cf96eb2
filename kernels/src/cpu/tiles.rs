//! Rows times one panel of a packed matrix, on any instruction set: what products and attention are made of.

use super::packed::{COLUMNS, Precision};
use super::{Isa, int8, widen};
#[cfg(target_arch = "x86_64")]
use super::{amx, dp};

/// Rows that the register tiles take at once; AMX takes more. Callers that choose their number of rows choose multiples.
pub const ROWS: usize = widen::ROWS;

/// Rows from which on it pays to widen weights once for all of them rather than in registers.
const WIDENED_ROWS: usize = 4 * ROWS;

/// Operands: `c[i, j] (+)= sum over p of a[i, p] . b[p, j]` for the columns `j` of a panel.
#[derive(Clone, Copy)]
pub struct Piece {
    /// Of the panel, and so of the rows.
    pub precision: Precision,
    /// Words of a column to sum over: a multiple of [`super::packed::STEP`].
    pub depth: usize,
    /// Rows, `a_row` words apart. To a word of the panel belongs for int8 one of four unsigned bytes; for bf16 one of two
    /// bf16 where [`Isa::computes_bf16`], else two of f32.
    pub a: *const u32,
    pub a_row: usize,
    /// [`COLUMNS`] words for each one of a column.
    pub b: *const u32,
    /// As many sums for each row, `c_row` apart: f32, or i32 for int8.
    pub c: *mut u32,
    pub c_row: usize,
    /// Start from what `c` holds.
    pub add: bool,
    pub ahead: Ahead,
}

/// What is worth asking memory for while a piece is computed with.
#[derive(Clone, Copy, Debug)]
pub enum Ahead {
    /// The words of a panel come from memory, and those that follow it are the next.
    Onward,
    /// As many words from here on are the next.
    Piece(*const u32),
}

/// What a thread computes with during one task.
pub struct Tiles {
    isa: Isa,
    #[cfg(target_arch = "x86_64")]
    amx: Option<amx::Session>,
}

impl Tiles {
    /// # Safety
    /// The CPU has `isa`, and this thread has no other tiles.
    pub unsafe fn new(isa: Isa) -> Self {
        Self {
            isa,
            // SAFETY: passed on from the caller.
            #[cfg(target_arch = "x86_64")]
            amx: (isa == Isa::AmxBf16).then(|| unsafe { amx::Session::new() }),
        }
    }

    /// Computes `rows` rows. For each element the pairs are summed in order, whatever `rows` is.
    ///
    /// # Safety
    /// All of `a`, `b` and `c` that the fields name may be accessed.
    pub unsafe fn product(&mut self, rows: usize, piece: &Piece) {
        #[cfg(target_arch = "x86_64")]
        if let Some(session) = &mut self.amx {
            let Piece { precision, depth, a, a_row, b, c, c_row, add, ahead } = *piece;
            let stream = matches!(ahead, Ahead::Onward);
            let steps = depth / amx::STEP;
            // SAFETY: passed on from the caller.
            return unsafe {
                session.run(rows, &amx::Tile { precision, steps, a, a_row, b, c, c_row, add, stream })
            };
        }
        if piece.precision == Precision::Bf16 && rows >= WIDENED_ROWS {
            let Piece { depth: pairs, a, a_row, b, c, c_row, add, ahead, .. } = *piece;
            let tile = widen::Tile { pairs, a: a.cast(), a_row, b, c: c.cast(), c_row, add, ahead: None };
            let next = match ahead {
                Ahead::Onward => b.wrapping_add(pairs * COLUMNS),
                Ahead::Piece(next) => next,
            };
            match self.isa {
                // SAFETY: passed on from the caller, who also vouched for the CPU.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => return unsafe { widen::avx512::block(&tile, rows, next) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => return unsafe { widen::avx2::block(&tile, rows, next) },
                _ => {}
            }
        }
        let tiles = rows.div_ceil(match (self.isa, piece.precision) {
            (Isa::Avx512, Precision::Bf16) => widen::FEW_ROWS,
            _ => ROWS,
        });
        let size = rows.div_ceil(tiles.max(1));
        for tile in 0..tiles {
            let first = tile * size;
            // SAFETY: passed on from the caller; the rows of the tile are below `rows`.
            unsafe { self.tile(size.min(rows - first), first, piece, (tile, tiles)) };
        }
    }

    /// `share`: which of how many tiles this is that use the same panel.
    ///
    /// # Safety
    /// As [`Self::product`], for `rows` rows from `first`.
    unsafe fn tile(&self, rows: usize, first: usize, piece: &Piece, share: (usize, usize)) {
        let Piece { depth: pairs, a_row, b, c_row, add, .. } = *piece;
        // What comes from memory is asked for ahead; each tile asks for its share, here of every pair's four cache lines.
        let ahead = matches!(piece.ahead, Ahead::Onward).then_some(share);
        let lines = ahead.map_or((0, 0), |(tile, tiles)| (4 * tile / tiles, 4 * (tile + 1) / tiles));
        // SAFETY: passed on from the caller, who also vouched for the CPU.
        unsafe {
            let (a, c) = (piece.a.add(first * a_row), piece.c.add(first * c_row));
            if piece.precision == Precision::Int8 {
                let (depth, c) = (pairs, c.cast());
                return int8::Tile { depth, a, a_row, b, c, c_row, add, prefetch: lines }.run(self.isa, rows);
            }
            let c = c.cast::<f32>();
            let wide = widen::Tile { pairs, a: a.cast(), a_row, b, c, c_row, add, ahead };
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::AmxBf16 | Isa::Avx512Bf16 => {
                    dp::Tile { pairs, a, a_row, b, c, c_row, add, prefetch: lines }.run(rows);
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => wide.avx512(rows),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => wide.avx2(rows),
                _ => wide.portable(rows),
            }
        }
    }
}

/// Sixty-four bytes at a multiple of them: what tiles load at once.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub struct Line([u32; 16]);

/// A buffer of words at a multiple of 64 bytes.
#[derive(Debug, Default)]
pub struct Words(Vec<Line>);

impl Words {
    /// `len` words of any value.
    pub fn get(&mut self, len: usize) -> &mut [u32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line::default());
        }
        // SAFETY: a line is sixteen words without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }

    /// Gives memory back that is more than `len` words.
    pub fn shrink(&mut self, len: usize) {
        self.0.truncate(len.div_ceil(16));
        self.0.shrink_to_fit();
    }
}

/// Words as the floats that they hold.
pub fn floats(words: &mut [u32]) -> &mut [f32] {
    bytemuck::cast_slice_mut(words)
}
