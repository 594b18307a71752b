//! Translates `rust/mem` for Python: regions, arenas, rings, files in memory.

use std::{
    ffi::c_int,
    os::fd::{BorrowedFd, RawFd},
    sync::{Mutex, MutexGuard},
};

use memascend_mem::{self as mem, ArenaStats, Layout, OnFork, OwnerStats, Pin, Pinned};
use pyo3::{
    ffi,
    prelude::*,
    types::{PyBool, PyDict, PyString},
};

use crate::{
    arguments::{Seconds, shown, size},
    errors::{config_error, memory_error},
    leases::{Lease, fill, leased},
    slow_drop::Detached,
    waiting::interruptible,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Region>()?;
    module.add_class::<Arena>()?;
    module.add_class::<ChunkRing>()?;
    module.add_class::<FileMemory>()?;
    module.add_class::<Heap>()?;
    module.add_function(wrap_pyfunction!(ignore_captures, module)?)?;
    module.add_function(wrap_pyfunction!(is_file_memory, module)?)?;
    module.add_function(wrap_pyfunction!(memory_layout, module)?)?;
    module.add_function(wrap_pyfunction!(memory_limits, module)?)?;
    module.add_function(wrap_pyfunction!(memory_regions, module)?)
}

/// Page-aligned memory outside Python's heap. See `memascend.memory.Region`.
#[pyclass(frozen, module = "memascend._core")]
struct Region {
    inner: Detached<mem::Region>,
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(signature = (nbytes, pin, on_fork, owner))]
    fn new(
        nbytes: &Bound<'_, PyAny>,
        pin: &Bound<'_, PyAny>,
        on_fork: &Bound<'_, PyAny>,
        owner: &str,
    ) -> PyResult<Self> {
        let py = nbytes.py();
        let nbytes = size("nbytes", nbytes)?;
        let (pin, on_fork) = (pin_wish(pin)?, fork_wish(on_fork)?);
        let made = interruptible(py, |keep_going| mem::Region::interruptible(nbytes, pin, on_fork, owner, keep_going))?;
        Ok(Self { inner: Detached::new(made.map_err(|error| memory_error(py, &error))?) })
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.asked_bytes()
    }

    #[getter]
    fn mapped_bytes(&self) -> usize {
        self.inner.bytes()
    }

    #[getter]
    fn pinned<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        pinned_shown(py, self.inner.pinned())
    }

    #[getter]
    fn why_not(&self) -> Option<&str> {
        self.inner.why_not()
    }

    #[getter]
    fn huge_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.inner.huge_bytes())
    }

    #[getter]
    fn why_not_huge(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| self.inner.why_not_huge())
    }

    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

/// A region divided into slots. See `memascend.memory.Arena`.
#[pyclass(frozen, module = "memascend._core")]
struct Arena {
    inner: Detached<mem::Arena>,
}

#[pymethods]
impl Arena {
    #[new]
    fn new(py: Python<'_>, region: &Region, classes: &Bound<'_, PyDict>) -> PyResult<Self> {
        let inner = mem::Arena::new(&region.inner, &planned(classes)?);
        Ok(Self { inner: Detached::new(inner.map_err(|error| memory_error(py, &error))?) })
    }

    fn lease(&self, nbytes: &Bound<'_, PyAny>, seconds: Option<Seconds>, owner: &str) -> PyResult<Lease> {
        let py = nbytes.py();
        let nbytes = size("nbytes", nbytes)?;
        let owner = self.inner.owner(owner).map_err(|error| memory_error(py, &error))?;
        leased(py, seconds, |wait| self.inner.lease(nbytes, owner, wait))
    }

    fn free_slots(&self, py: Python<'_>, nbytes: usize) -> PyResult<usize> {
        self.inner.free_slots(nbytes).map_err(|error| memory_error(py, &error))
    }

    #[getter]
    fn in_use_bytes(&self) -> usize {
        self.inner.in_use_bytes()
    }

    #[getter]
    fn table_bytes(&self) -> usize {
        self.inner.table_bytes()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner.stats())
    }
}

