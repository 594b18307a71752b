//! Defines the element types (fp32, bfloat16, fp16), and converts between them in operations that vectorise.

/// A bfloat16, as its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// An IEEE binary16, as its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct F16(pub u16);

/// `f32`, [`Bf16`] or [`F16`].
pub trait Element: Copy + Default + Send + Sync + private::Sealed + 'static {
    /// The number of bits in a significand, including the implicit leading one.
    const PRECISION: i32;

    /// Converts to fp32 exactly; a NaN becomes a NaN.
    fn to_f32(self) -> f32;

    /// Returns the exact absolute value; a NaN becomes a NaN. Cheaper than `to_f32().abs()`.
    fn magnitude(self) -> f32;

    /// Rounds to nearest, ties to even. Numbers that are too large become infinity, denormals are kept, and a NaN stays
    /// a NaN.
    fn from_f32(value: f32) -> Self;
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for super::Bf16 {}
    impl Sealed for super::F16 {}
}

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;
/// The bit that marks a NaN as quiet.
const QUIET: u32 = 0x0040_0000;

impl Element for f32 {
    const PRECISION: i32 = 24;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn magnitude(self) -> f32 {
        self.abs()
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for Bf16 {
    const PRECISION: i32 = 8;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn magnitude(self) -> f32 {
        f32::from_bits(u32::from(self.0 & 0x7FFF) << 16)
    }

    // Uses integer operations, because the processor's own conversion (AVX512_BF16) flushes denormals.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the upper half was shifted down")]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        // Sets the quiet bit, so that a NaN stays a NaN. Without this bit, a NaN would become an infinity if all set
        // bits of its fraction were in the lower half, which is dropped.
        let nan = (bits >> 16) | 0x40;
        Self(if bits & !SIGN > INFINITY { nan } else { rounded } as u16)
    }
}

/// Bits of 2^-14, the smallest normal fp16.
const F16_NORMAL: u32 = (127 - 14) << 23;
/// Bits of 65,520, half-way between the largest fp16 and the next power of two: from here on, rounding gives infinity.
const F16_OVERFLOW: u32 = 0x477F_F000;

impl Element for F16 {
    const PRECISION: i32 = 11;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0 & 0x8000) << 16 | self.magnitude().to_bits())
    }

    #[inline(always)]
    fn magnitude(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7FFF) << 13;
        // The exponent of `magnitude` is too small by 112. `normal` adds 112 to the exponent. `denormal` adds 113 to
        // the exponent and subtracts 2^-14, the implicit leading bit. `denormal` is right for denormals, and at least
        // `normal` for normal numbers. So the smaller of `normal` and `denormal` is right. A multiplication of a
        // denormal fp32 would be one operation, but takes Intel's processors more than a hundred cycles.
        let normal = magnitude + (112 << 23);
        let denormal = (f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(F16_NORMAL)).to_bits();
        let scaled = normal.min(denormal);
        // Infinity and NaN keep their fraction and get the largest exponent; a NaN also gets its quiet bit.
        let nan = if self.0 & 0x7FFF > 0x7C00 { QUIET } else { 0 };
        let special = if self.0 & 0x7FFF >= 0x7C00 { INFINITY | nan } else { 0 };
        f32::from_bits(scaled | special)
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "every case fits 16 bits")]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & !SIGN;
        let normal = magnitude.wrapping_add(0xFFF + ((magnitude >> 13) & 1)).wrapping_sub(112 << 23) >> 13;
        // Adding 1/2 rounds to the unit of fp16 denormals, so the last bits of the sum are the denormal.
        let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        // A NaN gets its quiet bit and keeps the upper part of its payload.
        let special = if magnitude > INFINITY { 0x7E00 | (magnitude >> 13 & 0x3FF) } else { 0x7C00 };
        let finite = if magnitude < F16_NORMAL { denormal } else { normal };
        Self(((bits >> 16) & 0x8000 | if magnitude >= F16_OVERFLOW { special } else { finite }) as u16)
    }
}

/// Read-only elements of a type that is known at run time.
#[derive(Debug, Clone, Copy)]
pub enum Floats<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [Bf16]),
    /// Half precision.
    F16(&'a [F16]),
}

/// Mutable elements of a type that is known at run time.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// bfloat16.
    Bf16(&'a mut [Bf16]),
    /// Half precision.
    F16(&'a mut [F16]),
}

/// Runs the same code on elements of any type: `for_type!(Floats, given, elements => ...)`.
macro_rules! for_type {
    ($floats:ident, $given:expr, $elements:ident => $code:expr) => {
        match $given {
            $floats::F32($elements) => $code,
            $floats::Bf16($elements) => $code,
            $floats::F16($elements) => $code,
        }
    };
}
pub(crate) use for_type;

impl FloatsMut<'_> {
    pub(crate) fn len(&self) -> usize {
        for_type!(Self, self, values => values.len())
    }

    pub(crate) fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => {
                let (before, after) = values.split_at_mut(middle);
                (Self::F32(before), Self::F32(after))
            }
            Self::Bf16(values) => {
                let (before, after) = values.split_at_mut(middle);
                (Self::Bf16(before), Self::Bf16(after))
            }
            Self::F16(values) => {
                let (before, after) = values.split_at_mut(middle);
                (Self::F16(before), Self::F16(after))
            }
        }
    }
}

