//! The C library's heap of a process that trains: large allocations are mapped, and what is freed goes back to the system.
//!
//! glibc raises its threshold with each mapping that is freed, up to 32 MiB. From then on gradients come from the heap,
//! where what little stays between them keeps it from shrinking: it would grow with the depth of the model.
//!
//! Whatever the threshold, glibc serves a request from a hole that fits before it thinks of a mapping. Where a model was
//! made in the heap, each gradient of a step lies in another of its holes, and the model's memory comes back. So the
//! holes are taken: one that is allocated serves nobody, and without its pages it costs no memory.
//!
//! Pages that come back are cleared each time: a tenth of a step that waits for no storage, and a quarter of one with a
//! large batch. Where all state is in memory, or activations are large beside the model, the heap therefore keeps what is
//! freed.

use std::env;
use std::ffi::c_void;

use crate::{limits::memory_limits, page_bytes};

/// From here on an allocation is a mapping of its own, whose pages the kernel clears each time. With 32 KiB a step of a
/// model of 125 M takes a quarter longer and saves 28 MB of 393; `benchmarks/heap.py` compares others.
const MAPPED_BYTES: libc::c_int = 1 << 20;
/// The highest threshold that glibc takes, and the one to which it goes by itself.
const KEPT_BYTES: libc::c_int = 32 << 20;
/// The trim threshold by which glibc never gives back by itself: with 64 MiB, which it would choose, a step of 4 x 512
/// tokens takes 1.19 of the time in memory instead of 1.02.
const NEVER: libc::c_int = -1;
/// Of the model's bytes: forward and backward that touch so many times as many new pages are those of a large batch.
const ACTIVATIONS: u64 = 3;
/// And at least so many bytes: fewer take no time.
const ACTIVATIONS_BYTES: u64 = 256 << 20;
/// `MEMASCEND_MALLOC=system` leaves the heap alone.
const VARIABLE: &str = "MEMASCEND_MALLOC";
/// By these a user has said what glibc is to do.
const OF_GLIBC: [&str; 2] = ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];

/// From here on a hole is taken; smaller ones are for what is always in the heap.
#[cfg(target_env = "gnu")]
const HOLE_BYTES: u16 = 32 << 10;
/// Larger holes are taken in several pieces.
#[cfg(target_env = "gnu")]
const PIECE_BYTES: usize = 256 << 20;

/// How the heap is treated while this exists; afterwards the holes are free again, and the thresholds stay.
#[derive(Debug)]
pub struct Heap {
    gives_back: bool,
    // Since a large batch, until this is dropped.
    keeps: bool,
    // What a step of a large batch touches anew for each backward.
    large_bytes: u64,
    // Bytes of the pages that the process had touched anew when the last step ended; none before the first.
    touched: Option<u64>,
    // The last step was of a large batch.
    was_large: bool,
    // Addresses of what was allocated.
    taken: Vec<usize>,
}

impl Heap {
    /// Fixes the thresholds of this process, but where the environment says what they are, or what is freed stays. Without
    /// the model's bytes no batch is a large one.
    #[must_use]
    pub fn new(gives_back: bool, model_bytes: Option<u64>) -> Self {
        if gives_back && is_ours() {
            set_mapped_from(MAPPED_BYTES);
        }
        let large_bytes =
            model_bytes.map_or(u64::MAX, |bytes| ACTIVATIONS_BYTES.max(ACTIVATIONS.saturating_mul(bytes)));
        Self { gives_back, keeps: false, large_bytes, touched: None, was_large: false, taken: Vec::new() }
    }

    /// A step of so many backwards ended: gives back what is free, unless it and the last one used so much more than the
    /// model itself that what is freed stays from now on.
    pub fn step_ended(&mut self, backwards: u64) {
        let touched = touched_bytes();
        // The first step also touches what lasts.
        if let Some(before) = self.touched.replace(touched) {
            let each = touched.saturating_sub(before) / backwards.max(1);
            let is_large = each > self.large_bytes;
            // Between two steps a user may also evaluate, load or save, once.
            if is_large && self.was_large && self.gives_back && is_ours() && has_room(each) {
                self.keep();
            }
            self.was_large = is_large;
        }
        self.trim();
    }

