//! Backends: what carries requests to the devices.

use crate::request::Job;

/// Carries requests to devices, and their answers to [`Request::answered`](crate::request::Request::answered).
///
/// Dropping it ends its threads. Whoever drops it has seen to it that no operation is in flight: what is left then is
/// answered with ECANCELED once the kernel is done with it.
pub(crate) trait Backend: Send + Sync {
    /// Takes a job. Never waits for a device.
    fn submit(&self, job: Job);
}

/// Which backend is wished for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// `io_uring` where the kernel gives it, else threads.
    #[default]
    Auto,
    /// `io_uring`, or an error.
    IoUring,
    /// A few threads with `pread` and `pwrite`.
    Threads,
}

/// Which backend a volume has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// One thread with a ring.
    IoUring,
    /// A few threads with `pread` and `pwrite`.
    Threads,
    /// A simulated device.
    Simulated,
}

impl BackendKind {
    /// The name that `backend=` and reports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
            Self::Simulated => "simulated",
        }
    }
}

/// Blocks every signal in the calling thread: they are for the threads of the program, and a file size limit that
/// sends SIGXFSZ must be an error of the write, not the end of the process.
pub(crate) fn block_signals() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `all` is valid for writes of its type; sigfillset initialises it.
    let filled = unsafe { libc::sigfillset(all.as_mut_ptr()) };
    debug_assert_eq!(filled, 0);
    // SAFETY: initialised above; a null old set is not written to.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut()) };
    debug_assert_eq!(blocked, 0);
}
