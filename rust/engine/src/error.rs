//! Errors of an update.

use std::sync::Arc;

/// What a function that was applied failed with.
pub type Cause = Arc<dyn std::error::Error + Send + Sync>;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with an update. Cloned because the step that failed is asked more than once.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is wrong. Nothing was begun.
    #[error("{0}")]
    Invalid(String),

    /// A call that cannot be made now.
    #[error("{0}")]
    Usage(String),

    /// Storage, or what is on it.
    #[error(transparent)]
    Store(#[from] memascend_store::Error),

    /// Host memory could not be had.
    #[error("no memory for the staging chunks: {0}")]
    Memory(Arc<memascend_mem::Error>),

    /// What a function that was applied failed with.
    #[error("the function applied to {name:?} failed: {cause}")]
    Function {
        /// The record.
        name: String,
        /// Its error.
        cause: Cause,
    },

    /// A fault of this crate, or of a function that was applied, ended the engine's thread.
    #[error(
        "the engine's thread has ended by a fault ({0}): what was not committed is lost, and the last commit stands; close \
         this engine and resume from there"
    )]
    Panicked(String),

    /// A number that the kernels refuse.
    #[error(transparent)]
    Math(#[from] memascend_math::Error),
}

impl Error {
    /// As an error of the store that asked for something.
    pub(crate) fn of_store(self) -> memascend_store::Error {
        match self {
            Self::Store(error) => error,
            error => memascend_store::Error::Usage(error.to_string()),
        }
    }
}

impl From<memascend_mem::Error> for Error {
    fn from(error: memascend_mem::Error) -> Self {
        Self::Memory(Arc::new(error))
    }
}

/// Does work whose panic is an error for whoever waits for it.
pub(crate) fn contained<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    memascend_mem::caught(work).unwrap_or_else(|said| Err(Error::Panicked(said)))
}
