//! Host memory that is allocated once and accounted by owner: regions, pinning, arenas and chunk rings.
//!
//! A [`Region`] is page-aligned memory on huge pages, pinned if possible. An [`Arena`] divides a region into slots of
//! exact sizes, once; leasing and returning slots never allocates and never fragments. A [`ChunkRing`] is an arena with
//! slots of one size. A [`Lease`] is an RAII hold on a slot. Every leased byte is counted under an owner's name.
//! [`FileMemory`] is separate: it maps a file, whose pages the kernel writes back and drops.

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
