//! A job and its turns, as everything else sees them: record, progress, staging chunk.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use memascend_store::Shared;

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
    /// It is to be dropped as soon as may be.
    cancelled: AtomicBool,
    /// It was computed to its end.
    completed: AtomicBool,
}

impl Mark {
    pub(crate) fn new(record: usize, nbytes: usize, leaves: Leaves) -> Self {
        Self { record, nbytes, leaves, cancelled: AtomicBool::new(false), completed: AtomicBool::new(false) }
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
