//! Python bindings of `rust/mem`: regions, arenas, rings, files mapped as memory, limits of memory, the C library's
//! heap.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    os::fd::{BorrowedFd, RawFd},
};

use memascend_mem::{self as mem, ArenaStats, Layout, OnFork, OwnerStats, Pin, Pinned};
use pyo3::{
    Borrowed, ffi,
    prelude::*,
    types::{PyBool, PyDict, PyString, PyTuple},
};

use crate::{
    arguments::{Seconds, shown, size},
    errors::{OrPyErr as _, config_error},
    leases::{Lease, fill, leased},
    slow_drop::Detached,
    waiting::interruptible,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Region>()?;
    module.add_class::<Arena>()?;
    module.add_class::<ChunkRing>()?;
    module.add_class::<FileMemory>()?;
    module.add_class::<HostArena>()?;
    module.add_class::<LayoutBytes>()?;
    module.add_function(wrap_pyfunction!(ignore_captures, module)?)?;
    module.add_function(wrap_pyfunction!(is_file_memory, module)?)?;
    module.add_function(wrap_pyfunction!(layout, module)?)?;
    module.add_function(wrap_pyfunction!(limits, module)?)?;
    module.add_function(wrap_pyfunction!(regions, module)?)?;
    module.add_function(wrap_pyfunction!(settle_heap, module)?)?;
    module.add_function(wrap_pyfunction!(begin_heap_backward, module)?)?;
    module.add_function(wrap_pyfunction!(end_heap_step, module)?)
}

/// Page-aligned memory, on huge pages if possible. With `pin="auto"`, pinned as well as the system allows. The system
/// provides all pages before the first use.
///
/// The region has `nbytes` bytes, rounded up to whole pages. The memory returns to the system once the region is closed
/// and the last tensor in it is gone. `pinned` says how the memory is pinned. `why_not` says why `pin="auto"` did not
/// register the memory with CUDA.
#[pyclass(frozen, module = "memascend.memory")]
pub(crate) struct Region {
    inner: Detached<mem::Region>,
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(
        signature = (nbytes, pin=PinWish(Pin::Auto), *, on_fork=ForkWish(OnFork::Copy), owner="region"),
        text_signature = "(nbytes, pin='auto', *, on_fork='copy', owner='region')"
    )]
    fn new(nbytes: &Bound<'_, PyAny>, pin: PinWish, on_fork: ForkWish, owner: &str) -> PyResult<Self> {
        Self::mapped(nbytes.py(), size("nbytes", nbytes)?, pin.0, on_fork.0, owner)
    }

    /// The number of bytes that the caller asked for.
    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.asked_bytes()
    }

    /// The number of bytes that are mapped: `nbytes` rounded up to whole pages.
    #[getter]
    fn mapped_bytes(&self) -> usize {
        self.inner.bytes()
    }

    /// How the memory is pinned: "mlock", "cuda" or False.
    #[getter]
    fn pinned<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        pinned_shown(py, self.inner.pinned())
    }

    /// Why the memory is not registered with CUDA although `pin` is "auto"; else None.
    #[getter]
    fn why_not(&self) -> Option<&str> {
        self.inner.why_not()
    }

    /// The number of bytes that are on huge pages now. The query to the kernel takes milliseconds.
    #[getter]
    fn huge_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.inner.huge_bytes())
    }

    /// Why the system has no huge pages, or why the region has fewer huge pages than fit into it; else None.
    #[getter]
    fn why_not_huge(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| self.inner.why_not_huge())
    }

    /// True once `close()` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Rejects new leases, and ends every wait for a lease. Unmaps the memory at once, or when the last tensor in it is
    /// gone. A second call does nothing.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = if self.closed() { "closed".into() } else { format!("pinned={}", shown(&self.pinned(py))) };
        format!("Region({} bytes, {state})", self.nbytes())
    }
}

impl Region {
    fn mapped(py: Python<'_>, nbytes: usize, pin: Pin, on_fork: OnFork, owner: &str) -> PyResult<Self> {
        let made = interruptible(py, |keep_going| mem::Region::interruptible(nbytes, pin, on_fork, owner, keep_going))?;
        Ok(Self { inner: Detached::new(made) })
    }
}

