//! Sets from which size on the C library maps an allocation, and gives free heap back to the system.
//!
//! glibc raises that size with each mapping that is freed, up to 32 MiB. From then on gradients come from the heap,
//! where small allocations that stay between them keep it from shrinking: it would grow with the depth of the model.

use std::env;

/// An allocation of so many bytes is a mapping of its own, whose pages the kernel clears each time. With 32 KiB a step of
/// a model of 125 M takes a quarter longer and saves 28 MB of 393; `benchmarks/heap.py` compares others.
const MAPPED_FROM_BYTES: libc::c_int = 1 << 20;
/// So much free memory stays at the heap's end without going back to the system; -1: all of it.
const KEPT_AT_END_BYTES: libc::c_int = 2 << 20;
/// `MEMASCEND_MALLOC=system` leaves the heap alone.
const VARIABLE: &str = "MEMASCEND_MALLOC";
/// With these variables a user has chosen glibc's thresholds.
const OF_GLIBC: [&str; 2] = ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];

/// Sets the thresholds of this process, for good, unless the environment does.
pub fn set_heap_thresholds() {
    if is_left_alone() || OF_GLIBC.into_iter().any(|name| env::var_os(name).is_some()) {
        return;
    }
    for (option, bytes) in [(libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (libc::M_TRIM_THRESHOLD, KEPT_AT_END_BYTES)] {
        // SAFETY: it takes two numbers, and the library's own lock.
        unsafe { libc::mallopt(option, bytes) };
    }
}

/// Gives the free pages of the heap back to the system.
pub fn trim_heap() {
    if !is_left_alone() {
        // SAFETY: it takes a number, and the library's own locks.
        unsafe { libc::malloc_trim(0) };
    }
}

fn is_left_alone() -> bool {
    env::var_os(VARIABLE).is_some_and(|value| value == "system")
}
