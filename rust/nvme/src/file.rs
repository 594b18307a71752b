//! Creates files: private, fully reserved, and unchanged when that fails.

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
    Error, IsLeft, Result, lock,
    pending::{Name, has_its_name, is_there, lost},
};

/// How often a file is opened anew because its name went to another one meanwhile: each time somebody else's whole
/// attempt came in between.
const OPENINGS_MAX: usize = 64;

/// Reading and writing for the owner, nothing for anybody else.
const MODE: u32 = 0o600;
/// Bits of a mode that are permissions of some kind.
const MODE_BITS: u32 = 0o7777;
/// Those of others than the owner.
const OTHERS_BITS: u32 = 0o077;

/// How a file is put back that was made, grown or made private.
#[derive(Debug)]
pub(crate) struct Undo {
    /// Its length before; `None` where there was no file.
    length_before: Option<u64>,
    /// Its mode before, where that was changed.
    pub(crate) mode_before: Option<u32>,
    /// The folder that was made for it.
    folder: Option<PathBuf>,
}

/// What to do where there is no file.
#[derive(Debug, Clone, Copy)]
pub enum Missing {
    /// Refuse.
    Refuse,
    /// Make it.
    Make,
    /// Make it, and before it its folder, where that is missing, too.
    MakeInFolder,
    /// The same under its pending name, which it has until [`Volume::take_name`](crate::Volume::take_name).
    MakePending(IsLeft),
}

impl Undo {
    pub(crate) fn is_new(&self) -> bool {
        self.length_before.is_none()
    }

    /// Whether it would leave nothing of anybody's.
    pub(crate) fn was_empty(&self) -> bool {
        self.length_before.unwrap_or(0) == 0
    }

    /// Only while the file is locked: without the lock, it may be somebody else's already.
    pub(crate) fn carry_out(self, path: &Path, file: &File) {
        // What cannot be undone was a failure already, which is what the caller hears of.
        match self.length_before {
            None if lost(path, file).is_none() => {
                drop(fs::remove_file(path));
                // Refused where somebody put something there.
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

/// Opens and locks the file at `path`, or makes one there if `may_create`, and says how that is undone.
///
/// Between opening and locking, others may open, use, remove and replace what is there, so all is looked at again under
/// the lock: the file counts as made here only if it is still empty, and as the right one only if the path still names
/// it. `opened` is called in between.
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
                let why =
                    format!("it is a link to {}, which is not there: make that, or name it itself", target.display());
                return Err(Error::refused(&at, libc::ENOENT, why));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => match missing {
                // Also where another has just removed the one that it made.
                Missing::MakeInFolder | Missing::MakePending(_) => {
                    folder = make_folder(path)?.or(folder);
                    continue;
                }
                Missing::Refuse | Missing::Make => return Err(Error::system(path, "open", &error)),
            },
            // Made by another meanwhile, and neither of us is the first to look at it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && at.exists() => continue,
            result => result.map_err(|error| Error::system(&at, "open", &error))?,
        };
        opened();
        if let Err(error) = lock::lock(&file, path) {
            // Not empty where the file is somebody else's now.
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
        "others keep making and removing this file; wait for them, or use another path",
    ))
}

fn is_about_existence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
}

/// Makes the folder of `path` and makes that last; the folder, where there was none.
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

/// Opens what is there, or makes a new file that only its owner may read. Says whether it is new.
pub(crate) fn open(path: &Arc<Path>, flags: libc::c_int, may_create: bool) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && may_create => {
            // Not through a dangling link, and not over what another process made meanwhile.
            let file = options.create_new(true).mode(MODE).open(path)?;
            file.set_permissions(fs::Permissions::from_mode(MODE))?;
            Ok((file, true))
        }
        result => result.map(|file| (file, false)),
    }
}

/// What is to be private.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privacy {
    /// What is about to be written: the file has to be this user's.
    Fresh,
    /// What is there already, whoever's it is.
    There,
}

