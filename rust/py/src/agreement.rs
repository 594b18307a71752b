//! Lets Python end a commit of several ranks: `agree` is called when all is flushed.

use memascend_store::Run;
use pyo3::prelude::*;

/// The id of a run of several ranks, the number and the identity of a commit that they share; whose it is, of how many.
pub(crate) type SharedRun = ([u8; 16], u64, [u8; 16], u32, u32);

pub(crate) fn shared(run: Option<SharedRun>) -> Run {
    run.map_or_else(Run::default, |(id, commit, identity, rank, ranks)| Run { id, commit, identity, rank, ranks })
}

/// The other way.
pub(crate) fn named_run(run: Run) -> SharedRun {
    (run.id, run.commit, run.identity, run.rank, run.ranks)
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
