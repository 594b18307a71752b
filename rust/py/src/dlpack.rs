//! Exports device memory to torch through `DLPack`, in a capsule that keeps the memory's owner alive.

use std::{ffi::CStr, os::raw::c_void, ptr};

use pyo3::{ffi, prelude::*};

use crate::{arguments::size, errors::config_error};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dlpack, module)?)
}

/// The name of a capsule that no consumer has used. A consumer accepts only a capsule with this name, and then renames
/// the capsule.
const NAME: &CStr = c"dltensor";
const UNSIGNED: u8 = 1;

/// `DLTensor` of dlpack.h, with its nested structs. Every version of torch accepts this layout, which `DLPack` had
/// before version 1.0.
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

/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

const _: () = assert!(size_of::<Managed>() == 64, "as dlpack.h lays it out for 64 bits");

/// The allocation behind a capsule: the managed tensor, its shape, and the owner of the device memory.
#[repr(C)]
struct Export {
    managed: Managed,
    shape: i64,
    owner: Py<PyAny>,
}

/// Makes a capsule for `torch.from_dlpack`. The capsule describes `nbytes` bytes at `address` on a device. `kind` is
/// the number of the device type in dlpack.h, and `index` is the index of the device. `owner` stays alive until the
/// last tensor on the bytes is gone.
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
    let shape =
        i64::try_from(nbytes).map_err(|_| config_error(py, format!("nbytes must fit into an int64, not {nbytes}")))?;
    let tensor = Tensor {
        data: ptr::with_exposed_provenance_mut(address),
        device_kind: kind,
        device_index: index,
        dimensions: 1,
        type_code: UNSIGNED,
        type_bits: 8,
        type_lanes: 1,
        shape: ptr::null_mut(),
        // Null strides mean a contiguous tensor.
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = Managed { tensor, context: ptr::null_mut(), deleter: Some(free_export) };
    let held = Box::into_raw(Box::new(Export { managed, shape, owner }));
    // SAFETY: `held` comes from `Box::into_raw` above, and nothing else refers to it.
    let inside = unsafe { &mut *held };
    // `shape` stays at this address until `free_export` frees the export.
    inside.managed.tensor.shape = &raw mut inside.shape;
    // SAFETY: the thread is attached to the interpreter, and the name is static. The consumer of the capsule frees
    // `held`. If no consumer takes the capsule, `dropped` frees `held`.
    let capsule = unsafe { ffi::PyCapsule_New(held.cast(), NAME.as_ptr(), Some(dropped)) };
    if capsule.is_null() {
        // SAFETY: no capsule exists, so nothing else frees `held`.
        drop(unsafe { Box::from_raw(held) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: `capsule` is a new reference, and not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// Frees an [`Export`]. torch calls this on any thread once the last tensor on the memory is gone. `dropped` calls this
/// for a capsule that no consumer took.
///
/// # Safety
/// `managed` must be the first field of an [`Export`] that `dlpack` made, and nothing may use the export afterwards.
unsafe extern "C" fn free_export(managed: *mut Managed) {
    // SAFETY: `managed` points to the first field of an `Export` from `Box::into_raw`, and nothing else uses the
    // export.
    let held = unsafe { Box::from_raw(managed.cast::<Export>()) };
    let Export { owner, .. } = *held;
    let mut owner = Some(owner);
    Python::try_attach(|py| drop(owner.take().map(|owner| owner.into_bound(py))));
    // If the interpreter is gone, the reference cannot be released. The system frees the memory when the process ends.
    std::mem::forget(owner);
}

/// Frees the memory of a capsule that no consumer took. The interpreter calls this when it deletes the capsule.
///
/// # Safety
/// `capsule` must be a capsule that the function `dlpack` made.
unsafe extern "C" fn dropped(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes a valid capsule.
    let ours = unsafe { ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) } != 0;
    if ours {
        // SAFETY: `PyCapsule_IsValid` has checked that the capsule has this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()) };
        // SAFETY: `dlpack` stored the pointer. A consumer renames the capsule that it takes, and this capsule still has
        // its first name. So no consumer took the capsule.
        unsafe { free_export(managed.cast()) };
    }
}
