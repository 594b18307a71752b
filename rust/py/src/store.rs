//! Translates `rust/store` for Python: stores, entries, units, commit, verification.
//!
//! Tensors arrive as addresses that `memascend.engine` has checked: each points to as many bytes as is said, on the CPU,
//! alive during the call. Nothing but `memascend.engine` calls them.

use std::{path::PathBuf, sync::Arc};

use memascend_mem::Pin;
use memascend_nvme::Lost;
use memascend_store::{Commit, Create, Durability, Existing, Part};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};

use crate::{
    agreement::{SharedRun, agreed, shared},
    bytes::{bytes, bytes_mut},
    described::{Described, described},
    errors::{config_error, nvme_error, store_error},
    examination::watched,
    function::{Lender, LentBuffer},
    info,
    nvme::Held,
    slow_drop::Detached,
    waiting::{interruptible, waiting},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Store>()?;
    module.add_class::<Fetch>()
}

/// State on SSD. See `memascend.engine.Store`.
#[pyclass(frozen, module = "memascend._core")]
pub(crate) struct Store {
    pub(crate) inner: Arc<memascend_store::Store>,
    pub(crate) created: bool,
}

#[pymethods]
impl Store {
    /// Makes a store, or opens what is there; without entries it only opens. "previous" waits for `go_back`.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "a description and how to open it")]
    #[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        entries: Option<Vec<Described>>,
        units: Vec<String>,
        optimizer: String,
        chunk_elements: u32,
        existing: &str,
        durability: &str,
        stripe: Option<u64>,
        backend: &str,
    ) -> PyResult<Self> {
        let mut how = Create::default();
        how.existing = chosen(
            py,
            "existing",
            existing,
            &[
                ("refuse", Existing::Refuse),
                ("resume", Existing::Resume),
                ("replace", Existing::Replace),
                ("previous", Existing::Previous),
            ],
        )?;
        how.durability = chosen(
            py,
            "durability",
            durability,
            &[("step", Durability::Step), ("close", Durability::Close), ("none", Durability::None)],
        )?;
        how.goes_back_later = true;
        how.volume.stripe_bytes = stripe;
        how.volume.backend = crate::nvme::chosen(py, backend)?;
        let description =
            entries.map(|entries| described(py, entries, units, optimizer, chunk_elements)).transpose()?;
        let (inner, created) = watched(py, None, |progress| match description {
            Some(description) => memascend_store::Store::create_watched(&paths, description, &how, progress),
            None => memascend_store::Store::open_watched(&paths, &how, progress).map(|store| (store, false)),
        })?;
        memascend_engine::apply_logs(&inner);
        Ok(Self { inner: Arc::new(inner), created })
    }

    /// In which way it is no store of these entries; `None` where it is one.
    fn difference(
        &self,
        py: Python<'_>,
        entries: Vec<Described>,
        units: Vec<String>,
        optimizer: String,
        chunk_elements: u32,
    ) -> PyResult<Option<String>> {
        let wanted = described(py, entries, units, optimizer, chunk_elements)?;
        Ok(self.inner.description().difference(&wanted))
    }

    /// Gives the newest commit up, where the one before it was opened.
    fn go_back(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.go_back()).map_err(|error| store_error(py, &error))
    }

    /// Whether it was made now, and has to be filled.
    #[getter]
    fn created(&self) -> bool {
        self.created
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::of_store(py, &self.inner)
    }

    fn entry<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyDict>> {
        info::of_entry(py, &self.inner, index)
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::counters(py, &self.inner)
    }

    /// How many entries there are.
    fn count(&self) -> usize {
        self.inner.description().entries.len()
    }

    /// Stages a whole entry from (address, bytes) of its values and its state tensors.
    fn stage(&self, py: Python<'_>, entry: usize, step: u64, tensors: Vec<(usize, usize)>) -> PyResult<()> {
        waiting(py, None, |wait| {
            // SAFETY: the module's contract.
            let tensors: Vec<&[u8]> = tensors.into_iter().map(|place| unsafe { bytes(place) }).collect();
            self.inner.stage_entry(entry, step, &tensors, wait)
        })?
        .map_err(|error| store_error(py, &error))
    }

    /// Reads a whole live entry into (address, bytes) of its values and its state tensors.
    fn read(&self, py: Python<'_>, entry: usize, tensors: Vec<(usize, usize)>) -> PyResult<u64> {
        py.detach(|| {
            // SAFETY: the module's contract; the tensors are apart.
            let mut tensors: Vec<&mut [u8]> = tensors.into_iter().map(|place| unsafe { bytes_mut(place) }).collect();
            self.inner.read_entry(entry, &mut tensors)
        })
        .map_err(|error| store_error(py, &error))
    }

    /// Holds entries in memory from now on; `refresh` reads them. `registered`: in memory that a device copies from.
    #[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn hold(&self, py: Python<'_>, entries: Vec<usize>, registered: bool) -> PyResult<()> {
        let pin = if registered { Pin::Auto } else { Pin::Off };
        interruptible(py, |keep_going| self.inner.hold(&entries, pin, keep_going))?
            .map_err(|error| store_error(py, &error))
    }

    /// Reads what is held of some entries and is stale; `progress(done, all)` may raise.
    #[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn refresh(&self, py: Python<'_>, entries: Vec<usize>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        watched(py, progress, |progress| self.inner.refresh(&entries, progress))
    }

    /// Makes room for a log of gradients of entries, of so many steps; for how many there is room.
    fn keep_log(&self, py: Python<'_>, entries: Vec<usize>, steps: u32) -> PyResult<u32> {
        let described = &self.inner.description().entries;
        let spills = |entry: usize| Some((entry, described.get(entry)?.spill?));
        let entries: Vec<_> = entries.into_iter().filter_map(spills).collect();
        py.detach(|| self.inner.keep_log(&entries, steps)).map_err(|error| store_error(py, &error))
    }

    /// Writes what only memory has; `progress(done, all)` may raise.
    fn write_applied(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        watched(py, progress, |progress| self.inner.write_applied(progress))
    }

    /// Gives up what only memory has.
    fn give_up(&self, py: Python<'_>) {
        py.detach(|| self.inner.give_up_applied());
    }

    /// The values of a unit where they are held, all of them, as the last commit left them; None where they are not.
    fn held_unit(&self, py: Python<'_>, unit: usize) -> PyResult<Option<Py<LentBuffer>>> {
        let entries: Vec<usize> = self.inner.entries_of(unit).collect();
        let Some(memory) = self.inner.held_unit(unit) else { return Ok(None) };
        watched(py, None, |progress| self.inner.refresh(&entries, progress))?;
        Lender::default().lend(py, memory).map(Some)
    }

    /// Counts what made held pieces stale.
    #[getter]
    fn held_epoch(&self) -> u64 {
        self.inner.held_epoch()
    }

    /// Somebody wrote to the values of an entry in memory.
    fn spoil(&self, entry: usize) {
        self.inner.spoil(entry);
    }

    /// Begins to read a unit into `nbytes` at `address`, which stay valid as long as `keep` lives.
    fn fetch(&self, py: Python<'_>, unit: usize, address: usize, nbytes: usize, keep: Py<PyAny>) -> PyResult<Fetch> {
        let memory = Held::new(address, nbytes, keep);
        let inner = py.detach(|| self.inner.fetch(unit, memory)).map_err(|error| store_error(py, &error))?;
        Ok(Fetch { inner: Detached::new(inner) })
    }

    /// `run`: the id and the number that all ranks share; `agree` is called when all is flushed, and ends it by raising.
    fn commit(
        &self,
        py: Python<'_>,
        step: u64,
        user: Option<String>,
        hyperparameters: Option<String>,
        run: Option<SharedRun>,
        agree: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let commit = Commit { step, user, hyperparameters, run: Some(shared(run)), ..Commit::default() };
        agreed(py, agree, |py, agree| {
            Ok(waiting(py, None, |wait| self.inner.commit_agreed(commit, wait, agree))?
                .map_err(|error| store_error(py, &error)))
        })
    }

    fn set_first_elements(&self, py: Python<'_>, firsts: Vec<u64>) -> PyResult<()> {
        self.inner.set_first_elements(firsts).map_err(|error| store_error(py, &error))
    }

    /// Has nothing be written any more, by `close` either.
    fn end(&self) {
        self.inner.end();
    }

    #[pyo3(signature = (entry=None))]
    fn discard(&self, py: Python<'_>, entry: Option<usize>) -> PyResult<()> {
        waiting(py, None, |wait| match entry {
            Some(entry) => self.inner.discard_entry(entry, wait),
            None => self.inner.discard(wait),
        })?
        .map_err(|error| store_error(py, &error))
    }

    /// Checks what a replay reads, and what it is applied to.
    fn check_log(&self, py: Python<'_>) -> PyResult<()> {
        interruptible(py, |keep_going| self.inner.check_log(keep_going))?.map_err(|error| store_error(py, &error))
    }

    /// Checks every live piece; `progress(done, all)` may raise. Returns (pieces, bytes).
    fn verify(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<(u64, u64)> {
        let verified = watched(py, progress, |progress| self.inner.verify(progress))?;
        Ok((verified.pieces, verified.bytes))
    }

    /// Damaged copies of labels and description, in words.
    fn damaged(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.inner.damaged()).map_err(|error| store_error(py, &error))
    }

    /// Shows live entries in parts: `visit(entry, [(tensor, first byte, memory)])`, whose memory is lent for the call.
    #[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn scan(&self, py: Python<'_>, entries: Vec<usize>, visit: Py<PyAny>) -> PyResult<()> {
        let mut raised = None;
        let scanned = py.detach(|| {
            self.inner.scan(&entries, &mut |entry, parts| {
                let told = Python::attach(|py| {
                    py.check_signals()?;
                    shown(py, &visit, entry, parts)
                });
                told.map_err(|error| raised = Some(error)).is_ok()
            })
        });
        match raised {
            Some(raised) => Err(raised),
            None => scanned.map_err(|error| store_error(py, &error)),
        }
    }

    /// The first file that its path does not name any more, and what became of it: "deleted", "moved" or "replaced".
    fn lost(&self, py: Python<'_>) -> Option<(PathBuf, &'static str)> {
        let (path, what) = py.detach(|| self.inner.volume().lost())?;
        let word = match what {
            Lost::Deleted => "deleted",
            Lost::Moved => "moved",
            Lost::Replaced => "replaced",
            Lost::Truncated => "truncated",
        };
        Some((path.to_path_buf(), word))
    }

    /// Has what was made for it removed when it is closed.
    fn forsake(&self) {
        self.inner.volume().forsake();
    }

    /// Begins to record a trace into a new file.
    #[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn trace(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.inner.volume().trace().begin(&path)).map_err(|error| nvme_error(py, &error))
    }

    fn trace_end(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.volume().trace().end()).map_err(|error| nvme_error(py, &error))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // The devices are let go even where the last words could not be written to them.
        let said =
            waiting(py, None, |wait| self.inner.close(wait)).map(|said| said.map_err(|error| store_error(py, &error)));
        let let_go = waiting(py, None, |wait| self.inner.volume().close(wait))?.map_err(|error| nvme_error(py, &error));
        said??;
        let_go?;
        self.trace_end(py)
    }
}

