//! Keeps a new file under a pending name until it is filled, then renames it. The next process replaces a pending file
//! that a killed process left.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};

use crate::{Error, Result};

/// The pending name of a file is the file's own name with this suffix.
pub const PENDING_SUFFIX: &str = ".new";

/// Checks whether the file at a pending name was left by a killed process before it was filled. `Ok` means that the
/// file may be removed; `Err` says why the file must stay.
pub type IsAbandoned = fn(&Path) -> std::result::Result<(), String>;

/// The name under which an open file is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    /// The path that the caller gave.
    Own,
    /// The path with [`PENDING_SUFFIX`], until the file is filled.
    Pending,
    /// No name: the caller has removed, or will soon remove, the file's name.
    Removed,
}

impl Name {
    /// Returns the path of a file with this name; `own` is the path that the caller gave. Returns `None` for a removed
    /// name.
    pub(crate) fn path(self, own: &Path) -> Option<PathBuf> {
        match self {
            Self::Own => Some(own.to_owned()),
            Self::Pending => {
                let mut name = own.as_os_str().to_owned();
                name.push(PENDING_SUFFIX);
                Some(name.into())
            }
            Self::Removed => None,
        }
    }
}

/// How an open file lost its name or its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// The file has no name any more.
    Deleted,
    /// The path names no file; the open file still has another name.
    Moved,
    /// The path names another file.
    Replaced,
    /// The file has become shorter since the volume opened it.
    Truncated,
}

/// Returns why `path` no longer names the open file; `None` if `path` still names the file, or if a lookup fails with
/// an error other than "not found".
pub(crate) fn lost(path: &Path, file: &File) -> Option<Lost> {
    let ours = file.metadata().ok()?;
    match fs::metadata(path) {
        Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => None,
        Ok(_) => Some(Lost::Replaced),
        Err(error) if error.kind() != io::ErrorKind::NotFound => None,
        Err(_) if ours.nlink() == 0 => Some(Lost::Deleted),
        Err(_) => Some(Lost::Moved),
    }
}

/// Returns true if `claim` may continue with this locked file, and false if `claim` must open the file again. Removes a
/// pending file that no process needs. Fails if `is_left` says that the pending file must stay.
pub(crate) fn has_its_name(
    path: &Path,
    (file, name, is_new): (&File, Name, bool),
    is_left: IsAbandoned,
) -> Result<bool> {
    let Some(pending) = Name::Pending.path(path) else { return Ok(true) };
    let remove = || fs::remove_file(&pending).map_err(|error| Error::system(&Arc::from(&*pending), "unlink", &error));
    if name == Name::Own {
        // A process whose unlink failed, or that was killed between link and unlink, left both names: remove the
        // pending name.
        if file.metadata().is_ok_and(|ours| ours.nlink() > 1) && is_at(&pending, file) {
            remove()?;
        }
        return Ok(true);
    }
    if is_there(path) {
        // Another process has just renamed its filled file to `path`, or created a file there. Remove this process's
        // new file.
        if is_new {
            remove()?;
        }
        return Ok(false);
    }
    if is_new {
        return Ok(true);
    }
    if let Err(why) = is_left(&pending) {
        let why = format!(
            "a new store has this name until its first commit, but the file at this name is not an \
             unfinished store ({why}); nothing was changed: move the file away, or choose another path for the store"
        );
        return Err(Error::refused(&Arc::from(&*pending), libc::EEXIST, why));
    }
    // Remove the file's name and do not truncate the file. The file may belong to another user, or have a second name.
    remove().map(|()| false)
}

