//! Counts the leases of a region, and decides which call unmaps a closed region: `close`, or the last `leave`.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The bit that marks the count as closed. All other bits hold the number of leases.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// A count that can be closed. At most one call of `leave` or `close` returns true: the first call after which the
/// count is closed and zero.
#[derive(Debug)]
pub(crate) struct LeaseCount {
    state: AtomicUsize,
}

impl LeaseCount {
    /// Makes an open count of zero.
    pub(crate) const fn new() -> Self {
        Self { state: AtomicUsize::new(0) }
    }

    /// Adds one and returns true. If the count is closed, adds nothing and returns false.
    #[must_use]
    pub(crate) fn enter(&self) -> bool {
        let one_more = |state| (state & CLOSED == 0).then_some(state + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// Subtracts one. Returns true if the count is then closed and zero.
    #[must_use]
    pub(crate) fn leave(&self) -> bool {
        self.state.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1
    }

    /// Closes the count. Returns true if the count was open and zero.
    #[must_use]
    pub(crate) fn close(&self) -> bool {
        self.state.fetch_or(CLOSED, Ordering::AcqRel) == 0
    }

    /// True once the count is closed.
    #[must_use]
    pub(crate) fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In every order of leases and `close`, the region is unmapped exactly once, and never while a lease lives.
    #[test]
    fn closed_region_is_unmapped_once_by_its_last_user() {
        for _ in 0..500 {
            let (users, inside, unmapped) = (LeaseCount::new(), AtomicUsize::new(0), AtomicUsize::new(0));
            let unmap = || {
                assert_eq!(inside.load(Ordering::SeqCst), 0, "unmapped under a lease");
                unmapped.fetch_add(1, Ordering::SeqCst);
            };
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        if users.enter() {
                            inside.fetch_add(1, Ordering::SeqCst);
                            assert_eq!(unmapped.load(Ordering::SeqCst), 0, "leased after it was unmapped");
                            inside.fetch_sub(1, Ordering::SeqCst);
                            if users.leave() {
                                unmap();
                            }
                        }
                    });
                }
                if users.close() {
                    unmap();
                }
            });
            assert!(users.is_closed() && !users.enter());
            assert_eq!(unmapped.load(Ordering::SeqCst), 1);
        }
    }
}
