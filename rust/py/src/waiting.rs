//! Waiting for the Rust crates: without the GIL, up to a timeout, and Ctrl-C gets through.

use memascend_mem::Wait;
use pyo3::prelude::*;

use crate::arguments::timeout;

/// Calls `work` with the GIL released. `Err` is what a signal handler raised meanwhile, or a wrong timeout.
#[expect(clippy::redundant_closure_for_method_calls, reason = "the method's lifetime is not general enough")]
pub(crate) fn waiting<T: Send, E: Send>(
    py: Python<'_>,
    seconds: Option<f64>,
    work: impl FnOnce(Wait<'_>) -> Result<T, E> + Send,
) -> PyResult<Result<T, E>> {
    let timeout = timeout(py, seconds)?;
    let mut signal = None;
    let ended = py.detach(|| {
        let mut keep_waiting = || match Python::attach(|py| py.check_signals()) {
            Ok(()) => true,
            Err(raised) => {
                signal = Some(raised);
                false
            }
        };
        work(Wait { timeout, keep_waiting: Some(&mut keep_waiting) })
    });
    match (ended, signal) {
        (Err(_), Some(raised)) => Err(raised),
        (ended, _) => Ok(ended),
    }
}
