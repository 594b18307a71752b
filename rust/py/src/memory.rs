//! Translates `rust/mem` for Python: regions, arenas, rings, leases.

use std::{
    ffi::c_int,
    sync::{Arc, Mutex, MutexGuard},
};

use memascend_mem::{self as mem, ArenaStats, Layout, OnFork, OwnerStats, Pin, Pinned, Wait};
use pyo3::{
    ffi,
    prelude::*,
    types::{PyBool, PyDict, PyString},
};

use crate::{
    arguments::{Seconds, shown, size},
    errors::{config_error, memory_error, usage_error},
    waiting::{interruptible, waiting},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Region>()?;
    module.add_class::<Arena>()?;
    module.add_class::<ChunkRing>()?;
    module.add_class::<Lease>()?;
    module.add_class::<LeaseBuffer>()?;
    module.add_function(wrap_pyfunction!(ignore_captures, module)?)?;
    module.add_function(wrap_pyfunction!(memory_layout, module)?)?;
    module.add_function(wrap_pyfunction!(memory_limits, module)?)?;
    module.add_function(wrap_pyfunction!(memory_regions, module)?)
}

/// Page-aligned memory outside Python's heap. See `memascend.memory.Region`.
#[pyclass(frozen, module = "memascend._core")]
struct Region {
    inner: Outside<mem::Region>,
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
        Ok(Self { inner: Outside::new(made.map_err(|error| memory_error(py, &error))?) })
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
    inner: Outside<mem::Arena>,
}

#[pymethods]
impl Arena {
    #[new]
    fn new(py: Python<'_>, region: &Region, classes: &Bound<'_, PyDict>) -> PyResult<Self> {
        let inner = mem::Arena::new(&region.inner, &planned(classes)?);
        Ok(Self { inner: Outside::new(inner.map_err(|error| memory_error(py, &error))?) })
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
    inner: Outside<mem::ChunkRing>,
}

#[pymethods]
impl ChunkRing {
    #[new]
    fn new(region: &Region, chunk_bytes: &Bound<'_, PyAny>, count: &Bound<'_, PyAny>) -> PyResult<Self> {
        let inner = mem::ChunkRing::new(&region.inner, size("chunk_bytes", chunk_bytes)?, size("count", count)?);
        Ok(Self { inner: Outside::new(inner.map_err(|error| memory_error(count.py(), &error))?) })
    }

    fn lease(&self, py: Python<'_>, seconds: Option<Seconds>, owner: &str) -> PyResult<Lease> {
        let owner = self.inner.owner(owner).map_err(|error| memory_error(py, &error))?;
        leased(py, seconds, |wait| self.inner.lease(owner, wait))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner.stats())
    }
}

/// A hold on a slot; the buffers made of it hold it too. See `memascend.memory.Lease`.
#[pyclass(frozen, module = "memascend._core")]
struct Lease {
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
            drop(Outside(self.lease.take()));
        }
    }
}

#[pymethods]
impl LeaseBuffer {
    /// # Safety
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(slf: &Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let Some(lease) = &slf.get().lease else { return Err(usage_error(slf.py(), RETURNED)) };
        // A lease is smaller than isize::MAX: the layout sees to it.
        let length = ffi::Py_ssize_t::try_from(lease.len())?;
        // SAFETY: the interpreter passes a valid view; the bytes live as long as `slf`, which the view comes to hold.
        let failed =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), lease.as_ptr().as_ptr().cast(), length, 0, flags) };
        if failed == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Where the slots of a plan would lie: (bytes asked for, bytes reserved).
#[pyfunction]
fn ignore_captures() -> bool {
    mem::ignore_captures()
}

#[pyfunction]
fn memory_layout(classes: &Bound<'_, PyDict>) -> PyResult<(usize, usize)> {
    let layout = Layout::unbounded(&planned(classes)?).map_err(|error| memory_error(classes.py(), &error))?;
    Ok((layout.asked_bytes(), layout.reserved_bytes()))
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

/// Waits for a lease, with the GIL released.
fn leased(
    py: Python<'_>,
    seconds: Option<Seconds>,
    lease: impl FnOnce(Wait<'_>) -> mem::Result<mem::Lease> + Send,
) -> PyResult<Lease> {
    let lease = waiting(py, seconds, lease)?.map_err(|error| memory_error(py, &error))?;
    Ok(Lease { nbytes: lease.len(), inner: Mutex::new(Some(Arc::new(lease))) })
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

/// Something whose end may take long (memory that is unmapped): it is dropped with the GIL released.
struct Outside<T: Send>(Option<T>);

impl<T: Send> Outside<T> {
    fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> std::ops::Deref for Outside<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap_or_else(|| unreachable!("empty only while it is dropped"))
    }
}

impl<T: Send> Drop for Outside<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        // Without an interpreter, at the very end of the process, there is no GIL to release.
        if let Some(value) = value {
            let mut value = Some(value);
            let dropped = Python::try_attach(|py| py.detach(|| drop(value.take())));
            if dropped.is_none() {
                drop(value);
            }
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
