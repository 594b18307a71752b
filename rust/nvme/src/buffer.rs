//! Defines the memory that an operation may own.

use std::ptr::NonNull;

use memascend_mem::Lease;

use crate::{Error, Result};

/// Memory that goes into an operation by value and comes back when the kernel is done with it.
///
/// # Safety
/// From the moment it is handed over until it is dropped or handed back, the bytes at `as_ptr()` up to `len()` must
/// stay mapped at that address, also while the value itself moves, and nothing else may touch them except as the
/// implementor's own contract allows. `as_mut_ptr()` is the same address. For reads from a device they must be writable.
pub unsafe trait Buffer: Send + 'static {
    /// The first byte, to read from.
    fn as_ptr(&self) -> *const u8;
    /// The first byte, to write to; the pointer stays good for that while the value moves.
    fn as_mut_ptr(&mut self) -> NonNull<u8>;
    /// How many bytes.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

// SAFETY: a lease's slot stays where it is and is the lease's alone until it is dropped.
unsafe impl Buffer for Lease {
    fn as_ptr(&self) -> *const u8 {
        Lease::as_ptr(self).as_ptr()
    }

    fn as_mut_ptr(&mut self) -> NonNull<u8> {
        Lease::as_ptr(self)
    }

    fn len(&self) -> usize {
        Lease::len(self)
    }
}

// SAFETY: a vector's heap bytes do not move with it, and it is owned meanwhile.
unsafe impl Buffer for Vec<u8> {
    fn as_ptr(&self) -> *const u8 {
        Vec::as_ptr(self)
    }

    fn as_mut_ptr(&mut self) -> NonNull<u8> {
        NonNull::from(self.as_mut_slice()).cast()
    }

    fn len(&self) -> usize {
        Vec::len(self)
    }
}

/// A range of a buffer, for operations on a part of it.
#[derive(Debug)]
pub struct Part<B> {
    buffer: B,
    start: usize,
    bytes: usize,
}

impl<B: Buffer> Part<B> {
    /// `nbytes` of `buffer` from `start` on.
    pub fn new(buffer: B, start: usize, nbytes: usize) -> Result<Self> {
        if start.checked_add(nbytes).is_none_or(|end| end > buffer.len()) {
            let len = buffer.len();
            return Err(Error::Invalid(format!("{nbytes} bytes from {start} on are not in a buffer of {len} bytes")));
        }
        Ok(Self { buffer, start, bytes: nbytes })
    }

    /// The whole buffer again.
    #[must_use]
    pub fn into_inner(self) -> B {
        self.buffer
    }
}

// SAFETY: the range lies inside the buffer, whose own promise this is.
unsafe impl<B: Buffer> Buffer for Part<B> {
    fn as_ptr(&self) -> *const u8 {
        // SAFETY: `start` is at most the buffer's length.
        unsafe { self.buffer.as_ptr().add(self.start) }
    }

    fn as_mut_ptr(&mut self) -> NonNull<u8> {
        // SAFETY: as above.
        unsafe { self.buffer.as_mut_ptr().add(self.start) }
    }

    fn len(&self) -> usize {
        self.bytes
    }
}
