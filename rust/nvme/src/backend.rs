//! Defines the interface of backends, which send requests to the devices, and the names of the backends.

use crate::request::Job;

/// Sends requests to devices, and passes their results to [`Request::interpret_result`](crate::request::Request::interpret_result).
///
/// Dropping a backend ends its threads. The caller must first wait until no operation is in flight; a request that
/// remains is answered with ECANCELED once the kernel has finished with it.
pub(crate) trait Backend: Send + Sync {
    /// Queues a job. Does not wait for a device.
    fn submit(&self, job: Job);
}

/// The backend that the caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// `io_uring` if the kernel supports it, else threads.
    #[default]
    Auto,
    /// `io_uring`; an error if it is not available.
    IoUring,
    /// A few threads that call `pread` and `pwrite`.
    Threads,
}

/// The backend that a volume has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// One thread with an `io_uring`.
    IoUring,
    /// A few threads that call `pread` and `pwrite`.
    Threads,
    /// A simulated device.
    Simulated,
}

impl BackendKind {
    /// Returns the name that `backend=` and reports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
            Self::Simulated => "simulated",
        }
    }
}

/// Blocks every signal in the calling thread, so that the program's own threads handle them. With SIGXFSZ blocked, a
/// write past the file size limit fails instead of ending the process.
pub(crate) fn block_signals() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `all` is valid for writes of its type; `sigfillset` initialises it.
    let filled = unsafe { libc::sigfillset(all.as_mut_ptr()) };
    debug_assert_eq!(filled, 0);
    // SAFETY: `sigfillset` initialised `all`; the call does not write to a null old set.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut()) };
    debug_assert_eq!(blocked, 0);
}
