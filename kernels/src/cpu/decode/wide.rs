//! Few rows in f32, on any CPU, over KV of either type.

use std::marker::PhantomData;

use super::super::soften::{largest, soften};
use super::super::{Element, Isa, dot};
use super::{Kernel, SPLIT, Step};

/// Few enough keys that what is read head by head still looks like a stream to the CPU, which then reads ahead by itself.
const STEP: usize = 4;

/// f32 queries, weights and sums; `E` is the KV's type, `O` the output's.
pub struct Wide<E, O> {
    isa: Isa,
    types: PhantomData<(E, O)>,
}

impl<E, O> Wide<E, O> {
    /// Computes with `isa`, or what it has of f32.
    pub fn new(isa: Isa) -> Self {
        Self { isa, types: PhantomData }
    }
}

impl<E: Registers, O: Element> Kernel<STEP> for Wide<E, O> {
    type Query = f32;
    type Kv = E;
    type Weight = f32;
    type Out = O;
    const NONE: f32 = 0.0;

    unsafe fn score(&self, queries: &[&[f32]], step: &Step<'_, E, STEP>, scores: &mut [[f32; SPLIT]]) {
        // SAFETY: passed on from the caller.
        unsafe {
            match self.isa {
                Isa::Portable => {}
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => return x86::avx2::score(queries, step, scores),
                #[cfg(target_arch = "x86_64")]
                _ => return x86::avx512::score(queries, step, scores),
                #[cfg(not(target_arch = "x86_64"))]
                _ => {}
            }
        }
        for (query, scores) in queries.iter().zip(scores) {
            for (score, row) in scores[step.first..].iter_mut().zip(&step.rows) {
                *score = dot(query, row);
            }
        }
    }

    unsafe fn soften(
        &self,
        scores: &mut [f32; SPLIT],
        visible: usize,
        scale: f32,
        weights: &mut [f32; SPLIT],
    ) -> (f32, f32) {
        let (scores, (weights, none)) = (&scores[..visible], weights.split_at_mut(visible));
        none.fill(0.0);
        if scores.is_empty() {
            return (f32::NEG_INFINITY, 0.0);
        }
        let max = largest(scores) * scale;
        (max, soften(scores, scale, max, weights))
    }

    unsafe fn add_values(
        &self,
        step: &Step<'_, E, STEP>,
        keys: usize,
        weights: &[[f32; SPLIT]],
        to: &mut [f32],
    ) {
        // SAFETY: as in `score`.
        unsafe {
            match self.isa {
                Isa::Portable => {}
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => return x86::avx2::add_values(step, keys, weights, to),
                #[cfg(target_arch = "x86_64")]
                _ => return x86::avx512::add_values(step, keys, weights, to),
                #[cfg(not(target_arch = "x86_64"))]
                _ => {}
            }
        }
        let width = step.rows[0].len() + 2;
        for (weights, to) in weights.iter().zip(to.chunks_exact_mut(width)) {
            for (weight, row) in weights[step.first..].iter().zip(&step.rows[..keys]) {
                to[2..].iter_mut().zip(*row).for_each(|(to, value)| *to += weight * value.widen());
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::Registers;

/// What is widened as a whole register where there are such.
#[cfg(not(target_arch = "x86_64"))]
pub trait Registers: Element {}
#[cfg(not(target_arch = "x86_64"))]
impl<E: Element> Registers for E {}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::bf16;

    use super::super::super::Element;
    use super::super::{SPLIT, Step, fetch};
    use super::STEP;

    /// Elements that fill a register when they are widened.
    pub trait Registers: Element {
        /// # Safety
        /// The CPU has AVX2; eight elements may be read.
        unsafe fn eight(from: *const Self) -> __m256;
        /// # Safety
        /// The CPU has AVX-512; sixteen elements may be read.
        unsafe fn sixteen(from: *const Self) -> __m512;
    }

    impl Registers for f32 {
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn eight(from: *const f32) -> __m256 {
            // SAFETY: passed on from the caller.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        unsafe fn sixteen(from: *const f32) -> __m512 {
            // SAFETY: passed on from the caller.
            unsafe { _mm512_loadu_ps(from) }
        }
    }

    impl Registers for bf16 {
        #[inline]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn eight(from: *const bf16) -> __m256 {
            // SAFETY: passed on from the caller.
            let words = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(from.cast()) });
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        unsafe fn sixteen(from: *const bf16) -> __m512 {
            // SAFETY: passed on from the caller.
            let words = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(from.cast()) });
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    /// The sum of each register's eight floats.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn sums_of_eight([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
        let mut out = [0f32; 4];
        // SAFETY: four floats.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
        out
    }

