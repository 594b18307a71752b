//! The errors of volumes and their devices.

use std::{fmt, io, path::Path, sync::Arc, time::Duration};

use memascend_mem::{Ended, caught};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// What a request asks a device to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Transfers bytes from the device into memory.
    Read,
    /// Transfers bytes from memory to the device.
    Write,
    /// Makes earlier writes durable.
    Flush,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        })
    }
}

/// An error of a volume or a device. If several callers must receive an error, each caller gets a clone.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong, or a thread could not be started. The text says why.
    #[error("{0}")]
    Invalid(String),

    /// The range exceeds the volume; nothing was transferred.
    #[error(
        "{nbytes} bytes at offset {offset} do not fit into the volume, which has {size_bytes} bytes; open it with a \
         larger size=, or use a smaller offset"
    )]
    PastTheEnd {
        /// Offset in the volume.
        offset: u64,
        /// Length in bytes.
        nbytes: usize,
        /// Size of the volume.
        size_bytes: u64,
    },

    /// A request to a device failed.
    #[error("{action} of {nbytes} bytes at offset {offset} of {} failed: {}{}", path.display(), reason(*errno), advice(*errno))]
    Device {
        /// The action that failed.
        action: Action,
        /// The file or device.
        path: Arc<Path>,
        /// Offset on the device from which the bytes were not moved; 0 for a flush.
        offset: u64,
        /// Bytes of the request that were not moved; 0 for a flush.
        nbytes: usize,
        /// The system's error number.
        errno: i32,
    },

    /// A file or device has become shorter since the volume opened it.
    #[error(
        "read of {nbytes} bytes at offset {offset} of {} ended after {moved} bytes: the file or device has become \
         shorter since the volume opened it; if another program truncated it, stop that program and restore the file",
        path.display()
    )]
    Ended {
        /// The file.
        path: Arc<Path>,
        /// Offset in the file.
        offset: u64,
        /// Bytes that the request asked for.
        nbytes: usize,
        /// Bytes that were read.
        moved: usize,
    },

    /// A file or device cannot be used as the caller asked.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file or device.
        path: Arc<Path>,
        /// The reason and, in most cases, the remedy.
        why: String,
        /// The error number of the failed system call, or the number that fits the reason best; `None` if neither is
        /// known.
        errno: Option<i32>,
    },

    /// The backend that the caller chose is not available or, with `BackendChoice::Auto`, no backend is available.
    #[error(
        "backend {backend:?} is not available here: {why}; fix this, or pass backend=\"auto\" if you chose a backend"
    )]
    NoBackend {
        /// The backend's name.
        backend: &'static str,
        /// The reason.
        why: String,
    },

    /// The volume accepts no operation now, because [`OPERATIONS_MAX`](crate::OPERATIONS_MAX) operations are in flight.
    #[error(
        "this volume already has {operations_max} operations in flight; wait for some of their tickets, then try again"
    )]
    TooMany {
        /// The largest number of operations in flight.
        operations_max: usize,
    },

    /// The volume has been closed.
    #[error("the volume has been closed; open it again")]
    Closed,

    /// A forked child used its parent's volume.
    #[error(
        "this volume belongs to the process that opened it, and this process is a fork of that process; open another \
         volume in this process"
    )]
    Forked,

    /// A wait took longer than its timeout. The operation continues.
    #[error("{what} did not end within {:.3} s; the work continues, so wait again", waited.as_secs_f64())]
    TimedOut {
        /// The operation, or the operations, that the caller waited for.
        what: String,
        /// The time that the caller waited.
        waited: Duration,
    },

    /// The caller's poll function stopped a wait. The operation continues.
    #[error("waiting for {what} was interrupted; the work continues, so wait again for its result")]
    Interrupted {
        /// The operation, or the operations, that the caller waited for.
        what: String,
    },

    /// A thread that copies unaligned transfers panicked. The thread continues with the next transfer.
    #[error("a thread of the volume panicked, which is a bug in memascend; please report it: {0}")]
    Panicked(String),

    /// Memory for the chunks of unaligned transfers could not be allocated.
    #[error("memory for the copies of unaligned transfers could not be allocated: {0}")]
    Memory(Arc<memascend_mem::Error>),
}

/// Runs `work`. If `work` panics, returns an error with the panic's text, so that the calling thread continues.
pub(crate) fn catch_panic(work: impl FnOnce() -> Result<()>) -> Result<()> {
    caught(work).unwrap_or_else(|text| Err(Error::Panicked(text)))
}

impl Error {
    /// Makes an error from a failed system call.
    pub(crate) fn system(path: &Arc<Path>, call: &str, error: &io::Error) -> Self {
        let errno = error.raw_os_error();
        let why = match errno {
            Some(errno) => format!("{call} failed: {}{}", reason(errno), advice(errno)),
            None => format!("{call} failed: {error}"),
        };
        Self::Refused { path: Arc::clone(path), why, errno }
    }

    /// Makes the error of a wait that a timeout or an interrupt ended. `what` names the operation that the caller
    /// waited for.
    pub(crate) fn of_wait(ended: Ended, what: impl FnOnce() -> String) -> Self {
        match ended {
            Ended::TimedOut(waited) => Self::TimedOut { what: what(), waited },
            Ended::Interrupted => Self::Interrupted { what: what() },
        }
    }

    pub(crate) fn refused(path: &Arc<Path>, errno: i32, why: impl Into<String>) -> Self {
        Self::Refused { path: Arc::clone(path), why: why.into(), errno: Some(errno) }
    }
}

/// Returns the system's text for `errno` in lower case, with `(errno 5)` instead of Rust's `(os error 5)` at the end.
fn reason(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    let plain = text.rsplit_once(" (os error").map_or(text.as_str(), |(plain, _)| plain);
    format!("{} (errno {errno})", plain.to_lowercase())
}

/// Returns advice for the user about `errno`; empty if there is no advice.
fn advice(errno: i32) -> &'static str {
    match errno {
        libc::ENOSPC => "; free space on the file system, or choose a smaller size",
        libc::EDQUOT => "; raise the quota, or choose a smaller size",
        libc::EIO => "; the device or the file system behind it may be faulty: see `dmesg`",
        libc::EROFS => "; the device or its file system is read-only, perhaps because of an error: see `dmesg`",
        libc::EFBIG => "; raise the file size limit (`ulimit -f`), or use a file system that allows larger files",
        libc::ENODEV | libc::ENXIO => "; the device was removed or has failed: see `dmesg`",
        libc::EACCES | libc::EPERM => "; check its owner and mode, and whether the device is read-only",
        _ => "",
    }
}
