//! Casts between fp32 and the 16-bit types at the speed of a copy.

use crate::{
    Bf16, Element, Error, Exec, F16, Floats, FloatsMut, Result, STREAM_ELEMENTS_MIN,
    exec::Work,
    fused::{Fused, HALVES},
    simd::{Kernel, Simd},
    stream::{self, Fill},
};

/// Where parts are cut: a multiple of the lines of every type.
const GRAIN: usize = 1024;

/// Writes `source` to `out`, rounded to nearest even; at least one of the two is fp32.
pub fn cast(source: Floats<'_>, out: FloatsMut<'_>, exec: Exec) -> Result<()> {
    match (source, out) {
        (Floats::F32(source), FloatsMut::F32(out)) => moved(source, out, exec),
        (Floats::F32(source), FloatsMut::Bf16(out)) => moved(source, out, exec),
        (Floats::F32(source), FloatsMut::F16(out)) => moved(source, out, exec),
        (Floats::Bf16(source), FloatsMut::F32(out)) => moved(source, out, exec),
        (Floats::F16(source), FloatsMut::F32(out)) => moved(source, out, exec),
        (Floats::Bf16(_), FloatsMut::Bf16(_)) => Err(Error::Cast { from: Bf16::NAME, to: Bf16::NAME }),
        (Floats::Bf16(_), FloatsMut::F16(_)) => Err(Error::Cast { from: Bf16::NAME, to: F16::NAME }),
        (Floats::F16(_), FloatsMut::Bf16(_)) => Err(Error::Cast { from: F16::NAME, to: Bf16::NAME }),
        (Floats::F16(_), FloatsMut::F16(_)) => Err(Error::Cast { from: F16::NAME, to: F16::NAME }),
    }
}

fn moved<S: Convert<O>, O: Element>(source: &[S], out: &mut [O], exec: Exec) -> Result<()> {
    if source.len() != out.len() {
        return Err(Error::Length { name: "source", len: source.len(), other: "out", other_len: out.len() });
    }
    let streaming = out.len() >= STREAM_ELEMENTS_MIN;
    exec.run(Cast { source, out, streaming }, GRAIN, Simd::run);
    Ok(())
}

struct Cast<'a, S, O> {
    source: &'a [S],
    out: &'a mut [O],
    streaming: bool,
}

impl<S: Element, O: Element> Work for Cast<'_, S, O> {
    fn len(&self) -> usize {
        self.source.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (source, source_after) = self.source.split_at(middle);
        let (out, out_after) = self.out.split_at_mut(middle);
        (Self { source, out, ..self }, Self { source: source_after, out: out_after, ..self })
    }
}

impl<S: Convert<O>, O: Element> Kernel for Cast<'_, S, O> {
    type Output = ();

    #[inline(always)]
    fn run<F: Fused>(self) {
        stream::store::<F, O>(self.out, self.streaming, self.source);
    }
}

impl<S: Convert<O>, O: Element> Fill<O> for &[S] {
    #[inline(always)]
    fn fill<F: Fused>(&mut self, start: usize, out: &mut [O]) {
        let source = &self[start..];
        S::convert::<F>(&source[..out.len()], out);
    }
}

/// A type whose slices are cast to slices of another.
trait Convert<O: Element>: Element {
    /// Of equal lengths.
    #[inline(always)]
    fn convert<F: Fused>(source: &[Self], out: &mut [O]) {
        for (out, value) in out.iter_mut().zip(source) {
            *out = O::from_f32(value.to_f32());
        }
    }
}

impl Convert<Self> for f32 {}
impl Convert<Bf16> for f32 {}
impl Convert<f32> for Bf16 {}

impl Convert<F16> for f32 {
    #[inline(always)]
    fn convert<F: Fused>(source: &[Self], out: &mut [F16]) {
        let (groups, rest) = source.as_chunks();
        let (out_groups, out_rest) = out.as_chunks_mut::<HALVES>();
        for (out, group) in out_groups.iter_mut().zip(groups) {
            *out = F::narrow(group);
        }
        for (out, value) in out_rest.iter_mut().zip(rest) {
            *out = F16::from_f32(*value);
        }
    }
}

impl Convert<f32> for F16 {
    #[inline(always)]
    fn convert<F: Fused>(source: &[Self], out: &mut [f32]) {
        let (groups, rest) = source.as_chunks();
        let (out_groups, out_rest) = out.as_chunks_mut::<HALVES>();
        for (out, group) in out_groups.iter_mut().zip(groups) {
            *out = F::widen(group);
        }
        for (out, value) in out_rest.iter_mut().zip(rest) {
            *out = value.to_f32();
        }
    }
}