/// A region that is divided once, as planned, into slots of exact sizes. So a lease takes no new memory from the system
/// and cannot fragment the region.
///
/// A lease takes a slot of the smallest class that is large enough, never a slot of a larger class. So leases that fit
/// into the plan succeed in every order.
#[pyclass(frozen, module = "memascend.memory")]
struct Arena {
    inner: Detached<mem::Arena>,
}

#[pymethods]
impl Arena {
    #[new]
    fn new(py: Python<'_>, region: &Region, classes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let inner = mem::Arena::new(&region.inner, &planned(classes)?);
        Ok(Self { inner: Detached::new(inner.or_raise(py)?) })
    }

    /// Takes a slot for `nbytes` bytes. If no slot is free, waits up to `timeout` seconds, or without a limit if
    /// `timeout` is None. Ctrl-C ends the wait.
    #[pyo3(signature = (nbytes, timeout=None, owner="user"))]
    fn lease(&self, nbytes: &Bound<'_, PyAny>, timeout: Option<Seconds>, owner: &str) -> PyResult<Lease> {
        let py = nbytes.py();
        let nbytes = size("nbytes", nbytes)?;
        let owner = self.inner.owner(owner).or_raise(py)?;
        leased(py, timeout, |wait| self.inner.lease(nbytes, owner, wait))
    }

    /// Returns the number of free slots that `lease(nbytes)` can take. If the number is 0, `lease` would wait.
    fn free_slots(&self, py: Python<'_>, nbytes: usize) -> PyResult<usize> {
        self.inner.free_slots(nbytes).or_raise(py)
    }

    /// Returns the counters: "capacity", "reserved", `"in_use"`, "bytes", "peak", "classes", "owners" and more.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner.stats())
    }
}

/// An arena of planned classes, {bytes: count}. Each slot that `add` adds later has its own region.
#[pyclass(frozen, module = "memascend.memory")]
struct HostArena {
    inner: Detached<mem::GrowingArena>,
}

#[pymethods]
impl HostArena {
    #[new]
    fn new(classes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, classes) = (classes.py(), planned(classes)?);
        let made = interruptible(py, |keep_going| mem::GrowingArena::new(&classes, keep_going))?;
        Ok(Self { inner: Detached::new(made) })
    }

    /// Adds a slot for a lease of `nbytes`, and returns the number of bytes that the slot takes.
    fn add(&self, py: Python<'_>, nbytes: usize) -> PyResult<usize> {
        interruptible(py, |keep_going| self.inner.add(nbytes, keep_going))
    }

    /// The number of added slots of each size, as {bytes: count}.
    #[getter]
    fn added(&self) -> BTreeMap<usize, usize> {
        self.inner.added_slots()
    }

    /// The bytes that the added slots take beyond the plan.
    #[getter]
    fn added_bytes(&self) -> usize {
        self.inner.added_bytes()
    }

    /// Takes a slot as `Arena.lease` does: a free planned slot, or a free added slot if no planned slot is free. If no
    /// slot is free, waits for a planned slot.
    #[pyo3(signature = (nbytes, timeout=None, owner="user"))]
    fn lease(&self, py: Python<'_>, nbytes: usize, timeout: Option<Seconds>, owner: &str) -> PyResult<Lease> {
        leased(py, timeout, |wait| self.inner.lease(nbytes, owner, wait))
    }

    /// Returns the number of free slots that `lease(nbytes)` can take.
    fn free_slots(&self, py: Python<'_>, nbytes: usize) -> PyResult<usize> {
        self.inner.free_slots(nbytes).or_raise(py)
    }

    /// The bytes of all memory that the arena holds; 0 once the arena is closed.
    #[getter]
    fn held_bytes(&self) -> usize {
        self.inner.held_bytes()
    }

    /// Rejects new leases, and ends every wait for a lease. Each region returns to the system once its last lease is
    /// gone.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

