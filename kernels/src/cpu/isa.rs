//! Which instructions the kernels may use.

use std::sync::OnceLock;

use super::packed::Precision;

/// Instruction sets with a kernel of their own, each with more instructions than the one before. Not each is faster:
/// [`Isa::detect`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler's baseline has.
    Portable,
    /// AVX2 and FMA: bf16 is widened to f32 in registers.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: the same, twice as wide.
    Avx512,
    /// AVX-512 with VNNI and `vdpbf16ps`: products of bf16 pairs summed in f32, without widening.
    Avx512Bf16,
    /// The same with the tiles of AMX for products: sixteen times the arithmetic of an instruction.
    AmxBf16,
}

/// What this process computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    /// With bf16 weights, and with KV.
    bf16: Isa,
    /// With int8 weights.
    int8: Isa,
}

static CHOSEN: OnceLock<Choice> = OnceLock::new();

impl Isa {
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::AmxBf16];

    /// The fastest that this CPU has, unless [`Self::choose`] named another.
    pub fn detect() -> Isa {
        Self::choice().bf16
    }

    /// The fastest for products with weights of this precision, unless [`Self::choose`] named another.
    pub fn detect_for(precision: Precision) -> Isa {
        match precision {
            Precision::Bf16 => Self::choice().bf16,
            Precision::Int8 => Self::choice().int8,
        }
    }

    fn choice() -> Choice {
        *CHOSEN.get_or_init(|| {
            let last = Self::available().last().unwrap_or(Isa::Portable);
            Choice { bf16: if last.has_slow_pairs() { Isa::Avx512 } else { last }, int8: last }
        })
    }

    /// True if the CPU multiplies pairs of bf16 slower than it multiplies as many f32, as Intel's do without AMX: at half the speed.
    /// AMD's have twice that of f32. Takes half a millisecond.
    fn has_slow_pairs(self) -> bool {
        self == Isa::Avx512Bf16 && !super::roof::pairs_pay()
    }

    /// Fixes what [`Self::detect`] says in this process. Returns false if it was fixed, or asked for, before; a
    /// different choice is then without effect.
    ///
    /// Panics if the CPU lacks it, which is a bug of the caller.
    pub fn choose(isa: Isa) -> bool {
        assert!(isa.is_available(), "no {} here. This is a bug.", isa.as_str());
        let choice = Choice { bf16: isa, int8: isa };
        *CHOSEN.get_or_init(|| choice) == choice
    }

    /// Those that this CPU has.
    pub fn available() -> impl Iterator<Item = Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// True if this CPU (and its operating system) can run it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = || has!("avx2") && has!("fma");
        let avx512 = || avx2() && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
        let bf16 = || avx512() && has!("avx512bf16") && has!("avx512vnni");
        match self {
            Isa::Portable => true,
            Isa::Avx2 => avx2(),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => bf16(),
            Isa::AmxBf16 => bf16() && super::amx::is_available(),
        }
    }

    /// True if this CPU (and its operating system) can run it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Isa::Portable
    }

    /// True if products take bf16 activations; the others take f32.
    pub fn computes_bf16(self) -> bool {
        self >= Isa::Avx512Bf16
    }

    /// Words (of 32 bits) that a pair of activations takes.
    pub(crate) fn pair_words(self) -> usize {
        if self.computes_bf16() { 1 } else { 2 }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::AmxBf16 => "amx-bf16",
        }
    }
}

impl std::str::FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Isa::ALL.map(Isa::as_str).join(", ");
        let isa = Isa::ALL.into_iter().find(|isa| isa.as_str() == name);
        isa.ok_or_else(|| format!("{name:?} is no instruction set; there are {known}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two workers of one machine must compute alike, so a busy neighbour must not change what is chosen.
    #[test]
    fn what_is_measured_is_the_same_each_time() {
        if !Isa::Avx512Bf16.is_available() {
            return;
        }
        let first = Isa::Avx512Bf16.has_slow_pairs();
        assert!((0..50).all(|_| Isa::Avx512Bf16.has_slow_pairs() == first));
        assert!(!Isa::AmxBf16.has_slow_pairs() && !Isa::Avx512.has_slow_pairs());
    }
}
