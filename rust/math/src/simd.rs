//! Chooses an instruction set, and runs kernels in the code that is compiled for this set.

use std::{fmt, sync::OnceLock};

use crate::{Error, Result, mode::DefaultMode};

/// The environment variable that forces an instruction set.
const VARIABLE: &str = "MEMASCEND_SIMD";

/// An instruction set that this processor has. Apart from [`Simd::PORTABLE`], only [`Simd::available`] makes values of
/// `Simd`, after it has detected the instruction set. So a value proves that the processor has the instruction set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Simd(Level);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Simd {
    /// The baseline that the compiler targets and that every supported processor has. If the baseline has no fused
    /// multiply-add, each `mul_add` is a slow call.
    pub const PORTABLE: Self = Self(Level::Portable);

    /// Returns every instruction set that this processor has and for which the kernels are compiled, fastest first;
    /// never empty.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512 {
                found.push(Self(Level::Avx512));
            }
            if avx2 {
                found.push(Self(Level::Avx2));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            found.push(Self(Level::Neon));
        }
        found.push(Self::PORTABLE);
        found
    }

    /// Returns the instruction set that `MEMASCEND_SIMD` names, or the fastest one if the variable is empty or not set.
    /// Reads the variable once per process.
    pub fn chosen() -> Result<Self> {
        static CHOSEN: OnceLock<Result<Simd>> = OnceLock::new();
        CHOSEN
            .get_or_init(|| Self::choose(std::env::var_os(VARIABLE).map(|v| v.to_string_lossy().into_owned())))
            .clone()
    }

    fn choose(asked: Option<String>) -> Result<Self> {
        let available = Self::available();
        match asked {
            Some(asked) if !asked.is_empty() => {
                available.iter().copied().find(|simd| simd.name() == asked).ok_or_else(|| Error::Simd {
                    asked,
                    available: available.iter().map(|simd| simd.name()).collect::<Vec<_>>().join(", "),
                })
            }
            _ => Ok(available[0]),
        }
    }

    /// The name of the instruction set, as `MEMASCEND_SIMD` expects it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
            Level::Portable => "portable",
        }
    }

    /// Runs a kernel on this instruction set, under IEEE's default floating-point mode.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        let _mode = DefaultMode::enter();
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `available` makes this level, after it has found every feature that `avx512` enables.
            Level::Avx512 => unsafe { avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `available` makes this level, after it has found every feature that `avx2` enables.
            Level::Avx2 => unsafe { avx2(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: only `available` makes this level, after it has found every feature that `neon` enables.
            Level::Neon => unsafe { neon(kernel) },
            Level::Portable => kernel.run(),
        }
    }
}

impl fmt::Debug for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A loop that is compiled for each instruction set. `run` and every function that it calls must be
/// `#[inline(always)]`: a call that is not inlined runs code of the baseline. A closure must be inlined too. But
/// `array::map` does not inline its closure in crates that are built without link-time optimisation, so the inner loops
/// of kernels are plain loops.
pub(crate) trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes `a * b + c` for each `[a, b, c]`.
    struct FusedMultiplyAdd<'a>(&'a [[f32; 3]]);

    impl Kernel for FusedMultiplyAdd<'_> {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run(self) -> Vec<u32> {
            self.0.iter().map(|[a, b, c]| a.mul_add(*b, *c).to_bits()).collect()
        }
    }

    proptest! {
        #[test]
        fn fused_multiply_add_has_the_same_bits_on_every_instruction_set(
            bits in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), -3_i32..3), 64),
        ) {
            let of = |(a, b, c, near): (u32, u32, u32, i32)| {
                let (a, b) = (f32::from_bits(a), f32::from_bits(b));
                // In half of the cases the sum cancels almost entirely, so that a second rounding would show.
                let close = f32::from_bits((-(a * b)).to_bits().wrapping_add_signed(near));
                let c = if c & 1 == 0 { f32::from_bits(c) } else { close };
                // The bits of a NaN may differ.
                if a.mul_add(b, c).is_nan() { [1.0; 3] } else { [a, b, c] }
            };
            let inputs: Vec<_> = bits.into_iter().map(of).collect();
            let wanted = Simd::PORTABLE.run(FusedMultiplyAdd(&inputs));
            for simd in Simd::available() {
                prop_assert_eq!(simd.run(FusedMultiplyAdd(&inputs)), wanted.clone(), "{:?}", simd);
            }
        }
    }

    #[test]
    fn fused_multiply_add_rounds_only_once() {
        // The product is 1 + 2^-24, half-way between two fp32 numbers. The addend decides the rounding, and is too
        // small to change a float64 sum.
        let (a, b) = (97.0 / 64.0, 172_961.0 / 262_144.0);
        let wanted = [1.0 + f32::EPSILON, 1.0, 1.0].map(f32::to_bits);
        for simd in Simd::available() {
            let found = simd.run(FusedMultiplyAdd(&[[a, b, 1e-30], [a, b, 0.0], [a, b, -1e-30]]));
            assert_eq!(found, wanted, "{simd:?}");
        }
    }

    #[test]
    fn choose_returns_the_named_instruction_set_or_the_first_available() {
        for simd in Simd::available() {
            assert_eq!(Simd::choose(Some(simd.name().into())), Ok(simd));
        }
        assert_eq!(Simd::choose(None), Ok(Simd::available()[0]));
        assert_eq!(Simd::choose(Some(String::new())), Ok(Simd::available()[0]));
    }

    #[test]
    fn choose_error_names_the_unknown_and_the_available_instruction_sets() {
        let message = Simd::choose(Some("sse9".into())).map_or_else(|error| error.to_string(), |_| String::new());
        assert!(message.contains("\"sse9\"") && message.contains("portable"), "{message}");
    }
}
