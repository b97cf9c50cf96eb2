//! Which instructions the kernels may use.

use std::sync::OnceLock;

/// Instruction sets with a kernel of their own, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler's baseline has.
    Portable,
    /// AVX2 and FMA: bf16 is widened to f32 in registers.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: the same, twice as wide.
    Avx512,
    /// AVX-512 with `vdpbf16ps`: products of bf16 pairs summed in f32, without widening.
    Avx512Bf16,
}

impl Isa {
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// The best that this CPU has.
    pub fn detect() -> Isa {
        static DETECTED: OnceLock<Isa> = OnceLock::new();
        *DETECTED
            .get_or_init(|| Isa::ALL.into_iter().rfind(|isa| isa.is_available()).unwrap_or(Isa::Portable))
    }

    /// True if this CPU (and its operating system) can run it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = || has!("avx2") && has!("fma");
        let avx512 = || avx2() && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
        match self {
            Isa::Portable => true,
            Isa::Avx2 => avx2(),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => avx512() && has!("avx512bf16"),
        }
    }

    /// True if this CPU (and its operating system) can run it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Isa::Portable
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
        }
    }
}
