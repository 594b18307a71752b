//! Translates checksums for Python.

use pyo3::prelude::*;

use crate::bytes::bytes;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Checksum>()
}

/// XXH3-64 of bytes that come one after the other. See `memascend.engine.Checksum`.
#[pyclass(module = "memascend._core")]
#[derive(Default)]
struct Checksum(memascend_store::Checksum);

#[pymethods]
impl Checksum {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn update(&mut self, py: Python<'_>, address: usize, nbytes: usize) {
        // SAFETY: `memascend.engine` has checked it; it is alive during the call.
        let bytes = unsafe { bytes((address, nbytes)) };
        py.detach(|| self.0.update(bytes));
    }

    fn value(&self) -> u64 {
        self.0.value()
    }
}
