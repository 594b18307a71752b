//! Counts held memory by named owner, with atomics, always on.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{Error, Result};

/// How many owners an arena can tell apart: what a byte beside each slot can name. A dozen is usual.
pub const OWNERS_MAX: usize = 255;

/// A named owner of one arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerId(u8);

/// What one owner, or all together, holds and waited for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnerStats {
    /// Bytes asked for by the leases held now.
    pub bytes: usize,
    /// The most that `bytes` has been.
    pub peak_bytes: usize,
    /// Leases held now.
    pub leases: usize,
    /// Leases that had to wait, granted or not.
    pub waits: u64,
    /// Time spent waiting.
    pub waited: Duration,
}

/// The counters behind [`OwnerStats`]. Each is right by itself; together they are a snapshot only when nothing moves.
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
        // A plain load first: the peak moves rarely, and an atomic maximum writes the line each time.
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

/// The owners of one arena, in the order of their first naming.
#[derive(Debug)]
pub(crate) struct Owners {
    names: [OnceLock<Box<str>>; OWNERS_MAX],
    counters: [Counters; OWNERS_MAX],
}

impl Owners {
    pub(crate) fn new() -> Self {
        Self { names: std::array::from_fn(|_| OnceLock::new()), counters: std::array::from_fn(|_| Counters::default()) }
    }

    /// The owner called `name`, entered into the table at its first call.
    pub(crate) fn named(&self, name: &str) -> Result<OwnerId> {
        for (entry, index) in self.names.iter().zip(0_u8..) {
            // Two threads may name the same new owner at once: one of them fills the entry, both read it.
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
    /// For storing in an atomic beside the slot.
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
    fn a_name_is_one_owner_and_the_table_is_bounded() {
        let owners = Owners::new();
        assert_eq!(owners.named("unit").ok(), owners.named("unit").ok());
        for index in 1..OWNERS_MAX {
            assert!(owners.named(&format!("owner {index}")).is_ok());
        }
        assert!(owners.named("unit").is_ok(), "a full table still knows its own");
        assert!(matches!(owners.named("one more"), Err(Error::TooManyOwners { .. })));
    }
}
