//! Counts a region's leases and decides who unmaps it, exactly once.

use crate::sync::{AtomicUsize, Ordering};

/// The bit that says "closed"; the rest counts.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// A count that can be closed. Exactly one call of `leave` or `close` answers that nobody is left and none will come.
#[derive(Debug)]
pub struct Users {
    state: AtomicUsize,
}

impl Users {
    /// Nobody yet, and open.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "loom's atomics have no constant start either")]
    pub fn new() -> Self {
        Self { state: AtomicUsize::new(0) }
    }

    /// Counts one more, unless closed.
    #[must_use]
    pub fn enter(&self) -> bool {
        let one_more = |state| (state & CLOSED == 0).then_some(state + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// Counts one less. `true`: it was the last of a closed count.
    #[must_use]
    pub fn leave(&self) -> bool {
        self.state.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1
    }

    /// Closes. `true`: it was open and nobody was in.
    #[must_use]
    pub fn close(&self) -> bool {
        self.state.fetch_or(CLOSED, Ordering::AcqRel) == 0
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }
}
