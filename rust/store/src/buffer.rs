//! Memory of operations: parts of one lease, or of other memory; room that is leased again and again; transfers.

use memascend_mem::{ChunkRing, Lease, OnFork, OwnerId, Pin, Region, Wait};
pub use memascend_nvme::{Buffer, Shared};
use memascend_nvme::{NotBegun, Ticket};

use crate::{Error, Result};

/// The bytes of a buffer that no operation uses.
pub(crate) fn bytes_of(buffer: &impl Buffer) -> &[u8] {
    // SAFETY: a buffer's bytes are mapped while it lives; the callers have it back from its operation, or not begun one.
    unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) }
}

/// Memory in slots of one size, each leased again and again.
#[derive(Debug)]
pub struct Scratch {
    ring: ChunkRing,
    owner: OwnerId,
    /// Bytes of a slot.
    pub each: usize,
    /// Bytes that are mapped.
    pub mapped: usize,
}

impl Scratch {
    /// `count` slots of `bytes` each, of which reports say that `owner` has them.
    pub fn new(bytes: usize, count: usize, owner: &str) -> Result<Self> {
        let region = Region::new(bytes * count, Pin::Off, OnFork::Wipe, owner)?;
        let ring = ChunkRing::new(&region, bytes, count)?;
        Ok(Self { owner: ring.owner(owner)?, ring, each: bytes, mapped: region.bytes() })
    }

    /// A slot that nobody has.
    pub fn lease(&self, wait: Wait<'_>) -> std::result::Result<Lease, memascend_mem::Error> {
        self.ring.lease(self.owner, wait)
    }

    /// The first bytes of a slot, which waits until one is free.
    pub(crate) fn part(&self, nbytes: u64) -> Result<Shared> {
        first(self.lease(Wait::forever())?, nbytes)
    }
}

/// The first bytes of a lease.
pub(crate) fn first(lease: Lease, nbytes: u64) -> Result<Shared> {
    let room = lease.len();
    let part = Shared::new(lease).part(0, nbytes as usize);
    part.ok_or_else(|| Error::Invalid(format!("{nbytes} bytes do not fit a room of {room}")))
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
