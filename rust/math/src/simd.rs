//! Chooses the instruction set, and enters the code compiled for it.

use std::{fmt, sync::OnceLock};

use crate::{Error, Result, fused::Fused, fused::Hardware, fused::Portable, mode::DefaultMode};

/// The environment variable that forces an instruction set.
const VARIABLE: &str = "MEMASCEND_SIMD";

/// An instruction set that this processor has. A value of it is the proof: only detection makes one.
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
    /// What every processor that the crate was compiled for has.
    pub const PORTABLE: Self = Self(Level::Portable);

    /// Everything that this processor has, the fastest first; never empty.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
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

    /// What `MEMASCEND_SIMD` names, or else the fastest that there is. Read once in a process.
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

    /// The name that `MEMASCEND_SIMD` takes.
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
            // SAFETY: the level exists only where detection found every feature that the function enables.
            Level::Avx512 => unsafe { avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Level::Avx2 => unsafe { avx2(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Level::Neon => unsafe { neon(kernel) },
            Level::Portable => kernel.run::<Portable>(),
        }
    }
}

impl fmt::Debug for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A loop that can be compiled for any instruction set. `run` must be `#[inline(always)]`, and so must all it calls:
/// what is not inlined is compiled for the baseline.
pub(crate) trait Kernel {
    type Output;
    fn run<F: Fused>(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Hardware>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Hardware>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Hardware>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_forces_what_there_is() {
        for simd in Simd::available() {
            assert_eq!(Simd::choose(Some(simd.name().into())), Ok(simd));
        }
        assert_eq!(Simd::choose(None), Ok(Simd::available()[0]));
        assert_eq!(Simd::choose(Some(String::new())), Ok(Simd::available()[0]));
    }

    #[test]
    fn an_unknown_name_is_refused_with_those_that_work() {
        let message = Simd::choose(Some("sse9".into())).map_or_else(|error| error.to_string(), |_| String::new());
        assert!(message.contains("\"sse9\"") && message.contains("portable"), "{message}");
    }
}
