//! Translates `rust/nvme` for Python: volumes and tickets.

use std::{path::PathBuf, ptr::NonNull};

use memascend_nvme::{self as nvme, BackendChoice, Buffer, DeviceKind, Moved, NotBegun, Options};
use pyo3::{buffer::PyBuffer, prelude::*, types::PyDict};

use crate::{
    arguments::{Seconds, size},
    errors::{config_error, nvme_error},
    slow_drop::Detached,
    waiting::waiting,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Volume>()?;
    module.add_class::<Ticket>()?;
    module.add_function(wrap_pyfunction!(io_uring_why_not, module)?)
}

/// One address space over one or several devices. See `memascend.nvme.Volume`.
#[pyclass(frozen, module = "memascend._core")]
struct Volume {
    inner: Detached<nvme::Volume>,
}

#[pymethods]
impl Volume {
    #[new]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        nbytes: Option<&Bound<'_, PyAny>>,
        queue_depth: Option<&Bound<'_, PyAny>>,
        stripe: Option<&Bound<'_, PyAny>>,
        backend: &str,
    ) -> PyResult<Self> {
        let mut options = Options::default();
        options.size_bytes = nbytes.map(|nbytes| size("size", nbytes)).transpose()?.map(|nbytes| nbytes as u64);
        options.queue_depth = queue_depth.map(|depth| size("queue_depth", depth)).transpose()?;
        options.stripe_bytes = stripe.map(|stripe| size("stripe", stripe)).transpose()?.map(|stripe| stripe as u64);
        options.backend = chosen(py, backend)?;
        let inner = py.detach(move || nvme::Volume::open(&paths, &options));
        Ok(Self { inner: Detached::new(inner.map_err(|error| nvme_error(py, &error))?) })
    }

    /// Begins a transfer of `nbytes` at `address`, which stay valid as long as `keep` lives.
    ///
    /// Only `memascend.nvme` calls it, with the address of a tensor and its storage.
    fn begin_at(
        &self,
        py: Python<'_>,
        write: bool,
        address: usize,
        nbytes: usize,
        keep: Py<PyAny>,
        offset: &Bound<'_, PyAny>,
    ) -> PyResult<Ticket> {
        self.begin(py, write, Held::new(address, nbytes, keep), offset)
    }

    /// Begins a transfer of a contiguous buffer of bytes, writable unless `write`.
    fn begin_buffer(
        &self,
        py: Python<'_>,
        write: bool,
        view: &Bound<'_, PyAny>,
        offset: &Bound<'_, PyAny>,
    ) -> PyResult<Ticket> {
        // The view that is kept holds the export of the memory; this second one tells where it is.
        let buffer = PyBuffer::<u8>::get(view)?;
        if !buffer.is_c_contiguous() || (buffer.readonly() && !write) {
            return Err(config_error(py, "the buffer is not contiguous, or is read-only".into()));
        }
        let address = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
        let nbytes = buffer.len_bytes();
        self.begin(py, write, Held { address, nbytes, _keep: view.clone().unbind() }, offset)
    }

    #[pyo3(signature = (seconds=None))]
    fn flush(&self, py: Python<'_>, seconds: Option<Seconds>) -> PyResult<()> {
        waiting(py, seconds, |wait| self.inner.flush(wait))?.map_err(|error| nvme_error(py, &error))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.close(wait))?.map_err(|error| nvme_error(py, &error))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    #[getter]
    fn size(&self) -> u64 {
        self.inner.size_bytes()
    }

    #[getter]
    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    #[getter]
    fn backend(&self) -> &'static str {
        self.inner.backend().name()
    }

    #[getter]
    fn why_not(&self) -> Option<&str> {
        self.inner.why_not()
    }

    #[getter]
    fn direct(&self) -> bool {
        self.inner.is_direct()
    }

    #[getter]
    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }

    fn devices<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let device = |device: &nvme::DeviceInfo| {
            let dict = PyDict::new(py);
            dict.set_item("path", device.path.as_os_str())?;
            dict.set_item("kind", kind(device.kind))?;
            dict.set_item("bytes", device.bytes)?;
            dict.set_item("why_buffered", device.why_buffered.as_deref())?;
            Ok(dict)
        };
        self.inner.devices().iter().map(device).collect()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let dict = PyDict::new(py);
        dict.set_item("read", moved(py, stats.read)?)?;
        dict.set_item("written", moved(py, stats.written)?)?;
        dict.set_item("flushes", stats.flushes)?;
        dict.set_item("failed", stats.failed)?;
        dict.set_item("continued", stats.continued)?;
        dict.set_item("retried", stats.retried)?;
        dict.set_item("bounced_bytes", stats.bounced_bytes)?;
        dict.set_item("in_flight", stats.in_flight)?;
        Ok(dict)
    }
}