    /// The sum of each register's sixteen floats.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn sums_of_sixteen([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        let (a, b) = (eight_of(a), eight_of(b));
        sums_of_eight([a, b, eight_of(c), eight_of(d)])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn eight_of(x: __m512) -> __m256 {
        _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x))
    }

    /// Both steps for registers of `$lanes` floats; rows are widened once for two lanes.
    macro_rules! steps {
        (
            $name:ident, $features:literal, $lanes:literal, $widen:ident, $float:ty,
            $zero:ident, $load:ident, $store:ident, $set:ident, $fmadd:ident, $sums:ident
        ) => {
            pub mod $name {
                use super::*;

                /// # Safety
                /// The CPU has the instruction set; queries and rows are equally long.
                #[target_feature(enable = $features)]
                pub unsafe fn score<E: Registers>(
                    queries: &[&[f32]],
                    step: &Step<'_, E, STEP>,
                    scores: &mut [[f32; SPLIT]],
                ) {
                    let Step { first, rows, ahead } = step;
                    ahead.iter().for_each(|row| fetch(*row, rows[0].len()));
                    for (queries, scores) in queries.chunks(2).zip(scores.chunks_mut(2)) {
                        let keys = *first..first + STEP;
                        // SAFETY: passed on from the caller.
                        unsafe {
                            match (queries, scores) {
                                ([a, b], [to_a, to_b]) => {
                                    let [a, b] = dots([a, b], rows);
                                    to_a[keys.clone()].copy_from_slice(&a);
                                    to_b[keys].copy_from_slice(&b);
                                }
                                ([a], [to, ..]) => to[keys].copy_from_slice(&dots([a], rows)[0]),
                                _ => {}
                            }
                        }
                    }
                }

                /// All rows at once: their sums wait for each other less.
                ///
                /// # Safety
                /// As [`score`].
                #[inline]
                #[target_feature(enable = $features)]
                unsafe fn dots<E: Registers, const L: usize>(
                    queries: [&[f32]; L],
                    rows: &[&[E]; STEP],
                ) -> [[f32; STEP]; L] {
                    let dim = rows[0].len();
                    let whole = dim / $lanes * $lanes;
                    let mut sums = [[$zero(); STEP]; L];
                    for i in (0..whole).step_by($lanes) {
                        // SAFETY: a register's elements from `i` on are inside the rows and the queries.
                        unsafe {
                            let queries = queries.map(|query| $load(query.as_ptr().add(i)));
                            for (key, row) in rows.iter().enumerate() {
                                let row = E::$widen(row.as_ptr().add(i));
                                for (sums, query) in sums.iter_mut().zip(queries) {
                                    sums[key] = $fmadd(query, row, sums[key]);
                                }
                            }
                        }
                    }
                    let mut out = [[0f32; STEP]; L];
                    for (out, sums) in out.iter_mut().zip(sums) {
                        *out = $sums(sums);
                    }
                    for i in whole..dim {
                        for (out, query) in out.iter_mut().zip(queries) {
                            out.iter_mut().zip(rows).for_each(|(out, row)| *out += row[i].widen() * query[i]);
                        }
                    }
                    out
                }

                /// # Safety
                /// As [`score`], for rows and outputs.
                #[target_feature(enable = $features)]
                pub unsafe fn add_values<E: Registers>(
                    step: &Step<'_, E, STEP>,
                    keys: usize,
                    weights: &[[f32; SPLIT]],
                    to: &mut [f32],
                ) {
                    let (first, rows, mut ahead) = (step.first, &step.rows[..keys], &step.ahead[..]);
                    let width = rows[0].len() + 2;
                    for (weights, to) in weights.chunks(2).zip(to.chunks_mut(2 * width)) {
                        // SAFETY: passed on from the caller.
                        unsafe {
                            match weights {
                                [a, b] => {
                                    let (to_a, to_b) = to.split_at_mut(width);
                                    let to = [&mut to_a[2..], &mut to_b[2..]];
                                    add(rows, ahead, [&a[first..], &b[first..]], to);
                                }
                                [a, ..] => add(rows, ahead, [&a[first..]], [&mut to[2..]]),
                                [] => {}
                            }
                        }
                        ahead = &[];
                    }
                }

                /// # Safety
                /// As [`add_values`].
                #[inline]
                #[target_feature(enable = $features)]
                unsafe fn add<E: Registers, const L: usize>(
                    rows: &[&[E]],
                    ahead: &[*const E],
                    weights: [&[f32]; L],
                    mut to: [&mut [f32]; L],
                ) {
                    let dim = rows[0].len();
                    let mut at = 0;
                    while at < dim {
                        // SAFETY: passed on from the caller; the parts end at `dim`.
                        unsafe {
                            at += match dim - at {
                                left if left >= 4 * $lanes => {
                                    part::<E, 4, L>(rows, ahead, weights, &mut to, at)
                                }
                                left if left >= $lanes => part::<E, 1, L>(rows, ahead, weights, &mut to, at),
                                _ => {
                                    for (to, weights) in to.iter_mut().zip(weights) {
                                        let values = rows.iter().map(|row| row[at].widen());
                                        to[at] +=
                                            values.zip(weights).map(|(x, weight)| x * weight).sum::<f32>();
                                    }
                                    1
                                }
                            };
                        }
                    }
                }

                /// Adds `V` registers of elements from `at` on; returns how many elements.
                ///
                /// # Safety
                /// As [`add_values`], and rows and outputs are that long.
                #[inline]
                #[target_feature(enable = $features)]
                unsafe fn part<E: Registers, const V: usize, const L: usize>(
                    rows: &[&[E]],
                    ahead: &[*const E],
                    weights: [&[f32]; L],
                    to: &mut [&mut [f32]; L],
                    at: usize,
                ) -> usize {
                    // SAFETY: passed on from the caller.
                    unsafe {
                        let mut sums: [[$float; V]; L] = std::array::from_fn(|lane| {
                            std::array::from_fn(|j| $load(to[lane].as_ptr().add(at + j * $lanes)))
                        });
                        for (key, row) in rows.iter().enumerate() {
                            if let Some(row) = ahead.get(key) {
                                fetch(row.wrapping_add(at), V * $lanes);
                            }
                            let weights: [$float; L] = std::array::from_fn(|lane| $set(weights[lane][key]));
                            for j in 0..V {
                                let values = E::$widen(row.as_ptr().add(at + j * $lanes));
                                for (sums, weight) in sums.iter_mut().zip(weights) {
                                    sums[j] = $fmadd(values, weight, sums[j]);
                                }
                            }
                        }
                        for (sums, to) in sums.iter().zip(to) {
                            sums.iter()
                                .enumerate()
                                .for_each(|(j, sum)| $store(to.as_mut_ptr().add(at + j * $lanes), *sum));
                        }
                    }
                    V * $lanes
                }
            }
        };
    }

    steps!(
        avx2,
        "avx2,fma",
        8,
        eight,
        __m256,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        sums_of_eight
    );
    steps!(
        avx512,
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
        16,
        sixteen,
        __m512,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        sums_of_sixteen
    );
}
