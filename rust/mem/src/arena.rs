//! Leases exact-size slots that are planned once, then frozen. A lease is an RAII hold on a slot.
//!
//! A lease takes a slot of the smallest class that holds it, never of a larger one: a plan that admits a set of leases
//! then admits them in every order. Taking and returning is a short lock and a few atomic operations, and never allocates.

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

/// The owner mark of a slot that is free.
const NOBODY: u8 = u8::MAX;

/// What one class holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassStats {
    /// Bytes of a slot.
    pub bytes: usize,
    /// How many slots.
    pub count: usize,
    /// Slots leased now.
    pub in_use: usize,
    /// The most slots that were leased at once.
    pub peak: usize,
}

/// What an arena holds and did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaStats {
    /// Bytes that the plan asked for: the sum of all slots.
    pub capacity_bytes: usize,
    /// Bytes that the slots take up, alignment included.
    pub reserved_bytes: usize,
    /// Bytes of the slots leased now.
    pub in_use_bytes: usize,
    /// Bytes of the arena's own tables, on the heap.
    pub table_bytes: usize,
    /// What the living leases asked for, its peak, and the waits of all owners.
    pub total: OwnerStats,
    /// By class, smallest first.
    pub classes: Vec<ClassStats>,
    /// By owner, in the order of their first lease.
    pub owners: Vec<(String, OwnerStats)>,
}

/// A region divided into slots. See the module's description.
#[derive(Debug)]
pub struct Arena {
    shared: Arc<Shared>,
}

/// What leases keep alive.
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
    /// Who holds each slot, for the errors that name them; [`NOBODY`] where it is free.
    holders: Box<[AtomicU8]>,
}

impl Arena {
    /// Divides `region` into slots of `classes`, given as (bytes, count). A region belongs to one living arena.
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

    /// The owner called `name`, entered at its first call. Leases by a known owner allocate nothing.
    pub fn owner(&self, name: &str) -> Result<OwnerId> {
        self.shared.owners.named(name)
    }

    /// Takes `nbytes` for `owner`, from the smallest class that holds them.
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

    /// The slots.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.shared.layout
    }

    /// Bytes of the arena's own tables, on the heap.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        let classes = self.shared.layout.classes();
        let slots: usize = classes.iter().map(|class| class.count).sum();
        size_of::<Shared>() + slots * SLOT_TABLE_BYTES + classes.len() * CLASS_TABLE_BYTES
    }

    /// Slots that a lease of `nbytes` could take now: 0 where it would wait.
    pub fn free_slots(&self, nbytes: usize) -> Result<usize> {
        let class = self.shared.layout.class_for(nbytes)?;
        let count = self.shared.layout.classes()[class].count;
        Ok(count.saturating_sub(self.shared.classes[class].in_use.load(Relaxed)))
    }

    /// What it holds and did.
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

/// Heap bytes per slot: its place in the free list and its holder.
const SLOT_TABLE_BYTES: usize = size_of::<u32>() + size_of::<AtomicU8>();
/// Heap bytes per class.
const CLASS_TABLE_BYTES: usize = size_of::<Class>() + size_of::<crate::ClassLayout>();

impl Class {
    #[expect(clippy::cast_possible_truncation, reason = "the layout bounds the number of slots far below")]
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
        // SAFETY: the layout keeps every slot inside the region, whose start this is.
        unsafe { self.region.inner().start().add(class.offset + slot as usize * class.stride) }
    }

    /// Ends every wait for a lease.
    pub(crate) fn close(&self) {
        for class in &self.classes {
            class.free.close();
        }
    }

    fn give_back(&self, lease: &Lease) {
        let region = self.region.inner();
        if region.forked() {
            // The slot is the parent's, and a lock may have been copied in the middle of a hold.
            return;
        }
        self.total.given(lease.asked_bytes);
        self.owners.counters(lease.owner).given(lease.asked_bytes);
        let class = &self.classes[lease.class];
        class.given(lease.slot);
        class.free.give(lease.slot);
        region.leave();
    }

    /// The slow path: every slot of the class is taken.
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

/// Bytes of an arena, held until dropped. Nobody else has them meanwhile.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    class: usize,
    slot: u32,
    asked_bytes: usize,
    owner: OwnerId,
}

impl Lease {
    /// The bytes that were asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.asked_bytes
    }

    /// Never: a lease has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.asked_bytes == 0
    }

    /// The bytes of the slot that holds them.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.shared.layout.classes()[self.class].bytes
    }

    /// Whether its region was closed: then the last lease to go unmaps.
    #[must_use]
    pub fn is_region_closed(&self) -> bool {
        self.shared.region.is_closed()
    }

    /// The first byte. Valid for `slot_bytes()` while the lease lives.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.shared.address(self.class, self.slot)
    }

    /// The leased bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the slot is this lease's alone, initialised (the kernel's zeros at least) and mapped while it lives;
        // writing needs `&mut self` or the unsafety of `as_ptr`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().as_ptr(), self.asked_bytes) }
    }

    /// The leased bytes, to be written.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` is the only way in.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().as_ptr(), self.asked_bytes) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.give_back(self);
    }
}

/// A bounded pool of equal chunks. An arena of one class: what holds there holds here.
#[derive(Debug, Clone)]
pub struct ChunkRing {
    arena: Arc<Arena>,
    chunk_bytes: usize,
}

impl ChunkRing {
    /// Divides `region` into `count` chunks of `chunk_bytes`.
    pub fn new(region: &Region, chunk_bytes: usize, count: usize) -> Result<Self> {
        Ok(Self { arena: Arc::new(Arena::new(region, &[(chunk_bytes, count)])?), chunk_bytes })
    }

    /// The size of a chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// The owner called `name`.
    pub fn owner(&self, name: &str) -> Result<OwnerId> {
        self.arena.owner(name)
    }

    /// Takes a chunk; see [`Arena::lease`].
    pub fn lease(&self, owner: OwnerId, wait: Wait<'_>) -> Result<Lease> {
        self.arena.lease(self.chunk_bytes, owner, wait)
    }

    /// See [`Arena::stats`].
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.arena.stats()
    }
}
