//! Python bindings of `rust/engine`, which updates the state of a store in a pipeline.

use std::{num::NonZeroUsize, sync::Arc};

use memascend_engine::{
    Application, First, FunctionInput, GradientSource, Hyperparameters, Momentum, Options, Rule, WideState,
};
use memascend_store::{Buffer, Commit, Record};
use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyDict, PyString, PyTuple},
};

use crate::{
    agreement::{SharedRun, agreed, shared},
    errors::{OrPyErr as _, config_error},
    function::applied,
    kernels::summed,
    nvme::TensorMemory,
    parts::{Checkers, Fetch, UnitParts},
    slow_drop::Detached,
    store::Store,
    tensors::{self, bytes_into},
    waiting::{waiting, watched},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()
}

/// A tensor, as (address, number of bytes, an object that keeps the bytes valid).
type Tensor = (usize, usize, Py<PyAny>);
/// The numbers of an update by Adam: lr, betas, eps, weight decay, decoupled, step, gradient scale, maximize, seed. The
/// numbers of an update by SGD with momentum: lr, (momentum, dampening), None, weight decay, nesterov, step, gradient
/// scale, maximize, seed.
pub(crate) type Numbers = (f64, (f64, f64), Option<f64>, f64, bool, u64, f64, bool, u64);

/// The default largest number of bytes of callers' tensors, such as gradients, in queued and running jobs.
const QUEUE_BYTES: usize = 256 << 20;
/// The default number of staging chunks. With twelve chunks, a disk is about as fast as with pure I/O. With four
/// chunks, it is only 0.8 times as fast.
const CHUNKS: usize = 12;
const ONE: NonZeroUsize = NonZeroUsize::MIN;
/// The alignment of the memory that a unit is fetched into.
const PAGE_BYTES: usize = 4096;

