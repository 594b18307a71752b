//! Counts what a volume does, always.

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
