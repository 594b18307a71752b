//! Checks gradients for overflow, sums their squares and unscales them in one pass.
//!
//! The sum is exact, so it depends neither on the order, nor on threads, nor on the instruction set. Lanes in float64 add
//! the squares of a block, which rounds nothing as long as the exponents of the block are near enough to each other; how
//! near, the smallest and the largest magnitude tell. Where they are farther apart each square is divided into two parts
//! that have lanes of their own, and what is smaller still comes in another round. What lanes hold is then added to a
//! number that is wide enough for any sum.

use std::{
    cmp::Ordering::{Equal, Greater, Less},
    sync::{Mutex, PoisonError},
};

use crate::{
    Element, Error, Exec, Floats, FloatsMut, Result, Squares,
    element::for_type,
    exec::Work,
    simd::Kernel,
    squares::{Running, power_of_two},
};

/// Elements whose squares are summed in float64 before the sum of all grows by them.
const BLOCK: usize = 2048;
/// Sums in float64 that run side by side, one for so many columns of a block.
const LANES: usize = 16;
/// The same of magnitudes, which are half as wide.
const RANGE_LANES: usize = 32;
/// A lane adds 2 to the power of this.
const LANE_BITS: i32 = (BLOCK / LANES).ilog2().cast_signed();
/// Bits of a float64's significand.
const DOUBLE_BITS: i32 = 53;

const INFINITY: u32 = 0x7F80_0000;

/// What one pass found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Check {
    /// An infinity or a NaN is among the results.
    pub nonfinite: bool,
    /// The sum of the squares of the results; infinity or NaN where one of them is.
    pub squares: Squares,
}

impl Check {
    /// Of nothing.
    pub const NOTHING: Self = Self { nonfinite: false, squares: Squares::ZERO };

    /// Adds what was found in other elements.
    pub fn merge(&mut self, other: &Self) {
        self.nonfinite |= other.nonfinite;
        self.squares.merge(&other.squares);
    }
}

/// Reads `data` once.
#[must_use]
pub fn check(data: Floats<'_>, exec: Exec) -> Check {
    for_type!(Floats, data, data => pass(Data::Read(data), exec))
}

/// Multiplies `data` by `factor` in place, rounding once, and checks the results in the same pass. With a factor of 1
/// nothing is written.
pub fn check_and_unscale(data: FloatsMut<'_>, factor: f32, exec: Exec) -> Result<Check> {
    if !factor.is_finite() {
        return Err(Error::Number { name: "inv_scale", value: f64::from(factor), wanted: "a finite number" });
    }
    Ok(for_type!(FloatsMut, data, data => scaled(data, factor, exec)))
}

#[expect(clippy::float_cmp, reason = "exactly one means that there is nothing to multiply")]
fn scaled<T: Element>(data: &mut [T], factor: f32, exec: Exec) -> Check {
    pass(if factor == 1.0 { Data::Read(data) } else { Data::Scale(data, factor) }, exec)
}

/// What a pass goes over.
enum Data<'a, T> {
    Read(&'a [T]),
    Scale(&'a mut [T], f32),
}

fn pass<T: Element>(data: Data<'_, T>, exec: Exec) -> Check {
    let found = Mutex::new((0, Squares::ZERO));
    exec.run(data, BLOCK, |simd, part| {
        let (peak, squares) = simd.run(part);
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        found.0 = found.0.max(peak);
        found.1.merge(&squares);
    });
    let (peak, squares) = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    let squares = match peak.cmp(&INFINITY) {
        Less => squares,
        Equal => Squares::rounded(f64::INFINITY),
        Greater => Squares::rounded(f64::NAN),
    };
    Check { nonfinite: peak >= INFINITY, squares }
}

impl<T: Element> Work for Data<'_, T> {
    fn len(&self) -> usize {
        match self {
            Self::Read(data) => data.len(),
            Self::Scale(data, _) => data.len(),
        }
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::Read(data) => {
                let (left, right) = data.split_at(middle);
                (Self::Read(left), Self::Read(right))
            }
            Self::Scale(data, factor) => {
                let (left, right) = data.split_at_mut(middle);
                (Self::Scale(left, factor), Self::Scale(right, factor))
            }
        }
    }
}

impl<T: Element> Kernel for Data<'_, T> {
    /// Bits of the largest magnitude, and the sum of squares where that is finite.
    type Output = (u32, Squares);

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut sum = Sum { squares: Running::new(), peak: 0 };
        match self {
            Self::Read(data) => {
                for block in data.chunks(BLOCK) {
                    sum.add(block);
                }
            }
            Self::Scale(data, factor) => {
                for block in data.chunks_mut(BLOCK) {
                    // The block stays in the first-level cache between the two loops.
                    for value in &mut *block {
                        *value = T::from_f32(value.to_f32() * factor);
                    }
                    sum.add(block);
                }
            }
        }
        (sum.peak, sum.squares.finish())
    }
}

/// The running sum of a part.
struct Sum {
    squares: Running,
    peak: u32,
}

impl Sum {
    /// Adds at most a block; what is missing of one counts as zeros.
    #[inline(always)]
    fn add<T: Element>(&mut self, data: &[T]) {
        if let Ok(block) = data.try_into() {
            self.add_block(block);
        } else {
            let mut padded = [T::default(); BLOCK];
            padded[..data.len()].copy_from_slice(data);
            self.add_block(&padded);
        }
    }

