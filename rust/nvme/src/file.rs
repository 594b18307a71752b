//! Creates, grows and locks files. New files are private to their owner, and the space of a file is reserved in
//! advance. If opening a volume fails, its files get their former state back.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{FallocateFlags, fallocate, fstatvfs},
    io::{Errno, retry_on_intr},
};

use crate::{
    Error, IsAbandoned, Result, lock,
    pending::{Name, has_its_name, is_there, lost},
};

/// The largest number of attempts of `claim` to open and lock a file. `claim` tries again if another process has just
/// created, replaced or removed the file.
const OPENINGS_MAX: usize = 64;

/// Permission bits of new files: only the owner may read and write.
const MODE: u32 = 0o600;
/// The permission bits of a mode, without the file type.
const MODE_BITS: u32 = 0o7777;
/// Permission bits of the group and of other users.
const OTHERS_BITS: u32 = 0o077;

/// The state of a file before it was created, grown or made private. `restore` restores this state.
#[derive(Debug)]
pub(crate) struct Undo {
    /// Length in bytes when `claim` locked the file; `None` if `claim` created the file and the length was still 0.
    length_before: Option<u64>,
    /// Permission bits before `make_private` changed them; `None` if the bits did not change.
    pub(crate) mode_before: Option<u32>,
    /// The folder that `claim` created for the file; `None` if the folder existed.
    folder: Option<PathBuf>,
}

/// What to do if the file does not exist.
#[derive(Debug, Clone, Copy)]
pub enum Missing {
    /// Fail.
    Refuse,
    /// Create the file. Its folder must exist.
    Make,
    /// Create the file, and its folder if the folder is missing.
    MakeInFolder,
    /// Create the file under its pending name, and its folder if the folder is missing.
    /// [`Volume::take_name`](crate::Volume::take_name) gives the file its own name.
    MakePending(IsAbandoned),
}

impl Undo {
    pub(crate) fn is_new(&self) -> bool {
        self.length_before.is_none()
    }

    /// True if the file was new or empty. Then an undo removes no data that was in the file before.
    pub(crate) fn was_empty(&self) -> bool {
        self.length_before.unwrap_or(0) == 0
    }

    /// Restores the file's former state. Call `restore` only while the file is locked: after the unlock, another
    /// process may own the file.
    pub(crate) fn restore(self, path: &Path, file: &File) {
        // `restore` ignores errors, because `Device::drop` cannot report them.
        match self.length_before {
            None if lost(path, file).is_none() => {
                drop(fs::remove_file(path));
                // `remove_dir` fails if another process has put a file into the folder.
                drop(self.folder.map(fs::remove_dir));
            }
            None => {}
            Some(length) => {
                drop(file.set_len(length));
                if let Some(mode) = self.mode_before {
                    drop(file.set_permissions(fs::Permissions::from_mode(mode)));
                }
            }
        }
    }
}

/// Opens and locks the file at `path`, or creates the file if `missing` allows it. Returns the file, an `Undo` with the
/// file's former state, and the file's name.
///
/// Between opening and locking, another process may use, remove or replace the file. So `claim` checks the file again
/// under the lock. A file that `claim` created counts as new only if it is still empty. If the path no longer names the
/// file, `claim` tries again. `claim` calls `opened` between opening and locking, for tests.
pub(crate) fn claim(path: &Arc<Path>, missing: Missing, opened: &mut dyn FnMut()) -> Result<(File, Undo, Name)> {
    let mut folder = None;
    for _ in 0..OPENINGS_MAX {
        let name = match missing {
            Missing::MakePending(_) if !is_there(path) => Name::Pending,
            _ => Name::Own,
        };
        let at: Arc<Path> = name.path(path).map_or_else(|| Arc::clone(path), Arc::from);
        let may_create = match missing {
            Missing::Refuse => false,
            Missing::Make | Missing::MakeInFolder => true,
            Missing::MakePending(_) => name == Name::Pending,
        };
        let (file, made) = match open(&at, libc::O_CLOEXEC, may_create) {
            Err(error) if is_about_existence(&error) && at.is_symlink() && !at.exists() => {
                let target = fs::read_link(&at).unwrap_or_default();
                let why = format!(
                    "it is a link to {}, which does not exist: create that file, or pass its path",
                    target.display()
                );
                return Err(Error::refused(&at, libc::ENOENT, why));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => match missing {
                // Create the folder. It never existed, or another process has just removed it.
                Missing::MakeInFolder | Missing::MakePending(_) => {
                    folder = make_folder(path)?.or(folder);
                    continue;
                }
                Missing::Refuse | Missing::Make => return Err(Error::system(path, "open", &error)),
            },
            // Another process has just created the file: open that file.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && at.exists() => continue,
            result => result.map_err(|error| Error::system(&at, "open", &error))?,
        };
        opened();
        if let Err(error) = lock::lock(&file, path) {
            // `remove_dir` fails if another process has put a file into the folder, so that file stays.
            drop(folder.map(fs::remove_dir));
            return Err(error);
        }
        if lost(&at, &file).is_some() {
            continue;
        }
        let length = file.metadata().map_err(|error| Error::system(path, "stat", &error))?.len();
        let is_new = made && length == 0;
        if let Missing::MakePending(is_left) = missing
            && !has_its_name(path, (&file, name, is_new), is_left)?
        {
            continue;
        }
        let length_before = if is_new { None } else { Some(length) };
        return Ok((file, Undo { length_before, mode_before: None, folder }, name));
    }
    drop(folder.map(fs::remove_dir));
    Err(Error::refused(
        path,
        libc::EBUSY,
        "other processes keep creating, replacing or removing this file; stop them, or use another path",
    ))
}

fn is_about_existence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
}

