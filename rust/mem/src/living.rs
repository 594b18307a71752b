//! Lists living regions and files in memory, under a lock that is held around every fork; counts the forks.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, Once, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{file_memory::Twins, guarded::locked, region};

/// What lives.
pub(crate) struct Living {
    /// Weak handles of regions, dead ones included until the next is entered.
    pub(crate) regions: Vec<Weak<region::Inner>>,
    /// Files in memory, by address.
    pub(crate) files: BTreeMap<usize, Twins>,
}

static LIVING: Mutex<Living> = Mutex::new(Living { regions: Vec::new(), files: BTreeMap::new() });
/// How many forks lie between this process and the one that loaded the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static HOOK: Once = Once::new();

thread_local! {
    /// The lock, from just before a fork of this thread to just after it, in parent and child.
    static AROUND_FORK: RefCell<Option<MutexGuard<'static, Living>>> = const { RefCell::new(None) };
}

/// The list, locked.
pub(crate) fn living() -> MutexGuard<'static, Living> {
    watch_forks();
    locked(&LIVING)
}

/// The process that made something: how many forks lie between it and the one that loaded the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Maker(u32);

impl Maker {
    /// This process.
    #[must_use]
    pub fn here() -> Self {
        watch_forks();
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this process is a fork of it.
    #[must_use]
    pub fn is_elsewhere(self) -> bool {
        self != Self::here()
    }
}

fn watch_forks() {
    HOOK.call_once(|| {
        // SAFETY: the handlers only touch an atomic, lock, unlock and ask the kernel, on the thread that forks; they are
        // functions of this library, which is never unloaded.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        assert_eq!(failed, 0, "pthread_atfork has no memory left");
    });
}

extern "C" fn before() {
    let guard = locked(&LIVING);
    // A thread that is past its thread-locals forks without the lock, as it would without this.
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
