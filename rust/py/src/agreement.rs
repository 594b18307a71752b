//! Lets Python end a commit of several ranks: `agree` is called when all is flushed.

use memascend_store::Run;
use pyo3::prelude::*;

/// The id of a run of several ranks, and the number of a commit that they share.
pub(crate) type SharedRun = ([u8; 16], u64);

pub(crate) fn shared(run: Option<SharedRun>) -> Run {
    run.map_or_else(Run::default, |(id, commit)| Run { id, commit })
}

/// Work that asks `agree`, which ends it by raising: what it raised is raised then.
#[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
pub(crate) fn agreed<T>(
    py: Python<'_>,
    agree: Option<Py<PyAny>>,
    work: impl FnOnce(Python<'_>, &mut (dyn FnMut() -> bool + Send)) -> PyResult<PyResult<T>>,
) -> PyResult<T> {
    let mut raised = None;
    let done = work(py, &mut || {
        let Some(agree) = &agree else { return true };
        Python::attach(|py| agree.call0(py).map(drop)).map_err(|error| raised = Some(error)).is_ok()
    });
    match raised {
        Some(raised) => Err(raised),
        None => done?,
    }
}
