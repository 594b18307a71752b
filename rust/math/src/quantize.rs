//! Quantises blocks of 256 numbers to 8 bits and back, with the bits of `bitsandbytes` on a CPU.
//!
//! A block keeps its absolute maximum in fp32, and a code for each number's share of the maximum. The share is first
//! rounded to the nearest of 65,536 points from -1 to 1. The code stands for the number of the map that is nearest to
//! this point. No point is 0, so a number whose magnitude is below 1/65,536 of the maximum gets the code of a point
//! next to 0.
//!
//! A block of zeros has the maximum 0, and all its codes are 0. The maximum ignores NaNs. A NaN gets code 0, which
//! stands for the lowest number of the map. If the maximum is infinite, the share of every finite number is 0. The
//! share of an infinite number is infinity times 0, a NaN.

use crate::{
    dynamic_map::{SIGNED_MAP, UNSIGNED_MAP},
    philox::BLOCK,
};

/// The index of the last point. `MIDDLE` is the centre of all points, half-way between two of them.
const LAST: f32 = 65_535.0;
const MIDDLE: f32 = LAST / 2.0;

/// The code changes at midpoints, half-way between two numbers of the map. `LATER` moves all midpoints up a little,
/// because fp32 rounds the midpoints and the shares of the points. If `LATER` is 1.1 to 1.4 times the machine epsilon,
/// every point gets the right code.
const LATER: f64 = 1.3 * f32::EPSILON as f64;

/// A dynamic map, and the lines that compute a point's code from its distance to `MIDDLE`.
///
/// Within a decade the code is a linear function of the distance, rounded down. Each of the four highest decades has
/// its own line. The few points below these decades share one line.
pub(crate) struct Map {
    numbers: &'static [f32; 256],
    signed: bool,
    below: Line,
    decades: [Decade; 4],
    /// From this distance above `MIDDLE` on, the code is the code of the number 1.
    one_from: f32,
}

#[derive(Clone, Copy)]
struct Line {
    slope: f32,
    offset: f32,
}

#[derive(Clone, Copy)]
struct Decade {
    codes: Line,
    /// The distance at which this decade begins.
    from: f32,
    /// The decade's last code plus one half. Between the decade's last number and the next decade, `last` keeps the
    /// line from rising to the next code.
    last: f32,
}

impl Map {
    /// The map of first moments and of momentum.
    pub(crate) const SIGNED: Self = Self::new(&SIGNED_MAP, true, 64.0, Line { slope: 1.0, offset: 2.6 });
    /// The map of second moments.
    pub(crate) const UNSIGNED: Self = Self::new(&UNSIGNED_MAP, false, 128.0, Line { slope: 2.2, offset: 6.8 });

    /// Makes a map whose last decade has `last` numbers; each decade has half as many numbers as the next decade.
    ///
    /// The decade from `edge` to ten times `edge` has `count` numbers, `step = 9 edge / count` apart. The first number
    /// is half a step above the edge, and `count - 1` codes precede the code of this first number. So the code changes
    /// at whole steps from the edge. Only the first change is different: it is a fifth of a step above the edge,
    /// half-way between the decade's first number and the last number of the decade below.
    #[expect(clippy::cast_possible_truncation, reason = "rounding to fp32 is the purpose")]
    const fn new(numbers: &'static [f32; 256], signed: bool, last: f64, below: Line) -> Self {
        let mut decades = [Decade { codes: below, from: 0.0, last: 0.0 }; 4];
        let (mut count, mut edge, mut place) = (last, 0.1, decades.len());
        while place > 0 {
            place -= 1;
            let step = 9.0 * edge / count;
            let slope = (1.0 / (MIDDLE as f64 * step)) as f32;
            decades[place] = Decade {
                codes: Line { slope, offset: (count - 1.0 - (edge + LATER) / step) as f32 },
                from: (MIDDLE as f64 * (edge + step / 5.0)) as f32,
                last: (2.0 * count - 1.5) as f32,
            };
            (count, edge) = (count / 2.0, edge / 10.0);
        }
        let one_from = (MIDDLE as f64 * (1.0 - 0.9 / last / 4.0)) as f32;
        Self { numbers, signed, below, decades, one_from }
    }

