//! Opens and locks files and raw block devices. Rejects a block device that holds data of another program. Uses direct
//! I/O if possible.
//!
//! [Note: undo] Opening a device may create or grow a file, or make it private. Dropping the device undoes these
//! changes, unless `keep`, `take_name` or `forgo_name` was called. `Drop` undoes the changes before it releases the
//! lock, because after the unlock another process may own the file.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use memascend_mem::locked;
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
};

use crate::{
    Error, Options, Result,
    align::{Alignment, direct_alignment},
    file::{self, Missing, Undo},
    fork::ForkGuard,
    lock,
    pending::{self, Lost, Name},
    raw,
    stripe::Striping,
};

/// The kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A file on a file system.
    File,
    /// A raw block device.
    Raw,
    /// Memory that simulates a device, for tests.
    Simulated,
}

/// An open, locked device. See [Note: undo].
#[derive(Debug)]
pub(crate) struct Device {
    // Rust drops the fields in this order. So `_fork_guard` removes the descriptor from the table of `fork.rs` before
    // `file` closes the descriptor. After the close, another file may get the number of this descriptor.
    _fork_guard: ForkGuard,
    file: File,
    pub(crate) path: Arc<Path>,
    /// `path` as an absolute path. `path` may be relative, and the process may change its working folder.
    absolute: PathBuf,
    /// The name that the file has at present.
    name: Mutex<Name>,
    pub(crate) kind: DeviceKind,
    pub(crate) bytes: u64,
    pub(crate) alignment: Alignment,
    /// Why I/O on this device goes through the page cache; `None` if the device uses direct I/O.
    pub(crate) why_buffered: Option<String>,
    /// The state of a file before the device was opened; `None` for raw devices.
    undo: Mutex<Option<Undo>>,
    /// If true, dropping the device undoes nothing.
    kept: AtomicBool,
}

/// The devices of a volume, the volume's size and the alignment that all devices accept.
pub(crate) struct Opened {
    pub(crate) devices: Arc<[Device]>,
    pub(crate) size_bytes: u64,
    pub(crate) alignment: Alignment,
}

impl Device {
    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Opens and locks the device at `path`. Creates a missing file if `missing` allows it. Does not change the data of
    /// an existing device. See [Note: undo].
    fn open(path: &Arc<Path>, missing: Missing) -> Result<Self> {
        let kind = kind_of(path, missing)?;
        let (file, undo, name) = match kind {
            DeviceKind::Raw => (raw::open(path)?, None, Name::Own),
            _ => file::claim(path, missing, &mut || {}).map(|(file, undo, name)| (file, Some(undo), name))?,
        };
        let fork_guard = ForkGuard::new(file.as_fd());
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        // From here on, dropping `device` removes a file that `claim` created.
        let mut device = Self {
            _fork_guard: fork_guard,
            file,
            path: Arc::clone(path),
            absolute,
            name: Mutex::new(name),
            kind,
            bytes: 0,
            alignment: Alignment::NONE,
            why_buffered: None,
            undo: Mutex::new(undo),
            kept: AtomicBool::new(false),
        };
        device.bytes = match kind {
            DeviceKind::Raw => {
                let bytes = raw::writable_bytes(&device.file, path)?;
                raw::refuse_foreign(&device.file, path, bytes)?;
                bytes
            }
            _ => device.metadata()?.len(),
        };
        (device.alignment, device.why_buffered) = direct(&device.file, path, kind)?;
        Ok(device)
    }

    /// Makes the changes to the file permanent: `Drop` does not undo them. Does nothing for a file with a pending name,
    /// because only `take_name` keeps such a file.
    pub(crate) fn keep(&self) {
        if !self.is_pending() {
            self.kept.store(true, Relaxed);
        }
    }

    pub(crate) fn is_pending(&self) -> bool {
        *locked(&self.name) == Name::Pending
    }

    /// Renames a file with a pending name to its own name, keeps the file, and makes its name survive a power loss.
    /// Does nothing for other devices.
    pub(crate) fn take_name(&self) -> Result<()> {
        let mut name = locked(&self.name);
        if *name != Name::Pending {
            return Ok(());
        }
        pending::take_name(&self.path, &self.absolute, &self.file)?;
        *name = Name::Own;
        self.kept.store(true, Relaxed);
        file::settle_name(&self.path, &self.absolute)
    }

    /// Records that the caller removes the file's name. Dropping the device then undoes nothing.
    pub(crate) fn forgo_name(&self) {
        *locked(&self.name) = Name::Removed;
    }

    /// Cancels `keep` for a file that was new or empty when it was opened: dropping the device removes or empties the
    /// file.
    pub(crate) fn forsake(&self) {
        if locked(&self.undo).as_ref().is_some_and(Undo::was_empty) {
            self.kept.store(false, Relaxed);
        }
    }

