//! Lets a Python function lend gradients window by window.

use std::{ptr::NonNull, sync::Arc};

use memascend_engine::{Cause, Source, Window};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

/// A function of (start, bytes) that returns where they are: an address, the first byte there, and how many.
pub(crate) struct Lending {
    pub(crate) function: Py<PyAny>,
}

impl Source for Lending {
    fn window(&self, start: usize, nbytes: usize) -> Result<Window, Cause> {
        let called =
            Python::try_attach(|py| self.called(py, start, nbytes).map_err(|error| -> Cause { Arc::new(error) }));
        called.unwrap_or_else(|| Err(Arc::new(PyRuntimeError::new_err("the interpreter is ending"))))
    }
}

impl Lending {
    fn called(&self, py: Python<'_>, start: usize, nbytes: usize) -> PyResult<Window> {
        let lent = self.function.call1(py, (start, nbytes))?;
        let (address, first, count) = lent.extract::<(usize, usize, usize)>(py)?;
        let inside = first <= start && start + nbytes <= first.saturating_add(count);
        let address = NonNull::new(address as *mut u8).filter(|_| inside && address.is_multiple_of(8));
        let address =
            address.ok_or_else(|| PyValueError::new_err("a source lent other bytes than it was asked for"))?;
        // SAFETY: `memascend.engine.Lent` promises that the bytes are there and left alone until it is called again.
        Ok(unsafe { Window::new(address, first, count) })
    }
}
