//! Tests the free list under the model checker: every interleaving of a few threads.
//!
//! At most [`PREEMPTIONS`] switches are forced: a bound that finds nearly all bugs of this kind, and without which the
//! search takes hours.
//!
//! `make test-loom` builds it with `--cfg loom`; otherwise this file is empty.
#![cfg(loom)]

use loom::{sync::Arc, thread};
use memascend_mem::{FreeList, Taken, Users};

const PREEMPTIONS: usize = 3;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(model);
}

/// Two threads that take and give: no slot is ever held twice, and none is lost.
#[test]
fn a_slot_has_one_holder() {
    check(|| {
        let list = Arc::new(FreeList::new(2));
        let held: Arc<[loom::sync::atomic::AtomicBool; 2]> = Arc::new(std::array::from_fn(|_| false.into()));
        let work = |list: &FreeList, held: &[loom::sync::atomic::AtomicBool; 2]| {
            if let Some(slot) = list.try_take() {
                let mark = &held[slot as usize];
                assert!(!mark.swap(true, loom::sync::atomic::Ordering::Relaxed), "slot {slot} is held twice");
                mark.store(false, loom::sync::atomic::Ordering::Relaxed);
                list.give(slot);
            }
        };
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (list, held) = (Arc::clone(&list), Arc::clone(&held));
                thread::spawn(move || work(&list, &held))
            })
            .collect();
        work(&list, &held);
        for other in others {
            assert!(other.join().is_ok());
        }
        let mut slots = [list.try_take(), list.try_take()];
        slots.sort_unstable();
        assert_eq!(slots, [Some(0), Some(1)], "a slot was lost");
        assert_eq!(list.try_take(), None);
    });
}

/// The head's tag: a slot that left and came back between another thread's load and exchange must not fool it.
#[test]
fn a_slot_that_comes_back_is_noticed() {
    check(|| {
        let list = Arc::new(FreeList::new(2));
        let other = {
            let list = Arc::clone(&list);
            thread::spawn(move || {
                // Takes both and returns the first: 0 is on top again, but no longer above 1.
                let (first, second) = (list.try_take(), list.try_take());
                if let Some(first) = first {
                    list.give(first);
                }
                second
            })
        };
        let mine = list.try_take();
        let kept = other.join().unwrap_or_else(|_| panic!("the other thread panicked"));
        let mut slots = vec![mine, kept, list.try_take(), list.try_take()];
        slots.retain(Option::is_some);
        slots.sort_unstable();
        assert_eq!(slots, [Some(0), Some(1)], "a slot has two holders or none");
    });
}

/// Whoever waits is woken by whoever gives, also when the giving falls between the look and the sleep.
#[test]
fn no_wake_up_is_lost() {
    check(|| {
        let list = Arc::new(FreeList::new(1));
        let mine = list.try_take();
        assert_eq!(mine, Some(0));
        let waiter = {
            let list = Arc::clone(&list);
            // Without a deadline: a lost wake-up is a deadlock, which loom reports.
            thread::spawn(move || list.take(None))
        };
        list.give(0);
        assert_eq!(waiter.join().ok(), Some(Taken::Slot(0)));
    });
}

/// Two waiters and one slot that is handed on: both get it.
#[test]
fn two_waiters_both_get_the_slot() {
    check(|| {
        let list = Arc::new(FreeList::new(1));
        assert_eq!(list.try_take(), Some(0));
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let list = Arc::clone(&list);
                thread::spawn(move || {
                    assert_eq!(list.take(None), Taken::Slot(0));
                    list.give(0);
                })
            })
            .collect();
        list.give(0);
        for waiter in waiters {
            assert!(waiter.join().is_ok());
        }
    });
}

/// Closing ends a wait, whichever comes first.
#[test]
fn close_reaches_a_waiter() {
    check(|| {
        let list = Arc::new(FreeList::new(0));
        let waiter = {
            let list = Arc::clone(&list);
            thread::spawn(move || list.take(None))
        };
        list.close();
        assert_eq!(waiter.join().ok(), Some(Taken::Closed));
    });
}

/// However leases and the closing interleave: the memory is unmapped exactly once, and never under a lease.
#[test]
fn a_closed_region_is_unmapped_once_and_by_the_last() {
    use loom::sync::atomic::{AtomicUsize, Ordering};
    check(|| {
        let users = Arc::new(Users::new());
        let (inside, unmapped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let lease = |users: &Users, inside: &AtomicUsize, unmapped: &AtomicUsize| {
            if users.enter() {
                assert_eq!(unmapped.load(Ordering::Acquire), 0, "leased after it was unmapped");
                inside.fetch_add(1, Ordering::AcqRel);
                inside.fetch_sub(1, Ordering::AcqRel);
                if users.leave() {
                    unmapped.fetch_add(1, Ordering::AcqRel);
                }
            }
        };
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (users, inside, unmapped) = (Arc::clone(&users), Arc::clone(&inside), Arc::clone(&unmapped));
                thread::spawn(move || lease(&users, &inside, &unmapped))
            })
            .collect();
        if users.close() {
            assert_eq!(inside.load(Ordering::Acquire), 0, "unmapped under a lease");
            unmapped.fetch_add(1, Ordering::AcqRel);
        }
        for other in others {
            assert!(other.join().is_ok());
        }
        assert!(!users.enter());
        assert_eq!(unmapped.load(Ordering::Acquire), 1);
    });
}
