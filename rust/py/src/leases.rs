//! Python bindings of the leases of `rust/mem`, and of the buffers from which tensors are made.

use std::{
    ffi::c_int,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};

use memascend_mem::{self as mem, Wait};
use pyo3::{
    exceptions::{PyOverflowError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyDict, PyInt, PyTuple},
};

use crate::{
    arguments::{Seconds, shown},
    errors::{config_error, usage_error},
    slow_drop::Detached,
    waiting::waiting,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Lease>()?;
    module.add_class::<LeaseBuffer>()
}

/// The right to use bytes of an arena or a ring. The slot with these bytes is free again once the lease was released or
/// deleted, and every tensor on the bytes is gone.
#[pyclass(frozen, module = "memascend.memory")]
pub(crate) struct Lease {
    nbytes: usize,
    /// `None` once the lease was returned.
    inner: Mutex<Option<Arc<mem::Lease>>>,
}

const RETURNED: &str = "this lease was returned already; take another lease";
const IN_USE: &str =
    "a tensor or buffer still uses this lease; delete it and all its views, then release the lease again";

#[pymethods]
impl Lease {
    /// The number of bytes that the caller asked for.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// True once the lease was returned.
    #[getter]
    fn returned(&self) -> bool {
        self.held().is_none()
    }

    /// Returns a tensor in the leased bytes, without a copy. The tensor has the bytes that are in the slot now.
    ///
    /// The tensor and its views keep the lease alive, even if this `Lease` object is deleted earlier.
    fn tensor<'py>(&self, shape: &Bound<'py, PyAny>, dtype: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = shape.py();
        let torch = py.import("torch")?;
        let shape = sizes(shape)?;
        if !dtype.is_instance(&torch.getattr("dtype")?)? {
            return Err(config_error(py, format!("dtype must be a torch.dtype, not {}", shown(dtype))));
        }
        if dtype.str()?.to_cow()?.starts_with("torch.q") {
            // torch crashes on a quantized view of plain bytes.
            let message = format!("a lease cannot hold the quantized type {dtype}; use a tensor of integers");
            return Err(config_error(py, message));
        }
        let width: usize = dtype.getattr("itemsize")?.extract()?;
        let elements = shape.iter().fold(1_u128, |elements, size| elements.saturating_mul(size.unsigned_abs().into()));
        let needed = elements.saturating_mul(width as u128);
        let tuple = PyTuple::new(py, &shape)?;
        if needed > self.nbytes as u128 {
            let nbytes = self.nbytes;
            let message =
                format!("a tensor of shape {tuple} and {dtype} needs {needed} bytes; the lease holds {nbytes} bytes");
            return Err(config_error(py, message));
        }
        let buffer = self.buffer(py)?;
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        if elements == 0 {
            // `frombuffer` cannot make an empty tensor, and an empty tensor needs no memory.
            options.set_item("device", "cpu")?;
            return torch.call_method("empty", (tuple,), Some(&options));
        }
        options.set_item("count", elements)?;
        // A tensor that is made inside `inference_mode` cannot be written outside of it.
        let within = torch.call_method0("is_inference_mode_enabled")?.is_truthy()?;
        let outside = if within { Some(torch.call_method1("inference_mode", (false,))?) } else { None };
        if let Some(outside) = &outside {
            outside.call_method0("__enter__")?;
        }
        let tensor = torch.call_method("frombuffer", (buffer,), Some(&options));
        if let Some(outside) = &outside {
            outside.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        }
        let tensor = tensor?;
        if !tensor.call_method0("data_ptr")?.extract::<usize>()?.is_multiple_of(width) {
            let message =
                format!("this slot is not aligned for {dtype}: plan its class as a multiple of {width} bytes");
            return Err(config_error(py, message));
        }
        // `resize_` works in place. So the result is not a view, just as a tensor that torch allocates is not a view.
        tensor.call_method1("resize_", (tuple,))
    }

    /// Returns the leased bytes as a writable buffer. The buffer keeps the lease alive, as a tensor does.
    fn buffer(&self, py: Python<'_>) -> PyResult<LeaseBuffer> {
        let held = self.held().as_ref().map(Arc::clone);
        // The line above has released the lock again. `usage_error` must not run under the lock: making an exception
        // may start a garbage collection, which may run Python code that uses the lease.
        held.map(|lease| LeaseBuffer { lease: Some(lease) }).ok_or_else(|| usage_error(py, RETURNED))
    }

    /// Ends the lease at once. Fails if a tensor or buffer still uses the lease, or if the lease has already ended.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let returned = {
            let mut held = self.held();
            match held.take().map(Arc::try_unwrap) {
                Some(Ok(lease)) => Ok(lease),
                Some(Err(in_use)) => {
                    *held = Some(in_use);
                    Err(IN_USE)
                }
                None => Err(RETURNED),
            }
        };
        match returned {
            Ok(lease) => {
                py.detach(|| drop(lease));
                Ok(())
            }
            Err(why) => Err(usage_error(py, why)),
        }
    }

    /// Ends the lease as `release` does. Does nothing if the lease has already ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.returned() { Ok(()) } else { self.release(py) }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!("Lease({} bytes{})", self.nbytes, if self.returned() { ", returned" } else { "" })
    }
}

