//! Sums squares of fp32 without rounding, so that neither order nor division into parts changes a bit.
//!
//! A square of fp32 is an integer multiple of 2^-298, the square of the smallest denormal; 2^-298 is called a unit
//! here. A sum of squares is a multiple of the unit too. Even the sum of all squares that fit into a memory has at most
//! 640 bits.

/// The number of 32-bit words in a sum. A square is below 2^256, so 2^86 squares sum to less than 2^342 = 2^(640 -
/// 298).
const WORDS: usize = 20;
/// The exponent of a unit.
const UNIT: i32 = -298;
const WORD_BITS: u32 = 32;
/// `Running` propagates carries after this many terms. Each term changes a limb by less than 2^32, and a limb has 63
/// bits.
const TERMS_MAX: u32 = 1 << 30;

/// A sum of squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Squares {
    /// Number of units, lowest word first.
    words: [u32; WORDS],
    /// The part that is not a number of units: infinity, NaN, or squares of float64, which are rounded.
    rest: f64,
}

impl Squares {
    /// The sum of no squares.
    pub const ZERO: Self = Self { words: [0; WORDS], rest: 0.0 };

    /// Makes a sum from a float64 sum that is already rounded.
    pub(crate) fn rounded(rest: f64) -> Self {
        Self { rest, ..Self::ZERO }
    }

    /// Computes `self += other`. Rounds only sums of float64 squares.
    pub fn merge(&mut self, other: &Self) {
        let mut carry = 0;
        for (word, more) in self.words.iter_mut().zip(other.words) {
            let sum = u128::from(*word) + u128::from(more) + carry;
            *word = low_half(sum);
            carry = sum >> 32;
        }
        self.rest += other.rest;
    }

    /// Returns the number of units of 2^-298 in little-endian bytes; `None` if the sum is infinite or NaN, or includes
    /// a sum of float64 squares other than 0.
    #[must_use]
    pub fn units(&self) -> Option<[u8; WORDS * 4]> {
        let mut bytes = [0; WORDS * 4];
        for (bytes, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(self.words) {
            *bytes = word.to_le_bytes();
        }
        (self.rest.to_bits() == 0).then_some(bytes)
    }

    /// Returns the nearest float64.
    #[must_use]
    pub fn value(&self) -> f64 {
        let Some(top) = self.words.iter().rposition(|&word| word != 0) else { return self.rest };
        // Three words have at least 65 significant bits. The lower words only decide whether the sum is above the
        // middle between two neighbouring float64 numbers.
        let first = top.saturating_sub(2);
        let upper = self.words[first..=top].iter().rev().fold(0, |upper, &word| upper << 32 | u128::from(word));
        let significand = upper | u128::from(self.words[..first].iter().any(|&word| word != 0));
        let exponent = 32 * i32::try_from(first).unwrap_or(0) + UNIT;
        // The conversion to float64 rounds. The product is exact, because `words` stand for 2^-298 to 2^342 here.
        #[expect(clippy::cast_precision_loss, reason = "rounding to float64 is the purpose")]
        {
            significand as f64 * power_of_two(exponent) + self.rest
        }
    }
}

/// A sum under construction. Each limb holds carries until `carry` propagates them.
pub(crate) struct Running {
    limbs: [i64; WORDS],
    terms: u32,
}

impl Running {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self { limbs: [0; WORDS], terms: 0 }
    }

    /// Adds `count * 2^power`, which must be a whole number of units.
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

    /// Returns the sum, which must not be negative.
    #[inline(always)]
    pub(crate) fn finish(mut self) -> Squares {
        self.carry();
        Squares { words: self.limbs.map(|limb| low_half(u128::from(limb.cast_unsigned()))), rest: 0.0 }
    }
}

/// Returns `2^exponent`, which must be a normal float64.
#[inline(always)]
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(u64::from((1023 + exponent).unsigned_abs()) << 52)
}

#[inline(always)]
fn low_half(sum: u128) -> u32 {
    (sum & 0xFFFF_FFFF) as u32
}
