//! Python bindings of the checksums of `rust/store`.

use pyo3::prelude::*;

use memascend_nvme::Buffer;

use crate::tensors::held;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Checksum>()?;
    module.add_function(wrap_pyfunction!(checksum_of, module)?)
}

/// The XXH3-64 checksum of consecutive bytes. `str()` formats the checksum as `xxhsum -H3` does.
#[pyclass(module = "memascend.engine")]
#[derive(Default)]
struct Checksum(memascend_store::Checksum);

#[pymethods]
impl Checksum {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Adds the bytes of a contiguous CPU tensor.
    fn update(&mut self, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let memory = held(tensor)?;
        // SAFETY: the caller passes a contiguous CPU tensor and does not change the tensor during this call. `memory`
        // keeps the tensor's bytes alive.
        let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.len()) };
        tensor.py().detach(|| self.0.update(bytes));
        Ok(())
    }

    fn __str__(&self) -> String {
        format!("{:016x}", self.0.value())
    }
}

/// Returns the checksum of the bytes of a contiguous CPU tensor, which may be empty.
#[pyfunction]
fn checksum_of(tensor: &Bound<'_, PyAny>) -> PyResult<String> {
    let mut checksum = Checksum::default();
    checksum.update(tensor)?;
    Ok(checksum.__str__())
}
