//! Counts the leased memory of each owner of an arena, with atomics.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{Error, Result};

/// The largest number of owners of an arena. The arena stores the index of an owner in one byte for each slot, and 255
/// marks a free slot. About a dozen owners are usual.
pub const OWNERS_MAX: usize = 255;

/// The index of a named owner of one arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerId(u8);

/// The leased memory and the waits of one owner, or of all owners together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnerStats {
    /// Bytes that the owner's living leases asked for.
    pub bytes: usize,
    /// The largest value that `bytes` has had.
    pub peak_bytes: usize,
    /// Number of leases that the owner holds.
    pub leases: usize,
    /// Number of leases that had to wait. Leases that failed after the wait count, too.
    pub waits: u64,
    /// Total time that leases of the owner have waited.
    pub waited: Duration,
}

/// The counters that [`OwnerStats`] reports. Each counter is exact. But if a thread changes counters during a read, the
/// read may mix values of different moments.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    leases: AtomicUsize,
    waits: AtomicU64,
    waited_ns: AtomicU64,
}

impl Counters {
    pub(crate) fn taken(&self, bytes: usize) {
        let held = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        // Load the peak before `fetch_max`, because `fetch_max` always writes the cache line, and the peak changes
        // rarely.
        if held > self.peak_bytes.load(Relaxed) {
            self.peak_bytes.fetch_max(held, Relaxed);
        }
        self.leases.fetch_add(1, Relaxed);
    }

    pub(crate) fn given(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Relaxed);
        self.leases.fetch_sub(1, Relaxed);
    }

    pub(crate) fn waited(&self, time: Duration) {
        self.waits.fetch_add(1, Relaxed);
        self.waited_ns.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    pub(crate) fn read(&self) -> OwnerStats {
        OwnerStats {
            bytes: self.bytes.load(Relaxed),
            peak_bytes: self.peak_bytes.load(Relaxed),
            leases: self.leases.load(Relaxed),
            waits: self.waits.load(Relaxed),
            waited: Duration::from_nanos(self.waited_ns.load(Relaxed)),
        }
    }
}

/// The owners of one arena, in the order in which they were registered.
#[derive(Debug)]
pub(crate) struct Owners {
    names: [OnceLock<Box<str>>; OWNERS_MAX],
    counters: [Counters; OWNERS_MAX],
}

impl Owners {
    pub(crate) fn new() -> Self {
        Self { names: std::array::from_fn(|_| OnceLock::new()), counters: std::array::from_fn(|_| Counters::default()) }
    }

    /// Returns the owner called `name`. The first call registers the owner.
    pub(crate) fn named(&self, name: &str) -> Result<OwnerId> {
        for (entry, index) in self.names.iter().zip(0_u8..) {
            // If two threads register the same name at once, one thread fills the entry, and both threads then read the
            // entry.
            if **entry.get_or_init(|| name.into()) == *name {
                return Ok(OwnerId(index));
            }
        }
        Err(Error::TooManyOwners { owners_max: OWNERS_MAX, name: name.into() })
    }

    pub(crate) fn counters(&self, owner: OwnerId) -> &Counters {
        &self.counters[usize::from(owner.0)]
    }

    pub(crate) fn name(&self, owner: OwnerId) -> &str {
        self.names[usize::from(owner.0)].get().map_or("", |name| name)
    }

    pub(crate) fn read(&self) -> Vec<(String, OwnerStats)> {
        let named = self.names.iter().map_while(OnceLock::get).map(|name| String::from(&**name));
        named.zip(self.counters.iter().map(Counters::read)).collect()
    }
}

impl OwnerId {
    /// Returns the index that an arena stores for each slot of this owner.
    pub(crate) fn index(self) -> u8 {
        self.0
    }

    pub(crate) fn from_index(index: u8) -> Self {
        Self(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_returns_one_owner_per_name_up_to_owners_max() {
        let owners = Owners::new();
        assert_eq!(owners.named("unit").ok(), owners.named("unit").ok());
        for index in 1..OWNERS_MAX {
            assert!(owners.named(&format!("owner {index}")).is_ok());
        }
        assert!(owners.named("unit").is_ok(), "a full table still knows its own");
        assert!(matches!(owners.named("one more"), Err(Error::TooManyOwners { .. })));
    }
}
