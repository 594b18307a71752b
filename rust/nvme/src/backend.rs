//! Defines the interface of a backend, and the names of the backends. A backend sends requests to the devices.

use crate::request::Job;

/// A backend sends requests to devices. It passes the result of each request to
/// [`Request::interpret_result`](crate::request::Request::interpret_result).
///
/// Dropping a backend ends its threads, after they have carried out all queued requests.
pub(crate) trait Backend: Send + Sync {
    /// Queues a job. Does not wait for a device.
    fn submit(&self, job: Job);
}

/// The backend that the caller chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// `io_uring` if it is available, and threads otherwise.
    #[default]
    Auto,
    /// `io_uring`. Opening a volume fails if `io_uring` is not available.
    IoUring,
    /// A few threads that call `preadv` and `pwritev`.
    Threads,
}

/// The backend that serves a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// One thread with an `io_uring`.
    IoUring,
    /// A few threads that call `preadv` and `pwritev`.
    Threads,
    /// A thread that simulates the devices, for tests.
    Simulated,
}

impl BackendKind {
    /// Returns the backend's name in reports. The option `backend=` gives `io_uring` and the threads the same names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
            Self::Simulated => "simulated",
        }
    }
}

/// Blocks every signal in the calling thread, so that the program's own threads handle the signals. With SIGXFSZ
/// blocked, a write past the file size limit fails instead of ending the process.
pub(crate) fn block_signals() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `all` is valid for writes of its type; `sigfillset` initialises it.
    let filled = unsafe { libc::sigfillset(all.as_mut_ptr()) };
    debug_assert_eq!(filled, 0);
    // SAFETY: `sigfillset` initialised `all`. The third argument may be null: `pthread_sigmask` then does not store the
    // old set.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut()) };
    debug_assert_eq!(blocked, 0);
}
