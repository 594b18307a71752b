//! Configures the heap of the C library for training. This module makes large allocations become mappings, and occupies
//! the free holes that the model left in the heap. It returns freed memory to the system after each step, until a step
//! has a large batch.
//!
//! A model that was created in the heap leaves holes when its values move to storage. Each gradient of a step would be
//! allocated in another hole, so memory would grow with the depth of the model. An allocation that occupies a hole
//! prevents this. It costs no memory, because no code touches its pages.
//!
//! If a mapping is freed, glibc raises its mapping threshold to the size of the mapping, up to 32 MiB. Gradients below
//! this threshold would be allocated in the heap, and small allocations between them would keep the heap from
//! shrinking. So this module sets a fixed threshold.
//!
//! From a step with a large batch on, freed memory stays in the heap, if enough memory is available. If it returned to
//! the system, the kernel would have to fill new pages with zeros for the next step. This would take up to a third of
//! the time of the step.

use std::{
    env,
    ffi::c_void,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{limits::memory_limits, page_bytes};

/// Allocations of at least this many bytes become mappings. A threshold of 32 KiB would make a step of a model of 125 M
/// parameters take a quarter longer, and would save 28 MB of 393 MB. `benchmarks/heap.py` compares other values.
const MAPPED_FROM_BYTES: libc::c_int = 1 << 20;
/// How many free bytes may stay at the end of the heap. This is twice the mapping threshold, which is the ratio that
/// glibc uses.
const KEPT_AT_END_BYTES: libc::c_int = 2 * MAPPED_FROM_BYTES;
/// The mapping threshold after a step with a large batch. It is the highest threshold that glibc accepts.
const MAPPED_FROM_BYTES_MAX: libc::c_int = 32 << 20;
/// A trim threshold with which glibc never trims the end of the heap.
const NEVER: libc::c_int = -1;
/// A batch is large if the forwards and backwards of a step touch many new pages: on average, each pair touches more
/// bytes than `LARGE_TIMES` times the bytes of the model, and more than `LARGE_BYTES`.
const LARGE_TIMES: u64 = 3;
const LARGE_BYTES: u64 = 256 << 20;
/// The size in bytes of the smallest allocation that occupies a hole. Smaller holes remain for small allocations of the
/// process.
const HOLE_BYTES: u16 = 32 << 10;
/// The size in bytes of the largest allocation that occupies a hole. A larger hole gets several allocations.
const HOLE_BYTES_MAX: usize = 256 << 20;
/// The environment variable that turns this module off: `MEMASCEND_MALLOC=system` leaves the heap unchanged.
const VARIABLE: &str = "MEMASCEND_MALLOC";
/// If one of these environment variables is set, this module assumes that the user has chosen the thresholds of glibc.
/// It then changes no threshold and occupies no hole.
const OF_GLIBC: [&str; 2] = ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];

#[derive(Debug)]
struct Heap {
    /// Addresses of the allocations that occupy holes.
    occupied: Vec<usize>,
    /// The result of [`touched_bytes`] at the end of the last step, or at the start of the first backward. `None` until
    /// the first backward, or the first end of a step, after [`settle_heap`].
    touched: Option<u64>,
    /// True if freed memory stays in the heap: after a step with a large batch, if enough memory was available.
    keeps: bool,
}

static HEAP: Mutex<Heap> = Mutex::new(Heap { occupied: Vec::new(), touched: None, keeps: false });

fn heap() -> MutexGuard<'static, Heap> {
    HEAP.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heap {
    fn free_holes(&mut self) {
        for address in self.occupied.drain(..) {
            // SAFETY: `occupy` allocated the address with malloc, and no other code uses it.
            unsafe { libc::free(address as *mut c_void) };
        }
    }
}

