//! Errors of a store.

use std::{path::Path, sync::Arc};

use memascend_mem::Ended;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with a store. Cloned where several callers must hear of the same failure.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is wrong, or does not fit the store that is there.
    #[error("{0}")]
    Invalid(String),

    /// A call that cannot be made now.
    #[error("{0}")]
    Usage(String),

    /// What lies at a path is no store that can be opened. Nothing was changed.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file or device.
        path: Arc<Path>,
        /// The reason and the remedy.
        why: String,
    },

    /// A store has no commit and never had one: it was being made when whoever made it ended. Nothing was changed.
    #[error(
        "{}: its first write did not finish, so its run never began and there is nothing to resume: \
         give existing=\"replace\" to begin it",
        path.display()
    )]
    Unfilled {
        /// The file or device.
        path: Arc<Path>,
    },

    /// A checksum or a field of the format is wrong.
    #[error("{}: {what} is damaged at offset {offset}: {why}", path.display())]
    Corrupt {
        /// The file or device; the first of several.
        path: Arc<Path>,
        /// Which part: a parameter and chunk, or a part of the catalog.
        what: String,
        /// Where, in the store's address space.
        offset: u64,
        /// How many bytes.
        nbytes: u64,
        /// What is wrong.
        why: String,
    },

    /// A device failed.
    #[error(transparent)]
    Storage(#[from] memascend_nvme::Error),

    /// A commit failed while it was being made durable; which of the two steps is on storage is known after reopening.
    #[error(
        "a commit failed while it was made durable, and nothing can be staged until the store is opened again: {0}"
    )]
    Broken(Arc<Error>),

    /// Host memory could not be had.
    #[error("no memory for the catalog's buffers: {0}")]
    Memory(Arc<memascend_mem::Error>),

    /// A wait that took too long. Nothing was lost.
    #[error("{0} was not done in time, and continues")]
    TimedOut(&'static str),

    /// The caller's poll function asked to stop waiting. Nothing was lost.
    #[error("waiting for {0} was interrupted, and it continues")]
    Interrupted(&'static str),
}

impl Error {
    /// That what lies at a place, as (offset, bytes), is damaged.
    pub(crate) fn corrupt(
        path: &Path,
        what: impl Into<String>,
        (offset, nbytes): (u64, u64),
        why: impl Into<String>,
    ) -> Self {
        Self::Corrupt { path: path.into(), what: what.into(), offset, nbytes, why: why.into() }
    }

    /// The same error with more about damage or a refusal.
    pub(crate) fn adding(self, more: &str) -> Self {
        match self {
            Self::Corrupt { path, what, offset, nbytes, why } => {
                Self::Corrupt { path, what, offset, nbytes, why: why + more }
            }
            Self::Refused { path, why } => Self::Refused { path, why: why + more },
            error => error,
        }
    }

    /// What ended a wait for `what`.
    #[must_use]
    pub fn of_wait(ended: Ended, what: &'static str) -> Self {
        match ended {
            Ended::TimedOut(_) => Self::TimedOut(what),
            Ended::Interrupted => Self::Interrupted(what),
        }
    }
}

impl From<memascend_mem::Error> for Error {
    fn from(error: memascend_mem::Error) -> Self {
        Self::Memory(Arc::new(error))
    }
}
