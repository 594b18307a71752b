//! Defines the errors of this crate.

use std::sync::Arc;

/// The error that a function of the caller returned: a function for `Engine::apply`, or the [`Source`](crate::Source)
/// of a gradient.
pub type Cause = Arc<dyn std::error::Error + Send + Sync>;

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the engine. The type is `Clone` because the engine keeps some errors, such as the error of a panic, and
/// returns them several times.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument, or a rule in the store's log, is wrong. This variant also reports bugs of the engine, and threads
    /// that could not be started.
    #[error("{0}")]
    Invalid(String),

    /// The present state does not allow the operation. For example, the engine is closed, or values in memory are not
    /// those of the last commit.
    #[error("{0}")]
    Usage(String),

    /// The store returned an error. For example, a device failed, or the data in the store is damaged.
    #[error(transparent)]
    Store(#[from] memascend_store::Error),

    /// The engine could not lease staging memory.
    #[error("the engine could not lease staging memory: {0}")]
    Memory(Arc<memascend_mem::Error>),

    /// A function for `Engine::apply`, or the source of a gradient, returned an error.
    #[error("a function that the engine called for {name:?} failed: {cause}")]
    Function {
        /// The name of the record.
        name: String,
        /// The error that the function returned.
        cause: Cause,
    },

    /// Code of this crate panicked, or code that it called, such as an applied function.
    #[error(
        "a panic ended the engine's work ({0}), so updates that were not committed are lost; close this engine and \
         resume from the last commit"
    )]
    Panicked(String),

    /// A function of `memascend_math` rejected its arguments, such as a hyperparameter.
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
