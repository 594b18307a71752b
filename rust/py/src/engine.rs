//! Translates `rust/engine` for Python: the pipelined update.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use memascend_engine::{Application, By, First, Gradient, Hyperparameters, Late, Momentum, Options, Rule, WideState};
use memascend_store::{Buffer, Commit};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    agreement::{SharedRun, agreed, shared},
    described::dtype,
    errors::engine_error,
    examination::watched,
    function::Applied,
    kernels::{Summed, summed},
    nvme::Held,
    slow_drop::Detached,
    source::Lending,
    store::Store,
    waiting::waiting,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()
}

/// Address and bytes of a tensor, and what keeps them valid. Of a gradient, address 0 says that this is what lends it
/// and the bytes that are held meanwhile.
type Tensor = (usize, usize, Py<PyAny>);
/// lr, betas, eps, weight decay, decoupled, step, gradient scale, maximize, seed. Of momentum: lr, (momentum, dampening),
/// nothing, weight decay, nesterov, and so on.
pub(crate) type Numbers = (f64, (f64, f64), Option<f64>, f64, bool, u64, f64, bool, u64);

/// Updates of a store. See `memascend.engine.Engine`.
#[pyclass(frozen, module = "memascend._core")]
struct Engine {
    inner: Detached<memascend_engine::Engine>,
}

#[pymethods]
impl Engine {
    #[new]
    fn new(
        py: Python<'_>,
        store: &Store,
        chunks: usize,
        queue_bytes: usize,
        whole_bytes: usize,
        threads: NonZeroUsize,
    ) -> PyResult<Self> {
        let mut options = Options::default();
        options.chunks = chunks;
        options.queue_bytes_max = queue_bytes;
        options.whole_bytes = whole_bytes;
        options.threads = threads;
        let store = Arc::clone(&store.inner);
        let inner = py.detach(|| memascend_engine::Engine::new(store, &options));
        Ok(Self { inner: Detached::new(inner.map_err(|error| engine_error(py, &error))?) })
    }

    /// Ends the log that the store was found with; `progress(done, all)` may raise. Whether there was one.
    fn replay(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let mut replayed = None;
        watched(py, progress, |progress| {
            replayed = Some(self.inner.replay(progress));
            Ok(())
        })?;
        replayed.unwrap_or(Ok(false)).map_err(|error| engine_error(py, &error))
    }

    /// Begins an entry's first values; a state tensor that is None is zeros, or the values where it is their master. In
    /// float32, master and moments may be given that the entry's format has otherwise.
    fn fill(
        &self,
        py: Python<'_>,
        entry: usize,
        values: Tensor,
        state: Vec<Option<Tensor>>,
        wide: (Option<Tensor>, Option<Tensor>, Option<Tensor>),
        step: u64,
    ) -> PyResult<()> {
        let state = state.into_iter().map(|tensor| tensor.map(held)).collect();
        let (master, first, second) = wide;
        let wide = WideState { master: master.map(held), first: first.map(held), second: second.map(held) };
        let first = First { values: held(values), state, wide, step };
        waiting(py, None, |wait| self.inner.fill(entry, first, wait))?.map_err(|error| engine_error(py, &error))
    }

    /// Begins an update by a gradient; values that are given are not read.
    fn update(
        &self,
        py: Python<'_>,
        entry: usize,
        gradient: Tensor,
        of_gradient: &str,
        values: Option<Tensor>,
        numbers: Numbers,
    ) -> PyResult<()> {
        let (gradient, values) = (typed(py, gradient, of_gradient)?, values.map(held));
        waiting(py, None, |wait| self.inner.update(entry, By::Given(gradient), values, rule(numbers), wait))?
            .map_err(|error| engine_error(py, &error))
    }

    /// Begins an update by a gradient that is spilled with it.
    fn update_spilling(
        &self,
        py: Python<'_>,
        entry: usize,
        gradient: Tensor,
        of_gradient: &str,
        values: Option<Tensor>,
        numbers: Numbers,
    ) -> PyResult<()> {
        let (gradient, values) = (typed(py, gradient, of_gradient)?, values.map(held));
        waiting(py, None, |wait| self.inner.update_spilling(entry, gradient, values, rule(numbers), wait))?
            .map_err(|error| engine_error(py, &error))
    }

    /// Begins an update by the gradient that is spilled.
    fn update_spilled(
        &self,
        py: Python<'_>,
        entry: usize,
        factors: Vec<f64>,
        values: Option<Tensor>,
        numbers: Numbers,
    ) -> PyResult<()> {
        #[expect(clippy::cast_possible_truncation, reason = "as torch multiplies by a scalar")]
        let factors = factors.into_iter().map(|factor| factor as f32).collect();
        let (values, numbers) = (values.map(held), rule(numbers));
        waiting(py, None, |wait| self.inner.update(entry, By::Spilled(factors), values, numbers, wait))?
            .map_err(|error| engine_error(py, &error))
    }

