//! Opens files and raw block devices: safely, locked, with direct I/O where possible.

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
    fork::NotInChildren,
    lock,
    pending::{self, Lost, Name},
    raw,
    stripe::Striping,
};

/// What kind of thing a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A file on a file system.
    File,
    /// A raw block device.
    Raw,
    /// Memory that plays a device.
    Simulated,
}

/// An open device.
#[derive(Debug)]
pub(crate) struct Device {
    // Fields drop in this order: the number leaves the table before it can be given to another file.
    _not_in_children: NotInChildren,
    file: File,
    pub(crate) path: Arc<Path>,
    /// The path from the root on: the working folder may change.
    absolute: PathBuf,
    /// Which name it has: its path, or one beside that.
    name: Mutex<Name>,
    pub(crate) kind: DeviceKind,
    pub(crate) bytes: u64,
    pub(crate) alignment: Alignment,
    /// Why its I/O goes through the page cache, if it does.
    pub(crate) why_buffered: Option<String>,
    /// What puts a file back that was made or grown.
    undo: Mutex<Option<Undo>>,
    /// It is not to be put back.
    kept: AtomicBool,
}

/// Devices that belong together, and what they hold.
pub(crate) struct Opened {
    pub(crate) devices: Arc<[Device]>,
    pub(crate) size_bytes: u64,
    pub(crate) alignment: Alignment,
}

impl Device {
    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Opens and locks what is at `path`. Nothing is changed but that a missing file is made if `missing` says so; dropping
    /// the device removes that again, unless it is kept.
    fn open(path: &Arc<Path>, missing: Missing) -> Result<Self> {
        let kind = kind_of(path, missing)?;
        let (file, undo, name) = match kind {
            DeviceKind::Raw => (raw::open(path)?, None, Name::Own),
            _ => file::claim(path, missing, &mut || {}).map(|(file, undo, name)| (file, Some(undo), name))?,
        };
        let not_in_children = NotInChildren::new(file.as_fd());
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        // From here on its end undoes what was done.
        let mut device = Self {
            _not_in_children: not_in_children,
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

    /// What was made stays made; a file with a pending name does not, before it takes its own.
    pub(crate) fn keep(&self) {
        if !self.is_pending() {
            self.kept.store(true, Relaxed);
        }
    }

    pub(crate) fn is_pending(&self) -> bool {
        *locked(&self.name) == Name::Pending
    }

    /// Gives a file with a pending name its own one, for good.
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

    /// Its file has no name from here on: the caller removes that.
    pub(crate) fn forgo_name(&self) {
        *locked(&self.name) = Name::Removed;
    }

    /// What was made goes at the end after all, unless there was something before it.
    pub(crate) fn forsake(&self) {
        if locked(&self.undo).as_ref().is_some_and(Undo::was_empty) {
            self.kept.store(false, Relaxed);
        }
    }

    /// Reserves more for a file, for good; `false` where there is no room, or it is no file.
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

    /// Whether the file was made by this opening of it.
    pub(crate) fn is_new(&self) -> bool {
        locked(&self.undo).as_ref().is_some_and(Undo::is_new)
    }

    /// What became of the name of a file since it was opened; `None` where it still names it, and for what has no name.
    pub(crate) fn lost(&self) -> Option<Lost> {
        if self.kind != DeviceKind::File {
            return None;
        }
        let name = locked(&self.name);
        let place = name.path(&self.absolute)?;
        let is_short = || self.file.metadata().is_ok_and(|metadata| metadata.len() < self.bytes);
        pending::lost(&place, &self.file).or_else(|| is_short().then_some(Lost::Truncated))
    }

    /// Some file systems take the flag and fail the transfer: try one before a run depends on it.
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
                    self.why_buffered = Some("its file system fails direct I/O".into());
                    self.alignment = Alignment::NONE;
                    return Ok(());
                }
                // Any other fault is the caller's to see, at the operation that meets it.
                _ => return Ok(()),
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Under the lock: once that is gone, what lies at the path may be somebody else's.
        let undo = locked(&self.undo).take().filter(|_| !self.kept.load(Relaxed));
        if let (Some(undo), Some(place)) = (undo, locked(&self.name).path(&self.absolute)) {
            undo.carry_out(&place, &self.file);
        }
        lock::unlock(&self.file);
    }
}

