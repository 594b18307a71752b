//! Runs Rust code without the GIL. The code can call Python functions, wait with a timeout, and end on Ctrl-C.

use memascend_mem::Wait;
use pyo3::prelude::*;

use crate::{
    arguments::Seconds,
    errors::{IntoPyErr, OrPyErr as _},
};

/// Calls Python code for work that runs without the GIL, and keeps the exception that a call raised.
pub(crate) struct Calls(Option<PyErr>);

impl Calls {
    /// Runs `call` with the GIL. Returns false if `call` raised an exception: the work must then end.
    pub(crate) fn call(&mut self, call: impl FnOnce(Python<'_>) -> PyResult<()>) -> bool {
        Python::attach(call).map_err(|raised| self.0 = Some(raised)).is_ok()
    }

    /// Runs Python's handlers of pending signals. Returns false if a handler raised an exception, as the default
    /// handler of Ctrl-C does.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method's lifetime is not general enough")]
    pub(crate) fn keep_going(&mut self) -> bool {
        self.call(|py| py.check_signals())
    }
}

/// Runs `work` without the GIL. If a Python call of `work` raised an exception, raises this exception. Otherwise raises
/// the error of `work`, if it returns one.
pub(crate) fn calling<T: Send, E: IntoPyErr + Send>(
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

/// Runs `work` without the GIL, and ends `work` on Ctrl-C. `work` must call its argument from time to time, and must
/// end if this call returns false.
pub(crate) fn interruptible<T: Send, E: IntoPyErr + Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, E> + Send,
) -> PyResult<T> {
    calling(py, |calls| work(&mut || calls.keep_going()))
}

/// Runs `work` as [`interruptible`] does, and limits the waits of `work` to `seconds`, if `seconds` is given.
pub(crate) fn waiting<T: Send, E: IntoPyErr + Send>(
    py: Python<'_>,
    seconds: Option<Seconds>,
    work: impl FnOnce(Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let timeout = seconds.and_then(Seconds::limit);
    interruptible(py, |keep_waiting| work(Wait { timeout, keep_waiting: Some(keep_waiting) }))
}

/// Runs `work` as [`interruptible`] does, and reports its progress: whenever `work` reports numbers of bytes, calls
/// `progress(done, all)` with these numbers, if `progress` is given.
pub(crate) fn watched<T: Send, E: IntoPyErr + Send>(
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
