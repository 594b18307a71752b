//! Direct I/O on files and raw block devices: the speed of the disk, and no silent byte.
//!
//! A [`Volume`] is one address space over one or several devices. [`Volume::read`] and [`Volume::write`] take a
//! [`Buffer`] by value, a [`Lease`](memascend_mem::Lease) for one, and return a [`Ticket`] at once; the buffer comes
//! back when the kernel is done with it. [`Volume::flush`] makes what was written last.
//!
//! ```
//! use memascend_nvme::{Options, Volume};
//!
//! let path = std::env::temp_dir().join(format!("memascend-nvme-doc-{}", std::process::id()));
//! let mut options = Options::default();
//! options.size_bytes = Some(1 << 20);
//! let volume = Volume::open(&[&path], &options)?;
//! let written = volume.write(vec![7; 4096], 8192).map_err(|refused| refused.error)?.wait();
//! assert_eq!(written.result?, 4096);
//! let read = volume.read(vec![0; 4096], 8192).map_err(|refused| refused.error)?.wait();
//! assert_eq!(read.buffer, vec![7; 4096]);
//! # std::fs::remove_file(path).map_err(|error| memascend_nvme::Error::Invalid(error.to_string()))?;
//! # Ok::<(), memascend_nvme::Error>(())
//! ```
//!
//! How it works: an *operation* is cut into *requests* of at most [`REQUEST_BYTES_MAX`] on one device each. A *backend*
//! carries requests: a thread that owns an `io_uring`, or a few threads with `pread` and `pwrite`. What an answer means
//! (short transfers, errors) is decided in one place for all of them. What is not aligned goes through chunks.

mod align;
mod backend;
mod buffer;
mod claim;
mod device;
mod error;
mod file;
mod fork;
mod lock;
mod operation;
mod options;
mod pending;
mod raw;
mod request;
mod signature;
mod stats;
mod stripe;
mod threads;
mod ticket;
mod traffic;
mod unaligned;
mod uring;
mod volume;

#[cfg(feature = "sim")]
pub mod sim;

pub use backend::{BackendChoice, BackendKind};
pub use buffer::{Buffer, Shared};
pub use claim::Claim;
pub use device::DeviceKind;
pub use error::{Action, Error, Result};
pub use file::{Missing, Privacy};
pub use operation::Lane;
pub use options::{DEVICES_MAX, Options, QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX};
pub use pending::{IsLeft, Lost, PENDING_SUFFIX};
pub use request::REQUEST_BYTES_MAX;
pub use stats::{Moved, VolumeStats};
pub use stripe::STRIPE_BYTES_DEFAULT;
pub use ticket::{Finished, NotBegun, Ticket};
pub use traffic::OPERATIONS_MAX;
pub use uring::why_no_io_uring;
pub use volume::{DeviceInfo, Volume};
