//! Provides buffers for I/O operations. A [`Scratch`] leases slots of memory as buffers. A [`Transfer`] owns the buffer
//! of an operation until the operation has ended.

use memascend_mem::{ChunkRing, Lease, OnFork, OwnerId, Pin, Region, Wait};
pub use memascend_nvme::{Buffer, Shared};
use memascend_nvme::{NotBegun, Ticket};

use crate::{Error, Result};

/// Returns the bytes of a buffer. No operation may be writing to the buffer.
pub(crate) fn bytes_of(buffer: &impl Buffer) -> &[u8] {
    // SAFETY: the bytes stay mapped while `buffer` lives, and no operation writes to them: a caller that reads from a
    // device into a buffer passes the buffer here only after that read has ended.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) }
}

/// A region of memory that is divided into slots of one size. Callers lease slots and return them.
#[derive(Debug)]
pub struct Scratch {
    ring: ChunkRing,
    owner: OwnerId,
    /// The size of one slot in bytes.
    pub each: usize,
    /// The size of the mapped region in bytes.
    pub mapped: usize,
}

impl Scratch {
    /// Maps a region of `count` slots of `bytes` bytes each. Memory reports list the region under the name `owner`.
    pub fn new(bytes: usize, count: usize, owner: &str) -> Result<Self> {
        let region = Region::new(bytes * count, Pin::Off, OnFork::Wipe, owner)?;
        let ring = ChunkRing::new(&region, bytes, count)?;
        Ok(Self { owner: ring.owner(owner)?, ring, each: bytes, mapped: region.bytes() })
    }

    /// Leases a free slot. If no slot is free, waits for a free slot as long as `wait` allows.
    pub fn lease(&self, wait: Wait<'_>) -> std::result::Result<Lease, memascend_mem::Error> {
        self.ring.lease(self.owner, wait)
    }

    /// Waits until a slot is free, leases the slot and returns the slot's first `nbytes` bytes.
    pub(crate) fn part(&self, nbytes: u64) -> Result<Shared> {
        first(self.lease(Wait::forever())?, nbytes)
    }
}

/// Returns the first `nbytes` bytes of a lease.
pub(crate) fn first(lease: Lease, nbytes: u64) -> Result<Shared> {
    let room = lease.len();
    let part = Shared::new(lease).part(0, nbytes as usize);
    part.ok_or_else(|| Error::Invalid(format!("{nbytes} bytes do not fit into a buffer of {room} bytes")))
}

/// A read or write in flight. Dropping a `Transfer` waits until the operation has ended.
pub struct Transfer<B: Buffer>(Option<Ticket<B>>);

impl<B: Buffer> Transfer<B> {
    /// Wraps the ticket of an operation. Fails with the volume's error if the volume did not begin the operation.
    pub(crate) fn begun(ticket: std::result::Result<Ticket<B>, NotBegun<B>>) -> Result<Self> {
        Ok(Self(Some(ticket.map_err(|refused| refused.error)?)))
    }

    /// True once the operation has ended. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(Ticket::is_done)
    }

    /// Waits until the operation has ended, and returns the buffer.
    pub fn wait(mut self) -> Result<B> {
        let Some(ticket) = self.0.take() else { unreachable!("only `wait` takes the ticket") };
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
