//! How to open a volume, and the bounds of that.

use crate::{
    BackendChoice, Error, Privacy, Result,
    stripe::{STRIPE_BYTES_DEFAULT, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN},
};

/// Requests that the kernel has at once, per device, unless the caller says otherwise. Four to eight of 1 MiB are the
/// peak of a disk; 16 keep requests of 256 KiB and up there too, and cost nothing.
pub const QUEUE_DEPTH_DEFAULT: usize = 16;
/// The most that may be wished for: what `NVMe` drives have per queue.
pub const QUEUE_DEPTH_MAX: usize = 1024;
/// Devices of one volume. More than any machine holds, few enough that all their rings' entries fit.
pub const DEVICES_MAX: usize = 32;

/// How to open a volume. The default takes what is there.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// Bytes of the volume. `None` takes what is there; a new file needs it, a larger one grows files.
    pub size_bytes: Option<u64>,
    /// Requests that the kernel has at once, per device; [`QUEUE_DEPTH_DEFAULT`].
    pub queue_depth: Option<usize>,
    /// The width of a stripe; [`STRIPE_BYTES_DEFAULT`]. The same at every open, or the bytes are elsewhere.
    pub stripe_bytes: Option<u64>,
    /// Which backend.
    pub backend: BackendChoice,
    /// Whether files become private, and why; `None` leaves the modes of those that are there.
    pub private: Option<Privacy>,
}

impl Options {
    /// Checks what can be checked without a device: queue depth and stripe.
    pub(crate) fn checked(&self) -> Result<(usize, u64)> {
        let queue_depth = self.queue_depth.unwrap_or(QUEUE_DEPTH_DEFAULT);
        if !(1..=QUEUE_DEPTH_MAX).contains(&queue_depth) {
            return Err(Error::Invalid(format!("queue_depth must be 1 to {QUEUE_DEPTH_MAX}, not {queue_depth}")));
        }
        let stripe = self.stripe_bytes.unwrap_or(STRIPE_BYTES_DEFAULT);
        if !(STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&stripe) || !stripe.is_multiple_of(STRIPE_BYTES_MIN) {
            return Err(Error::Invalid(format!(
                "stripe must be a multiple of {STRIPE_BYTES_MIN} bytes, up to {STRIPE_BYTES_MAX}, not {stripe}"
            )));
        }
        if self.size_bytes == Some(0) {
            return Err(Error::Invalid("a volume of 0 bytes holds nothing; pass a larger size=".into()));
        }
        Ok((queue_depth, stripe))
    }
}
