//! Numbers from Python, checked: a bad one is a `ConfigError` that names the argument.

use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::config_error;

/// A number of bytes or things: any integer that is not negative.
pub(crate) fn size(name: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    value.extract().map_err(|_| {
        let shown = value.repr().map_or_else(|_| "that".into(), |repr| repr.to_string());
        config_error(value.py(), format!("{name} must be an integer from 0 to {}, not {shown}", usize::MAX))
    })
}

/// A timeout in seconds; `None` waits for ever.
pub(crate) fn timeout(py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(config_error(py, format!("timeout must be seconds from 0 up, or None, not {seconds}")));
    }
    // Past the clock's range (infinity too) is for ever.
    Ok(Duration::try_from_secs_f64(seconds).ok())
}
