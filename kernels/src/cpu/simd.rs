//! AVX-512 pieces that several kernels use.

use std::arch::x86_64::*;

/// Transposes 16 registers of 16 floats.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transpose(rows: [__m512; 16]) -> [__m512; 16] {
    let zero = _mm512_setzero_ps();
    let (mut pairs, mut quads, mut out) = ([zero; 16], [zero; 16], [zero; 16]);
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for i in (0..16).step_by(4) {
        let doubles: [__m512d; 4] = std::array::from_fn(|j| _mm512_castps_pd(pairs[i + j]));
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(doubles[0], doubles[2]));
        quads[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(doubles[0], doubles[2]));
        quads[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(doubles[1], doubles[3]));
        quads[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(doubles[1], doubles[3]));
    }
    // Quarter L of quads[4 g + c] holds column 4 L + c of rows 4 g to 4 g + 3.
    for c in 0..4 {
        let even_low = _mm512_shuffle_f32x4::<0x88>(quads[c], quads[4 + c]);
        let odd_low = _mm512_shuffle_f32x4::<0xdd>(quads[c], quads[4 + c]);
        let even_high = _mm512_shuffle_f32x4::<0x88>(quads[8 + c], quads[12 + c]);
        let odd_high = _mm512_shuffle_f32x4::<0xdd>(quads[8 + c], quads[12 + c]);
        out[c] = _mm512_shuffle_f32x4::<0x88>(even_low, even_high);
        out[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high);
        out[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even_low, even_high);
        out[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd_low, odd_high);
    }
    out
}

/// `[a[0], b[0], a[1], b[1], …]` of 32 bf16 each: the first sixteen pairs, then the others.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub fn zip(a: __m512i, b: __m512i) -> (__m512i, __m512i) {
    let (low, high) = (zip_index(0), zip_index(16));
    (_mm512_permutex2var_epi16(a, low, b), _mm512_permutex2var_epi16(a, high, b))
}

/// `to[i] = (even[i], odd[i])`, the first in the low half.
///
/// # Safety
/// The CPU has AVX-512, `to.len()` is a multiple of 32, and both rows have as many elements.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn zip_rows(even: *const half::bf16, odd: *const half::bf16, to: &mut [u32]) {
    for (i, to) in to.chunks_exact_mut(32).enumerate() {
        // SAFETY: 32 elements of each row from `32 i` on, and 32 words.
        unsafe {
            let [even, odd] = [even, odd].map(|row| _mm512_loadu_si512(row.add(32 * i).cast()));
            let (low, high) = zip(even, odd);
            _mm512_storeu_si512(to.as_mut_ptr().cast(), low);
            _mm512_storeu_si512(to.as_mut_ptr().add(16).cast(), high);
        }
    }
}

/// `to[i * to_row + j] = from[j][i]` for 16 x 16 words.
///
/// # Safety
/// The CPU has AVX-512; sixteen words of each row of `from` and of `to` may be accessed.
#[target_feature(enable = "avx512f")]
pub unsafe fn transpose_words(from: [*const u32; 16], to: *mut u32, to_row: usize) {
    // SAFETY: passed on from the caller. Moving bits through float registers changes none.
    unsafe {
        let columns = transpose(from.map(|row| _mm512_loadu_ps(row.cast())));
        columns
            .iter()
            .enumerate()
            .for_each(|(i, column)| _mm512_storeu_ps(to.add(i * to_row).cast(), *column));
    }
}

/// Element `2 i` is `first + i` of the first operand, `2 i + 1` the same of the second.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn zip_index(first: u32) -> __m512i {
    let index: [u32; 16] = std::array::from_fn(|i| (first + i as u32) | (first + i as u32 + 32) << 16);
    // SAFETY: both types are 512 bits without invalid values.
    unsafe { std::mem::transmute(index) }
}

#[cfg(test)]
#[expect(clippy::missing_transmute_annotations, reason = "arrays of the tests to registers and back")]
mod tests {
    use super::super::Isa;
    use super::*;

    #[test]
    fn transpose_swaps_rows_and_columns() {
        if !Isa::Avx512.is_available() {
            return;
        }
        let rows: [[f32; 16]; 16] = std::array::from_fn(|i| std::array::from_fn(|j| (16 * i + j) as f32));
        // SAFETY: the CPU has AVX-512, and arrays of 16 floats are registers.
        let out: [[f32; 16]; 16] = unsafe { std::mem::transmute(transpose(std::mem::transmute(rows))) };
        for (i, row) in out.iter().enumerate() {
            assert!(row.iter().enumerate().all(|(j, x)| *x == (16 * j + i) as f32), "{out:?}");
        }
    }

    #[test]
    fn zip_puts_neighbours_together() {
        if !Isa::Avx512.is_available() {
            return;
        }
        let (a, b): ([u16; 32], [u16; 32]) =
            (std::array::from_fn(|i| i as u16), std::array::from_fn(|i| 100 + i as u16));
        // SAFETY: the CPU has the features, and all types are 512 bits without invalid values.
        let (low, high): ([u16; 32], [u16; 32]) = unsafe {
            let (low, high) = zip(std::mem::transmute(a), std::mem::transmute(b));
            (std::mem::transmute(low), std::mem::transmute(high))
        };
        let zipped: Vec<u16> = (0..32).flat_map(|i| [i, 100 + i]).collect();
        assert_eq!([low, high].concat(), zipped);
    }
}
