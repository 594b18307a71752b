//! Counters of a volume's operations, requests and bytes.

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
    /// Transfers that moved only a part of a request's bytes, so that the request continued with the rest.
    pub continued: u64,
    /// Retries of requests after EINTR, EAGAIN or ENOMEM.
    pub retried: u64,
    /// Bytes that the copy threads moved through chunks: of transfers whose address, offset or length was not aligned,
    /// and of writes to a block that another operation was rewriting.
    pub bounced_bytes: u64,
    /// Operations that have begun but not ended.
    pub in_flight: u64,
}
