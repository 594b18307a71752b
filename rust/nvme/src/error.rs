//! Errors of storage.

use std::{fmt, io, path::Path, sync::Arc, time::Duration};

use memascend_mem::{Ended, caught};

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What a device was asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Bytes from the device into memory.
    Read,
    /// Bytes from memory to the device.
    Write,
    /// Everything written so far onto the medium.
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

/// What can go wrong with storage. Cloned where several callers must hear of the same failure.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is wrong whatever the device says.
    #[error("{0}")]
    Invalid(String),

    /// A range that does not lie in the volume; nothing was done.
    #[error(
        "{nbytes} bytes at offset {offset} do not fit into the volume, which holds {size_bytes} bytes; open it with a \
         larger size= or write elsewhere"
    )]
    PastTheEnd {
        /// Where in the volume.
        offset: u64,
        /// How many bytes.
        nbytes: usize,
        /// What the volume holds.
        size_bytes: u64,
    },

    /// A device refused or failed an operation.
    #[error("{action} of {nbytes} bytes at offset {offset} of {} failed: {}{}", path.display(), reason(*errno), advice(*errno))]
    Device {
        /// What it was asked to do.
        action: Action,
        /// The file or device.
        path: Arc<Path>,
        /// Where on that device; 0 for a flush.
        offset: u64,
        /// How many bytes; 0 for a flush.
        nbytes: usize,
        /// The system's error number.
        errno: i32,
    },

    /// A file ended before the volume does: someone shortened it.
    #[error(
        "read of {nbytes} bytes at offset {offset} of {} ended after {moved} bytes: the file is shorter than when it \
         was opened, something truncated it",
        path.display()
    )]
    Ended {
        /// The file.
        path: Arc<Path>,
        /// Where on that device.
        offset: u64,
        /// How many bytes were asked for.
        nbytes: usize,
        /// How many there were.
        moved: usize,
    },

    /// A path that cannot be opened as asked.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file or device.
        path: Arc<Path>,
        /// The reason and the remedy.
        why: String,
        /// The system's error number, where the system said no.
        errno: Option<i32>,
    },

    /// The backend that was asked for cannot be had.
    #[error("backend {backend:?} cannot be had here: {why}; backend \"auto\" takes what there is")]
    NoBackend {
        /// Its name.
        backend: &'static str,
        /// The reason.
        why: String,
    },

    /// More operations than a volume keeps track of.
    #[error("{operations_max} operations are in flight on this volume already; wait for some of their tickets")]
    TooMany {
        /// The bound.
        operations_max: usize,
    },

    /// The volume has been closed.
    #[error("the volume has been closed; open it again")]
    Closed,

    /// A forked child uses its parent's volume.
    #[error(
        "this volume belongs to the process that opened it, and this process is a fork of it; open another volume here"
    )]
    Forked,

    /// A wait that took too long. What was waited for goes on.
    #[error("{what} was not done within {:.3} s, and continues", waited.as_secs_f64())]
    TimedOut {
        /// What was waited for.
        what: String,
        /// For how long.
        waited: Duration,
    },

    /// The caller's poll function asked to stop waiting. What was waited for goes on.
    #[error("waiting for {what} was interrupted, and it continues")]
    Interrupted {
        /// What was waited for.
        what: String,
    },

    /// A fault of this crate, in one of its threads. The thread goes on.
    #[error("a thread of the volume failed by a fault of its own: {0}")]
    Panicked(String),

    /// Chunks for unaligned transfers could not be had.
    #[error("no memory for the chunks of unaligned transfers: {0}")]
    Memory(Arc<memascend_mem::Error>),
}

/// Does a thread's work; a panic of it is an error for whoever waits, and not the end of what waits.
pub(crate) fn contained(work: impl FnOnce() -> Result<()>) -> Result<()> {
    caught(work).unwrap_or_else(|text| Err(Error::Panicked(text)))
}

impl Error {
    /// A refusal with the system's reason.
    pub(crate) fn system(path: &Arc<Path>, call: &str, error: &io::Error) -> Self {
        let errno = error.raw_os_error();
        let why = match errno {
            Some(errno) => format!("{call} failed: {}{}", reason(errno), advice(errno)),
            None => format!("{call} failed: {error}"),
        };
        Self::Refused { path: Arc::clone(path), why, errno }
    }

    /// What ended a wait for `what`.
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

/// The system's text, without the "(os error 5)" that Rust appends.
fn reason(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    let plain = text.rsplit_once(" (os error").map_or(text.as_str(), |(plain, _)| plain);
    format!("{} (errno {errno})", plain.to_lowercase())
}

/// What the user can do, where it is not obvious.
fn advice(errno: i32) -> &'static str {
    match errno {
        libc::ENOSPC => "; free space on the file system, or choose a smaller size",
        libc::EDQUOT => "; raise the quota, or choose a smaller size",
        libc::EIO => "; the device or the file system behind it reported a fault: see `dmesg`",
        libc::EROFS => "; it is read-only, or was made so after an error: see `dmesg`",
        libc::EFBIG => "; the file size limit of the process (`ulimit -f`) or of the file system is smaller",
        libc::ENODEV | libc::ENXIO => "; the device is gone",
        libc::EACCES | libc::EPERM => "; check its owner and mode, and whether the device is read-only",
        _ => "",
    }
}
