//! The memory that an operation may own, such as a lease, a vector, or a range of a shared buffer.

use std::{ptr::NonNull, sync::Arc};

use memascend_mem::Lease;

/// Memory that a caller passes to an operation by value. The operation's ticket returns the memory once the kernel no
/// longer uses the memory.
///
/// # Safety
/// While an operation owns the value, the `len()` bytes from `as_ptr()` on must stay mapped at this address, even if
/// the value moves. Other code may access the bytes only as the documentation of the implementing type allows.
/// `as_mut_ptr()` must return the same address as `as_ptr()`. The bytes must be writable if they are the target of a
/// read.
pub unsafe trait Buffer: Send + 'static {
    /// A pointer to the first byte, for reading.
    fn as_ptr(&self) -> *const u8;
    /// A pointer to the first byte, for writing. The pointer stays valid for writes while the value moves.
    fn as_mut_ptr(&mut self) -> NonNull<u8>;
    /// The length in bytes.
    fn len(&self) -> usize;
    /// True if the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

// SAFETY: a lease's slot does not move, and the arena does not lease the slot to another caller until the lease is
// dropped.
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

// SAFETY: the bytes of a vector stay at their address when the vector moves, and the operation owns the vector.
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

/// A range of a buffer that several owners share. Clones and parts refer to the same memory. While a read from a device
/// into a part is in flight, no other operation and no other code may access the bytes of this part.
#[derive(Debug)]
pub struct Shared<B = Lease> {
    memory: Arc<B>,
    /// The first byte of this part.
    first: NonNull<u8>,
    bytes: usize,
}

// SAFETY: `B` may be sent to other threads and shared with them, and `first` points into `memory`.
unsafe impl<B: Send + Sync> Send for Shared<B> {}
// SAFETY: `B` may be shared with other threads, and `first` points into `memory`.
unsafe impl<B: Send + Sync> Sync for Shared<B> {}

impl<B> Clone for Shared<B> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), first: self.first, bytes: self.bytes }
    }
}

impl<B: Buffer + Sync> Shared<B> {
    /// Shares the whole of `memory`.
    #[must_use]
    pub fn new(mut memory: B) -> Self {
        // Takes the pointer before `Arc::new` shares `memory`: only a pointer from `&mut` may be used for writing.
        let (first, bytes) = (memory.as_mut_ptr(), memory.len());
        Self { memory: Arc::new(memory), first, bytes }
    }

    /// Returns the part of `nbytes` bytes that begins at `start`; `None` if that part would end after the end of
    /// `self`.
    #[must_use]
    pub fn part(&self, start: usize, nbytes: usize) -> Option<Self> {
        let end = start.checked_add(nbytes)?;
        if end > self.bytes {
            return None;
        }
        // SAFETY: `start` is at most `bytes`, the length of this part.
        let first = unsafe { self.first.add(start) };
        Some(Self { memory: Arc::clone(&self.memory), first, bytes: nbytes })
    }
}

impl<B> Shared<B> {
    /// A pointer to the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.first
    }
}

// SAFETY: `memory` is not moved, and lives until its last part is dropped. The bytes from `first` on lie inside
// `memory`. The documentation of `Shared` says when other code may access them.
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
