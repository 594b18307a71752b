//! What the pipeline has moved, and where its time went.

use std::time::Duration;

/// What the pipeline has moved, and where its thread's time went, since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Parameters updated.
    pub updates: u64,
    /// Chunks updated.
    pub chunks: u64,
    /// Bytes of state read.
    pub state_read: u64,
    /// Bytes of values read, where they are the master.
    pub values_read: u64,
    /// Bytes of state written.
    pub state_written: u64,
    /// Bytes of values written.
    pub values_written: u64,
    /// Waiting for work.
    pub idle: Duration,
    /// Waiting for reads, their checksums included.
    pub reading: Duration,
    /// Computing.
    pub computing: Duration,
    /// Computing checksums of what is written, and beginning the writes.
    pub sealing: Duration,
    /// Waiting for writes.
    pub writing: Duration,
}
