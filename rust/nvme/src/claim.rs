//! Holds devices open, locked and unchanged, so that the caller can examine them before it opens a volume.

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
    /// Opens `paths` as one volume, and creates missing files if `options.size_bytes` is set. An error leaves the paths
    /// as they were.
    pub fn open(paths: &[impl AsRef<Path>], options: &Options) -> Result<Self> {
        options.checked()?;
        let volume = Claim::new(paths, if options.size_bytes.is_some() { Missing::Make } else { Missing::Refuse })?
            .open(options)?;
        volume.keep();
        Ok(volume)
    }
}

/// Open, locked devices. Existing files are unchanged so far. Dropping the claim removes the files that it created.
#[derive(Debug)]
pub struct Claim {
    paths: Vec<Arc<Path>>,
    devices: Vec<Device>,
}

impl Claim {
    /// Opens and locks `paths`. Creates missing files as `missing` says.
    pub fn new(paths: &[impl AsRef<Path>], missing: Missing) -> Result<Self> {
        if paths.is_empty() || paths.len() > DEVICES_MAX {
            return Err(Error::Invalid(format!("a volume has 1 to {DEVICES_MAX} devices, not {}", paths.len())));
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

    /// True if a file of this claim has a pending name until [`Volume::take_name`].
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.devices.iter().any(Device::is_pending)
    }

    /// Reserves the files' space and starts the backend. An error, or dropping the volume before [`Volume::keep`],
    /// restores the files.
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

/// Starts the chosen backend; with `Auto`, falls back to threads. Also returns why `io_uring` was not available.
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
