//! Converts the crates' errors into exceptions of `memascend.errors`, all in one place.

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

/// An exception of the class that `memascend.errors` calls `class`, with its attributes as keywords.
fn exception(py: Python<'_>, class: &str, message: String, attributes: &[(&str, Option<usize>)]) -> PyErr {
    let keywords = PyDict::new(py);
    match attributes.iter().try_for_each(|(name, value)| keywords.set_item(name, value)) {
        Ok(()) => exception_with(py, class, message, &keywords),
        Err(error) => error,
    }
}

fn exception_with(py: Python<'_>, class: &str, message: String, keywords: &Bound<'_, PyDict>) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let module = ERRORS.get_or_try_init(py, || PyModule::import(py, "memascend.errors").map(Bound::unbind))?;
        let error = module.bind(py).getattr(class)?.call((message,), Some(keywords))?;
        Ok(PyErr::from_value(error))
    };
    make().unwrap_or_else(|error| error)
}

/// Whether an exception is of the class that `memascend.errors` calls `class`.
fn is_a(py: Python<'_>, raised: &PyErr, class: &str) -> bool {
    PyModule::import(py, "memascend.errors")
        .and_then(|errors| errors.getattr(class))
        .is_ok_and(|class| raised.is_instance(py, &class))
}

/// A wrong option.
pub(crate) fn config_error(py: Python<'_>, message: String) -> PyErr {
    exception(py, "ConfigError", message, &[])
}

/// A call that cannot be made now.
pub(crate) fn usage_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "UsageError", message.into(), &[])
}

/// What `rust/mem` says, in Python's words.
pub(crate) fn memory_error(py: Python<'_>, error: &MemoryError) -> PyErr {
    let message = error.to_string();
    match *error {
        MemoryError::RegionTooSmall { needed_bytes, .. } => {
            exception(py, "BudgetError", message, &[("smallest", Some(needed_bytes))])
        }
        MemoryError::OutOfMemory { needed_bytes, available_bytes, .. } => exception(
            py,
            "MemoryLimitError",
            message,
            &[("needed", Some(needed_bytes)), ("available", Some(available_bytes))],
        ),
        MemoryError::System { nbytes, .. } => {
            exception(py, "MemoryLimitError", message, &[("needed", Some(nbytes)), ("available", None)])
        }
        MemoryError::TimedOut { .. } => exception(py, "TimeoutExpired", message, &[]),
        MemoryError::Closed | MemoryError::Forked | MemoryError::RegionTaken | MemoryError::Interrupted { .. } => {
            exception(py, "UsageError", message, &[])
        }
        // Invalid, PinRefused, NoSuchClass, TooManyOwners: an argument was wrong.
        _ => config_error(py, message),
    }
}

/// What `rust/nvme` says, in Python's words.
pub(crate) fn nvme_error(py: Python<'_>, error: &NvmeError) -> PyErr {
    let message = error.to_string();
    match error {
        NvmeError::Device { path, offset, nbytes, errno, .. } => {
            storage_error(py, message, Some(*errno), path, Some((*offset, *nbytes)))
        }
        NvmeError::Ended { path, offset, nbytes, .. } => {
            storage_error(py, message, None, path, Some((*offset, *nbytes)))
        }
        NvmeError::Refused { path, errno, .. } => storage_error(py, message, *errno, path, None),
        NvmeError::Memory(error) => memory_error(py, error),
        NvmeError::Panicked(_) => exception(py, "MemascendError", message, &[]),
        NvmeError::TimedOut { .. } => exception(py, "TimeoutExpired", message, &[]),
        NvmeError::Closed | NvmeError::Forked | NvmeError::TooMany { .. } | NvmeError::Interrupted { .. } => {
            exception(py, "UsageError", message, &[])
        }
        // Invalid, PastTheEnd, NoBackend: an argument was wrong.
        _ => config_error(py, message),
    }
}

/// What `rust/store` says, in Python's words.
pub(crate) fn store_error(py: Python<'_>, error: &StoreError) -> PyErr {
    let message = error.to_string();
    match error {
        StoreError::Refused { path, .. } | StoreError::Unfilled { path } => {
            storage_error(py, message, None, path, None)
        }
        StoreError::Corrupt { path, offset, nbytes, .. } => {
            let place = Some((*offset, usize::try_from(*nbytes).unwrap_or(usize::MAX)));
            storage_error_of(py, "CorruptionError", message, (None, path, place))
        }
        StoreError::Storage(error) => nvme_error(py, error),
        StoreError::Memory(error) => memory_error(py, error),
        StoreError::TimedOut(_) => exception(py, "TimeoutExpired", message, &[]),
        StoreError::Broken(cause) => match &**cause {
            StoreError::Storage(NvmeError::Device { path, offset, nbytes, errno, .. }) => {
                storage_error(py, message, Some(*errno), path, Some((*offset, *nbytes)))
            }
            _ => exception(py, "StorageError", message, &[]),
        },
        StoreError::Usage(_) | StoreError::Interrupted(_) => exception(py, "UsageError", message, &[]),
        // Invalid: an argument was wrong, or does not fit.
        _ => config_error(py, message),
    }
}

/// What `rust/engine` says, in Python's words.
pub(crate) fn engine_error(py: Python<'_>, error: &EngineError) -> PyErr {
    match error {
        EngineError::Store(error) => store_error(py, error),
        EngineError::Memory(error) => memory_error(py, error),
        EngineError::Math(error) => math_error(py, error),
        EngineError::Function { cause, .. } => {
            let cause = cause.downcast_ref::<PyErr>();
            // That the device failed which computes is nobody's usage.
            let lost = cause.filter(|cause| is_a(py, cause, "DeviceError"));
            let raised = match lost {
                Some(lost) => exception(py, "DeviceError", lost.value(py).to_string(), &[]),
                None => exception(py, "UsageError", error.to_string(), &[]),
            };
            raised.set_cause(py, cause.map(|cause| cause.clone_ref(py)));
            raised
        }
        EngineError::Usage(_) => exception(py, "UsageError", error.to_string(), &[]),
        EngineError::Panicked(_) => exception(py, "MemascendError", error.to_string(), &[]),
        _ => config_error(py, error.to_string()),
    }
}

fn storage_error(
    py: Python<'_>,
    message: String,
    errno: Option<i32>,
    path: &Path,
    place: Option<(u64, usize)>,
) -> PyErr {
    storage_error_of(py, "StorageError", message, (errno, path, place))
}

fn storage_error_of(
    py: Python<'_>,
    class: &str,
    message: String,
    (errno, path, place): (Option<i32>, &Path, Option<(u64, usize)>),
) -> PyErr {
    let keywords = PyDict::new(py);
    let filled = || -> PyResult<()> {
        keywords.set_item("errno", errno)?;
        // Text as everywhere in Python, undecodable bytes as surrogates, and no Path object.
        keywords.set_item("path", path.as_os_str())?;
        keywords.set_item("offset", place.map(|(offset, _)| offset))?;
        keywords.set_item("nbytes", place.map(|(_, nbytes)| nbytes))
    };
    match filled() {
        Ok(()) => exception_with(py, class, message, &keywords),
        Err(error) => error,
    }
}

/// What `rust/math` says: each of its errors is an argument or an option that was wrong.
pub(crate) fn math_error(py: Python<'_>, error: &MathError) -> PyErr {
    config_error(py, error.to_string())
}
