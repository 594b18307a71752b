//! Opens raw block devices exclusively, and rejects devices that hold data of another program.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::Path,
    sync::Arc,
};

use rustix::fs::{major, minor};

use crate::{
    Error, Result, file,
    lock::{self, Patience},
    signature::{self, EDGE_BYTES, Edges},
};

/// ioctls: `BLKROGET` returns whether a device is read-only, and `BLKGETSIZE64` returns its size in bytes.
const BLKROGET: libc::c_ulong = 0x125e;
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
/// The alignment of the reads at both ends of a device. It suits direct I/O on devices with blocks of up to 4 KiB.
const EDGE_ALIGN: usize = 4096;

/// Opens a device with `O_EXCL` and locks it, so that no other process can mount the device or open it with `O_EXCL`.
pub(crate) fn open(path: &Arc<Path>) -> Result<File> {
    let patience = Patience::new();
    let file = loop {
        match file::open(path, libc::O_EXCL | libc::O_CLOEXEC, false) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                if !File::open(path).is_ok_and(|file| patience.wait_for_dead_holder(&file)) {
                    return Err(busy(path));
                }
            }
            result => break result.map_err(|error| Error::system(path, "open", &error))?.0,
        }
    };
    lock::lock(&file, path)?;
    Ok(file)
}

/// Returns an error that names the user of the device, if one is found. Called after an exclusive open failed with
/// EBUSY.
fn busy(path: &Arc<Path>) -> Error {
    let why = match fs::metadata(path) {
        Err(_) => None,
        Ok(metadata) => {
            let number = format!("{}:{}", major(metadata.rdev()), minor(metadata.rdev()));
            mounted_at(&number)
                .map(|at| format!("mounted at {at}; if nothing on the device is needed, unmount it first"))
                .or_else(|| held_by(&number).map(|by| format!("in use by {by} (dm, RAID or LVM); use another device")))
                .or_else(|| swaps(path).then(|| "in use as swap; run `swapoff` first".into()))
        }
    };
    match (why, File::open(path)) {
        (Some(why), _) => Error::refused(path, libc::EBUSY, why),
        (None, Ok(file)) => lock::in_use(&file, path),
        (None, Err(_)) => Error::refused(path, libc::EBUSY, "in use by the kernel or a process; use another device"),
    }
}

/// Returns the size of the device in bytes; an error if the device is read-only or empty.
pub(crate) fn writable_bytes(file: &File, path: &Arc<Path>) -> Result<u64> {
    let mut read_only: libc::c_int = 0;
    // SAFETY: `BLKROGET` writes an int, and `read_only` is an int.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET, &raw mut read_only) };
    if result == 0 && read_only != 0 {
        return Err(Error::refused(
            path,
            libc::EROFS,
            "the device is read-only; make it writable with `blockdev --setrw`, or use another device",
        ));
    }
    let mut bytes: u64 = 0;
    // SAFETY: `BLKGETSIZE64` writes a u64, and `bytes` is a u64.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) };
    if result != 0 {
        return Err(Error::system(path, "BLKGETSIZE64", &io::Error::last_os_error()));
    }
    if bytes == 0 {
        return Err(Error::refused(
            path,
            libc::ENXIO,
            "the device has no bytes (for example no medium, or a loop device without a file); use another device",
        ));
    }
    Ok(bytes)
}

/// Fails if the device has a signature of another program's data.
pub(crate) fn refuse_foreign(file: &File, path: &Arc<Path>, device_bytes: u64) -> Result<()> {
    let edge = EDGE_BYTES.min(usize::try_from(device_bytes).unwrap_or(EDGE_BYTES));
    let first = read(file, path, 0, edge)?;
    let last = read(file, path, device_bytes - edge as u64, edge)?;
    match signature::find(&Edges { first: &first, last: &last, device_bytes }) {
        None => Ok(()),
        Some(what) => {
            let why = format!(
                "it contains {what}, which is not ours; if nothing on the device is needed, erase this with: \
                 wipefs --all {}",
                path.display()
            );
            Err(Error::refused(path, libc::EEXIST, why))
        }
    }
}

/// Reads `nbytes` at any offset. Reads whole aligned blocks into aligned memory, so that `file` may use direct I/O.
fn read(file: &File, path: &Arc<Path>, offset: u64, nbytes: usize) -> Result<Vec<u8>> {
    let start = offset / EDGE_ALIGN as u64 * EDGE_ALIGN as u64;
    let skip = usize::try_from(offset - start).unwrap_or(0);
    let whole = (skip + nbytes).next_multiple_of(EDGE_ALIGN);
    let mut memory = vec![0_u8; whole + EDGE_ALIGN];
    let pad = memory.as_ptr().align_offset(EDGE_ALIGN);
    let window = &mut memory[pad..pad + whole];
    let mut got = 0;
    while got < skip + nbytes {
        match file.read_at(&mut window[got..], start + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::system(path, "reading its signatures", &error)),
        }
    }
    if got < skip + nbytes {
        return Err(Error::refused(
            path,
            libc::EIO,
            "the device ended before the size that it reports; check the device",
        ));
    }
    Ok(window[skip..skip + nbytes].to_vec())
}

fn mounted_at(number: &str) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(2);
        (fields.next()? == number).then(|| fields.nth(1).map(str::to_owned))?
    })
}

fn held_by(number: &str) -> Option<String> {
    let names: Vec<String> = fs::read_dir(format!("/sys/dev/block/{number}/holders"))
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    (!names.is_empty()).then(|| names.join(", "))
}

fn swaps(path: &Path) -> bool {
    let Ok(real) = path.canonicalize() else { return false };
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    swaps.lines().filter_map(|line| line.split_whitespace().next()).any(|used| Path::new(used) == real)
}
