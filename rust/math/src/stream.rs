//! Writes large outputs past the caches.
//!
//! Before a normal write to a line that is not cached, the processor reads the line, which costs memory bandwidth. So
//! on x86-64 and if `streaming` is true, `store` computes blocks in a buffer on the stack, and copies the blocks to the
//! output with non-temporal writes.

use crate::Element;

/// `adam` uses normal writes for an output with fewer elements, because a reader may soon find it in the caches.
pub const STREAM_ELEMENTS_MIN: usize = 1 << 20;

/// Elements of a block. In measurements, 128 and 4096 were slower by a tenth or more.
const BLOCK: usize = 512;

/// The size of a cache line. Non-temporal writes are fast only if they cover whole cache lines.
const LINE_BYTES: usize = 64;

/// A block, aligned to cache lines.
#[repr(C, align(64))]
struct Buffer<T>([T; BLOCK]);

/// Computes an output. This is a trait and not a closure, because `fill` must be `#[inline(always)]`: a function that
/// is not inlined is compiled for the baseline instruction set.
pub(crate) trait Fill<T> {
    /// Computes `out.len()` elements of the output, beginning at element `start`, into `out`.
    fn fill(&mut self, start: usize, out: &mut [T]);
}

/// Computes all of `out`. On x86-64 and if `streaming` is true, writes whole blocks past the caches, and the elements
/// before and after these blocks normally.
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

    // SAFETY: any bytes of an element type are a valid `__m128i`.
    let (_, from, _) = unsafe { buffer.0.align_to::<__m128i>() };
    // SAFETY: any bytes of a `__m128i` are valid elements.
    let (before, to, after) = unsafe { out.align_to_mut::<__m128i>() };
    assert!(before.is_empty() && after.is_empty() && from.len() == to.len());
    for (to, from) in to.iter_mut().zip(from) {
        // SAFETY: `to` is valid and aligned, as a reference is; SSE2 is part of x86-64.
        unsafe { _mm_stream_si128(to, *from) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_past_caches<T: Element>(out: &mut [T], buffer: &Buffer<T>) {
    out.copy_from_slice(&buffer.0);
}

/// Orders the non-temporal writes before any later write that publishes the output to another thread.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn fence() {}
