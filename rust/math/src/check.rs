//! Checks gradients for overflow, sums their squares and unscales them in one pass.
//!
//! The sum is exact. So the order of the elements, the number of threads and the instruction set do not change it.
//!
//! [Note: exact lanes] Lanes in float64 add the squares of a block. These additions are exact if the exponents of the
//! block differ by at most `narrow`. If the exponents differ by more, but at most by `wide`, each square is split into
//! an upper and a lower part, and separate lanes add the two parts. Values that are too small even for split squares
//! are summed in another pass over the block. The exact sums of the lanes are then added to a number that is wide
//! enough for any sum (`Running`).

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

/// The number of elements whose squares the lanes add before the sums of the lanes go to `Running`.
const BLOCK: usize = 2048;
/// The number of float64 sums that are computed side by side. Each lane adds the squares of `BLOCK / LANES` elements of
/// a block.
const LANES: usize = 32;
/// The number of elements that four calls of `Columns::column` convert.
const GROUP: usize = 4 * LANES;
/// Each lane adds `2^LANE_BITS` squares per block.
const LANE_BITS: i32 = (BLOCK / LANES).ilog2().cast_signed();
/// The number of bits in the fraction of a float64.
const FRACTION: i32 = 52;

const INFINITY: u32 = 0x7F80_0000;

/// The result of one pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Check {
    /// True if at least one checked element is an infinity or a NaN. `check_and_unscale` checks each element
    /// after multiplying it by the factor.
    pub nonfinite: bool,
    /// The sum of the squares of the checked elements. It is infinity or NaN if `nonfinite` is true.
    pub squares: Squares,
}

impl Check {
    /// The result of a check of no elements.
    pub const NOTHING: Self = Self { nonfinite: false, squares: Squares::ZERO };

    /// Adds the result of a check of other elements.
    pub fn merge(&mut self, other: &Self) {
        self.nonfinite |= other.nonfinite;
        self.squares.merge(&other.squares);
    }
}

/// Checks `data` for infinities and NaNs and sums its squares, in one pass over memory.
#[must_use]
pub fn check(data: Floats<'_>, exec: Exec) -> Check {
    for_type!(Floats, data, data => pass(Data::Read(data), exec))
}

/// Multiplies `data` by `factor` in place, with one rounding, and checks the products in the same pass. Writes nothing
/// if `factor` is 1.
///
/// # Errors
/// If `factor` is not finite.
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

/// The elements of a pass. `Read` only reads them. `Scale` first multiplies them in place by a factor.
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
    /// (bits of the largest magnitude, sum of squares). The sum is valid only if the largest magnitude is finite.
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
                    // The block stays in the L1 cache between this loop and `add`.
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

/// The running result of a part of the work.
struct Sum {
    squares: Running,
    peak: u32,
}

impl Sum {
    /// Adds the squares of at most one block of elements; pads a shorter slice with zeros.
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
                self.squares.add(if all {
                    lane_gain_from(squares, from, power)
                } else {
                    sum_squares_up_to(block, peak, power)
                });
                return;
            }
            let least = (exponent(peak) - wide::<T>()).max(1);
            let floor = if least == 1 { 0 } else { least.unsigned_abs() << 23 };
            let parts = if all && low >= floor {
                sum_split_squares::<T, true>(block, low, peak)
            } else {
                sum_split_squares::<T, false>(block, floor, peak)
            };
            for part in parts {
                self.squares.add(part);
            }
            // The next iteration sums the squares of the values below `floor`, which are too small for these lanes.
            peak = if low < floor { peak_below(block, floor) } else { 0 };
            all = false;
        }
    }
}

/// If the exponents of a block differ by at most this number, lanes add whole squares without rounding. If E is the
/// largest exponent and e the smallest exponent field, all squares are multiples of `2^grid(e)` and below `2^(2E + 2)`.
/// See [Note: exact lanes].
const fn narrow<T: Element>() -> i32 {
    (FRACTION - LANE_BITS - 2 * T::PRECISION).div_euclid(2)
}