/// Opens and locks all of `paths`. Dropping them leaves everything as it was.
pub(crate) fn claim_all(paths: &[Arc<Path>], missing: Missing) -> Result<Vec<Device>> {
    let mut devices: Vec<Device> = Vec::new();
    for path in paths {
        refuse_twice(&devices, path)?;
        devices.push(Device::open(path, missing)?);
    }
    Ok(devices)
}

/// Makes room, and says what the devices hold together. A failure leaves everything as it was.
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
            "stripe of {stripe_bytes} bytes is not a multiple of {block}, the alignment"
        )));
    }
    let smallest = devices.iter().map(|device| device.bytes).min().unwrap_or(0);
    let wanted = match size_bytes {
        Some(size) => striping.device_bytes(size, block).ok_or_else(|| too_large(size))?,
        // A file whose end lies inside a block is made to end with it.
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
                    return Err(Error::Invalid(format!("{name} is empty; pass size= to give it room")));
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
                    "{name} has {bytes} bytes and would need {wanted}; choose a smaller size= or a larger device"
                )));
            }
            _ => {}
        }
        device.try_direct()?;
    }
    // A file that turned out to be buffered needs less.
    let (alignment_after, _) = block_of(&devices);
    debug_assert!(alignment_after.block <= alignment.block);
    let capacity = striping.volume_bytes(wanted, block);
    let found = if devices.len() == 1 && devices[0].kind == DeviceKind::File { smallest } else { capacity };
    let size_bytes = size_bytes.unwrap_or(found).min(capacity);
    if size_bytes == 0 {
        return Err(Error::Invalid("a volume of 0 bytes holds nothing; pass a larger size=".into()));
    }
    Ok(Opened { devices: devices.into(), size_bytes, alignment: alignment_after })
}

/// What lies at `path`, if that can be a device.
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
            Err(Error::Invalid(format!("{name} does not exist; pass size= to make it")))
        }
        Some(kind) if kind.is_block_device() => Ok(DeviceKind::Raw),
        Some(kind) if kind.is_dir() => folder(),
        Some(kind) if !kind.is_file() => Err(Error::Invalid(format!("{name} is neither a file nor a block device"))),
        _ => Ok(DeviceKind::File),
    }
}

fn too_large(size: u64) -> Error {
    Error::Invalid(format!("size {size} is more than can be addressed"))
}

fn refuse_twice(devices: &[Device], path: &Arc<Path>) -> Result<()> {
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
            Err(Error::Invalid(format!("{one} and {two} are the same device; a stripe needs different ones")))
        }
        None => Ok(()),
    }
}

/// Switches to direct I/O where that can be had: its alignment, or why not.
fn direct(file: &File, path: &Arc<Path>, kind: DeviceKind) -> Result<(Alignment, Option<String>)> {
    // On the open descriptor and not at open(): a refused open(O_CREAT | O_DIRECT) may leave a file behind.
    match set_direct(file, true) {
        Ok(()) => {}
        Err(Errno::INVAL) => return Ok((Alignment::NONE, Some("its file system has no direct I/O".into()))),
        Err(errno) => return Err(Error::system(path, "fcntl(O_DIRECT)", &errno.into())),
    }
    if let Some(alignment) = direct_alignment(file, kind == DeviceKind::Raw) {
        return Ok((alignment, None));
    }
    set_direct(file, false).map_err(|errno| Error::system(path, "fcntl", &errno.into()))?;
    Ok((Alignment::NONE, Some("the kernel has no direct I/O for this file (encryption, verity or a journal)".into())))
}

fn set_direct(file: &File, on: bool) -> rustix::io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, on);
    fcntl_setfl(file, flags)
}
