//! Computes what processors have instructions for with or without those: the same bits.

#[cfg(target_arch = "x86_64")]
use std::mem;

use crate::{Element, F16};

/// Elements of fp16 that one instruction converts.
pub(crate) const HALVES: usize = 8;

/// A way to compute a fused multiply-add, and to convert fp16.
pub(crate) trait Fused {
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// `a * b + c` rounded once or twice: for what comes out alike.
    fn either(a: f32, b: f32, c: f32) -> f32;

    /// `a * a + c` of an fp32, whose square float64 has.
    fn square_plus(a: f64, c: f64) -> f64;

    /// [`Element::to_f32`] of each.
    #[inline(always)]
    fn widen(values: &[F16; HALVES]) -> [f32; HALVES] {
        values.map(Element::to_f32)
    }

    /// [`Element::from_f32`] of each.
    #[inline(always)]
    fn narrow(values: &[f32; HALVES]) -> [F16; HALVES] {
        values.map(Element::from_f32)
    }
}

/// The processor's instructions; only inside code compiled for them, where `mul_add` is not a call.
pub(crate) struct Hardware;

impl Fused for Hardware {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn either(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn square_plus(a: f64, c: f64) -> f64 {
        a.mul_add(a, c)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn widen(values: &[F16; HALVES]) -> [f32; HALVES] {
        use std::arch::x86_64::{__m128i, __m256, _mm256_cvtph_ps};
        // SAFETY: any bytes are a `__m128i`.
        let values = unsafe { mem::transmute::<[F16; HALVES], __m128i>(*values) };
        // SAFETY: F16C is part of what this code is compiled for.
        let wide = unsafe { _mm256_cvtph_ps(values) };
        // SAFETY: any bytes are numbers.
        unsafe { mem::transmute::<__m256, [f32; HALVES]>(wide) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn narrow(values: &[f32; HALVES]) -> [F16; HALVES] {
        use std::arch::x86_64::{__m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtps_ph};
        // SAFETY: any bytes are a `__m256`.
        let values = unsafe { mem::transmute::<[f32; HALVES], __m256>(*values) };
        // SAFETY: as above.
        let narrow = unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values) };
        // SAFETY: any bytes are numbers.
        unsafe { mem::transmute::<__m128i, [F16; HALVES]>(narrow) }
    }
}

/// Through float64, in operations that every processor has and that vectorise.
pub(crate) struct Portable;

impl Fused for Portable {
    /// The product of two fp32 is exact in float64. The sum is rounded to odd there: where it was inexact and its last
    /// bit is even, the neighbour on the side of the error is taken. With 29 bits to spare, the second rounding, to
    /// fp32, then gives what a single one would have given.
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        let (product, addend) = (f64::from(a) * f64::from(b), f64::from(c));
        let sum = product + addend;
        // Knuth's exact error of an addition; NaN where the sum is not finite, and then no comparison holds.
        let back = sum - product;
        let error = (product - (sum - back)) + (addend - back);
        let bits = sum.to_bits();
        // Away from zero is one up in the bits, whatever the sign.
        let outward = (error > 0.0) == (sum > 0.0);
        let odd = if outward { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
        let inexact = error.abs() > 0.0;
        let chosen = if inexact && bits & 1 == 0 { odd } else { bits };
        #[expect(clippy::cast_possible_truncation, reason = "rounding to fp32 is the purpose")]
        {
            f64::from_bits(chosen) as f32
        }
    }

    #[inline(always)]
    fn either(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    #[inline(always)]
    fn square_plus(a: f64, c: f64) -> f64 {
        a * a + c
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Simd, simd::Kernel};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]
        #[test]
        fn both_ways_agree(a in any::<u32>(), b in any::<u32>(), c in any::<u32>(), near in -3_i32..3) {
            let (a, b) = (f32::from_bits(a), f32::from_bits(b));
            // Half of the cases cancel almost entirely, where a second rounding would show.
            let c = if c & 1 == 0 { f32::from_bits(c) } else {
                f32::from_bits((-(a * b)).to_bits().wrapping_add_signed(near))
            };
            let (expected, got) = (a.mul_add(b, c), Portable::fma(a, b, c));
            prop_assert!(expected.to_bits() == got.to_bits() || (expected.is_nan() && got.is_nan()),
                "{a:e} * {b:e} + {c:e}: {expected:e} against {got:e}");
        }
    }

    /// Converts by each instruction set.
    struct Both<'a>(&'a [F16; HALVES], &'a [f32; HALVES]);

    impl Kernel for Both<'_> {
        type Output = ([u32; HALVES], [u16; HALVES]);

        #[inline(always)]
        fn run<F: Fused>(self) -> Self::Output {
            (F::widen(self.0).map(f32::to_bits), F::narrow(self.1).map(|half| half.0))
        }
    }

    /// All of fp16; of fp32 all upper halves, each with ends that round down, tie, round up, and say signalling NaN.
    #[test]
    fn conversions_give_the_same_bits_everywhere() {
        const LOWER: [u32; HALVES] = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0xF000, 0xFFFF];
        for upper in 0..=u16::MAX {
            let halves = std::array::from_fn(|i| F16(upper.wrapping_add(u16::try_from(i).unwrap_or(0))));
            let floats = LOWER.map(|lower| f32::from_bits(u32::from(upper) << 16 | lower));
            let wanted = (halves.map(|half| half.to_f32().to_bits()), floats.map(|value| F16::from_f32(value).0));
            for simd in Simd::available() {
                assert_eq!(simd.run(Both(&halves, &floats)), wanted, "{simd:?} {upper:#x}");
            }
        }
    }

    #[test]
    fn a_double_rounding_is_avoided() {
        // 1 + 2^-24 is half-way between two fp32; the addend decides, far below what float64 holds beside it.
        let (a, b) = (1.0 + f32::EPSILON, 1.0 - f32::EPSILON);
        for c in [1e-30_f32, -1e-30, f32::MIN_POSITIVE, 1e-45, -1e-45] {
            assert_eq!(a.mul_add(b, c).to_bits(), Portable::fma(a, b, c).to_bits());
        }
        let half = f32::from_bits(0x3380_0000);
        for (x, y) in [(1.0_f32, 1e-40_f32), (1.0, -1e-40), (1.0 + f32::EPSILON, 1e-40)] {
            assert_eq!(half.mul_add(x, 1.0 + y).to_bits(), Portable::fma(half, x, 1.0 + y).to_bits());
        }
    }
}
