//! Checks gradients for overflow, sums their squares and unscales them in one pass.
//!
//! The sum is exact, so it depends neither on the order, nor on threads, nor on the instruction set. Lanes in float64 add
//! the squares of a block, which rounds nothing as long as the exponents of the block are near enough to each other; how
//! near, the smallest and the largest magnitude tell. Where they are farther apart each square is divided into two parts
//! that have lanes of their own, and what is smaller still comes in another round. What lanes hold is then added to a
//! number that is wide enough for any sum.

use std::{
    cmp::Ordering::{Equal, Greater, Less},
    hint::black_box,
    num::Wrapping,
    ops::Neg,
    sync::{Mutex, PoisonError},
};

use crate::{
    Bf16, Element, Error, Exec, F16, Floats, FloatsMut, Result, Squares,
    element::for_type,
    exec::Work,
    simd::Kernel,
    squares::{Running, power_of_two},
};

/// Elements whose squares are summed in float64 before the sum of all grows by them.
const BLOCK: usize = 2048;
/// Sums in float64 that run side by side, one for so many columns of a block.
const LANES: usize = 32;
/// Elements that are taken at a time.
const GROUP: usize = 4 * LANES;
/// A lane adds 2 to the power of this.
const LANE_BITS: i32 = (BLOCK / LANES).ilog2().cast_signed();
/// Bits of a float64's fraction.
const FRACTION: i32 = 52;

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
fn scaled<T: Columns>(data: &mut [T], factor: f32, exec: Exec) -> Check {
    pass(if factor == 1.0 { Data::Read(data) } else { Data::Scale(data, factor) }, exec)
}

/// What a pass goes over.
enum Data<'a, T> {
    Read(&'a [T]),
    Scale(&'a mut [T], f32),
}

fn pass<T: Columns>(data: Data<'_, T>, exec: Exec) -> Check {
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

impl<T: Columns> Work for Data<'_, T> {
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

impl<T: Columns> Kernel for Data<'_, T> {
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
    fn add<T: Columns>(&mut self, data: &[T]) {
        if let Ok(block) = data.try_into() {
            self.add_block(block);
        } else {
            let mut padded = [T::default(); BLOCK];
            padded[..data.len()].copy_from_slice(data);
            self.add_block(&padded);
        }
    }

    #[inline(always)]
    fn add_block<T: Columns>(&mut self, block: &[T; BLOCK]) {
        let Survey { mut peak, low, squares } = survey(block);
        self.peak = self.peak.max(peak);
        if self.peak >= INFINITY {
            return;
        }
        let mut all = exponent(low) >= T::LEAST;
        while peak > 0 {
            if exponent(peak) - exponent(low) <= narrow::<T>() {
                let power = grid::<T>(exponent(low));
                let from = origin(power + 2 * T::SCALE);
                self.squares.add(if all { gained_from(squares, from, power) } else { up_to(block, peak, power) });
                return;
            }
            let least = (exponent(peak) - wide::<T>()).max(1);
            let floor = if least == 1 { 0 } else { least.unsigned_abs() << 23 };
            let parts = if all && low >= floor {
                in_two::<T, true>(block, low, peak)
            } else {
                in_two::<T, false>(block, floor, peak)
            };
            for part in parts {
                self.squares.add(part);
            }
            // What is so small beside the largest that it has no place in the same float64 comes by itself.
            peak = if low < floor { peak_below(block, floor) } else { 0 };
            all = false;
        }
    }
}

/// How far below the largest exponent of a block the smallest may be for lanes to hold sums of squares without
/// rounding: with e and E the exponents, squares are multiples of the grid of e, and below 2^(2E + 2).
const fn narrow<T: Element>() -> i32 {
    (FRACTION - LANE_BITS - 2 * T::PRECISION).div_euclid(2)
}

/// The same where each square is divided in two: into a multiple of g = 2^(2E + 2 + 6 - 52), as a lane adds 2^6 of them,
/// and what is left of it, at most g / 2.
const fn wide<T: Element>() -> i32 {
    FRACTION - LANE_BITS - T::PRECISION
}

/// The power of two that all squares of an exponent or a larger one are multiples of.
const fn grid<T: Element>(exponent: i32) -> i32 {
    2 * (exponent - 127) - 2 * (T::PRECISION - 1)
}

/// The float64 of which the last bit is 2 to the power of `power`, and whose other bits are zero. Sums that begin with it
/// are whole numbers of that bit.
#[inline(always)]
fn origin(power: i32) -> f64 {
    power_of_two(power + FRACTION)
}

/// What lanes have gained since they were `from`, of which the last bit stands for a power of two.
#[inline(always)]
fn gained(lanes: &[f64; LANES], from: f64, power: i32) -> (i64, i32) {
    let mut sums = [0_i64; 8];
    for lanes in lanes.as_chunks::<8>().0 {
        for (sum, lane) in sums.iter_mut().zip(lanes) {
            *sum += lane.to_bits().wrapping_sub(from.to_bits()).cast_signed();
        }
    }
    (sums.iter().sum(), power)
}

/// The same of lanes that began with zero, before they are rounded to that last bit.
#[inline(always)]
fn gained_from(mut lanes: [f64; LANES], from: f64, power: i32) -> (i64, i32) {
    for lane in &mut lanes {
        *lane += from;
    }
    gained(&lanes, from, power)
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
fn survey<T: Columns>(block: &[T; BLOCK]) -> Survey {
    let mut peaks = [T::Key::default(); LANES];
    // Negative, so that zero is no candidate.
    let mut lows = [T::Key::default(); LANES];
    let mut squares = [0.0_f64; LANES];
    for group in block.as_chunks::<GROUP>().0 {
        for values in group.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                let key = values[lane].key();
                peaks[lane] = peaks[lane].max(key);
                lows[lane] = lows[lane].max(-key);
            }
        }
        if narrow::<T>() >= 0 {
            add_squares(&mut squares, &T::column::<0>(group));
            add_squares(&mut squares, &T::column::<1>(group));
            add_squares(&mut squares, &T::column::<2>(group));
            add_squares(&mut squares, &T::column::<3>(group));
        }
    }
    Survey { peak: T::bits(largest(peaks)), low: T::bits(-largest(lows)), squares }
}

