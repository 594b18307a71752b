//! Python bindings of `rust/store`: stores, records, units, commit, verification. Tensors arrive as addresses: see
//! [Note: trusted addresses].
//!
//! Only `memascend.engine` calls the functions that take addresses.

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
    errors::{OrPyErr as _, config_error},
    function::Lender,
    info,
    kernels::elements_mut,
    waiting::{calling, interruptible, waiting, watched},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PENDING_SUFFIX", PENDING_SUFFIX)?;
    module.add_class::<Store>()
}

/// A store of training state on SSD. A commit contains the whole step, or changes nothing. With durability "step", it
/// also makes the step durable. Every read from storage is verified.
#[pyclass(frozen, subclass, module = "memascend._core")]
pub(crate) struct Store {
    pub(crate) inner: Arc<memascend_store::Store>,
    created: bool,
    /// The number of each record, by its name.
    names: HashMap<String, usize>,
}

#[pymethods]
impl Store {
    /// Creates a store, or opens an existing store. If `records` is None, only opens an existing store. If `existing`
    /// is "previous", opens the previous commit (see `Existing::Previous`), and keeps the newest commit until `go_back`
    /// is called. If `existing` is "look", opens the store for inspection, at its newest commit with an undamaged
    /// catalog. A store that is opened for inspection accepts no staged data and writes nothing.
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

    /// Returns how the store differs from these records; None if the store does not differ.
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

