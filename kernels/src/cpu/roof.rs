//! What the machine can do at most, for the kernels to be compared with: reading memory in order, and arithmetic on
//! registers alone. On all threads of the team.

use std::hint::black_box;
use std::time::Instant;

use super::packed::Precision;
use super::{Isa, dispatch, team};

/// Reads `words` once, in order.
pub fn read(words: &[u32]) {
    let parts: Vec<&[u32]> = words.chunks(words.len().div_ceil(16 * team::threads()).max(64)).collect();
    team::run(parts.len(), |part| {
        black_box(any_bit(parts[part]));
    });
}

dispatch! {
    fn any_bit(words: &[u32]) -> u32 {
        let mut bits = [0u32; 64];
        for words in words.as_chunks::<64>().0 {
            bits.iter_mut().zip(words).for_each(|(bits, word)| *bits |= word);
        }
        bits.iter().fold(0, |all, bits| all | bits)
    }
}

/// Computes with registers only, as products of this precision on `isa` do; returns the operations (two for each
/// multiply-add).
///
/// Panics if the CPU lacks `isa`, which is a bug of the caller.
pub fn compute(isa: Isa, precision: Precision) -> f64 {
    /// Some milliseconds of each thread.
    const STEPS: usize = 100_000;
    assert!(isa.is_available(), "no {} here. This is a bug.", isa.as_str());
    let tasks = 4 * team::threads();
    // SAFETY: the CPU has the instructions; a thread is in one task at a time.
    let per_step = || unsafe {
        match (isa, precision) {
            #[cfg(target_arch = "x86_64")]
            (Isa::AmxBf16, precision) => super::amx::registers(STEPS, precision),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Precision::Bf16) => x86::bf16(STEPS),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Precision::Int8) => x86::int8(STEPS),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, Precision::Bf16) => x86::f32x16(STEPS),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2 | Isa::Avx512, _) => x86::f32x8(STEPS),
            _ => portable(STEPS),
        }
    };
    let counts: Vec<std::sync::atomic::AtomicUsize> = (0..tasks).map(|_| Default::default()).collect();
    team::run(tasks, |task| counts[task].store(per_step(), std::sync::atomic::Ordering::Relaxed));
    counts.into_iter().map(|count| count.into_inner() as f64).sum::<f64>() * STEPS as f64
}

/// Whether products of bf16 pairs are at least as fast as those of f32, on this thread. A fast trial of many counts: a CPU that
/// others use as well only ever looks slower.
///
/// Panics if the CPU lacks [`Isa::Avx512Bf16`], which is a bug of the caller.
pub fn pairs_pay() -> bool {
    assert!(Isa::Avx512Bf16.is_available(), "no bf16 products here. This is a bug.");
    #[cfg(target_arch = "x86_64")]
    {
        const STEPS: usize = 1000;
        let mut rates = [0f64; 2];
        for _ in 0..16 {
            // SAFETY: the CPU has the instructions.
            let kinds: [fn(usize) -> usize; 2] =
                [|steps| unsafe { x86::bf16(steps) }, |steps| unsafe { x86::f32x16(steps) }];
            for (rate, compute) in rates.iter_mut().zip(kinds) {
                let started = Instant::now();
                let operations = compute(STEPS);
                *rate = rate.max(operations as f64 / started.elapsed().as_secs_f64());
            }
        }
        rates[0] >= rates[1]
    }
    #[cfg(not(target_arch = "x86_64"))]
    true
}

/// Multiplies and adds what the baseline's registers hold; returns the operations of a step.
fn portable(steps: usize) -> usize {
    let mut sums = [[0f32; 4]; 8];
    let (a, b) = (black_box([0.5f32; 4]), black_box([0.25f32; 4]));
    for _ in 0..steps {
        for sums in &mut sums {
            (0..4).for_each(|i| sums[i] = sums[i] * a[i] + b[i]);
        }
    }
    black_box(sums);
    8 * 4 * 2
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Sums that do not wait for each other: more than latency times throughput.
    const CHAINS: usize = 12;

    macro_rules! chains {
        ($(#[$meta:meta])* $name:ident, $features:literal, $zero:ident, $input:expr, $step:ident, $operations:literal) => {
            $(#[$meta])*
            #[target_feature(enable = $features)]
            pub fn $name(steps: usize) -> usize {
                let input = black_box($input);
                let mut sums = [$zero(); CHAINS];
                for _ in 0..steps {
                    for sum in &mut sums {
                        *sum = $step(*sum, input);
                    }
                }
                black_box(sums);
                CHAINS * $operations
            }
        };
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn fma8(sum: __m256, x: __m256) -> __m256 {
        _mm256_fmadd_ps(x, x, sum)
    }
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn fma16(sum: __m512, x: __m512) -> __m512 {
        _mm512_fmadd_ps(x, x, sum)
    }
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    fn dot_bf16(sum: __m512, x: __m512i) -> __m512 {
        let x = super::super::dp::pairs_of(x);
        _mm512_dpbf16_ps(sum, x, x)
    }
    #[target_feature(enable = "avx512f,avx512vnni")]
    #[inline]
    fn dot_int8(sum: __m512i, x: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(sum, x, x)
    }

    chains!(f32x8, "avx2,fma", _mm256_setzero_ps, _mm256_set1_ps(0.5), fma8, 16);
    chains!(f32x16, "avx512f", _mm512_setzero_ps, _mm512_set1_ps(0.5), fma16, 32);
    chains!(bf16, "avx512f,avx512bf16", _mm512_setzero_ps, _mm512_set1_epi32(0x3f80_3f80), dot_bf16, 64);
    chains!(int8, "avx512f,avx512vnni", _mm512_setzero_si512, _mm512_set1_epi32(0x0101_0101), dot_int8, 128);
}