/// LLVM extracts and compares every element one by one where it knows what follows: hence the box.
#[inline(always)]
fn largest<K: Copy + Default + Ord>(keys: [K; LANES]) -> K {
    let mut found = K::default();
    for key in keys {
        found = found.max(key);
    }
    black_box(found)
}

#[inline(always)]
fn add_squares(sums: &mut [f64; LANES], values: &[f64; LANES]) {
    for lane in 0..LANES {
        sums[lane] = values[lane].mul_add(values[lane], sums[lane]);
    }
}

#[inline(always)]
fn add_parts([uppers, lowers]: &mut [[f64; LANES]; 2], values: &[f64; LANES]) {
    for lane in 0..LANES {
        let value = values[lane];
        let sum = value.mul_add(value, uppers[lane]);
        let part = sum - uppers[lane];
        uppers[lane] = sum;
        lowers[lane] += value.mul_add(value, -part);
    }
}

/// Bits of the largest magnitude below `end`.
#[inline(always)]
fn peak_below<T: Element>(block: &[T; BLOCK], end: u32) -> u32 {
    let mut peak = 0;
    for value in block {
        let bits = value.magnitude().to_bits();
        peak = peak.max(if bits < end { bits } else { 0 });
    }
    peak
}

/// The sum of the squares of magnitudes up to `peak`, which are multiples of a power of two.
#[inline(always)]
fn up_to<T: Element>(block: &[T; BLOCK], peak: u32, power: i32) -> (i64, i32) {
    let from = origin(power);
    let mut squares = [from; LANES];
    for group in block.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let value = inside(group[lane], 0, peak);
            squares[lane] = value.mul_add(value, squares[lane]);
        }
    }
    gained(&squares, from, power)
}

/// The sums of squares of which each was divided in two.
#[inline(always)]
fn in_two<T: Columns, const ALL: bool>(block: &[T; BLOCK], floor: u32, peak: u32) -> [(i64, i32); 2] {
    let scale = if ALL { 2 * T::SCALE } else { 0 };
    let (coarse, fine) = (2 * (exponent(peak) - 127) + 2 + LANE_BITS - FRACTION, grid::<T>(exponent(floor)));
    // The lower parts have either sign: between it and a third more or less the last bit is the same.
    let (upper, lower) = (origin(coarse + scale), 1.5 * origin(fine + scale));
    let mut sums = [[upper; LANES], [lower; LANES]];
    for group in block.as_chunks::<GROUP>().0 {
        if ALL {
            add_parts(&mut sums, &T::column::<0>(group));
            add_parts(&mut sums, &T::column::<1>(group));
            add_parts(&mut sums, &T::column::<2>(group));
            add_parts(&mut sums, &T::column::<3>(group));
        } else {
            for elements in group.as_chunks::<LANES>().0 {
                let mut values = [0.0; LANES];
                for lane in 0..LANES {
                    values[lane] = inside(elements[lane], floor, peak);
                }
                add_parts(&mut sums, &values);
            }
        }
    }
    [gained(&sums[0], upper, coarse), gained(&sums[1], lower, fine)]
}