/// Extracts a tensor's sizes from an integer or a sequence of integers. A size that does not fit into an `i64` becomes
/// `i64::MAX`.
fn sizes(shape: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let py = shape.py();
    let one = |size: &Bound<'_, PyAny>| match size.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => Ok(i64::MAX),
        size => size,
    };
    let found: PyResult<Vec<i64>> = if shape.is_instance_of::<PyInt>() {
        one(shape).map(|size| vec![size])
    } else {
        shape.try_iter().and_then(|sizes| sizes.map(|size| one(&size?)).collect())
    };
    let found = found.map_err(|error| {
        if !error.is_instance_of::<PyTypeError>(py) {
            return error;
        }
        let message = format!("shape must be an integer or a sequence of integers, not {}", shown(shape));
        config_error(py, message)
    })?;
    if found.iter().any(|&size| size < 0) {
        let given = PyTuple::new(py, &found)?;
        return Err(config_error(py, format!("the sizes in shape must be 0 or more, not {given}")));
    }
    Ok(found)
}

impl Lease {
    fn held(&self) -> MutexGuard<'_, Option<Arc<mem::Lease>>> {
        mem::locked(&self.inner)
    }
}

/// The bytes of a lease as a writable buffer. This object keeps the lease alive.
#[pyclass(frozen, module = "memascend._core")]
struct LeaseBuffer {
    /// `None` only while `drop` runs.
    lease: Option<Arc<mem::Lease>>,
}

impl Drop for LeaseBuffer {
    fn drop(&mut self) {
        // Freeing a slot usually takes nanoseconds. But freeing the last slot of a closed region also unmaps the
        // region, which is slow. So if the region is closed, `Detached` frees the slot without the GIL.
        if self.lease.as_ref().is_some_and(|lease| lease.is_region_closed()) {
            drop(Detached::new(self.lease.take()));
        }
    }
}

#[pymethods]
impl LeaseBuffer {
    /// # Safety
    /// `view` must be valid. The interpreter calls this function to fill the view.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let Some(lease) = &slf.get().lease else { return Err(usage_error(slf.py(), RETURNED)) };
        // SAFETY: the interpreter passes a valid view. The bytes live as long as `slf`, to which the view gets a
        // reference.
        unsafe { fill(slf, view, (lease.as_ptr(), lease.len()), flags) }
    }
}

/// Makes the interpreter's `view` refer to `bytes` writable bytes from `start` on.
///
/// # Safety
/// `view` must be valid for writes, and the bytes must live as long as `owner`.
pub(crate) unsafe fn fill<T>(
    owner: &Bound<'_, T>,
    view: *mut ffi::Py_buffer,
    (start, bytes): (NonNull<u8>, usize),
    flags: c_int,
) -> PyResult<()> {
    // The conversion cannot fail, because no memory is larger than `isize::MAX`.
    let length = ffi::Py_ssize_t::try_from(bytes)?;
    // SAFETY: the caller guarantees a valid view, and bytes that live as long as `owner`.
    let failed = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start.as_ptr().cast(), length, 0, flags) };
    if failed == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// Waits for a lease, with the GIL released.
pub(crate) fn leased(
    py: Python<'_>,
    seconds: Option<Seconds>,
    lease: impl FnOnce(Wait<'_>) -> mem::Result<mem::Lease> + Send,
) -> PyResult<Lease> {
    let lease = waiting(py, seconds, lease)?;
    Ok(Lease { nbytes: lease.len(), inner: Mutex::new(Some(Arc::new(lease))) })
}
