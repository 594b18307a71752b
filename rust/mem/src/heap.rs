//! Settles the C library's heap for training: its holes are occupied, and what a step frees serves the next one.
//!
//! A model that was made in the heap leaves holes when its values go to storage. Each gradient of a step would lie in
//! another of them, so that memory would grow with the depth of the model. A hole that is allocated serves nobody, and
//! without its pages it costs no memory.
//!
//! Pages that go back to the system are cleared when they come again: with large batches and with micro-batches that
//! took up to a third of a step (`benchmarks/heap.py`). So the heap keeps what is freed, and is trimmed only where
//! threads that end would leave much in heaps of their own.

use std::{
    env,
    ffi::c_void,
    sync::{Mutex, PoisonError},
};

/// An allocation of so many bytes is a mapping of its own: the most that glibc takes.
const MAPPED_FROM_BYTES: libc::c_int = 32 << 20;
/// glibc gives back nothing of the heap's end by itself.
const NEVER: libc::c_int = -1;
/// A smaller hole is for what is always in the heap.
const HOLE_BYTES: u16 = 32 << 10;
/// A larger hole is occupied by several allocations.
const HOLE_BYTES_MAX: usize = 256 << 20;
/// `MEMASCEND_MALLOC=system` leaves the heap alone.
const VARIABLE: &str = "MEMASCEND_MALLOC";
/// With these variables a user has chosen glibc's thresholds.
const OF_GLIBC: [&str; 2] = ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];

/// Addresses that occupy holes.
static OCCUPIED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Gives free memory back, occupies the holes in place of those of an earlier call, and sets the thresholds for good;
/// the last two only where the environment says nothing of thresholds.
pub fn settle_heap() {
    trim_heap();
    if is_left_alone() || OF_GLIBC.into_iter().any(|name| env::var_os(name).is_some()) {
        return;
    }
    let mut occupied = OCCUPIED.lock().unwrap_or_else(PoisonError::into_inner);
    for address in occupied.drain(..) {
        // SAFETY: malloc gave it, and nobody else knows of it.
        unsafe { libc::free(address as *mut c_void) };
    }
    occupy(&mut occupied);
    set_thresholds(MAPPED_FROM_BYTES, NEVER);
}

/// Gives the free pages of all heaps back to the system.
pub fn trim_heap() {
    if !is_left_alone() {
        // SAFETY: it takes a number, and the library's own locks.
        unsafe { libc::malloc_trim(0) };
    }
}

fn is_left_alone() -> bool {
    env::var_os(VARIABLE).is_some_and(|value| value == "system")
}

fn set_thresholds(mapped_from: libc::c_int, kept: libc::c_int) {
    for (option, bytes) in [(libc::M_MMAP_THRESHOLD, mapped_from), (libc::M_TRIM_THRESHOLD, kept)] {
        // SAFETY: it takes two numbers, and the library's own lock.
        unsafe { libc::mallopt(option, bytes) };
    }
}

/// Allocates what is free below the heap's end, the largest first. Its pages were given back, and are not touched.
fn occupy(occupied: &mut Vec<usize>) {
    // SAFETY: sbrk(0) tells where the heap ends; what malloc gives is freed or kept, and never read.
    let end = || unsafe { libc::sbrk(0) } as usize;
    let top = end();
    let mut bytes = HOLE_BYTES_MAX;
    // What no hole serves is mapped, so that its address tells.
    set_thresholds(HOLE_BYTES.into(), NEVER);
    // A heap that grows says that the process has as many mappings as it may.
    while bytes >= HOLE_BYTES.into() && end() == top {
        // SAFETY: as above.
        let address = unsafe { libc::malloc(bytes) };
        if !address.is_null() && (address as usize) < top {
            occupied.push(address as usize);
            continue;
        }
        // SAFETY: malloc gave it just now, or null.
        unsafe { libc::free(address) };
        bytes /= 2;
    }
}
