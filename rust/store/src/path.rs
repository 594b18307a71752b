//! Examines the files and devices at a store's paths: whether they hold a store, and whether a store may be there.
//! Changes nothing.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{FileExt, FileTypeExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use memascend_nvme::Claim;
use rustix::{
    fs::{FsWord, statfs},
    io::Errno,
};

use crate::{
    Error, Result,
    copies::of_version,
    label::{self, Found, Label},
    layout::PAGE_BYTES,
    places::Devices,
    root,
};

/// The name of the store's file if the path is a folder.
const FILE_NAME: &str = "memascend.store";
/// A file or device without a label counts as blank if this many bytes at each of its ends are zeros.
const EDGE_BYTES: u64 = 1 << 20;
/// The types that `statfs` returns for file systems in memory.
const TMPFS_MAGIC: FsWord = 0x0102_1994;
const RAMFS_MAGIC: FsWord = 0x8584_58f6;
/// The types that `statfs` returns for file systems that show the state of the kernel.
const KERNEL_MAGICS: [FsWord; 10] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0x6265_6570, // configfs
    0xcafe_4a11, // bpf
    0x1cd1,      // devpts
];

/// The result of [`look`]: what the paths of a store hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PathState {
    /// No files, or blank devices.
    Nothing,
    /// All files and devices are blank or missing, and this file exists. Perhaps its store was lost, or the first write
    /// of the store did not finish.
    Empty(PathBuf),
    /// A memascend store. The field is the label of the store's first device.
    Store(Label),
    /// A store that lacks its labels on some devices: the process that created the store ended before it wrote them.
    Unfilled,
    /// A memascend store that cannot be opened. The field is the reason.
    Unusable(String),
}

/// Returns the file or device for a path. If the path is a folder or ends with a slash, returns the path of the store's
/// file in the folder.
pub(crate) fn resolve(path: &Path) -> PathBuf {
    if names_folder(path) || path.is_dir() { path.join(FILE_NAME) } else { path.to_owned() }
}