/// True unless the system reports that `path` does not exist. A dangling link counts as existing.
pub(crate) fn is_there(path: &Path) -> bool {
    !matches!(fs::symlink_metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// True if `path` names the open file; false if `path` names another file, or if a lookup fails.
fn is_at(path: &Path, file: &File) -> bool {
    let same = |ours: fs::Metadata, there: fs::Metadata| (there.dev(), there.ino()) == (ours.dev(), ours.ino());
    file.metadata().is_ok_and(|ours| fs::metadata(path).is_ok_and(|there| same(ours, there)))
}

/// Renames a file from the pending name of `place` to `place`. `path` is `place` as the caller spelled it, for error
/// messages.
pub(crate) fn take_name(path: &Arc<Path>, place: &Path, file: &File) -> Result<()> {
    let Some(pending) = Name::Pending.path(place) else { return Ok(()) };
    if lost(&pending, file).is_some() {
        let why = format!(
            "the new store was being written to {}, but that file was deleted, moved or replaced; start the run again",
            pending.display()
        );
        return Err(Error::refused(path, libc::ENOENT, why));
    }
    match rename_new(&pending, place) {
        Ok(()) => Ok(()),
        // Some network file systems repeat a rename and report the failure of the second rename.
        Err(_) if is_at(place, file) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let why = "another program created a file here while the new store was being written; the file was not \
                       changed: move it away, or choose another path";
            Err(Error::refused(path, libc::EEXIST, why))
        }
        Err(error) => Err(Error::system(path, "rename", &error)),
    }
}

/// Renames a file, and fails if `to` exists.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system does not support `NOREPLACE`, or the kernel or a sandbox does not allow the call.
        Err(Errno::INVAL | Errno::NOSYS | Errno::PERM) => link_new(from, to),
        result => Ok(result?),
    }
}

