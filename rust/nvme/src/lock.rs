//! Locks each file or device for one volume. If a process tries to open a file that is locked already, the error names
//! the process that holds the lock, if `/proc/locks` shows it.

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock, major, minor},
    io::Errno,
};

use crate::{Error, Result};

/// Locks the file exclusively with `flock`, so that other calls of this function cannot lock the file. `unlock`
/// releases the lock, and so does closing the last copy of the descriptor.
pub(crate) fn lock(file: &File, path: &Arc<Path>) -> Result<()> {
    let patience = Patience::new();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            // If the file system has no locks, `lock` succeeds without a lock: it cannot detect a second user.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::INVAL) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if patience.wait_for_dead_holder(file) => {}
            Err(Errno::WOULDBLOCK) => return Err(in_use(file, path)),
            Err(errno) => return Err(Error::system(path, "flock", &errno.into())),
        }
    }
}

/// How long an opener waits for a killed process that has transfers in flight: the kernel keeps the device open and
/// locked until the last transfer ends. Transfers rarely take two seconds. If the device is still in use after this
/// time, the opener fails, so a user does not wait long for the error.
const DEAD_HOLDER_WAIT: Duration = Duration::from_secs(2);
const DEAD_HOLDER_POLL: Duration = Duration::from_millis(5);

/// Limits how long an opener waits for dead processes that still hold the lock. The time starts with `new`.
pub(crate) struct Patience(Instant);

impl Patience {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }

    /// If the process that holds the lock is dead and [`DEAD_HOLDER_WAIT`] has not passed, sleeps a short time and
    /// returns true. Otherwise returns false at once.
    pub(crate) fn wait_for_dead_holder(&self, file: &File) -> bool {
        // `/proc/locks` shows no pid if the process has ended, or if it runs in another container. Both cases count as
        // dead.
        let dead = holder(file).is_none_or(|pid| !alive(pid));
        let left = dead && self.0.elapsed() < DEAD_HOLDER_WAIT;
        if left {
            std::thread::sleep(DEAD_HOLDER_POLL);
        }
        left
    }
}

/// True if the process runs. A zombie (ended, but its parent has not waited for it) does not run.
fn alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The line is `pid (name) state ...`, and the name may contain any character, `)` too.
    stat.rsplit_once(')').is_none_or(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Releases the lock at once, even if the kernel still keeps the file open, for example while it tears down a ring.
pub(crate) fn unlock(file: &File) {
    // `flock` fails here only if the file system has no locks. The file is then not locked.
    let _ = flock(file, FlockOperation::Unlock);
}

/// Returns an error that names the process that holds the lock, if `/proc/locks` shows it.
pub(crate) fn in_use(file: &File, path: &Arc<Path>) -> Error {
    let own = std::process::id();
    let why = match holder(file) {
        Some(pid) if pid == own => format!("this process (pid {pid}) has it open already; close that volume first"),
        Some(pid) => match command(pid) {
            Some(command) => format!("in use by pid {pid} ({command}); stop that process, or use another path"),
            None => format!("in use by pid {pid}; stop that process, or use another path"),
        },
        None => "in use, perhaps by a process in another container; wait until it is free, or use another path".into(),
    };
    Error::refused(path, libc::EBUSY, why)
}

/// Returns the pid of the process that holds a lock on the file; `None` if `/proc/locks` does not show the pid.
fn holder(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let device = metadata.dev();
    let place = format!("{:02x}:{:02x}:{}", major(device), minor(device), metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    holder_in(&locks, &place)
}

/// Returns the pid of the process that holds the lock at `place` (major:minor:inode). Lines of blocked waiters have a
/// `->` before their fields, so these lines do not match.
fn holder_in(locks: &str, place: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // A line reads: `1: FLOCK ADVISORY WRITE 1234 fd:00:131 0 EOF`
        let &[_, "FLOCK", _, _, pid, at, ..] = fields.as_slice() else { return None };
        if at == place { pid.parse().ok().filter(|&pid| pid > 0) } else { None }
    })
}

fn command(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_found_and_waiters_are_not() {
        let locks = "1: POSIX  ADVISORY  WRITE 77 fd:00:131 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 1234 fd:00:131 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 99 fd:00:132 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 0 fd:00:133 0 EOF\n";
        assert_eq!(holder_in(locks, "fd:00:131"), Some(1234));
        assert_eq!(holder_in(locks, "fd:00:132"), None);
        assert_eq!(holder_in(locks, "fd:00:133"), None, "a holder outside our namespace has no number");
    }
}
