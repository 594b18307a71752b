//! Python bindings of `rust/math`.
//!
//! [Note: trusted addresses] Tensors arrive as addresses, which `memascend.kernels` or `memascend.engine` has checked.
//! No other module of the package calls a function that reads or writes memory at an address. Each address is valid for
//! the stated number of elements or bytes, aligned for their type, on the CPU, and alive during the call. Memory that a
//! function writes to overlaps no other argument.

use std::{num::NonZeroUsize, slice};

use memascend_math::{self as math, AdamState, Bf16, Exec, F16, Floats, FloatsMut, Hyperparameters, Scalars, Simd};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyFloat, PyInt},
};

use crate::errors::OrPyErr as _;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(kernel_simd, module)?)?;
    module.add_function(wrap_pyfunction!(kernel_scalars, module)?)?;
    module.add_function(wrap_pyfunction!(kernel_check, module)?)?;
    module.add_function(wrap_pyfunction!(kernel_adam, module)?)
}

/// An address, and the index of its type in `memascend.kernels.arguments.FLOATS`.
pub(crate) type TypedAddress = (usize, u8);

/// The fields of `Scalars`, in order.
type ScalarFields = (f32, f32, f32, f32, bool, f32, f32, f32, f32, f32);

/// Returns the instruction set that the kernels run on.
#[pyfunction]
fn kernel_simd(py: Python<'_>) -> PyResult<&'static str> {
    Simd::chosen().map(Simd::name).or_raise(py)
}

/// Returns the scalars of an Adam step, for `memascend.kernels.scalars.Scalars`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "an optimizer's hyperparameters")]
fn kernel_scalars(
    py: Python<'_>,
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    decoupled: bool,
    step: u64,
    grad_scale: f64,
    maximize: bool,
) -> PyResult<ScalarFields> {
    let group = Hyperparameters {
        lr,
        beta1: betas.0,
        beta2: betas.1,
        eps,
        weight_decay,
        decoupled,
        step,
        grad_scale,
        maximize,
        seed: 0,
    };
    let s = group.scalars().or_raise(py)?;
    Ok((
        s.grad_factor,
        s.decay,
        s.l2,
        s.first_weight,
        s.from_gradient,
        s.beta2,
        s.one_minus_beta2,
        s.bias2_root,
        s.eps,
        s.step_size,
    ))
}

/// Converts a sum of squares to an int that counts units of 2^-298. If the sum is infinite, NaN or a sum of float64
/// squares, converts it to a float. See `memascend.tensors.Squares`.
pub(crate) fn summed<'py>(py: Python<'py>, squares: &math::Squares) -> PyResult<Bound<'py, PyAny>> {
    match squares.units() {
        Some(units) => py.get_type::<PyInt>().call_method1("from_bytes", (PyBytes::new(py, &units), "little")),
        None => Ok(PyFloat::new(py, squares.value()).into_any()),
    }
}

/// Checks and unscales each of several gradients. Returns whether any gradient has an element that is not finite, and
/// the sum of the squares of all elements.
#[pyfunction]
fn kernel_check(
    py: Python<'_>,
    grads: Vec<(usize, u8, usize)>,
    inv_scale: f32,
    threads: NonZeroUsize,
) -> PyResult<(bool, Bound<'_, PyAny>)> {
    let exec = exec(py, threads)?;
    let checked = py.detach(|| {
        let mut found = math::Check::NOTHING;
        for (address, dtype, numel) in grads {
            // SAFETY: Python checked the address ([Note: trusted addresses]).
            let grad = unsafe { floats_mut((address, dtype), numel) };
            found.merge(&math::check_and_unscale(grad, inv_scale, exec)?);
        }
        Ok::<_, math::Error>(found)
    });
    let found = checked.or_raise(py)?;
    Ok((found.nonfinite, summed(py, &found.squares)?))
}

