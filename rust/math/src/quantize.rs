//! Quantises blocks of 256 numbers to 8 bits and back, with the bits of `bitsandbytes` on a CPU.
//!
//! A block keeps its absolute maximum in fp32, and of each number the code of its share of that. The code is not looked up
//! by distance: the share goes to the nearest of 65,536 points from -1 to 1, and a table says the code that is nearest to
//! the point. So what is smaller than the 65,536th part of the maximum is not zero but as large as that.
//!
//! A block of zeros has the maximum 0 and the codes 0. A maximum does not see NaNs: their code is 0, the lowest number of
//! the map. Where the maximum is infinite every other number gets the code of 0; the infinite ones are 0 times that, NaN.

use std::sync::OnceLock;

use crate::{
    dynamic_map::{SIGNED_MAP, UNSIGNED_MAP},
    fused::Fused,
    philox::BLOCK,
};

const POINTS: usize = 1 << 16;

/// A dynamic map, and the code of each point.
pub(crate) struct Map {
    numbers: &'static [f32; 256],
    codes: Box<[u8]>,
}

impl Map {
    /// The one for first moments and momentum.
    pub(crate) fn signed() -> &'static Self {
        static MAP: OnceLock<Map> = OnceLock::new();
        MAP.get_or_init(|| Self::new(&SIGNED_MAP))
    }

    /// The one for second moments.
    pub(crate) fn unsigned() -> &'static Self {
        static MAP: OnceLock<Map> = OnceLock::new();
        MAP.get_or_init(|| Self::new(&UNSIGNED_MAP))
    }

    #[expect(clippy::cast_precision_loss, reason = "points have 16 bits")]
    #[expect(clippy::cast_possible_truncation, reason = "a code has 8 bits")]
    fn new(numbers: &'static [f32; 256]) -> Self {
        let mut codes = vec![0; POINTS].into_boxed_slice();
        let mut code = 0;
        for (point, found) in codes.iter_mut().enumerate() {
            let share = 2.0 * point as f32 / (POINTS - 1) as f32 - 1.0;
            while code < 255 && 0.5 * (numbers[code] + numbers[code + 1]) < share {
                code += 1;
            }
            *found = code as u8;
        }
        Self { numbers, codes }
    }

    /// The numbers that codes stand for.
    #[inline(always)]
    pub(crate) fn restored(&self, codes: &[u8], absmax: f32, numbers: &mut [f32; BLOCK]) {
        for (number, &code) in numbers.iter_mut().zip(codes) {
            *number = self.numbers[usize::from(code)] * absmax;
        }
    }

    /// Writes the codes of a block, and gives its absolute maximum.
    #[inline(always)]
    pub(crate) fn quantised<F: Fused>(&self, numbers: &[f32; BLOCK], codes: &mut [u8]) -> f32 {
        let absmax = absmax(&numbers[..codes.len()]);
        if absmax == 0.0 {
            codes.fill(0);
            return absmax;
        }
        let inverse = 1.0 / absmax;
        let mut points = [0; BLOCK];
        for (point, &number) in points.iter_mut().zip(numbers) {
            *point = nearest_point::<F>(number * inverse);
        }
        for (code, &point) in codes.iter_mut().zip(&points) {
            *code = self.codes[usize::from(point)];
        }
        absmax
    }
}

/// The largest magnitude; a NaN is none.
#[inline(always)]
fn absmax(numbers: &[f32]) -> f32 {
    // As bits: magnitudes are ordered like them, and a NaN is above infinity.
    let magnitude = |number: &f32| {
        let bits = number.to_bits() & 0x7FFF_FFFF;
        if bits > 0x7F80_0000 { 0 } else { bits }
    };
    f32::from_bits(numbers.iter().map(magnitude).fold(0, u32::max))
}

/// A NaN goes to the first one.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 65,535 and a half")]
fn nearest_point<F: Fused>(share: f32) -> u16 {
    let share = if share < -1.0 { -1.0 } else { share };
    let share = if share > 1.0 { 1.0 } else { share };
    let place = F::fma((share + 1.0) * 0.5, 65_535.0, 0.5);
    let place = if place >= 0.0 { place } else { 0.0 };
    place as i32 as u16
}

#[cfg(test)]
#[expect(clippy::float_cmp, clippy::cast_possible_truncation, reason = "bits are what is tested")]
mod tests {
    use super::*;
    use crate::fused::{Hardware, Portable};

    #[test]
    fn every_point_comes_from_its_own_share() {
        for point in 0..=u16::MAX {
            let share = (2.0 * f64::from(point) / 65_535.0 - 1.0) as f32;
            assert_eq!(nearest_point::<Portable>(share), point);
            assert_eq!(nearest_point::<Hardware>(share), point);
        }
        assert_eq!(nearest_point::<Portable>(f32::NAN), 0);
        assert_eq!((nearest_point::<Portable>(-1e9), nearest_point::<Portable>(f32::INFINITY)), (0, 65_535));
    }

    #[test]
    fn a_number_that_the_map_has_keeps_its_code() {
        for (map, smallest) in [(Map::signed(), 1e-4), (Map::unsigned(), 1e-3)] {
            let mut numbers = *map.numbers;
            let mut codes = [0; BLOCK];
            for number in &mut numbers {
                *number *= 3.0;
            }
            let absmax = map.quantised::<Portable>(&numbers, &mut codes);
            assert!(absmax == 3.0);
            for (index, &code) in codes.iter().enumerate() {
                // Nearer to zero than some points, several share one.
                assert!(usize::from(code) == index || map.numbers[index].abs() < smallest, "{index}: {code}");
            }
        }
    }

    #[test]
    fn zeros_and_what_is_no_number() {
        let mut codes = [7; BLOCK];
        let mut numbers = [0.0; BLOCK];
        assert!(Map::signed().quantised::<Portable>(&numbers, &mut codes) == 0.0 && codes == [0; BLOCK]);
        Map::signed().restored(&codes, 0.0, &mut numbers);
        assert!(numbers.iter().all(|number| *number == 0.0));
        numbers[3] = f32::NAN;
        numbers[4] = -2.0;
        assert!(Map::signed().quantised::<Portable>(&numbers, &mut codes) == 2.0);
        assert_eq!((codes[3], codes[4]), (0, 0));
        numbers = [f32::NAN; BLOCK];
        assert!(Map::signed().quantised::<Portable>(&numbers, &mut codes) == 0.0);
        numbers[0] = f32::INFINITY;
        numbers[1] = 1.0;
        assert!(Map::signed().quantised::<Portable>(&numbers, &mut codes).is_infinite());
        assert_eq!((codes[0], codes[1]), (0, Map::signed().codes[POINTS / 2]));
    }
}
