//! The free slots of one class: a vector behind a lock, from which threads take slots.
//!
//! The slot that was returned last is taken first, because its memory may still be in the processor's caches. No
//! function except `new` allocates memory.

use crate::guarded::{Ended, Guarded, Wait};

/// The free slots of one class.
#[derive(Debug)]
pub(crate) struct FreeList(Guarded<Slots>);

#[derive(Debug)]
struct Slots {
    /// The last element is the next slot to be taken.
    free: Vec<u32>,
    closed: bool,
}

impl FreeList {
    /// Makes a list of `count` free slots. Slot 0 is taken first.
    pub(crate) fn new(count: u32) -> Self {
        Self(Guarded::new(Slots { free: (0..count).rev().collect(), closed: false }))
    }

    /// Takes a slot. Returns `None` if no slot is free. Does not wait for a slot.
    pub(crate) fn try_take(&self) -> Option<u32> {
        self.0.lock().free.pop()
    }

    /// Returns `slot` to the list and wakes one waiter. The caller must have taken the slot from this list.
    pub(crate) fn give(&self, slot: u32) {
        self.0.lock().free.push(slot);
        self.0.notify_one();
    }

    /// Waits for a free slot and takes it. Returns `None` once the list is closed, and an error if `wait` ends the
    /// wait.
    pub(crate) fn take(&self, wait: &mut Wait<'_>) -> Result<Option<u32>, Ended> {
        let mut state = self.0.wait_until(wait, |state| state.closed || !state.free.is_empty())?;
        Ok(if state.closed { None } else { state.free.pop() })
    }

    /// Ends every present and later wait. Slots may still be returned.
    pub(crate) fn close(&self) {
        self.0.lock().closed = true;
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn try_take_returns_every_slot_once_and_then_none() {
        let list = FreeList::new(3);
        assert_eq!([list.try_take(), list.try_take(), list.try_take()], [Some(0), Some(1), Some(2)]);
        assert_eq!(list.try_take(), None);
        list.give(1);
        assert_eq!(list.try_take(), Some(1));
    }

    #[test]
    fn take_from_an_empty_list_times_out() {
        let list = FreeList::new(0);
        assert!(matches!(list.take(&mut Wait::at_most(Duration::from_millis(5))), Err(Ended::TimedOut(_))));
    }

    #[test]
    fn close_ends_a_wait() {
        let list = FreeList::new(0);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| list.take(&mut Wait::forever()));
            std::thread::sleep(Duration::from_millis(10));
            list.close();
            assert_eq!(waiter.join().ok(), Some(Ok(None)));
        });
    }

    /// A slot that the first waiter returns reaches the second waiter.
    #[test]
    fn two_waiters_both_get_the_slot() {
        for _ in 0..500 {
            let list = FreeList::new(1);
            assert_eq!(list.try_take(), Some(0));
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        assert_eq!(list.take(&mut Wait::forever()), Ok(Some(0)));
                        list.give(0);
                    });
                }
                list.give(0);
            });
        }
    }
}