/// Creates the folder of `path` and makes the folder's name durable. Returns the folder, or `None` if the folder
/// existed.
fn make_folder(path: &Arc<Path>) -> Result<Option<PathBuf>> {
    let folder = folder_of(path);
    match fs::create_dir(folder) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        Err(error) => return Err(Error::system(path, "mkdir of its folder", &error)),
    }
    let named = File::open(folder_of(folder)).and_then(|above| above.sync_all());
    named.map_err(|error| Error::system(path, "fsync of its folder", &error))?;
    Ok(Some(std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned())))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens the file at `path`. If the file does not exist and `may_create` is true, creates a file that only its owner
/// may access. Returns the file and whether it is new.
pub(crate) fn open(path: &Arc<Path>, flags: libc::c_int, may_create: bool) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && may_create => {
            // `create_new` fails if the path is a dangling link, or if another process has just created the file.
            let file = options.create_new(true).mode(MODE).open(path)?;
            file.set_permissions(fs::Permissions::from_mode(MODE))?;
            Ok((file, true))
        }
        result => result.map(|file| (file, false)),
    }
}

/// What a file is used for. The use decides which files of other users `make_private` rejects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privacy {
    /// A file that is about to be written. Unless this process has just created the file, it must belong to this user.
    Fresh,
    /// A file with data to keep. The file may belong to another user, but `make_private` fails if other users would
    /// keep access.
    Existing,
}

/// Restricts access to the file to its owner. Returns the former permission bits; `None` if the bits did not change.
/// Call `make_private` for files only: the system decides who may access raw devices.
pub(crate) fn make_private(path: &Arc<Path>, file: &File, what: Privacy, is_new: bool) -> Result<Option<u32>> {
    let metadata = file.metadata().map_err(|error| Error::system(path, "stat", &error))?;
    let user = rustix::process::geteuid().as_raw();
    // The check skips a file that this process has just created: on network file systems that map root to nobody, even
    // this file belongs to another user.
    if what == Privacy::Fresh && !is_new && metadata.uid() != user {
        return Err(foreign(path, metadata.uid(), user));
    }
    let mode = metadata.mode() & MODE_BITS;
    if mode & OTHERS_BITS == 0 {
        return Ok(None);
    }
    match file.set_permissions(fs::Permissions::from_mode(MODE)) {
        Ok(()) => Ok(Some(mode)),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Err(foreign(path, metadata.uid(), user)),
        Err(error) => Err(Error::system(path, "chmod", &error)),
    }
}

fn foreign(path: &Arc<Path>, owner: u32, user: u32) -> Error {
    let why = format!(
        "the file belongs to user {owner}, who could read what user {user} keeps in it; choose another path, or remove \
         the file if nothing in it is needed"
    );
    Error::refused(path, libc::EPERM, why)
}