/// Chunks of one size. See `memascend.memory.ChunkRing`.
#[pyclass(frozen, module = "memascend._core")]
struct ChunkRing {
    inner: Detached<mem::ChunkRing>,
}

#[pymethods]
impl ChunkRing {
    #[new]
    fn new(region: &Region, chunk_bytes: &Bound<'_, PyAny>, count: &Bound<'_, PyAny>) -> PyResult<Self> {
        let inner = mem::ChunkRing::new(&region.inner, size("chunk_bytes", chunk_bytes)?, size("count", count)?);
        Ok(Self { inner: Detached::new(inner.map_err(|error| memory_error(count.py(), &error))?) })
    }

    fn lease(&self, py: Python<'_>, seconds: Option<Seconds>, owner: &str) -> PyResult<Lease> {
        let owner = self.inner.owner(owner).map_err(|error| memory_error(py, &error))?;
        leased(py, seconds, |wait| self.inner.lease(owner, wait))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner.stats())
    }
}

/// The bytes of a file as a writable buffer, which lives as long as this object. See `memascend.memory.file_memory`.
#[pyclass(frozen, module = "memascend._core")]
struct FileMemory {
    inner: Detached<mem::FileMemory>,
}

#[pymethods]
impl FileMemory {
    #[new]
    fn new(descriptor: &Bound<'_, PyAny>, nbytes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = nbytes.py();
        let raw = RawFd::try_from(size("descriptor", descriptor)?)?;
        // SAFETY: not negative; the caller has it open, and the kernel refuses one that is not.
        let file = unsafe { BorrowedFd::borrow_raw(raw) };
        let inner = mem::FileMemory::new(file, size("nbytes", nbytes)?);
        Ok(Self { inner: Detached::new(inner.map_err(|error| memory_error(py, &error))?) })
    }

    /// # Safety
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().inner;
        // SAFETY: the interpreter passes a valid view; the bytes live as long as `slf`, which the view comes to hold.
        unsafe { fill(slf, view, (memory.as_ptr(), memory.len()), flags) }
    }
}

/// Whether a `FileMemory` begins at this address.
#[pyfunction]
fn is_file_memory(address: usize) -> bool {
    mem::is_file_memory(address)
}

#[pyfunction]
fn ignore_captures() -> bool {
    mem::ignore_captures()
}

/// Where the slots of a plan would lie: (bytes asked for, bytes reserved).
#[pyfunction]
fn memory_layout(classes: &Bound<'_, PyDict>) -> PyResult<(usize, usize)> {
    let layout = Layout::unbounded(&planned(classes)?).map_err(|error| memory_error(classes.py(), &error))?;
    Ok((layout.asked_bytes(), layout.reserved_bytes()))
}

/// The C library's heap while a model is trained. See `memascend.memory.Heap`.
#[pyclass(frozen, module = "memascend._core")]
struct Heap {
    inner: Mutex<Option<mem::Heap>>,
}

#[pymethods]
impl Heap {
    #[new]
    fn new() -> Self {
        Self { inner: Mutex::new(Some(mem::Heap::new())) }
    }

    fn take_holes(&self, py: Python<'_>) {
        py.detach(|| self.held().as_mut().map(mem::Heap::take_holes));
    }

    fn trim(&self, py: Python<'_>) {
        py.detach(|| self.held().as_ref().map(mem::Heap::trim));
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.held().take());
    }
}

impl Heap {
    fn held(&self) -> MutexGuard<'_, Option<mem::Heap>> {
        mem::locked(&self.inner)
    }
}

/// The limits on this process's memory, as they are now.
#[pyfunction]
fn memory_limits(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let limits = py.detach(mem::memory_limits);
    let dict = PyDict::new(py);
    dict.set_item("available", limits.headroom.available_bytes)?;
    dict.set_item("limited_by", limits.headroom.limited_by)?;
    dict.set_item("cgroup_limit", limits.cgroup.as_ref().map(|(bytes, _)| bytes))?;
    dict.set_item("cgroup", limits.cgroup.as_ref().map(|(_, folder)| folder.display().to_string()))?;
    dict.set_item("memlock_soft", limits.memlock.0)?;
    dict.set_item("memlock_hard", limits.memlock.1)?;
    dict.set_item("page", mem::page_bytes())?;
    let huge = match mem::huge_pages() {
        mem::HugePages::Of(bytes) => Some(bytes),
        mem::HugePages::Off(_) => None,
    };
    dict.set_item("huge_page", huge)?;
    Ok(dict)
}

