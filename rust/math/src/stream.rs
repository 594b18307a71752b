//! Writes output past the caches, where nobody reads it soon.
//!
//! A normal store to a line that is not cached reads the line first. For a large output that is a third stream of
//! memory traffic for nothing. Blocks are computed into a buffer on the stack and copied out with non-temporal stores.

use crate::Element;

/// Calls on fewer elements than this write through the caches: their output may well be read from there.
pub const STREAM_ELEMENTS_MIN: usize = 1 << 20;

/// Elements a block has. Measured: 128 and 4096 are slower by a tenth and more, reading or writing in longer turns.
const BLOCK: usize = 512;

/// What non-temporal stores work on without leaving parts of a line behind.
const LINE_BYTES: usize = 64;

/// One block, aligned like the lines that it is copied to.
#[repr(C, align(64))]
struct Buffer<T>([T; BLOCK]);

/// What computes an output. `fill` must be `#[inline(always)]`, which a closure cannot be: not inlined, it would be
/// compiled for the baseline.
pub(crate) trait Fill<T> {
    /// Computes the elements of the output from `start` on into `out`.
    fn fill(&mut self, start: usize, out: &mut [T]);
}

/// Fills consecutive slices of `out`, or a buffer that is then streamed to its place.
#[inline(always)]
pub(crate) fn store<T: Element>(out: &mut [T], streaming: bool, mut source: impl Fill<T>) {
    let streaming = streaming && cfg!(target_arch = "x86_64");
    let mut buffer = Buffer([T::default(); BLOCK]);
    let mut start = 0;
    while start < out.len() {
        let rest = &mut out[start..];
        let before_line = rest.as_ptr().align_offset(LINE_BYTES);
        let through = streaming && before_line == 0 && rest.len() >= BLOCK;
        let direct = if streaming && before_line > 0 { before_line.min(rest.len()) } else { rest.len() };
        let count = if through { BLOCK } else { direct };
        source.fill(start, if through { &mut buffer.0 } else { &mut rest[..count] });
        if through {
            copy_past_caches(&mut rest[..BLOCK], &buffer);
        }
        start += count;
    }
    if streaming {
        fence();
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn copy_past_caches<T: Element>(out: &mut [T], buffer: &Buffer<T>) {
    use std::arch::x86_64::{__m128i, _mm_stream_si128};

    // SAFETY: any bytes of these types are a `__m128i`.
    let (_, from, _) = unsafe { buffer.0.align_to::<__m128i>() };
    // SAFETY: any bytes of a `__m128i` are elements of these types.
    let (before, to, after) = unsafe { out.align_to_mut::<__m128i>() };
    assert!(before.is_empty() && after.is_empty() && from.len() == to.len());
    for (to, from) in to.iter_mut().zip(from) {
        // SAFETY: a reference is valid and aligned; SSE2 is part of x86-64.
        unsafe { _mm_stream_si128(to, *from) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_past_caches<T: Element>(out: &mut [T], buffer: &Buffer<T>) {
    out.copy_from_slice(&buffer.0);
}

/// Orders the streamed stores before whatever tells another thread that they are there.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {}
