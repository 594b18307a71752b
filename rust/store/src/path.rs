//! What lies at a path, before anything is opened or changed.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    Error, Result,
    label::{self, Found, Label, VERSION},
    layout::PAGE_BYTES,
};

/// The file that a store is in a folder.
const FILE_NAME: &str = "memascend.store";
/// How much of either end must be blank where there is no label.
const EDGE_BYTES: u64 = 1 << 20;
/// File systems in memory: `statfs` says so.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// What lies at the paths of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum There {
    /// Nothing, or devices on which nothing is.
    Nothing,
    /// A store of ours; the label of the first device.
    Store(Label),
    /// A store of ours that cannot be opened, and why.
    Unusable(String),
}

/// The file or device that a path means.
pub(crate) fn resolve(path: &Path) -> PathBuf {
    if names_folder(path) || path.is_dir() { path.join(FILE_NAME) } else { path.to_owned() }
}

/// Whether a path means a folder, whatever is there: "runs/first/".
pub(crate) fn names_folder(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

/// Looks at every path. Foreign, swapped and missing devices are refused by name.
pub(crate) fn look(paths: &[PathBuf]) -> Result<There> {
    if paths.is_empty() {
        return Err(Error::Invalid("a store needs at least one path".into()));
    }
    let mut found = Vec::with_capacity(paths.len());
    for path in paths {
        found.push(look_at(path)?);
    }
    if found.iter().all(|found| *found == Found::Blank) {
        return Ok(There::Nothing);
    }
    let mut first = None;
    for (index, (path, found)) in (0_u32..).zip(paths.iter().zip(&found)) {
        let label = match found {
            Found::Label(label) => label,
            Found::Version(version) => {
                return Ok(There::Unusable(format!(
                    "{}: the store's format has version {version}, and this memascend knows version {VERSION}; use the \
                     memascend that wrote it",
                    path.display()
                )));
            }
            Found::Damaged(why) => {
                return Ok(There::Unusable(format!("{}: the label is damaged: {why}", path.display())));
            }
            Found::Blank => return refused(path, "the store's other devices are there, and this one is blank"),
            Found::Foreign => return refused(path, FOREIGN),
        };
        let of = first.get_or_insert(*label);
        if label.uuid != of.uuid {
            return refused(path, "it belongs to another store than the first device");
        }
        if label.devices.count as usize != paths.len() {
            let why = format!("the store has {} devices, and {} were given", label.devices.count, paths.len());
            return refused(path, &why);
        }
        if label.index != index {
            let why = format!(
                "it is device {} of the store and was given as device {}; give the devices in their order",
                label.index + 1,
                index + 1
            );
            return refused(path, &why);
        }
    }
    first.map(There::Store).ok_or_else(|| Error::Invalid("a store needs at least one path".into()))
}

const FOREIGN: &str = "it holds something that is no memascend store; nothing was changed. Choose another path, or if \
                       nothing on it is needed, remove the file or run `wipefs --all` on the device";

fn look_at(path: &Path) -> Result<Found> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Blank),
        Err(error) => return refused(path, &format!("it cannot be opened: {error}")),
    };
    let read = |error: io::Error| Error::Refused { path: path.into(), why: format!("it cannot be read: {error}") };
    let kind = file.metadata().map_err(read)?.file_type();
    if !(kind.is_file() || kind.is_block_device()) {
        return refused(path, "it is neither a file nor a block device");
    }
    let bytes = file.seek(SeekFrom::End(0)).map_err(read)?;
    let mut edge = |from: u64, nbytes: u64| -> Result<Vec<u8>> {
        let mut edge = vec![0; nbytes as usize];
        file.seek(SeekFrom::Start(from)).and_then(|_| file.read_exact(&mut edge)).map_err(read)?;
        Ok(edge)
    };
    let head = edge(0, bytes.min(EDGE_BYTES))?;
    let page = &head[..head.len().min(PAGE_BYTES as usize)];
    match label::read(page) {
        Found::Blank | Found::Foreign if bytes > 0 => {
            let tail = edge(bytes.saturating_sub(EDGE_BYTES), bytes.min(EDGE_BYTES))?;
            let blank = head.iter().chain(&tail).all(|&byte| byte == 0);
            Ok(if blank { Found::Blank } else { Found::Foreign })
        }
        Found::Foreign => Ok(Found::Blank),
        found => Ok(found),
    }
    .and_then(|found| if found == Found::Foreign { refused(path, FOREIGN) } else { Ok(found) })
}

/// Refuses places where a store cannot be. With `in_folder`, its folder may be missing.
pub(crate) fn check_place(path: &Path, in_folder: bool) -> Result<()> {
    let above = |path: &Path| match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    let mut folder = above(path);
    if in_folder && !folder.exists() {
        folder = above(&folder);
    }
    let place = if path.exists() { path } else { &folder };
    if !place.exists() {
        return refused(path, &format!("the folder {} does not exist", folder.display()));
    }
    if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&file_system(place)) && !is_device(path) {
        return refused(
            path,
            "it is on a file system in memory, which would hold the state in the memory that it is to \
                              spare; choose a folder on a disk",
        );
    }
    Ok(())
}

fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// `f_type` of `statfs`; 0 where there is no answer.
fn file_system(path: &Path) -> i64 {
    use std::os::unix::ffi::OsStrExt;
    let Ok(name) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return 0 };
    let mut answer = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a text that ends in zero, and room for the answer.
    if unsafe { libc::statfs(name.as_ptr(), answer.as_mut_ptr()) } != 0 {
        return 0;
    }
    // SAFETY: the call succeeded, so it filled the answer.
    unsafe { answer.assume_init() }.f_type
}

pub(crate) fn refused<T>(path: &Path, why: &str) -> Result<T> {
    Err(Error::Refused { path: Arc::from(path), why: why.into() })
}
