//! Calls Python functions on the engine's threads, and lends the memory of a chunk to each call.

use std::{os::raw::c_int, sync::Arc, thread::sleep, time::Duration};

use memascend_engine::{Cause, Chunk, Function};
use memascend_store::{Buffer, Shared};
use pyo3::{exceptions::PyRuntimeError, ffi, prelude::*, types::PyList};

use crate::{errors::usage_error, leases::fill};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<LentBuffer>()
}

/// How many milliseconds [`Lender::require_back`] waits at most. The threads of a collective operation drop their
/// tensors a moment after the operation has returned.
const PATIENCE_MS: u32 = 500;

/// Lends memory to Python. [`Lender::require_back`] checks that Python has dropped all lent buffers.
#[derive(Default)]
pub(crate) struct Lender(Arc<()>);

impl Lender {
    /// Returns a buffer on `memory`. The memory counts as lent until the buffer is dropped.
    pub(crate) fn lend(&self, py: Python<'_>, memory: Shared) -> PyResult<Py<LentBuffer>> {
        Py::new(py, LentBuffer { memory, _lent: Arc::clone(&self.0) })
    }

    /// If Python still holds a lent buffer, runs a garbage collection and waits a short time for Python to drop all
    /// lent buffers. Returns an error if Python then still holds one.
    pub(crate) fn require_back(&self, py: Python<'_>) -> PyResult<()> {
        if Arc::strong_count(&self.0) > 1 {
            py.import("gc")?.call_method0("collect")?;
        }
        for _ in 0..PATIENCE_MS {
            if Arc::strong_count(&self.0) == 1 {
                break;
            }
            py.detach(|| sleep(Duration::from_millis(1)));
        }
        if Arc::strong_count(&self.0) > 1 {
            return Err(usage_error(
                py,
                "the function kept a tensor of its chunk, whose memory is used again; keep a clone() of the tensor",
            ));
        }
        Ok(())
    }
}

/// Memory that is lent to Python, for example of a chunk or of a unit in RAM. Tensors on the memory keep this object
/// alive.
#[pyclass(frozen, module = "memascend._core")]
pub(crate) struct LentBuffer {
    memory: Shared,
    /// A clone of the `Arc` in [`Lender`]. The strong count of the `Arc` tells whether all buffers are dropped.
    _lent: Arc<()>,
}

#[pymethods]
impl LentBuffer {
    /// # Safety
    /// `view` must be valid. The interpreter calls this function to fill the view.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().memory;
        // SAFETY: the interpreter passes a valid view. The bytes live as long as `slf`, to which the view gets a
        // reference.
        unsafe { fill(slf, view, (memory.as_ptr(), memory.len()), flags) }
    }
}

/// Returns a function for the engine. The function calls `adapter` with (values, gradient, state, start, count, last).
/// Values, gradient and state are lent memory. `memascend.engine` makes `adapter`.
pub(crate) fn applied(adapter: Py<PyAny>) -> Box<Function> {
    Box::new(move |chunk| {
        let called = Python::try_attach(|py| called(py, &adapter, chunk).map_err(|error| -> Cause { Arc::new(error) }));
        called.unwrap_or_else(|| Err(Arc::new(PyRuntimeError::new_err("Python is shutting down; call close() first"))))
    })
}

fn called(py: Python<'_>, adapter: &Py<PyAny>, chunk: Chunk) -> PyResult<()> {
    let lender = Lender::default();
    let lend = |memory| lender.lend(py, memory);
    let Chunk { values, gradient, state, start, count, last } = chunk;
    let result = {
        let state = PyList::new(py, state.into_iter().map(lend).collect::<PyResult<Vec<_>>>()?)?;
        let arguments = (lend(values)?, gradient.map(lend).transpose()?, &state, start, count, last);
        let result = adapter.call1(py, arguments);
        state.call_method0("clear")?;
        result.map(drop)
    };
    if let Err(error) = result {
        // Clears the frames of the traceback. The error and its traceback live longer than the call, and the frames
        // would keep tensors of the chunk alive.
        if let Some(traceback) = error.traceback(py) {
            py.import("traceback")?.call_method1("clear_frames", (traceback,))?;
        }
        return Err(error);
    }
    lender.require_back(py)
}