/// Equal staging chunks that threads hand to each other. The ring has its own region, which is pinned as `Region`
/// describes.
///
/// A forked child sees zeros in the chunks, because staged data is not for the child.
#[pyclass(frozen, module = "memascend.memory")]
struct ChunkRing {
    inner: Detached<mem::ChunkRing>,
    /// The region of the chunks.
    #[pyo3(get)]
    region: Py<Region>,
}

#[pymethods]
impl ChunkRing {
    #[new]
    #[pyo3(
        signature = (chunk_bytes, count, pin=PinWish(Pin::Auto)),
        text_signature = "(chunk_bytes, count, pin='auto')"
    )]
    fn new(chunk_bytes: &Bound<'_, PyAny>, count: &Bound<'_, PyAny>, pin: PinWish) -> PyResult<Self> {
        let py = count.py();
        let (chunk_bytes, count) = (size("chunk_bytes", chunk_bytes)?, size("count", count)?);
        let layout = Layout::unbounded(&[(chunk_bytes, count)]).or_raise(py)?;
        let region = Region::mapped(py, layout.reserved_bytes(), pin.0, OnFork::Wipe, "chunk ring")?;
        let inner = mem::ChunkRing::new(&region.inner, chunk_bytes, count);
        let inner = Detached::new(inner.or_raise(py)?);
        Ok(Self { inner, region: Py::new(py, region)? })
    }

    /// Takes a chunk; waits and raises as `Arena.lease` does.
    #[pyo3(signature = (timeout=None, owner="user"))]
    fn lease(&self, py: Python<'_>, timeout: Option<Seconds>, owner: &str) -> PyResult<Lease> {
        let owner = self.inner.owner(owner).or_raise(py)?;
        leased(py, timeout, |wait| self.inner.lease(owner, wait))
    }

    /// Returns the counters, as `Arena.stats` does.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner.stats())
    }

    /// Closes the ring's region; see `Region.close`.
    fn close(&self, py: Python<'_>) {
        self.region.get().close(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

/// The bytes of a file as a writable buffer. The buffer is valid as long as this object lives; see
/// `memascend.memory.file_memory`.
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
        // SAFETY: the descriptor is not negative, and the caller keeps it open during this call; the kernel rejects a
        // closed descriptor.
        let file = unsafe { BorrowedFd::borrow_raw(raw) };
        let inner = mem::FileMemory::new(file, size("nbytes", nbytes)?);
        Ok(Self { inner: Detached::new(inner.or_raise(py)?) })
    }

    /// # Safety
    /// `view` must be valid. The interpreter calls this function to fill the view.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().inner;
        // SAFETY: the interpreter passes a valid view. The bytes live as long as `slf`, to which the view gets a
        // reference.
        unsafe { fill(slf, view, (memory.as_ptr(), memory.len()), flags) }
    }
}

/// True if memory of `file_memory` begins at this address.
#[pyfunction]
fn is_file_memory(address: usize) -> bool {
    mem::is_file_memory(address)
}

/// Makes calls of this thread harmless to CUDA graphs that other threads capture.
///
/// Sets this thread's capture mode. In the default mode, a capture by another thread fails if this thread queries
/// whether a copy has ended. Returns False if the mode could not be set, for example if the process has not loaded the
/// CUDA driver. Without the driver, no thread captures.
#[pyfunction]
fn ignore_captures() -> bool {
    mem::ignore_captures()
}

/// The memory of an arena's classes. `asked` counts the bytes of the classes. `reserved` also counts the bytes between
/// slots that align the slots.
#[pyclass(frozen, get_all, name = "Layout", module = "memascend.memory")]
struct LayoutBytes {
    asked: usize,
    reserved: usize,
}

#[pymethods]
impl LayoutBytes {
    fn __repr__(&self) -> String {
        format!("Layout(asked={}, reserved={})", self.asked, self.reserved)
    }
}

/// Returns the memory that an arena of `classes` ({bytes: count}) takes. `Region(layout(classes).reserved)` is large
/// enough for the arena.
#[pyfunction]
fn layout(classes: &Bound<'_, PyAny>) -> PyResult<LayoutBytes> {
    let layout = Layout::unbounded(&planned(classes)?).or_raise(classes.py())?;
    Ok(LayoutBytes { asked: layout.asked_bytes(), reserved: layout.reserved_bytes() })
}

