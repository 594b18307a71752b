//! Settles the C library's heap for training: large allocations are mapped, the model's holes occupied, what is freed
//! goes back after each step; or, once a step was of a large batch, what is freed serves the next step.
//!
//! A model that was made in the heap leaves holes when its values go to storage. Each gradient of a step would lie in
//! another of them, so that memory would grow with the depth of the model. A hole that is allocated serves nobody, and
//! without its pages it costs no memory. glibc also raises its threshold with each mapping that is freed, up to 32 MiB:
//! from then on small allocations that stay between gradients would keep the heap from shrinking.
//!
//! Pages that go back to the system are cleared when they come again: up to a third of a step with a large batch.

use std::{
    env,
    ffi::c_void,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{limits::memory_limits, page_bytes};

/// An allocation of so many bytes is a mapping of its own. With 32 KiB a step of a model of 125 M takes a quarter longer
/// and saves 28 MB of 393; `benchmarks/heap.py` compares others.
const MAPPED_FROM_BYTES: libc::c_int = 1 << 20;
/// So much free memory stays at the heap's end, as glibc would have it.
const KEPT_AT_END_BYTES: libc::c_int = 2 * MAPPED_FROM_BYTES;
/// After a large batch: the highest threshold that glibc takes, and nothing of the heap's end is given back.
const MAPPED_FROM_BYTES_MAX: libc::c_int = 32 << 20;
const NEVER: libc::c_int = -1;
/// A batch is large whose forward and backward touch so many times the model's bytes anew, and at least so many bytes.
const LARGE_TIMES: u64 = 3;
const LARGE_BYTES: u64 = 256 << 20;
/// A smaller hole is for what is always in the heap.
const HOLE_BYTES: u16 = 32 << 10;
/// A larger hole is occupied by several allocations.
const HOLE_BYTES_MAX: usize = 256 << 20;
/// `MEMASCEND_MALLOC=system` leaves the heap alone.
const VARIABLE: &str = "MEMASCEND_MALLOC";
/// With these variables a user has chosen glibc's thresholds.
const OF_GLIBC: [&str; 2] = ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];

#[derive(Debug)]
struct Heap {
    /// Addresses that occupy holes.
    occupied: Vec<usize>,
    /// Bytes of pages that the process had touched anew when the last step ended, or the first backward began; none before
    /// that.
    touched: Option<u64>,
    /// What is freed serves the next step.
    keeps: bool,
}

static HEAP: Mutex<Heap> = Mutex::new(Heap { occupied: Vec::new(), touched: None, keeps: false });

fn heap() -> MutexGuard<'static, Heap> {
    HEAP.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heap {
    fn free_holes(&mut self) {
        for address in self.occupied.drain(..) {
            // SAFETY: malloc gave it, and nobody else knows of it.
            unsafe { libc::free(address as *mut c_void) };
        }
    }
}

/// Gives free memory back, occupies the holes in place of those of an earlier call, and sets the thresholds; the last
/// two only where the environment says nothing of thresholds.
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

/// A backward begins. What was touched before the first one may last, and tells nothing of its step's batch.
pub fn begin_heap_backward() {
    heap().touched.get_or_insert_with(touched_bytes);
}

/// A step of so many backwards ended. Once one touched much more than the model's bytes anew, and as much memory is free,
/// the heap keeps what is freed from then on; else what is free is given back.
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
        // SAFETY: it takes a number, and the library's own locks.
        unsafe { libc::malloc_trim(0) };
    }
}

fn touched_bytes() -> u64 {
    // SAFETY: zeros are a value of it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: it fills what it is given.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    u64::try_from(usage.ru_minflt).unwrap_or(0) * page_bytes() as u64
}

/// Whether the environment says how allocations are treated.
fn is_chosen() -> bool {
    is_left_alone() || OF_GLIBC.into_iter().any(|name| env::var_os(name).is_some())
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
    // An allocation that no hole serves becomes a mapping, whose address is not below the end of the heap.
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
