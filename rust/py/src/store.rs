//! Translates `rust/store` for Python: stores, records, units, commit, verification.
//!
//! Tensors arrive as addresses that `memascend.engine` has checked: each points to as many bytes as is said, on the CPU,
//! alive during the call. Nothing but `memascend.engine` calls them.

use std::{collections::HashMap, path::PathBuf, sync::Arc};

use memascend_mem::Pin;
use memascend_nvme::{Lost, PENDING_SUFFIX};
use memascend_store::{Commit, Create, Durability, Existing, Part};
use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyDict, PyList, PyString, PyTuple},
};

use crate::{
    agreement::{SharedRun, agreed, shared},
    arguments::{chosen, shown},
    described::{Described, described},
    errors::{OrRaise as _, config_error},
    function::Lender,
    info,
    kernels::elements_mut,
    waiting::{calling, interruptible, waiting, watched},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PENDING_SUFFIX", PENDING_SUFFIX)?;
    module.add_class::<Store>()
}

/// State on SSD: every commit is all of a step or none of it, and every byte that is read was checked.
#[pyclass(frozen, subclass, module = "memascend._core")]
pub(crate) struct Store {
    pub(crate) inner: Arc<memascend_store::Store>,
    created: bool,
    /// The numbers of records.
    names: HashMap<String, usize>,
}

