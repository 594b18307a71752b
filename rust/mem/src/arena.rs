//! Divides a region of memory into slots of planned sizes, and leases the slots. A lease holds a slot until the lease
//! is dropped.
//!
//! All slots of one size are a class. A lease takes a slot of the smallest class that fits, never of a larger class. So
//! if a plan has room for a set of leases, these leases can be taken in every order. Taking a free slot or returning a
//! slot costs a short lock and a few atomic operations, and allocates no memory.

use std::{
    collections::BTreeMap,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    Error, Holder, Layout, OwnerId, OwnerStats, Region, Result,
    free_list::FreeList,
    guarded::{Ended, Wait},
    owners::{Counters, Owners},
};

/// Marks a free slot in `holders`.
const NOBODY: u8 = u8::MAX;

/// Counters of one class, which is all slots of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassStats {
    /// Bytes of a slot.
    pub bytes: usize,
    /// Number of slots.
    pub count: usize,
    /// Leased slots.
    pub in_use: usize,
    /// The largest number of slots that were leased at once.
    pub peak: usize,
}

/// Counters of an arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaStats {
    /// The bytes that the plan asked for: the sum of all slots, without alignment.
    pub capacity_bytes: usize,
    /// Bytes that the slots occupy, including alignment.
    pub reserved_bytes: usize,
    /// Bytes of the leased slots.
    pub in_use_bytes: usize,
    /// Bytes of the arena's tables, on the heap.
    pub table_bytes: usize,
    /// The counters of the whole arena, over all owners.
    pub total: OwnerStats,
    /// The counters of each class, the smallest class first.
    pub classes: Vec<ClassStats>,
    /// The name and counters of each owner, in the order of the first calls of [`Arena::owner`].
    pub owners: Vec<(String, OwnerStats)>,
}

/// A region that is divided into slots.
#[derive(Debug)]
pub struct Arena {
    shared: Arc<Shared>,
}

/// Each lease keeps this part of its arena alive.
#[derive(Debug)]
pub(crate) struct Shared {
    region: Region,
    layout: Layout,
    classes: Box<[Class]>,
    owners: Owners,
    total: Counters,
}

#[derive(Debug)]
struct Class {
    free: FreeList,
    in_use: AtomicUsize,
    peak: AtomicUsize,
    /// For each slot, the index of its owner, or [`NOBODY`] for a free slot. The error of a lease that timed out names
    /// these owners.
    holders: Box<[AtomicU8]>,
}

impl Arena {
    /// Divides `region` into slots. Each item of `classes` is the size of a slot in bytes, and the number of slots of
    /// this size.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the plan `classes` is invalid, [`Error::RegionTooSmall`] if the region is too small for
    /// the plan, [`Error::RegionTaken`] if another living arena divides the region, [`Error::Closed`] if the region is
    /// closed, and [`Error::Forked`] in a forked child.
    pub fn new(region: &Region, classes: &[(usize, usize)]) -> Result<Self> {
        let shared = region.claim(|| {
            let layout = Layout::new(classes, region.bytes())?;
            let classes = layout.classes().iter().map(|class| Class::new(class.count)).collect();
            Ok(Arc::new(Shared {
                region: region.clone(),
                layout,
                classes,
                owners: Owners::new(),
                total: Counters::default(),
            }))
        })?;
        Ok(Self { shared })
    }

    /// Returns the owner called `name`. The first call with this name registers the owner and allocates memory, so
    /// leases need not.
    pub fn owner(&self, name: &str) -> Result<OwnerId> {
        self.shared.owners.named(name)
    }

