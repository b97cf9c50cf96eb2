//! The register tile for CPUs without bf16 products: weights are widened to f32 in registers, activations stay f32.
//!
//! One source, compiled for each instruction set; arrays of `W` floats become its registers.

use super::packed::COLUMNS;

/// Rows of the largest tile.
pub const ROWS: usize = 6;

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
}

/// `R` rows by `W` columns, for a panel's columns `W` at a time. `FUSED`: the CPU has fused multiply-add.
///
/// # Safety
/// All of `a`, `b` and `c` that the fields name may be accessed.
#[inline(always)]
unsafe fn tile<const R: usize, const W: usize, const FUSED: bool>(t: &Tile) {
    for column in (0..COLUMNS).step_by(W) {
        let mut sums = [[0f32; W]; R];
        // SAFETY: rows below R, pairs below `pairs` and columns below 64 are within what the caller vouches for.
        unsafe {
            if t.add {
                for (i, row) in sums.iter_mut().enumerate() {
                    *row = t.c.add(i * t.c_row + column).cast::<[f32; W]>().read_unaligned();
                }
            }
            for pair in 0..t.pairs {
                let words = t.b.add(pair * COLUMNS + column).cast::<[u32; W]>().read_unaligned();
                let low = words.map(|word| f32::from_bits(word << 16));
                let high = words.map(|word| f32::from_bits(word & 0xffff_0000));
                for (i, row) in sums.iter_mut().enumerate() {
                    let [even, odd] = t.a.add(i * t.a_row + 2 * pair).cast::<[f32; 2]>().read_unaligned();
                    for j in 0..W {
                        row[j] = multiply_add::<FUSED>(even, low[j], row[j]);
                    }
                    for j in 0..W {
                        row[j] = multiply_add::<FUSED>(odd, high[j], row[j]);
                    }
                }
            }
            for (i, row) in sums.iter().enumerate() {
                t.c.add(i * t.c_row + column).cast::<[f32; W]>().write_unaligned(*row);
            }
        }
    }
}

#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Picks the tile for `rows`; few rows take more columns at once, so that a matrix-vector product reads memory in order.
macro_rules! by_rows {
    ($tile:expr, $rows:expr, $fused:literal, $one:literal, $two:literal, $many:literal) => {
        match $rows {
            1 => tile::<1, $one, $fused>($tile),
            2 => tile::<2, $two, $fused>($tile),
            3 => tile::<3, $many, $fused>($tile),
            4 => tile::<4, $many, $fused>($tile),
            5 => tile::<5, $many, $fused>($tile),
            _ => tile::<ROWS, $many, $fused>($tile),
        }
    };
}

impl Tile {
    /// Computes `rows` (1 to [`ROWS`]) rows on any CPU.
    ///
    /// # Safety
    /// All of `a`, `b` and `c` that the fields name may be accessed.
    pub unsafe fn portable(&self, rows: usize) {
        // SAFETY: passed on from the caller.
        unsafe { by_rows!(self, rows, false, 32, 8, 8) }
    }

    /// # Safety
    /// As [`Self::portable`], and the CPU has [`super::Isa::Avx2`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn avx2(&self, rows: usize) {
        // SAFETY: passed on from the caller.
        unsafe { by_rows!(self, rows, true, 64, 16, 16) }
    }

    /// # Safety
    /// As [`Self::portable`], and the CPU has [`super::Isa::Avx512`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub unsafe fn avx512(&self, rows: usize) {
        // SAFETY: passed on from the caller.
        unsafe { by_rows!(self, rows, true, 64, 16, 16) }
    }
}
