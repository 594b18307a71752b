//! Options for opening a volume, and their bounds.

use crate::{
    BackendChoice, Error, Privacy, Result,
    stripe::{STRIPE_BYTES_DEFAULT, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN},
};

/// The default number of requests that the kernel has at once, per device. The measured disks reach their peak
/// bandwidth with four to eight requests of 1 MiB, or with 16 requests of 256 KiB. With larger requests, a depth of 16
/// costs nothing.
pub const QUEUE_DEPTH_DEFAULT: usize = 16;
/// The largest queue depth: the depth that Linux gives an `NVMe` queue by default.
pub const QUEUE_DEPTH_MAX: usize = 1024;
/// The largest number of devices of one volume. Few machines have more. 32 devices at the largest queue depth need the
/// largest ring of the kernel, which has 32,768 entries.
pub const DEVICES_MAX: usize = 32;

/// Options for opening a volume. The defaults open existing devices at their full size.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// The size of the volume in bytes. `None` means the full size of the devices. A new file needs a size. Opening the
    /// volume grows each file that is smaller than the file's share of this size.
    pub size_bytes: Option<u64>,
    /// Requests per device: a volume of n devices has at most n times this number of requests in the kernel at once;
    /// default [`QUEUE_DEPTH_DEFAULT`].
    pub queue_depth: Option<usize>,
    /// The width of a stripe in bytes; default [`STRIPE_BYTES_DEFAULT`]. Always open a volume with the same width. With
    /// another width, an offset would mean other bytes.
    pub stripe_bytes: Option<u64>,
    /// The backend to use.
    pub backend: BackendChoice,
    /// Restricts access to files to their owner; `None` keeps the permissions of existing files.
    pub private: Option<Privacy>,
}

impl Options {
    /// Returns (queue depth, stripe bytes), or an error if an option is out of bounds.
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
            return Err(Error::Invalid("a volume cannot have 0 bytes; pass a larger size=".into()));
        }
        Ok((queue_depth, stripe))
    }
}