/// Updates the state of a store in a pipeline. A thread of the engine reads, computes and writes the state in chunks,
/// while Python does other work.
#[pyclass(frozen, subclass, module = "memascend._core")]
struct Engine {
    inner: Detached<memascend_engine::Engine>,
    store: Py<Store>,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(
        signature = (store, *, chunks=CHUNKS, queue=QUEUE_BYTES, whole=0, whole_next=0, threads=ONE),
        text_signature = "(store, *, chunks=12, queue=268435456, whole=0, whole_next=0, threads=1)"
    )]
    fn new(
        py: Python<'_>,
        store: Py<Store>,
        chunks: usize,
        queue: usize,
        whole: usize,
        whole_next: usize,
        threads: NonZeroUsize,
    ) -> PyResult<Self> {
        let mut options = Options::default();
        options.chunks = chunks;
        options.queue_bytes_max = queue;
        options.whole_bytes = whole;
        options.whole_next_bytes = whole_next;
        options.threads = threads;
        let updated = Arc::clone(&store.get().inner);
        let inner = py.detach(|| memascend_engine::Engine::new(updated, &options));
        Ok(Self { inner: Detached::new(inner.or_raise(py)?), store })
    }

    /// The store that the engine updates.
    #[getter]
    fn store<'py>(&self, py: Python<'py>) -> &Bound<'py, Store> {
        self.store.bind(py)
    }

    /// Replays the gradient log with which the store was opened: applies the logged gradients, then writes and commits
    /// the updated records. Returns False if the store was opened without a log. Calls `progress(done, all)` with
    /// numbers of bytes of gradients.
    #[pyo3(signature = (progress=None))]
    fn replay(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        watched(py, progress, |progress| self.inner.replay(progress))
    }

    /// Queues a job that writes a record's first values and state. `wide` is (master, first moment, second moment). An
    /// entry may be a float32 tensor if the record's format stores this part in fewer bits; otherwise the entry is
    /// None. If a tensor in `state` is None, the job writes the contents from `wide`. If `wide` does not have them, the
    /// job writes the contents that `First::state` describes for `None`.
    fn fill_at(
        &self,
        py: Python<'_>,
        record: usize,
        values: Tensor,
        state: Vec<Option<Tensor>>,
        wide: (Option<Tensor>, Option<Tensor>, Option<Tensor>),
        step: u64,
    ) -> PyResult<()> {
        let state = state.into_iter().map(|tensor| tensor.map(held)).collect();
        let (master, first, second) = wide;
        let wide = WideState { master: master.map(held), first: first.map(held), second: second.map(held) };
        let first = First { values: held(values), state, wide, step };
        waiting(py, None, |wait| self.inner.fill(record, first, wait))
    }

    /// Queues the update of a parameter, and returns once the queue has room for the gradient. With `spills`, the
    /// update also spills the gradient. If the record is in RAM, the update waits for `finish` or the commit instead,
    /// and `spills` raises an error.
    #[pyo3(signature = (name, gradient, numbers, *, values=None, spills=false))]
    fn update(
        &self,
        name: &Bound<'_, PyString>,
        gradient: &Bound<'_, PyAny>,
        numbers: &Bound<'_, PyAny>,
        values: Option<&Bound<'_, PyAny>>,
        spills: bool,
    ) -> PyResult<()> {
        let (py, (record, described)) = (name.py(), self.record(name)?);
        let (gradient, values) = (tensors::gradient(described, gradient)?, tensors::live(described, values)?);
        let rule = rule_of(numbers)?;
        waiting(py, None, |wait| {
            if spills {
                return self.inner.update_spilling(record, gradient, values, rule, wait);
            }
            self.inner.update(record, GradientSource::Given(gradient), values, rule, wait)
        })
    }

    /// Queues an update like `update`, but with the spilled gradient. The update multiplies the gradient by each of
    /// `factors`, one after the other. The spilled gradient stays unchanged.
    #[pyo3(
        signature = (name, numbers, *, factors=vec![], values=None),
        text_signature = "(self, name, numbers, *, factors=(), values=None)"
    )]
    fn update_spilled(
        &self,
        name: &Bound<'_, PyString>,
        numbers: &Bound<'_, PyAny>,
        factors: Vec<f64>,
        values: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, (record, described)) = (name.py(), self.record(name)?);
        let (factors, values, rule) = (single(factors), tensors::live(described, values)?, rule_of(numbers)?);
        waiting(py, None, |wait| self.inner.update(record, GradientSource::Spilled(factors), values, rule, wait))
    }

    /// Queues a job that spills a gradient to storage. With `add`, the job adds the gradient to the spilled gradient of
    /// the record. The sum is equal bit for bit to the result of torch's `add_`. If the record is in RAM, keeps the
    /// gradient, or the sum, in memory instead.
    #[pyo3(signature = (name, gradient, *, add=false))]
    fn spill(&self, name: &Bound<'_, PyString>, gradient: &Bound<'_, PyAny>, add: bool) -> PyResult<()> {
        let (py, (record, described)) = (name.py(), self.record(name)?);
        let gradient = tensors::gradient(described, gradient)?;
        waiting(py, None, |wait| self.inner.spill(record, gradient, add, wait))
    }

    /// Waits for the record's queued jobs, unless the spilled gradient is in memory. Returns whether the spilled
    /// gradient has an element that is not finite, and the sum of the squares of all elements (see `summed`).
    fn spilled<'py>(&self, name: &Bound<'py, PyString>) -> PyResult<(bool, Bound<'py, PyAny>)> {
        let (py, (record, _)) = (name.py(), self.record(name)?);
        let spilled = waiting(py, None, |wait| self.inner.spilled(record, wait))?;
        Ok((spilled.nonfinite, summed(py, &spilled.squares)?))
    }

    /// Reads the spilled gradient into a tensor of the same shape and dtype. If the gradient is not in memory, first
    /// waits for the record's queued jobs.
    fn read_spilled(&self, name: &Bound<'_, PyString>, into: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, (record, described)) = (name.py(), self.record(name)?);
        let into = Box::new(tensors::into_spilled(described, into)?);
        waiting(py, None, |wait| self.inner.read_spilled(record, into, wait))
    }

    /// Forgets the record's spilled gradient, if it has one. If jobs of the record are queued, a job that is queued
    /// after them forgets a gradient on storage.
    fn drop_spilled(&self, name: &Bound<'_, PyString>) -> PyResult<()> {
        let (py, (record, _)) = (name.py(), self.record(name)?);
        waiting(py, None, |wait| self.inner.drop_spilled(record, wait))
    }

    /// Queues an update of a record by a Python function. If `gradient` is None, the function gets the spilled
    /// gradient. Otherwise the function already has the gradient, and the engine only counts the bytes of `gradient`.
    /// `how` is (whole, wide, `after_commit`): see `FunctionInput` and `Application::after_commit`.
    fn apply_at(
        &self,
        name: &Bound<'_, PyString>,
        adapter: Py<PyAny>,
        gradient: Option<&Bound<'_, PyAny>>,
        step: u64,
        values: Option<&Bound<'_, PyAny>>,
        how: (bool, bool, bool),
    ) -> PyResult<()> {
        let (py, (record, described)) = (name.py(), self.record(name)?);
        let nbytes = gradient.map_or(Ok(0), |gradient| tensors::kept(described, gradient))?;
        let spilled = gradient.is_none();
        let (whole, wide, after_commit) = how;
        let input = match (whole, wide) {
            (false, _) => FunctionInput::InChunks,
            (true, false) => FunctionInput::Whole,
            (true, true) => FunctionInput::Wide,
        };
        let (function, values) = (applied(adapter), tensors::live(described, values)?);
        let application = Application { function, nbytes, step, spilled, input, after_commit };
        waiting(py, None, |wait| self.inner.apply(record, application, values, wait))
    }

    /// Defers an update to the next step. The update will multiply the spilled gradient by each of `factors`. The
    /// commit of the current step names the gradient.
    ///
    /// Returns False if the update cannot be deferred, for example because the record is in RAM or has no second place
    /// (`Store.keep_places`).
    #[pyo3(signature = (name, numbers, *, factors=vec![]), text_signature = "(self, name, numbers, *, factors=())")]
    fn defer(&self, name: &Bound<'_, PyString>, numbers: &Bound<'_, PyAny>, factors: Vec<f64>) -> PyResult<bool> {
        let (py, (record, _)) = (name.py(), self.record(name)?);
        let (factors, rule) = (single(factors), rule_of(numbers)?);
        waiting(py, None, |wait| self.inner.defer(record, rule, &factors, wait))
    }

    /// If the last commit deferred an update of the record, queues a job that makes this update, unless another job has
    /// made or makes it.
    fn settle_later(&self, name: &Bound<'_, PyString>) -> PyResult<()> {
        let (py, (record, _)) = (name.py(), self.record(name)?);
        waiting(py, None, |mut wait| self.inner.settle_later(record, &mut wait))
    }

    /// True if the last commit deferred updates to this step. `catch_up()` must run before a record with a deferred
    /// update is staged.
    #[getter]
    fn is_behind(&self) -> bool {
        self.inner.is_behind()
    }

    /// Makes the updates that the last commit deferred to this step, and commits them as a part of the last step.
    /// Returns False if the last commit deferred no update. Fails if the next step is already staged.
    fn catch_up(&self, py: Python<'_>) -> PyResult<bool> {
        waiting(py, None, |wait| self.inner.catch_up(wait))
    }

    /// Begins to fetch the values that a unit has in the last commit. The fetch goes before all waiting work that is
    /// not urgent, and computes the unit's deferred updates. With `settle`, the fetch also writes the updated records.
    #[pyo3(signature = (unit, into, *, settle=false))]
    fn fetch(&self, unit: &Bound<'_, PyString>, into: &Bound<'_, PyAny>, settle: bool) -> PyResult<Fetch> {
        let (py, unit) = (unit.py(), self.store.get().unit(unit)?);
        let memory = bytes_into(into, || "pass a contiguous uint8 tensor on the CPU to fetch a unit into".into())?;
        if !memory.as_ptr().addr().is_multiple_of(PAGE_BYTES) {
            let message = format!(
                "the tensor to fetch a unit into must begin at an address that is a multiple of {PAGE_BYTES}; pass a \
                 page-aligned tensor"
            );
            return Err(config_error(py, message));
        }
        let inner = py.detach(|| self.inner.fetch(unit, memory, settle)).or_raise(py)?;
        Ok(inner.into())
    }

    /// Prepares a fetch like `fetch`, but in parts of at most `bytes_max` bytes. This call reads nothing:
    /// `UnitParts.begin` reads a part.
    #[pyo3(signature = (unit, bytes_max, checkers=None, *, settle=false))]
    fn parts(
        &self,
        unit: &Bound<'_, PyString>,
        bytes_max: u64,
        checkers: Option<Py<Checkers>>,
        settle: bool,
    ) -> PyResult<UnitParts> {
        let (py, unit) = (unit.py(), self.store.get().unit(unit)?);
        let parts = py.detach(|| self.inner.parts(unit, bytes_max, settle)).or_raise(py)?;
        Ok(UnitParts::new(parts, checkers))
    }

    /// For records in RAM, starts those updates that the pipeline stages before a commit. Then waits as `drain` does.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.finish(wait))
    }

    /// Waits until every queued job has ended. Unlike `finish`, does not start the updates of records in RAM.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.drain(wait))
    }

    /// Waits for the step's queued updates, commits the step with `user` and `hyperparameters` as JSON, and then applies
    /// the remaining updates in memory. Calls `agree` before the step becomes live. If the commit writes a
    /// root, it calls `agree` after the flush of all data. If `agree` raises an exception, the commit fails with this
    /// exception, and the last commit stays valid.
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

    /// Waits for a record's jobs, then forgets the record's staged update. Unlike `discard`, keeps a gradient that
    /// these jobs spilled.
    fn take_back(&self, name: &Bound<'_, PyString>) -> PyResult<()> {
        let (py, (record, _)) = (name.py(), self.record(name)?);
        waiting(py, None, |wait| self.inner.take_back(record, wait))
    }

    /// Drops queued jobs, except urgent jobs such as those of fetches, waits for all other jobs, and forgets the staged
    /// step. With `name`, does this only for the record `name`.
    #[pyo3(signature = (name=None))]
    fn discard(&self, py: Python<'_>, name: Option<&Bound<'_, PyString>>) -> PyResult<()> {
        let record = name.map(|name| self.record(name)).transpose()?.map(|(record, _)| record);
        waiting(py, None, |wait| match record {
            None => self.inner.discard(wait),
            Some(record) => self.inner.discard_record(record, wait),
        })
    }

    /// Bytes of host memory that the engine allocated for staging chunks, for state that is not cut into chunks, and
    /// for whole records.
    #[getter]
    fn staging_bytes(&self) -> usize {
        self.inner.staging_bytes()
    }

    /// Bytes of callers' tensors, such as gradients, in queued and running jobs. `counters()` has the same number as
    /// "queued".
    #[getter]
    fn queued_bytes(&self) -> usize {
        self.inner.queued_bytes()
    }

    /// Returns a dict: counts of jobs and chunks, bytes by kind, the bytes of "queued" and "waiting" tensors and their
    /// peaks, and "seconds", the time that was spent on each activity.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.inner.counters();
        let dict = PyDict::new(py);
        dict.set_item("updates", counters.updates)?;
        dict.set_item("computed", counters.computed)?;
        dict.set_item("applied", counters.applied)?;
        dict.set_item("fills", counters.fills)?;
        dict.set_item("spills", counters.spills)?;
        dict.set_item("chunks", counters.chunks)?;
        dict.set_item("state_read", counters.state_read)?;
        dict.set_item("values_read", counters.values_read)?;
        dict.set_item("state_written", counters.state_written)?;
        dict.set_item("values_written", counters.values_written)?;
        dict.set_item("spill_read", counters.spill_read)?;
        dict.set_item("spill_written", counters.spill_written)?;
        dict.set_item("log_written", counters.log_written)?;
        dict.set_item("unlogged", counters.unlogged)?;
        dict.set_item("queued", counters.queued)?;
        dict.set_item("queued_peak", counters.queued_peak)?;
        dict.set_item("waiting", counters.waiting)?;
        dict.set_item("waiting_peak", counters.waiting_peak)?;
        let seconds = PyDict::new(py);
        seconds.set_item("idle", counters.idle.as_secs_f64())?;
        seconds.set_item("applying", counters.applying.as_secs_f64())?;
        seconds.set_item("reading", counters.reading.as_secs_f64())?;
        seconds.set_item("computing", counters.computing.as_secs_f64())?;
        seconds.set_item("sealing", counters.sealing.as_secs_f64())?;
        seconds.set_item("writing", counters.writing.as_secs_f64())?;
        dict.set_item("seconds", seconds)?;
        Ok(dict)
    }

    /// Waits for running jobs, unless a function that the engine runs makes this call, and ends the engine's thread.
    /// Updates that are not committed are lost. A second call does nothing. A call in a forked child does nothing, too.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.store)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(slf: &Bound<'_, Self>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        slf.call_method0("close").map(drop)
    }
}