/// The regions that are mapped now.
#[pyfunction]
fn memory_regions(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let region = |stats: mem::RegionStats| {
        let dict = PyDict::new(py);
        dict.set_item("owner", stats.owner)?;
        dict.set_item("bytes", stats.bytes)?;
        dict.set_item("pinned", pinned_shown(py, stats.pinned))?;
        Ok(dict)
    };
    mem::regions().into_iter().map(region).collect()
}

fn pin_wish(pin: &Bound<'_, PyAny>) -> PyResult<Pin> {
    let word = pin.cast::<PyString>().ok().map(ToString::to_string);
    let no = pin.cast::<PyBool>().is_ok_and(|wish| !wish.is_true());
    match word.as_deref() {
        Some("auto") => Ok(Pin::Auto),
        Some("mlock") => Ok(Pin::Mlock),
        Some("cuda") => Ok(Pin::Cuda),
        None if no => Ok(Pin::Off),
        _ => Err(config_error(
            pin.py(),
            format!("pin must be \"auto\", \"mlock\", \"cuda\" or False, not {}", shown(pin)),
        )),
    }
}

fn fork_wish(on_fork: &Bound<'_, PyAny>) -> PyResult<OnFork> {
    match on_fork.cast::<PyString>().ok().map(ToString::to_string).as_deref() {
        Some("copy") => Ok(OnFork::Copy),
        Some("wipe") => Ok(OnFork::Wipe),
        _ => Err(config_error(on_fork.py(), format!("on_fork must be \"copy\" or \"wipe\", not {}", shown(on_fork)))),
    }
}

fn pinned_shown(py: Python<'_>, pinned: Pinned) -> Bound<'_, PyAny> {
    match pinned {
        Pinned::No => PyBool::new(py, false).to_owned().into_any(),
        Pinned::Mlock => PyString::new(py, "mlock").into_any(),
        Pinned::Cuda => PyString::new(py, "cuda").into_any(),
    }
}

fn planned(classes: &Bound<'_, PyDict>) -> PyResult<Vec<(usize, usize)>> {
    classes
        .iter()
        .map(|(bytes, count)| Ok((size("a class's bytes", &bytes)?, size("a class's count", &count)?)))
        .collect()
}

fn stats<'py>(py: Python<'py>, stats: &ArenaStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = owner_stats(py, &stats.total)?;
    dict.set_item("capacity", stats.capacity_bytes)?;
    dict.set_item("reserved", stats.reserved_bytes)?;
    dict.set_item("in_use", stats.in_use_bytes)?;
    dict.set_item("tables", stats.table_bytes)?;
    let classes: PyResult<Vec<_>> = stats
        .classes
        .iter()
        .map(|class| {
            let dict = PyDict::new(py);
            dict.set_item("bytes", class.bytes)?;
            dict.set_item("count", class.count)?;
            dict.set_item("in_use", class.in_use)?;
            dict.set_item("peak", class.peak)?;
            Ok(dict)
        })
        .collect();
    dict.set_item("classes", classes?)?;
    let owners = PyDict::new(py);
    for (name, held) in &stats.owners {
        owners.set_item(name, owner_stats(py, held)?)?;
    }
    dict.set_item("owners", owners)?;
    Ok(dict)
}

fn owner_stats<'py>(py: Python<'py>, stats: &OwnerStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", stats.bytes)?;
    dict.set_item("peak", stats.peak_bytes)?;
    dict.set_item("leases", stats.leases)?;
    dict.set_item("waits", stats.waits)?;
    dict.set_item("wait_seconds", stats.waited.as_secs_f64())?;
    Ok(dict)
}