    /// Writes the numbers that `codes` stand for.
    #[inline(always)]
    pub(crate) fn restored(&self, codes: &[u8], absmax: f32, numbers: &mut [f32; BLOCK]) {
        for (number, &code) in numbers.iter_mut().zip(codes) {
            *number = self.numbers[usize::from(code)] * absmax;
        }
    }

    /// Writes the codes of a block, and returns the block's absolute maximum.
    #[inline(always)]
    pub(crate) fn quantised(&self, numbers: &[f32; BLOCK], codes: &mut [u8]) -> f32 {
        let absmax = absmax(&numbers[..codes.len()]);
        if absmax == 0.0 {
            codes.fill(0);
            return absmax;
        }
        let inverse = 1.0 / absmax;
        for (code, &number) in codes.iter_mut().zip(numbers) {
            *code = self.code(nearest_point(number * inverse));
        }
        absmax
    }

    /// Returns the code of the number that is nearest to a point.
    #[inline(always)]
    #[expect(clippy::cast_precision_loss, reason = "points have 16 bits")]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a code has 8 bits")]
    fn code(&self, point: i32) -> u8 {
        let place = point as f32 - MIDDLE;
        let distance = place.abs();
        let [one, two, three, four] = &self.decades;
        let choose = |decade: &Decade, upper: f32, lower: f32| if distance >= decade.from { upper } else { lower };
        let least = |one: f32, other: f32| if one < other { one } else { other };
        let of = |line: Line| distance.mul_add(line.slope, line.offset);
        // Selects in pairs, so that fewer selections wait for each other.
        let lower = least(least(of(self.below), of(one.codes)), one.last);
        let upper = choose(three, least(of(three.codes), three.last), least(of(two.codes), two.last));
        let code = whole(choose(four, of(four.codes), choose(two, upper, lower)));
        let sign = place.to_bits().cast_signed() >> 31;
        // Adds 1 to the code if the nearest number is 1, because the code of 1 follows the codes of the last decade.
        // The map has no -1, so only a positive `place` counts.
        let code = code + i32::from(place >= self.one_from);
        // For a point below the middle, a signed map uses the code `126 - code`, and an unsigned map uses the code 0.
        (if self.signed { (code + 128 - sign) ^ sign } else { code & !sign }) as u8
    }
}

/// Returns the largest magnitude, and ignores NaNs.
#[inline(always)]
fn absmax(numbers: &[f32]) -> f32 {
    // The bits of magnitudes, read as integers, have the order of the magnitudes. Adding `RAISED` makes infinity the
    // largest integer. NaNs have larger bits than infinity, so they become negative.
    const RAISED: i32 = i32::MAX - 0x7F80_0000;
    let raised = |number: &f32| (number.to_bits().cast_signed() & i32::MAX).wrapping_add(RAISED);
    f32::from_bits((numbers.iter().map(raised).fold(RAISED, i32::max) - RAISED).cast_unsigned())
}

/// Returns the point nearest to `share`; point 0 for a NaN.
#[inline(always)]
fn nearest_point(share: f32) -> i32 {
    let share = if share > -1.0 { share } else { -1.0 };
    let share = if share < 1.0 { share } else { 1.0 };
    whole((share + 1.0).mul_add(MIDDLE, 0.5))
}

/// Rounds down a number between 0 and 65,536.
#[inline(always)]
fn whole(number: f32) -> i32 {
    debug_assert!((0.0..65_537.0).contains(&number));
    // SAFETY: the callers pass numbers from 0 to 65,536, which fit an `i32`. A cast with `as` would check the range, in
    // five more instructions.
    unsafe { number.to_int_unchecked() }
}

#[cfg(test)]
#[expect(
    clippy::float_cmp,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the tests compare bits"
)]
mod tests {
    use super::*;

    const POINTS: usize = 1 << 16;
    const MAPS: [Map; 2] = [Map::SIGNED, Map::UNSIGNED];

