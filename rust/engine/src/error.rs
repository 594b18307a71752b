//! Defines the errors of this crate.

use std::sync::Arc;

/// The error that a function of the caller returned: a function for `Engine::apply`, or the [`Source`](crate::Source)
/// of a gradient.
pub type Cause = Arc<dyn std::error::Error + Send + Sync>;

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the engine. The type is `Clone` because the queue keeps the error of a failed step and returns this
/// error to several callers.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong, so the call was rejected.
    #[error("{0}")]
    Invalid(String),

    /// The engine's present state does not allow the call.
    #[error("{0}")]
    Usage(String),

    /// The store returned an error. For example, a device failed, or the data in the store is damaged.
    #[error(transparent)]
    Store(#[from] memascend_store::Error),

    /// The staging chunks could not be allocated.
    #[error("the engine could not get memory for its staging chunks: {0}")]
    Memory(Arc<memascend_mem::Error>),

    /// A function for `Engine::apply`, or the source of a gradient, returned an error.
    #[error("the function applied to {name:?} failed: {cause}")]
    Function {
        /// The name of the record.
        name: String,
        /// The error that the function returned.
        cause: Cause,
    },

    /// A panic of this crate, or of an applied function, ended the engine's thread.
    #[error(
        "a panic ended the engine's thread ({0}), so updates that were not committed are lost; close this engine and \
         resume \
         from the last commit, which is intact"
    )]
    Panicked(String),

    /// The update kernels reject a hyperparameter.
    #[error(transparent)]
    Math(#[from] memascend_math::Error),
}

impl Error {
    /// Converts this error into an error of the store. The callback through which the store settles records must return
    /// errors of the store.
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

/// Runs `work`. If `work` panics, returns [`Error::Panicked`].
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    memascend_mem::caught(work).unwrap_or_else(|what| Err(Error::Panicked(what)))
}