/// If the exponents of a block differ by at most this number, lanes add split squares without rounding. With E as the
/// largest exponent, the upper part of a square is a multiple of g = 2^(2E + 2 + 6 - 52). The 6 is in the formula
/// because a lane adds 2^6 upper parts. The lower part is at most g / 2.
const fn wide<T: Element>() -> i32 {
    FRACTION - LANE_BITS - T::PRECISION
}

/// Returns p such that `2^p` divides the square of every number whose exponent field is at least `exponent`.
const fn grid<T: Element>(exponent: i32) -> i32 {
    2 * (exponent - 127) - 2 * (T::PRECISION - 1)
}

/// Returns the power of two whose last bit, as a float64, weighs `2^power`. A sum that starts from this float64 is a
/// multiple of `2^power`.
#[inline(always)]
fn origin(power: i32) -> f64 {
    power_of_two(power + FRACTION)
}

/// Returns how much the lanes have gained since they started at `from`, as (count, power). The count is the gain in
/// units of the last bit of `from`. This unit must be `2^power`, times the scale of the squares that the lanes added.
#[inline(always)]
fn lane_gain(lanes: &[f64; LANES], from: f64, power: i32) -> (i64, i32) {
    let mut sums = [0_i64; 8];
    for lanes in lanes.as_chunks::<8>().0 {
        for (sum, lane) in sums.iter_mut().zip(lanes) {
            *sum += lane.to_bits().wrapping_sub(from.to_bits()).cast_signed();
        }
    }
    (sums.iter().sum(), power)
}

/// Returns [`lane_gain`] of lanes that began with zero. Adding `from` drops the squares of the tiny numbers that
/// `Bf16::column` returns for zeros: these squares are below half of the last bit of `from`.
#[inline(always)]
fn lane_gain_from(mut lanes: [f64; LANES], from: f64, power: i32) -> (i64, i32) {
    for lane in &mut lanes {
        *lane += from;
    }
    lane_gain(&lanes, from, power)
}

/// Returns the exponent field of a magnitude. Returns 1 for a denormal, because denormals have the scale of exponent
/// field 1.
#[inline(always)]
fn exponent(magnitude: u32) -> i32 {
    (magnitude >> 23).cast_signed().max(1)
}

/// The range of magnitudes of a block and the sums of its squares, from one pass.
struct Survey {
    /// Bits of the largest magnitude.
    peak: u32,
    /// Bits of the smallest magnitude that is not zero.
    low: u32,
    /// The sum of the squares of each lane. A sum may be inexact if the exponents of the block are too far apart. For
    /// fp32, `narrow` is negative: no exponents are close enough, so `survey` leaves all sums zero.
    squares: [f64; LANES],
}

#[inline(always)]
fn survey<T: Columns>(block: &[T; BLOCK]) -> Survey {
    let mut peaks = [T::Key::default(); LANES];
    // `lows` has negated keys. The largest negated key belongs to the smallest magnitude that is not zero.
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

/// Returns the largest key. `black_box` hides the later use of the key from LLVM, which otherwise extracts and compares
/// every element one by one.
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

/// Returns the bits of the largest magnitude below `end`.
#[inline(always)]
fn peak_below<T: Element>(block: &[T; BLOCK], end: u32) -> u32 {
    let mut peak = 0;
    for value in block {
        let bits = value.magnitude().to_bits();
        peak = peak.max(if bits < end { bits } else { 0 });
    }
    peak
}

/// Returns the sum of the squares of magnitudes up to `peak`. All of these squares must be multiples of `2^power`.
#[inline(always)]
fn sum_squares_up_to<T: Element>(block: &[T; BLOCK], peak: u32, power: i32) -> (i64, i32) {
    let from = origin(power);
    let mut squares = [from; LANES];
    for group in block.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let value = inside(group[lane], 0, peak);
            squares[lane] = value.mul_add(value, squares[lane]);
        }
    }
    lane_gain(&squares, from, power)
}

