//! Counts the bytes that the pipeline moves, and the time of its thread.

use std::time::Duration;

/// Jobs and bytes of the pipeline, and the time of its thread, since the engine started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Records updated.
    pub updates: u64,
    /// Jobs that computed values of deferred updates without writing them.
    pub computed: u64,
    /// Records to which a function was applied.
    pub applied: u64,
    /// Records whose first values were written.
    pub fills: u64,
    /// Gradients that were spilled, or added to a spilled gradient.
    pub spills: u64,
    /// Chunks computed.
    pub chunks: u64,
    /// Bytes of state read.
    pub state_read: u64,
    /// Bytes of values read. An update reads values only if they are the master weights, or a part of them.
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
    /// Updates of logged records for whose gradients the log had no room. Each such record was written whole.
    pub unlogged: u64,
    /// Bytes of callers' tensors in queued and running jobs.
    pub queued: u64,
    /// Peak of `queued`, measured when a job of a step is queued; first values alone do not raise it.
    pub queued_peak: u64,
    /// Bytes of gradients of records in RAM that wait for their step.
    pub waiting: u64,
    /// Peak of `waiting`.
    pub waiting_peak: u64,
    /// Time spent on updates of records in RAM after commits.
    pub applying: Duration,
    /// Time without a job.
    pub idle: Duration,
    /// Time spent waiting for reads, including their checksums.
    pub reading: Duration,
    /// Time spent computing, including waits for functions that run on another thread.
    pub computing: Duration,
    /// Time spent on checksums of written data, and on submitting the writes.
    pub sealing: Duration,
    /// Time spent waiting for writes.
    pub writing: Duration,
}
