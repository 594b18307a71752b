//! Translates the leases of `rust/mem` for Python, and the buffers that tensors are made of.

use std::{
    ffi::c_int,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};

use memascend_mem::{self as mem, Wait};
use pyo3::{ffi, prelude::*};

use crate::{
    arguments::Seconds,
    errors::{memory_error, usage_error},
    slow_drop::Detached,
    waiting::waiting,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Lease>()?;
    module.add_class::<LeaseBuffer>()
}

/// A hold on a slot; the buffers made of it hold it too. See `memascend.memory.Lease`.
#[pyclass(frozen, module = "memascend._core")]
pub(crate) struct Lease {
    nbytes: usize,
    /// `None` once returned.
    inner: Mutex<Option<Arc<mem::Lease>>>,
}

const RETURNED: &str = "this lease was returned already; take another one";
const IN_USE: &str = "a tensor still lives in this lease; drop every view of it, the lease goes back with the last one";

#[pymethods]
impl Lease {
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    #[getter]
    fn returned(&self) -> bool {
        self.held().is_none()
    }

    fn buffer(&self, py: Python<'_>) -> PyResult<LeaseBuffer> {
        let held = self.held().as_ref().map(Arc::clone);
        // The lock is given back before an exception is made: that may collect garbage, which may run Python code, which
        // may ask this lease.
        held.map(|lease| LeaseBuffer { lease: Some(lease) }).ok_or_else(|| usage_error(py, RETURNED))
    }

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
}

impl Lease {
    fn held(&self) -> MutexGuard<'_, Option<Arc<mem::Lease>>> {
        mem::locked(&self.inner)
    }
}

/// The bytes of a lease as a writable buffer; the lease lives as long as this object.
#[pyclass(frozen, module = "memascend._core")]
struct LeaseBuffer {
    /// `None` only while this is dropped.
    lease: Option<Arc<mem::Lease>>,
}

impl Drop for LeaseBuffer {
    fn drop(&mut self) {
        // Giving a slot back takes nanoseconds, unless it is the last of a closed region: that unmaps.
        if self.lease.as_ref().is_some_and(|lease| lease.is_region_closed()) {
            drop(Detached::new(self.lease.take()));
        }
    }
}

#[pymethods]
impl LeaseBuffer {
    /// # Safety
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let Some(lease) = &slf.get().lease else { return Err(usage_error(slf.py(), RETURNED)) };
        // SAFETY: the interpreter passes a valid view; the bytes live as long as `slf`, which the view comes to hold.
        unsafe { fill(slf, view, (lease.as_ptr(), lease.len()), flags) }
    }
}

/// Fills in the interpreter's view of bytes that can be written.
///
/// # Safety
/// `view` is valid, and the bytes live as long as `owner`.
pub(crate) unsafe fn fill<T>(
    owner: &Bound<'_, T>,
    view: *mut ffi::Py_buffer,
    (start, bytes): (NonNull<u8>, usize),
    flags: c_int,
) -> PyResult<()> {
    // No memory is larger than isize::MAX.
    let length = ffi::Py_ssize_t::try_from(bytes)?;
    // SAFETY: as the caller says.
    let failed = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start.as_ptr().cast(), length, 0, flags) };
    if failed == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// Waits for a lease, with the GIL released.
pub(crate) fn leased(
    py: Python<'_>,
    seconds: Option<Seconds>,
    lease: impl FnOnce(Wait<'_>) -> mem::Result<mem::Lease> + Send,
) -> PyResult<Lease> {
    let lease = waiting(py, seconds, lease)?.map_err(|error| memory_error(py, &error))?;
    Ok(Lease { nbytes: lease.len(), inner: Mutex::new(Some(Arc::new(lease))) })
}