fn shown(py: Python<'_>, visit: &Py<PyAny>, entry: usize, parts: Vec<Part>) -> PyResult<()> {
    let lender = Lender::default();
    let lent = PyList::empty(py);
    for Part { tensor, start, memory } in parts {
        lent.append((tensor, start, lender.lend(py, memory)?))?;
    }
    let result = visit.call1(py, (entry, &lent));
    lent.call_method0("clear")?;
    result?;
    lender.require_back(py)
}

/// A unit on its way into memory. See `memascend.engine.Fetch`.
#[pyclass(frozen, module = "memascend._core")]
pub(crate) struct Fetch {
    inner: Detached<memascend_store::Fetch<Held>>,
}

#[pymethods]
impl Fetch {
    fn wait(&self, py: Python<'_>) -> PyResult<u64> {
        waiting(py, None, |wait| self.inner.wait(wait))?.map_err(|error| store_error(py, &error))
    }

    fn done(&self) -> bool {
        self.inner.is_done()
    }
}

fn chosen<T: Copy>(py: Python<'_>, name: &str, asked: &str, choices: &[(&str, T)]) -> PyResult<T> {
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    let found = choices.iter().find(|(choice, _)| *choice == asked).map(|(_, value)| *value);
    found.ok_or_else(|| config_error(py, format!("{name} must be one of {names:?}, not {asked:?}")))
}
