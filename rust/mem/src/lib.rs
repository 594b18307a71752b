//! Allocates host memory once, pins it, divides it into slots, and counts the leased bytes of each owner.
//!
//! A [`Region`] is page-aligned memory. It is on huge pages if possible, and pinned as [`Pin`] says. An [`Arena`]
//! divides a region into slots of exact sizes. Taking a free slot or returning a slot allocates and fragments no
//! memory. A [`ChunkRing`] is an arena with slots of one size. A [`Lease`] holds a slot until the lease is dropped.
//! Every leased byte is counted under the name of its owner. A [`FileMemory`] is not a region: it maps a file, and the
//! kernel can write the pages of the file back and drop them.

mod arena;
mod cuda;
mod error;
mod file_memory;
mod free_list;
mod growing;
mod guarded;
mod heap;
mod layout;
mod limits;
mod living;
mod mapping;
mod owners;
mod region;
mod users;

pub use arena::{Arena, ArenaStats, ChunkRing, ClassStats, Lease};
pub use cuda::ignore_captures;
pub use error::{Error, Holder, Result};
pub use file_memory::{FileMemory, is_file_memory};
pub use growing::GrowingArena;
pub use guarded::{Ended, Guarded, Wait, caught, locked};
pub use heap::{begin_heap_backward, end_heap_step, settle_heap};
pub use layout::{ClassLayout, Layout};
pub use limits::{Headroom, MemoryLimits, memory_limits};
pub use living::Maker;
pub use mapping::{HugePages, KeepGoing, huge_pages, page_bytes};
pub use owners::{OWNERS_MAX, OwnerId, OwnerStats};
pub use region::{OnFork, Pin, Pinned, Region, RegionStats, regions};
