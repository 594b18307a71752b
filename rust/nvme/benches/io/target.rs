//! Chooses the files and devices to measure; rejects files and devices that hold data.

use std::{
    error::Error,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use memascend_nvme::{Claim, Missing};

/// The start of every block, by which a later run recognises files and devices of a killed run.
pub(crate) const MARK: &[u8; 16] = b"memascend bench\n";
/// Bytes from the start of a device that `require_free` examines and `Drop` zeroes.
const EDGE_BYTES: usize = 1 << 20;

/// Number of file names that this process has made for folders.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// Files that the measurement creates, or empty devices. Dropping this value removes the files, and zeroes the devices'
/// first bytes.
pub(crate) struct Target {
    pub(crate) paths: Vec<PathBuf>,
    devices: bool,
}

impl Target {
    /// Accepts folders, missing files, files and devices that a former run left, and empty raw devices.
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
            return Err("files beside raw devices are not measured".into());
        }
        Ok(Self { paths: chosen, devices: devices != 0 })
    }

    /// The size to open the paths with; `None` for devices, which have their own size.
    pub(crate) fn size_bytes(&self, nbytes: u64) -> Option<u64> {
        (!self.devices).then_some(nbytes)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        for path in &self.paths {
            let done = if self.devices { empty(path) } else { fs::remove_file(path) };
            if let Err(error) = done.or_else(|error| if path.exists() { Err(error) } else { Ok(()) }) {
                drop(writeln!(io::stderr(), "{}: not cleaned up: {error}", path.display()));
            }
        }
    }
}

/// Fails if the file or device holds foreign data, or is open elsewhere.
fn require_free(path: &Path) -> Result<(), Box<dyn Error>> {
    let _alone = Claim::new(&[path], Missing::Refuse)?;
    let mut edge = Vec::new();
    File::open(path)?.take(EDGE_BYTES as u64).read_to_end(&mut edge)?;
    if edge.starts_with(MARK) || edge.iter().all(|byte| *byte == 0) && fs::metadata(path)?.file_type().is_block_device()
    {
        return Ok(());
    }
    Err(format!(
        "{}: it holds data, which a measurement would overwrite; name a folder, a new file, or a device that begins \
         with zeros (blkdiscard, or dd if=/dev/zero of={} bs=1M count=1)",
        path.display(),
        path.display()
    )
    .into())
}

fn empty(path: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(&vec![0; EDGE_BYTES])
}
