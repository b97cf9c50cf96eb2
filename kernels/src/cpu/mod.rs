//! CPU kernels over plain slices: f32 activations, bf16/f16/f32 weights, bf16/f32 KV.
//!
//! Work on rows (norms, activations) is written once in portable Rust and compiled for each kind of CPU by [`dispatch!`];
//! products are made of [`tiles`], one kernel for each [`Isa`]. Both choose at run time.

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod arena;
pub mod attention;
mod blocked;
mod context;
mod decode;
#[cfg(target_arch = "x86_64")]
mod dp;
mod exact;
mod exp;
mod finish;
mod int8;
pub mod isa;
pub mod linear;
pub mod matmul;
pub mod packed;
pub mod pointwise;
pub mod priority;
pub mod qkv;
pub mod roof;
#[cfg(target_arch = "x86_64")]
mod simd;
mod soften;
pub mod team;
mod tiles;
mod widen;

pub use arena::Arena;
pub use attention::{Attention, Output};
pub use isa::Isa;
pub use matmul::{Input, matmul};
pub use packed::{Packed, Precision};
pub use soften::largest;

/// Compiles `$body` as `fn $name` for three widths of registers and picks the widest that the CPU has.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$g:ident: $bound:path>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[inline]
        $vis fn $name $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn portable $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    portable($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn widest $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    portable($($arg),*)
                }
                match $crate::cpu::Isa::detect() {
                    $crate::cpu::Isa::Portable => {}
                    // SAFETY: the CPU has the features that `wide` was compiled for.
                    $crate::cpu::Isa::Avx2 => return unsafe { wide($($arg),*) },
                    // SAFETY: the CPU has the features that `widest` was compiled for.
                    _ => return unsafe { widest($($arg),*) },
                }
            }
            portable($($arg),*)
        }
    };
}
pub(crate) use dispatch;

/// A type stored in weights or in the KV cache and computed with as f32.
pub trait Element: Copy + Send + Sync + 'static {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Element for half::bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        // Round to nearest, ties to even; NaN stays NaN (the carry could turn it into infinity).
        let bits = value.to_bits();
        if value.is_nan() {
            return half::bf16::from_bits((bits >> 16) as u16 | 0x40);
        }
        half::bf16::from_bits(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }
}

impl Element for half::f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        half::f16::from_f32(value)
    }
}

dispatch! {
    /// Dot product in eight f32 lanes: the order of additions is fixed, whatever the CPU.
    pub fn dot<E: Element>(a: &[f32], b: &[E]) -> f32 {
        let mut lanes = [0f32; 32];
        let (a_chunks, b_chunks) = (a.chunks_exact(32), b.chunks_exact(32));
        let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(x, y)| x * y.widen()).sum();
        for (x, y) in a_chunks.zip(b_chunks) {
            for i in 0..32 {
                lanes[i] += x[i] * y[i].widen();
            }
        }
        let mut width = 16;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0] + tail
    }
}

dispatch! {
    /// `out[i] = widen(row[i])`.
    pub fn widen_into<E: Element>(row: &[E], out: &mut [f32]) -> () {
        for (o, r) in out.iter_mut().zip(row) {
            *o = r.widen();
        }
    }
}

dispatch! {
    /// `acc[i] = acc[i] * keep + weight * row[i]`.
    pub fn scale_add(acc: &mut [f32], keep: f32, weight: f32, row: &[f32]) -> () {
        for (a, r) in acc.iter_mut().zip(row) {
            *a = *a * keep + weight * r;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_agrees_with_f64_for_every_length() {
        for len in 0..131usize {
            let a: Vec<f32> = (0..len).map(|i| ((i * 37 % 19) as f32 - 9.0) / 7.0).collect();
            let b: Vec<half::bf16> =
                (0..len).map(|i| half::bf16::from_f32((i * 11 % 23) as f32 - 11.0)).collect();
            let exact: f64 = a.iter().zip(&b).map(|(x, y)| *x as f64 * y.to_f64()).sum();
            assert!((dot(&a, &b) as f64 - exact).abs() < 1e-3, "length {len}");
        }
    }

    #[test]
    fn narrowing_to_bf16_agrees_with_half() {
        for bits in (0..=u32::MAX).step_by(65_521) {
            let value = f32::from_bits(bits);
            let (ours, theirs) = (half::bf16::narrow(value), half::bf16::from_f32(value));
            assert!(ours == theirs || (value.is_nan() && ours.is_nan()), "{bits:#x}: {ours:?} {theirs:?}");
        }
    }
}
