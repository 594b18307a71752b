//! Takes the memory of tensors from Python: address and bytes, which `memascend.engine` has checked.

use std::slice;

/// So many bytes at an address.
///
/// # Safety
/// It points to so many bytes, on the CPU, alive as long as the slice.
pub(crate) unsafe fn bytes<'a>((address, nbytes): (usize, usize)) -> &'a [u8] {
    if nbytes == 0 {
        return &[];
    }
    // SAFETY: the caller says so.
    unsafe { slice::from_raw_parts(std::ptr::with_exposed_provenance(address), nbytes) }
}

/// The same, to be written to.
///
/// # Safety
/// As of `bytes`, and nobody else reaches them meanwhile.
pub(crate) unsafe fn bytes_mut<'a>((address, nbytes): (usize, usize)) -> &'a mut [u8] {
    if nbytes == 0 {
        return &mut [];
    }
    // SAFETY: the caller says so.
    unsafe { slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), nbytes) }
}