/// True if a path ends with a slash, such as "runs/first/". This path names a folder, which may not exist yet.
pub(crate) fn names_folder(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

/// Reads the labels at every path and returns what the paths hold together. Files that `claim` created count as
/// missing.
///
/// # Errors
/// Fails if a path is neither a file nor a block device, or if a device cannot be read, holds other data, belongs to
/// another store, is blank although other devices are not, or is out of order. The error names this path. Also fails if
/// `paths` is empty, or if the store does not have as many devices as there are `paths`.
pub(crate) fn look(paths: &[PathBuf], claim: Option<&Claim>) -> Result<PathState> {
    if paths.is_empty() {
        return Err(Error::Invalid("a store needs at least one path".into()));
    }
    let mut found = paths.iter().map(|path| look_at(path)).collect::<Result<Vec<_>>>()?;
    if found.iter().all(|found| *found == Found::Blank) {
        let is_made = |index| claim.is_some_and(|claim| claim.is_new(index));
        let empty = paths.iter().enumerate().find(|(index, path)| path.is_file() && !is_made(*index));
        return Ok(empty.map_or(PathState::Nothing, |(_, path)| PathState::Empty(path.clone())));
    }
    let is_missing = |found: &Found| matches!(found, Found::Blank | Found::Foreign | Found::Damaged(_));
    if found.iter().any(is_missing) {
        let seconds = find_second_labels(paths, &geometries(paths.len(), &found));
        for (found, second) in found.iter_mut().zip(seconds) {
            if is_missing(found) {
                *found = second.map_or_else(|| found.clone(), Found::Label);
            }
        }
    }
    if was_begun(paths, &found) {
        return Ok(PathState::Unfilled);
    }
    let mut first = None;
    for (index, (path, found)) in (0_u32..).zip(paths.iter().zip(&found)) {
        let label = match found {
            Found::Label(label) => label,
            Found::Version(version) => {
                return Ok(PathState::Unusable(format!("{}: {}", path.display(), of_version(*version))));
            }
            Found::Damaged(why) => {
                return Ok(PathState::Unusable(format!(
                    "{}: the label is damaged: {why}; restore the store from a copy",
                    path.display()
                )));
            }
            Found::Blank => return refused(path, "it is missing or blank, but another path is not: check the paths"),
            Found::Foreign => return refused(path, FOREIGN),
        };
        let of = first.get_or_insert(*label);
        if label.uuid != of.uuid {
            return refused(path, "it and the first device belong to different stores: pass the devices of one store");
        }
        if label.devices.count as usize != paths.len() {
            let why = format!(
                "the store has {} devices, and {} were given: pass all devices of the store and no others",
                label.devices.count,
                paths.len()
            );
            return refused(path, &why);
        }
        if label.index != index {
            let why = format!(
                "it is device {} of the store and was given as device {}: pass the devices in their order",
                label.index + 1,
                index + 1
            );
            return refused(path, &why);
        }
    }
    first.map(PathState::Store).ok_or_else(|| Error::Invalid("a store needs at least one path".into()))
}

/// True if the creation of a new store ended before all labels were written. In that case the first device has its
/// label, another device is blank or has the label of a former store, and both root pages are still blank. Root pages
/// are written after the first labels of all devices.
fn was_begun(paths: &[PathBuf], found: &[Found]) -> bool {
    let [Found::Label(first), others @ ..] = found else { return false };
    let belongs = |found: &Found| matches!(found, Found::Label(label) if label.uuid == first.uuid);
    let is_ours = |found: &Found| matches!(found, Found::Blank | Found::Label(_));
    let lacks_root = |slot| {
        let (device, offset) = first.devices.on_device(first.devices.root_offset(slot));
        let mut page = vec![0; PAGE_BYTES as usize];
        // The file of a later device may be missing or empty, because the first device gets its label first.
        let Ok(file) = File::open(&paths[device as usize]) else { return device > 0 };
        match file.read_exact_at(&mut page, offset) {
            Ok(()) => matches!(root::read(&page, &first.uuid), Ok(root::Found::Blank)),
            Err(_) => device > 0,
        }
    };
    let devices = first.devices.count as usize;
    devices == paths.len()
        && first.index == 0
        && others.iter().all(is_ours)
        && !others.iter().all(belongs)
        && (0..2).all(lacks_root)
}

/// Checks that a file with a pending name may be removed. A killed process leaves either a blank file, or a store on
/// one device with at most one commit. For any other file, returns the reason why the file must stay: a user may have
/// given this name to the store of a trained model.
pub(crate) fn is_left(path: &Path) -> std::result::Result<(), String> {
    let label = match look_at(path) {
        Ok(Found::Blank) => return Ok(()),
        Ok(Found::Label(label)) if label.devices.count == 1 => label,
        Ok(Found::Label(_)) => return Err("it is a device of a striped store".into()),
        Ok(Found::Version(version)) => return Err(of_version(version)),
        Ok(Found::Damaged(why)) => return Err(format!("its label is damaged: {why}")),
        Ok(Found::Foreign) => return Err("it is not a memascend store".into()),
        Err(error) => return Err(error.to_string()),
    };
    let file = File::open(path).map_err(|error| error.to_string())?;
    for slot in 0..2 {
        let mut page = vec![0; PAGE_BYTES as usize];
        file.read_exact_at(&mut page, label.devices.root_offset(slot)).map_err(|error| error.to_string())?;
        match root::read(&page, &label.uuid) {
            Ok(root::Found::Root(root)) if root.generation > 1 => return Err("it has more than one commit".into()),
            Ok(_) => {}
            Err(why) => return Err(format!("a root is damaged: {why}")),
        }
    }
    Ok(())
}

const FOREIGN: &str = "it contains data that is not a memascend store; nothing was changed. Choose another path. If \
                       you do not need the data, remove the file, or run `wipefs --all` on the device";

/// Reads the first label of a file or device. Without a label, the file is `Blank` if the file is missing or has only
/// zeros at both ends. Otherwise it is `Foreign`.
fn look_at(path: &Path) -> Result<Found> {
    let opened = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(Found::Blank),
        _ => refused(path, &format!("it cannot be opened: {error}")),
    };
    // Check the type before `File::open`, which blocks on a pipe until the other end is opened.
    match fs::metadata(path) {
        Ok(there) if !(there.is_file() || there.file_type().is_block_device()) => {
            return refused(path, "it is neither a file nor a block device: choose another path");
        }
        Err(error) => return opened(error),
        Ok(_) => {}
    }
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) => return opened(error),
    };
    let read = |error: io::Error| Error::Refused { path: path.into(), why: format!("it cannot be read: {error}") };
    let bytes = file.seek(SeekFrom::End(0)).map_err(read)?;
    let mut edge = |from: u64, nbytes: u64| -> io::Result<Vec<u8>> {
        let mut edge = vec![0; nbytes as usize];
        file.seek(SeekFrom::Start(from)).and_then(|_| file.read_exact(&mut edge))?;
        Ok(edge)
    };
    let page = match edge(0, bytes.min(PAGE_BYTES)) {
        // The device cannot read its first page, but the second label may be whole.
        Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
            return Ok(Found::Damaged(error.to_string()));
        }
        page => page.map_err(read)?,
    };
    match label::read(&page) {
        Found::Blank | Found::Foreign if bytes > 0 => {
            let head = edge(0, bytes.min(EDGE_BYTES)).map_err(read)?;
            let tail = edge(bytes.saturating_sub(EDGE_BYTES), bytes.min(EDGE_BYTES)).map_err(read)?;
            let blank = head.iter().chain(&tail).all(|&byte| byte == 0);
            Ok(if blank { Found::Blank } else { Found::Foreign })
        }
        Found::Foreign => Ok(Found::Blank),
        found => Ok(found),
    }
}

