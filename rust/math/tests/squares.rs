//! Tests sums of squares against exact integers, on every instruction set of this processor and with several numbers of
//! threads. A sum must not depend on the order of the values, or on their division into parts.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "digits, and numbers that are small"
)]

use std::num::NonZeroUsize;

use memascend_math::{Bf16, Element, Exec, F16, Floats, Simd, Squares, check};
use proptest::prelude::*;

/// A whole number of units of 2^-298, as 16-bit digits. The lowest digit comes first.
#[derive(Clone, PartialEq, Debug)]
struct Whole(Vec<u64>);

impl Whole {
    fn zero() -> Self {
        Self(vec![0; 40])
    }

    /// Adds the square of a finite fp32 number. Computes the square from the exponent and the fraction of the number.
    fn add_square(&mut self, value: f32) {
        let bits = value.to_bits() & 0x7FFF_FFFF;
        let (exponent, fraction) = (bits >> 23, u64::from(bits & 0x7F_FFFF));
        let (significand, power) =
            if exponent == 0 { (fraction, 0) } else { (fraction | 1 << 23, 2 * (exponent as usize - 1)) };
        let square = u128::from(significand * significand) << (power % 16);
        for digit in 0..5 {
            self.0[power / 16 + digit] += (square >> (16 * digit) & 0xFFFF) as u64;
        }
    }

    fn carried(mut self) -> Self {
        for digit in 1..self.0.len() {
            self.0[digit] += self.0[digit - 1] >> 16;
            self.0[digit - 1] &= 0xFFFF;
        }
        self
    }

    fn of<T: Element>(values: &[T]) -> Self {
        let mut sum = Self::zero();
        for value in values {
            sum.add_square(value.to_f32());
        }
        sum.carried()
    }

    fn from_sum(squares: &Squares) -> Self {
        let bytes = squares.units().unwrap_or_else(|| panic!("{squares:?} is not finite"));
        Self(bytes.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 8).collect())
    }

    /// Rounds `self` to the nearest f64 number, bit by bit. A tie goes to the even number.
    fn nearest(&self) -> f64 {
        let bit = |at: usize| self.0[at / 16] >> (at % 16) & 1;
        let Some(top) = (0..16 * self.0.len()).rev().find(|&at| bit(at) == 1) else { return 0.0 };
        let last = top.saturating_sub(52);
        let kept = (last..=top).rev().fold(0_u64, |kept, at| kept << 1 | bit(at));
        let half = last > 0 && bit(last - 1) == 1;
        let more = last > 1 && (0..last - 1).any(|at| bit(at) == 1);
        let rounded = kept + u64::from(half && (more || kept & 1 == 1));
        rounded as f64 * 2.0_f64.powi(last as i32 - 298)
    }
}

/// An element type that can be wrapped in `Floats`.
trait Wrapped: Element {
    fn wrap(values: &[Self]) -> Floats<'_>;
}

impl Wrapped for f32 {
    fn wrap(values: &[Self]) -> Floats<'_> {
        Floats::F32(values)
    }
}

impl Wrapped for Bf16 {
    fn wrap(values: &[Self]) -> Floats<'_> {
        Floats::Bf16(values)
    }
}

impl Wrapped for F16 {
    fn wrap(values: &[Self]) -> Floats<'_> {
        Floats::F16(values)
    }
}

fn execs() -> Vec<Exec> {
    let exec = Exec::new(NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}"));
    Simd::available().into_iter().map(|simd| exec.with_simd(simd)).collect()
}

/// Returns random values whose exponents lie between `largest - spread` and `largest`, as far as `T` has these
/// exponents. About one value in 16 is zero.
fn spread<T: Element>(len: usize, largest: i32, spread: u32, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    (0..len)
        .map(|_| {
            let exponent = (largest - (next() % (spread + 1)) as i32 + 127).clamp(0, 254) as u32;
            let zero = next() % 16 == 0;
            let bits = (next() & 1) << 31 | exponent << 23 | next() & 0x7F_FFFF;
            let value = T::from_f32(f32::from_bits(if zero { 0 } else { bits }));
            if value.to_f32().is_finite() { value } else { T::from_f32(1.0) }
        })
        .collect()
}

fn case<T: Wrapped>(len: usize, largest: i32, spread_over: u32, seed: u64, cut: usize) {
    let values = spread::<T>(len, largest, spread_over, seed);
    let wanted = Whole::of(&values);
    let mut turned = values.clone();
    turned.reverse();
    turned.rotate_left(cut.min(len));
    for exec in execs() {
        let found = check(T::wrap(&values), exec);
        assert!(!found.nonfinite);
        assert_eq!(Whole::from_sum(&found.squares), wanted, "{} {:?}", std::any::type_name::<T>(), exec);
        assert_eq!(found.squares.value().to_bits(), wanted.nearest().to_bits(), "{}", std::any::type_name::<T>());
        // The sum in another order, and the sum of two parts, must be equal to `found.squares`.
        assert_eq!(check(T::wrap(&turned), exec).squares, found.squares);
        let (before, after) = values.split_at(cut.min(len));
        let mut both = check(T::wrap(after), exec).squares;
        both.merge(&check(T::wrap(before), exec).squares);
        assert_eq!(both, found.squares);
    }
}