/// Makes the C library serve each large allocation of this process by a separate mapping, until `end_heap_step` makes
/// the heap keep freed memory. Also occupies the holes of the C library's heap, and returns free heap memory to the
/// system.
///
/// If the environment has `MEMASCEND_MALLOC=system`, this function does nothing. If the environment sets glibc's own
/// variables, this function only returns free heap memory.
#[pyfunction]
fn settle_heap(py: Python<'_>) {
    py.detach(mem::settle_heap);
}

/// Call this before each backward. The first call after `settle_heap` records how much memory the process has touched
/// so far, and the next `end_heap_step` counts only the memory that the process touches later.
#[pyfunction]
fn begin_heap_backward() {
    mem::begin_heap_backward();
}

/// Ends a step that had `backwards` backward passes. If a pass touched far more than `model_bytes` on average, and
/// enough memory is available, the heap keeps freed memory from now on. Until then, each call returns free heap memory
/// to the system. The environment variables that limit `settle_heap` limit this function in the same way.
#[pyfunction]
fn end_heap_step(py: Python<'_>, backwards: u64, model_bytes: u64) {
    py.detach(|| mem::end_heap_step(backwards, model_bytes));
}

/// Returns a dict of the limits on this process's memory now: "available" (in bytes), `"limited_by"` (the name of the
/// limit that determines "available"), each limit and more.
#[pyfunction]
fn limits(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
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

/// Returns a dict for each region that is mapped now: "owner", "bytes", and "pinned" (how the region is pinned).
#[pyfunction]
fn regions(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let region = |stats: mem::RegionStats| {
        let dict = PyDict::new(py);
        dict.set_item("owner", stats.owner)?;
        dict.set_item("bytes", stats.bytes)?;
        dict.set_item("pinned", pinned_shown(py, stats.pinned))?;
        Ok(dict)
    };
    mem::regions().into_iter().map(region).collect()
}

/// The value of the Python argument `pin`.
#[derive(Clone, Copy)]
struct PinWish(Pin);

impl<'py> FromPyObject<'_, 'py> for PinWish {
    type Error = PyErr;

    fn extract(pin: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let word = pin.cast::<PyString>().ok().map(|word| word.to_string());
        let no = pin.cast::<PyBool>().is_ok_and(|wish| !wish.is_true());
        match word.as_deref() {
            Some("auto") => Ok(Self(Pin::Auto)),
            Some("mlock") => Ok(Self(Pin::Mlock)),
            Some("cuda") => Ok(Self(Pin::Cuda)),
            None if no => Ok(Self(Pin::Off)),
            _ => Err(config_error(
                pin.py(),
                format!("pin must be \"auto\", \"mlock\", \"cuda\" or False, not {}", shown(&pin)),
            )),
        }
    }
}

/// The value of the Python argument `on_fork`.
#[derive(Clone, Copy)]
struct ForkWish(OnFork);

impl<'py> FromPyObject<'_, 'py> for ForkWish {
    type Error = PyErr;

    fn extract(on_fork: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match on_fork.cast::<PyString>().ok().map(|word| word.to_string()).as_deref() {
            Some("copy") => Ok(Self(OnFork::Copy)),
            Some("wipe") => Ok(Self(OnFork::Wipe)),
            _ => Err(config_error(
                on_fork.py(),
                format!("on_fork must be \"copy\" or \"wipe\", not {}", shown(&on_fork)),
            )),
        }
    }
}

fn pinned_shown(py: Python<'_>, pinned: Pinned) -> Bound<'_, PyAny> {
    match pinned {
        Pinned::No => PyBool::new(py, false).to_owned().into_any(),
        Pinned::Mlock => PyString::new(py, "mlock").into_any(),
        Pinned::Cuda => PyString::new(py, "cuda").into_any(),
    }
}

/// Extracts an arena's classes from any mapping of bytes to counts.
fn planned(classes: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, usize)>> {
    let classes = classes.py().get_type::<PyDict>().call1((classes,))?.cast_into::<PyDict>()?;
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
