//! Waits on a condition variable with a timeout and a regular check for interrupts.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use memascend_mem::Wait;

use crate::{Error, Result};

/// How often a waiting caller is asked whether it still wants to wait: often enough for Ctrl-C to feel immediate.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The data of a mutex that no panic can leave half-written.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until `ready`. The lock is free while `keep_waiting` runs: that may take locks of its own, Python's above all.
pub(crate) fn wait_until<'a, T>(
    mutex: &'a Mutex<T>,
    changed: &Condvar,
    wait: &mut Wait<'_>,
    what: &dyn Fn() -> String,
    ready: impl Fn(&T) -> bool,
) -> Result<MutexGuard<'a, T>> {
    let began = Instant::now();
    // A timeout past the clock's range is for ever.
    let deadline = wait.timeout.and_then(|timeout| began.checked_add(timeout));
    loop {
        let next_poll = Instant::now() + POLL_INTERVAL;
        let until = deadline.map_or(next_poll, |deadline| deadline.min(next_poll));
        let mut guard = locked(mutex);
        loop {
            if ready(&guard) {
                return Ok(guard);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            guard = changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Error::TimedOut { what: what(), waited: began.elapsed() });
        }
        if wait.keep_waiting.as_mut().is_some_and(|keep_waiting| !keep_waiting()) {
            return Err(Error::Interrupted { what: what() });
        }
    }
}
