//! Counters of a volume's operations, requests and bytes. Every volume has these counters.

/// Counters of a volume's reads, or of its writes, since the volume was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// Bytes of the operations that succeeded.
    pub bytes: u64,
    /// Operations that succeeded.
    pub operations: u64,
    /// Requests that were sent to the devices, for operations that succeeded and for operations that failed.
    pub requests: u64,
}

/// Counters of a volume since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VolumeStats {
    /// Counters of reads.
    pub read: Moved,
    /// Counters of writes.
    pub written: Moved,
    /// Flushes that succeeded.
    pub flushes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Requests that moved only a part of their bytes, so that the rest was requested again.
    pub continued: u64,
    /// Requests that were sent to the kernel again after EINTR, EAGAIN or ENOMEM.
    pub retried: u64,
    /// Bytes that were copied through a chunk, because the address, the offset or the length of their transfer was not
    /// aligned.
    pub bounced_bytes: u64,
    /// Operations that have begun but not ended.
    pub in_flight: u64,
}
