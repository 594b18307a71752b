//! Detects a forked child at the cost of one relaxed load.

use std::sync::{
    Once,
    atomic::{AtomicU32, Ordering},
};

/// How many forks lie between this process and the one that loaded the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static HOOK: Once = Once::new();

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// The process, as far as forks are concerned: memory made under another value belongs to a parent.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Asks the C library to count forks from now on. Called whenever memory is made.
pub(crate) fn watch() -> u32 {
    HOOK.call_once(|| {
        // SAFETY: the child handler only touches an atomic, which is allowed after fork in a threaded process; it is a
        // function of this library, which is never unloaded.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        assert_eq!(failed, 0, "pthread_atfork has no memory left");
    });
    generation()
}

/// How many forks lie between this process and the one that loaded the library: what was made under another value
/// belongs to a parent. Costs a relaxed load once forks are being counted.
#[must_use]
pub fn fork_generation() -> u32 {
    watch()
}
