//! Locks each file or device for one user, and names whoever has it.

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

/// Locks the file against every other opener of ours. The lock goes with the descriptor.
pub(crate) fn lock(file: &File, path: &Arc<Path>) -> Result<()> {
    let patience = Patience::new();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            // Also a file system without locks: nothing to go by, and nothing that could be done about it.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOLCK | Errno::INVAL) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if patience.is_left_for(file) => {}
            Err(Errno::WOULDBLOCK) => return Err(in_use(file, path)),
            Err(errno) => return Err(Error::system(path, "flock", &errno.into())),
        }
    }
}

/// How long to wait for what a killed process still has in flight: the kernel keeps a device open, and its lock, until
/// the last transfer is over. Longer than that takes, short for whoever waits for the error.
const DEAD_HOLDER_WAIT: Duration = Duration::from_secs(2);
const DEAD_HOLDER_POLL: Duration = Duration::from_millis(5);

/// Patience with holders that are dead.
pub(crate) struct Patience(Instant);

impl Patience {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }

    /// Waits a moment if it is worth while.
    pub(crate) fn is_left_for(&self, file: &File) -> bool {
        // The kernel forgets the number of a holder that has ended, and has none for one in another container.
        let dead = holder(file).is_none_or(|pid| !alive(pid));
        let left = dead && self.0.elapsed() < DEAD_HOLDER_WAIT;
        if left {
            std::thread::sleep(DEAD_HOLDER_POLL);
        }
        left
    }
}

/// Whether the process runs. One that ended and was not waited for yet (a zombie) does not.
fn alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // pid (name) state ...; the name may hold anything.
    stat.rsplit_once(')').is_none_or(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Lets go of the lock now, whoever else still refers to the open file: a ring that is being taken apart, say.
pub(crate) fn unlock(file: &File) {
    // Fails only where there was no lock.
    let _ = flock(file, FlockOperation::Unlock);
}

/// The error that says who has it.
pub(crate) fn in_use(file: &File, path: &Arc<Path>) -> Error {
    let own = std::process::id();
    let why = match holder(file) {
        Some(pid) if pid == own => format!("this process (pid {pid}) has it open already; close that volume first"),
        Some(pid) => match command(pid) {
            Some(command) => format!("in use by pid {pid} ({command}); wait for it or stop it, or use another"),
            None => format!("in use by pid {pid}; wait for it or stop it, or use another"),
        },
        None => "in use by another process, which cannot be seen from here; wait for it or use another".into(),
    };
    Error::refused(path, libc::EBUSY, why)
}

/// Who holds a lock on the file, from `/proc/locks`.
fn holder(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let device = metadata.dev();
    let place = format!("{:02x}:{:02x}:{}", major(device), minor(device), metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    holder_in(&locks, &place)
}

/// The pid of the lock at `place` (major:minor:inode). Blocked waiters have a `->` before their fields.
fn holder_in(locks: &str, place: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // 1: FLOCK ADVISORY WRITE 1234 fd:00:131 0 EOF
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