/// Returns free memory to the system, occupies the holes of the heap, and sets the thresholds. If the user has set the
/// thresholds by environment variables, this only returns free memory. If `MEMASCEND_MALLOC=system` is set, it does
/// nothing.
pub fn settle_heap() {
    trim();
    if is_chosen() {
        return;
    }
    let mut heap = heap();
    heap.free_holes();
    occupy(&mut heap.occupied);
    set_thresholds(MAPPED_FROM_BYTES, KEPT_AT_END_BYTES);
    (heap.touched, heap.keeps) = (None, false);
}

/// Records, when the first backward after [`settle_heap`] begins, how many bytes the process has touched. Pages that
/// were touched earlier do not count, because they may be permanent and say nothing about the batch.
pub fn begin_heap_backward() {
    heap().touched.get_or_insert_with(touched_bytes);
}

/// Ends a step with `backwards` backward passes. Returns freed memory to the system, until a step has a large batch.
/// From such a step on, the heap keeps freed memory, if the available memory is more than half of what an average pass
/// touched. If the user has set the thresholds by environment variables, this always returns freed memory. If
/// `MEMASCEND_MALLOC=system` is set, the heap stays unchanged.
pub fn end_heap_step(backwards: u64, model_bytes: u64) {
    let mut heap = heap();
    let touched = touched_bytes();
    if let Some(before) = heap.touched.replace(touched)
        && !heap.keeps
        && !is_chosen()
    {
        let each = touched.saturating_sub(before) / backwards.max(1);
        let is_large = each > LARGE_BYTES.max(LARGE_TIMES.saturating_mul(model_bytes));
        if is_large && memory_limits().headroom.available_bytes as u64 > each / 2 {
            heap.keeps = true;
            heap.free_holes();
            set_thresholds(MAPPED_FROM_BYTES_MAX, NEVER);
        }
    }
    if !heap.keeps {
        drop(heap);
        trim();
    }
}

fn trim() {
    if !is_left_alone() {
        // SAFETY: `malloc_trim` takes no pointer and locks the heap itself.
        unsafe { libc::malloc_trim(0) };
    }
}

fn touched_bytes() -> u64 {
    // SAFETY: all-zero bytes are a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` has room for the `rusage` that the call writes.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    u64::try_from(usage.ru_minflt).unwrap_or(0) * page_bytes() as u64
}

/// True if environment variables configure the heap.
fn is_chosen() -> bool {
    is_left_alone() || OF_GLIBC.into_iter().any(|name| env::var_os(name).is_some())
}

fn is_left_alone() -> bool {
    env::var_os(VARIABLE).is_some_and(|value| value == "system")
}

fn set_thresholds(mapped_from: libc::c_int, kept: libc::c_int) {
    for (option, bytes) in [(libc::M_MMAP_THRESHOLD, mapped_from), (libc::M_TRIM_THRESHOLD, kept)] {
        // SAFETY: `mallopt` takes no pointer and locks the heap itself.
        unsafe { libc::mallopt(option, bytes) };
    }
}

/// Occupies the free holes below the end of the heap, with the largest allocations first. `trim` has returned the pages
/// of these holes to the system, and no code touches the new allocations, so they cost no memory. Changes the
/// thresholds: the caller must set them afterwards.
fn occupy(occupied: &mut Vec<usize>) {
    // SAFETY: `sbrk(0)` only returns the end of the heap.
    let end = || unsafe { libc::sbrk(0) } as usize;
    let top = end();
    let mut bytes = HOLE_BYTES_MAX;
    // An allocation that fits no hole becomes a mapping, at an address outside the heap.
    set_thresholds(HOLE_BYTES.into(), NEVER);
    // If the heap grows, mmap has failed, for example because the process has too many mappings: stop.
    while bytes >= HOLE_BYTES.into() && end() == top {
        // SAFETY: `malloc` is called with a non-zero size; the memory is never accessed.
        let address = unsafe { libc::malloc(bytes) };
        if !address.is_null() && (address as usize) < top {
            occupied.push(address as usize);
            continue;
        }
        // SAFETY: `malloc` returned `address` just above, or null.
        unsafe { libc::free(address) };
        bytes /= 2;
    }
}