    fn keep(&mut self) {
        self.gives_back = false;
        self.keeps = true;
        self.free_holes();
        set_thresholds(KEPT_BYTES, NEVER);
    }

    fn free_holes(&mut self) {
        for address in self.taken.drain(..) {
            // SAFETY: malloc gave it, and nobody else knows of it.
            unsafe { libc::free(address as *mut c_void) };
        }
    }

    /// Gives back to the system what is free, unless that stays.
    pub fn trim(&self) {
        if self.gives_back && !is_left_alone() {
            trimmed();
        }
    }

    /// Large memory was freed that does not come again: gives back what is free, and takes the holes, unless they serve
    /// what is freed from now on.
    pub fn take_holes(&mut self) {
        if !is_left_alone() {
            trimmed();
        }
        if self.gives_back && is_ours() {
            take(&mut self.taken);
        }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        self.free_holes();
        if self.keeps {
            set_mapped_from(MAPPED_BYTES);
            trimmed();
        }
    }
}

fn is_left_alone() -> bool {
    env::var_os(VARIABLE).is_some_and(|said| said == "system")
}

/// Whether nobody has said how large allocations are treated.
fn is_ours() -> bool {
    !is_left_alone() && !OF_GLIBC.into_iter().any(|name| env::var_os(name).is_some())
}

/// Whether activations and the gaps between them stay far from the limits: both are less than half of what is touched.
fn has_room(touched: u64) -> bool {
    memory_limits().headroom.available_bytes as u64 > touched / 2
}

fn touched_bytes() -> u64 {
    // SAFETY: zeros are a value of it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: it fills what it is given.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    u64::try_from(usage.ru_minflt).unwrap_or(0) * page_bytes() as u64
}

/// Of what is freed at its end, the heap then keeps twice as much, as glibc would.
fn set_mapped_from(bytes: libc::c_int) {
    set_thresholds(bytes, 2 * bytes);
}

#[cfg(target_env = "gnu")]
fn set_thresholds(mapped: libc::c_int, trimmed: libc::c_int) {
    for (option, value) in [(libc::M_MMAP_THRESHOLD, mapped), (libc::M_TRIM_THRESHOLD, trimmed)] {
        // SAFETY: it takes two numbers, and the library's own lock.
        unsafe { libc::mallopt(option, value) };
    }
}

#[cfg(target_env = "gnu")]
fn trimmed() {
    // SAFETY: it takes the library's own locks.
    unsafe { libc::malloc_trim(0) };
}

/// Allocates what is free below the heap's end, the largest first. Their pages were given back, and are not touched.
#[cfg(target_env = "gnu")]
fn take(taken: &mut Vec<usize>) {
    // SAFETY: sbrk(0) tells where the heap ends; what malloc gives is freed or kept, and never read.
    let end = || unsafe { libc::sbrk(0) } as usize;
    let top = end();
    let mut bytes = PIECE_BYTES;
    // What no hole serves shall be mapped, so that its address tells.
    set_mapped_from(HOLE_BYTES.into());
    // A heap that grows says that the process has as many mappings as it may.
    while bytes >= HOLE_BYTES.into() && end() == top {
        // SAFETY: as above.
        let address = unsafe { libc::malloc(bytes) };
        if !address.is_null() && (address as usize) < top {
            taken.push(address as usize);
            continue;
        }
        // SAFETY: malloc gave it just now, or null.
        unsafe { libc::free(address) };
        bytes /= 2;
    }
    set_mapped_from(MAPPED_BYTES);
}

#[cfg(not(target_env = "gnu"))]
fn set_thresholds(_: libc::c_int, _: libc::c_int) {}

#[cfg(not(target_env = "gnu"))]
fn trimmed() {}

#[cfg(not(target_env = "gnu"))]
fn take(_: &mut Vec<usize>) {}