/// Reserves `bytes` for the file on its file system, so that later writes do not fail for lack of space. If the file
/// system cannot reserve space, only makes the file `bytes` long.
///
/// Does not fill the file with zeros, because this would take hours and wear the disk. Without zeros, only the first
/// write to each place is slower.
pub(crate) fn reserve(path: &Arc<Path>, file: &File, bytes: u64) -> Result<()> {
    if i64::try_from(bytes).is_err() {
        return Err(Error::Invalid(format!(
            "{bytes} bytes are more than a file can have; pass a smaller size= for {}",
            path.display()
        )));
    }
    // `free_bytes` must run before `fallocate`, which may leave a part of the space allocated if it fails.
    let free = free_bytes(file);
    let metadata = file.metadata().map_err(|error| Error::system(path, "stat", &error))?;
    let length_before = metadata.len();
    // `there` is the number of bytes that the file has already. Some file systems do not report the blocks of a file,
    // so the length of the file counts too.
    let there = length_before.max(metadata.blocks() * 512);
    if free.is_some_and(|free| bytes.saturating_sub(there) > free) {
        // `fallocate` may take all free space before it fails, and other writers would find the disk full.
        return Err(no_room(path, bytes.saturating_sub(there), free));
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Ok(()) => Ok(()),
        // Some network and FUSE file systems cannot reserve space. If the file is long enough, the file stays as it is.
        Err(Errno::OPNOTSUPP) if length_before >= bytes => Ok(()),
        Err(Errno::OPNOTSUPP) => {
            let grown = file.set_len(bytes);
            grown.map_err(|error| Error::system(path, &format!("growing it to {bytes} bytes"), &error))
        }
        Err(Errno::NOSPC) => {
            // Releases the blocks that the failed `fallocate` reserved.
            drop(file.set_len(length_before));
            Err(no_room(path, bytes.saturating_sub(there), free))
        }
        Err(errno) => Err(Error::system(path, &format!("reserving {bytes} bytes"), &errno.into())),
    }
}

fn no_room(path: &Arc<Path>, bytes: u64, free: Option<u64>) -> Error {
    let free = free.map_or_else(String::new, |free| format!(": only {free} bytes are available"));
    Error::refused(
        path,
        libc::ENOSPC,
        format!("its file system has no space for {bytes} more bytes{free}; delete files there, or use another path"),
    )
}

/// Returns the bytes that an unprivileged user may still write to the file's file system; `None` if the system call
/// fails.
fn free_bytes(file: &File) -> Option<u64> {
    let answer = fstatvfs(file).ok()?;
    answer.f_bavail.checked_mul(answer.f_frsize)
}

/// Makes the file survive a power loss. If `is_new`, makes the file's name survive too. Later flushes make only the
/// file's data durable, not its name.
pub(crate) fn settle(path: &Arc<Path>, file: &File, is_new: bool) -> Result<()> {
    file.sync_all().map_err(|error| Error::system(path, "fsync", &error))?;
    if is_new { settle_name(path, path) } else { Ok(()) }
}

