//! Works without the GIL: waits up to a timeout, calls Python code in between, and lets Ctrl-C through.

use memascend_mem::Wait;
use pyo3::prelude::*;

use crate::{
    arguments::Seconds,
    errors::{OrRaise as _, Raised},
};

/// Calls of Python code in the middle of work; what one of them raised ends that.
pub(crate) struct Calls(Option<PyErr>);

impl Calls {
    /// Runs a call with the GIL. Whether the work is to go on.
    pub(crate) fn call(&mut self, call: impl FnOnce(Python<'_>) -> PyResult<()>) -> bool {
        Python::attach(call).map_err(|raised| self.0 = Some(raised)).is_ok()
    }

    /// Whether nobody has asked for an end with Ctrl-C.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method's lifetime is not general enough")]
    pub(crate) fn keep_going(&mut self) -> bool {
        self.call(|py| py.check_signals())
    }
}

/// Does work without the GIL that ends with an error where a call says so. What that call raised is raised then.
pub(crate) fn calling<T: Send, E: Raised + Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut Calls) -> Result<T, E> + Send,
) -> PyResult<T> {
    let mut calls = Calls(None);
    let done = py.detach(|| work(&mut calls));
    match calls.0 {
        Some(raised) => Err(raised),
        None => done.or_raise(py),
    }
}

/// Does work without the GIL that asks now and then whether to go on: not after Ctrl-C.
pub(crate) fn interruptible<T: Send, E: Raised + Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, E> + Send,
) -> PyResult<T> {
    calling(py, |calls| work(&mut || calls.keep_going()))
}

/// As [`interruptible`], for work that waits.
pub(crate) fn waiting<T: Send, E: Raised + Send>(
    py: Python<'_>,
    seconds: Option<Seconds>,
    work: impl FnOnce(Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let timeout = seconds.and_then(Seconds::limit);
    interruptible(py, |keep_waiting| work(Wait { timeout, keep_waiting: Some(keep_waiting) }))
}

/// As [`interruptible`], for work that tells of bytes done and of all: to `progress(done, all)`, if there is one.
pub(crate) fn watched<T: Send, E: Raised + Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(u64, u64) -> bool) -> Result<T, E> + Send,
) -> PyResult<T> {
    let progress = progress.map(|progress| progress.clone().unbind());
    calling(py, |calls| {
        work(&mut |done, all| {
            calls.call(|py| {
                py.check_signals()?;
                progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (done, all)).map(drop))
            })
        })
    })
}
