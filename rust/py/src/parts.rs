//! Translates reads of units in parts for Python.

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
    module.add_class::<PartFetch>()
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
    fn begin(&self, index: usize, into: &Bound<'_, PyAny>) -> PyResult<PartFetch> {
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
        Ok(PartFetch { inner: Detached::new(part) })
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

/// A part on its way into memory; `UnitParts.begin` makes it. Dropping it waits for the device.
#[pyclass(frozen, module = "memascend.engine")]
struct PartFetch {
    inner: Detached<memascend_engine::UnitFetch<TensorMemory>>,
}

#[pymethods]
impl PartFetch {
    /// Wait for the device, and check every byte, as `Fetch.wait` does.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.wait(wait))
    }

    /// Whether the device is done with it, well or not. Never waits.
    fn done(&self) -> bool {
        self.inner.is_done()
    }
}
