//! Adds and scales in place as torch does: computes in fp32, and rounds once to the type of the tensor.

use crate::{
    Element, Error, Exec, Floats, FloatsMut, Result,
    element::for_type,
    exec::Work,
    simd::{Kernel, Simd},
};

/// `Exec::run` splits work at multiples of this many elements. For every type, this many elements fill whole cache
/// lines.
const GRAIN: usize = 1024;

/// Computes `total += other`, rounded once to the type of `total`, like torch's `total.add_(other)`.
pub fn add(total: FloatsMut<'_>, other: Floats<'_>, exec: Exec) -> Result<()> {
    for_type!(FloatsMut, total, total => for_type!(Floats, other, other => added(total, other, exec)))
}

fn added<T: Element, O: Element>(total: &mut [T], other: &[O], exec: Exec) -> Result<()> {
    if other.len() != total.len() {
        return Err(Error::Length { name: "other", len: other.len(), other: "total", other_len: total.len() });
    }
    exec.run(Sum { total, other }, GRAIN, Simd::run);
    Ok(())
}

/// Computes `data *= factor`, rounded once to the type of `data`, like torch's `data.mul_(factor)`. Accepts any factor,
/// even NaN.
pub fn scale(data: FloatsMut<'_>, factor: f32, exec: Exec) {
    for_type!(FloatsMut, data, data => exec.run(Product { data, factor }, GRAIN, Simd::run));
}

struct Sum<'a, T, O> {
    total: &'a mut [T],
    other: &'a [O],
}

impl<T: Element, O: Element> Work for Sum<'_, T, O> {
    fn len(&self) -> usize {
        self.other.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (total, total_after) = self.total.split_at_mut(middle);
        let (other, other_after) = self.other.split_at(middle);
        (Self { total, other }, Self { total: total_after, other: other_after })
    }
}

impl<T: Element, O: Element> Kernel for Sum<'_, T, O> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (total, other) in self.total.iter_mut().zip(self.other) {
            *total = T::from_f32(total.to_f32() + other.to_f32());
        }
    }
}

struct Product<'a, T> {
    data: &'a mut [T],
    factor: f32,
}

impl<T: Element> Work for Product<'_, T> {
    fn len(&self) -> usize {
        self.data.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (data, after) = self.data.split_at_mut(middle);
        (Self { data, ..self }, Self { data: after, ..self })
    }
}

impl<T: Element> Kernel for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for value in self.data {
            *value = T::from_f32(value.to_f32() * self.factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::{Bf16, F16};

    fn all_sums<T: Element + PartialEq + std::fmt::Debug>(
        of: fn(u16) -> T,
        wrap: for<'a> fn(&'a mut [T]) -> FloatsMut<'a>,
        view: for<'a> fn(&'a [T]) -> Floats<'a>,
    ) {
        let data: Vec<T> = (0..=u16::MAX).map(of).collect();
        for simd in Simd::available() {
            let exec = Exec::new(NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}")).with_simd(simd);
            for shift in [0, 1, 77, 30_001] {
                let other: Vec<T> = (0..data.len()).map(|i| data[(i * 7 + shift) % data.len()]).collect();
                let mut total = data.clone();
                assert_eq!(add(wrap(&mut total), view(&other), exec), Ok(()));
                for ((got, one), two) in total.iter().zip(&data).zip(&other) {
                    let wanted = T::from_f32(one.to_f32() + two.to_f32());
                    assert!(*got == wanted || got.to_f32().is_nan() && wanted.to_f32().is_nan(), "{one:?} + {two:?}");
                }
            }
            for factor in [0.3, -1.0, 1e30, f32::NAN, f32::INFINITY] {
                let mut scaled = data.clone();
                scale(wrap(&mut scaled), factor, exec);
                for (got, one) in scaled.iter().zip(&data) {
                    let wanted = T::from_f32(one.to_f32() * factor);
                    assert!(*got == wanted || got.to_f32().is_nan() && wanted.to_f32().is_nan(), "{one:?} * {factor}");
                }
            }
        }
    }

    #[test]
    fn add_and_scale_round_each_16_bit_value_once() {
        all_sums(Bf16, |data| FloatsMut::Bf16(data), |data| Floats::Bf16(data));
        all_sums(F16, |data| FloatsMut::F16(data), |data| Floats::F16(data));
    }

    #[test]
    fn add_rejects_slices_of_different_lengths() {
        let exec = Exec::new(NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}"));
        assert!(add(FloatsMut::F32(&mut [0.0; 3]), Floats::F32(&[0.0; 2]), exec).is_err());
    }
}
