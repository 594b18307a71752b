//! Python bindings of `rust/nvme`: volumes and tickets.

use std::{path::PathBuf, ptr::NonNull};

use memascend_nvme::{self as nvme, BackendChoice, Buffer, DeviceKind, Moved, NotBegun, Options};
use pyo3::{
    buffer::PyBuffer,
    prelude::*,
    types::{PyDict, PyMemoryView, PyTuple},
};

use crate::{
    arguments::{Seconds, chosen, size as number},
    errors::{IntoPyErr as _, OrPyErr as _, config_error},
    slow_drop::Detached,
    waiting::waiting,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Volume>()?;
    module.add_class::<Ticket>()?;
    module.add_function(wrap_pyfunction!(io_uring_why_not, module)?)
}

/// One address space over one or several devices; `memascend.nvme.open()` makes a volume. Any thread may use the
/// volume.
///
/// Operations on different bytes never disturb each other, even inside one block of the device. Wait for an operation
/// before you begin another operation on the same bytes. `close()`, the deletion of the volume and the end of the
/// interpreter wait for operations in flight.
#[pyclass(frozen, weakref, module = "memascend.nvme")]
struct Volume {
    inner: Detached<nvme::Volume>,
    paths: Vec<PathBuf>,
}

#[pymethods]
impl Volume {
    #[new]
    #[pyo3(signature = (paths, size, queue_depth, stripe, backend))]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        size: Option<&Bound<'_, PyAny>>,
        queue_depth: Option<&Bound<'_, PyAny>>,
        stripe: Option<&Bound<'_, PyAny>>,
        backend: &str,
    ) -> PyResult<Self> {
        let whole = |name, value: Option<&Bound<'_, PyAny>>| value.map(|value| number(name, value)).transpose();
        let mut options = Options::default();
        options.size_bytes = whole("size", size)?.map(|nbytes| nbytes as u64);
        options.queue_depth = whole("queue_depth", queue_depth)?;
        options.stripe_bytes = whole("stripe", stripe)?.map(|nbytes| nbytes as u64);
        options.backend = backend_of(py, backend)?;
        let inner = py.detach(|| nvme::Volume::open(&paths, &options));
        Ok(Self { inner: Detached::new(inner.or_raise(py)?), paths })
    }

    /// The paths of the devices, as the caller passed them.
    #[getter]
    fn paths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.paths.iter().map(|path| path.as_os_str()))
    }

    /// Begins to fill `into`, a contiguous CPU tensor or a writable buffer, with the bytes from `offset` on.
    ///
    /// If offset, length and address are multiples of `alignment`, this library copies no bytes; otherwise it copies at
    /// least some of the bytes.
    fn read(&self, into: &Bound<'_, PyAny>, offset: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        let held = TensorMemory::of(into, false)?;
        begun(into.py(), self.inner.read(held, number("offset", offset)? as u64))
    }

    /// Begins to write `data`, a contiguous CPU tensor or a buffer, to `offset`.
    ///
    /// When the write has ended, the device has the bytes, or the page cache if I/O on the device is buffered.
    /// `flush()` makes the bytes survive a loss of power.
    fn write(&self, data: &Bound<'_, PyAny>, offset: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        let held = TensorMemory::of(data, true)?;
        begun(data.py(), self.inner.write(held, number("offset", offset)? as u64))
    }

    /// Waits for every write that began before this call, and makes these writes survive a loss of power on every
    /// device.
    #[pyo3(signature = (timeout=None))]
    fn flush(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<()> {
        waiting(py, timeout, |wait| self.inner.flush(wait))
    }

    /// Waits for operations in flight, then closes the devices. Does not flush. Raises the error of a failed write
    /// whose ticket was dropped before it raised the error. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.close(wait))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    /// True once `close()` has closed the devices, and in a forked child.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// The size of the address space in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.inner.size_bytes()
    }

    /// A transfer needs no copy if its offset, length and address are multiples of this number. With 1, no transfer
    /// needs a copy.
    #[getter]
    fn alignment(&self) -> usize {
        self.inner.alignment()
    }

    /// The backend that submits the requests: `"io_uring"` or "threads".
    #[getter]
    fn backend(&self) -> &'static str {
        self.inner.backend().name()
    }

    /// Why the backend is "threads" although the caller's choice allowed `io_uring`; else None.
    #[getter]
    fn why_not(&self) -> Option<&str> {
        self.inner.why_not()
    }

    /// True if every device bypasses the page cache; `devices()` says why a device does not.
    #[getter]
    fn direct(&self) -> bool {
        self.inner.is_direct()
    }

    /// The queue depth. With n devices, the system has at most n times this number of requests at once. A request has
    /// at most 1 MiB.
    #[getter]
    fn queue_depth(&self) -> usize {
        self.inner.queue_depth()
    }

    fn __repr__(&self) -> String {
        let how = if self.direct() { "direct" } else { "buffered" };
        let state = if self.closed() { "closed".into() } else { format!("{}, {how}", self.backend()) };
        let paths: Vec<_> = self.paths.iter().map(|path| path.to_string_lossy()).collect();
        format!("Volume({}: {} bytes, {state})", paths.join(", "), self.size())
    }

    /// Returns a dict for each device: "path", "kind" ("file" or "raw"), "bytes", `"why_buffered"` (None if the device
    /// uses direct I/O).
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

    /// Returns the counts since the volume was opened: "read", "written", "flushes", "failed", `"in_flight"` and more.
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

