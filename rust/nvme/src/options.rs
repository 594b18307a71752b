//! Options for opening a volume, and their bounds.

use crate::{
    BackendChoice, Error, Privacy, Result,
    stripe::{STRIPE_BYTES_DEFAULT, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN},
};

/// The default number of requests that the kernel has at once, per device. Disks reach their peak bandwidth with four
/// to eight requests of 1 MiB, or with 16 requests of 256 KiB. A depth of 16 costs nothing with larger requests.
pub const QUEUE_DEPTH_DEFAULT: usize = 16;
/// The largest queue depth: the depth of an `NVMe` queue.
pub const QUEUE_DEPTH_MAX: usize = 1024;
/// The most devices of one volume. No machine has more, and their requests fit into one ring.
pub const DEVICES_MAX: usize = 32;

/// Options for opening a volume. The defaults open existing devices at their full size.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// Bytes of the volume. `None` takes the size of the devices; a new file needs a size. Smaller files grow to the
    /// size.
    pub size_bytes: Option<u64>,
    /// The most requests that the kernel has at once, per device; default [`QUEUE_DEPTH_DEFAULT`].
    pub queue_depth: Option<usize>,
    /// The width of a stripe in bytes; default [`STRIPE_BYTES_DEFAULT`]. Every open of a volume must use the same
    /// width, else offsets map to other places.
    pub stripe_bytes: Option<u64>,
    /// The backend to use.
    pub backend: BackendChoice,
    /// Restricts access to files to their owner; `None` keeps the permissions of existing files.
    pub private: Option<Privacy>,
}

impl Options {
    /// Returns (queue depth, stripe bytes), or an error for an option that is wrong whatever the devices are.
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
