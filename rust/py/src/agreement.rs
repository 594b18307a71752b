//! Lets Python end a commit of several ranks: `agree` is called when all is flushed.

use std::cell::RefCell;

use memascend_mem::Wait;
use memascend_store::Run;
use pyo3::prelude::*;

use crate::{errors::Raised, waiting::calling};

/// The id of a run of several ranks, the number and the identity of a commit that they share; whose it is, of how many.
pub(crate) type SharedRun = ([u8; 16], u64, [u8; 16], u32, u32);

pub(crate) fn shared(run: Option<SharedRun>) -> Run {
    run.map_or_else(Run::default, |(id, commit, identity, rank, ranks)| Run { id, commit, identity, rank, ranks })
}

/// The other way.
pub(crate) fn named_run(run: Run) -> SharedRun {
    (run.id, run.commit, run.identity, run.rank, run.ranks)
}

/// A commit that asks `agree`, which ends it by raising: what it raised is raised then.
pub(crate) fn agreed<E: Raised + Send>(
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
