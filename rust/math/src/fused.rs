//! Computes `a * b + c` rounded once, with or without the instruction: the same bits.

/// A way to compute a fused multiply-add.
pub(crate) trait Fused {
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// `a * b + c` rounded once or twice: for what comes out alike.
    fn either(a: f32, b: f32, c: f32) -> f32;

    /// `a * a + c` of an fp32, whose square float64 has.
    fn square_plus(a: f64, c: f64) -> f64;
}

/// The processor's instruction; only inside code compiled for it, where `mul_add` is not a call.
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
