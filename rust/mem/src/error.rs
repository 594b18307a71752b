//! Defines the errors of this crate.

use std::{fmt, time::Duration};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An owner that holds slots of a class. The error of a lease that timed out lists such owners.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The owner's name.
    pub owner: String,
    /// Number of slots of the class that the owner holds.
    pub slots: usize,
}

/// Formats holders as `"unit" 3, "prefetch" 1`.
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

/// Formats a number of bytes in the largest unit in which the number is at least 1, with three significant digits, or
/// with its whole part if this is longer. Drops trailing zeros of the fraction. Rounds up if `up` is true, else down.
fn shown(nbytes: usize, up: bool) -> String {
    const UNITS: [&str; 6] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = (nbytes.max(1).ilog2() as usize / 10).min(UNITS.len() - 1);
    if unit == 0 {
        return format!("{nbytes} bytes");
    }
    let (nbytes, size) = (nbytes as u128, 1 << (10 * unit));
    let digits = if nbytes < 10 * size { 2 } else { usize::from(nbytes < 100 * size) };
    let scale = 10_u128.pow(u32::try_from(digits).unwrap_or(0));
    let parts = if up { (nbytes * scale).div_ceil(size) } else { nbytes * scale / size };
    let fraction = format!("{:0digits$}", parts % scale);
    let fraction = if digits == 0 { "" } else { fraction.trim_end_matches('0') };
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{}{point}{fraction} {}", parts / scale, UNITS[unit])
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is invalid.
    #[error("{0}")]
    Invalid(String),

    /// The caller asked for pinned memory, but pinning failed.
    #[error("memory cannot be pinned as asked: {why}; pin=\"auto\" accepts memory that is not pinned")]
    PinRefused {
        /// The reason and, if there is one, a remedy.
        why: String,
    },

    /// The region is too small for the plan.
    #[error(
        "the region holds {} and the plan needs {}: make the region at least {needed_bytes} bytes large",
        shown(*region_bytes, false), shown(*needed_bytes, true)
    )]
    RegionTooSmall {
        /// Bytes of the region.
        region_bytes: usize,
        /// Bytes of the smallest layout, which has no bytes for alignment.
        needed_bytes: usize,
    },

    /// The machine or the cgroup has too little free memory.
    #[error(
        "{} of memory are needed, but only {} are available ({limited_by}): use less memory, free some memory, or, if \
         a cgroup sets this limit, raise the limit",
        shown(*needed_bytes, true), shown(*available_bytes, false)
    )]
    OutOfMemory {
        /// Bytes that the caller asked for, rounded up to whole pages.
        needed_bytes: usize,
        /// Bytes that are available.
        available_bytes: usize,
        /// The name of the limit that allows no more than `available_bytes`.
        limited_by: String,
    },

    /// Every class of the plan is too small for the lease, so waiting would not help.
    #[error(
        "a lease of {asked_bytes} bytes can never be granted: the largest class of this arena is {largest_class_bytes} \
         bytes; plan a class of at least {asked_bytes} bytes"
    )]
    NoSuchClass {
        /// Bytes that the caller asked for.
        asked_bytes: usize,
        /// Bytes of the plan's largest class.
        largest_class_bytes: usize,
    },

    /// No slot became free within the time limit of the caller.
    #[error(
        "no slot for {asked_bytes} bytes became free within {:.3} s; the {class_count} slots of {class_bytes} bytes \
         are held by: {}; \
         drop a lease, or plan more slots",
        waited.as_secs_f64(), Holders(holders)
    )]
    TimedOut {
        /// Bytes that the caller asked for.
        asked_bytes: usize,
        /// Bytes of a slot of the smallest class that fits.
        class_bytes: usize,
        /// Number of slots of the smallest class that fits.
        class_count: usize,
        /// The time that the caller waited.
        waited: Duration,
        /// The owners that hold slots of this class.
        holders: Vec<Holder>,
    },

    /// The poll function of the caller stopped a wait for a slot, or the creation of a region.
    #[error("the wait for {asked_bytes} bytes of memory was interrupted; repeat the call")]
    Interrupted {
        /// Bytes that the caller asked for.
        asked_bytes: usize,
    },

    /// The region has been closed.
    #[error("the region has been closed; create a new region")]
    Closed,

    /// Another living arena divides the region.
    #[error("another arena uses this region already; create one region for each arena")]
    RegionTaken,

    /// A forked child used its parent's memory.
    #[error(
        "this memory belongs to the process that created it, and this process is a fork of that process; create a new \
         region in this process"
    )]
    Forked,

    /// The table of owners is full.
    #[error(
        "the arena cannot have more than {owners_max} owners, so {name:?} was rejected; use the name of an existing owner"
    )]
    TooManyOwners {
        /// The largest number of owners.
        owners_max: usize,
        /// The name of the rejected owner.
        name: String,
    },

    /// A system call failed.
    #[error("{call} of {} failed: {source}", shown(*nbytes, true))]
    System {
        /// The system call.
        call: &'static str,
        /// The size of the mapping in bytes.
        nbytes: usize,
        /// The error of the system.
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn shown_rounds_sizes_down_or_up_as_asked() {
        for (nbytes, down, up) in [
            (0, "0 bytes", "0 bytes"),
            (1023, "1023 bytes", "1023 bytes"),
            (1024, "1 KiB", "1 KiB"),
            (2_927_455, "2.79 MiB", "2.8 MiB"),
            (20 << 20, "20 MiB", "20 MiB"),
            ((20 << 20) + 1, "20 MiB", "20.1 MiB"),
            ((512 << 20) + 1, "512 MiB", "513 MiB"),
            ((1 << 30) - 1, "1023 MiB", "1024 MiB"),
            (usize::MAX, "16383 PiB", "16384 PiB"),
        ] {
            assert_eq!((shown(nbytes, false).as_str(), shown(nbytes, true).as_str()), (down, up));
        }
    }
}
