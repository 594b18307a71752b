//! Reads and writes files and raw block devices while the caller continues, with direct I/O if possible.
//!
//! A [`Volume`] is one address space over one or several devices. [`Volume::read`] and [`Volume::write`] take a
//! [`Buffer`] by value, for example a [`Lease`](memascend_mem::Lease), and return a [`Ticket`] at once. The ticket
//! returns the buffer once the kernel has finished with it. [`Volume::flush`] makes earlier writes durable.
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
//! How it works: a volume cuts each *operation* into *requests* of at most [`REQUEST_BYTES_MAX`] bytes. Each request is
//! for one device. A *backend* sends requests to the devices: either a thread that owns an `io_uring`, or a few threads
//! that call `preadv` and `pwritev`. `request.rs` interprets results (short transfers, errors) for all backends. The
//! threads of `unaligned.rs` copy unaligned transfers through aligned chunks.

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
pub use pending::{IsAbandoned, Lost, PENDING_SUFFIX};
pub use request::REQUEST_BYTES_MAX;
pub use stats::{Moved, VolumeStats};
pub use stripe::STRIPE_BYTES_DEFAULT;
pub use ticket::{Finished, NotBegun, Ticket};
pub use traffic::OPERATIONS_MAX;
pub use uring::why_no_io_uring;
pub use volume::{DeviceInfo, Volume};
