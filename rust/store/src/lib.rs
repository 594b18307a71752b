//! Keeps training state on SSD, and commits each training step atomically.
//!
//! A [`Description`] lists the records (parameters and buffers) of a [`Store`] with their state tensors, grouped into
//! units. The store cuts each record into *extents*. Each extent is read, written and checksummed separately. Each
//! record has two *slots* on storage, and one of them is live. [`Store::begin`] and [`Store::stage`] write a step,
//! extent by extent, into the slots that are not live, while readers continue to see the live slots. [`Store::commit`]
//! makes all staged slots live at once, and also durable with [`Durability::Step`]; [`Store::discard`] drops the staged
//! extents.
//!
//! `docs/store-format.md` specifies the format, in enough detail to write another reader.

#![expect(clippy::cast_possible_truncation, reason = "offsets and sizes are 64-bit, and so is usize: asserted below")]

mod append;
mod bounds;
mod buffer;
mod catalog;
mod checking;
mod checksum;
mod commit;
mod copies;
mod counters;
mod description;
mod difference;
mod dtype;
mod encoded;
mod error;
mod examine;
mod features;
mod fetch;
mod fields;
mod format;
mod head;
mod holds;
mod index;
mod label;
mod layout;
mod log;
mod mixed;
mod newest;
mod newest_state;
mod open;
mod parts;
mod path;
mod places;
mod ram_tier;
mod ram_tier_updates;
mod read;
mod replay;
mod ring;
mod room;
mod root;
mod scan;
mod sizes;
mod snapshot;
mod spill;
mod stage;
mod step_write;
mod store;
mod table;
mod verify;
mod whole;

pub use buffer::{Buffer, Scratch, Shared, Transfer};
pub use catalog::{parse_description, parse_head_fields, parse_label, parse_root, parse_root_fields};
pub use checking::{Checkers, Checking};
pub use checksum::{Checksum, key_of};
pub use commit::Commit;
pub use counters::Counters;
pub use description::{Description, Kind, Record, StateTensor};
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use examine::Examined;
pub use fetch::Fetch;
pub use format::{BLOCK, COMPACT, Format, Master, MomentForm};
pub use head::{Head, LoggedGradient, LoggedRule, LoggedUpdate, StepHead};
pub use layout::{Content, Extent, Layout, PAGE_BYTES, RecordLayout, WHOLE_EXTENT_BYTES};
pub use log::LogState;
pub use newest::CommitId;
pub use newest_state::{Arithmetic, LoggedChunk};
pub use open::{Create, Existing};
pub use parts::{DeferredRun, PartFetch, Parts};
pub use ram_tier_updates::InMemoryUpdate;
pub use read::ExtentRead;
pub use replay::{LoggedRead, Replay};
pub use root::Run;
pub use scan::Part;
pub use sizes::Sizes;
pub use spill::SpillRead;
pub use step_write::StepWrite;
pub use store::{Durability, Info, RecordState, Settler, Store};
pub use verify::Verified;

const _: () = assert!(size_of::<usize>() == 8, "usize must have 64 bits, because a store can be larger than 4 GiB");
