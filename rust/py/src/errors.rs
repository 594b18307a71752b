//! Converts the errors of the Rust crates into exceptions of `memascend.errors`. No other file does this.

use std::path::Path;

use memascend_engine::Error as EngineError;
use memascend_math::Error as MathError;
use memascend_mem::Error as MemoryError;
use memascend_nvme::Error as NvmeError;
use memascend_store::Error as StoreError;
use pyo3::{
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyModule},
};

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// An error of a crate that converts into a Python exception.
pub(crate) trait IntoPyErr {
    fn raised(&self, py: Python<'_>) -> PyErr;
}

/// Converts the error of a result into a Python exception.
pub(crate) trait OrPyErr<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: IntoPyErr> OrPyErr<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| error.raised(py))
    }
}

/// Makes an exception of the class `class` of `memascend.errors`.
fn exception(py: Python<'_>, class: &str, message: String) -> PyErr {
    exception_with(py, class, message, |_| Ok(()))
}

/// Makes an exception like [`exception`], with keyword arguments that `attributes` sets.
fn exception_with(
    py: Python<'_>,
    class: &str,
    message: String,
    attributes: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let keywords = PyDict::new(py);
        attributes(&keywords)?;
        let module = ERRORS.get_or_try_init(py, || PyModule::import(py, "memascend.errors").map(Bound::unbind))?;
        let error = module.bind(py).getattr(class)?.call((message,), Some(&keywords))?;
        Ok(PyErr::from_value(error))
    };
    make().unwrap_or_else(|error| error)
}

/// True if an exception is of the class `class` of `memascend.errors`.
fn is_a(py: Python<'_>, raised: &PyErr, class: &str) -> bool {
    PyModule::import(py, "memascend.errors")
        .and_then(|errors| errors.getattr(class))
        .is_ok_and(|class| raised.is_instance(py, &class))
}

/// Makes the exception for a wrong option or argument.
pub(crate) fn config_error(py: Python<'_>, message: String) -> PyErr {
    exception(py, "ConfigError", message)
}

/// Makes the exception for wrong use, such as a call that is not allowed now.
pub(crate) fn usage_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "UsageError", message.into())
}

impl IntoPyErr for MemoryError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        let message = self.to_string();
        match *self {
            MemoryError::RegionTooSmall { needed_bytes, .. } => {
                exception_with(py, "BudgetError", message, |of| of.set_item("smallest", needed_bytes))
            }
            MemoryError::OutOfMemory { needed_bytes, available_bytes, .. } => {
                memory_limit(py, message, needed_bytes, Some(available_bytes))
            }
            MemoryError::System { nbytes, .. } => memory_limit(py, message, nbytes, None),
            MemoryError::TimedOut { .. } => exception(py, "TimeoutExpired", message),
            MemoryError::Closed | MemoryError::Forked | MemoryError::RegionTaken | MemoryError::Interrupted { .. } => {
                exception(py, "UsageError", message)
            }
            // Invalid, PinRefused, NoSuchClass, TooManyOwners: an argument is wrong, or the system cannot do what it
            // asks for.
            _ => config_error(py, message),
        }
    }
}

impl IntoPyErr for NvmeError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        let message = self.to_string();
        match self {
            NvmeError::Device { path, offset, nbytes, errno, .. } => {
                storage_error(py, "StorageError", message, (Some(*errno), path, Some((*offset, *nbytes))))
            }
            NvmeError::Ended { path, offset, nbytes, .. } => {
                storage_error(py, "StorageError", message, (None, path, Some((*offset, *nbytes))))
            }
            NvmeError::Refused { path, errno, .. } => storage_error(py, "StorageError", message, (*errno, path, None)),
            NvmeError::Memory(error) => error.raised(py),
            NvmeError::Panicked(_) => exception(py, "MemascendError", message),
            NvmeError::TimedOut { .. } => exception(py, "TimeoutExpired", message),
            NvmeError::Closed | NvmeError::Forked | NvmeError::TooMany { .. } | NvmeError::Interrupted { .. } => {
                exception(py, "UsageError", message)
            }
            // Invalid, PastTheEnd, NoBackend: an argument is wrong, or the system cannot do what it asks for.
            _ => config_error(py, message),
        }
    }
}

impl IntoPyErr for StoreError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        let message = self.to_string();
        match self {
            StoreError::Refused { path, .. } | StoreError::Unfilled { path } => {
                storage_error(py, "StorageError", message, (None, path, None))
            }
            StoreError::Corrupt { path, offset, nbytes, .. } => {
                let place = Some((*offset, usize::try_from(*nbytes).unwrap_or(usize::MAX)));
                storage_error(py, "CorruptionError", message, (None, path, place))
            }
            StoreError::Storage(error) => error.raised(py),
            StoreError::Memory(error) => error.raised(py),
            StoreError::TimedOut(_) => exception(py, "TimeoutExpired", message),
            StoreError::Broken(cause) => match &**cause {
                StoreError::Storage(NvmeError::Device { path, offset, nbytes, errno, .. }) => {
                    storage_error(py, "StorageError", message, (Some(*errno), path, Some((*offset, *nbytes))))
                }
                _ => exception(py, "StorageError", message),
            },
            StoreError::Usage(_) | StoreError::Interrupted(_) => exception(py, "UsageError", message),
            // Invalid: an argument was wrong, or does not fit the store.
            _ => config_error(py, message),
        }
    }
}

impl IntoPyErr for EngineError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        match self {
            EngineError::Store(error) => error.raised(py),
            EngineError::Memory(error) => error.raised(py),
            EngineError::Math(error) => error.raised(py),
            EngineError::Function { cause, .. } => {
                let cause = cause.downcast_ref::<PyErr>();
                // A failure of the device is not a mistake of the user, so the exception stays a `DeviceError`.
                let lost = cause.filter(|cause| is_a(py, cause, "DeviceError"));
                let raised = match lost {
                    Some(lost) => exception(py, "DeviceError", lost.value(py).to_string()),
                    None => exception(py, "UsageError", self.to_string()),
                };
                raised.set_cause(py, cause.map(|cause| cause.clone_ref(py)));
                raised
            }
            EngineError::Usage(_) => exception(py, "UsageError", self.to_string()),
            EngineError::Panicked(_) => exception(py, "MemascendError", self.to_string()),
            _ => config_error(py, self.to_string()),
        }
    }
}

fn memory_limit(py: Python<'_>, message: String, needed: usize, available: Option<usize>) -> PyErr {
    exception_with(py, "MemoryLimitError", message, |of| {
        of.set_item("needed", needed)?;
        of.set_item("available", available)
    })
}

/// Makes a storage exception with these attributes: the system's error number, the path of the file or device, and the
/// place in it as (offset, bytes).
fn storage_error(
    py: Python<'_>,
    class: &str,
    message: String,
    (errno, path, place): (Option<i32>, &Path, Option<(u64, usize)>),
) -> PyErr {
    exception_with(py, class, message, |of| {
        of.set_item("errno", errno)?;
        // Passes a str, not a `Path`. Bytes of the path that cannot be decoded become surrogates.
        of.set_item("path", path.as_os_str())?;
        of.set_item("offset", place.map(|(offset, _)| offset))?;
        of.set_item("nbytes", place.map(|(_, nbytes)| nbytes))
    })
}

impl IntoPyErr for MathError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        config_error(py, self.to_string())
    }
}
