//! Lists the living regions and file mappings of this process, and counts forks. A thread that forks holds the lock of
//! the list during the fork.
//!
//! [Note: forked child] A child has copies of the memory and locks of its parent, but only the thread that forked. A
//! lock that another thread held at the fork stays locked in the child for ever. So before `Region` and `Arena` take a
//! `Mutex`, they check with `Maker` whether this process is such a child. In a child, they do not take it: leasing
//! returns an error, and dropping a lease does nothing. The lock of this list is safe, because the forking thread
//! itself holds it and releases it.

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
    /// Weak handles of regions. `Region` removes dead handles when it adds a new handle.
    pub(crate) regions: Vec<Weak<region::Inner>>,
    /// File mappings by the address of their first byte.
    pub(crate) files: BTreeMap<usize, Twins>,
}

static LIVING: Mutex<Living> = Mutex::new(Living { regions: Vec::new(), files: BTreeMap::new() });
/// The number of forks between the process that loaded the library and this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static HOOK: Once = Once::new();

thread_local! {
    /// The guard of the lock of the list, while this thread forks. `before` stores the guard, and `in_parent` and
    /// `in_child` take it out.
    static AROUND_FORK: RefCell<Option<MutexGuard<'static, Living>>> = const { RefCell::new(None) };
}

/// Locks the list.
pub(crate) fn living() -> MutexGuard<'static, Living> {
    watch_forks();
    locked(&LIVING)
}

/// Identifies the process that created an object, by the number of forks since the library was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Maker(u32);

impl Maker {
    /// Identifies the current process.
    #[must_use]
    pub fn here() -> Self {
        watch_forks();
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// True if this process is a fork of the process that created the object.
    #[must_use]
    pub fn is_elsewhere(self) -> bool {
        self != Self::here()
    }
}

fn watch_forks() {
    HOOK.call_once(|| {
        // SAFETY: the handlers run on the thread that forks. They only take and release a lock, change an atomic and a
        // thread-local, and make system calls. They are functions of this library, which is never unloaded.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        assert_eq!(failed, 0, "pthread_atfork has no memory left");
    });
}

extern "C" fn before() {
    let guard = locked(&LIVING);
    // If the thread-locals of this thread are destroyed already, the guard is dropped here. The thread then forks
    // without the lock, so the child may find the lock taken.
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
