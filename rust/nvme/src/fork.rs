//! Closes a parent's volumes in a forked child.
//!
//! A child inherits descriptors, and with them the lock on each device: a worker that outlives a killed parent would
//! keep the next run out. So every descriptor of ours is closed in the child, which could not use it anyway: the
//! threads that serve it stayed behind.

use std::{
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::{
        Once,
        atomic::{AtomicI32, Ordering},
    },
};

/// Descriptors that are closed in children. Devices, rings and eventfds of all volumes; past it a child merely keeps
/// what does not fit.
const DESCRIPTORS_MAX: usize = 1024;
const FREE: RawFd = -1;

static DESCRIPTORS: [AtomicI32; DESCRIPTORS_MAX] = [const { AtomicI32::new(FREE) }; DESCRIPTORS_MAX];
static HOOK: Once = Once::new();

extern "C" fn in_child() {
    for slot in &DESCRIPTORS {
        let descriptor = slot.swap(FREE, Ordering::Relaxed);
        if descriptor != FREE {
            // SAFETY: close is allowed between fork and exec; what still holds the number here is never used or
            // dropped again, see `Maker`.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// While it lives, children of a fork close the descriptor. Drop it before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct NotInChildren {
    slot: Option<usize>,
}

impl NotInChildren {
    pub(crate) fn new(descriptor: BorrowedFd<'_>) -> Self {
        HOOK.call_once(|| {
            // SAFETY: the handler touches atomics and calls close, both allowed after fork in a threaded process; it
            // is a function of this library, which is never unloaded.
            let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            assert_eq!(failed, 0, "pthread_atfork has no memory left");
        });
        let raw = descriptor.as_raw_fd();
        let take = |slot: &AtomicI32| slot.compare_exchange(FREE, raw, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        Self { slot: DESCRIPTORS.iter().position(take) }
    }
}

impl Drop for NotInChildren {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            DESCRIPTORS[slot].store(FREE, Ordering::Relaxed);
        }
    }
}
