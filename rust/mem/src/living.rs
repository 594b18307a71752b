//! Lists living regions, under a lock that is held around every fork.

use std::{
    cell::RefCell,
    sync::{Mutex, MutexGuard, Once},
};

use crate::guarded::locked;

/// Weak handles of regions, dead ones included until the next is entered.
type Living = Vec<std::sync::Weak<crate::region::Inner>>;

static LIVING: Mutex<Living> = Mutex::new(Vec::new());
static HOOK: Once = Once::new();

thread_local! {
    /// The lock, from just before a fork of this thread to just after it, in parent and child.
    static AROUND_FORK: RefCell<Option<MutexGuard<'static, Living>>> = const { RefCell::new(None) };
}

/// The list, locked.
pub(crate) fn living() -> MutexGuard<'static, Living> {
    HOOK.call_once(|| {
        // SAFETY: the handlers only lock and unlock, on the thread that forks; they are functions of this library, which
        // is never unloaded.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
        assert_eq!(failed, 0, "pthread_atfork has no memory left");
    });
    locked(&LIVING)
}

extern "C" fn before() {
    let guard = locked(&LIVING);
    // A thread that is past its thread-locals forks without the lock, as it would without this.
    let _ = AROUND_FORK.try_with(|around| *around.borrow_mut() = Some(guard));
}

extern "C" fn after() {
    let _ = AROUND_FORK.try_with(|around| around.borrow_mut().take());
}
