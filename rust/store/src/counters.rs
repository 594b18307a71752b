//! Counts what a store does for its readers, with atomics, always on.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// What a store has done since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Units whose read was begun, and the bytes of them that were on storage.
    pub fetches: u64,
    /// As above.
    pub fetched_bytes: u64,
    /// Bytes that were taken from records in RAM, and not read from storage.
    pub ram_tier_bytes: u64,
    /// Time in [`Fetch::wait`](crate::Fetch::wait): what computation lost to reads.
    pub waited: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Counting {
    fetches: AtomicU64,
    fetched_bytes: AtomicU64,
    ram_tier_bytes: AtomicU64,
    waited_nanoseconds: AtomicU64,
}

impl Counting {
    pub(crate) fn began(&self, bytes: u64) {
        self.fetches.fetch_add(1, Relaxed);
        self.fetched_bytes.fetch_add(bytes, Relaxed);
    }

    /// A part of a unit whose read was counted already.
    pub(crate) fn began_part(&self, bytes: u64) {
        self.fetched_bytes.fetch_add(bytes, Relaxed);
    }

    /// Bytes that were in RAM.
    pub(crate) fn took_in_ram(&self, bytes: u64) {
        self.ram_tier_bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn waited(&self, time: Duration) {
        self.waited_nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn read(&self) -> Counters {
        Counters {
            fetches: self.fetches.load(Relaxed),
            fetched_bytes: self.fetched_bytes.load(Relaxed),
            ram_tier_bytes: self.ram_tier_bytes.load(Relaxed),
            waited: Duration::from_nanos(self.waited_nanoseconds.load(Relaxed)),
        }
    }
}