    /// Drops the newest commit for good, if the store was opened with `existing="previous"`.
    fn go_back(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.go_back()).or_raise(py)
    }

    /// True if this object created the store.
    #[getter]
    fn created(&self) -> bool {
        self.created
    }

    /// The number of committed steps.
    #[getter]
    fn step(&self) -> u64 {
        self.inner.info().step
    }

    /// Returns identity, last commit and sizes in bytes: "uuid", "generation", "step", "optimizer", "units", "devices"
    /// and more.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::of_store(py, &self.inner)
    }

    /// Returns the number of the record with this name.
    pub(crate) fn index(&self, name: &Bound<'_, PyString>) -> PyResult<usize> {
        let found = self.names.get(&*name.to_cow()?).copied();
        found.ok_or_else(|| config_error(name.py(), format!("the store has no record {}", shown(name))))
    }

    /// Returns a record's description and counts: "name", "buffer", "unit", "dtype", "shape", "step", "version",
    /// "staged", "state" and more.
    fn record<'py>(&self, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyDict>> {
        info::of_record(name.py(), &self.inner, self.index(name)?)
    }

    /// Returns the same dict as `record`, for the record with the number `index`.
    fn record_at<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyDict>> {
        info::of_record(py, &self.inner, index)
    }

    /// Returns counts since the store was opened: "fetches", `"fetched_bytes"`, `"ram_tier_bytes"`, `"wait_seconds"`
    /// (spent in `Fetch.wait` of fetches of whole units), and the bytes of all I/O.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        info::counters(py, &self.inner)
    }

    /// Returns the number of records.
    fn count(&self) -> usize {
        self.inner.description().records.len()
    }

    /// Reads a record's values and state tensors of the last commit. `tensors` has (address, bytes) of the memory for
    /// each of these tensors. Returns the record's version.
    fn read_at(&self, py: Python<'_>, record: usize, tensors: Vec<(usize, usize)>) -> PyResult<u64> {
        py.detach(|| {
            // SAFETY: Python checked the addresses ([Note: trusted addresses]); the tensors are disjoint.
            let tensors = tensors.into_iter().map(|(address, nbytes)| unsafe { elements_mut(address, nbytes) });
            let mut tensors: Vec<&mut [u8]> = tensors.collect();
            self.inner.read_record(record, &mut tensors)
        })
        .or_raise(py)
    }

    /// Keeps these records, and no other records, in RAM from now on. This call reads nothing: `refresh` reads the
    /// records into RAM.
    #[pyo3(signature = (names, *, registered=false))]
    fn hold(&self, names: &Bound<'_, PyAny>, registered: bool) -> PyResult<()> {
        let (py, records) = (names.py(), self.indices(names)?);
        let pin = if registered { Pin::Auto } else { Pin::Off };
        interruptible(py, |keep_going| self.inner.hold(&records, pin, keep_going))
    }

    /// Reads stale or missing values and state of these records into RAM. Calls `progress(done, all)` with numbers of
    /// bytes.
    #[pyo3(signature = (names, progress=None))]
    fn refresh(&self, names: &Bound<'_, PyAny>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let records = self.indices(names)?;
        watched(names.py(), progress, |progress| self.inner.refresh(&records, progress))
    }

    /// Makes second places for gradients, so that updates of these records can be deferred. Returns False, and changes
    /// nothing, if `names` is empty, there is no space, the log is not empty, or second places exist.
    fn keep_places(&self, names: &Bound<'_, PyAny>) -> PyResult<bool> {
        let records = self.indices(names)?;
        names.py().detach(|| self.inner.keep_places(&records)).or_raise(names.py())
    }

    /// Logs the gradients of records in RAM from now on, instead of writing the records in each step. Returns how many
    /// steps the log holds. If there is no space for a log, returns 0, and each step writes the records.
    fn keep_log(&self, names: &Bound<'_, PyAny>, steps: u32) -> PyResult<u32> {
        let py = names.py();
        let described = &self.inner.description().records;
        let spills = |record: usize| Some((record, described.get(record)?.spill?));
        let records: Vec<_> = self.indices(names)?.into_iter().filter_map(spills).collect();
        py.detach(|| self.inner.keep_log(&records, steps)).or_raise(py)
    }

    /// Writes the records in RAM whose newest state is not in their slots on storage, and commits them as a part of the
    /// last step. Does nothing if there are no such records. Otherwise also discards all other staged data, except
    /// settled records, and empties the log, unless the slot of a record lacks a deferred update.
    #[pyo3(signature = (progress=None))]
    fn write_applied(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        watched(py, progress, |progress| self.inner.write_applied(progress))
    }

    /// Abandons state that is only in memory. If the store has state that is only in memory, nothing can be committed
    /// from then on. With durability "none", `close` then leaves the store marked as not closed, and the next opening
    /// reports this.
    fn give_up(&self, py: Python<'_>) {
        py.detach(|| self.inner.give_up_applied());
    }

    /// Returns the values that a unit in RAM has in the last commit; None if a part of the unit is not in RAM.
    fn ram_tier_unit<'py>(&self, unit: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (py, unit) = (unit.py(), self.unit(unit)?);
        let records: Vec<usize> = self.inner.records_of(unit).collect();
        let Some(memory) = self.inner.ram_tier_unit(unit) else { return Ok(None) };
        watched(py, None, |progress| self.inner.refresh(&records, progress))?;
        let torch = py.import("torch")?;
        let options = [("dtype", torch.getattr("uint8")?)].into_py_dict(py)?;
        torch.call_method("frombuffer", (Lender::default().lend(py, memory)?,), Some(&options)).map(Some)
    }

    /// A count that changes when values in RAM become stale. While the count is unchanged, the memory of
    /// `ram_tier_unit` has the values of the last commit.
    #[getter]
    fn ram_tier_epoch(&self) -> u64 {
        self.inner.ram_tier_epoch()
    }

    /// Marks the values of a record in RAM as overwritten: `refresh` reads them again.
    fn spoil(&self, name: &Bound<'_, PyString>) -> PyResult<()> {
        self.inner.invalidate_values(self.index(name)?);
        Ok(())
    }

    /// Commits a step, with `user` and `hyperparameters` as JSON. `run` identifies the run, the commit and this rank.
    /// Calls `agree` before the step becomes live. If the commit writes a root, it calls `agree` after the flush of all
    /// data. If `agree` raises an exception, the commit fails with this exception, and the last commit stays valid.
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

    /// Selects the records that `digest` covers. Only the first call has an effect.
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 makes it")]
    fn compare(&self, records: Vec<usize>) {
        self.inner.compare(&records);
    }

    /// Returns a digest of the staged bytes and deferred updates of the records that `compare` selected, without the
    /// bytes of snapshots. Two stores of the same records have equal digests if these bytes and updates are equal. The
    /// digest includes deferred updates only while a commit is in progress.
    fn digest(&self) -> u64 {
        self.inner.digest()
    }

    /// Stops all writes, also the writes of `close()`. The committed state stays as it is.
    fn end(&self) {
        self.inner.end();
    }

    /// Verifies the data that `Engine.replay` reads. `replay` does this itself; call `check_log` if all ranks must know
    /// the result before any rank writes.
    fn check_log(&self, py: Python<'_>) -> PyResult<()> {
        interruptible(py, |keep_going| self.inner.check_log(keep_going))
    }

    /// Reads and verifies all live extents, and the gradients of a log that was not replayed. Returns the number of
    /// these extents and chunks of gradients, and their bytes. Calls `progress(done, all)` with numbers of bytes.
    #[pyo3(signature = (progress=None))]
    fn verify(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<(u64, u64)> {
        let verified = watched(py, progress, |progress| self.inner.verify(progress))?;
        Ok((verified.extents, verified.bytes))
    }

    /// Returns a text for each damaged copy of a label or of the description. The first commit after an open repairs
    /// these copies.
    fn damaged(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.inner.damaged()).or_raise(py)
    }

    /// Passes all parts of these records, with the bytes of the last commit, to `visit(record, [(tensor, first byte,
    /// memory), ...])`. Each call gets one or more parts of one record. `visit` may use the memory only during the
    /// call.
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

    /// Returns the first file that was truncated or lost its path, and what happened to the file: "deleted", "moved",
    /// "replaced" or "truncated". Returns None if all files are intact.
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

    /// Makes `close()` remove the files that were created for the store, and empty the files that were empty before.
    /// `close()` does this while the files are still locked, so that no other process can open them.
    fn forsake(&self) {
        self.inner.volume().forsake();
    }

    /// Call this before you remove the store's file. A new store then does not give the file its final name, and
    /// `lost_file` does not report the file.
    fn become_temporary(&self) {
        self.inner.volume().forgo_names();
    }

    /// Keeps committed state, drops staged state, and closes the devices. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // Close the devices even if the close of the store failed.
        let result = waiting(py, None, |wait| self.inner.close(wait));
        let closed = waiting(py, None, |wait| self.inner.volume().close(wait));
        result.and(closed)
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

    /// Returns the numbers of the records with these names.
    fn indices(&self, names: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
        names.try_iter()?.map(|name| self.index(name?.cast::<PyString>()?)).collect()
    }

    /// Returns the number of the unit with this name.
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