fn begun(py: Python<'_>, begun: Result<nvme::Ticket<TensorMemory>, NotBegun<TensorMemory>>) -> PyResult<Ticket> {
    begun.map(|inner| Ticket { inner }).map_err(|NotBegun { error, .. }| error.raised(py))
}

/// The memory of a tensor or a buffer, which an operation reads or writes.
pub(crate) struct TensorMemory {
    address: NonNull<u8>,
    nbytes: usize,
    /// Keeps the memory valid. If an I/O thread drops this reference without the GIL, `pyo3` releases the Python
    /// object when a thread next takes the GIL through `pyo3`.
    _keep: Py<PyAny>,
}

impl TensorMemory {
    /// Describes `nbytes` bytes at `address`. These bytes must stay valid as long as `keep` lives.
    pub(crate) fn new(address: usize, nbytes: usize, keep: Py<PyAny>) -> Self {
        let address = NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling());
        Self { address, nbytes, _keep: keep }
    }

    /// Returns the memory of a contiguous CPU tensor or of a buffer. With `write`, the operation writes the memory to
    /// the device, so the buffer may be read-only.
    fn of(memory: &Bound<'_, PyAny>, write: bool) -> PyResult<Self> {
        // If torch is not imported, no object is a tensor. Do not import torch just to check a bytearray.
        let modules = memory.py().import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
        match modules.get_item("torch")? {
            Some(torch) if memory.is_instance(&torch.getattr("Tensor")?)? => Self::of_tensor(memory),
            _ => Self::of_buffer(memory, write),
        }
    }

    fn of_tensor(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let refused = |message: &str| Err(config_error(tensor.py(), message.into()));
        let is = |question: &str| tensor.call_method0(question)?.is_truthy();
        let device = tensor.getattr("device")?;
        if device.getattr("type")?.extract::<String>()? != "cpu" {
            return refused(&format!(
                "only CPU tensors can be read and written, and this tensor is on {device}; pass a tensor on the CPU"
            ));
        }
        if tensor.getattr("layout")?.to_string() != "torch.strided" || !is("is_contiguous")? {
            return refused(
                "the tensor is sparse or not contiguous; to write, pass a dense contiguous copy; to read, pass a dense \
                 contiguous tensor and copy from it",
            );
        }
        if is("is_conj")? || is("is_neg")? {
            return refused(
                "the tensor is a lazy conjugate or negative; to write, pass tensor.resolve_conj().resolve_neg(); to \
                 read, pass another tensor and copy from it",
            );
        }
        let address = tensor.call_method0("data_ptr")?.extract()?;
        let nbytes = tensor.getattr("nbytes")?.extract()?;
        Ok(Self::new(address, nbytes, tensor.call_method0("untyped_storage")?.unbind()))
    }

    fn of_buffer(memory: &Bound<'_, PyAny>, write: bool) -> PyResult<Self> {
        let py = memory.py();
        let Ok(view) = PyMemoryView::from(memory) else {
            let kind = memory.get_type().name()?;
            let message = format!("only contiguous CPU tensors and buffers can be read and written, not {kind}");
            return Err(config_error(py, message));
        };
        if !view.getattr("c_contiguous")?.is_truthy()? {
            return Err(config_error(py, "the buffer is not contiguous; pass a contiguous copy".into()));
        }
        if !write && view.getattr("readonly")?.is_truthy()? {
            return Err(config_error(py, "the buffer is read-only; pass a writable buffer to read into".into()));
        }
        let nbytes: usize = view.getattr("nbytes")?.extract()?;
        if nbytes == 0 {
            // `cast` rejects a view without bytes.
            return Ok(Self::new(0, 0, py.None()));
        }
        let bytes = view.call_method1("cast", ("B",))?;
        // The result keeps `bytes`, and `bytes` keeps the memory exported. `buffer` only gives the address.
        let buffer = PyBuffer::<u8>::get(&bytes)?;
        Ok(Self::new(buffer.buf_ptr().expose_provenance(), nbytes, bytes.unbind()))
    }
}

