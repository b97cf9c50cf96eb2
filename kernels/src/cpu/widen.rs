//! The register tiles for CPUs without bf16 products: weights are widened to f32, activations stay f32.
//!
//! Few rows widen in registers, so that a weight is read once, in order. Many rows share what was widened: a strip of the
//! panel, as wide as the sums of a tile, stays in L1 (or near it) while all rows are multiplied with it.

use super::packed::COLUMNS;

/// Rows of the largest tile: with two registers for each, twelve sums hide the latency of the arithmetic.
pub const ROWS: usize = 6;

/// Rows of the largest tile with AVX-512 when rows are few: sixteen sums and the widened weights fit its registers, and
/// what widening costs is shared by more rows.
pub const FEW_ROWS: usize = 8;

/// Operands of one tile: `c[i, j] (+)= sum over p of a[i, 2p] b[p, j].low + a[i, 2p + 1] b[p, j].high`.
#[derive(Clone, Copy)]
pub struct Tile {
    /// Pairs to sum over.
    pub pairs: usize,
    /// Two floats for each pair; rows are `a_row` apart.
    pub a: *const f32,
    pub a_row: usize,
    /// [`COLUMNS`] words for each pair, one after another.
    pub b: *const u32,
    /// [`COLUMNS`] sums for each row, `c_row` apart.
    pub c: *mut f32,
    pub c_row: usize,
    /// Start from what the output holds.
    pub add: bool,
    /// `(which, of how many)` tiles this is that use the same `b`, where that comes from memory: each asks for its share of
    /// what follows, evenly, so that memory is busy all the time.
    pub ahead: Option<(usize, usize)>,
}

impl Tile {
    /// Computes `rows` (1 to [`ROWS`]) rows on any CPU.
    ///
    /// # Safety
    /// All of `a`, `b` and `c` that the fields name may be accessed.
    pub unsafe fn portable(&self, rows: usize) {
        // SAFETY: passed on from the caller.
        unsafe {
            match rows {
                1 => self.columns::<1, 32>(),
                2 => self.columns::<2, 8>(),
                3 => self.columns::<3, 8>(),
                4 => self.columns::<4, 8>(),
                5 => self.columns::<5, 8>(),
                _ => self.columns::<ROWS, 8>(),
            }
        }
    }

