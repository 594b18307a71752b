//! Sums squares of fp32 without rounding, so that neither order nor division into parts changes a bit.
//!
//! A square of fp32 is a whole number of units of 2^-298, the square of the smallest denormal. A sum is such a number,
//! too, of at most 640 bits for as many squares as fit in any memory.

/// Words of 32 bits: squares are below 2^256, and 2^86 of them below 2^342 = 2^(640 - 298).
const WORDS: usize = 20;
/// The exponent of a unit.
const UNIT: i32 = -298;
const WORD_BITS: u32 = 32;
/// Terms after which carries are propagated: each changes a limb by less than 2^32, and it has 63 bits.
const TERMS_MAX: u32 = 1 << 30;

/// A sum of squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Squares {
    /// In units, the lowest word first.
    words: [u32; WORDS],
    /// What is no number of units: infinity or NaN, and the squares of float64, which are rounded.
    rest: f64,
}

impl Squares {
    /// Of nothing.
    pub const ZERO: Self = Self { words: [0; WORDS], rest: 0.0 };

    /// What has been rounded already.
    pub(crate) fn rounded(rest: f64) -> Self {
        Self { rest, ..Self::ZERO }
    }

    /// `self += other`, without rounding.
    pub fn merge(&mut self, other: &Self) {
        let mut carry = 0;
        for (word, more) in self.words.iter_mut().zip(other.words) {
            let sum = u128::from(*word) + u128::from(more) + carry;
            *word = low_half(sum);
            carry = sum >> 32;
        }
        self.rest += other.rest;
    }

    /// The sum as whole units of 2^-298, bytes from the lowest on; `None` where it is infinity, NaN, or of float64.
    #[must_use]
    pub fn units(&self) -> Option<[u8; WORDS * 4]> {
        let mut bytes = [0; WORDS * 4];
        for (bytes, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(self.words) {
            *bytes = word.to_le_bytes();
        }
        (self.rest.to_bits() == 0).then_some(bytes)
    }

    /// The nearest float64.
    #[must_use]
    pub fn value(&self) -> f64 {
        let Some(top) = self.words.iter().rposition(|&word| word != 0) else { return self.rest };
        // Three words have at least 65 bits from the first that is set on. What is below them only tells on which side
        // of a half the sum is.
        let first = top.saturating_sub(2);
        let upper = self.words[first..=top].iter().rev().fold(0, |upper, &word| upper << 32 | u128::from(word));
        let significand = upper | u128::from(self.words[..first].iter().any(|&word| word != 0));
        let exponent = 32 * i32::try_from(first).unwrap_or(0) + UNIT;
        // Rounded once: by the conversion. The product is exact, as no sum is below 2^-298 or above 2^342.
        #[expect(clippy::cast_precision_loss, reason = "rounding to float64 is the purpose")]
        {
            significand as f64 * power_of_two(exponent) + self.rest
        }
    }
}

/// A sum that grows: carries wait in each limb.
pub(crate) struct Running {
    limbs: [i64; WORDS],
    terms: u32,
}

impl Running {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self { limbs: [0; WORDS], terms: 0 }
    }

    /// Adds a number of times a power of two, which is a number of units.
    #[inline(always)]
    pub(crate) fn add(&mut self, (count, power): (i64, i32)) {
        debug_assert!(power >= UNIT, "a part of a unit");
        let place = (power - UNIT).unsigned_abs();
        let (index, shift) = ((place / WORD_BITS) as usize, place % WORD_BITS);
        let wide = u128::from(count.unsigned_abs()) << shift;
        let sign = count.signum();
        for (limb, part) in self.limbs[index..index + 3].iter_mut().zip([wide, wide >> 32, wide >> 64]) {
            *limb += sign * i64::from(low_half(part));
        }
        self.terms += 1;
        if self.terms == TERMS_MAX {
            self.carry();
        }
    }

    fn carry(&mut self) {
        let mut carry = 0;
        let (last, others) = self.limbs.split_last_mut().expect("there are limbs");
        for limb in others {
            let sum = *limb + carry;
            *limb = sum & 0xFFFF_FFFF;
            carry = sum >> WORD_BITS;
        }
        *last += carry;
        self.terms = 0;
    }

    /// What it has come to; it is not negative.
    #[inline(always)]
    pub(crate) fn finish(mut self) -> Squares {
        self.carry();
        Squares { words: self.limbs.map(|limb| low_half(u128::from(limb.cast_unsigned()))), rest: 0.0 }
    }
}

/// Of an exponent of a normal float64.
#[inline(always)]
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(u64::from((1023 + exponent).unsigned_abs()) << 52)
}

#[inline(always)]
fn low_half(sum: u128) -> u32 {
    (sum & 0xFFFF_FFFF) as u32
}
