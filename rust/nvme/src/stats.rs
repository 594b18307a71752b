//! Counts what a volume does, with atomics, always on.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What was moved in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// Bytes of the operations that succeeded.
    pub bytes: u64,
    /// Operations that succeeded.
    pub operations: u64,
    /// Requests that the devices were given for them and for what failed.
    pub requests: u64,
}

/// What a volume has done since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VolumeStats {
    /// Reads.
    pub read: Moved,
    /// Writes.
    pub written: Moved,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Transfers that stopped short and were continued.
    pub continued: u64,
    /// Requests that the kernel was asked for again (EINTR, EAGAIN, ENOMEM).
    pub retried: u64,
    /// Bytes that went through a chunk because they, or their memory, were not aligned.
    pub bounced_bytes: u64,
    /// Operations begun and not yet done.
    pub in_flight: u64,
}

#[derive(Debug, Default)]
pub(crate) struct MovedCounters {
    pub(crate) bytes: AtomicU64,
    pub(crate) operations: AtomicU64,
    pub(crate) requests: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) read: MovedCounters,
    pub(crate) written: MovedCounters,
    pub(crate) flushes: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) continued: AtomicU64,
    pub(crate) retried: AtomicU64,
    pub(crate) bounced_bytes: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Relaxed);
}

impl Counters {
    pub(crate) fn read(&self, in_flight: u64) -> VolumeStats {
        let moved = |counters: &MovedCounters| Moved {
            bytes: counters.bytes.load(Relaxed),
            operations: counters.operations.load(Relaxed),
            requests: counters.requests.load(Relaxed),
        };
        VolumeStats {
            read: moved(&self.read),
            written: moved(&self.written),
            flushes: self.flushes.load(Relaxed),
            failed: self.failed.load(Relaxed),
            continued: self.continued.load(Relaxed),
            retried: self.retried.load(Relaxed),
            bounced_bytes: self.bounced_bytes.load(Relaxed),
            in_flight,
        }
    }
}
