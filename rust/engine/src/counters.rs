//! Counts the jobs and bytes of the pipeline, and the time that the pipeline's thread spends.

use std::time::Duration;

/// Jobs, bytes and times of the pipeline since the engine started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Number of updates of records.
    pub updates: u64,
    /// Jobs that applied a deferred update to get the record's values, and did not write the record.
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
    /// Bytes of values read. An update reads the values only if the record has no separate master weights.
    pub values_read: u64,
    /// Bytes of state written.
    pub state_written: u64,
    /// Bytes of values written.
    pub values_written: u64,
    /// Bytes of spilled gradients read.
    pub spill_read: u64,
    /// Bytes of spilled gradients written.
    pub spill_written: u64,
    /// Bytes of gradients written to the gradient log.
    pub log_written: u64,
    /// Updates whose gradient did not fit into the gradient log. The pipeline wrote the whole record of each such
    /// update instead.
    pub unlogged: u64,
    /// Bytes of callers' tensors in queued and running jobs.
    pub queued: u64,
    /// Peak of `queued`, measured each time a job of a step is queued. Jobs that only write first values are not
    /// measured.
    pub queued_peak: u64,
    /// Bytes of the gradients that stay in memory until their step is committed. Only records in RAM have such
    /// gradients.
    pub waiting: u64,
    /// Peak of `waiting`.
    pub waiting_peak: u64,
    /// Time spent on updates of records in RAM. These updates run after the commit.
    pub applying: Duration,
    /// Time that the pipeline's thread waited for a job.
    pub idle: Duration,
    /// Time spent waiting for reads, including the verification of checksums.
    pub reading: Duration,
    /// Time spent computing, including waits for functions that run on another thread.
    pub computing: Duration,
    /// Time spent on checksums of written data, and on submitting the writes.
    pub sealing: Duration,
    /// Time spent waiting for writes.
    pub writing: Duration,
}