/// Squares the elements whose magnitudes are from `floor` to `peak`. Returns the sum of the upper parts and the sum of
/// the lower parts of these squares. With `ALL`, all magnitudes of the block except zeros must be in that range.
#[inline(always)]
fn sum_split_squares<T: Columns, const ALL: bool>(block: &[T; BLOCK], floor: u32, peak: u32) -> [(i64, i32); 2] {
    let scale = if ALL { 2 * T::SCALE } else { 0 };
    let (coarse, fine) = (2 * (exponent(peak) - 127) + 2 + LANE_BITS - FRACTION, grid::<T>(exponent(floor)));
    // Lower parts may be negative, so their sums start from `lower`, 1.5 times a power of two. From 2/3 to 4/3 of
    // `lower`, the last bit of a float64 always has the same weight.
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
    [lane_gain(&sums[0], upper, coarse), lane_gain(&sums[1], lower, fine)]
}

/// Returns the magnitude of `value`, or zero if the magnitude is outside `floor..=peak`.
#[inline(always)]
fn inside<T: Element>(value: T, floor: u32, peak: u32) -> f64 {
    let value = value.magnitude();
    f64::from(if value.to_bits() >= floor && value.to_bits() <= peak { value } else { 0.0 })
}

/// Cheap conversions of elements, for the inner loops.
trait Columns: Element {
    /// The bits of a magnitude as an integer. A larger magnitude has a larger key.
    type Key: Copy + Default + Ord + Neg<Output = Self::Key>;
    /// `column` returns elements times `2^SCALE`.
    const SCALE: i32;
    /// The smallest exponent field for which `column` is accurate enough. `Bf16::column` converts a zero to a tiny
    /// number. Adding the square of this tiny number to the square of an element with this exponent field changes no
    /// bit.
    const LEAST: i32;

    fn key(self) -> Self::Key;

    /// Returns the fp32 bits of the magnitude that `key` stands for.
    fn bits(key: Self::Key) -> u32;

    /// Converts a quarter of a group's elements to float64. The signs may be wrong, because only squares count.
    /// Infinities and NaNs may become any value.
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
    // `spread` adds 768 to the exponent field. The number 768 has no bit in common with an 8-bit exponent field, so `|`
    // adds the two.
    const SCALE: i32 = 768 - 1023 + 127;
    // `column` turns zero into 2^-255. A lane adds at most 2^6 squares of this number, which sum to 2^-504. This is
    // less than half the last bit of 2^-446, the square of the smallest number with the exponent field `LEAST`.
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
        // `denormal`, twice the value minus the implicit leading bit, is right for zeros and denormals. For normal
        // numbers, `denormal` is at least the value. So the smaller of `denormal` and the value is right.
        let mut column = spread::<_, K, 10>(group, 992);
        for value in &mut column {
            let denormal = value.mul_add(2.0, -power_of_two(-30));
            *value = if denormal < *value { denormal } else { *value };
        }
        column
    }
}

/// Converts 16-bit floats with F bits of fraction to float64. Drops the signs, and adds `bias` to the exponent fields.
/// Each of the four elements of a 64-bit word needs a shift and a mask. Widening would need shuffles, and many of
/// Intel's processors do only one shuffle per cycle. The results for zeros and denormals are wrong: they contain the
/// implicit leading bit, which only normal numbers have.
#[inline(always)]
fn spread<T: Element, const K: usize, const F: usize>(group: &[T; GROUP], bias: u64) -> [f64; LANES] {
    const { assert!(size_of::<T>() == 2) };
    // SAFETY: the group has the same number of bytes as the array. `read_unaligned` needs no alignment, and any bytes
    // are valid `u64`s.
    let words = unsafe { group.as_ptr().cast::<[u64; LANES]>().read_unaligned() };
    let (up, down) = ((52 - F).saturating_sub(16 * K), (16 * K).saturating_sub(52 - F));
    let mut column = [0.0; LANES];
    for lane in 0..LANES {
        column[lane] = f64::from_bits(words[lane] << up >> down & 0x7FFF << (52 - F) | bias << 52);
    }
    column
}