    /// Takes a slot of the smallest class that fits `nbytes` bytes. If no such slot is free, waits for one as long as
    /// `wait` allows.
    pub fn lease(&self, nbytes: usize, owner: OwnerId, mut wait: Wait<'_>) -> Result<Lease> {
        let shared = &self.shared;
        shared.region.inner().usable()?;
        let class = shared.layout.class_for(nbytes)?;
        shared.region.inner().enter()?;
        let slot = match shared.classes[class].free.try_take() {
            Some(slot) => Ok(slot),
            None if wait.timeout == Some(Duration::ZERO) => Err(shared.timed_out(class, nbytes, Duration::ZERO)),
            None => shared.wait_for(class, nbytes, owner, &mut wait),
        };
        let slot = slot.inspect_err(|_| shared.region.inner().leave())?;
        shared.classes[class].taken(slot, owner);
        shared.owners.counters(owner).taken(nbytes);
        shared.total.taken(nbytes);
        Ok(Lease { shared: Arc::clone(shared), class, slot, asked_bytes: nbytes, owner })
    }

    /// The layout of the slots.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.shared.layout
    }

    /// Bytes of the arena's tables, on the heap.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        let classes = self.shared.layout.classes();
        let slots: usize = classes.iter().map(|class| class.count).sum();
        size_of::<Shared>() + slots * SLOT_TABLE_BYTES + classes.len() * CLASS_TABLE_BYTES
    }

    /// Returns the number of free slots of the class that serves leases of `nbytes` bytes.
    pub fn free_slots(&self, nbytes: usize) -> Result<usize> {
        let class = self.shared.layout.class_for(nbytes)?;
        let count = self.shared.layout.classes()[class].count;
        Ok(count.saturating_sub(self.shared.classes[class].in_use.load(Relaxed)))
    }

    /// Returns the arena's counters.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let Shared { layout, classes, owners, total, .. } = &*self.shared;
        let classes: Vec<ClassStats> = layout
            .classes()
            .iter()
            .zip(classes)
            .map(|(planned, class)| ClassStats {
                bytes: planned.bytes,
                count: planned.count,
                in_use: class.in_use.load(Relaxed),
                peak: class.peak.load(Relaxed),
            })
            .collect();
        ArenaStats {
            capacity_bytes: layout.asked_bytes(),
            reserved_bytes: layout.reserved_bytes(),
            in_use_bytes: classes.iter().map(|class| class.bytes * class.in_use).sum(),
            table_bytes: self.table_bytes(),
            total: total.read(),
            classes,
            owners: owners.read(),
        }
    }
}

/// Bytes on the heap for each slot: an entry in `FreeList`, and an entry in `holders`.
const SLOT_TABLE_BYTES: usize = size_of::<u32>() + size_of::<AtomicU8>();
/// Bytes on the heap for each class.
const CLASS_TABLE_BYTES: usize = size_of::<Class>() + size_of::<crate::ClassLayout>();

impl Class {
    #[expect(clippy::cast_possible_truncation, reason = "`SLOTS_MAX` bounds the number of slots far below")]
    fn new(count: usize) -> Self {
        Self {
            free: FreeList::new(count as u32),
            in_use: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            holders: std::iter::repeat_with(|| AtomicU8::new(NOBODY)).take(count).collect(),
        }
    }

    fn taken(&self, slot: u32, owner: OwnerId) {
        self.holders[slot as usize].store(owner.index(), Relaxed);
        let held = self.in_use.fetch_add(1, Relaxed) + 1;
        if held > self.peak.load(Relaxed) {
            self.peak.fetch_max(held, Relaxed);
        }
    }

    fn given(&self, slot: u32) {
        self.holders[slot as usize].store(NOBODY, Relaxed);
        self.in_use.fetch_sub(1, Relaxed);
    }
}

impl Shared {
    fn address(&self, class: usize, slot: u32) -> NonNull<u8> {
        let class = &self.layout.classes()[class];
        // SAFETY: `start` is the region's first byte, and the layout keeps every slot inside the region.
        unsafe { self.region.inner().start().add(class.offset + slot as usize * class.stride) }
    }

    /// Ends every wait for a lease with [`Error::Closed`].
    pub(crate) fn close(&self) {
        for class in &self.classes {
            class.free.close();
        }
    }

