//! Defines the counters of an engine: its jobs and bytes, and the time that it spends.

use std::time::Duration;

/// Jobs, bytes and times of an engine since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Updates of records by kernels of this library. If several jobs settle chunks of a record, each job counts.
    pub updates: u64,
    /// Jobs that applied a deferred update to get the record's values, and did not write the record.
    pub computed: u64,
    /// Jobs that applied a function to a record.
    pub applied: u64,
    /// Records whose first values were written.
    pub fills: u64,
    /// Jobs that spilled a gradient, added to a spilled gradient, or copied it to the other place of its record.
    /// `Engine::update_spilling` counts as an update instead.
    pub spills: u64,
    /// Turns that the pipeline computed, and chunks that were updated in the RAM tier.
    pub chunks: u64,
    /// Bytes of state read from storage.
    pub state_read: u64,
    /// Bytes of values read from storage. Except in a replay, a kernel's update reads the values only if the record has
    /// no separate master weights, and only if the caller gave no values.
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
    /// Updates whose gradient the gradient log rejected, for example for lack of room, although the log admits the
    /// record. The pipeline wrote the whole record of each such update instead.
    pub unlogged: u64,
    /// Bytes of callers' tensors in queued and running jobs. The `values` that a caller gives to an update or to
    /// `Engine::apply` do not count.
    pub queued: u64,
    /// Peak of `queued`, measured each time a job of a step is queued. Jobs that only write first values are not
    /// measured.
    pub queued_peak: u64,
    /// Bytes of gradients of records in RAM: the gradients of waiting updates, and the gradients that are kept in
    /// memory instead of spilled.
    pub waiting: u64,
    /// Peak of `waiting`.
    pub waiting_peak: u64,
    /// Time spent after commits on updates of records in RAM.
    pub applying: Duration,
    /// Time that the pipeline's thread waited for a job.
    pub idle: Duration,
    /// Time spent on starting reads and waiting for them. This includes waits for free staging chunks, and the
    /// verification of checksums.
    pub reading: Duration,
    /// Time spent computing, including waits for functions that run on another thread.
    pub computing: Duration,
    /// Time spent on checksums of written data, and on submitting the writes.
    pub sealing: Duration,
    /// Time spent waiting for writes.
    pub writing: Duration,
}
