//! Checks numbers and choices from Python. A wrong value raises a `ConfigError` that names the argument.

use std::time::Duration;

use pyo3::{
    Borrowed,
    prelude::*,
    types::{PyBool, PyFloat},
};

use crate::errors::config_error;

/// Extracts a size or a count: any integer from 0 to `usize::MAX`. Also accepts a float without a fraction, such as
/// 1e9. Rejects True and False.
pub(crate) fn size(name: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let number = match value.cast::<PyFloat>() {
        // `is_integer` is false for fractions, infinity and NaN.
        Ok(float) if float.call_method0("is_integer")?.is_truthy()? => float.call_method0("__int__")?.extract().ok(),
        Ok(_) => None,
        Err(_) if value.is_instance_of::<PyBool>() => None,
        Err(_) => value.extract().ok(),
    };
    number.ok_or_else(|| {
        config_error(value.py(), format!("{name} must be an integer from 0 to {}, not {}", usize::MAX, shown(value)))
    })
}

/// A timeout of 0 or more seconds. If the number of seconds is infinite, or too large for a `Duration`, the field is
/// `None`, which means no limit.
pub(crate) struct Seconds(Option<Duration>);

impl Seconds {
    /// Returns the longest wait; `None` means no limit.
    pub(crate) fn limit(self) -> Option<Duration> {
        self.0
    }
}

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<f64>() {
            Ok(seconds) if seconds >= 0.0 => Ok(Self(Duration::try_from_secs_f64(seconds).ok())),
            _ => {
                let message = format!("timeout must be a number of seconds from 0 up, or None, not {}", shown(&value));
                Err(config_error(value.py(), message))
            }
        }
    }
}

/// Returns the value of the choice with the name `asked`. If no choice has this name, the error lists all names.
pub(crate) fn chosen<T: Copy>(py: Python<'_>, name: &str, asked: &str, choices: &[(&str, T)]) -> PyResult<T> {
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    let found = choices.iter().find(|(choice, _)| *choice == asked).map(|(_, value)| *value);
    found.ok_or_else(|| config_error(py, format!("{name} must be one of {names:?}, not {asked:?}")))
}

/// Returns Python's `repr` of a value, or a placeholder if `repr` fails.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "a value whose repr() fails".into(), |repr| repr.to_string())
}
