//! Rounds fp32 numbers to bfloat16 or float16 stochastically: the mean of many results is close to the number itself.
//!
//! `drawn` is 16 uniformly random bits. A number becomes infinite only if rounding to nearest makes it infinite, so the
//! mean deviates beyond the largest finite number. An infinity stays an infinity, and a NaN stays a NaN.

use crate::{Bf16, Element, F16};

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;

/// An element type with stochastic rounding.
pub(crate) trait Stochastic: Element {
    fn rounded(value: f32, drawn: u16) -> Self;
}

impl Stochastic for Bf16 {
    /// Drops the lower half of the bits of `value`. This half, in units of 2^-16, is the exact probability of rounding
    /// away from zero.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the upper half was shifted down")]
    fn rounded(value: f32, drawn: u16) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & !SIGN;
        let rounded = magnitude.wrapping_add(u32::from(drawn)) >> 16;
        // The largest finite number is the limit, unless rounding to nearest gives infinity. If rounding a finite
        // number to nearest gives infinity, `drawn` decides between the largest finite number and infinity.
        let largest = if magnitude < 0x7F7F_8000 { 0x7F7F } else { 0x7F80 };
        let rounded = if rounded < largest { rounded } else { largest };
        // Sets the quiet bit, so that a NaN stays a NaN. Without this bit, a NaN would become an infinity if all set
        // bits of its fraction were in the lower half, which is dropped.
        let nan = (magnitude >> 16) | 0x40;
        Self((bits >> 16 & 0x8000 | if magnitude > INFINITY { nan } else { rounded }) as u16)
    }
}

impl Stochastic for F16 {
    /// The dropped bits, at most the highest 16, are the probability of rounding away from zero. A normal number drops
    /// only 13 bits.
    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "numbers below 2^26 that are not negative"
    )]
    fn rounded(value: f32, drawn: u16) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & !SIGN;
        // `rounded` drops 13 bits of a normal number, so 13 of the 16 drawn bits suffice.
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(u32::from(drawn >> 3)) >> 13;
        // The next lines scale `small` to units of 2^-40, of which 2^16 make one unit of denormals. Numbers that are
        // not denormal count as 0, to stay in range.
        let small = f32::from_bits(if magnitude < 0x3880_0000 { magnitude } else { 0 });
        let denormal = ((small * f32::from_bits((127 + 40) << 23)) as i32 as u32 + u32::from(drawn)) >> 16;
        let finite = if magnitude < 0x3880_0000 { denormal } else { normal };
        let largest = if magnitude < 0x477F_F000 { 0x7BFF } else { 0x7C00 };
        let finite = if finite < largest && magnitude < INFINITY { finite } else { largest };
        Self((bits >> 16 & 0x8000 | if magnitude > INFINITY { 0x7E00 } else { finite }) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that each result is near the number, and that the mean over all drawn bits is the number. `exact` is the
    /// largest permitted error of the mean, relative to the number or, if the number is smaller, to 6e-5.
    fn expected_is_the_number<T: Stochastic>(values: impl Iterator<Item = f32>, exact: f64) {
        for value in values {
            let mut sum = 0.0;
            let near = f64::from(T::from_f32(value).to_f32());
            for drawn in 0..=u16::MAX {
                let rounded = f64::from(T::rounded(value, drawn).to_f32());
                assert!(
                    (rounded - f64::from(value)).abs()
                        <= 2.0 * (near - f64::from(value)).abs().max(rounded.abs() * 0.008).max(1.2e-7),
                    "{value:e}"
                );
                sum += rounded;
            }
            let mean = sum / 65_536.0;
            assert!((mean - f64::from(value)).abs() <= exact * f64::from(value).abs().max(6e-5), "{value:e}: {mean:e}");
        }
    }

    fn some() -> impl Iterator<Item = f32> {
        [1.0, 1.001, -3.123_456_7, 65_503.0, 7.0e-5, 6.0e-5, -3.3e-6, 5.9e-8, 2.9e-8, 0.0].into_iter()
    }

    #[test]
    fn mean_of_stochastic_rounding_is_the_number() {
        expected_is_the_number::<Bf16>(some().chain([3.0e38, 1.0e-39, 1.0e-44]), 1e-12);
        expected_is_the_number::<F16>(some(), 1e-7);
    }

    #[test]
    fn stochastic_rounding_keeps_representable_numbers() {
        for bits in 0..=u16::MAX {
            for drawn in [0, 1, 0x7FFF, 0xFFFF] {
                let (wide, half) = (Bf16(bits).to_f32(), F16(bits).to_f32());
                assert!(Bf16::rounded(wide, drawn).0 == bits || wide.is_nan(), "{bits:#x}");
                assert!(F16::rounded(half, drawn).0 == bits || half.is_nan(), "{bits:#x}");
                assert_eq!(Bf16::rounded(wide, drawn).to_f32().is_nan(), wide.is_nan());
                assert_eq!(F16::rounded(half, drawn).to_f32().is_nan(), half.is_nan());
            }
        }
    }

    #[test]
    fn stochastic_rounding_overflows_only_where_nearest_rounding_does() {
        let (below, at) = (f32::from_bits(0x7F7F_7FFF), f32::from_bits(0x7F7F_8000));
        assert!(
            !Bf16::rounded(below, 0xFFFF).to_f32().is_infinite() && Bf16::rounded(at, 0xFFFF).to_f32().is_infinite()
        );
        assert!(
            !F16::rounded(65_519.0, 0xFFFF).to_f32().is_infinite()
                && F16::rounded(-65_520.0, 0xFFFF).to_f32().is_infinite()
        );
        assert!(F16::rounded(1.0e9, 0).to_f32().is_infinite());
    }
}
