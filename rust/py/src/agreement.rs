//! Lets Python stop a commit of several ranks. The commit calls Python's `agree` before the step becomes live. If the
//! commit writes a root, it calls `agree` after the flush of all data and before the write of the root. If `agree`
//! raises an exception, the commit fails and the last commit stays valid.

use std::cell::RefCell;

use memascend_mem::Wait;
use memascend_store::Run;
use pyo3::prelude::*;

use crate::{errors::IntoPyErr, waiting::calling};

/// A commit of a run with several ranks: the run's id, the number and the identity of the commit, this rank, and the
/// number of ranks.
pub(crate) type SharedRun = ([u8; 16], u64, [u8; 16], u32, u32);

pub(crate) fn shared(run: Option<SharedRun>) -> Run {
    run.map_or_else(Run::default, |(id, commit, identity, rank, ranks)| Run { id, commit, identity, rank, ranks })
}

/// Converts a store's run to [`SharedRun`].
pub(crate) fn named_run(run: Run) -> SharedRun {
    (run.id, run.commit, run.identity, run.rank, run.ranks)
}

/// Runs a commit that calls `agree`. If `agree` raises an exception, the commit fails, and `agreed` raises this
/// exception.
pub(crate) fn agreed<E: IntoPyErr + Send>(
    py: Python<'_>,
    agree: Option<Py<PyAny>>,
    commit: impl FnOnce(Wait<'_>, &mut dyn FnMut() -> bool) -> Result<u64, E> + Send,
) -> PyResult<u64> {
    calling(py, move |calls| {
        let calls = RefCell::new(calls);
        let mut keep_waiting = || calls.borrow_mut().keep_going();
        let ask = |agree: &Py<PyAny>| calls.borrow_mut().call(|py| agree.call0(py).map(drop));
        let wait = Wait { timeout: None, keep_waiting: Some(&mut keep_waiting) };
        commit(wait, &mut || agree.as_ref().is_none_or(ask))
    })
}