/// Sums two nonzero numbers among zeros. For bf16, the kernel's function `column` converts each zero to a tiny number,
/// and these tiny numbers must not change the sum.
#[test]
fn zeros_do_not_change_the_sum_of_squares() {
    for low in (0..254).step_by(3) {
        for apart in [0, 5, 15, 16, 38, 60] {
            let bits = [low << 7 | 1, (low + apart).min(254) << 7 | 0x55].map(|bits: u16| bits | 0x8000);
            for (first, second) in [(0, 2047), (700, 732), (2047, 0)] {
                let mut values = vec![Bf16(0x8000); 2048];
                (values[first], values[second]) = (Bf16(bits[0]), Bf16(bits[1]));
                for exec in execs() {
                    let found = check(Floats::Bf16(&values), exec);
                    assert_eq!(Whole::from_sum(&found.squares), Whole::of(&values), "{bits:x?} {exec:?}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn sum_of_squares_is_exact(
        len in prop_oneof![0..40_usize, 2030..2060_usize, 3000..6000_usize],
        largest in -149..128_i32,
        spread_over in prop_oneof![0..3_u32, 8..30_u32, 30..60_u32, 60..280_u32],
        seed in any::<u64>(),
        cut in 0..6000_usize,
    ) {
        case::<f32>(len, largest, spread_over, seed, cut);
        case::<Bf16>(len, largest, spread_over, seed, cut);
        case::<F16>(len, largest.clamp(-24, 15), spread_over, seed, cut);
    }
}

/// The float64 lanes of `check` add exactly only while the exponents in a block are close enough. This test sums blocks
/// within and beyond this limit. One element is about `2^-below`. All other elements are `largest`, whose significand
/// is all ones.
#[test]
fn sum_of_largest_elements_and_one_tiny_square_is_exact() {
    fn ends<T: Wrapped>(largest: T, precision: i32) {
        for below in 0..60 {
            for len in [2048, 4096] {
                let mut values = vec![largest; len];
                // The last bit of the significand of `one`, which has `precision` bits, is set.
                let one = 2.0_f32.powi(-below) * (1.0 + 2.0_f32.powi(1 - precision));
                values[len / 2 + 3] = T::from_f32(one);
                for exec in execs() {
                    let found = check(T::wrap(&values), exec).squares;
                    assert_eq!(
                        Whole::from_sum(&found),
                        Whole::of(&values),
                        "{} {below} {exec:?}",
                        std::any::type_name::<T>()
                    );
                }
            }
        }
    }
    ends(f32::from_bits(0x3FFF_FFFF), 24);
    ends(Bf16(0x3FFF), 8);
    ends(F16(0x3FFF), 11);
    ends(f32::MAX, 24);
    ends(f32::from_bits(0x007F_FFFF), 24);
}

#[test]
fn sum_just_above_the_middle_of_two_doubles_rounds_up() {
    let power = |exponent: i32| 2.0_f32.powi(exponent);
    for (least, wanted) in [(0.0, 2.0_f64.powi(60)), (power(-100), 2.0_f64.powi(60) + 256.0)] {
        let found = check(Floats::F32(&[power(30), 8.0, 8.0, least]), execs()[0]).squares;
        assert_eq!(found.value().to_bits(), wanted.to_bits());
    }
}

#[test]
fn sum_of_squares_does_not_depend_on_the_thread_count() {
    let values = spread::<f32>((1 << 20) + 4321, 0, 40, 7);
    let wanted = check(Floats::F32(&values), execs()[0]).squares;
    for threads in [2, 3] {
        let exec = execs()[0].with_threads(NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN));
        assert_eq!(check(Floats::F32(&values), exec).squares, wanted);
    }
    assert_eq!(Whole::from_sum(&wanted), Whole::of(&values));
}

#[test]
fn nonfinite_elements_make_the_sum_of_squares_nonfinite() {
    for (bad, is_nan) in [(f32::INFINITY, false), (f32::NEG_INFINITY, false), (f32::NAN, true)] {
        for place in [0, 2047, 2048, 4101] {
            let mut values = vec![1.0_f32; 4102];
            values[place] = bad;
            for exec in execs() {
                let found = check(Floats::F32(&values), exec);
                assert!(found.nonfinite && found.squares.units().is_none());
                assert!(found.squares.value().is_nan() == is_nan && !found.squares.value().is_finite());
                let mut both = found;
                both.merge(&check(Floats::F32(&[1.0]), exec));
                assert!(both.nonfinite);
            }
        }
    }
}