/// Lets nobody but its owner open the file, whatever it was and whichever link led to it; its mode before, where that was
/// another. Raw devices are the system's.
pub(crate) fn make_private(path: &Arc<Path>, file: &File, what: Privacy, is_new: bool) -> Result<Option<u32>> {
    let metadata = file.metadata().map_err(|error| Error::system(path, "stat", &error))?;
    let user = rustix::process::geteuid().as_raw();
    // Where root is nobody (some network file systems), even a file of one's own making is another's.
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

/// Reserves `bytes` for the file on its file system, so that no write in the middle of a run finds it full.
///
/// By `fallocate` alone: writing zeros would cost hours and wear, and reserved extents slow only their first pass.
pub(crate) fn reserve(path: &Arc<Path>, file: &File, bytes: u64) -> Result<()> {
    if i64::try_from(bytes).is_err() {
        return Err(Error::Invalid(format!("{bytes} bytes are more than a file can have: {}", path.display())));
    }
    // Before anything of ours is there: a file system that finds no room may leave the part that it had.
    let free = free_bytes(file);
    let metadata = file.metadata().map_err(|error| Error::system(path, "stat", &error))?;
    let length_before = metadata.len();
    // Its length too: not every file system says what blocks a file has.
    let there = length_before.max(metadata.blocks() * 512);
    if free.is_some_and(|free| bytes.saturating_sub(there) > free) {
        // Trying would take all that is free, and whoever else writes there would meet a full disk meanwhile.
        return Err(no_room(path, bytes.saturating_sub(there), free));
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Ok(()) => Ok(()),
        // Some network and FUSE ones cannot reserve: as long as needed, since there is room now.
        Err(Errno::OPNOTSUPP) if length_before >= bytes => Ok(()),
        Err(Errno::OPNOTSUPP) => {
            let grown = file.set_len(bytes);
            grown.map_err(|error| Error::system(path, &format!("growing it to {bytes} bytes"), &error))
        }
        Err(Errno::NOSPC) => {
            // What was reserved in vain goes with what it was reserved for.
            drop(file.set_len(length_before));
            Err(no_room(path, bytes.saturating_sub(there), free))
        }
        Err(errno) => Err(Error::system(path, &format!("reserving {bytes} bytes"), &errno.into())),
    }
}

fn no_room(path: &Arc<Path>, bytes: u64, free: Option<u64>) -> Error {
    let free = free.map_or_else(String::new, |free| format!(", and {free} are free"));
    Error::refused(
        path,
        libc::ENOSPC,
        format!("its file system has no space for {bytes} more bytes{free}; free some, or choose another place"),
    )
}

/// What an unprivileged user may still write to the file system of a file, whatever name that has.
fn free_bytes(file: &File) -> Option<u64> {
    let answer = fstatvfs(file).ok()?;
    answer.f_bavail.checked_mul(answer.f_frsize)
}

/// Makes the file and its name survive a power loss, so that a later flush of its data is worth something.
pub(crate) fn settle(path: &Arc<Path>, file: &File, is_new: bool) -> Result<()> {
    file.sync_all().map_err(|error| Error::system(path, "fsync", &error))?;
    if is_new { settle_name(path, path) } else { Ok(()) }
}

/// Makes the name `place` survive a power loss.
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
    fn who_made_a_file_and_comes_too_late_for_its_lock_leaves_it() {
        let folder = Folder::new("late");
        let path = folder.path();
        let mut winner = None;
        let late = claim(&path, Missing::Make, &mut || {
            let (file, undo) = claimed(&path, &mut || {});
            assert!(!undo.is_new(), "the other one made it");
            drop(file.write_all_at(b"theirs", 0));
            winner = Some(file);
        });
        assert!(matches!(&late, Err(Error::Refused { errno: Some(libc::EBUSY), .. })), "{late:?}");
        assert_eq!(fs::read(&path).unwrap_or_default(), b"theirs");
        assert!(winner.is_some_and(|file| lost(&path, &file).is_none()), "it still has its name");
    }

    #[test]
    fn a_file_that_was_used_in_the_meantime_is_not_ones_own_to_remove() {
        let folder = Folder::new("used");
        let path = folder.path();
        let (file, undo) = claimed(&path, &mut || {
            let (other, _) = claimed(&path, &mut || {});
            drop(other.write_all_at(b"theirs", 0));
            lock::unlock(&other);
        });
        assert!(!undo.is_new());
        drop(file.set_len(4096));
        undo.carry_out(&path, &file);
        assert_eq!(fs::read(&path).unwrap_or_default(), b"theirs", "as it was found under the lock");
    }

    #[test]
    fn a_file_that_lost_its_name_before_it_was_locked_is_let_go() {
        let folder = Folder::new("name");
        let path = folder.path();
        // Another had it, fails, and takes away what it had made; then again, and something else comes in its place.
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
        undo.carry_out(&path, &file);
        assert_eq!(fs::read(&path).unwrap_or_default(), b"new", "what has the name now is not ours");
        drop((fs::remove_file(&path), fs::remove_file(folder.0.join("else"))));
        assert_eq!(lost(&path, &file), Some(Lost::Deleted));
    }

    /// How often a folder is opened by something.
    fn openings(folder: &Path, of: impl FnOnce()) -> usize {
        use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
        use std::io::Read;
        let events = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap_or_else(|error| panic!("{error}"));
        add_watch(&events, folder, WatchFlags::OPEN).unwrap_or_else(|error| panic!("{error}"));
        of();
        let mut bytes = [0; 4096];
        let read = File::from(events).read(&mut bytes).unwrap_or(0);
        // Events without a name are the folder's own, of 16 bytes each.
        read / 16
    }

    #[test]
    fn the_folder_of_a_new_file_is_synced_and_that_of_another_is_not() {
        let folder = Folder::new("synced");
        let path: Arc<Path> = Arc::from(folder.0.join("file"));
        let (file, ..) = claim(&path, Missing::Make, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        let settled = |is_new| assert!(settle(&path, &file, is_new).is_ok());
        assert_eq!(openings(&folder.0, || settled(true)), 1, "its name has to last, too");
        assert_eq!(openings(&folder.0, || settled(false)), 0);
        let in_new = Arc::from(folder.0.join("new/file"));
        let made = || assert!(make_folder(&in_new).is_ok_and(|made| made.is_some()));
        assert_eq!(openings(&folder.0, made), 1, "that of the folder that is made");
    }

    #[test]
    fn what_was_made_goes_with_the_folder_that_was_made_for_it() {
        let folder = Folder::new("folder");
        let path: Arc<Path> = Arc::from(folder.0.join("new/file"));
        assert!(claim(&path, Missing::Make, &mut || {}).is_err());
        let made = |path| {
            let claimed = claim(path, Missing::MakeInFolder, &mut || {});
            claimed.map_or_else(|error| panic!("{error}"), |(file, undo, _)| (file, undo))
        };
        let (file, undo) = made(&path);
        assert!(undo.is_new());
        undo.carry_out(&path, &file);
        assert!(!folder.0.join("new").exists());
        let (file, undo) = made(&path);
        drop(fs::write(folder.0.join("new/other"), b"theirs"));
        undo.carry_out(&path, &file);
        assert!(!path.exists() && folder.0.join("new/other").exists(), "what others put there stays");
    }
}