    /// Begins to spill a gradient, or to add it to the spilled one.
    fn spill(&self, py: Python<'_>, entry: usize, gradient: Tensor, of_gradient: &str, add: bool) -> PyResult<()> {
        let gradient = typed(py, gradient, of_gradient)?;
        waiting(py, None, |wait| self.inner.spill(entry, gradient, add, wait))?
            .map_err(|error| engine_error(py, &error))
    }

    /// Whether a non-finite is in what is spilled, and the sum of its squares. See `memascend.tensors`.
    fn spilled(&self, py: Python<'_>, entry: usize) -> PyResult<(bool, Summed)> {
        let spilled = waiting(py, None, |wait| self.inner.spilled(entry, wait))?;
        let spilled = spilled.map_err(|error| engine_error(py, &error))?;
        Ok((spilled.nonfinite, summed(&spilled.squares)))
    }

    fn read_spilled(&self, py: Python<'_>, entry: usize, into: Tensor) -> PyResult<()> {
        let into = held(into);
        waiting(py, None, |wait| self.inner.read_spilled(entry, into, wait))?.map_err(|error| engine_error(py, &error))
    }

    fn drop_spilled(&self, py: Python<'_>, entry: usize) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.drop_spilled(entry, wait))?.map_err(|error| engine_error(py, &error))
    }

    /// Begins to apply a function; `nbytes` are what it holds.
    #[expect(clippy::too_many_arguments, reason = "a function and how it is called")]
    fn apply(
        &self,
        py: Python<'_>,
        entry: usize,
        adapter: Py<PyAny>,
        nbytes: usize,
        step: u64,
        spilled: bool,
        values: Option<Tensor>,
        how: (bool, bool, bool, bool),
    ) -> PyResult<()> {
        let (whole, wide, late, rehearsed) = how;
        let late = match (late, rehearsed) {
            (false, _) => Late::Never,
            (true, true) => Late::Rehearsed,
            (true, false) => Late::Always,
        };
        let (function, values) = (Box::new(Applied { adapter }), values.map(held));
        let application = Application { function, nbytes, step, spilled, whole, wide, late };
        waiting(py, None, |wait| self.inner.apply(entry, application, values, wait))?
            .map_err(|error| engine_error(py, &error))
    }

    /// Reads what storage has for at most so many bytes and seconds: how many bytes that were, and the seconds.
    fn probe(&self, py: Python<'_>, nbytes: u64, seconds: f64) -> PyResult<(u64, f64)> {
        let most = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let (read, took) = py.detach(|| self.inner.probe(nbytes, most)).map_err(|error| engine_error(py, &error))?;
        Ok((read, took.as_secs_f64()))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.finish(wait))?.map_err(|error| engine_error(py, &error))
    }

    /// As `finish`, but for updates of held entries, which begin with that or with the commit.
    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.settle(wait))?.map_err(|error| engine_error(py, &error))
    }

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
                .map_err(|error| engine_error(py, &error)))
        })
    }

    /// Forgets what was staged of one entry, once it has ended.
    fn take_back(&self, py: Python<'_>, entry: usize) -> PyResult<()> {
        waiting(py, None, |wait| self.inner.take_back(entry, wait))?.map_err(|error| engine_error(py, &error))
    }

    /// Forgets the step, or what was staged of one entry.
    fn discard(&self, py: Python<'_>, entry: Option<usize>) -> PyResult<()> {
        waiting(py, None, |wait| match entry {
            None => self.inner.discard(wait),
            Some(entry) => self.inner.discard_entry(entry, wait),
        })?
        .map_err(|error| engine_error(py, &error))
    }

    #[getter]
    fn staging_bytes(&self) -> usize {
        self.inner.staging_bytes()
    }

    #[getter]
    fn queued_bytes(&self) -> usize {
        self.inner.queued_bytes()
    }

    #[getter]
    fn waiting_bytes(&self) -> usize {
        self.inner.waiting_bytes()
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.inner.counters();
        let dict = PyDict::new(py);
        dict.set_item("updates", counters.updates)?;
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

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

fn held((address, nbytes, keep): Tensor) -> Box<dyn Buffer> {
    Box::new(Held::new(address, nbytes, keep))
}

fn typed(py: Python<'_>, gradient: Tensor, name: &str) -> PyResult<Gradient> {
    let dtype = dtype(py, name)?;
    let made = match gradient {
        (0, nbytes, lender) if nbytes > 0 => Gradient::lent(Box::new(Lending { function: lender }), nbytes, dtype),
        gradient => Gradient::new(held(gradient), dtype),
    };
    made.map_err(|error| engine_error(py, &error))
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