    #[inline(always)]
    fn add_block<T: Element>(&mut self, block: &[T; BLOCK]) {
        let Survey { mut peak, low, squares } = survey(block);
        self.peak = self.peak.max(peak);
        if self.peak >= INFINITY {
            return;
        }
        let mut all = true;
        while peak > 0 {
            if exponent(peak) - exponent(low) <= narrow::<T>() {
                let lanes = if all { squares } else { up_to(block, peak) };
                self.squares.add(units(&lanes, grid::<T>(exponent(low))));
                return;
            }
            let least = (exponent(peak) - wide::<T>()).max(1);
            let floor = if least == 1 { 0 } else { least.unsigned_abs() << 23 };
            let apart = if all && low >= floor {
                in_two::<T, true>(block, floor, peak)
            } else {
                in_two::<T, false>(block, floor, peak)
            };
            self.squares.add(units(&apart.upper, apart.last));
            self.squares.add(units(&apart.lower, grid::<T>(least)));
            // What is so small beside the largest that it has no place in the same float64 comes by itself.
            peak = if low < floor { peak_below(block, floor) } else { 0 };
            all = false;
        }
    }
}

/// How far below the largest exponent of a block the smallest may be for lanes to hold sums of squares without
/// rounding: with e and E the exponents, squares are multiples of the grid of e, and below 2^(2E + 2).
const fn narrow<T: Element>() -> i32 {
    (DOUBLE_BITS - LANE_BITS - 2 * T::PRECISION).div_euclid(2)
}

/// The same where each square is divided in two: into a multiple of g = 2^(2E + 2 + 7 - 53), as a lane adds 2^7 of them,
/// and what is left of it, at most g / 2.
const fn wide<T: Element>() -> i32 {
    (2 * DOUBLE_BITS - 2 * LANE_BITS + 1 - 2 * T::PRECISION).div_euclid(2)
}

/// The power of two that all squares of an exponent or a larger one are multiples of.
const fn grid<T: Element>(exponent: i32) -> i32 {
    2 * (exponent - 127) - 2 * (T::PRECISION - 1)
}

/// What lanes hold, which are multiples of a power of two, as a number of those.
#[inline(always)]
fn units(lanes: &[f64; LANES], power: i32) -> (i64, i32) {
    let scale = power_of_two(-power);
    #[expect(clippy::cast_possible_truncation, reason = "whole numbers of at most 53 bits")]
    (lanes.iter().map(|lane| (lane * scale) as i64).sum(), power)
}

/// The exponent field of a magnitude, of which that of denormals is 1.
#[inline(always)]
fn exponent(magnitude: u32) -> i32 {
    (magnitude >> 23).cast_signed().max(1)
}

/// The range of magnitudes of a block, and the sums of its squares, after one pass.
struct Survey {
    /// Bits of the largest magnitude.
    peak: u32,
    /// Bits of the smallest magnitude that is not zero.
    low: u32,
    /// The sums of all squares, rounded where exponents are too far apart. Zeros where they nearly always are: in fp32.
    squares: [f64; LANES],
}

#[inline(always)]
fn survey<T: Element>(block: &[T; BLOCK]) -> Survey {
    let mut peaks = [0_u32; RANGE_LANES];
    // One less, so that zero is the largest.
    let mut lows = [u32::MAX; RANGE_LANES];
    let mut squares = [0.0_f64; LANES];
    for group in block.as_chunks::<RANGE_LANES>().0 {
        let mut values = [0.0_f32; RANGE_LANES];
        for lane in 0..RANGE_LANES {
            values[lane] = group[lane].magnitude();
            let bits = values[lane].to_bits();
            peaks[lane] = peaks[lane].max(bits);
            lows[lane] = lows[lane].min(bits.wrapping_sub(1));
        }
        if narrow::<T>() >= 0 {
            for half in values.as_chunks::<LANES>().0 {
                for lane in 0..LANES {
                    let value = f64::from(half[lane]);
                    squares[lane] = value.mul_add(value, squares[lane]);
                }
            }
        }
    }
    let peak = peaks.iter().fold(0, |a, &b| a.max(b));
    let low = lows.iter().fold(u32::MAX, |a, &b| a.min(b));
    Survey { peak, low: low.wrapping_add(1), squares }
}

/// Bits of the largest magnitude below `end`.
#[inline(always)]
fn peak_below<T: Element>(block: &[T; BLOCK], end: u32) -> u32 {
    let bits = block.iter().map(|value| value.magnitude().to_bits());
    bits.fold(0, |peak, bits| peak.max(if bits < end { bits } else { 0 }))
}

/// The sums of the squares of magnitudes up to `peak`.
#[inline(always)]
fn up_to<T: Element>(block: &[T; BLOCK], peak: u32) -> [f64; LANES] {
    let mut squares = [0.0_f64; LANES];
    for group in block.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let value = group[lane].magnitude();
            let value = f64::from(if value.to_bits() <= peak { value } else { 0.0 });
            squares[lane] = value.mul_add(value, squares[lane]);
        }
    }
    squares
}

/// Sums of squares of which each was divided in two.
struct Apart {
    upper: [f64; LANES],
    lower: [f64; LANES],
    /// The power of two that the upper parts are multiples of.
    last: i32,
}

#[inline(always)]
fn in_two<T: Element, const ALL: bool>(block: &[T; BLOCK], floor: u32, peak: u32) -> Apart {
    let last = 2 * (exponent(peak) - 127) + 2 + LANE_BITS - DOUBLE_BITS;
    // Of what is between it and a third more or less that is the last bit.
    let large = 1.5 * power_of_two(last + DOUBLE_BITS - 1);
    let mut apart = Apart { upper: [0.0; LANES], lower: [0.0; LANES], last };
    for group in block.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let value = group[lane].magnitude();
            let inside = ALL || (value.to_bits() >= floor && value.to_bits() <= peak);
            let value = f64::from(if inside { value } else { 0.0 });
            let part = value.mul_add(value, large) - large;
            apart.upper[lane] += part;
            apart.lower[lane] += value.mul_add(value, -part);
        }
    }
    apart
}
