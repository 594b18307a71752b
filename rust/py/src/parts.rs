//! Translates reads of units in parts for Python.

use memascend_engine::UnitFetch;
use memascend_store::{Buffer, Shared};
use pyo3::{exceptions::PyIndexError, prelude::*};

use crate::{
    errors::{OrRaise as _, config_error},
    nvme::TensorMemory,
    slow_drop::Detached,
    tensors::bytes_into,
    waiting::waiting,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Checkers>()?;
    module.add_class::<UnitParts>()?;
    module.add_class::<Fetch>()
}

/// A unit that is read part by part; `Engine.parts` makes it. All parts are of one commit.
///
/// Until each was read once, or it and every read of it are gone, the slots that it reads are not written: the step after
/// the next commit waits for that.
#[pyclass(frozen, module = "memascend.engine")]
pub(crate) struct UnitParts {
    inner: memascend_engine::UnitParts,
    checkers: Option<Py<Checkers>>,
}

#[pymethods]
impl UnitParts {
    /// Where each part begins in the unit, and its bytes.
    fn places(&self) -> Vec<(u64, u64)> {
        self.inner.places().collect()
    }

    /// Begin to read a part into a contiguous uint8 CPU tensor of its size, before all other I/O that waits.
    fn begin(&self, index: usize, into: &Bound<'_, PyAny>) -> PyResult<Fetch> {
        let py = into.py();
        let Some((_, nbytes)) = self.inner.places().nth(index) else {
            return Err(PyIndexError::new_err(format!("there is no part {index}")));
        };
        let refusal = || format!("a part is read into a contiguous uint8 tensor of {nbytes} bytes on the CPU");
        let memory = bytes_into(into, refusal)?;
        if Buffer::len(&memory) as u64 != nbytes {
            return Err(config_error(py, refusal()));
        }
        let checkers = self.checkers.as_ref().map(|checkers| &*checkers.get().inner);
        let part = py.detach(|| self.inner.begin(index, memory, checkers)).or_raise(py)?;
        Ok(part.into())
    }
}

impl UnitParts {
    pub(crate) fn new(inner: memascend_engine::UnitParts, checkers: Option<Py<Checkers>>) -> Self {
        Self { inner, checkers }
    }
}

/// Threads that check parts of units as they come, so that nobody computes checksums who has copies to begin.
///
/// They end when this and every part that they check are gone.
#[pyclass(frozen, module = "memascend.engine")]
pub(crate) struct Checkers {
    inner: Detached<memascend_store::Checkers<Shared<TensorMemory>>>,
}

#[pymethods]
impl Checkers {
    #[new]
    fn new(threads: usize) -> Self {
        Self { inner: Detached::new(memascend_store::Checkers::new(threads)) }
    }

    /// Threads that there are.
    #[getter]
    fn threads(&self) -> usize {
        self.inner.threads()
    }
}

/// A unit, or a part of one, on its way into memory; `Engine.fetch` and `UnitParts.begin` make it. Any thread may use it.
///
/// Until the device is done with it the slots that it reads are not written: the step after the next commit waits for
/// that. Dropping it waits for the device.
#[pyclass(frozen, module = "memascend.engine")]
pub(crate) struct Fetch {
    inner: Detached<UnitFetch<TensorMemory>>,
}

impl From<UnitFetch<TensorMemory>> for Fetch {
    fn from(inner: UnitFetch<TensorMemory>) -> Self {
        Self { inner: Detached::new(inner) }
    }
}

#[pymethods]
impl Fetch {
    /// Wait for the device, without the GIL, and check every byte. Ctrl-C ends the wait, not the read.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.wait(wait))
    }

    /// Whether the device is done with it, well or not. Never waits.
    fn done(&self) -> bool {
        self.inner.is_done()
    }
}
