//! Exports device memory to torch through `DLPack`: a capsule that holds the owner.

use std::{ffi::CStr, os::raw::c_void, ptr};

use pyo3::{ffi, prelude::*};

use crate::{arguments::size, errors::config_error};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dlpack, module)?)
}

/// What whoever takes the capsule in looks for; a taken one is renamed.
const NAME: &CStr = c"dltensor";
const UNSIGNED: u8 = 1;

/// `DLTensor` and what it holds, as dlpack.h has them. The version before 1.0, which every torch takes.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_kind: i32,
    device_index: i32,
    dimensions: i32,
    type_code: u8,
    type_bits: u8,
    type_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

const _: () = assert!(size_of::<Managed>() == 64, "as dlpack.h lays it out for 64 bits");

/// What a capsule points to, and what lives as long.
#[repr(C)]
struct Export {
    managed: Managed,
    shape: i64,
    owner: Py<PyAny>,
}

/// A capsule for `torch.from_dlpack`: bytes on the device of dlpack.h's `kind`; `owner` is held until the last tensor on
/// them is gone.
#[pyfunction]
fn dlpack<'py>(
    address: &Bound<'py, PyAny>,
    nbytes: &Bound<'py, PyAny>,
    kind: i32,
    index: i32,
    owner: Py<PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = address.py();
    let (address, nbytes) = (size("address", address)?, size("nbytes", nbytes)?);
    let shape = i64::try_from(nbytes).map_err(|_| config_error(py, format!("{nbytes} bytes are no memory")))?;
    let tensor = Tensor {
        data: ptr::with_exposed_provenance_mut(address),
        device_kind: kind,
        device_index: index,
        dimensions: 1,
        type_code: UNSIGNED,
        type_bits: 8,
        type_lanes: 1,
        shape: ptr::null_mut(),
        // None: without gaps.
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = Managed { tensor, context: ptr::null_mut(), deleter: Some(let_go) };
    let held = Box::into_raw(Box::new(Export { managed, shape, owner }));
    // SAFETY: `held` was made now, and nobody else has it.
    let inside = unsafe { &mut *held };
    // Which stays where it is until `let_go` frees all of it.
    inside.managed.tensor.shape = &raw mut inside.shape;
    // SAFETY: attached to the interpreter; the name is static, and `held` is freed by whoever takes the capsule in or, if
    // nobody does, by `dropped`.
    let capsule = unsafe { ffi::PyCapsule_New(held.cast(), NAME.as_ptr(), Some(dropped)) };
    if capsule.is_null() {
        // SAFETY: no capsule was made of it.
        drop(unsafe { Box::from_raw(held) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference, and not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// The last tensor on the memory is gone, on whichever thread.
///
/// # Safety
/// Called once, with the `Managed` of a `Export` that `dlpack` made.
unsafe extern "C" fn let_go(managed: *mut Managed) {
    // SAFETY: it is the first field of what `Box::into_raw` gave, and nobody uses it any more.
    let held = unsafe { Box::from_raw(managed.cast::<Export>()) };
    let Export { owner, .. } = *held;
    let mut owner = Some(owner);
    Python::try_attach(|py| drop(owner.take().map(|owner| owner.into_bound(py))));
    // Left to the system where the interpreter is gone: a reference cannot be given back to it.
    std::mem::forget(owner);
}

/// The capsule is gone; the memory with it, unless somebody took it in.
///
/// # Safety
/// Called by the interpreter with a capsule of `dlpack`.
unsafe extern "C" fn dropped(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule.
    let ours = unsafe { ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) } != 0;
    if ours {
        // SAFETY: it has this name; one that was taken in has another, and another owner.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()) };
        // SAFETY: `dlpack` put it there, and nobody took it.
        unsafe { let_go(managed.cast()) };
    }
}