/// Returns the geometries to try when second labels are searched. If a first label is whole, returns only the geometry
/// in that label. Otherwise returns a geometry for each stripe size that is a power of two.
fn geometries(count: usize, found: &[Found]) -> Vec<Devices> {
    let known = found.iter().find_map(|found| match found {
        Found::Label(label) => Some(label.devices),
        _ => None,
    });
    let stripes = PAGE_BYTES.trailing_zeros()..=30;
    let all = stripes.map(|power| Devices { count: count as u32, stripe_bytes: 1 << power });
    known.map_or_else(|| all.collect(), |known| vec![known])
}

/// Returns the second labels of the devices, for the first geometry with which any second label is found.
///
/// A second label counts if a root of its store is whole, or if the first page of the device is zeros or still begins
/// with the magic of a label. Otherwise the label does not count: other data was probably written over an old store.
fn find_second_labels(paths: &[PathBuf], geometries: &[Devices]) -> Vec<Option<Label>> {
    let nothing = vec![None; paths.len()];
    let Some(files) = paths.iter().map(|path| File::open(path).ok()).collect::<Option<Vec<_>>>() else {
        return nothing;
    };
    let length = |mut file: &File| file.seek(SeekFrom::End(0)).ok();
    let Some(smallest) = files.iter().map(length).min().flatten() else { return nothing };
    let page = |device: u32, offset: u64| {
        let mut page = vec![0; PAGE_BYTES as usize];
        files.get(device as usize).and_then(|file| file.read_exact_at(&mut page, offset).ok()).map(|()| page)
    };
    let place = |devices: Devices, index: u32| {
        let unit = if devices.count == 1 { PAGE_BYTES } else { devices.stripe_bytes };
        let volume_bytes = smallest / unit * unit * u64::from(devices.count);
        devices.second_label_offset(volume_bytes, index).map(|at| devices.on_device(at))
    };
    let of = |devices: Devices, with_root: bool| -> Vec<Option<Label>> {
        let label = |index: u32| {
            let (device, offset) = place(devices, index)?;
            // The label may name another stripe size than `devices`, if that stripe size puts the label at the same
            // place.
            let fits = |label: &Label| {
                label.index == index
                    && label.devices.count == devices.count
                    && place(label.devices, index) == Some((device, offset))
            };
            match label::read(&page(device, offset)?) {
                Found::Label(label) if fits(&label) => Some(label),
                _ => None,
            }
        };
        let is_ours = |label: &Label| {
            let root = |slot| {
                let (device, offset) = label.devices.on_device(label.devices.root_offset(slot));
                page(device, offset)
                    .is_some_and(|page| matches!(root::read(&page, &label.uuid), Ok(root::Found::Root(_))))
            };
            let untouched = || {
                let first = page(label.index, 0);
                first.is_some_and(|first| first.starts_with(&label::MAGIC) || first.iter().all(|&byte| byte == 0))
            };
            if with_root { root(0) || root(1) } else { untouched() }
        };
        (0..devices.count).map(|index| label(index).filter(is_ours)).collect()
    };
    // First accept only labels whose store has a whole root. The second labels of a former store, which may be at
    // places of another geometry, have no root.
    let tried = [true, false].into_iter().flat_map(|with_root| geometries.iter().map(move |&of| (of, with_root)));
    let mut found = tried.map(|(devices, with_root)| of(devices, with_root));
    found.find(|labels| labels.iter().any(Option::is_some)).unwrap_or(nothing)
}

/// Rejects a path whose folder is missing, or whose file system is in memory or shows kernel state. Accepts a block
/// device on a file system in memory, such as `/dev`. With `in_folder`, the last folder of the path may be missing: the
/// claim creates it.
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
        return refused(path, &format!("the folder {} does not exist: create it first", folder.display()));
    }
    // If `statfs` fails, `file_system` is 0, and the path is not rejected.
    let file_system = statfs(place).map_or(0, |answer| answer.f_type);
    if KERNEL_MAGICS.contains(&file_system) {
        return refused(
            path,
            "a store cannot be there, because this file system shows the state of the kernel and holds no files \
             (procfs, sysfs, cgroup or similar): choose a folder on a disk",
        );
    }
    if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&file_system) && !is_device(path) {
        return refused(
            path,
            "it is on a file system in memory, so the store would take the memory that offloading is meant to save: \
             choose a folder on a disk",
        );
    }
    Ok(())
}

fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Returns the error for resuming from an empty file: without this error, a user whose store was lost would start a new
/// run without knowing it.
pub(crate) fn emptied<T>(path: &Path) -> Result<T> {
    let bytes = fs::metadata(path).map_or(0, |there| there.len());
    let found = if bytes == 0 { "it has no bytes".into() } else { format!("its {bytes} bytes begin and end in zeros") };
    let why = format!(
        "{found}: the content of the store is lost, its first write did not finish, or the file never held a store. \
         Restore the file from a copy, or pass existing=\"replace\" to create a new store"
    );
    Err(Error::corrupt(path, "the store", (0, bytes), why))
}

/// Returns [`Error::Refused`].
pub(crate) fn refused<T>(path: &Path, why: &str) -> Result<T> {
    Err(Error::Refused { path: Arc::from(path), why: why.into() })
}