impl Engine {
    /// Returns the number of a record, and its description.
    fn record(&self, name: &Bound<'_, PyString>) -> PyResult<(usize, &Record)> {
        let store = self.store.get();
        let index = store.index(name)?;
        Ok((index, &store.inner.description().records[index]))
    }
}

/// Rounds factors to float32, as torch does when it multiplies a tensor by a scalar.
#[expect(clippy::cast_possible_truncation, reason = "torch does the same")]
fn single(factors: Vec<f64>) -> Vec<f32> {
    factors.into_iter().map(|factor| factor as f32).collect()
}

fn held((address, nbytes, keep): Tensor) -> Box<dyn Buffer> {
    Box::new(TensorMemory::new(address, nbytes, keep))
}

pub(crate) fn rule(numbers: Numbers) -> Rule {
    let (lr, (beta1, beta2), eps, weight_decay, other, step, grad_scale, maximize, seed) = numbers;
    let Some(eps) = eps else {
        let (momentum, dampening, nesterov) = (beta1, beta2, other);
        return Momentum { lr, momentum, dampening, weight_decay, nesterov, step, grad_scale, maximize, seed }.into();
    };
    let decoupled = other;
    Hyperparameters { lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale, maximize, seed }.into()
}

/// Returns the rule with the numbers of a `memascend.engine.Adam` or `Momentum`.
fn rule_of(numbers: &Bound<'_, PyAny>) -> PyResult<Rule> {
    let number = |name: &str| numbers.getattr(name)?.extract::<f64>();
    let flag = |name: &str| numbers.getattr(name)?.extract::<bool>();
    let (step, seed) = (numbers.getattr("step")?.extract()?, numbers.getattr("seed")?.extract()?);
    let (lr, weight_decay, grad_scale) = (number("lr")?, number("weight_decay")?, number("grad_scale")?);
    let maximize = flag("maximize")?;
    let Some(decays) = numbers.getattr_opt("betas")? else {
        let (momentum, dampening, nesterov) = (number("momentum")?, number("dampening")?, flag("nesterov")?);
        return Ok(
            Momentum { lr, momentum, dampening, weight_decay, nesterov, step, grad_scale, maximize, seed }.into()
        );
    };
    let ((beta1, beta2), eps, decoupled) = (decays.extract()?, number("eps")?, flag("decoupled")?);
    Ok(Hyperparameters { lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale, maximize, seed }.into())
}
