//! A `Ticket` is a handle on an operation in flight. The caller uses the ticket to wait for the result.

use std::{fmt, marker::PhantomData, sync::Arc};

use memascend_mem::Wait;

use crate::{Buffer, Error, Result, operation::Operation};

/// A handle on an operation in flight. The operation owns the buffer until [`take_buffer`](Self::take_buffer) or
/// [`wait`](Self::wait) returns it.
///
/// Dropping a ticket does not cancel the operation. The operation continues, and keeps the buffer until the operation
/// ends. If the operation is a write and fails, the next [`Volume::flush`](crate::Volume::flush) or
/// [`Volume::close`](crate::Volume::close) reports the failure.
pub struct Ticket<B> {
    operation: Arc<Operation>,
    buffer: PhantomData<fn() -> B>,
}

/// The result of an operation, and its buffer.
#[derive(Debug)]
pub struct Finished<B> {
    /// The buffer that the caller passed in. Its bytes are undefined after a failed read.
    pub buffer: B,
    /// The number of bytes moved, which is always the length of the buffer; or an error.
    pub result: Result<usize>,
}

/// The error of an operation that did not begin, and the operation's buffer.
#[derive(Debug)]
pub struct NotBegun<B> {
    /// The buffer that the caller passed in, untouched.
    pub buffer: B,
    /// Why the operation did not begin.
    pub error: Error,
}

impl<B: Buffer> Ticket<B> {
    pub(crate) fn new(operation: Arc<Operation>) -> Self {
        Self { operation, buffer: PhantomData }
    }

    /// True once the operation has ended, with or without an error, and always in a forked child. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.operation.context.maker.is_elsewhere() || self.operation.is_done()
    }

    /// Waits until the operation has ended. `Ok` means that [`outcome`](Self::outcome) returns a result, which may be
    /// an error.
    pub fn wait_until(&self, mut wait: Wait<'_>) -> Result<()> {
        self.operation.wait(&mut wait)
    }

    /// Returns the number of bytes moved, or the error; `None` while the operation is in flight. In a forked child,
    /// always returns [`Error::Forked`].
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the length of a buffer is a usize")]
    pub fn outcome(&self) -> Option<Result<usize>> {
        if self.operation.context.maker.is_elsewhere() {
            return Some(Err(Error::Forked));
        }
        self.operation.outcome().map(|outcome| outcome.map(|()| self.operation.units as usize))
    }

    /// Returns the buffer once the operation has ended. Returns `None` while the operation is in flight, and if an
    /// earlier call has returned the buffer.
    #[must_use]
    pub fn take_buffer(&self) -> Option<B> {
        if !self.is_done() {
            return None;
        }
        self.operation.take_buffer().and_then(|buffer| buffer.downcast().ok()).map(|buffer| *buffer)
    }

    /// Waits without a limit, then returns the buffer and the result.
    ///
    /// # Panics
    /// If `take_buffer` has already returned the buffer.
    #[must_use]
    pub fn wait(self) -> Finished<B> {
        let result = self.wait_until(Wait::forever());
        let result = result.and_then(|()| self.outcome().unwrap_or(Err(Error::Forked)));
        match self.take_buffer() {
            Some(buffer) => Finished { buffer, result },
            None => panic!("`take_buffer` has already returned the buffer of this ticket"),
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
        // In a forked child, do not lock the operation: another thread of the parent may have held the operation's lock
        // at the fork, so the child would wait for ever.
        if !self.operation.context.maker.is_elsewhere() {
            self.operation.ticket_dropped();
        }
    }
}