    fn give_back(&self, lease: &Lease) {
        let region = self.region.inner();
        if region.forked() {
            // The slot belongs to the parent. See [Note: forked child] in `living.rs`.
            return;
        }
        self.total.given(lease.asked_bytes);
        self.owners.counters(lease.owner).given(lease.asked_bytes);
        let class = &self.classes[lease.class];
        class.given(lease.slot);
        class.free.give(lease.slot);
        region.leave();
    }

    /// Waits for a slot, after `lease` has found that no slot of the class is free.
    #[cold]
    fn wait_for(&self, class: usize, asked_bytes: usize, owner: OwnerId, wait: &mut Wait<'_>) -> Result<u32> {
        let began = Instant::now();
        let ended = match self.classes[class].free.take(wait) {
            Ok(slot) => slot.ok_or(Error::Closed),
            Err(Ended::TimedOut(waited)) => Err(self.timed_out(class, asked_bytes, waited)),
            Err(Ended::Interrupted) => Err(Error::Interrupted { asked_bytes }),
        };
        let waited = began.elapsed();
        self.owners.counters(owner).waited(waited);
        self.total.waited(waited);
        ended
    }

    fn timed_out(&self, class: usize, asked_bytes: usize, waited: Duration) -> Error {
        let mut slots = BTreeMap::<u8, usize>::new();
        for holder in &self.classes[class].holders {
            *slots.entry(holder.load(Relaxed)).or_default() += 1;
        }
        slots.remove(&NOBODY);
        let name = |index| self.owners.name(OwnerId::from_index(index)).to_owned();
        let planned = &self.layout.classes()[class];
        Error::TimedOut {
            asked_bytes,
            class_bytes: planned.bytes,
            class_count: planned.count,
            waited,
            holders: slots.into_iter().map(|(index, slots)| Holder { owner: name(index), slots }).collect(),
        }
    }
}

/// The exclusive use of bytes in an arena, until the lease is dropped.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    class: usize,
    slot: u32,
    asked_bytes: usize,
    owner: OwnerId,
}

impl Lease {
    /// The bytes that the caller asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.asked_bytes
    }

    /// Always false, because a lease has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.asked_bytes == 0
    }

    /// The size of the slot in bytes. It is at least `len()`.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.shared.layout.classes()[self.class].bytes
    }

    /// True if the region was closed. The region is then unmapped when its last lease is dropped.
    #[must_use]
    pub fn is_region_closed(&self) -> bool {
        self.shared.region.is_closed()
    }

    /// The address of the first byte. The pointer is valid for `slot_bytes()` bytes while the lease lives.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.shared.address(self.class, self.slot)
    }

    /// The leased bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the slot is mapped while the lease lives, initialised (the kernel zeroed it) and leased to no other
        // caller. Writing needs `&mut self`, or unsafe code with `as_ptr`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().as_ptr(), self.asked_bytes) }
    }

    /// The leased bytes, which the caller may change.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the slot is mapped and initialised while the lease lives. `&mut self` excludes other references.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().as_ptr(), self.asked_bytes) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.give_back(self);
    }
}

/// A pool with a fixed number of chunks of one size. It is an arena with one class.
#[derive(Debug, Clone)]
pub struct ChunkRing {
    arena: Arc<Arena>,
    chunk_bytes: usize,
}

impl ChunkRing {
    /// Divides `region` into `count` chunks of `chunk_bytes` bytes.
    pub fn new(region: &Region, chunk_bytes: usize, count: usize) -> Result<Self> {
        Ok(Self { arena: Arc::new(Arena::new(region, &[(chunk_bytes, count)])?), chunk_bytes })
    }

    /// The size of a chunk in bytes.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Returns the owner called `name`; see [`Arena::owner`].
    pub fn owner(&self, name: &str) -> Result<OwnerId> {
        self.arena.owner(name)
    }

    /// Takes a chunk; see [`Arena::lease`].
    pub fn lease(&self, owner: OwnerId, wait: Wait<'_>) -> Result<Lease> {
        self.arena.lease(self.chunk_bytes, owner, wait)
    }

    /// Returns the counters; see [`Arena::stats`].
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.arena.stats()
    }
}
