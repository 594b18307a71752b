//! Memory of operations: parts of one lease, or of other memory; room that is leased again and again; transfers.

use std::{ptr::NonNull, sync::Arc};

use memascend_mem::{ChunkRing, Lease, OnFork, OwnerId, Pin, Region, Wait};
pub use memascend_nvme::Buffer;
use memascend_nvme::{NotBegun, Ticket};

use crate::{Error, Result};

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

/// Memory in pieces of one size, each leased again and again.
#[derive(Debug)]
pub struct Scratch {
    ring: ChunkRing,
    owner: OwnerId,
    /// Bytes of an extent.
    pub each: usize,
    /// Bytes that are mapped.
    pub mapped: usize,
}

impl Scratch {
    /// `count` extents of `bytes` each, of which reports say that `owner` has them.
    pub fn new(bytes: usize, count: usize, owner: &str) -> Result<Self> {
        let region = Region::new(bytes * count, Pin::Off, OnFork::Wipe, owner)?;
        let ring = ChunkRing::new(&region, bytes, count)?;
        Ok(Self { owner: ring.owner(owner)?, ring, each: bytes, mapped: region.bytes() })
    }

    /// An extent that nobody has.
    pub fn lease(&self, wait: Wait<'_>) -> std::result::Result<Lease, memascend_mem::Error> {
        self.ring.lease(self.owner, wait)
    }

    /// The first bytes of an extent, which waits until one is free.
    pub(crate) fn part(&self, nbytes: u64) -> Result<Shared> {
        let part = Shared::new(self.lease(Wait::forever())?).part(0, nbytes as usize);
        part.ok_or_else(|| Error::Invalid(format!("{nbytes} bytes do not fit a room of {}", self.each)))
    }
}

/// A read or write that is under way. Dropping it waits for its end.
pub struct Transfer<B: Buffer>(Option<Ticket<B>>);

impl<B: Buffer> Transfer<B> {
    /// What a volume has begun, or why it has not.
    pub(crate) fn begun(ticket: std::result::Result<Ticket<B>, NotBegun<B>>) -> Result<Self> {
        Ok(Self(Some(ticket.map_err(|refused| refused.error)?)))
    }

    /// Whether it has ended. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(Ticket::is_done)
    }

    /// Waits for the end and gives the buffer back.
    pub fn wait(mut self) -> Result<B> {
        let Some(ticket) = self.0.take() else { unreachable!("only waiting takes it") };
        let finished = ticket.wait();
        finished.result?;
        Ok(finished.buffer)
    }
}

impl<B: Buffer> Drop for Transfer<B> {
    fn drop(&mut self) {
        if let Some(ticket) = self.0.take() {
            drop(ticket.wait());
        }
    }
}