    /// `R` rows by `W` columns, for a panel's columns `W` at a time.
    ///
    /// # Safety
    /// As [`Self::portable`].
    #[inline(always)]
    unsafe fn columns<const R: usize, const W: usize>(&self) {
        for column in (0..COLUMNS).step_by(W) {
            let mut sums = [[0f32; W]; R];
            // SAFETY: rows below R, pairs below `pairs` and columns below 64 are within what the caller vouches for.
            unsafe {
                if self.add {
                    for (i, row) in sums.iter_mut().enumerate() {
                        *row = self.c.add(i * self.c_row + column).cast::<[f32; W]>().read_unaligned();
                    }
                }
                for pair in 0..self.pairs {
                    let words = self.b.add(pair * COLUMNS + column).cast::<[u32; W]>().read_unaligned();
                    let low = words.map(|word| f32::from_bits(word << 16));
                    let high = words.map(|word| f32::from_bits(word & 0xffff_0000));
                    for (i, row) in sums.iter_mut().enumerate() {
                        let [even, odd] =
                            self.a.add(i * self.a_row + 2 * pair).cast::<[f32; 2]>().read_unaligned();
                        (0..W).for_each(|j| row[j] += even * low[j]);
                        (0..W).for_each(|j| row[j] += odd * high[j]);
                    }
                }
                for (i, row) in sums.iter().enumerate() {
                    self.c.add(i * self.c_row + column).cast::<[f32; W]>().write_unaligned(*row);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{avx2, avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::cell::RefCell;

    use super::super::packed::COLUMNS;
    use super::super::tiles::{Words, floats};
    use super::{FEW_ROWS, ROWS, Tile};

    /// Pairs that are widened at a time: a strip of 256 inputs by two registers is 16 KiB with AVX2, half of L1; a whole panel,
    /// with AVX-512, 64 KiB.
    const STRIP_PAIRS: usize = 128;
    /// Words between what is used and what is fetched ahead: see [`super::super::dp::PREFETCH`].
    const PREFETCH: usize = super::super::dp::PREFETCH;

    /// The tiles for registers of `$lanes` floats.
    macro_rules! tiles {
        (
            $(#[$meta:meta])* $name:ident, $features:literal, $lanes:literal, $registers:literal, $float:ty, $int:ty,
            $zero:ident, $load:ident, $store:ident, $set:ident, $fmadd:ident,
            $load_words:ident, $set_words:ident, $shift:ident, $and:ident, $as_floats:ident
        ) => {
            $(#[$meta])*
            pub mod $name {
                use super::*;

                /// Columns of a strip.
                const STRIP: usize = $registers * $lanes;

                impl Tile {
                    /// Computes `rows` (1 to [`FEW_ROWS`] with AVX-512, else to [`ROWS`]) rows, widening in registers.
                    ///
                    /// # Safety
                    /// The CPU has the instruction set, and all of `a`, `b` and `c` that the fields name may be accessed.
                    #[target_feature(enable = $features)]
                    pub unsafe fn $name(&self, rows: usize) {
                        // SAFETY: passed on from the caller.
                        unsafe {
                            match rows {
                                1 => words::<1, { COLUMNS / $lanes }>(self),
                                2 => words::<2, 4>(self),
                                3 => words::<3, 4>(self),
                                4 => words::<4, $registers>(self),
                                5 => words::<5, 2>(self),
                                6 => words::<6, 2>(self),
                                7 => words::<7, 2>(self),
                                _ => words::<FEW_ROWS, 2>(self),
                            }
                        }
                    }
                }

                /// Computes any number of rows, which share the widened weights, and asks meanwhile for as many words from
                /// `next` on.
                ///
                /// # Safety
                /// As [`Tile`]'s function of this name, for `rows` rows.
                #[target_feature(enable = $features)]
                pub unsafe fn block(t: &Tile, rows: usize, next: *const u32) {
                    thread_local!(static STRIPS: RefCell<Words> = RefCell::default());
                    STRIPS.with_borrow_mut(|strips| {
                        let strips = floats(strips.get(2 * STRIP_PAIRS * COLUMNS));
                        for first in (0..t.pairs).step_by(STRIP_PAIRS) {
                            let pairs = STRIP_PAIRS.min(t.pairs - first);
                            let Tile { a_row, c_row, .. } = *t;
                            let tiles = rows.div_ceil(ROWS);
                            let lines = (pairs * COLUMNS / 16).div_ceil(tiles * (COLUMNS / STRIP));
                            // SAFETY: the strips have room for these pairs; the rest is passed on from the caller.
                            unsafe {
                                widen(t.b.add(first * COLUMNS), pairs, strips);
                                for (index, strip) in strips.chunks_exact(2 * STRIP_PAIRS * STRIP).enumerate() {
                                    let (a, b, c) = (t.a.add(2 * first), strip.as_ptr(), t.c.add(index * STRIP));
                                    let add = t.add || first > 0;
                                    let next = next.wrapping_add(first * COLUMNS + index * tiles * lines * 16);
                                    Strip { inputs: 2 * pairs, a, a_row, b, c, c_row, add, next, lines }.rows(rows);
                                }
                            }
                        }
                    });
                }

                /// `to[strip][2 p][j]` and `to[strip][2 p + 1][j]` are the halves of the strip's word `(p, j)`. Words are read
                /// in order, so that memory runs ahead.
                ///
                /// # Safety
                /// The CPU has the instruction set; `pairs` rows of [`COLUMNS`] words may be read.
                #[target_feature(enable = $features)]
                unsafe fn widen(from: *const u32, pairs: usize, to: &mut [f32]) {
                    let to = &mut to[..2 * STRIP_PAIRS * COLUMNS];
                    for pair in 0..pairs.min(STRIP_PAIRS) {
                        for j in (0..COLUMNS).step_by($lanes) {
                            let at = (j / STRIP * STRIP_PAIRS + pair) * 2 * STRIP + j % STRIP;
                            // SAFETY: passed on from the caller; `to` has two rows of each strip for each pair.
                            unsafe {
                                let (low, high) = halves(from.add(pair * COLUMNS + j));
                                $store(to.as_mut_ptr().add(at), low);
                                $store(to.as_mut_ptr().add(at + STRIP), high);
                            }
                        }
                    }
                }

                /// The low and the high halves of words as floats.
                ///
                /// # Safety
                /// The CPU has the instruction set; a register of words may be read.
                #[inline]
                #[target_feature(enable = $features)]
                unsafe fn halves(from: *const u32) -> ($float, $float) {
                    // SAFETY: passed on from the caller.
                    let words: $int = unsafe { $load_words(from.cast()) };
                    ($as_floats($shift::<16>(words)), $as_floats($and(words, $set_words(0xffff_0000_u32 as i32))))
                }

                /// `R` rows by `V` registers, for a panel's columns that many at a time.
                ///
                /// # Safety
                /// As [`Tile`]'s function of this name.
                #[inline]
                #[target_feature(enable = $features)]
                unsafe fn words<const R: usize, const V: usize>(t: &Tile) {
                    /// Pairs for which a whole number of lines is asked for.
                    const GROUP: usize = 4;
                    let Tile { pairs, a_row, c_row, add, ahead, .. } = *t;
                    let passes = COLUMNS / (V * $lanes);
                    // One row reads in order, which the memory system sees by itself, if no faster than what it is made for.
                    let ahead = ahead.filter(|_| passes > 1 || $lanes == 16);
                    let lines = ahead.map_or(0, |(_, tiles)| (GROUP * COLUMNS / 16 / (tiles * passes)).max(1));
                    let share = pairs / GROUP * lines;
                    let mut next =
                        t.b.wrapping_add(PREFETCH + 16 * share * passes * ahead.map_or(0, |(tile, _)| tile));
                    for column in (0..COLUMNS).step_by(V * $lanes) {
                        let (mut a, mut b) = (t.a, t.b.wrapping_add(column));
                        let mut sums = [[$zero(); V]; R];
                        // SAFETY: rows below R, pairs below `pairs` and columns below 64 are within what the caller
                        // vouches for. A prefetch beyond the end is no access.
                        unsafe {
                            if add {
                                for (i, row) in sums.iter_mut().enumerate() {
                                    for (j, sum) in row.iter_mut().enumerate() {
                                        *sum = $load(t.c.add(i * c_row + column + j * $lanes));
                                    }
                                }
                            }
                            for pair in 0..pairs {
                                if pair % GROUP == 0 {
                                    for line in 0..lines {
                                        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(16 * line).cast());
                                    }
                                    next = next.wrapping_add(16 * lines);
                                }
                                // What fits the registers beside the sums: a row's inputs, or the weights.
                                if R <= 2 {
                                    let even: [$float; R] = std::array::from_fn(|i| $set(*a.add(i * a_row)));
                                    let odd: [$float; R] = std::array::from_fn(|i| $set(*a.add(i * a_row + 1)));
                                    for j in 0..V {
                                        let (low, high) = halves(b.add(j * $lanes));
                                        for i in 0..R {
                                            sums[i][j] = $fmadd(even[i], low, sums[i][j]);
                                            sums[i][j] = $fmadd(odd[i], high, sums[i][j]);
                                        }
                                    }
                                } else {
                                    let halves: [($float, $float); V] =
                                        std::array::from_fn(|j| halves(b.add(j * $lanes)));
                                    for (i, row) in sums.iter_mut().enumerate() {
                                        let x = $set(*a.add(i * a_row));
                                        for (sum, half) in row.iter_mut().zip(halves) {
                                            *sum = $fmadd(x, half.0, *sum);
                                        }
                                    }
                                    for (i, row) in sums.iter_mut().enumerate() {
                                        let x = $set(*a.add(i * a_row + 1));
                                        for (sum, half) in row.iter_mut().zip(halves) {
                                            *sum = $fmadd(x, half.1, *sum);
                                        }
                                    }
                                }
                                a = a.wrapping_add(2);
                                b = b.wrapping_add(COLUMNS);
                            }
                            for (i, row) in sums.iter().enumerate() {
                                for (j, sum) in row.iter().enumerate() {
                                    $store(t.c.add(i * c_row + column + j * $lanes), *sum);
                                }
                            }
                        }
                    }
                }

                /// `c[i, j] (+)= sum over p of a[i, p] b[p, j]` for the columns `j` of a widened strip.
                struct Strip {
                    /// Even.
                    inputs: usize,
                    a: *const f32,
                    a_row: usize,
                    b: *const f32,
                    c: *mut f32,
                    c_row: usize,
                    add: bool,
                    /// Each tile asks for this many lines from here on.
                    next: *const u32,
                    lines: usize,
                }

                impl Strip {
                    /// # Safety
                    /// The CPU has the instruction set, and all of `a`, `b` and `c` that the fields name may be accessed.
                    #[target_feature(enable = $features)]
                    unsafe fn rows(&self, rows: usize) {
                        for (index, first) in (0..rows).step_by(ROWS).enumerate() {
                            // SAFETY: passed on from the caller; the tile's rows are below `rows`. A prefetch is no access.
                            unsafe {
                                for line in index * self.lines..(index + 1) * self.lines {
                                    _mm_prefetch::<_MM_HINT_T1>(self.next.wrapping_add(16 * line).cast());
                                }
                                match rows - first {
                                    1 => self.tile::<1>(first),
                                    2 => self.tile::<2>(first),
                                    3 => self.tile::<3>(first),
                                    4 => self.tile::<4>(first),
                                    5 => self.tile::<5>(first),
                                    _ => self.tile::<ROWS>(first),
                                }
                            }
                        }
                    }

                    /// # Safety
                    /// As [`Self::rows`], for `R` rows from `first`.
                    #[target_feature(enable = $features)]
                    unsafe fn tile<const R: usize>(&self, first: usize) {
                        const V: usize = $registers;
                        let Strip { inputs, a_row, c_row, add, .. } = *self;
                        // SAFETY: passed on from the caller.
                        unsafe {
                            let (mut a, mut b, c) = (self.a.add(first * a_row), self.b, self.c.add(first * c_row));
                            let mut sums = [[$zero(); V]; R];
                            if add {
                                for (i, row) in sums.iter_mut().enumerate() {
                                    *row = std::array::from_fn(|j| $load(c.add(i * c_row + j * $lanes)));
                                }
                            }
                            for _ in 0..inputs / 2 {
                                for input in 0..2 {
                                    let at = b.add(input * STRIP);
                                    let weights: [$float; V] = std::array::from_fn(|j| $load(at.add(j * $lanes)));
                                    for (i, row) in sums.iter_mut().enumerate() {
                                        let x = $set(*a.add(i * a_row + input));
                                        for (sum, weight) in row.iter_mut().zip(weights) {
                                            *sum = $fmadd(x, weight, *sum);
                                        }
                                    }
                                }
                                a = a.wrapping_add(2);
                                b = b.wrapping_add(2 * STRIP);
                            }
                            for (i, row) in sums.iter().enumerate() {
                                for (j, sum) in row.iter().enumerate() {
                                    $store(c.add(i * c_row + j * $lanes), *sum);
                                }
                            }
                        }
                    }
                }
            }
        };
    }

    tiles!(
        /// Registers of eight floats.
        avx2, "avx2,fma", 8, 2, __m256, __m256i,
        _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps,
        _mm256_loadu_si256, _mm256_set1_epi32, _mm256_slli_epi32, _mm256_and_si256, _mm256_castsi256_ps
    );
    tiles!(
        /// Registers of sixteen floats.
        avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma", 16, 4, __m512, __m512i,
        _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps,
        _mm512_loadu_si512, _mm512_set1_epi32, _mm512_slli_epi32, _mm512_and_si512, _mm512_castsi512_ps
    );
}
