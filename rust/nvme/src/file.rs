//! Files: created private, reserved whole, and left as they were when that fails.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{OpenOptionsExt, PermissionsExt},
    },
    path::Path,
    sync::Arc,
};

use crate::{Error, Result};

/// A file that was made or grown, and is put back unless it is kept.
#[derive(Debug)]
pub(crate) struct Undo {
    path: Arc<Path>,
    file: Option<File>,
    /// Its length before; `None` where there was no file.
    length_before: Option<u64>,
    kept: bool,
}

impl Undo {
    pub(crate) fn is_new(&self) -> bool {
        self.length_before.is_none()
    }

    /// Everything went well.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        match (self.length_before, &self.file) {
            // What cannot be undone was a failure already, which is what the caller hears of.
            (None, _) => drop(fs::remove_file(&self.path)),
            (Some(length), Some(file)) => drop(file.set_len(length)),
            (Some(_), None) => {}
        }
    }
}

/// Opens what is there, or makes a new file that only its owner may read. Says whether it is new.
pub(crate) fn open(path: &Arc<Path>, flags: libc::c_int, may_create: bool) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && may_create => {
            // Not through a dangling link, and not over what another process made meanwhile.
            let file = options.create_new(true).mode(0o600).open(path)?;
            file.set_permissions(fs::Permissions::from_mode(0o600))?;
            Ok((file, true))
        }
        result => result.map(|file| (file, false)),
    }
}

/// What undoes the making or growing of `file`.
pub(crate) fn undo(path: &Arc<Path>, file: &File, is_new: bool) -> Result<Undo> {
    let failed = |error| Error::system(path, "open", &error);
    let length_before = if is_new { None } else { Some(file.metadata().map_err(failed)?.len()) };
    Ok(Undo { path: Arc::clone(path), file: Some(file.try_clone().map_err(failed)?), length_before, kept: false })
}

/// Reserves `bytes` for the file on its file system, so that no write in the middle of a run finds it full.
///
/// By `fallocate` alone: writing zeros would cost hours and wear, and reserved extents slow only their first pass.
pub(crate) fn reserve(path: &Arc<Path>, file: &File, bytes: u64) -> Result<()> {
    let length = i64::try_from(bytes)
        .map_err(|_| Error::Invalid(format!("{bytes} bytes are more than a file can have: {}", path.display())))?;
    loop {
        // SAFETY: fallocate takes an open descriptor and no memory.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP) => return reserve_without_support(path, file, bytes),
            Some(libc::ENOSPC) => return Err(no_room(path, bytes)),
            _ => return Err(Error::system(path, &format!("reserving {bytes} bytes"), &error)),
        }
    }
}

/// A file system that cannot reserve (some network and FUSE ones): as long as needed, if there is room now.
fn reserve_without_support(path: &Arc<Path>, file: &File, bytes: u64) -> Result<()> {
    let length = file.metadata().map_err(|error| Error::system(path, "stat", &error))?.len();
    if free_bytes(path).is_some_and(|free| bytes.saturating_sub(length) > free) {
        return Err(no_room(path, bytes));
    }
    if length >= bytes {
        return Ok(());
    }
    file.set_len(bytes).map_err(|error| Error::system(path, &format!("growing it to {bytes} bytes"), &error))
}

fn no_room(path: &Arc<Path>, bytes: u64) -> Error {
    let free = free_bytes(path).map_or_else(String::new, |free| format!(", and {free} are free"));
    Error::refused(
        path,
        libc::ENOSPC,
        format!("its file system has no room for {bytes} bytes{free}; make some, or choose a smaller size"),
    )
}

/// What an unprivileged user may still write to the file system of `path`.
fn free_bytes(path: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a path that ends and room for the answer.
    if unsafe { libc::statvfs(name.as_ptr(), answer.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled by the call; every bit pattern is valid.
    let answer = unsafe { answer.assume_init() };
    answer.f_bavail.checked_mul(answer.f_frsize)
}

/// Makes the file and its name survive a power loss, so that a later flush of its data is worth something.
pub(crate) fn settle(path: &Arc<Path>, file: &File, is_new: bool) -> Result<()> {
    file.sync_all().map_err(|error| Error::system(path, "fsync", &error))?;
    if is_new {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| Error::system(path, "fsync of its folder", &error))?;
    }
    Ok(())
}
