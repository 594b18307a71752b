//! Makes gradient sources from Python functions. Each call of such a function lends one window of a gradient.

use std::{ptr::NonNull, sync::Arc};

use memascend_engine::{Cause, Source, Window};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

/// Returns a source that calls `function(start, bytes)`. The function returns the address of a window, the offset of
/// the window in the gradient, and the number of bytes in the window. The offset is in bytes.
pub(crate) fn lending(function: Py<PyAny>) -> Box<Source> {
    Box::new(move |start, nbytes| {
        let called =
            Python::try_attach(|py| lent(py, &function, start, nbytes).map_err(|error| -> Cause { Arc::new(error) }));
        called.unwrap_or_else(|| Err(Arc::new(PyRuntimeError::new_err("Python is shutting down; call close() first"))))
    })
}

fn lent(py: Python<'_>, function: &Py<PyAny>, start: usize, nbytes: usize) -> PyResult<Window> {
    let (address, first, count) = function.call1(py, (start, nbytes))?.extract::<(usize, usize, usize)>(py)?;
    let inside = first <= start && start + nbytes <= first.saturating_add(count);
    let address = NonNull::new(address as *mut u8).filter(|_| inside && address.is_multiple_of(8));
    let address =
        address.ok_or_else(|| PyValueError::new_err("window() must lend the requested bytes, aligned to 8 bytes"))?;
    // SAFETY: the address is a multiple of 8, so it is aligned for every dtype of a gradient.
    // `memascend.storage.records.Lent` keeps the bytes valid and unchanged until the engine calls `window` again. The
    // windows of `device.transfer` begin at whole chunks, and so at whole elements.
    Ok(unsafe { Window::new(address, first, count) })
}
