//! Closes a parent's volumes in a forked child.
//!
//! A child inherits the parent's descriptors, and with the descriptors the lock on each device. A child that outlives a
//! killed parent would still hold the lock, and the next run could not open the device. So a fork handler closes every
//! registered descriptor in the child. The child could not use the volume anyway, because only the parent has the
//! threads that serve the volume.

use std::{
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::{
        Once,
        atomic::{AtomicI32, Ordering},
    },
};

/// The largest number of descriptors that a child closes: of the devices, rings and eventfds of all volumes. If the
/// table is full, the descriptors that are not in the table stay open in a child.
const DESCRIPTORS_MAX: usize = 1024;
const FREE: RawFd = -1;

static DESCRIPTORS: [AtomicI32; DESCRIPTORS_MAX] = [const { AtomicI32::new(FREE) }; DESCRIPTORS_MAX];
static HOOK: Once = Once::new();

extern "C" fn in_child() {
    for slot in &DESCRIPTORS {
        let descriptor = slot.swap(FREE, Ordering::Relaxed);
        if descriptor != FREE {
            // SAFETY: `close` is allowed between fork and exec. In the child, a volume begins no operation
            // (`Context::check_process`), and `Volume::drop` does not close the devices. The child must not call
            // methods that use the files themselves, such as `Volume::grow` and `Volume::lost`.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// Registers a descriptor that forked children close. Drop this value before you close the descriptor: after the close,
/// another file may get the number of the descriptor.
#[derive(Debug)]
pub(crate) struct ForkGuard {
    slot: Option<usize>,
}

impl ForkGuard {
    pub(crate) fn new(descriptor: BorrowedFd<'_>) -> Self {
        HOOK.call_once(|| {
            // SAFETY: `in_child` only accesses atomics and calls `close`, and this is allowed after a fork in a
            // threaded process. `in_child` stays valid, because this library is never unloaded.
            let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            assert_eq!(failed, 0, "pthread_atfork failed: no memory is left");
        });
        let raw = descriptor.as_raw_fd();
        let take = |slot: &AtomicI32| slot.compare_exchange(FREE, raw, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        Self { slot: DESCRIPTORS.iter().position(take) }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            DESCRIPTORS[slot].store(FREE, Ordering::Relaxed);
        }
    }
}
