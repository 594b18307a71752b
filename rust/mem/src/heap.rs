//! Fixes how the C library's heap treats large allocations: from one size on they are mapped, and what is freed goes back.
//!
//! glibc raises its threshold with each mapping that is freed, up to 32 MiB. From then on gradients come from the heap,
//! where what little stays between them keeps it from shrinking: it would grow with the depth of the model.

use std::env;

/// From here on an allocation is a mapping of its own. With 128 KiB training a model that was made in the heap already
/// takes more than a twentieth beyond the plan. `benchmarks/heap.py` compares others.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES: libc::c_int = 32 << 10;
/// What may stay free at the heap's end: glibc's own, which it raises with the other.
#[cfg(target_env = "gnu")]
const TRIMMED_BYTES: libc::c_int = 128 << 10;
/// `MEMASCEND_MALLOC=system` leaves the heap alone.
const VARIABLE: &str = "MEMASCEND_MALLOC";
/// By these a user has said what glibc is to do.
const OF_GLIBC: [&str; 2] = ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];

/// Fixes the thresholds of this process, but where the environment says what they are. Whether it did.
#[must_use]
pub fn fix_heap() -> bool {
    !is_left_alone() && !OF_GLIBC.into_iter().any(|name| env::var_os(name).is_some()) && fixed()
}

/// Gives back to the system what is free in the heap.
pub fn trim_heap() {
    if !is_left_alone() {
        trimmed();
    }
}

fn is_left_alone() -> bool {
    env::var_os(VARIABLE).is_some_and(|said| said == "system")
}

#[cfg(target_env = "gnu")]
fn fixed() -> bool {
    // SAFETY: it takes two numbers, and the library's own lock.
    let set = |option, bytes| unsafe { libc::mallopt(option, bytes) } == 1;
    set(libc::M_MMAP_THRESHOLD, MAPPED_BYTES) && set(libc::M_TRIM_THRESHOLD, TRIMMED_BYTES)
}

#[cfg(target_env = "gnu")]
fn trimmed() {
    // SAFETY: it takes the library's own locks.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn fixed() -> bool {
    false
}

#[cfg(not(target_env = "gnu"))]
fn trimmed() {}