/// Updates a parameter by one step of `AdamW` or `Adam`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "an optimizer's state")]
fn kernel_adam(
    py: Python<'_>,
    master: usize,
    grad: TypedAddress,
    exp_avg: usize,
    exp_avg_sq: usize,
    out16: Option<TypedAddress>,
    numel: usize,
    scalars: ScalarFields,
    threads: NonZeroUsize,
) -> PyResult<()> {
    let exec = exec(py, threads)?;
    let scalars = Scalars {
        grad_factor: scalars.0,
        decay: scalars.1,
        l2: scalars.2,
        first_weight: scalars.3,
        from_gradient: scalars.4,
        beta2: scalars.5,
        one_minus_beta2: scalars.6,
        bias2_root: scalars.7,
        eps: scalars.8,
        step_size: scalars.9,
    };
    py.detach(|| {
        let state = AdamState {
            // SAFETY: Python checked the address ([Note: trusted addresses]).
            master: unsafe { elements_mut(master, numel) },
            // SAFETY: Python checked the address ([Note: trusted addresses]).
            exp_avg: unsafe { elements_mut(exp_avg, numel) },
            // SAFETY: Python checked the address ([Note: trusted addresses]).
            exp_avg_sq: unsafe { elements_mut(exp_avg_sq, numel) },
        };
        // SAFETY: Python checked the address ([Note: trusted addresses]).
        let grad = unsafe { floats(grad, numel) };
        // SAFETY: Python checked the address ([Note: trusted addresses]).
        let out = out16.map(|place| unsafe { floats_mut(place, numel) });
        math::adam(state, grad, out, &scalars, exec)
    })
    .or_raise(py)
}

pub(crate) fn exec(py: Python<'_>, threads: NonZeroUsize) -> PyResult<Exec> {
    Exec::new(threads).or_raise(py)
}

/// # Safety
/// `address` must be valid for `numel` elements, as [Note: trusted addresses] requires.
pub(crate) unsafe fn elements<'a, T>(address: usize, numel: usize) -> &'a [T] {
    // The address of an empty tensor may be null.
    if numel == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees a valid address ([Note: trusted addresses]).
    unsafe { slice::from_raw_parts(address as *const T, numel) }
}

/// # Safety
/// `address` must be valid for `numel` elements, as [Note: trusted addresses] requires.
pub(crate) unsafe fn elements_mut<'a, T>(address: usize, numel: usize) -> &'a mut [T] {
    if numel == 0 {
        return &mut [];
    }
    // SAFETY: the caller guarantees a valid address ([Note: trusted addresses]).
    unsafe { slice::from_raw_parts_mut(address as *mut T, numel) }
}

/// # Safety
/// `address` must be valid for `numel` elements, as [Note: trusted addresses] requires.
pub(crate) unsafe fn floats<'a>((address, dtype): TypedAddress, numel: usize) -> Floats<'a> {
    match dtype {
        // SAFETY: the caller guarantees a valid address ([Note: trusted addresses]).
        0 => Floats::F32(unsafe { elements(address, numel) }),
        // SAFETY: the caller guarantees a valid address. `Bf16` has the layout of a `u16`.
        1 => Floats::Bf16(unsafe { elements::<Bf16>(address, numel) }),
        // SAFETY: the caller guarantees a valid address. `F16` has the layout of a `u16`.
        _ => Floats::F16(unsafe { elements::<F16>(address, numel) }),
    }
}

/// # Safety
/// `address` must be valid for `numel` elements, as [Note: trusted addresses] requires.
unsafe fn floats_mut<'a>((address, dtype): TypedAddress, numel: usize) -> FloatsMut<'a> {
    match dtype {
        // SAFETY: the caller guarantees a valid address ([Note: trusted addresses]).
        0 => FloatsMut::F32(unsafe { elements_mut(address, numel) }),
        // SAFETY: the caller guarantees a valid address. `Bf16` has the layout of a `u16`.
        1 => FloatsMut::Bf16(unsafe { elements_mut::<Bf16>(address, numel) }),
        // SAFETY: the caller guarantees a valid address. `F16` has the layout of a `u16`.
        _ => FloatsMut::F16(unsafe { elements_mut::<F16>(address, numel) }),
    }
}
