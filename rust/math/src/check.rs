//! Checks gradients for overflow, sums their squares and unscales them in one pass.
//!
//! Squares are summed in fp32, in pairs of pairs, over blocks of 2,048 elements until 32 sums of 64 squares are left:
//! six roundings on the way of each. From there on float64 is used. A block whose largest magnitude is outside [2^-50, 2^50) is summed in float64 from the
//! start, so nothing overflows or vanishes. The error stays below 7 * 2^-24 of the sum and in practice far below it, whatever the number of elements.
//! Blocks form spans, whose size depends on the length alone; spans are added in order. The bits therefore do not
//! depend on threads or instruction set.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{
    Element, Error, Exec, Floats, FloatsMut, Result,
    exec::Work,
    fused::Fused,
    simd::{Kernel, Simd},
};

/// Elements that are summed in fp32 before float64 takes over, as rows of columns.
const BLOCK: usize = 2048;
/// Sums in float64 that run side by side, one for so many columns.
const LANES: usize = 32;
/// The smallest span: what a thread takes at least.
const SPAN_MIN: usize = 1 << 16;
/// Partial results that a call keeps, on its stack: 16 KiB.
const SPANS_MAX: usize = 1024;

const INFINITY: u32 = 0x7F80_0000;
/// Largest magnitudes whose block fp32 can sum. From 2^-50 up, what vanishes below 2^-126 weighs nothing beside the
/// largest square; below 2^50, 2,048 squares stay under 2^111.
const SAFE: std::ops::Range<u32> = (127 - 50) << 23..(127 + 50) << 23;

/// What one pass found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Check {
    /// An infinity or a NaN is among the results.
    pub nonfinite: bool,
    /// The sum of the squares of the results; infinity or NaN where one of them is.
    pub squared_norm: f64,
}

/// Reads `data` once.
#[must_use]
pub fn check(data: Floats<'_>, exec: Exec) -> Check {
    match data {
        Floats::F32(data) => pass(Data::Read(data), exec),
        Floats::Bf16(data) => pass(Data::Read(data), exec),
        Floats::F16(data) => pass(Data::Read(data), exec),
    }
}

/// Multiplies `data` by `factor` in place, rounding once, and checks the results in the same pass. With a factor of 1
/// nothing is written.
pub fn check_and_unscale(data: FloatsMut<'_>, factor: f32, exec: Exec) -> Result<Check> {
    if !factor.is_finite() {
        return Err(Error::Number { name: "inv_scale", value: f64::from(factor), wanted: "a finite number" });
    }
    Ok(match data {
        FloatsMut::F32(data) => scaled(data, factor, exec),
        FloatsMut::Bf16(data) => scaled(data, factor, exec),
        FloatsMut::F16(data) => scaled(data, factor, exec),
    })
}

#[expect(clippy::float_cmp, reason = "exactly one means that there is nothing to multiply")]
fn scaled<T: Element>(data: &mut [T], factor: f32, exec: Exec) -> Check {
    pass(if factor == 1.0 { Data::Read(data) } else { Data::Scale(data, factor) }, exec)
}

/// Whether an infinity or a NaN is in `data`; stops reading soon after the first.
#[must_use]
pub fn has_nonfinite(data: Floats<'_>, exec: Exec) -> bool {
    match data {
        Floats::F32(data) => search(data, exec),
        Floats::Bf16(data) => search(data, exec),
        Floats::F16(data) => search(data, exec),
    }
}

/// What a pass goes over.
enum Data<'a, T> {
    Read(&'a [T]),
    Scale(&'a mut [T], f32),
}

impl<T: Element> Data<'_, T> {
    fn len(&self) -> usize {
        match self {
            Self::Read(data) => data.len(),
            Self::Scale(data, _) => data.len(),
        }
    }
}

/// One span's result.
#[derive(Clone, Copy)]
struct Partial {
    squares: f64,
    peak: u32,
}

fn pass<T: Element>(data: Data<'_, T>, exec: Exec) -> Check {
    let span = data.len().div_ceil(SPANS_MAX).next_multiple_of(BLOCK).max(SPAN_MIN);
    let mut partials = [Partial { squares: 0.0, peak: 0 }; SPANS_MAX];
    let used = &mut partials[..data.len().div_ceil(span)];
    exec.run(Spans { data, partials: used, span }, span, Simd::run);
    // In order: the sum does not depend on who computed what.
    let total = used_fold(used);
    Check { nonfinite: total.peak >= INFINITY, squared_norm: total.squares }
}

