//! Checks tensors from Python against a record's description, and finds the memory of the tensors.

use memascend_engine::Gradient;
use memascend_store::{Buffer, Record};
use pyo3::{
    prelude::*,
    types::{PyString, PyTuple},
};

use crate::{
    arguments::shown,
    described::dtype,
    errors::{OrPyErr as _, config_error},
    nvme::TensorMemory,
    source::lending,
};

/// Returns the memory of a CPU tensor that the caller has checked. The result keeps the tensor's storage alive.
pub(crate) fn held(tensor: &Bound<'_, PyAny>) -> PyResult<TensorMemory> {
    let address = tensor.call_method0("data_ptr")?.extract()?;
    Ok(TensorMemory::new(address, nbytes_of(tensor)?, tensor.call_method0("untyped_storage")?.unbind()))
}

fn nbytes_of(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    tensor.getattr("nbytes")?.extract()
}

fn dtype_of(tensor: &Bound<'_, PyAny>) -> PyResult<String> {
    // `str()` of a dtype runs Python code, in which a Ctrl-C may be raised: return that exception.
    let name = tensor.getattr("dtype")?.str()?;
    Ok(name.to_cow()?.trim_start_matches("torch.").into())
}

fn shape_of(tensor: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    tensor.getattr("shape")?.extract()
}

fn refused<T>(py: Python<'_>, name: &str, what: &dyn Fn(&str) -> String) -> PyResult<T> {
    Err(config_error(py, what(&shown(&PyString::new(py, name)))))
}

/// Returns an error if a tensor is not contiguous when its dimensions are permuted to `order`. An empty `order` means
/// row-major.
fn require_order(tensor: &Bound<'_, PyAny>, name: &str, order: &[u8]) -> PyResult<()> {
    let py = tensor.py();
    if order.is_empty() {
        if tensor.call_method0("is_contiguous")?.is_truthy()? {
            return Ok(());
        }
        return refused(py, name, &|name| format!("the tensors of {name} must be contiguous; pass contiguous tensors"));
    }
    let dimensions: usize = tensor.call_method0("dim")?.extract()?;
    let whole = dimensions == order.len()
        && tensor.call_method1("permute", (PyTuple::new(py, order)?,))?.call_method0("is_contiguous")?.is_truthy()?;
    if whole {
        return Ok(());
    }
    refused(py, name, &|name| {
        format!("the tensors of {name} must be contiguous after .permute({order:?}): lay them out in this order")
    })
}

/// Returns an error if a tensor is not on the CPU, or if [`require_order`] rejects the tensor.
fn require_laid_out(tensor: &Bound<'_, PyAny>, name: &str, order: &[u8]) -> PyResult<()> {
    let device = tensor.getattr("device")?;
    if device.getattr("type")?.extract::<String>()? != "cpu" {
        return refused(tensor.py(), name, &|name| {
            format!("the tensors of {name} must be on the CPU, not on {device}; pass tensors on the CPU")
        });
    }
    require_order(tensor, name, order)
}

/// Returns the memory of the tensor `values`, or `None` if `values` is `None`. Returns an error if the tensor does not
/// fit the record.
pub(crate) fn live(record: &Record, values: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Box<dyn Buffer>>> {
    let Some(values) = values else { return Ok(None) };
    require_laid_out(values, &record.name, &record.order)?;
    let (of, shape) = (dtype_of(values)?, shape_of(values)?);
    if of != record.dtype.name() || shape != record.shape {
        let (wanted, of_shape) = (record.dtype.name(), &record.shape);
        return refused(values.py(), &record.name, &|name| {
            format!("the values of {name} are {of} of shape {shape:?}, but must be {wanted} of shape {of_shape:?}")
        });
    }
    Ok(Some(Box::new(held(values)?)))
}

/// Makes a gradient of a record from a tensor, or from a `memascend.storage.records.Lent`, which lends the gradient
/// window by window. Returns an error if the gradient does not fit the record.
pub(crate) fn gradient(record: &Record, given: &Bound<'_, PyAny>) -> PyResult<Gradient> {
    let py = given.py();
    let tensor = checked(record, given)?;
    let dtype = dtype(py, &dtype_of(&tensor)?)?;
    let nbytes = nbytes_of(&tensor)?;
    let made = if is_lent(given) && nbytes > 0 {
        Gradient::lent(lending(given.getattr("window")?.unbind()), nbytes, dtype)
    } else {
        Gradient::new(Box::new(held(&tensor)?), dtype)
    };
    made.or_raise(py)
}

/// Returns the size in bytes of a gradient that a Python function already has. Returns an error if the gradient does
/// not fit the record.
pub(crate) fn kept(record: &Record, given: &Bound<'_, PyAny>) -> PyResult<usize> {
    nbytes_of(&checked(record, given)?)
}

/// Returns the tensor of a gradient. Returns an error if the tensor does not fit the record.
fn checked<'py>(record: &Record, given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let tensor = if is_lent(given) { given.getattr("tensor")? } else { given.clone() };
    if is_lent(given) {
        require_order(&tensor, &record.name, &record.order)?;
    } else {
        require_laid_out(&tensor, &record.name, &record.order)?;
    }
    require_shape(record, &tensor)?;
    Ok(tensor)
}

fn is_lent(gradient: &Bound<'_, PyAny>) -> bool {
    gradient.is_instance_of::<PyTuple>()
}

fn require_shape(record: &Record, gradient: &Bound<'_, PyAny>) -> PyResult<()> {
    let (shape, wanted) = (shape_of(gradient)?, &record.shape);
    if shape == *wanted {
        return Ok(());
    }
    refused(gradient.py(), &record.name, &|name| format!("the gradient of {name} has shape {shape:?}, not {wanted:?}"))
}

/// Returns the memory of a tensor into which a spilled gradient of a record is read. Returns an error if the tensor
/// does not fit the record.
pub(crate) fn into_spilled(record: &Record, into: &Bound<'_, PyAny>) -> PyResult<TensorMemory> {
    require_laid_out(into, &record.name, &record.order)?;
    require_shape(record, into)?;
    let of = dtype_of(into)?;
    if let Some(spill) = record.spill.filter(|spill| spill.name() != of) {
        let wanted = spill.name();
        return refused(into.py(), &record.name, &|name| {
            format!("the gradient of {name} spills as {wanted}, but the tensor has dtype {of}")
        });
    }
    held(into)
}

/// Returns the memory of a contiguous uint8 CPU tensor into which bytes are read. For any other tensor, returns an
/// error with the text of `refusal`.
pub(crate) fn bytes_into(into: &Bound<'_, PyAny>, refusal: impl FnOnce() -> String) -> PyResult<TensorMemory> {
    let fits = dtype_of(into)? == "uint8"
        && into.getattr("device")?.getattr("type")?.extract::<String>()? == "cpu"
        && into.call_method0("is_contiguous")?.is_truthy()?;
    if fits { held(into) } else { Err(config_error(into.py(), refusal())) }
}
