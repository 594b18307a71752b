//! Opens and locks devices without changing their data. The caller can examine the devices before it opens them as a
//! volume.

use std::{path::Path, sync::Arc};

use crate::{
    BackendChoice, BackendKind, DEVICES_MAX, DeviceInfo, Error, Missing, Options, Result, Volume,
    backend::Backend,
    device::{self, Device, Opened},
    operation::Context,
    stripe::Striping,
    threads::Threads,
    uring::Uring,
    volume::Parts,
};

impl Volume {
    /// Opens `paths` as one volume, and creates missing files if `options.size_bytes` is set. If the call fails, the
    /// files stay as they were.
    pub fn open(paths: &[impl AsRef<Path>], options: &Options) -> Result<Self> {
        options.checked()?;
        let volume = Claim::new(paths, if options.size_bytes.is_some() { Missing::Make } else { Missing::Refuse })?
            .open(options)?;
        volume.keep();
        Ok(volume)
    }
}

/// Devices that are open and locked. The claim does not change existing files, but [`Missing::MakePending`] may remove
/// a pending file that a killed process left. Dropping the claim removes the files that the claim created.
#[derive(Debug)]
pub struct Claim {
    paths: Vec<Arc<Path>>,
    devices: Vec<Device>,
}

impl Claim {
    /// Opens and locks `paths`. `missing` says whether and how `new` creates a file that does not exist.
    pub fn new(paths: &[impl AsRef<Path>], missing: Missing) -> Result<Self> {
        if paths.is_empty() || paths.len() > DEVICES_MAX {
            return Err(Error::Invalid(format!(
                "a volume has 1 to {DEVICES_MAX} devices, not {}; pass one path for each device",
                paths.len()
            )));
        }
        let paths: Vec<Arc<Path>> = paths.iter().map(|path| Arc::from(path.as_ref())).collect();
        let devices = device::claim_all(&paths, missing)?;
        Ok(Self { paths, devices })
    }

    /// True if this claim created the file of device `index`.
    #[must_use]
    pub fn is_new(&self, index: usize) -> bool {
        self.devices.get(index).is_some_and(Device::is_new)
    }

    /// True if a file of this claim has its pending name: the path with [`PENDING_SUFFIX`](crate::PENDING_SUFFIX).
    /// [`Volume::take_name`] gives the file its own name.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.devices.iter().any(Device::is_pending)
    }

    /// Reserves space for the files and starts the backend. If the call fails, or the caller drops the volume before
    /// [`Volume::keep`], the files get their former state back.
    pub fn open(self, options: &Options) -> Result<Volume> {
        let Self { paths, devices } = self;
        let (queue_depth, stripe_bytes) = options.checked()?;
        let Opened { devices, size_bytes, alignment } = device::open_all(devices, options, stripe_bytes)?;
        let (backend, kind, why_not) = start(options.backend, &devices, queue_depth)?;
        let described = devices
            .iter()
            .map(|device| DeviceInfo {
                path: device.path.to_path_buf(),
                kind: device.kind,
                bytes: device.bytes,
                why_buffered: device.why_buffered.clone(),
            })
            .collect();
        let striping = Striping::new(devices.len(), stripe_bytes);
        let context = Context::new(paths, striping, alignment);
        let parts = Parts { devices: described, size_bytes, queue_depth, kind, why_not };
        Ok(Volume::over(context, backend, Some(devices), parts))
    }
}

/// Starts the chosen backend. With `Auto`, starts threads if `io_uring` is not available. The third value says why
/// `io_uring` is not available; it is `None` unless `Auto` chose threads.
fn start(
    choice: BackendChoice,
    devices: &Arc<[Device]>,
    queue_depth: usize,
) -> Result<(Arc<dyn Backend>, BackendKind, Option<String>)> {
    let mut why_not = None;
    if choice != BackendChoice::Threads {
        match Uring::start(devices, queue_depth) {
            Ok(ring) => return Ok((Arc::new(ring), BackendKind::IoUring, None)),
            Err(why) if choice == BackendChoice::IoUring => {
                return Err(Error::NoBackend { backend: "io_uring", why });
            }
            Err(why) => why_not = Some(why),
        }
    }
    let threads = Threads::start(devices, queue_depth)
        .map_err(|error| Error::NoBackend { backend: "threads", why: error.to_string() })?;
    Ok((Arc::new(threads), BackendKind::Threads, why_not))
}
