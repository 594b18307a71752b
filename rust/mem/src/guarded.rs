//! Guards state with a lock, and lets threads wait until the state changes. `nvme`, `store` and `engine` use this wait
//! loop, too.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// The time between two calls of `keep_waiting`. It is so short that Ctrl-C seems to work at once.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long a wait may last, and a function that can end the wait early.
pub struct Wait<'a> {
    /// `None` waits without a limit. Zero does not wait.
    pub timeout: Option<Duration>,
    /// The wait calls this function every 50 ms. If it returns `false`, the wait ends.
    pub keep_waiting: Option<&'a mut dyn FnMut() -> bool>,
}

impl Wait<'static> {
    /// Returns a `Wait` that allows no wait: the call fails if the state is not ready at once.
    #[must_use]
    pub fn never() -> Self {
        Self::at_most(Duration::ZERO)
    }

    /// Returns a `Wait` that lasts at most `timeout`.
    #[must_use]
    pub fn at_most(timeout: Duration) -> Self {
        Self { timeout: Some(timeout), keep_waiting: None }
    }

    /// Returns a `Wait` without a time limit.
    #[must_use]
    pub fn forever() -> Self {
        Self { timeout: None, keep_waiting: None }
    }
}

/// Why a wait ended before the state was ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The time limit was reached. The value is the time that the wait lasted.
    TimedOut(Duration),
    /// `keep_waiting` returned false.
    Interrupted,
}

/// State behind a lock. Threads can wait until the state changes.
#[derive(Debug, Default)]
pub struct Guarded<T> {
    state: Mutex<T>,
    changed: Condvar,
    /// The number of sleeping threads. It changes only under the lock. So a thread that has changed the state under the
    /// lock reads the right number when the thread notifies the others.
    sleeping: AtomicU32,
}

impl<T> Guarded<T> {
    /// Guards `state`.
    #[must_use]
    pub const fn new(state: T) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new(), sleeping: AtomicU32::new(0) }
    }

    /// Locks the state.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        locked(&self.state)
    }

    /// Wakes all waiting threads. Call this after a change of the state, when you do not hold the lock.
    pub fn notify_all(&self) {
        // Check the number first, because a wake-up is a system call even if no thread sleeps.
        if self.sleeping.load(Relaxed) > 0 {
            self.changed.notify_all();
        }
    }

    /// Wakes one waiting thread, after a change that only one thread can use. Call this when you do not hold the lock.
    pub fn notify_one(&self) {
        if self.sleeping.load(Relaxed) > 0 {
            self.changed.notify_one();
        }
    }

    /// Releases the lock, sleeps until a notification, and locks again. May return without a change of the state.
    pub fn sleep<'a>(&self, state: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.sleeping.fetch_add(1, Relaxed);
        let state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        self.sleeping.fetch_sub(1, Relaxed);
        state
    }

    /// Waits without a limit until `ready` returns true, and returns the locked state.
    pub fn when(&self, ready: impl Fn(&T) -> bool) -> MutexGuard<'_, T> {
        let mut state = self.lock();
        while !ready(&state) {
            state = self.sleep(state);
        }
        state
    }

    /// Waits until `ready` returns true, and returns the locked state. Returns an error if `wait` ends the wait
    /// earlier. Does not hold the lock while `keep_waiting` runs, because `keep_waiting` may take other locks, such as
    /// the global lock of Python.
    pub fn wait_until(&self, wait: &mut Wait<'_>, ready: impl Fn(&T) -> bool) -> Result<MutexGuard<'_, T>, Ended> {
        let began = Instant::now();
        // A deadline that the clock cannot represent counts as no deadline.
        let deadline = wait.timeout.and_then(|timeout| began.checked_add(timeout));
        loop {
            let next_poll = Instant::now() + POLL_INTERVAL;
            let until = deadline.map_or(next_poll, |deadline| deadline.min(next_poll));
            let mut state = self.lock();
            loop {
                if ready(&state) {
                    return Ok(state);
                }
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                self.sleeping.fetch_add(1, Relaxed);
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                self.sleeping.fetch_sub(1, Relaxed);
            }
            drop(state);
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Ended::TimedOut(began.elapsed()));
            }
            if wait.keep_waiting.as_mut().is_some_and(|keep_waiting| !keep_waiting()) {
                return Err(Ended::Interrupted);
            }
        }
    }
}

/// Runs `work`. If `work` panics, returns the message of the panic as an error.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".into())
    })
}

/// Locks `mutex`, even if a thread has panicked while it held the lock. Use this only if a panic cannot leave the data
/// half-written.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_until_ends_by_a_change_timeout_or_interrupt() {
        let guarded = Guarded::new(0);
        let late = guarded.wait_until(&mut Wait::at_most(Duration::from_millis(5)), |state| *state == 1).map(|_| ());
        assert!(matches!(late, Err(Ended::TimedOut(after)) if after >= Duration::from_millis(5)));
        let mut asked = 0;
        let mut keep_waiting = || {
            // `wait_until` does not hold the lock here.
            *guarded.lock() += 10;
            asked += 1;
            asked < 2
        };
        let mut wait = Wait { timeout: None, keep_waiting: Some(&mut keep_waiting) };
        assert_eq!(guarded.wait_until(&mut wait, |state| *state == 1).map(|_| ()), Err(Ended::Interrupted));
        assert_eq!(*guarded.lock(), 20);
        std::thread::scope(|scope| {
            let waiter =
                scope.spawn(|| guarded.wait_until(&mut Wait::forever(), |state| *state == 1).map(|state| *state));
            *guarded.lock() = 1;
            guarded.notify_all();
            assert_eq!(waiter.join().ok(), Some(Ok(1)));
        });
    }

    /// A change between a waiter's check and its sleep must wake the waiter: a lost wake-up would hang this test.
    #[test]
    fn notify_all_wakes_every_waiter_in_when() {
        for _ in 0..500 {
            let guarded = Guarded::new(false);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| drop(guarded.when(|state| *state)));
                }
                *guarded.lock() = true;
                guarded.notify_all();
            });
        }
    }
}
