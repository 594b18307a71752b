//! Chooses the files and devices that are measured; what holds anybody's data is refused.

use std::{
    error::Error,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use memascend_nvme::{Claim, Missing};

/// What every block begins with, so that what a killed run left is known again.
pub(crate) const MARK: &[u8; 16] = b"memascend bench\n";
/// Looked at from the start of a device, and made zero at the end.
const EDGE_BYTES: usize = 1 << 20;

/// Names given in folders.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// Files made for the measurement, or devices that were empty. Dropping removes the files and empties the devices.
pub(crate) struct Target {
    pub(crate) paths: Vec<PathBuf>,
    devices: bool,
}

impl Target {
    /// Takes `paths`; each a folder, a file that is not there or was ours, or an empty raw device.
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

    /// Bytes to open them with: devices have their own.
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

/// Whether nothing of anybody's is on it, and nobody else has it open.
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
