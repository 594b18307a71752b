//! Defines turns of a job, and marks, through which callers and the pipeline follow a job.
//!
//! [Note: a turn owns its staging chunk] The pipeline leases each staging chunk to one turn. It calls `Work::compute`
//! after all reads of the turn have ended and before it begins the turn's writes, so that `compute` has the chunk to
//! itself. An update in place (`Workbench::in_place`) has its chunk to itself, too: one thread takes each chunk of the
//! RAM tier, and no transfer of that chunk is in flight.

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

/// The contents of a record's place for a spilled gradient after a successful job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// The place is unchanged.
    Same,
    Gradient,
    Nothing,
}

/// A queued or running job, as callers and the pipeline see it.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) record: usize,
    /// Bytes of the caller's tensors that the job holds until it has used them.
    pub(crate) nbytes: usize,
    pub(crate) leaves: Leaves,
    /// The job goes before other jobs, because a caller waits to compute with its results. It is not part of the step:
    /// a discard does not drop it, and only callers that wait for this job get its error.
    pub(crate) urgent: bool,
    failed: Mutex<Option<Error>>,
    /// True once the job is cancelled: the pipeline skips its remaining turns.
    cancelled: AtomicBool,
    /// True once the last turn is computed.
    completed: AtomicBool,
}

impl Mark {
    pub(crate) fn new(record: usize, nbytes: usize, leaves: Leaves) -> Self {
        let (cancelled, completed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { record, nbytes, leaves, urgent: false, failed: Mutex::default(), cancelled, completed }
    }

    /// Creates the mark of an urgent job, which holds no tensors of the step.
    pub(crate) fn urgent(record: usize) -> Self {
        Self { urgent: true, ..Self::new(record, 0, Leaves::Same) }
    }

    /// Returns the error of an urgent job, if it failed.
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
