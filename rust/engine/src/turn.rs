//! A job and its turns, as everything else sees them: record, progress, staging chunk.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use memascend_mem::locked;
use memascend_store::Shared;

use crate::{Error, Result};

/// A turn of a job: which, and the staging chunk that is its own.
pub(crate) struct Turn {
    pub(crate) record: usize,
    pub(crate) index: u32,
    pub(crate) memory: Shared,
}

/// What a job that succeeds leaves in its record's room for a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// What was there.
    Same,
    Gradient,
    Nothing,
}

/// A job that waits or runs, as callers and the pipeline see it.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) record: usize,
    /// Bytes of the caller's that it holds until it has used them.
    pub(crate) nbytes: usize,
    pub(crate) leaves: Leaves,
    /// Somebody computes with its results: it goes before other jobs, and is no part of the step. A discard leaves it, and
    /// what it fails with is told to whoever waits for it.
    pub(crate) urgent: bool,
    failed: Mutex<Option<Error>>,
    /// It is to be dropped as soon as may be.
    cancelled: AtomicBool,
    /// It was computed to its end.
    completed: AtomicBool,
}

impl Mark {
    pub(crate) fn new(record: usize, nbytes: usize, leaves: Leaves) -> Self {
        let (cancelled, completed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { record, nbytes, leaves, urgent: false, failed: Mutex::default(), cancelled, completed }
    }

    /// The same of an urgent job, which holds nothing of the step.
    pub(crate) fn urgent(record: usize) -> Self {
        Self { urgent: true, ..Self::new(record, 0, Leaves::Same) }
    }

    /// What an urgent job failed with.
    pub(crate) fn result(&self) -> Result<()> {
        locked(&self.failed).clone().map_or(Ok(()), Err)
    }

    /// Ends an urgent job.
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