/// Renames a file by link and unlink, and fails if `to` exists. On a file system without hard links, `link_new` first
/// checks that `to` does not exist, and then renames. If another process creates `to` in between, the rename overwrites
/// that file.
fn link_new(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Ok(()) => {
            // If the unlink fails, the next `claim` with `Missing::MakePending` removes the pending name.
            drop(fs::remove_file(from));
            Ok(())
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS)) => {
            if is_there(to) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            fs::rename(from, to)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Missing,
        file::{Undo, claim, tests::Folder},
    };
    use std::os::unix::fs::FileExt;

    /// The tests' `is_left` treats files that begin with this text as unfilled.
    const LEFT: &str = "left";

    /// Claims the file at `path`, or creates a file under the pending name.
    fn pending(path: &Arc<Path>, opened: &mut dyn FnMut()) -> Result<(File, Undo, Name)> {
        let is_left = |at: &Path| match fs::read_to_string(at) {
            Ok(text) if text.is_empty() || text.starts_with(LEFT) => Ok(()),
            _ => Err("it is somebody's".to_owned()),
        };
        claim(path, Missing::MakePending(is_left), opened)
    }

    fn names(folder: &Folder) -> Vec<String> {
        let all = fs::read_dir(&folder.0).unwrap_or_else(|error| panic!("{error}"));
        let mut names: Vec<String> =
            all.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn pending_takes_over_only_an_unlocked_leftover_file() {
        let folder = Folder::new("pending");
        let path = folder.path();
        let (alive, undo, name) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        assert!(undo.is_new() && name == Name::Pending);
        assert_eq!(names(&folder), ["file.new"]);
        let refused = pending(&path, &mut || {}).map(drop);
        let named = |error: &Error| error.to_string().contains(&format!("pid {}", std::process::id()));
        assert!(refused.as_ref().is_err_and(named), "{refused:?}");
        assert!(refused.is_err_and(|error| error.to_string().starts_with(&*path.to_string_lossy())), "its own name");
        drop(alive.write_all_at(LEFT.as_bytes(), 0));
        drop(alive);
        // A second name of the pending file must keep the content.
        drop(fs::hard_link(folder.0.join("file.new"), folder.0.join("copy")));
        let (file, undo, name) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        assert!(undo.is_new() && name == Name::Pending && file.metadata().is_ok_and(|file| file.len() == 0));
        assert_eq!(fs::read_to_string(folder.0.join("copy")).unwrap_or_default(), LEFT);
        undo.restore(&folder.0.join("file.new"), &file);
        assert_eq!(names(&folder), ["copy"]);
    }

    #[test]
    fn pending_rejects_and_keeps_a_foreign_file_or_link() {
        let folder = Folder::new("foreign");
        let path = folder.path();
        drop(fs::write(folder.0.join("file.new"), "theirs"));
        let refused = pending(&path, &mut || {}).map(drop);
        let named = |error: &Error| error.to_string().contains("it is somebody's");
        assert!(refused.as_ref().is_err_and(named), "{refused:?}");
        assert_eq!(fs::read_to_string(folder.0.join("file.new")).unwrap_or_default(), "theirs");
        drop(fs::remove_file(folder.0.join("file.new")));
        // A dangling link keeps its name, and no file is created at its target.
        for link in ["file", "file.new"] {
            drop(std::os::unix::fs::symlink(folder.0.join("nowhere"), folder.0.join(link)));
            let refused = pending(&path, &mut || {}).map(drop);
            assert!(refused.as_ref().is_err_and(|error| error.to_string().contains("it is a link to")), "{refused:?}");
            assert_eq!(names(&folder), [link]);
            drop(fs::remove_file(folder.0.join(link)));
        }
    }

    #[test]
    fn pending_that_loses_the_race_for_a_name_leaves_the_winners_file() {
        let folder = Folder::new("race");
        let path = folder.path();
        // The callback runs when the call below has opened the pending file, and has not locked it yet. The winner then
        // replaces that file by a pending file of its own, fills its file and renames it.
        let mut winner = None;
        let late = pending(&path, &mut || {
            if winner.is_none() {
                let (file, _, _) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
                drop(file.write_all_at(b"filled", 0));
                take_name(&path, &path, &file).unwrap_or_else(|error| panic!("{error}"));
                winner = Some(file);
            }
        });
        assert!(matches!(&late, Err(Error::Refused { errno: Some(libc::EBUSY), .. })), "{late:?}");
        drop(winner);
        assert_eq!(names(&folder), ["file"]);
        let (file, undo, name) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        assert!(name == Name::Own && !undo.is_new() && lost(&path, &file).is_none());
        // If another file takes the path while a process creates a pending file, the process removes the pending file.
        drop((file, fs::rename(&path, folder.0.join("elsewhere"))));
        let mut turn = 0;
        let (_file, _, name) = pending(&path, &mut || {
            turn += 1;
            if turn == 1 {
                drop(fs::rename(folder.0.join("elsewhere"), &path));
            }
        })
        .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((name, turn, names(&folder)), (Name::Own, 2, vec!["file".to_owned()]));
    }

    #[test]
    fn take_name_rejects_a_path_that_another_file_has_taken() {
        let folder = Folder::new("taken");
        let path = folder.path();
        let (file, undo, _) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        drop(fs::write(&path, "theirs"));
        let refused = take_name(&path, &path, &file);
        assert!(matches!(&refused, Err(Error::Refused { errno: Some(libc::EEXIST), .. })), "{refused:?}");
        let linked = link_new(&folder.0.join("file.new"), &path);
        assert!(linked.is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists));
        assert_eq!(fs::read_to_string(&path).unwrap_or_default(), "theirs");
        undo.restore(&folder.0.join("file.new"), &file);
        assert_eq!(names(&folder), ["file"]);
        // A file that lost its pending name is not renamed.
        drop(fs::remove_file(&path));
        let (file, _, _) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        drop(fs::rename(folder.0.join("file.new"), folder.0.join("elsewhere")));
        drop(fs::write(folder.0.join("file.new"), "theirs"));
        let refused = take_name(&path, &path, &file);
        assert!(refused.is_err_and(|error| error.to_string().contains("was deleted, moved or replaced")));
        assert_eq!(names(&folder), ["elsewhere", "file.new"]);
    }

    #[test]
    fn link_new_takes_the_name_by_a_link_and_removes_the_pending_name() {
        let folder = Folder::new("link");
        let path = folder.path();
        let (file, _, _) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        assert!(link_new(&folder.0.join("file.new"), &path).is_ok());
        assert_eq!((names(&folder), lost(&path, &file)), (vec!["file".to_owned()], None));
        drop(file);
        // Creates the second name that a process leaves if it is killed between link and unlink.
        drop(fs::hard_link(&path, folder.0.join("file.new")));
        let (_file, undo, name) = pending(&path, &mut || {}).unwrap_or_else(|error| panic!("{error}"));
        assert!(name == Name::Own && !undo.is_new());
        assert_eq!(names(&folder), ["file"]);
    }
}
