//! Tickets: a handle on one operation in flight, to wait for.

use std::{fmt, marker::PhantomData, sync::Arc};

use memascend_mem::Wait;

use crate::{Buffer, Error, Result, operation::Operation};

/// An operation in flight. It owns its buffer until the kernel is done with it.
///
/// Dropping a ticket does not cancel: the operation goes on, its buffer lives until the end, and if it was a write that
/// fails, the next [`Volume::flush`](crate::Volume::flush) says so.
pub struct Ticket<B> {
    operation: Arc<Operation>,
    buffer: PhantomData<fn() -> B>,
}

/// How an operation ended, and its buffer.
#[derive(Debug)]
pub struct Finished<B> {
    /// What went in. After a failed read its bytes are undefined.
    pub buffer: B,
    /// The bytes moved: all of them, or an error.
    pub result: Result<usize>,
}

/// An operation that was not begun.
#[derive(Debug)]
pub struct NotBegun<B> {
    /// What would have gone in.
    pub buffer: B,
    /// Why not.
    pub error: Error,
}

impl<B: Buffer> Ticket<B> {
    pub(crate) fn new(operation: Arc<Operation>) -> Self {
        Self { operation, buffer: PhantomData }
    }

    /// Whether the operation has ended, well or not. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.operation.context.maker.is_elsewhere() || self.operation.is_done()
    }

    /// Waits for the end. `Ok` says that there is an [`outcome`](Self::outcome), not that it is a good one.
    pub fn wait_until(&self, mut wait: Wait<'_>) -> Result<()> {
        self.operation.wait(&mut wait)
    }

    /// How it ended; `None` while it is in flight.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the length of a buffer is a usize")]
    pub fn outcome(&self) -> Option<Result<usize>> {
        if self.operation.context.maker.is_elsewhere() {
            return Some(Err(Error::Forked));
        }
        self.operation.outcome().map(|outcome| outcome.map(|()| self.operation.units as usize))
    }

    /// The buffer, once the operation has ended and unless it was taken before.
    #[must_use]
    pub fn take_buffer(&self) -> Option<B> {
        if !self.is_done() {
            return None;
        }
        self.operation.take_buffer().and_then(|buffer| buffer.downcast().ok()).map(|buffer| *buffer)
    }

    /// Waits for ever and gives the buffer back.
    ///
    /// # Panics
    /// If the buffer was taken before.
    #[must_use]
    pub fn wait(self) -> Finished<B> {
        let result = self.wait_until(Wait::forever());
        let result = result.and_then(|()| self.outcome().unwrap_or(Err(Error::Forked)));
        match self.take_buffer() {
            Some(buffer) => Finished { buffer, result },
            None => panic!("the buffer of this ticket was taken before"),
        }
    }
}

impl<B> fmt::Debug for Ticket<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("kind", &self.operation.kind).field("offset", &self.operation.offset).finish()
    }
}

impl<B> Drop for Ticket<B> {
    fn drop(&mut self) {
        // In a forked child the lock may have been copied in the middle of a hold.
        if !self.operation.context.maker.is_elsewhere() {
            self.operation.ticket_dropped();
        }
    }
}
