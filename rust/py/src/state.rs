//! Python bindings that decode and update state in the formats of a store. Tensors arrive as addresses: see [Note:
//! trusted addresses].
//!
//! The format and `numel` determine the number of elements at each address.

use std::num::NonZeroUsize;

use memascend_engine::{Form, WideState};
use memascend_math::{self as math, Position, Random, Reduced};
use memascend_store::key_of;
use pyo3::prelude::*;

use crate::{
    described::{dtype, format},
    engine::{Numbers, rule},
    errors::OrPyErr as _,
    kernels::{TypedAddress, elements_mut, exec, floats},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(state_decode, module)?)?;
    module.add_function(wrap_pyfunction!(state_update, module)?)
}

/// Decodes state in the format `of_state` into fp32 tensors. `wide` has the tensors for master weights, first and
/// second moment. A tensor that is None is skipped.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a format, its tensors and the fp32 tensors")]
fn state_decode(
    py: Python<'_>,
    of_state: &str,
    of_values: &str,
    momentum: bool,
    values: usize,
    state: Vec<usize>,
    wide: [Option<usize>; 3],
    numel: usize,
    threads: NonZeroUsize,
) -> PyResult<()> {
    let exec = exec(py, threads)?;
    // SAFETY: Python checked the addresses ([Note: trusted addresses]).
    let reduced = unsafe { reduced(py, (of_state, of_values, momentum), values, state, numel)? };
    // SAFETY: Python checked the addresses ([Note: trusted addresses]).
    let [master, first, second] = wide.map(|place| place.map(|place| unsafe { elements_mut::<f32>(place, numel) }));
    py.detach(|| math::decode(reduced, WideState { master, first, second }, exec)).or_raise(py)
}

/// Updates `numel` elements of the parameter `name` by one step, beginning at the element `first`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a format, its tensors, a gradient and an optimizer's numbers")]
fn state_update(
    py: Python<'_>,
    of_state: &str,
    of_values: &str,
    momentum: bool,
    values: usize,
    state: Vec<usize>,
    grad: TypedAddress,
    numbers: Numbers,
    name: &str,
    first: u64,
    numel: usize,
    threads: NonZeroUsize,
) -> PyResult<()> {
    let exec = exec(py, threads)?;
    let rule = rule(numbers);
    let place = Position { random: Random { key: key_of(name, rule.seed()), step: rule.step() }, first };
    // SAFETY: Python checked the addresses ([Note: trusted addresses]).
    let reduced = unsafe { reduced(py, (of_state, of_values, momentum), values, state, numel)? };
    // SAFETY: Python checked the address ([Note: trusted addresses]).
    let grad = unsafe { floats(grad, numel) };
    py.detach(|| math::update(reduced, grad, &rule, place, exec)).or_raise(py)
}

/// # Safety
/// `values` and the addresses in `state` must be valid, as [Note: trusted addresses] requires.
unsafe fn reduced<'a>(
    py: Python<'_>,
    (of_state, of_values, has_momentum): (&str, &str, bool),
    values: usize,
    state: Vec<usize>,
    numel: usize,
) -> PyResult<Reduced<'a>> {
    let form = Form { format: format(py, of_state)?, dtype: dtype(py, of_values)?, has_momentum };
    // SAFETY: the caller guarantees valid addresses ([Note: trusted addresses]).
    unsafe { form.at(numel, values, state.into_iter()) }.or_raise(py)
}
