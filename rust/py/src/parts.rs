//! Translates reads of units in parts for Python.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::{errors::store_error, nvme::Held, slow_drop::Detached, store::Store, waiting::waiting};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Checkers>()?;
    module.add_class::<Parts>()?;
    module.add_class::<PartFetch>()
}

/// The values of a unit in parts. See `memascend.store.Parts`.
#[pyclass(frozen, module = "memascend._core")]
struct Parts {
    inner: Arc<memascend_store::Parts>,
}

#[pymethods]
impl Parts {
    #[new]
    fn new(py: Python<'_>, store: &Store, unit: usize, bytes_max: u64) -> PyResult<Self> {
        let inner = py.detach(|| store.inner.parts(unit, bytes_max)).map_err(|error| store_error(py, &error))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Where each begins in the unit, and its bytes.
    fn places(&self) -> Vec<(u64, u64)> {
        self.inner.places().collect()
    }

    /// Begins to read a part into `nbytes` at `address`, which stay valid as long as `keep` lives. It is checked by
    /// `checkers`, or by whoever waits.
    #[pyo3(signature = (index, address, nbytes, keep, checkers))]
    fn begin(
        &self,
        py: Python<'_>,
        index: usize,
        address: usize,
        nbytes: usize,
        keep: Py<PyAny>,
        checkers: Option<&Checkers>,
    ) -> PyResult<PartFetch> {
        let memory = Held::new(address, nbytes, keep);
        let begun = py.detach(|| {
            let part = self.inner.begin(index, memory)?;
            Ok(match checkers {
                Some(checkers) => checkers.inner.check(part),
                None => memascend_store::Checking::from(part),
            })
        });
        Ok(PartFetch { inner: Detached::new(begun.map_err(|error| store_error(py, &error))?) })
    }
}

/// Threads that check parts. See `memascend.store.Checkers`.
#[pyclass(frozen, module = "memascend._core")]
struct Checkers {
    inner: Detached<memascend_store::Checkers<Held>>,
}

#[pymethods]
impl Checkers {
    #[new]
    fn new(threads: usize) -> Self {
        Self { inner: Detached::new(memascend_store::Checkers::new(threads)) }
    }

    #[getter]
    fn threads(&self) -> usize {
        self.inner.threads()
    }
}

/// A part on its way into memory. See `memascend.store.PartFetch`.
#[pyclass(frozen, module = "memascend._core")]
struct PartFetch {
    inner: Detached<memascend_store::Checking<Held>>,
}

#[pymethods]
impl PartFetch {
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.wait(wait))?.map_err(|error| store_error(py, &error))
    }

    fn done(&self) -> bool {
        self.inner.is_done()
    }
}