#[pymethods]
impl Store {
    /// Makes a store, or opens what is there; without records it only opens. "previous" waits for `go_back`, and "look"
    /// opens it to be looked at, damaged or not: nothing can be staged, and nothing is written.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "a description and how to open it")]
    #[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        records: Option<Vec<Described>>,
        units: Vec<String>,
        optimizer: String,
        chunk_elements: u32,
        existing: &str,
        durability: &str,
    ) -> PyResult<Self> {
        let mut how = Create::default();
        if existing == "look" {
            let found = py.detach(|| memascend_store::Store::look(&paths, &how));
            return Ok(Self::found(found.or_raise(py)?, false));
        }
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
        how.durability =
            chosen(py, "durability", durability, &[("step", Durability::Step), ("none", Durability::None)])?;
        how.goes_back_later = true;
        let description =
            records.map(|records| described(py, records, units, optimizer, chunk_elements)).transpose()?;
        let (inner, created) = watched(py, None, |progress| match description {
            Some(description) => memascend_store::Store::create_watched(&paths, description, &how, progress),
            None => memascend_store::Store::open_watched(&paths, &how, progress).map(|store| (store, false)),
        })?;
        Ok(Self::found(inner, created))
    }

    /// In which way it is no store of these records; `None` where it is one.
    fn difference_of(
        &self,
        py: Python<'_>,
        records: Vec<Described>,
        units: Vec<String>,
        optimizer: String,
        chunk_elements: u32,
    ) -> PyResult<Option<String>> {
        let wanted = described(py, records, units, optimizer, chunk_elements)?;
        Ok(self.inner.description().difference(&wanted))
    }

    /// Give the newest commit up for good, where the one before it was opened without that.
    fn go_back(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.go_back()).or_raise(py)
    }

    /// Whether it was made now.
    #[getter]
    fn created(&self) -> bool {
        self.created
    }

    /// Committed steps.
    #[getter]
    fn step(&self) -> u64 {
        self.inner.info().step
    }

    /// Identity, last commit, sizes in bytes: "uuid", "generation", "step", "optimizer", "units", "devices", more.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::of_store(py, &self.inner)
    }

    /// The number of a record.
    pub(crate) fn index(&self, name: &Bound<'_, PyString>) -> PyResult<usize> {
        let found = self.names.get(&*name.to_cow()?).copied();
        found.ok_or_else(|| config_error(name.py(), format!("the store has no record {}", shown(name))))
    }

    /// A record as it is described, and its counts: "name", "buffer", "unit", "dtype", "shape", "step", "version", "staged", "state" ...
    fn record<'py>(&self, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyDict>> {
        info::of_record(name.py(), &self.inner, self.index(name)?)
    }

    /// The same by its number.
    fn record_at<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyDict>> {
        info::of_record(py, &self.inner, index)
    }

    /// Since it was opened: "fetches", `"fetched_bytes"`, `"ram_tier_bytes"`, `"wait_seconds"` in `Fetch.wait`, and all I/O.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::counters(py, &self.inner)
    }

    /// How many records there are.
    fn count(&self) -> usize {
        self.inner.description().records.len()
    }

    /// Reads a whole live record into (address, bytes) of its values and its state tensors.
    fn read_at(&self, py: Python<'_>, record: usize, tensors: Vec<(usize, usize)>) -> PyResult<u64> {
        py.detach(|| {
            // SAFETY: the module's contract; the tensors are apart.
            let tensors = tensors.into_iter().map(|(address, nbytes)| unsafe { elements_mut(address, nbytes) });
            let mut tensors: Vec<&mut [u8]> = tensors.collect();
            self.inner.read_record(record, &mut tensors)
        })
        .or_raise(py)
    }

    /// Hold records in memory from now on; what was in RAM before is not any more. Nothing is read before `refresh`.
    #[pyo3(signature = (names, *, registered=false))]
    fn hold(&self, names: &Bound<'_, PyAny>, registered: bool) -> PyResult<()> {
        let (py, records) = (names.py(), self.indices(names)?);
        let pin = if registered { Pin::Auto } else { Pin::Off };
        interruptible(py, |keep_going| self.inner.hold(&records, pin, keep_going))
    }

    /// Read what is in RAM of some records where it is not in memory; `progress(done, all)` hears of bytes.
    #[pyo3(signature = (names, progress=None))]
    fn refresh(&self, names: &Bound<'_, PyAny>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let records = self.indices(names)?;
        watched(names.py(), progress, |progress| self.inner.refresh(&records, progress))
    }

    /// Make room in which the updates of these records are left to the next step; whether there is any.
    fn keep_places(&self, names: &Bound<'_, PyAny>) -> PyResult<bool> {
        let records = self.indices(names)?;
        names.py().detach(|| self.inner.keep_places(&records)).or_raise(names.py())
    }

    /// Log the gradients of records in RAM from now on, instead of writing them each step; how many steps find room.
    fn keep_log(&self, names: &Bound<'_, PyAny>, steps: u32) -> PyResult<u32> {
        let py = names.py();
        let described = &self.inner.description().records;
        let spills = |record: usize| Some((record, described.get(record)?.spill?));
        let records: Vec<_> = self.indices(names)?.into_iter().filter_map(spills).collect();
        py.detach(|| self.inner.keep_log(&records, steps)).or_raise(py)
    }

    /// Write what only memory and the log have of records in RAM, as a part of the last step: the log ends with it.
    #[pyo3(signature = (progress=None))]
    fn write_applied(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        watched(py, progress, |progress| self.inner.write_applied(progress))
    }

    /// Give up what only memory has, where it has something: the store stays unclosed, which opening it says.
    fn give_up(&self, py: Python<'_>) {
        py.detach(|| self.inner.give_up_applied());
    }

    /// The values of a unit where they are in RAM, as the last commit left them; None where not all of it is in RAM.
    fn ram_tier_unit<'py>(&self, unit: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (py, unit) = (unit.py(), self.unit(unit)?);
        let records: Vec<usize> = self.inner.records_of(unit).collect();
        let Some(memory) = self.inner.ram_tier_unit(unit) else { return Ok(None) };
        watched(py, None, |progress| self.inner.refresh(&records, progress))?;
        let torch = py.import("torch")?;
        let options = [("dtype", torch.getattr("uint8")?)].into_py_dict(py)?;
        torch.call_method("frombuffer", (Lender::default().lend(py, memory)?,), Some(&options)).map(Some)
    }

    /// While it stays the same, what `ram_tier_unit` gave is what the last commit left.
    #[getter]
    fn ram_tier_epoch(&self) -> u64 {
        self.inner.ram_tier_epoch()
    }

    /// Say that somebody wrote to the values of a record in RAM: `refresh` reads them again.
    fn spoil(&self, name: &Bound<'_, PyString>) -> PyResult<()> {
        self.inner.spoil(self.index(name)?);
        Ok(())
    }

    /// Commits, with the values as JSON. `run`: the id and the number that all ranks share; `agree` is called when all is
    /// flushed, and ends it by raising.
    fn commit_as(
        &self,
        py: Python<'_>,
        step: u64,
        user: Option<String>,
        hyperparameters: Option<String>,
        run: Option<SharedRun>,
        agree: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let commit = Commit { step, user, hyperparameters, run: Some(shared(run)), ..Commit::default() };
        agreed(py, agree, |wait, agree| self.inner.commit_agreed(commit, wait, agree))
    }

    /// Have `digest` be of what is staged of these records.
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 makes it")]
    fn compare(&self, records: Vec<usize>) {
        self.inner.compare(&records);
    }

    /// A number that is the same in stores of the same records, if the same bytes of those compared are staged.
    fn digest(&self) -> u64 {
        self.inner.digest()
    }

    /// Have nothing written any more, by `close()` either: what is committed stays as it is.
    fn end(&self) {
        self.inner.end();
    }

    /// Check what `Engine.replay` reads, which does it too: where others have to know it before any of them writes.
    fn check_log(&self, py: Python<'_>) -> PyResult<()> {
        interruptible(py, |keep_going| self.inner.check_log(keep_going))
    }

    /// Read and check everything that is live: extents and bytes. `progress(done, all)` hears of bytes.
    #[pyo3(signature = (progress=None))]
    fn verify(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<(u64, u64)> {
        let verified = watched(py, progress, |progress| self.inner.verify(progress))?;
        Ok((verified.extents, verified.bytes))
    }

    /// Damaged copies of labels and description, in words; the first commit after an open repairs them.
    fn damaged(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.inner.damaged()).or_raise(py)
    }

    /// Shows live records in parts: `visit(record, [(tensor, first byte, memory)])`, whose memory is lent for the call.
    #[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
    fn scan_at(&self, py: Python<'_>, records: Vec<usize>, visit: Py<PyAny>) -> PyResult<()> {
        calling(py, |calls| {
            self.inner.scan(&records, &mut |record, parts| {
                calls.call(|py| {
                    py.check_signals()?;
                    show(py, &visit, record, parts)
                })
            })
        })
    }

    /// The first file that its path does not name any more, and what became of it: "deleted", "moved" or "replaced".
    fn lost_file(&self, py: Python<'_>) -> Option<(PathBuf, &'static str)> {
        let (path, what) = py.detach(|| self.inner.volume().lost())?;
        let word = match what {
            Lost::Deleted => "deleted",
            Lost::Moved => "moved",
            Lost::Replaced => "replaced",
            Lost::Truncated => "truncated",
        };
        Some((path.to_path_buf(), word))
    }

    /// Have what was made for it, where there was nothing, removed by `close()`, before anybody else can have it.
    fn forsake(&self) {
        self.inner.volume().forsake();
    }

    /// Note that its file is removed on purpose: a new store takes no name then, and its file is not reported as lost.
    fn become_temporary(&self) {
        self.inner.volume().forgo_names();
    }

    /// Keep what was committed, drop what is only staged, and let go of the devices. Twice is fine.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // The devices are let go even where the last words could not be written to them.
        let said = waiting(py, None, |wait| self.inner.close(wait));
        let closed = waiting(py, None, |wait| self.inner.volume().close(wait));
        said.and(closed)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(slf: &Bound<'_, Self>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        slf.call_method0("close").map(drop)
    }
}

