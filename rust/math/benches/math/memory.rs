//! Allocates memory for the benchmark, and runs loops that only move bytes.

#![expect(clippy::inline_always, reason = "code that is not inlined is compiled for the oldest processors")]

use std::{
    hint::black_box,
    ops::{Deref, DerefMut},
    slice, thread,
};

const HUGE: usize = 2 << 20;

/// An array, on huge pages if the system provides them. Each array starts at a different offset from a multiple of
/// 2 MiB. If the addresses of arrays differ by a multiple of 2 MiB, the arrays share cache sets, and the loops run
/// several times slower.
pub(super) struct Buffer<T> {
    mapping: *mut u8,
    mapped_bytes: usize,
    start: *mut T,
    len: usize,
}

impl<T: Copy> Buffer<T> {
    pub(super) fn new(len: usize, index: usize, value: T) -> Self {
        let offset = index * 17 * 4096;
        let mapped_bytes = len * size_of::<T>() + offset + HUGE;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new private mapping does not affect existing memory.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, flags, -1, 0) };
        assert!(mapping != libc::MAP_FAILED, "mmap gave the benchmark no memory for a buffer: pass a smaller MILLIONS");
        // SAFETY: the range is the new mapping. If the advice fails, the benchmark is slower and still correct.
        unsafe { libc::madvise(mapping, mapped_bytes, libc::MADV_HUGEPAGE) };
        let mapping = mapping.cast::<u8>();
        // SAFETY: the mapping has room for the elements, for `offset` bytes, and for `HUGE` bytes of alignment.
        let start = unsafe { mapping.add(mapping.align_offset(HUGE) + offset) };
        let mut buffer = Self { mapping, mapped_bytes, start: start.cast(), len };
        buffer.fill(value);
        buffer
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping. Its slices borrow the buffer, so no slice exists any more.
        unsafe { libc::munmap(self.mapping.cast(), self.mapped_bytes) };
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the range is inside the mapping. The system has filled the mapping with zeros, and any bits are valid
        // elements.
        unsafe { slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the range is valid for the reasons that `deref` gives. `&mut self` makes the borrow unique.
        unsafe { slice::from_raw_parts_mut(self.start, self.len) }
    }
}

type Line = [u64; 8];

fn lines<T>(data: &[T]) -> &[Line] {
    // SAFETY: any bytes are a valid `Line`. Buffers start at a page, so the aligned part is the whole buffer.
    unsafe { data.align_to() }.1
}

fn lines_mut<T>(data: &mut [T]) -> &mut [Line] {
    // SAFETY: any bytes are a valid `Line`, and any bytes are valid elements of a buffer.
    unsafe { data.align_to_mut() }.1
}

/// Reads all data.
pub(super) fn read<T: Sync>(data: &[T], threads: usize) {
    let lines = lines(data);
    thread::scope(|scope| {
        for part in lines.chunks(lines.len().div_ceil(threads)) {
            scope.spawn(move || black_box(wide(|| read_part(part))));
        }
    });
}

#[inline(always)]
fn read_part(lines: &[Line]) -> u64 {
    // Combines four lines with four separate sums in each iteration. With one sum, each operation would wait for the
    // previous operation.
    let mut sums = [[0_u64; 8]; 4];
    for group in lines.chunks_exact(4) {
        for (sums, line) in sums.iter_mut().zip(group) {
            for (sum, word) in sums.iter_mut().zip(line) {
                *sum |= word;
            }
        }
    }
    sums.as_flattened().iter().fold(0, |all, word| all | word)
}

/// Reads all data, and writes it back to the same place.
pub(super) fn rewrite<T: Send>(data: &mut [T], threads: usize) {
    let (lines, nothing) = (lines_mut(data), black_box(0));
    let share = lines.len().div_ceil(threads);
    thread::scope(|scope| {
        for part in lines.chunks_mut(share) {
            scope.spawn(move || wide(|| part.as_flattened_mut().iter_mut().for_each(|word| *word ^= nothing)));
        }
    });
}

/// Causes the memory traffic of an optimizer step. Reads and rewrites the three arrays of `state`, reads `grad`, and
/// writes `out`; on x86-64, these writes bypass the caches.
pub(super) fn streams(state: [&mut [f32]; 3], grad: &[impl Sync], out: &mut [impl Send], threads: usize) {
    let nothing = black_box(0);
    let [p, m, v] = state.map(lines_mut);
    let (grad, out) = (lines(grad), lines_mut(out));
    let share = grad.len().div_ceil(threads);
    thread::scope(|scope| {
        let state = p.chunks_mut(2 * share).zip(m.chunks_mut(2 * share)).zip(v.chunks_mut(2 * share));
        for (((p, m), v), (grad, out)) in state.zip(grad.chunks(share).zip(out.chunks_mut(share))) {
            scope.spawn(move || wide(|| streams_part([p, m, v], grad, out, nothing)));
        }
    });
}

#[inline(always)]
fn streams_part(state: [&mut [Line]; 3], grad: &[Line], out: &mut [Line], nothing: u64) {
    let [p, m, v] = state.map(|data| data.chunks_exact_mut(2));
    for (((p, m), v), (grad, out)) in p.zip(m).zip(v).zip(grad.iter().zip(out)) {
        for data in [p, m, v] {
            data.as_flattened_mut().iter_mut().for_each(|word| *word ^= nothing);
        }
        past_caches(out, *grad);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn past_caches(out: &mut Line, line: Line) {
    use std::arch::x86_64::{__m128i, _mm_stream_si128};

    // SAFETY: both types are 64 bytes of plain integers.
    let parts = unsafe { std::mem::transmute::<Line, [__m128i; 4]>(line) };
    // SAFETY: any bytes are valid `__m128i`s. Buffers start at a page, so the aligned part is all 64 bytes.
    let (_, to, _) = unsafe { out.align_to_mut::<__m128i>() };
    for (to, part) in to.iter_mut().zip(parts) {
        // SAFETY: `to` is a reference, so its address is valid and aligned. Every x86-64 processor has SSE2.
        unsafe { _mm_stream_si128(to, part) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn past_caches(out: &mut Line, line: Line) {
    *out = line;
}

/// Runs the copy of `work` that is compiled for the widest vector registers of this processor. `work` must be inlined.
fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        fn avx512<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        #[target_feature(enable = "avx2")]
        fn avx2<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            // SAFETY: the processor has avx512bw and avx512vl, as detected above, and both include avx512f.
            return unsafe { avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, as detected above.
            return unsafe { avx2(work) };
        }
    }
    work()
}