// SAFETY: the fields are an address, and a reference that any thread may hold.
unsafe impl Send for TensorMemory {}
// SAFETY: the fields are an address, and a reference that any thread may hold. A shared reference changes neither
// field.
unsafe impl Sync for TensorMemory {}

// SAFETY: `_keep` holds an export of the memory (a memoryview), or the tensor's storage. So the memory stays mapped at
// its address. The documentation of `memascend.nvme` says when other code may access the bytes.
unsafe impl Buffer for TensorMemory {
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

/// An operation in flight. Deleting the ticket does not cancel the operation: the operation continues, and the memory
/// stays alive until the operation ends.
///
/// If a write fails and its ticket is dropped before it raised the error, the next `Volume.flush()` or `Volume.close()`
/// raises the error, once.
#[pyclass(frozen, module = "memascend.nvme")]
struct Ticket {
    inner: nvme::Ticket<TensorMemory>,
}

#[pymethods]
impl Ticket {
    /// Waits for the operation without the GIL, up to `timeout` seconds. Returns the number of bytes moved, which is
    /// always the length of the memory.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<usize> {
        waiting(py, timeout, |wait| self.inner.wait_until(wait))?;
        self.release_buffer();
        let outcome = self.inner.outcome().unwrap_or(Err(nvme::Error::Closed));
        outcome.or_raise(py)
    }

    /// True once the operation has ended, successfully or not, and always in a forked child; `wait()` then returns or
    /// raises at once.
    fn done(&self) -> bool {
        let done = self.inner.is_done();
        if done {
            self.release_buffer();
        }
        done
    }
}

impl Ticket {
    /// Releases the memory while the ticket still exists, because the kernel has finished with the memory.
    fn release_buffer(&self) {
        drop(self.inner.take_buffer());
    }
}

/// Returns why this process cannot use `io_uring`; None if it can use `io_uring`.
#[pyfunction]
fn io_uring_why_not(py: Python<'_>) -> Option<String> {
    py.detach(nvme::why_no_io_uring)
}

/// Returns the backend of this name.
pub(crate) fn backend_of(py: Python<'_>, name: &str) -> PyResult<BackendChoice> {
    let choices =
        [("auto", BackendChoice::Auto), ("io_uring", BackendChoice::IoUring), ("threads", BackendChoice::Threads)];
    chosen(py, "backend", name, &choices)
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
