//! Hands free slots between threads: bounded, and waiting where none is free.
//!
//! A Treiber stack of slot numbers. The head carries a tag that every change increments, so a slot that left and came
//! back between a thread's load and its exchange is noticed. Last in, first out keeps the slots in use warm in cache.
//! Nothing here allocates after `new`.

use std::{sync::PoisonError, time::Instant};

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, fence};

/// The low half of the head: one more than the slot's number, so that 0 says "empty".
const INDEX_MASK: u64 = 0xffff_ffff;
/// One step of the tag in the high half.
const TAG_ONE: u64 = 1 << 32;

/// What a wait ended with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The number of a slot, now the caller's.
    Slot(u32),
    /// The deadline passed first.
    Late,
    /// The list was closed.
    Closed,
}

/// The free slots of one size. See the module's description.
#[derive(Debug)]
pub struct FreeList {
    head: AtomicU64,
    /// What lies below each slot, in the head's encoding (one more than the number; 0: nothing).
    below: Box<[AtomicU32]>,
    closed: AtomicBool,
    /// Threads in the slow path. Whoever gives a slot back looks here, and only then touches the lock.
    waiting: AtomicUsize,
    gate: Mutex<()>,
    given_back: Condvar,
}

impl FreeList {
    /// A list of `count` slots, all free; slot 0 is taken first. `count` must leave room for the empty mark.
    ///
    /// # Panics
    /// If `count` is `u32::MAX`; the layout refuses that many slots before.
    #[must_use]
    pub fn new(count: u32) -> Self {
        assert!(count < u32::MAX, "slot numbers are stored plus one");
        let below = (1..=count).map(|number| AtomicU32::new(if number == count { 0 } else { number + 1 }));
        Self {
            head: AtomicU64::new(u64::from(count > 0)),
            below: below.collect(),
            closed: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            gate: Mutex::new(()),
            given_back: Condvar::new(),
        }
    }

    /// Takes a slot if one is free. Never blocks.
    #[must_use]
    pub fn try_take(&self) -> Option<u32> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let slot = low_half(head).checked_sub(1)?;
            // May be stale if another thread takes the slot meanwhile; then the tag has moved and the exchange fails.
            let below = self.below[slot as usize].load(Ordering::Relaxed);
            let next = (head & !INDEX_MASK).wrapping_add(TAG_ONE) | u64::from(below);
            match self.head.compare_exchange_weak(head, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(slot),
                Err(seen) => head = seen,
            }
        }
    }

    /// Gives `slot` back and wakes one waiter. The slot must be the caller's.
    pub fn give(&self, slot: u32) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.below[slot as usize].store(low_half(head), Ordering::Relaxed);
            let next = (head & !INDEX_MASK).wrapping_add(TAG_ONE) | u64::from(slot + 1);
            match self.head.compare_exchange_weak(head, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(seen) => head = seen,
            }
        }
        // Pairs with the fence in `take`: either this sees the waiter, or the waiter's next look sees the slot.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) > 0 {
            // Through the lock, so that the wake-up cannot fall between a waiter's look and its sleep.
            drop(self.gate.lock().unwrap_or_else(PoisonError::into_inner));
            self.given_back.notify_one();
        }
    }

    /// Takes a slot, waiting for one until `deadline` (for ever where it is `None`).
    pub fn take(&self, deadline: Option<Instant>) -> Taken {
        let mut guard = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let taken = loop {
            if self.closed.load(Ordering::Acquire) {
                break Taken::Closed;
            }
            if let Some(slot) = self.try_take() {
                break Taken::Slot(slot);
            }
            let Some(deadline) = deadline else {
                guard = self.given_back.wait(guard).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                break Taken::Late;
            };
            guard = self.given_back.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        drop(guard);
        taken
    }

    /// Ends every wait, now and from now on. Slots may still be given back.
    pub fn close(&self) {
        let guard = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Release);
        drop(guard);
        self.given_back.notify_all();
    }
}

/// The slot part of a head, still plus one.
fn low_half(head: u64) -> u32 {
    (head & INDEX_MASK) as u32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn hands_out_every_slot_once_and_then_none() {
        let list = FreeList::new(3);
        assert_eq!([list.try_take(), list.try_take(), list.try_take()], [Some(0), Some(1), Some(2)]);
        assert_eq!(list.try_take(), None);
        list.give(1);
        assert_eq!(list.try_take(), Some(1));
    }

    #[test]
    fn an_empty_list_is_late_at_its_deadline() {
        let list = FreeList::new(0);
        assert_eq!(list.take(Some(Instant::now() + Duration::from_millis(5))), Taken::Late);
    }

    #[test]
    fn close_ends_a_wait() {
        let list = FreeList::new(0);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| list.take(None));
            std::thread::sleep(Duration::from_millis(10));
            list.close();
            assert_eq!(waiter.join().ok(), Some(Taken::Closed));
        });
    }
}
