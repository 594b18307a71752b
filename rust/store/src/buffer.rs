//! Shares memory between operations: parts of one lease, or of other memory.

use std::{ptr::NonNull, sync::Arc};

use memascend_mem::Lease;
pub use memascend_nvme::Buffer;

/// A range of a lease that is shared. Clones and parts are the same memory.
#[derive(Debug)]
pub struct Shared<B = Lease> {
    memory: Arc<B>,
    start: usize,
    bytes: usize,
}

impl<B> Clone for Shared<B> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), start: self.start, bytes: self.bytes }
    }
}

impl<B: Buffer + Sync> Shared<B> {
    /// The whole of a lease.
    #[must_use]
    pub fn new(memory: B) -> Self {
        let bytes = memory.len();
        Self { memory: Arc::new(memory), start: 0, bytes }
    }

    /// `nbytes` from `start` on; `None` where that is not inside.
    #[must_use]
    pub fn part(&self, start: usize, nbytes: usize) -> Option<Self> {
        let end = start.checked_add(nbytes)?;
        let inside = end <= self.bytes;
        inside.then(|| Self { memory: Arc::clone(&self.memory), start: self.start + start, bytes: nbytes })
    }
}

// SAFETY: the memory stays where it is until its last part is dropped. Parts that overlap are the business of
// whoever made them: this crate reads into parts that are disjoint, and nothing looks at a part before its read is done.
unsafe impl<B: Buffer + Sync> Buffer for Shared<B> {
    fn as_ptr(&self) -> NonNull<u8> {
        // SAFETY: `start` is inside the memory, see `part`.
        unsafe { self.memory.as_ptr().add(self.start) }
    }

    fn len(&self) -> usize {
        self.bytes
    }
}

/// The bytes of a buffer that no operation uses.
pub(crate) fn bytes_of(buffer: &impl Buffer) -> &[u8] {
    // SAFETY: a buffer's bytes are mapped while it lives; the callers have it back from its operation, or not begun one.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr().as_ptr(), buffer.len()) }
}
