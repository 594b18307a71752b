//! Backends: what carries requests to the devices.

use std::sync::Arc;

use crate::{
    Error, Result,
    device::Device,
    request::Job,
    threads::Threads,
    uring::{Unavailable, Uring},
};

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

/// What was chosen, and why no better.
pub(crate) struct Chosen {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) kind: BackendKind,
    pub(crate) why_not: Option<String>,
}

/// Starts a backend over `devices`: the one wished for, by trying.
pub(crate) fn start(choice: BackendChoice, devices: &Arc<[Device]>, queue_depth: usize) -> Result<Chosen> {
    let mut why_not = None;
    if choice != BackendChoice::Threads {
        match Uring::start(devices, queue_depth) {
            Ok(ring) => {
                let backend: Arc<dyn Backend> = Arc::new(ring);
                return Ok(Chosen { backend, kind: BackendKind::IoUring, why_not: None });
            }
            Err(Unavailable(why)) if choice == BackendChoice::IoUring => {
                return Err(Error::NoBackend { backend: "io_uring", why });
            }
            Err(Unavailable(why)) => why_not = Some(why),
        }
    }
    let threads = Threads::start(devices, queue_depth)
        .map_err(|error| Error::NoBackend { backend: "threads", why: error.to_string() })?;
    let backend: Arc<dyn Backend> = Arc::new(threads);
    Ok(Chosen { backend, kind: BackendKind::Threads, why_not })
}

/// Why `io_uring` cannot be had here, or `None` where it can. Makes a small ring and drops it.
#[must_use]
pub fn why_no_io_uring() -> Option<String> {
    Uring::probe().err().map(|Unavailable(why)| why)
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
