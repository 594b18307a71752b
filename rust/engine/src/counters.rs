//! Counts what the pipeline moves and where its time goes.

use std::time::Duration;

/// What the pipeline has moved, and where its thread's time went, since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Records updated.
    pub updates: u64,
    /// Times that values of a record were computed before they were written.
    pub computed: u64,
    /// Records that a function was applied to.
    pub applied: u64,
    /// Records filled with their first values.
    pub fills: u64,
    /// Gradients spilled or added to spilled ones.
    pub spills: u64,
    /// Chunks computed.
    pub chunks: u64,
    /// Bytes of state read.
    pub state_read: u64,
    /// Bytes of values read, where they are the master.
    pub values_read: u64,
    /// Bytes of state written.
    pub state_written: u64,
    /// Bytes of values written.
    pub values_written: u64,
    /// Bytes of spilled gradients read.
    pub spill_read: u64,
    /// Bytes of spilled gradients written.
    pub spill_written: u64,
    /// Bytes of gradients written to the log.
    pub log_written: u64,
    /// Updates whose gradients the log is for and did not take, so that their records were written whole.
    pub unlogged: u64,
    /// Bytes of callers' tensors that wait or are being used now.
    pub queued: u64,
    /// The most of them, those of first values left out.
    pub queued_peak: u64,
    /// Bytes of gradients of records in RAM that wait for their step.
    pub waiting: u64,
    /// The most of them.
    pub waiting_peak: u64,
    /// Applying updates to records in RAM.
    pub applying: Duration,
    /// Waiting for work.
    pub idle: Duration,
    /// Waiting for reads, their checksums included.
    pub reading: Duration,
    /// Computing, and waiting for functions that compute on a thread of their own.
    pub computing: Duration,
    /// Computing checksums of what is written, and beginning the writes.
    pub sealing: Duration,
    /// Waiting for writes.
    pub writing: Duration,
}
