//! Errors of host memory.

use std::{fmt, time::Duration};

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// One owner's share of a class, for the errors that say who holds what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The owner's name.
    pub owner: String,
    /// How many slots of the class it holds.
    pub slots: usize,
}

/// Shows holders as `unit 3, prefetch 1`.
struct Holders<'a>(&'a [Holder]);

impl fmt::Display for Holders<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nobody");
        }
        for (index, holder) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{:?} {}", holder.owner, holder.slots)?;
        }
        Ok(())
    }
}

/// What can go wrong with memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that no machine could satisfy.
    #[error("{0}")]
    Invalid(String),

    /// An explicit wish for pinned memory that cannot be had.
    #[error("memory cannot be pinned as asked: {why}")]
    PinRefused {
        /// The reason and the remedy.
        why: String,
    },

    /// A region is too small for the plan.
    #[error(
        "the region holds {region_bytes} bytes and the plan needs {needed_bytes}: make the region at least \
         {needed_bytes} bytes"
    )]
    RegionTooSmall {
        /// What the region has.
        region_bytes: usize,
        /// What the smallest layout needs.
        needed_bytes: usize,
    },

    /// The machine or its cgroup does not have the memory.
    #[error(
        "{needed_bytes} bytes of memory were asked for and {available_bytes} can be had ({limited_by}): ask for less, \
         free some, or raise that limit"
    )]
    OutOfMemory {
        /// What was asked for.
        needed_bytes: usize,
        /// What could be had.
        available_bytes: usize,
        /// What sets the limit.
        limited_by: String,
    },

    /// No class of the plan is large enough: this can never be granted.
    #[error(
        "a lease of {asked_bytes} bytes can never be granted: the largest class of this arena is {largest_class_bytes} \
         bytes; plan a class that fits it"
    )]
    NoSuchClass {
        /// What was asked for.
        asked_bytes: usize,
        /// What the plan has at most.
        largest_class_bytes: usize,
    },

    /// A lease was not granted in time.
    #[error(
        "no lease of {asked_bytes} bytes (class of {class_bytes}, {class_count} slots) within {:.3} s; held by: {}",
        waited.as_secs_f64(), Holders(holders)
    )]
    TimedOut {
        /// What was asked for.
        asked_bytes: usize,
        /// The class that it falls into.
        class_bytes: usize,
        /// How many slots that class has.
        class_count: usize,
        /// How long the caller waited.
        waited: Duration,
        /// Who holds the slots.
        holders: Vec<Holder>,
    },

    /// The caller's poll function asked to stop.
    #[error("waiting for {asked_bytes} bytes was interrupted")]
    Interrupted {
        /// What was asked for.
        asked_bytes: usize,
    },

    /// The region has been closed.
    #[error("the region has been closed; make a new one")]
    Closed,

    /// The region already belongs to an arena.
    #[error("the region already belongs to an arena; a region is divided once, make one region for each arena")]
    RegionTaken,

    /// A forked child uses its parent's memory.
    #[error(
        "this memory belongs to the process that made it, and this process is a fork of it; make a region of its own \
         here"
    )]
    Forked,

    /// More owners than the table holds.
    #[error("{OWNERS_MAX} owners are named already and {name:?} is one more; reuse a name", OWNERS_MAX = crate::OWNERS_MAX)]
    TooManyOwners {
        /// The name that found no room.
        name: String,
    },

    /// The kernel refused.
    #[error("{call} of {nbytes} bytes failed: {source}")]
    System {
        /// The system call.
        call: &'static str,
        /// How many bytes it was about.
        nbytes: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
}
