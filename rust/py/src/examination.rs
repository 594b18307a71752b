//! Python bindings that verify the commits of a store, and list them.

use std::path::PathBuf;

use memascend_store::{Create, Examined};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    agreement::{SharedRun, named_run},
    errors::OrPyErr as _,
    waiting::watched,
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(store_examine, module)?)?;
    module.add_function(wrap_pyfunction!(store_commits, module)?)
}

/// Reads and verifies each commit that an undamaged root of a store names. Calls `progress(done, all)` with numbers of
/// bytes. If `progress` raises an exception, the examination stops and raises this exception. Returns a dict for each
/// commit, and for each damaged root: "generation" (None for a damaged root), "step", "extents", "bytes", "damages"
/// (texts of the first errors) and "others" (the number of errors that "damages" does not contain).
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
fn store_examine<'py>(
    py: Python<'py>,
    paths: Vec<PathBuf>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let found =
        watched(py, progress, |progress| memascend_store::Store::examine(&paths, &Create::default(), progress))?;
    let described = |commit: Examined| {
        let dict = PyDict::new(py);
        dict.set_item("generation", commit.generation)?;
        dict.set_item("step", commit.step)?;
        dict.set_item("extents", commit.whole.extents)?;
        dict.set_item("bytes", commit.whole.bytes)?;
        dict.set_item("damages", commit.damages.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        dict.set_item("others", commit.others)?;
        Ok(dict)
    };
    found.into_iter().map(described).collect()
}

/// Returns (commits, damage). `commits` lists the commits that undamaged roots name, the newest first. The list is
/// empty if the store's first write did not finish, or if its file is empty. `damage` describes the damage of a root,
/// or is None. Returns None if the paths have no store.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
fn store_commits(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Option<(Vec<CommitId>, Option<String>)>> {
    let found = py.detach(|| memascend_store::Store::commits(&paths, &Create::default())).or_raise(py)?;
    let named = |one: memascend_store::CommitId| (one.generation, named_run(one.run), one.kept);
    Ok(found.map(|(commits, damage)| (commits.into_iter().map(named).collect(), damage.map(|error| error.to_string()))))
}

/// A commit, as (generation, run, kept). `kept` is false if later commits may have overwritten the commit: the store
/// has durability "none", and was not closed after this commit.
type CommitId = (u64, SharedRun, bool);