    /// Permanently grows the reserved space of a file to `bytes`. Returns false if the file system has no room, or if a
    /// quota or the file size limit forbids it. A raw device cannot grow: returns true if the device already has
    /// `bytes`.
    pub(crate) fn grow(&self, bytes: u64) -> Result<bool> {
        if self.kind != DeviceKind::File {
            return Ok(self.bytes >= bytes);
        }
        match file::reserve(&self.path, &self.file, bytes) {
            Ok(()) => file::settle(&self.path, &self.file, false).map(|()| true),
            Err(Error::Refused { errno: Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG), .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn metadata(&self) -> Result<fs::Metadata> {
        self.file.metadata().map_err(|error| Error::system(&self.path, "stat", &error))
    }

    /// True if opening the device created its file.
    pub(crate) fn is_new(&self) -> bool {
        locked(&self.undo).as_ref().is_some_and(Undo::is_new)
    }

    /// Returns how the file lost its name, or that the file was truncated. Returns `None` if the file still has its
    /// name and its size. Also returns `None` if a lookup fails, if the device is not a file, or if the caller removed
    /// the file's name.
    pub(crate) fn lost(&self) -> Option<Lost> {
        if self.kind != DeviceKind::File {
            return None;
        }
        let name = locked(&self.name);
        let place = name.path(&self.absolute)?;
        let is_short = || self.file.metadata().is_ok_and(|metadata| metadata.len() < self.bytes);
        pending::lost(&place, &self.file).or_else(|| is_short().then_some(Lost::Truncated))
    }

    /// Reads one block to try direct I/O. If the read fails with EINVAL, switches the file to buffered I/O: some file
    /// systems accept `O_DIRECT` and then fail each transfer.
    fn try_direct(&mut self) -> Result<()> {
        if self.why_buffered.is_some() || self.bytes == 0 {
            return Ok(());
        }
        let Alignment { memory, block } = self.alignment;
        let mut bytes = vec![0_u8; block + memory];
        let pad = bytes.as_ptr().align_offset(memory);
        loop {
            match std::os::unix::fs::FileExt::read_at(&self.file, &mut bytes[pad..pad + block], 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) && self.kind == DeviceKind::File => {
                    set_direct(&self.file, false).map_err(|errno| Error::system(&self.path, "fcntl", &errno.into()))?;
                    self.why_buffered = Some("its file system rejects direct I/O".into());
                    self.alignment = Alignment::NONE;
                    return Ok(());
                }
                // The read has succeeded, or has failed with another error. If an operation fails with that error too,
                // the operation reports the error to its caller.
                _ => return Ok(()),
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Undo the changes before `unlock` releases the lock: see [Note: undo].
        let undo = locked(&self.undo).take().filter(|_| !self.kept.load(Relaxed));
        if let (Some(undo), Some(place)) = (undo, locked(&self.name).path(&self.absolute)) {
            undo.restore(&place, &self.file);
        }
        lock::unlock(&self.file);
    }
}

/// Opens and locks the device at every path. Dropping the devices unlocks them, and removes the files that `claim_all`
/// created.
pub(crate) fn claim_all(paths: &[Arc<Path>], missing: Missing) -> Result<Vec<Device>> {
    let mut devices: Vec<Device> = Vec::new();
    for path in paths {
        reject_duplicates(&devices, path)?;
        devices.push(Device::open(path, missing)?);
    }
    Ok(devices)
}

/// Makes the files private if `options` says so, reserves their space, and computes the volume's size. If the call
/// fails, it drops the devices, and each device restores the former state of its file.
pub(crate) fn open_all(mut devices: Vec<Device>, options: &Options, stripe_bytes: u64) -> Result<Opened> {
    let size_bytes = options.size_bytes;
    let striping = Striping::new(devices.len(), stripe_bytes);
    let block_of = |devices: &[Device]| {
        let alignment = devices.iter().fold(Alignment::NONE, |all, device| all.and(device.alignment));
        (alignment, alignment.block as u64)
    };
    let (alignment, block) = block_of(&devices);
    if devices.len() > 1 && !stripe_bytes.is_multiple_of(block) {
        return Err(Error::Invalid(format!(
            "stripe={stripe_bytes} is not a multiple of {block} bytes, the alignment of these devices; pass \
             stripe= with a multiple of this alignment"
        )));
    }
    let smallest = devices.iter().map(|device| device.bytes).min().unwrap_or(0);
    let wanted = match size_bytes {
        Some(size) => striping.device_bytes(size, block).ok_or_else(|| too_large(size))?,
        // Rounds the size of the file up to whole blocks.
        None if devices.len() == 1 && devices[0].kind == DeviceKind::File => {
            smallest.checked_next_multiple_of(block).ok_or_else(|| too_large(smallest))?
        }
        None => smallest,
    };
    for device in &mut devices {
        match device.kind {
            DeviceKind::File => {
                if device.bytes == 0 && size_bytes.is_none() {
                    let name = device.path.display();
                    return Err(Error::Invalid(format!("{name} is empty; pass size= to set its size in bytes")));
                }
                if let Some(privacy) = options.private {
                    let mode_before = file::make_private(&device.path, &device.file, privacy, device.is_new())?;
                    if let (Some(mode), Some(undo)) = (mode_before, locked(&device.undo).as_mut()) {
                        undo.mode_before.get_or_insert(mode);
                    }
                }
                file::reserve(&device.path, &device.file, wanted)?;
                file::settle(&device.path, &device.file, device.is_new())?;
                device.bytes = device.bytes.max(wanted);
            }
            _ if device.bytes < wanted => {
                let (name, bytes) = (device.path.display(), device.bytes);
                return Err(Error::Invalid(format!(
                    "{name} has {bytes} bytes, but size= needs {wanted} bytes on it; choose a smaller size= or a \
                     larger device"
                )));
            }
            _ => {}
        }
        device.try_direct()?;
    }
    // Compute the alignment again: `try_direct` may have switched a file to buffered I/O, which needs no alignment.
    let (alignment_after, _) = block_of(&devices);
    debug_assert!(alignment_after.block <= alignment.block);
    let capacity = striping.volume_bytes(wanted, block);
    let found = if devices.len() == 1 && devices[0].kind == DeviceKind::File { smallest } else { capacity };
    let size_bytes = size_bytes.unwrap_or(found).min(capacity);
    if size_bytes == 0 {
        return Err(Error::Invalid(
            "the smallest device is too small; pass size= to grow files, a smaller stripe=, or larger devices".into(),
        ));
    }
    Ok(Opened { devices: devices.into(), size_bytes, alignment: alignment_after })
}

/// Returns the kind of the device at `path`; `File` if `path` does not exist and `missing` allows a new file. Fails if
/// `path` names neither a file nor a block device.
fn kind_of(path: &Arc<Path>, missing: Missing) -> Result<DeviceKind> {
    let name = path.display();
    let folder = || Err(Error::Invalid(format!("{name} is a folder; name a file in it, or a raw block device")));
    let there = match fs::metadata(path) {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(Error::system(path, "stat", &error)),
    };
    match there.map(|metadata| metadata.file_type()) {
        None if path.as_os_str().as_encoded_bytes().ends_with(b"/") => folder(),
        None if matches!(missing, Missing::Refuse) => {
            Err(Error::Invalid(format!("{name} does not exist; pass size= to create it")))
        }
        Some(kind) if kind.is_block_device() => Ok(DeviceKind::Raw),
        Some(kind) if kind.is_dir() => folder(),
        Some(kind) if !kind.is_file() => Err(Error::Invalid(format!(
            "{name} is neither a file nor a block device; pass the path of a file or of a raw block device"
        ))),
        _ => Ok(DeviceKind::File),
    }
}

fn too_large(size: u64) -> Error {
    Error::Invalid(format!("size={size} is more than can be addressed; pass a smaller size="))
}

fn reject_duplicates(devices: &[Device], path: &Arc<Path>) -> Result<()> {
    let Ok(metadata) = fs::metadata(path) else { return Ok(()) };
    let same = |device: &&Device| {
        device.file.metadata().is_ok_and(|other| {
            if metadata.file_type().is_block_device() && other.file_type().is_block_device() {
                other.rdev() == metadata.rdev()
            } else {
                (other.dev(), other.ino()) == (metadata.dev(), metadata.ino())
            }
        })
    };
    match devices.iter().find(same) {
        Some(other) => {
            let (one, two) = (other.path.display(), path.display());
            Err(Error::Invalid(format!("{one} and {two} are the same device; pass the path of each device once")))
        }
        None => Ok(()),
    }
}

/// Switches the file to direct I/O and returns the alignment. If the file must stay buffered, returns `Alignment::NONE`
/// and the reason.
fn direct(file: &File, path: &Arc<Path>, kind: DeviceKind) -> Result<(Alignment, Option<String>)> {
    // Sets `O_DIRECT` on the open descriptor, because a failed `open(O_CREAT | O_DIRECT)` may leave a file behind.
    match set_direct(file, true) {
        Ok(()) => {}
        Err(Errno::INVAL) => return Ok((Alignment::NONE, Some("its file system does not support direct I/O".into()))),
        Err(errno) => return Err(Error::system(path, "fcntl(O_DIRECT)", &errno.into())),
    }
    if let Some(alignment) = direct_alignment(file, kind == DeviceKind::Raw) {
        return Ok((alignment, None));
    }
    set_direct(file, false).map_err(|errno| Error::system(path, "fcntl", &errno.into()))?;
    Ok((
        Alignment::NONE,
        Some("the kernel cannot use direct I/O on this file (perhaps because of encryption or a journal)".into()),
    ))
}

fn set_direct(file: &File, on: bool) -> rustix::io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, on);
    fcntl_setfl(file, flags)
}
