//! Defines turns and marks. A job is divided into turns. Callers and the pipeline follow a job through its mark.
//!
//! [Note: a turn owns its staging chunk] The pipeline leases each staging chunk to one turn. It calls `Work::compute`
//! after all reads of the turn have ended and before it starts the writes of the turn. So no other code uses the chunk
//! during `compute`. An update in place (`Workbench::in_place`) works on a chunk of the RAM tier instead. Only one
//! thread updates each chunk of the RAM tier, and no transfer of this chunk is in flight. The kernels that `apply_logs`
//! registers work on memory that no other code uses during the call.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use memascend_mem::locked;
use memascend_store::Shared;

use crate::{Error, Result};

/// One turn of a job: its index, and the staging chunk that it owns.
pub(crate) struct Turn {
    pub(crate) record: usize,
    pub(crate) index: u32,
    pub(crate) memory: Shared,
}

/// What the record's place for a spilled gradient contains after a job has succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// The place is unchanged.
    Same,
    Gradient,
    Nothing,
}

/// The mark of a queued or running job. Callers and the pipeline share it.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) record: usize,
    /// The result of [`Work::nbytes`](crate::job::Work::nbytes).
    pub(crate) nbytes: usize,
    pub(crate) leaves: Leaves,
    /// True if a caller waits for the results of the job. The pipeline runs urgent jobs before all other jobs. An
    /// urgent job is not part of the step: a discard does not drop it, and only callers that wait for the job get
    /// its error.
    pub(crate) urgent: bool,
    failed: Mutex<Option<Error>>,
    /// True once the job is cancelled: the pipeline skips its remaining turns.
    cancelled: AtomicBool,
    /// True once the last turn of the job is computed.
    completed: AtomicBool,
}

impl Mark {
    pub(crate) fn new(record: usize, nbytes: usize, leaves: Leaves) -> Self {
        let (cancelled, completed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { record, nbytes, leaves, urgent: false, failed: Mutex::default(), cancelled, completed }
    }

    /// Creates the mark of an urgent job. An urgent job adds no bytes to the queue's bound, and leaves the spilled
    /// gradient unchanged.
    pub(crate) fn urgent(record: usize) -> Self {
        Self { urgent: true, ..Self::new(record, 0, Leaves::Same) }
    }

    /// Returns the error of an urgent job, if the job failed.
    pub(crate) fn result(&self) -> Result<()> {
        locked(&self.failed).clone().map_or(Ok(()), Err)
    }

    /// Records the first error of an urgent job, and cancels the job.
    pub(crate) fn fail(&self, error: &Error) {
        locked(&self.failed).get_or_insert_with(|| error.clone());
        self.cancel();
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Relaxed);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Relaxed)
    }

    pub(crate) fn complete(&self) {
        self.completed.store(true, Relaxed);
    }

    pub(crate) fn is_completed(&self) -> bool {
        self.completed.load(Relaxed)
    }
}
