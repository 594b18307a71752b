//! Shares memory between operations: parts of one lease, or of other memory.

use std::{ptr::NonNull, sync::Arc};

use memascend_mem::Lease;
pub use memascend_nvme::Buffer;

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
// whoever made them: this crate reads into parts that are disjoint, and nothing looks at a part before its read is done.
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

/// The bytes of a buffer that no operation uses.
pub(crate) fn bytes_of(buffer: &impl Buffer) -> &[u8] {
    // SAFETY: a buffer's bytes are mapped while it lives; the callers have it back from its operation, or not begun one.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) }
}