fn used_fold(partials: &[Partial]) -> Partial {
    let start = Partial { squares: 0.0, peak: 0 };
    partials.iter().fold(start, |a, b| Partial { squares: a.squares + b.squares, peak: a.peak.max(b.peak) })
}

/// Consecutive spans and the places of their results.
struct Spans<'a, T> {
    data: Data<'a, T>,
    partials: &'a mut [Partial],
    span: usize,
}

impl<T: Element> Work for Spans<'_, T> {
    fn len(&self) -> usize {
        self.data.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (left, right) = match self.data {
            Data::Read(data) => {
                let (left, right) = data.split_at(middle);
                (Data::Read(left), Data::Read(right))
            }
            Data::Scale(data, factor) => {
                let (left, right) = data.split_at_mut(middle);
                (Data::Scale(left, factor), Data::Scale(right, factor))
            }
        };
        let (first, second) = self.partials.split_at_mut(middle / self.span);
        (Self { data: left, partials: first, span: self.span }, Self { data: right, partials: second, span: self.span })
    }
}

impl<T: Element> Kernel for Spans<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<F: Fused>(self) {
        match self.data {
            Data::Read(data) => {
                for (piece, partial) in data.chunks(self.span).zip(self.partials) {
                    let mut sum = Sum::new();
                    for block in piece.chunks(BLOCK) {
                        sum.add(block);
                    }
                    *partial = sum.finish();
                }
            }
            Data::Scale(data, factor) => {
                for (piece, partial) in data.chunks_mut(self.span).zip(self.partials) {
                    let mut sum = Sum::new();
                    for block in piece.chunks_mut(BLOCK) {
                        // The block stays in the first-level cache between the two loops.
                        for value in &mut *block {
                            *value = T::from_f32(value.to_f32() * factor);
                        }
                        sum.add(block);
                    }
                    *partial = sum.finish();
                }
            }
        }
    }
}

/// The running sum of a span.
struct Sum {
    squares: [f64; LANES],
    peak: u32,
}

impl Sum {
    #[inline(always)]
    fn new() -> Self {
        Self { squares: [0.0; LANES], peak: 0 }
    }

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
        let mut squares = [0.0_f32; LANES];
        let mut peaks = [0_u32; LANES];
        for group in block.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                let value = group[lane].magnitude();
                squares[lane] += value * value;
                peaks[lane] = peaks[lane].max(value.to_bits());
            }
        }
        let peak = peaks.iter().fold(0, |a, &b| a.max(b));
        self.peak = self.peak.max(peak);
        if SAFE.contains(&peak) || peak >= INFINITY {
            for lane in 0..LANES {
                self.squares[lane] += f64::from(squares[lane]);
            }
        } else if peak > 0 {
            for group in block.as_chunks::<LANES>().0 {
                for lane in 0..LANES {
                    let value = f64::from(group[lane].magnitude());
                    self.squares[lane] += value * value;
                }
            }
        }
    }

    #[inline(always)]
    fn finish(self) -> Partial {
        Partial { squares: self.squares.iter().sum(), peak: self.peak }
    }
}

fn search<T: Element>(data: &[T], exec: Exec) -> bool {
    let found = AtomicBool::new(false);
    exec.run(data, BLOCK, |simd, part| {
        if !found.load(Ordering::Relaxed) && simd.run(Search { data: part, found: &found }) {
            found.store(true, Ordering::Relaxed);
        }
    });
    found.into_inner()
}

impl<T: Element> Work for &[T] {
    fn len(&self) -> usize {
        <[T]>::len(self)
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        <[T]>::split_at(self, middle)
    }
}

struct Search<'a, T> {
    data: &'a [T],
    found: &'a AtomicBool,
}

impl<T: Element> Kernel for Search<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn run<F: Fused>(self) -> bool {
        self.data.chunks(BLOCK).any(|block| {
            let peak = block.iter().fold(0, |peak: u32, value| peak.max(value.magnitude().to_bits()));
            peak >= INFINITY || self.found.load(Ordering::Relaxed)
        })
    }
}
