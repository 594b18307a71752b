//! Chooses the files and devices to measure. Rejects files and devices that may contain data of other programs.

use std::{
    error::Error,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use memascend_nvme::{Claim, Missing};

/// The benchmark fills every block with copies of these bytes. A later run recognises the files and devices of a killed
/// run by them.
pub(crate) const MARK: &[u8; 16] = b"memascend bench\n";
/// The number of bytes at the start of a device that `require_free` reads, and that `Drop` overwrites with zeros.
const EDGE_BYTES: usize = 1 << 20;

/// The number of files that this process has named. The number in a file's name makes the name unique.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// The files or raw devices to measure. Dropping this value removes the files, or overwrites the first [`EDGE_BYTES`]
/// of each device with zeros.
pub(crate) struct Target {
    pub(crate) paths: Vec<PathBuf>,
    devices: bool,
}

impl Target {
    /// Accepts folders (in which it names a new file), paths that do not exist, files and devices that an earlier run
    /// wrote, and raw devices that begin with [`EDGE_BYTES`] zeros. Fails if `paths` mixes files and devices.
    pub(crate) fn new(paths: &[PathBuf]) -> Result<Self, Box<dyn Error>> {
        let mut devices = 0;
        let mut chosen = Vec::new();
        for path in paths {
            let kind = match fs::metadata(path) {
                Ok(found) => Some(found.file_type()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(format!("{}: {error}", path.display()).into()),
            };
            chosen.push(match kind {
                Some(kind) if kind.is_dir() => {
                    let made = MADE.fetch_add(1, Relaxed);
                    path.join(format!("memascend-bench-{}-{made}", std::process::id()))
                }
                Some(kind) => {
                    devices += usize::from(kind.is_block_device());
                    require_free(path)?;
                    path.clone()
                }
                None => path.clone(),
            });
        }
        if devices != 0 && devices != paths.len() {
            return Err("the paths mix files and raw devices: pass only files, or only raw devices".into());
        }
        Ok(Self { paths: chosen, devices: devices != 0 })
    }

    /// Returns the size for `Options::size_bytes`: `nbytes` for files; `None` for devices, because a device has a fixed
    /// size.
    pub(crate) fn size_bytes(&self, nbytes: u64) -> Option<u64> {
        (!self.devices).then_some(nbytes)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        for path in &self.paths {
            let done = if self.devices { empty(path) } else { fs::remove_file(path) };
            if let Err(error) = done.or_else(|error| if path.exists() { Err(error) } else { Ok(()) }) {
                drop(writeln!(io::stderr(), "cannot clean up {}: {error}", path.display()));
            }
        }
    }
}

/// Fails unless the file or device begins with [`MARK`], or is a device that begins with [`EDGE_BYTES`] zeros. Also
/// fails if `Claim` rejects it, for example because another process uses it.
fn require_free(path: &Path) -> Result<(), Box<dyn Error>> {
    let _alone = Claim::new(&[path], Missing::Refuse)?;
    let mut edge = Vec::new();
    File::open(path)?.take(EDGE_BYTES as u64).read_to_end(&mut edge)?;
    if edge.starts_with(MARK) || edge.iter().all(|byte| *byte == 0) && fs::metadata(path)?.file_type().is_block_device()
    {
        return Ok(());
    }
    Err(format!(
        "{}: may contain data that a measurement would overwrite; pass a folder, a new file, or a device that begins \
         with zeros (run blkdiscard, or dd if=/dev/zero of={} bs=1M count=1)",
        path.display(),
        path.display()
    )
    .into())
}

fn empty(path: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(&vec![0; EDGE_BYTES])
}