impl Floats<'_> {
    pub(crate) fn len(&self) -> usize {
        for_type!(Self, self, values => values.len())
    }

    pub(crate) fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => (Self::F32(&values[..middle]), Self::F32(&values[middle..])),
            Self::Bf16(values) => (Self::Bf16(&values[..middle]), Self::Bf16(&values[middle..])),
            Self::F16(values) => (Self::F16(&values[..middle]), Self::F16(&values[middle..])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds the nearest fp16 or bf16 by binary search, independently of the bit arithmetic above.
    fn nearest<E: Element>(value: f32, from_bits: fn(u16) -> E, infinity: u16) -> u16 {
        let target = f64::from(value.abs());
        let at = |bits: u16| {
            if bits == infinity {
                // The number that would follow the largest finite number: numbers that round to it overflow.
                2.0 * f64::from(from_bits(infinity - 1).to_f32()) - f64::from(from_bits(infinity - 2).to_f32())
            } else {
                f64::from(from_bits(bits).to_f32())
            }
        };
        let (mut low, mut high) = (0, infinity);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if at(middle) <= target { low = middle } else { high = middle }
        }
        let (below, above) = (target - at(low), at(high) - target);
        let magnitude = if below < above || (below <= above && low % 2 == 0) { low } else { high };
        magnitude | if value.is_sign_negative() { 0x8000 } else { 0 }
    }

    fn samples() -> impl Iterator<Item = f32> {
        // The stride is odd, so the lower 16 bits take every value in `spread`. `ties` has the half-way points of
        // bfloat16 and of normal fp16 numbers, and the two neighbours of each point.
        let spread = (0..=u32::MAX).step_by(65_521).map(f32::from_bits);
        let ties = (0..=u16::MAX).flat_map(|bits| {
            let half = f32::from_bits((u32::from(bits) << 16) | 0x8000);
            let middle = f32::from_bits(F16(bits).to_f32().to_bits().wrapping_add(0x1000));
            [half, middle]
                .into_iter()
                .flat_map(|x| (-1..=1).map(move |d| f32::from_bits(x.to_bits().wrapping_add_signed(d))))
        });
        spread.chain(ties).filter(|x| !x.is_nan())
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        for x in samples() {
            let expected = if x.is_infinite() { (x.to_bits() >> 16) as u16 } else { nearest(x, Bf16, 0x7F80) };
            assert_eq!(Bf16::from_f32(x).0, expected, "{x:e}");
        }
    }

    #[test]
    fn f16_rounds_to_nearest_even() {
        for x in samples() {
            let infinite = 0x7C00 | ((x.to_bits() >> 16) as u16 & 0x8000);
            let expected = if x.abs() >= 65_520.0 { infinite } else { nearest(x, F16, 0x7C00) };
            assert_eq!(F16::from_f32(x).0, expected, "{x:e}");
        }
    }

    #[test]
    fn every_16_bit_value_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let (wide, half) = (Bf16(bits).to_f32(), F16(bits).to_f32());
            assert!(Bf16::from_f32(wide).0 == bits || wide.is_nan());
            assert!(F16::from_f32(half).0 == bits || half.is_nan());
            assert_eq!(half.is_nan(), bits & 0x7FFF > 0x7C00);
        }
    }

    #[test]
    fn f16_converts_to_the_f32_of_the_same_value() {
        for (bits, value) in [
            (0x0001, 2.0_f32.powi(-24)),
            (0x03FF, 1023.0 * 2.0_f32.powi(-24)),
            (0x0400, 2.0_f32.powi(-14)),
            (0x3C00, 1.0),
            (0x3555, 0.333_251_95),
            (0x7BFF, 65_504.0),
            (0xC000, -2.0),
            (0x7C00, f32::INFINITY),
        ] {
            assert_eq!(F16(bits).to_f32().to_bits(), value.to_bits(), "{bits:#x}");
        }
    }

    #[test]
    fn nan_converts_to_a_bf16_and_f16_nan() {
        for bits in [0x7F80_0001, 0x7F80_FFFF, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF] {
            let nan = f32::from_bits(bits);
            assert!(Bf16::from_f32(nan).to_f32().is_nan(), "{bits:#x}");
            assert!(F16::from_f32(nan).to_f32().is_nan(), "{bits:#x}");
        }
    }
}
