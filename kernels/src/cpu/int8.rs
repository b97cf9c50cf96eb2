//! Products in bytes: weights rounded to signed bytes with a scale for each output, activations to unsigned ones with a
//! scale for each row, sums in i32. Sums are exact, so every instruction set gives the same.

use super::matmul::Input;
use super::packed::{COLUMNS, Scale};
use super::{Isa, dispatch, team, widen};

/// Bytes of activations are unsigned with this for zero, as `vpdpbusd` wants them.
const ZERO: i32 = 128;
/// The largest byte of either sign: -128 is left out, so that both have the same range.
const LARGEST: f32 = 127.0;
/// Rows handed to one thread at a time.
const ROWS: usize = 16;

/// Rounds up to [`COLUMNS`] rows of little-endian bf16 and puts them in the order of a panel.
pub fn pack_panel(rows: &[&[u8]], panel: &mut [u32], scales: &mut [Scale]) {
    for (column, (row, scale)) in rows.iter().zip(scales).enumerate() {
        let values: Vec<f32> =
            row.as_chunks::<2>().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32()).collect();
        let factor = factor(&values);
        let to = panel[column..].iter_mut().step_by(COLUMNS);
        for (word, values) in to.zip(values.chunks(4)) {
            let mut bytes = [0i8; 4];
            for (byte, value) in bytes.iter_mut().zip(values) {
                *byte = (value / factor).round_ties_even() as i8;
                scale.sum += i32::from(*byte);
            }
            *word = u32::from_le_bytes(bytes.map(|byte| byte as u8));
        }
        scale.factor = factor;
    }
}

/// What a byte of these values stands for; 1 where all are zero.
fn factor(values: &[f32]) -> f32 {
    match largest(values) {
        0.0 => 1.0,
        largest => largest / LARGEST,
    }
}

dispatch! {
    fn largest(values: &[f32]) -> f32 {
        let mut lanes = [0f32; 16];
        let (chunks, rest) = values.as_chunks::<16>();
        for chunk in chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane = lane.max(value.abs());
            }
        }
        lanes.iter().copied().chain(rest.iter().map(|value| value.abs())).fold(0.0, f32::max)
    }
}

/// Rounds rows of `k` activations to bytes, `row` words apart, and says in `factors` what a byte of each row stands for.
pub fn quantize_rows(x: Input<'_>, k: usize, to: &mut [u32], row: usize, factors: &mut Vec<f32>) {
    let rows = x.len() / k;
    factors.clear();
    factors.resize(rows, 0.0);
    let (to, factors) =
        (super::attention::Rows(to.as_mut_ptr()), super::attention::Rows(factors.as_mut_ptr()));
    let (to, factors) = (&to, &factors);
    team::run(rows.div_ceil(ROWS), |task| {
        let mut wide = vec![0f32; k];
        for i in task * ROWS..rows.min((task + 1) * ROWS) {
            let values = match x {
                Input::F32(x) => &x[i * k..(i + 1) * k],
                Input::Bf16(x) => {
                    super::widen_into(&x[i * k..(i + 1) * k], &mut wide);
                    &wide
                }
            };
            // SAFETY: row `i` and its factor are inside the buffers, and this task's alone.
            let (bytes, to_factor) = unsafe {
                let words = std::slice::from_raw_parts_mut(to.0.add(i * row), row);
                (bytemuck::cast_slice_mut::<u32, u8>(words), &mut *factors.0.add(i))
            };
            *to_factor = factor(values);
            quantize(values, 1.0 / *to_factor, &mut bytes[..k]);
            bytes[k..].fill(0);
        }
    });
}

dispatch! {
    fn quantize(values: &[f32], inverse: f32, bytes: &mut [u8]) -> () {
        for (byte, value) in bytes.iter_mut().zip(values) {
            // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits: no call, so vector code.
            let rounded = value * inverse + 12_582_912.0;
            *byte = (rounded.to_bits() as u8).wrapping_add(ZERO as u8);
        }
    }
}

dispatch! {
    /// Turns a panel's row of i32 sums into what they stand for.
    pub fn dequantize(sums: &mut [f32], scales: &[Scale], factor: f32) -> () {
        for (sum, scale) in sums.iter_mut().zip(scales) {
            let whole = (sum.to_bits() as i32).wrapping_sub(ZERO * scale.sum);
            *sum = whole as f32 * (factor * scale.factor);
        }
    }
}

/// Operands of one tile: `c[i, j] (+)= sum over p of a[i, p] . b[p, j]`, words being four bytes.
#[derive(Clone, Copy)]
pub struct Tile {
    /// Words to sum over.
    pub depth: usize,
    /// Unsigned bytes; rows are `a_row` words apart.
    pub a: *const u32,
    pub a_row: usize,
    /// Signed bytes: [`COLUMNS`] words for each one of a column.
    pub b: *const u32,
    pub c: *mut i32,
    pub c_row: usize,
    pub add: bool,
    /// As [`super::dp::Tile::prefetch`].
    pub prefetch: (usize, usize),
}

