//! Waits without the GIL, up to a timeout, and lets Ctrl-C through.

use memascend_mem::Wait;
use pyo3::prelude::*;

use crate::arguments::Seconds;

/// Calls `work` with the GIL released, and with a function that it is to ask now and then whether to go on. `Err` is what
/// a signal handler raised meanwhile.
#[expect(clippy::redundant_closure_for_method_calls, reason = "the method's lifetime is not general enough")]
pub(crate) fn interruptible<T: Send, E: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, E> + Send,
) -> PyResult<Result<T, E>> {
    let mut signal = None;
    let ended = py.detach(|| {
        work(&mut || match Python::attach(|py| py.check_signals()) {
            Ok(()) => true,
            Err(raised) => {
                signal = Some(raised);
                false
            }
        })
    });
    match (ended, signal) {
        (Err(_), Some(raised)) => Err(raised),
        (ended, _) => Ok(ended),
    }
}

/// As [`interruptible`], for work that waits.
pub(crate) fn waiting<T: Send, E: Send>(
    py: Python<'_>,
    seconds: Option<Seconds>,
    work: impl FnOnce(Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<Result<T, E>> {
    let timeout = seconds.and_then(Seconds::limit);
    interruptible(py, |keep_waiting| work(Wait { timeout, keep_waiting: Some(keep_waiting) }))
}
