//! Defines the memory that an operation may own.

use std::{ptr::NonNull, sync::Arc};

use memascend_mem::Lease;

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

/// A range of a lease that is shared. Clones and parts are the same memory.
#[derive(Debug)]
pub struct Shared<B = Lease> {
    memory: Arc<B>,
    /// Of this part.
    first: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory may go to other threads and be shared by them, and `first` is a place in it.
unsafe impl<B: Send + Sync> Send for Shared<B> {}
// SAFETY: as above.
unsafe impl<B: Send + Sync> Sync for Shared<B> {}

impl<B> Clone for Shared<B> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), first: self.first, bytes: self.bytes }
    }
}

impl<B: Buffer + Sync> Shared<B> {
    /// The whole of a lease.
    #[must_use]
    pub fn new(mut memory: B) -> Self {
        // Taken while it is ours alone, so that it is one to write to.
        let (first, bytes) = (memory.as_mut_ptr(), memory.len());
        Self { memory: Arc::new(memory), first, bytes }
    }

    /// `nbytes` from `start` on; `None` where that is not inside.
    #[must_use]
    pub fn part(&self, start: usize, nbytes: usize) -> Option<Self> {
        let end = start.checked_add(nbytes)?;
        if end > self.bytes {
            return None;
        }
        // SAFETY: inside the memory, where this part is.
        let first = unsafe { self.first.add(start) };
        Some(Self { memory: Arc::clone(&self.memory), first, bytes: nbytes })
    }
}

impl<B> Shared<B> {
    /// The first byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.first
    }
}

// SAFETY: the memory stays where it is until its last part is dropped. Parts that overlap are the business of
// whoever made them: parts that are read into are disjoint, and nothing looks at a part before its read is done.
unsafe impl<B: Buffer + Sync> Buffer for Shared<B> {
    fn as_ptr(&self) -> *const u8 {
        self.first.as_ptr()
    }

    fn as_mut_ptr(&mut self) -> NonNull<u8> {
        self.first
    }

    fn len(&self) -> usize {
        self.bytes
    }
}
