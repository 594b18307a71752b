//! Defines the errors of a store.

use std::{path::Path, sync::Arc};

use memascend_mem::Ended;

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a store. It implements `Clone`, because several callers may receive the same error.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong, or does not fit the existing store.
    #[error("{0}")]
    Invalid(String),

    /// The store's current state does not allow the call.
    #[error("{0}")]
    Usage(String),

    /// No store can be created or opened at the path. Nothing was changed.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file or device.
        path: Arc<Path>,
        /// The reason and, in most cases, the remedy.
        why: String,
    },

    /// The store never had a commit: its first write did not finish. Nothing was changed.
    #[error(
        "{}: this store is incomplete because its first write did not finish. There is nothing to resume: \
         pass existing=\"replace\" to create the store again",
        path.display()
    )]
    Unfilled {
        /// The file or device.
        path: Arc<Path>,
    },

    /// A checksum or a field of the format is wrong.
    #[error("{}: {what} is damaged at offset {offset}: {why}", path.display())]
    Corrupt {
        /// The file or device. For a part that may be on any of the store's devices, the first device.
        path: Arc<Path>,
        /// The damaged part, such as a chunk of a parameter, a part of the log, or a root.
        what: String,
        /// Offset of the part in the volume.
        offset: u64,
        /// The size of the part in bytes.
        nbytes: u64,
        /// What is wrong with the part.
        why: String,
    },

    /// An operation of the volume failed, for example because a device failed.
    #[error(transparent)]
    Storage(#[from] memascend_nvme::Error),

    /// A commit failed while it was made durable, an update in memory failed, or
    /// [`Store::give_up_applied`](crate::Store::give_up_applied) abandoned updates. After a failed commit, only opening
    /// the store again shows whether the root of the new step is on storage.
    #[error("nothing can be saved in this store until it is opened again: {0}")]
    Broken(Arc<Error>),

    /// Host memory could not be allocated.
    #[error("the store cannot allocate host memory: {0}")]
    Memory(Arc<memascend_mem::Error>),

    /// A wait exceeded its timeout. The awaited operation continues.
    #[error("waiting for {0} took longer than its timeout: wait again, or pass a longer timeout")]
    TimedOut(&'static str),

    /// A function of the caller, such as `keep_waiting`, `progress` or `agree`, returned `false`, so the call ended
    /// early. Nothing was lost.
    #[error("waiting for {0} was interrupted; nothing was lost: repeat the call")]
    Interrupted(&'static str),
}

impl Error {
    /// Returns [`Error::Corrupt`] for the part `what` of `nbytes` bytes at `offset`.
    pub(crate) fn corrupt(
        path: &Path,
        what: impl Into<String>,
        (offset, nbytes): (u64, u64),
        why: impl Into<String>,
    ) -> Self {
        Self::Corrupt { path: path.into(), what: what.into(), offset, nbytes, why: why.into() }
    }

    /// Appends `more` to the reason of a `Corrupt` or `Refused` error. Returns other errors unchanged.
    pub(crate) fn adding(self, more: &str) -> Self {
        match self {
            Self::Corrupt { path, what, offset, nbytes, why } => {
                Self::Corrupt { path, what, offset, nbytes, why: why + more }
            }
            Self::Refused { path, why } => Self::Refused { path, why: why + more },
            error => error,
        }
    }

    /// Converts `ended`, the reason why a wait for `what` ended early, into an error.
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
