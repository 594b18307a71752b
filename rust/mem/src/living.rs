//! Lists living regions and file mappings, under a lock that a forking thread holds during the fork; counts the forks.
//!
//! [Note: forked child] A child has copies of its parent's memory and locks, but none of its parent's other threads. A
//! lock that another thread held at the fork stays locked in the child for ever. So in a child, which `Maker` detects,
//! methods return an error or do nothing before they take such a lock. The lock of this list is safe, because the
//! forking thread holds it itself.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, Once, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{file_memory::Twins, guarded::locked, region};

/// The living regions and file mappings of this process.
pub(crate) struct Living {
    /// Weak handles of regions. `Region` removes dead handles when it adds one.
    pub(crate) regions: Vec<Weak<region::Inner>>,
    /// File mappings by the address of their first byte.
    pub(crate) files: BTreeMap<usize, Twins>,
}

static LIVING: Mutex<Living> = Mutex::new(Living { regions: Vec::new(), files: BTreeMap::new() });
/// The number of forks between the process that loaded the library and this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static HOOK: Once = Once::new();

thread_local! {
    /// The lock's guard, from just before a fork by this thread until just after it, in parent and child.
    static AROUND_FORK: RefCell<Option<MutexGuard<'static, Living>>> = const { RefCell::new(None) };
}

/// Locks the list.
pub(crate) fn living() -> MutexGuard<'static, Living> {
    watch_forks();
    locked(&LIVING)
}

/// The process that made an object, as the number of forks since the library was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Maker(u32);

impl Maker {
    /// Identifies the current process.
    #[must_use]
    pub fn here() -> Self {
        watch_forks();
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// True if this process is a fork of the maker.
    #[must_use]
    pub fn is_elsewhere(self) -> bool {
        self != Self::here()
    }
}

fn watch_forks() {
    HOOK.call_once(|| {
        // SAFETY: the handlers only change an atomic, lock, unlock and make system calls, on the thread that forks.
        // They are functions of this library, which is never unloaded.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        assert_eq!(failed, 0, "pthread_atfork has no memory left");
    });
}

extern "C" fn before() {
    let guard = locked(&LIVING);
    // A thread whose thread-locals are destroyed forks without the lock, so its child may find the lock taken.
    let _ = AROUND_FORK.try_with(|around| *around.borrow_mut() = Some(guard));
}

extern "C" fn in_parent() {
    let _ = AROUND_FORK.try_with(|around| around.borrow_mut().take());
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let guard = AROUND_FORK.try_with(|around| around.borrow_mut().take()).ok().flatten();
    if let Some(mut living) = guard.or_else(|| LIVING.try_lock().ok()) {
        living.files.values_mut().for_each(Twins::part);
    }
}
