//! Python bindings for reading a unit in parts.

use memascend_engine::UnitFetch;
use memascend_store::{Buffer, Shared};
use pyo3::{exceptions::PyIndexError, prelude::*};

use crate::{
    errors::{OrPyErr as _, config_error},
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

/// A unit that is read part by part; `Engine.parts` makes it. All parts are of one commit. If a later commit has
/// overwritten values that are not read yet, `begin` or `Fetch.wait` raises an error.
///
/// The store does not write to the slots that the parts read until each part was read once, or until this object and
/// all its reads are gone. Until then, the step after the next commit waits before it writes to these slots.
#[pyclass(frozen, module = "memascend.engine")]
pub(crate) struct UnitParts {
    inner: memascend_engine::UnitParts,
    checkers: Option<Py<Checkers>>,
}

#[pymethods]
impl UnitParts {
    /// Returns, for each part, the offset of its first byte in the unit, and its number of bytes.
    fn places(&self) -> Vec<(u64, u64)> {
        self.inner.places().collect()
    }

    /// Begins to read a part into `into`, a contiguous uint8 CPU tensor of the part's size. The read goes before all
    /// waiting I/O, except other reads of units.
    fn begin(&self, index: usize, into: &Bound<'_, PyAny>) -> PyResult<Fetch> {
        let py = into.py();
        let Some((_, nbytes)) = self.inner.places().nth(index) else {
            return Err(PyIndexError::new_err(format!("the unit has no part {index}; pass an index into places()")));
        };
        let refusal = || format!("pass a contiguous uint8 tensor of {nbytes} bytes on the CPU to read the part into");
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

/// Threads that verify parts of units as the parts arrive. So the thread that copies the parts does not have to compute
/// checksums.
///
/// When this object is deleted, the threads verify all queued parts, and then end.
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

    /// The number of threads.
    #[getter]
    fn threads(&self) -> usize {
        self.inner.threads()
    }
}

/// A unit, or a part of a unit, that is being read into memory; `Engine.fetch` and `UnitParts.begin` make this object.
/// Any thread may use it.
///
/// The store does not write to the slots that the device reads until the device has ended the reads. Until then, the
/// step after the next commit waits before it writes to these slots. Dropping this object waits for the device, too.
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
    /// Waits, without the GIL, until the device has ended the read, all values are computed, and every byte that was
    /// read from storage is verified. Ctrl-C ends the wait, but not the read.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.wait(wait))
    }

    /// True once the device has ended the read, all values are computed, and the `Checkers`, if there are any, have
    /// verified the read, successfully or not. May be False while another thread is in `wait`. Never waits.
    fn done(&self) -> bool {
        self.inner.is_done()
    }
}
