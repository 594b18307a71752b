//! Restricts files of training state to their owner.

use std::{
    fs::{File, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    sync::Arc,
};

use crate::{Error, Result};

/// Reading and writing for the owner, nothing for anybody else.
pub(crate) const MODE: u32 = 0o600;
/// Bits of a mode that are permissions of some kind.
const MODE_BITS: u32 = 0o7777;
/// Those of others than the owner.
const OTHERS_BITS: u32 = 0o077;

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
    match file.set_permissions(Permissions::from_mode(MODE)) {
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
