//! Widens elements to fp32.

use crate::{
    Element, Error, Exec, Floats, Result,
    element::for_type,
    exec::Work,
    simd::{Kernel, Simd},
};

/// `Exec::run` splits work at multiples of this many elements. For every type, this many elements fill whole cache
/// lines.
const GRAIN: usize = 1024;

/// Writes `source` to `out`, converted to fp32.
pub fn widen(source: Floats<'_>, out: &mut [f32], exec: Exec) -> Result<()> {
    if source.len() != out.len() {
        return Err(Error::Length { name: "source", len: source.len(), other: "out", other_len: out.len() });
    }
    for_type!(Floats, source, source => exec.run(Widen { source, out }, GRAIN, Simd::run));
    Ok(())
}

struct Widen<'a, S> {
    source: &'a [S],
    out: &'a mut [f32],
}

impl<S: Element> Work for Widen<'_, S> {
    fn len(&self) -> usize {
        self.source.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (source, source_after) = self.source.split_at(middle);
        let (out, out_after) = self.out.split_at_mut(middle);
        (Self { source, out }, Self { source: source_after, out: out_after })
    }
}

impl<S: Element> Kernel for Widen<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (out, value) in self.out.iter_mut().zip(self.source) {
            *out = value.to_f32();
        }
    }
}
