//! `2^x` and `e^x`, by a polynomial that the compiler can vectorise.

/// Coefficients of `2^f` for `f` in [-1/2, 1/2], minimax of degree 5 with `2^0 = 1` exact, highest first.
/// With f32 arithmetic the relative error stays below 3e-7.
#[expect(clippy::approx_constant, reason = "a fitted coefficient near ln 2, not ln 2")]
const POLYNOMIAL: [f32; 6] = [1.326_472e-3, 9.671_513e-3, 0.055_507_34, 0.240_222_42, 0.693_147, 1.0];

/// `e^x` with a relative error below 1e-6 where the result is a normal number; 0 below about -87, infinity never: above
/// 88 it stays at `e^88`. No branch, no call: loops over it become vector code.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.3, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // x - n ln 2 in two parts (Cody & Waite 1980): n log2(e) alone would lose the low bits of large x.
    let f = (x - n * 0.693_359_4 + n * 2.121_944_4e-4) * std::f32::consts::LOG2_E;
    let power = POLYNOMIAL.into_iter().fold(0.0, |sum, c| sum * f + c);
    power * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

/// `2^x` for `x <= 0` with a relative error below 4e-6, far below the 2e-3 of the bf16 that attention rounds it to;
/// about 1e-38 below -126.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp2(x: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    let x = _mm512_max_ps(x, _mm512_set1_ps(-126.0));
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm512_sub_ps(x, n);
    // Minimax of degree 4.
    let mut power = _mm512_set1_ps(9.582_842e-3);
    for c in [0.055_906_452_f32, 0.240_241, 0.693_124_2, 1.0] {
        power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(power, n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_as_exact_as_it_says() {
        for i in -870_000..880_000 {
            let x = i as f32 / 10_000.0;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 1e-6, "exp({x}) is off by {error:e}");
        }
        assert_eq!(
            (exp(0.0), exp(f32::NEG_INFINITY) < 2e-38, exp(f32::INFINITY).is_finite()),
            (1.0, true, true)
        );
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn exp2_is_as_exact_as_it_says() {
        if !super::super::Isa::Avx512.is_available() {
            return;
        }
        #[target_feature(enable = "avx512f")]
        fn all(xs: &[f32; 16]) -> [f32; 16] {
            use std::arch::x86_64::*;
            let mut out = [0f32; 16];
            // SAFETY: both arrays hold sixteen floats.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), exp2(_mm512_loadu_ps(xs.as_ptr()))) };
            out
        }
        for i in 0..80_000 {
            let xs: [f32; 16] = std::array::from_fn(|j| -((i * 16 + j) as f32) / 10_240.0);
            // SAFETY: the CPU has AVX-512.
            for (x, y) in xs.iter().zip(unsafe { all(&xs) }) {
                let exact = f64::from(*x).exp2();
                let error = (f64::from(y) - exact).abs() / exact;
                assert!(error < 4e-6, "exp2({x}) is off by {error:e}");
            }
        }
    }
}
