//! Host memory that is planned once: regions, pinning, the arena and the chunk ring.
//!
//! A [`Region`] is page-aligned memory on huge pages, pinned where that can be had. An [`Arena`] divides one into
//! exact-size slots, once; leasing and returning them never allocates and never fragments. A [`ChunkRing`] is the
//! arena's special case of one size. A [`Lease`] is an RAII hold on a slot. Every byte is counted under an owner's name.
//! [`FileMemory`] is none of this: the pages of a file, which the kernel writes back and drops as it likes.

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