    /// Finds the codes of all points by search, as the definition says.
    #[expect(clippy::cast_precision_loss, reason = "points have 16 bits")]
    fn searched(numbers: &[f32; 256]) -> Vec<u8> {
        let mut code = 0;
        let of_point = |point: usize| {
            let share = 2.0 * point as f32 / (POINTS - 1) as f32 - 1.0;
            while code < 255 && 0.5 * (numbers[code] + numbers[code + 1]) < share {
                code += 1;
            }
            code as u8
        };
        (0..POINTS).map(of_point).collect()
    }

    #[test]
    fn each_point_has_the_code_of_the_nearest_number() {
        for map in MAPS {
            for (point, code) in (0..).zip(searched(map.numbers)) {
                assert_eq!(map.code(point), code, "point {point} of {:?}", map.numbers[0]);
            }
        }
    }

    #[test]
    fn nearest_point_inverts_every_point_and_clamps_outside_values() {
        for point in 0..=i32::from(u16::MAX) {
            let share = (2.0 * f64::from(point) / 65_535.0 - 1.0) as f32;
            assert_eq!(nearest_point(share), point);
        }
        assert_eq!(nearest_point(f32::NAN), 0);
        assert_eq!((nearest_point(-1e9), nearest_point(f32::INFINITY)), (0, 65_535));
    }

    /// Tests one in `every` shares of either sign: its point must be the point of `bitsandbytes`, and its code must be
    /// the searched code.
    fn shares_have_their_codes(every: usize) {
        let codes = MAPS.map(|map| searched(map.numbers));
        for bits in (0..=1.0_f32.to_bits()).step_by(every) {
            for share in [f32::from_bits(bits), -f32::from_bits(bits)] {
                // The product and the sum are exact in float64. The cast to `f32` rounds them once.
                let point = (f64::from((share + 1.0) * 0.5) * 65_535.0 + 0.5) as f32 as usize;
                assert_eq!(nearest_point(share), point as i32, "{share:e}");
                for (map, codes) in MAPS.iter().zip(&codes) {
                    assert_eq!(map.code(nearest_point(share)), codes[point], "{share:e}");
                }
            }
        }
    }

    #[test]
    fn sampled_shares_have_the_code_of_their_nearest_point() {
        shares_have_their_codes(9973);
    }

    #[test]
    #[ignore = "takes minutes; make test-slow has it"]
    fn all_f32_shares_have_the_code_of_their_nearest_point() {
        shares_have_their_codes(1);
    }

    #[test]
    fn quantised_map_numbers_get_their_own_code() {
        for (map, smallest) in MAPS.iter().zip([1e-4, 1e-3]) {
            let mut numbers = *map.numbers;
            let mut codes = [0; BLOCK];
            for number in &mut numbers {
                *number *= 3.0;
            }
            let absmax = map.quantised(&numbers, &mut codes);
            assert!(absmax == 3.0);
            for (index, &code) in codes.iter().enumerate() {
                // Several numbers near zero share a point, and so a code.
                assert!(usize::from(code) == index || map.numbers[index].abs() < smallest, "{index}: {code}");
            }
        }
    }

    #[test]
    fn quantised_maps_zeros_and_nans_to_code_zero() {
        let mut codes = [7; BLOCK];
        let mut numbers = [0.0; BLOCK];
        assert!(Map::SIGNED.quantised(&numbers, &mut codes) == 0.0 && codes == [0; BLOCK]);
        Map::SIGNED.restored(&codes, 0.0, &mut numbers);
        assert!(numbers.iter().all(|number| *number == 0.0));
        numbers[3] = f32::NAN;
        numbers[4] = -2.0;
        assert!(Map::SIGNED.quantised(&numbers, &mut codes) == 2.0);
        assert_eq!((codes[3], codes[4]), (0, 0));
        numbers = [f32::NAN; BLOCK];
        assert!(Map::SIGNED.quantised(&numbers, &mut codes) == 0.0);
        numbers[0] = f32::INFINITY;
        numbers[1] = 1.0;
        assert!(Map::SIGNED.quantised(&numbers, &mut codes).is_infinite());
        assert_eq!((codes[0], codes[1]), (0, searched(Map::SIGNED.numbers)[POINTS / 2]));
    }
}