impl Volume {
    fn begin(&self, py: Python<'_>, write: bool, held: Held, offset: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        let offset = size("offset", offset)? as u64;
        let begun = if write { self.inner.write(held, offset) } else { self.inner.read(held, offset) };
        match begun {
            Ok(inner) => Ok(Ticket { inner }),
            Err(NotBegun { error, .. }) => Err(nvme_error(py, &error)),
        }
    }
}

/// Memory of a Python object.
pub(crate) struct Held {
    address: NonNull<u8>,
    nbytes: usize,
    /// Dropping it without the GIL, on an I/O thread, leaves the release to the next thread that has the GIL.
    _keep: Py<PyAny>,
}

impl Held {
    /// `nbytes` at `address`, which stay valid as long as `keep` lives.
    pub(crate) fn new(address: usize, nbytes: usize, keep: Py<PyAny>) -> Self {
        let address = NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling());
        Self { address, nbytes, _keep: keep }
    }
}

// SAFETY: an address, and a reference that may be held by any thread.
unsafe impl Send for Held {}
// SAFETY: as above; nothing of it is changed through a shared reference.
unsafe impl Sync for Held {}

// SAFETY: `_keep` holds an export of the memory (a memoryview), or the storage that it is part of, so it stays mapped
// where it is; who else touches the bytes meanwhile is said in the documentation of `memascend.nvme`.
unsafe impl Buffer for Held {
    fn as_ptr(&self) -> *const u8 {
        self.address.as_ptr()
    }

    fn as_mut_ptr(&mut self) -> NonNull<u8> {
        self.address
    }

    fn len(&self) -> usize {
        self.nbytes
    }
}

/// One operation in flight. See `memascend.nvme.Ticket`.
#[pyclass(frozen, module = "memascend._core")]
struct Ticket {
    inner: nvme::Ticket<Held>,
}

#[pymethods]
impl Ticket {
    #[pyo3(signature = (seconds=None))]
    fn wait(&self, py: Python<'_>, seconds: Option<Seconds>) -> PyResult<usize> {
        waiting(py, seconds, |wait| self.inner.wait_until(wait))?.map_err(|error| nvme_error(py, &error))?;
        self.let_go();
        let outcome = self.inner.outcome().unwrap_or(Err(nvme::Error::Closed));
        outcome.map_err(|error| nvme_error(py, &error))
    }

    fn done(&self) -> bool {
        let done = self.inner.is_done();
        if done {
            self.let_go();
        }
        done
    }
}

impl Ticket {
    /// The kernel is done with the memory: its owner may have it back before the ticket goes.
    fn let_go(&self) {
        drop(self.inner.take_buffer());
    }
}

/// Why there is no `io_uring` here; None where there is.
#[pyfunction]
fn io_uring_why_not(py: Python<'_>) -> Option<String> {
    py.detach(nvme::why_no_io_uring)
}

/// The backend that is called so.
pub(crate) fn chosen(py: Python<'_>, backend: &str) -> PyResult<BackendChoice> {
    match backend {
        "auto" => Ok(BackendChoice::Auto),
        "io_uring" => Ok(BackendChoice::IoUring),
        "threads" => Ok(BackendChoice::Threads),
        other => {
            let message = format!("backend must be \"auto\", \"io_uring\" or \"threads\", not {other:?}");
            Err(config_error(py, message))
        }
    }
}

fn kind(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::File => "file",
        DeviceKind::Raw => "raw",
        DeviceKind::Simulated => "simulated",
    }
}

fn moved(py: Python<'_>, moved: Moved) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", moved.bytes)?;
    dict.set_item("operations", moved.operations)?;
    dict.set_item("requests", moved.requests)?;
    Ok(dict)
}