/// Makes the file name `place` survive a power loss: flushes the folder of `place`.
pub(crate) fn settle_name(path: &Arc<Path>, place: &Path) -> Result<()> {
    let folder = File::open(folder_of(place)).and_then(|folder| folder.sync_all());
    folder.map_err(|error| Error::system(path, "fsync of its folder", &error))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Lost;
    use std::os::unix::fs::FileExt;

    pub(crate) struct Folder(pub(crate) PathBuf);

    impl Folder {
        pub(crate) fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("memascend-file-{name}-{}", std::process::id()));
            fs::create_dir(&folder).unwrap_or_else(|error| panic!("{error}"));
            Self(folder)
        }

        pub(crate) fn path(&self) -> Arc<Path> {
            Arc::from(self.0.join("file"))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    fn claimed(path: &Arc<Path>, opened: &mut dyn FnMut()) -> (File, Undo) {
        let (file, undo, _) = claim(path, Missing::Make, opened).unwrap_or_else(|error| panic!("{error}"));
        (file, undo)
    }

    #[test]
    fn claim_that_loses_the_lock_race_keeps_the_winners_file() {
        let folder = Folder::new("late");
        let path = folder.path();
        let mut winner = None;
        let late = claim(&path, Missing::Make, &mut || {
            let (file, undo) = claimed(&path, &mut || {});
            assert!(!undo.is_new(), "the late process made the file");
            drop(file.write_all_at(b"theirs", 0));
            winner = Some(file);
        });
        assert!(matches!(&late, Err(Error::Refused { errno: Some(libc::EBUSY), .. })), "{late:?}");
        assert_eq!(fs::read(&path).unwrap_or_default(), b"theirs");
        assert!(winner.is_some_and(|file| lost(&path, &file).is_none()), "the winner's file keeps its name");
    }

    #[test]
    fn undo_keeps_a_file_that_another_process_used_before_the_lock() {
        let folder = Folder::new("used");
        let path = folder.path();
        let (file, undo) = claimed(&path, &mut || {
            let (other, _) = claimed(&path, &mut || {});
            drop(other.write_all_at(b"theirs", 0));
            lock::unlock(&other);
        });
        assert!(!undo.is_new());
        drop(file.set_len(4096));
        undo.restore(&path, &file);
        assert_eq!(fs::read(&path).unwrap_or_default(), b"theirs", "undo keeps the content found under the lock");
    }

    #[test]
    fn claim_retries_when_its_file_lost_the_name_before_the_lock() {
        let folder = Folder::new("name");
        let path = folder.path();
        // In turns 1 and 2 another process removes the file before `claim` locks it; in turn 2 it also creates another
        // file at the path.
        let mut turn = 0;
        let (file, undo) = claimed(&path, &mut || {
            turn += 1;
            if turn <= 2 {
                drop(fs::remove_file(&path));
            }
            if turn == 2 {
                drop(fs::write(&path, b"theirs"));
            }
        });
        assert_eq!(turn, 3);
        assert!(lost(&path, &file).is_none() && !undo.is_new());
        drop(fs::rename(&path, folder.0.join("else")));
        assert_eq!(lost(&path, &file), Some(Lost::Moved));
        drop(fs::write(&path, b"new"));
        assert_eq!(lost(&path, &file), Some(Lost::Replaced));
        undo.restore(&path, &file);
        assert_eq!(fs::read(&path).unwrap_or_default(), b"new", "another process's file has the name");
        drop((fs::remove_file(&path), fs::remove_file(folder.0.join("else"))));
        assert_eq!(lost(&path, &file), Some(Lost::Deleted));
    }

    /// Counts how often `of` opens `folder`.
    fn openings(folder: &Path, of: impl FnOnce()) -> usize {
        use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
        use std::io::Read;
        let events = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap_or_else(|error| panic!("{error}"));
        add_watch(&events, folder, WatchFlags::OPEN).unwrap_or_else(|error| panic!("{error}"));
        of();
        let mut bytes = [0; 4096];
        let read = File::from(events).read(&mut bytes).unwrap_or(0);
        // Each event has 16 bytes: events on the folder itself have no name.
        read / 16
    }

    #[test]
    fn settle_syncs_the_folder_only_of_a_new_file() {
        let folder = Folder::new("synced");
        let path: Arc<Path> = Arc::from(folder.0.join("file"));
        let (file, ..) = claim(&path, Missing::Make, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        let settled = |is_new| assert!(settle(&path, &file, is_new).is_ok());
        assert_eq!(openings(&folder.0, || settled(true)), 1, "a new name is flushed too");
        assert_eq!(openings(&folder.0, || settled(false)), 0);
        let in_new = Arc::from(folder.0.join("new/file"));
        let made = || assert!(make_folder(&in_new).is_ok_and(|made| made.is_some()));
        assert_eq!(openings(&folder.0, made), 1, "the parent of the new folder is flushed");
    }

    #[test]
    fn undo_removes_the_new_folder_unless_it_has_other_files() {
        let folder = Folder::new("folder");
        let path: Arc<Path> = Arc::from(folder.0.join("new/file"));
        assert!(claim(&path, Missing::Make, &mut || {}).is_err());
        let made = |path| {
            let claimed = claim(path, Missing::MakeInFolder, &mut || {});
            claimed.map_or_else(|error| panic!("{error}"), |(file, undo, _)| (file, undo))
        };
        let (file, undo) = made(&path);
        assert!(undo.is_new());
        undo.restore(&path, &file);
        assert!(!folder.0.join("new").exists());
        let (file, undo) = made(&path);
        drop(fs::write(folder.0.join("new/other"), b"theirs"));
        undo.restore(&path, &file);
        assert!(!path.exists() && folder.0.join("new/other").exists(), "the other file stays");
    }
}