/// A magnitude, or zero where it is outside of a range.
#[inline(always)]
fn inside<T: Element>(value: T, floor: u32, peak: u32) -> f64 {
    let value = value.magnitude();
    f64::from(if value.to_bits() >= floor && value.to_bits() <= peak { value } else { 0.0 })
}

/// An element as the inner loops take it, in few and cheap operations.
trait Columns: Element {
    /// Bits of a magnitude.
    type Key: Copy + Default + Ord + Neg<Output = Self::Key>;
    /// Columns have 2 to the power of this times the elements.
    const SCALE: i32;
    /// The least exponent that columns have right; the square of zero is lost in them beside that of such a number.
    const LEAST: i32;

    fn key(self) -> Self::Key;

    /// The bits of the magnitude in fp32.
    fn bits(key: Self::Key) -> u32;

    /// A fourth of a group in float64, of any sign; infinities and NaNs may become any value.
    fn column<const K: usize>(group: &[Self; GROUP]) -> [f64; LANES];
}

impl Columns for f32 {
    type Key = Wrapping<u32>;
    const SCALE: i32 = 0;
    const LEAST: i32 = 1;

    #[inline(always)]
    fn key(self) -> Self::Key {
        Wrapping(self.abs().to_bits())
    }

    #[inline(always)]
    fn bits(key: Self::Key) -> u32 {
        key.0
    }

    #[inline(always)]
    fn column<const K: usize>(group: &[Self; GROUP]) -> [f64; LANES] {
        let mut column = [0.0; LANES];
        for lane in 0..LANES {
            column[lane] = f64::from(group[K * LANES + lane]);
        }
        column
    }
}

impl Columns for Bf16 {
    type Key = Wrapping<u16>;
    // From a bias of 127 to 768, which has no bit in common with an exponent.
    const SCALE: i32 = 768 - 1023 + 127;
    // Zero becomes 2^-255. Of its square 2^6 are 2^-504: less than half of the last bit of 2^-446, the square of this.
    const LEAST: i32 = 32;

    #[inline(always)]
    fn key(self) -> Self::Key {
        Wrapping(self.0 & 0x7FFF)
    }

    #[inline(always)]
    fn bits(key: Self::Key) -> u32 {
        Self(key.0).magnitude().to_bits()
    }

    #[inline(always)]
    fn column<const K: usize>(group: &[Self; GROUP]) -> [f64; LANES] {
        spread::<_, K, 7>(group, 768)
    }
}

impl Columns for F16 {
    type Key = Wrapping<u16>;
    const SCALE: i32 = 992 - 1023 + 15;
    const LEAST: i32 = 1;

    #[inline(always)]
    fn key(self) -> Self::Key {
        Wrapping(self.0 & 0x7FFF)
    }

    #[inline(always)]
    fn bits(key: Self::Key) -> u32 {
        Self(key.0).magnitude().to_bits()
    }

    #[inline(always)]
    fn column<const K: usize>(group: &[Self; GROUP]) -> [f64; LANES] {
        // Twice as large and less the bit in front, a zero or a denormal is right, and any other is larger than before.
        let mut column = spread::<_, K, 10>(group, 992);
        for value in &mut column {
            let denormal = value.mul_add(2.0, -power_of_two(-30));
            *value = if denormal < *value { denormal } else { *value };
        }
        column
    }
}

/// 16-bit floats with F bits of fraction in float64, without their signs, their exponents on another bias. Each word of
/// four gives one: a shift and a mask, where widening takes shuffles, of which Intel's processors do one a cycle. Zeros and
/// denormals come out as if they had the bit in front that others have.
#[inline(always)]
fn spread<T: Element, const K: usize, const F: usize>(group: &[T; GROUP], bias: u64) -> [f64; LANES] {
    const { assert!(size_of::<T>() == 2) };
    // SAFETY: as many bytes, which may lie at any address and have any value.
    let words = unsafe { group.as_ptr().cast::<[u64; LANES]>().read_unaligned() };
    let (up, down) = ((52 - F).saturating_sub(16 * K), (16 * K).saturating_sub(52 - F));
    let mut column = [0.0; LANES];
    for lane in 0..LANES {
        column[lane] = f64::from_bits(words[lane] << up >> down & 0x7FFF << (52 - F) | bias << 52);
    }
    column
}
