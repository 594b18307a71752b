//! Examines what lies at a path before anything is opened or changed.

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

/// The file that a store is in a folder.
const FILE_NAME: &str = "memascend.store";
/// How much of either end must be blank where there is no label.
const EDGE_BYTES: u64 = 1 << 20;
/// File systems in memory: `statfs` says so.
const TMPFS_MAGIC: FsWord = 0x0102_1994;
const RAMFS_MAGIC: FsWord = 0x8584_58f6;
/// File systems that show the state of the kernel.
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

/// What lies at the paths of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum There {
    /// Nothing, or devices on which nothing is.
    Nothing,
    /// A file that was there before, and of which both ends are blank: its store was lost, or never begun.
    Empty(PathBuf),
    /// A store of ours; the label of the first device.
    Store(Label),
    /// A store of which some devices got their labels: whoever made it ended there.
    Unfilled,
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

/// Looks at every path. Foreign, swapped and missing devices are refused by name. Files that a claim made count as missing.
pub(crate) fn look(paths: &[PathBuf], claim: Option<&Claim>) -> Result<There> {
    if paths.is_empty() {
        return Err(Error::Invalid("a store needs at least one path".into()));
    }
    let mut found = paths.iter().map(|path| look_at(path)).collect::<Result<Vec<_>>>()?;
    if found.iter().all(|found| *found == Found::Blank) {
        let is_made = |index| claim.is_some_and(|claim| claim.is_new(index));
        let empty = paths.iter().enumerate().find(|(index, path)| path.is_file() && !is_made(*index));
        return Ok(empty.map_or(There::Nothing, |(_, path)| There::Empty(path.clone())));
    }
    let is_missing = |found: &Found| matches!(found, Found::Blank | Found::Foreign | Found::Damaged(_));
    if found.iter().any(is_missing) {
        let seconds = second_labels(paths, &geometries(paths.len(), &found));
        for (found, second) in found.iter_mut().zip(seconds) {
            if is_missing(found) {
                *found = second.map_or_else(|| found.clone(), Found::Label);
            }
        }
    }
    if was_begun(paths, &found) {
        return Ok(There::Unfilled);
    }
    let mut first = None;
    for (index, (path, found)) in (0_u32..).zip(paths.iter().zip(&found)) {
        let label = match found {
            Found::Label(label) => label,
            Found::Version(version) => {
                return Ok(There::Unusable(format!("{}: {}", path.display(), of_version(*version))));
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

/// Whether the first device got its label, and some other none yet: what is there is blank, or of the store before. The
/// pages of the roots, which lie on the first device or right behind on the others, are written after all labels.
fn was_begun(paths: &[PathBuf], found: &[Found]) -> bool {
    let [Found::Label(first), others @ ..] = found else { return false };
    let belongs = |found: &Found| matches!(found, Found::Label(label) if label.uuid == first.uuid);
    let is_ours = |found: &Found| matches!(found, Found::Blank | Found::Label(_));
    let lacks_root = |slot| {
        let (device, offset) = first.devices.on_device(first.devices.root_offset(slot));
        let mut page = vec![0; PAGE_BYTES as usize];
        // A file that is made after the labels of others is empty.
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

/// Whether a file with a pending name is a store of one device that was never filled, or one that got its first root and
/// not its name: nothing was ever trained in it. Why not, otherwise: a store may have been given such a name by its user.
pub(crate) fn is_left(path: &Path) -> std::result::Result<(), String> {
    let label = match look_at(path) {
        Ok(Found::Blank) => return Ok(()),
        Ok(Found::Label(label)) if label.devices.count == 1 => label,
        Ok(Found::Label(_)) => return Err("it is a device of a striped store".into()),
        Ok(Found::Version(version)) => return Err(of_version(version)),
        Ok(Found::Damaged(why)) => return Err(format!("its label is damaged: {why}")),
        Ok(Found::Foreign) => return Err("it is no memascend store".into()),
        Err(error) => return Err(error.to_string()),
    };
    let file = File::open(path).map_err(|error| error.to_string())?;
    for slot in 0..2 {
        let mut page = vec![0; PAGE_BYTES as usize];
        file.read_exact_at(&mut page, label.devices.root_offset(slot)).map_err(|error| error.to_string())?;
        match root::read(&page, &label.uuid) {
            Ok(root::Found::Root(root)) if root.generation > 1 => return Err("it has commits".into()),
            Ok(_) => {}
            Err(why) => return Err(format!("a root is damaged: {why}")),
        }
    }
    Ok(())
}

const FOREIGN: &str = "it holds something that is no memascend store; nothing was changed. Choose another path, or if \
                       nothing on it is needed, remove the file or run `wipefs --all` on the device";

/// What the beginning of a file or device says. Without a label, blank is what is blank at both ends.
fn look_at(path: &Path) -> Result<Found> {
    let opened = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(Found::Blank),
        _ => refused(path, &format!("it cannot be opened: {error}")),
    };
    // Before it is opened, as opening a pipe waits for its other end.
    match fs::metadata(path) {
        Ok(there) if !(there.is_file() || there.file_type().is_block_device()) => {
            return refused(path, "it is neither a file nor a block device");
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
        // A page that the device has lost: the second label may be whole.
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

/// The geometries that a store may have: the one that a whole label says, or each stripe that is a power of two.
fn geometries(count: usize, found: &[Found]) -> Vec<Devices> {
    let known = found.iter().find_map(|found| match found {
        Found::Label(label) => Some(label.devices),
        _ => None,
    });
    let stripes = PAGE_BYTES.trailing_zeros()..=30;
    let all = stripes.map(|power| Devices { count: count as u32, stripe_bytes: 1 << power });
    known.map_or_else(|| all.collect(), |known| vec![known])
}

/// The second labels of the devices, of the first geometry that one is found for.
///
/// A second label counts where a root of its store is whole, or nothing else has been written over the first one: what
/// somebody put over an old store is not ours.
fn second_labels(paths: &[PathBuf], geometries: &[Devices]) -> Vec<Option<Label>> {
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
            // Its own stripe may be another one, and put it there all the same.
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
    // One that a former store left at another place has no root any more.
    let tried = [true, false].into_iter().flat_map(|with_root| geometries.iter().map(move |&of| (of, with_root)));
    let mut found = tried.map(|(devices, with_root)| of(devices, with_root));
    found.find(|labels| labels.iter().any(Option::is_some)).unwrap_or(nothing)
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
    // Where there is no answer it is none of these.
    let file_system = statfs(place).map_or(0, |answer| answer.f_type);
    if KERNEL_MAGICS.contains(&file_system) {
        return refused(
            path,
            "a store cannot be there, as this file system shows the state of the kernel and holds no files (procfs, \
             sysfs, cgroup or the like); choose a folder on a disk",
        );
    }
    if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&file_system) && !is_device(path) {
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

/// Why nothing is resumed from an empty file: whoever lost a store must not begin another one unawares.
pub(crate) fn emptied<T>(path: &Path) -> Result<T> {
    let bytes = fs::metadata(path).map_or(0, |there| there.len());
    let found = if bytes == 0 { "it has no bytes".into() } else { format!("its {bytes} bytes begin and end in zeros") };
    let why = format!(
        "{found}: what it held is lost, or its first write did not finish, so its run never began: bring back a copy of \
         it, or give existing=\"replace\" to begin anew"
    );
    Err(Error::corrupt(path, "the store", (0, bytes), why))
}

pub(crate) fn refused<T>(path: &Path, why: &str) -> Result<T> {
    Err(Error::Refused { path: Arc::from(path), why: why.into() })
}