impl Store {
    fn found(inner: memascend_store::Store, created: bool) -> Self {
        memascend_engine::apply_logs(&inner);
        let records = &inner.description().records;
        let names = records.iter().enumerate().map(|(index, record)| (record.name.clone(), index)).collect();
        Self { inner: Arc::new(inner), created, names }
    }

    /// The numbers of records.
    fn indices(&self, names: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
        names.try_iter()?.map(|name| self.index(name?.cast::<PyString>()?)).collect()
    }

    /// The number of a unit.
    pub(crate) fn unit(&self, name: &Bound<'_, PyString>) -> PyResult<usize> {
        let units = &self.inner.description().units;
        let found = units.iter().position(|unit| name == unit.as_str());
        found.ok_or_else(|| config_error(name.py(), format!("the store has no unit {}", shown(name))))
    }
}

fn show(py: Python<'_>, visit: &Py<PyAny>, record: usize, parts: Vec<Part>) -> PyResult<()> {
    let lender = Lender::default();
    let lent = PyList::empty(py);
    for Part { tensor, start, memory } in parts {
        lent.append((tensor, start, lender.lend(py, memory)?))?;
    }
    let result = visit.call1(py, (record, &lent));
    lent.call_method0("clear")?;
    result?;
    lender.require_back(py)
}
