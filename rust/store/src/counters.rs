//! Counts a store's reads of units. The counters are atomics and always count.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Counts of a store's reads since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Number of calls of [`Store::fetch`](crate::Store::fetch), [`Store::parts`](crate::Store::parts) and
    /// [`Store::parts_without`](crate::Store::parts_without). Each such call prepares to read one unit.
    pub fetches: u64,
    /// Bytes of units whose read from storage was begun.
    pub fetched_bytes: u64,
    /// Bytes that were copied from records kept in RAM instead of read from storage.
    pub ram_tier_bytes: u64,
    /// The time that computation waited for reads. [`Fetch::wait`](crate::Fetch::wait) adds its own waits. A caller
    /// that waits elsewhere adds the time with [`Store::note_wait`](crate::Store::note_wait).
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
    /// Counts a unit that a caller begins to read, and the `bytes` of the unit that are read from storage.
    pub(crate) fn began(&self, bytes: u64) {
        self.fetches.fetch_add(1, Relaxed);
        self.fetched_bytes.fetch_add(bytes, Relaxed);
    }

    /// Adds `bytes` that are read from storage for a unit that `began` has counted.
    pub(crate) fn began_part(&self, bytes: u64) {
        self.fetched_bytes.fetch_add(bytes, Relaxed);
    }

    /// Adds `bytes` that were copied from records kept in RAM.
    pub(crate) fn took_in_ram(&self, bytes: u64) {
        self.ram_tier_bytes.fetch_add(bytes, Relaxed);
    }

    /// Adds the `time` that computation waited for a read.
    pub(crate) fn waited(&self, time: Duration) {
        self.waited_nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// Returns the current counts.
    pub(crate) fn read(&self) -> Counters {
        Counters {
            fetches: self.fetches.load(Relaxed),
            fetched_bytes: self.fetched_bytes.load(Relaxed),
            ram_tier_bytes: self.ram_tier_bytes.load(Relaxed),
            waited: Duration::from_nanos(self.waited_nanoseconds.load(Relaxed)),
        }
    }
}
