//! Defines the errors of this crate.

use std::sync::Arc;

/// The error of a function that `Engine::apply` called.
pub type Cause = Arc<dyn std::error::Error + Send + Sync>;

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an update. It is `Clone` because the queue keeps the error of a failed step and returns it to several
/// callers.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong. The call started nothing.
    #[error("{0}")]
    Invalid(String),

    /// The engine's present state does not allow the call.
    #[error("{0}")]
    Usage(String),

    /// The store failed: a device, or the contents of the store.
    #[error(transparent)]
    Store(#[from] memascend_store::Error),

    /// The staging chunks could not be allocated.
    #[error("no memory for the staging chunks: {0}")]
    Memory(Arc<memascend_mem::Error>),

    /// A function that `Engine::apply` called returned an error.
    #[error("the function applied to {name:?} failed: {cause}")]
    Function {
        /// The name of the record.
        name: String,
        /// The function's error.
        cause: Cause,
    },

    /// A panic of this crate, or of an applied function, ended the engine's thread.
    #[error(
        "the engine's thread has ended by a fault ({0}): uncommitted updates are lost, and the last commit stands; close \
         this engine and resume from there"
    )]
    Panicked(String),

    /// The kernels reject a hyperparameter.
    #[error(transparent)]
    Math(#[from] memascend_math::Error),
}

impl Error {
    /// Converts the error into a store error, for the callback with which the store settles records.
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

/// Runs `work` and turns a panic of it into [`Error::Panicked`].
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    memascend_mem::caught(work).unwrap_or_else(|what| Err(Error::Panicked(what)))
}