macro_rules! by_rows {
    ($self:ident, $rows:ident, $kernel:ident) => {
        match $rows {
            1 => $self.$kernel::<1>(),
            2 => $self.$kernel::<2>(),
            3 => $self.$kernel::<3>(),
            4 => $self.$kernel::<4>(),
            5 => $self.$kernel::<5>(),
            _ => $self.$kernel::<{ widen::ROWS }>(),
        }
    };
}

impl Tile {
    /// Computes `rows` (1 to [`widen::ROWS`]) rows.
    ///
    /// # Safety
    /// The CPU has `isa`, and all of `a`, `b` and `c` that the fields name may be accessed.
    pub unsafe fn run(&self, isa: Isa, rows: usize) {
        // SAFETY: passed on from the caller. AVX-512 without VNNI has AVX2.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::AmxBf16 => by_rows!(self, rows, vnni),
                // As many registers of columns as fit beside the sums: few rows then read the weight in order.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::Avx512 => match rows {
                    1 => self.avx2::<1, 8>(),
                    2 => self.avx2::<2, 4>(),
                    3 => self.avx2::<3, 2>(),
                    4 => self.avx2::<4, 2>(),
                    5 => self.avx2::<5, 1>(),
                    _ => self.avx2::<{ widen::ROWS }, 1>(),
                },
                _ => by_rows!(self, rows, portable),
            }
        }
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn portable<const R: usize>(&self) {
        const W: usize = 8;
        for column in (0..COLUMNS).step_by(W) {
            let mut sums = [[0i32; W]; R];
            // SAFETY: rows below R, words below `depth` and columns below 64 are within what the caller vouches for.
            unsafe {
                if self.add {
                    for (i, row) in sums.iter_mut().enumerate() {
                        *row = self.c.add(i * self.c_row + column).cast::<[i32; W]>().read_unaligned();
                    }
                }
                for word in 0..self.depth {
                    let weights = self.b.add(word * COLUMNS + column).cast::<[[i8; 4]; W]>().read_unaligned();
                    for (i, row) in sums.iter_mut().enumerate() {
                        let inputs = self.a.add(i * self.a_row + word).read_unaligned().to_le_bytes();
                        for (sum, weights) in row.iter_mut().zip(weights) {
                            let terms = inputs.iter().zip(weights).map(|(a, b)| i32::from(*a) * i32::from(b));
                            *sum += terms.sum::<i32>();
                        }
                    }
                }
                for (i, row) in sums.iter().enumerate() {
                    self.c.add(i * self.c_row + column).cast::<[i32; W]>().write_unaligned(*row);
                }
            }
        }
    }

    /// Even and odd bytes apart, as 16-bit numbers: `vpmaddubsw` on the bytes themselves could overflow.
    ///
    /// # Safety
    /// As [`Self::run`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn avx2<const R: usize, const V: usize>(&self) {
        use std::arch::x86_64::*;
        for column in (0..COLUMNS).step_by(8 * V) {
            let mut sums = [[_mm256_setzero_si256(); V]; R];
            // SAFETY: as in `portable`; `V` registers of eight columns.
            unsafe {
                let c = |i: usize, j: usize| self.c.add(i * self.c_row + column + 8 * j).cast::<__m256i>();
                if self.add {
                    for (i, row) in sums.iter_mut().enumerate() {
                        row.iter_mut().enumerate().for_each(|(j, sum)| *sum = _mm256_loadu_si256(c(i, j)));
                    }
                }
                for word in 0..self.depth {
                    let b = self.b.add(word * COLUMNS + column);
                    for j in 0..V {
                        let weights = _mm256_loadu_si256(b.add(8 * j).cast());
                        let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(weights));
                        let odd = _mm256_srai_epi16::<8>(weights);
                        for (i, row) in sums.iter_mut().enumerate() {
                            let inputs = self.a.add(i * self.a_row + word).read_unaligned();
                            let even_inputs = _mm256_set1_epi32((inputs & 0x00ff_00ff) as i32);
                            let odd_inputs = _mm256_set1_epi32((inputs >> 8 & 0x00ff_00ff) as i32);
                            let terms = _mm256_add_epi32(
                                _mm256_madd_epi16(even, even_inputs),
                                _mm256_madd_epi16(odd, odd_inputs),
                            );
                            row[j] = _mm256_add_epi32(row[j], terms);
                        }
                    }
                }
                for (i, row) in sums.iter().enumerate() {
                    row.iter().enumerate().for_each(|(j, sum)| _mm256_storeu_si256(c(i, j), *sum));
                }
            }
        }
    }

    /// # Safety
    /// As [`Self::run`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn vnni<const R: usize>(&self) {
        use std::arch::x86_64::*;
        let (first, end) = self.prefetch;
        let mut sums = [[_mm512_setzero_si512(); 4]; R];
        // SAFETY: as in `portable`; four registers are the columns. A prefetch beyond the end is no access.
        unsafe {
            let c = |i: usize, j: usize| self.c.add(i * self.c_row + 16 * j).cast::<__m512i>();
            if self.add {
                for (i, row) in sums.iter_mut().enumerate() {
                    row.iter_mut().enumerate().for_each(|(j, sum)| *sum = _mm512_loadu_si512(c(i, j)));
                }
            }
            for word in 0..self.depth {
                let b = self.b.add(word * COLUMNS);
                let weights: [__m512i; 4] = std::array::from_fn(|j| _mm512_loadu_si512(b.add(16 * j).cast()));
                for j in first..end {
                    _mm_prefetch::<_MM_HINT_T1>(b.wrapping_add(super::dp::PREFETCH + 16 * j).cast());
                }
                for (i, row) in sums.iter_mut().enumerate() {
                    let inputs = self.a.add(i * self.a_row + word).read_unaligned();
                    let inputs = _mm512_set1_epi32(inputs as i32);
                    for (sum, weights) in row.iter_mut().zip(weights) {
                        *sum = _mm512_dpbusd_epi32(*sum, inputs, weights);
                    }
                }
            }
            for (i, row) in sums.iter().enumerate() {
                row.iter().enumerate().for_each(|(j, sum)| _mm512_storeu_si512(c(i, j), *sum));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::arena::Arena;
    use super::super::attention::Output;
    use super::super::matmul::{matmul, silu_mul};
    use super::super::packed::{Packed, Precision};
    use super::*;

    fn values(len: usize, seed: u32) -> Vec<bf16> {
        let mut state = seed;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| bf16::from_f32(value())).collect()
    }

    #[test]
    fn every_path_gives_the_same_and_stays_within_the_rounding_of_f64() {
        for (m, n, k) in [(1, 65, 70), (7, 128, 1030), (25, 63, 64), (40, 130, 300), (400, 70, 2049)] {
            let (x, w) = (values(m * k, 1), values(n * k, 2));
            let bytes: &[u8] = bytemuck::cast_slice(&w);
            let packed = Packed::new(&mut Arena::default(), &[bytes], k, Precision::Int8).unwrap();
            let run = |isa| {
                let mut y = vec![1.0; m * n];
                matmul(isa, Input::Bf16(&x), &packed, None, &mut y, true);
                y
            };
            let portable = run(Isa::Portable);
            for isa in Isa::available() {
                assert_eq!(run(isa), portable, "{isa:?} {m}x{n}x{k}");
            }
            for (i, y) in portable.iter().enumerate() {
                let terms = x[i / n * k..][..k].iter().zip(&w[i % n * k..][..k]);
                let exact: f64 = terms.map(|(x, w)| x.to_f64() * w.to_f64()).sum();
                // Each factor is off by up to half a byte of 1/127, at random.
                let allowed = 6.0 * (k as f64 / 3.0).sqrt() * (0.5 / 127.0);
                let error = (f64::from(*y) - 1.0 - exact).abs();
                assert!(error < allowed, "{m}x{n}x{k} at {i}: {error:e} of {allowed:e}");
            }
        }
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_others_and_gates_are_applied() {
        let (m, n, k) = (130, 96, 640);
        let (x, w) = (values(m * k, 3), values(2 * n * k, 4));
        let bytes: &[u8] = bytemuck::cast_slice(&w);
        let parts = [&bytes[..n * k * 2], &bytes[n * k * 2..]];
        let gated = Packed::gated(&mut Arena::default(), &parts, k, Precision::Int8).unwrap();
        let both = Packed::new(&mut Arena::default(), &parts, k, Precision::Int8).unwrap();
        for isa in Isa::available() {
            let (mut all, mut alone, mut sums) = (vec![0.0; m * n], vec![0.0; n], vec![0.0; 2 * n]);
            silu_mul(isa, Input::Bf16(&x), &gated, Output::F32(&mut all));
            silu_mul(isa, Input::Bf16(&x[..k]), &gated, Output::F32(&mut alone));
            assert_eq!(all[..n], alone, "{isa:?}");
            matmul(isa, Input::Bf16(&x[..k]), &both, None, &mut sums, false);
            for (i, y) in alone.iter().enumerate() {
                let (gate, up) = (f64::from(sums[i]), f64::from(sums[n + i]));
                let exact = gate / (1.0 + (-gate).exp()) * up;
                assert!((f64::from(*y) - exact).abs() <= 1e-5 * (1.0 + exact.abs()), "{isa:?} {i}");
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_extremes_are_finite() {
        let (n, k) = (64, 64);
        let w: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32(if i / k == 1 { 3e38 } else { 0.0 })).collect();
        let packed =
            Packed::new(&mut Arena::default(), &[bytemuck::cast_slice(&w)], k, Precision::Int8).unwrap();
        let mut y = vec![f32::NAN; 2 * n];
        let x: Vec<f32> = (0..2 * k).map(|i| if i < k { 0.0 } else { 1e-3 }).collect();
        matmul(Isa::detect(), Input::F32(&x), &packed, None, &mut y, false);
        assert!(y.iter().all(|y| y.is_finite()) && y[n + 1] > 1e36, "{y:?}");
    }
}
