//! The one place where errors of the crates become exceptions of `memascend.errors`.

use memascend_math::Error as MathError;
use memascend_mem::Error as MemoryError;
use pyo3::{
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyModule},
};

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// An exception of the class that `memascend.errors` calls `class`, with its attributes as keywords.
fn exception(py: Python<'_>, class: &str, message: String, attributes: &[(&str, Option<usize>)]) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let module = ERRORS.get_or_try_init(py, || PyModule::import(py, "memascend.errors").map(Bound::unbind))?;
        let keywords = PyDict::new(py);
        for (name, value) in attributes {
            keywords.set_item(name, value)?;
        }
        let error = module.bind(py).getattr(class)?.call((message,), Some(&keywords))?;
        Ok(PyErr::from_value(error))
    };
    make().unwrap_or_else(|error| error)
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

/// What `rust/math` says: each of its errors is an argument or an option that was wrong.
pub(crate) fn math_error(py: Python<'_>, error: &MathError) -> PyErr {
    config_error(py, error.to_string())
}
