//! Keeps records in RAM while the store is open: their values, which modules use in place, and their optimizer state.
//!
//! [Note: RAM tier versions] `CachedVersions::versions` has the version of each extent in memory. An extent is *fresh*
//! if its version in memory is the newest version of its record. Otherwise the extent is *stale*. If storage also has
//! the newest version, `Store::stage` replaces the extent in memory at once, under the version of the next commit.
//! After a discard this extent is stale, and [`Store::refresh`] reads it again. If an update was applied only in memory
//! (`Slots::applied`), memory has the only copy of the newest version, and `Store::stage` does not replace it.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
};

use memascend_mem::{Arena, KeepGoing, Maker, OnFork, Pin, Region, Wait, locked};

use crate::{
    Buffer, Content, Description, Error, Layout, Result, Shared, Store,
    buffer::bytes_of,
    holds::Hold,
    index::{Index, closed},
    layout::Extent,
    verify::in_flight,
};

/// The largest number of reads in flight in [`Store::refresh`].
const DEPTH: usize = 16;

/// The memory of the records that are kept in RAM.
#[derive(Debug)]
pub(crate) struct RamTier {
    memory: Shared,
    records: BTreeMap<usize, RamTierRecord>,
    /// For each unit whose records with values are all in RAM, the range of these values in `memory`.
    units: BTreeMap<usize, Range<usize>>,
    /// The process that allocated `memory`: a forked child sees zeros in this memory.
    maker: Maker,
}

#[derive(Debug)]
struct RamTierRecord {
    /// Offsets of the values and of the state in `RamTier::memory`.
    values: usize,
    state: usize,
    now: Mutex<CachedVersions>,
}

/// The versions of a record's extents in memory. `Store::copy_in_ram`, `Store::keep` and `Store::rebuild` hold the lock
/// of the record's `CachedVersions` while they use the record's memory. This lock does not exclude other accesses to
/// the memory: modules that compute with the values, updates ([`InMemoryUpdate`](crate::InMemoryUpdate)), checks, and
/// transfers of the devices.
#[derive(Debug)]
pub(crate) struct CachedVersions {
    /// The version of each extent; 0 if memory does not have the extent, or has bytes that belong to no version.
    pub(crate) versions: Box<[u64]>,
    /// The checksum of each chunk of values, if only memory has the newest version. All other checksums are in the
    /// index.
    pub(crate) sums: Box<[u64]>,
}

impl Layout {
    /// Returns the bytes of memory that a record takes in the RAM tier: for its values, and for its state.
    #[must_use]
    pub fn ram_tier_bytes(&self, description: &Description, record: usize) -> (u64, u64) {
        let bytes = |extents: Range<u32>| extents.map(|extent| self.extent(description, record, extent).bytes()).sum();
        let chunks = self.chunks_of(record);
        (bytes(0..chunks), bytes(chunks..self.extents_of(record)))
    }
}

impl Store {
    /// Allocates [`Layout::ram_tier_bytes`] of memory for each of `records`, and keeps these records in RAM from then
    /// on. The records that were kept in RAM before are no longer kept. Reads nothing: [`Store::refresh`] reads the
    /// records. `keep_going` is called during the allocation; see [`Region::interruptible`].
    ///
    /// # Errors
    /// Fails if memory has the only copy of a record, a record does not exist, the store is closed, the memory cannot
    /// be allocated, or `keep_going` returns `false`.
    pub fn hold(&self, records: &[usize], pin: Pin, keep_going: KeepGoing<'_>) -> Result<()> {
        if self.index.lock().has_ram_only_state() {
            return Err(Error::Usage(
                "only memory has the newest values of parameters kept in RAM, so the choice of these parameters cannot \
                 change: close the store and open it again"
                    .into(),
            ));
        }
        self.index.lock().ram_tier = None;
        let made = self.allocate_ram_tier(records, pin, keep_going)?.map(Arc::new);
        let mut index = self.index.lock();
        if index.is_closed() {
            return Err(closed());
        }
        index.ram_tier = made;
        Ok(())
    }

    fn allocate_ram_tier(&self, records: &[usize], pin: Pin, keep_going: KeepGoing<'_>) -> Result<Option<RamTier>> {
        let mut ram_tier = BTreeMap::new();
        for &record in records {
            self.known(record)?;
            let chunks = self.layout.chunks_of(record) as usize;
            let versions = vec![0; self.layout.extents_of(record) as usize].into();
            let now = Mutex::new(CachedVersions { versions, sums: vec![0; chunks].into() });
            ram_tier.insert(record, RamTierRecord { values: 0, state: 0, now });
        }
        // Place the values of all records first, so that the values of a unit have the same layout as in the memory of
        // `Store::fetch`. Place all state after them.
        let mut end = 0;
        for (&record, of_record) in &mut ram_tier {
            of_record.values = end;
            end += self.layout.ram_tier_bytes(&self.description, record).0 as usize;
        }
        let units = (0..self.description.units.len()).filter_map(|unit| {
            // Ignore records without values: the plan may leave them out of the RAM tier, and the unit still counts as
            // complete.
            let valued = |&record: &usize| self.layout.ram_tier_bytes(&self.description, record).0 > 0;
            let mut records = self.records_of(unit).filter(valued).peekable();
            let first = ram_tier.get(records.peek()?)?.values;
            let nbytes = self.layout.unit_bytes(unit) as usize;
            let whole = records.all(|record| ram_tier.contains_key(&record));
            whole.then_some((unit, first..first + nbytes))
        });
        let units = units.collect();
        for (&record, of_record) in &mut ram_tier {
            of_record.state = end;
            end += self.layout.ram_tier_bytes(&self.description, record).1 as usize;
        }
        if end == 0 {
            return Ok(None);
        }
        let region = Region::interruptible(end, pin, OnFork::Wipe, "records in RAM", keep_going)?;
        let arena = Arena::new(&region, &[(end, 1)])?;
        let memory = Shared::new(arena.lease(end, arena.owner("records in RAM")?, Wait::never())?);
        Ok(Some(RamTier { memory, records: ram_tier, units, maker: Maker::here() }))
    }

    /// True if a record is kept in RAM.
    #[must_use]
    pub fn is_in_ram(&self, record: usize) -> bool {
        self.ram_tier().is_some_and(|ram_tier| ram_tier.records.contains_key(&record))
    }

    /// Returns the memory of a unit's values, if all records of the unit that have values are in RAM. After
    /// [`Store::refresh`] of these records, the memory has the values of the last commit.
    #[must_use]
    pub fn ram_tier_unit(&self, unit: usize) -> Option<Shared> {
        let ram_tier = self.ram_tier()?;
        let range = ram_tier.units.get(&unit)?;
        ram_tier.memory.part(range.start, range.len())
    }

    /// Returns the count of events that may have made extents in memory stale. While the count is unchanged since a
    /// [`Store::refresh`], the caller need not refresh again.
    #[must_use]
    pub fn ram_tier_epoch(&self) -> u64 {
        self.index.lock().ram_tier_epoch
    }

    /// Marks the values of a record in memory as stale, because something wrote to these values in place.
    pub fn invalidate_values(&self, record: usize) {
        if let Some(of_record) = self.ram_tier().as_ref().and_then(|ram_tier| ram_tier.records.get(&record)) {
            let mut now = locked(&of_record.now);
            let chunks = self.layout.chunks_of(record) as usize;
            now.versions[..chunks].fill(0);
            drop(now);
            self.index.lock().ram_tier_epoch += 1;
        }
    }

    /// Reads the stale extents of `records` from storage into the RAM tier. If only memory had the newest version of a
    /// chunk, rebuilds the chunk from the log, or fails if the log does not have the record's gradients. `progress`
    /// receives the bytes done and the total, and returns `false` to stop.
    pub fn refresh(&self, records: &[usize], progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let Some(ram_tier) = self.ram_tier() else { return Ok(()) };
        let (mut stale, mut lost) = (Vec::new(), Vec::new());
        for &record in records {
            let Some(of_record) = ram_tier.records.get(&record) else { continue };
            let (version, alone) = {
                let slots = &self.index.lock().records[record];
                (slots.newest().0, slots.applied.is_some())
            };
            let now = locked(&of_record.now);
            let extents = (0..).zip(&now.versions).filter(|&(_, &has)| has != version).map(|(extent, _)| extent);
            if alone {
                // Only values can be stale here: modules and users have no access to the state.
                let chunks: Vec<u32> = extents.filter(|&extent| extent < self.layout.chunks_of(record)).collect();
                lost.extend((!chunks.is_empty()).then_some((record, chunks)));
            } else {
                stale.extend(extents.map(|extent| (record, extent)));
            }
        }
        for (record, chunks) in lost {
            if !self.index.lock().log.is_ahead(record) {
                return Err(self.lost(record));
            }
            self.rebuild(&ram_tier, record, &chunks)?;
        }
        let bytes = |&(record, extent): &(usize, u32)| self.layout.extent(&self.description, record, extent).bytes();
        let all = stale.iter().map(bytes).sum();
        let mut done = 0;
        let begin = |(record, extent)| {
            let into = ram_tier.part(self, record, extent);
            Ok((record, extent, into.len() as u64, self.read_from(None, record, extent, into)?))
        };
        in_flight(DEPTH, stale.into_iter(), begin, |(record, extent, bytes, read)| {
            let (_, version) = read.wait()?;
            locked(&ram_tier.records[&record].now).versions[extent as usize] = version;
            done += bytes;
            if progress(done, all) { Ok(()) } else { Err(Error::Interrupted("reads of records kept in RAM")) }
        })
    }

    /// Returns the error for a record whose newest version was only in memory, if memory no longer has this version, or
    /// if the memory is that of the parent process from which this process was forked.
    pub(crate) fn lost(&self, record: usize) -> Error {
        let name = &self.description.records[record].name;
        if self.index.lock().ram_tier.as_ref().is_some_and(|ram_tier| ram_tier.maker.is_elsewhere()) {
            return Error::Usage(format!(
                "{name:?} is in the memory of the process that opened the store, and this process was forked from it: \
                 use the store only in the process that opened the store"
            ));
        }
        Error::Usage(format!(
            "only memory had the newest values of {name:?}, and it no longer has them, probably because they were \
             written to in place while the model computed. With durability=\"step\", close the store and open it \
             again, which restores them from the log. Otherwise no other copy of them exists: load a checkpoint. To \
             have a second copy in the future, pass storage= with durability=\"step\""
        ))
    }

    /// Copies an extent from the RAM tier to `into`. `into` must have the extent's size, and nothing else may use
    /// `into` during the call. Returns `false`, and copies nothing, if memory does not have the extent in `version`.
    pub(crate) fn copy_in_ram(
        &self,
        ram_tier: Option<&RamTier>,
        (record, extent): (usize, u32),
        version: u64,
        into: &mut impl Buffer,
    ) -> bool {
        let Some((ram_tier, of_record)) =
            ram_tier.and_then(|ram_tier| Some((ram_tier, ram_tier.records.get(&record)?)))
        else {
            return false;
        };
        let now = locked(&of_record.now);
        if version == 0 || now.versions[extent as usize] != version {
            return false;
        }
        let from = ram_tier.part(self, record, extent);
        assert_eq!(into.len(), from.len(), "the buffer must have the size of the extent");
        // SAFETY: `from` and `into` have the same length, asserted above, and do not overlap. The caller owns `into`.
        // The lock on `CachedVersions` excludes other copies. `announce` waits for the caller's `Hold`, so no update of
        // `from` begins before this hold is released.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().as_ptr(), into.as_mut_ptr().as_ptr(), into.len()) };
        self.counters.took_in_ram(into.len() as u64);
        true
    }

    /// Copies `bytes`, the content of an extent that is being staged, to the RAM tier. Sets the extent's version there
    /// to `version`. Does nothing if the record is not in RAM, or if memory has the only copy of the version that the
    /// bytes would replace.
    pub(crate) fn keep(&self, ram_tier: Option<&RamTier>, (record, extent): (usize, u32), version: u64, bytes: &[u8]) {
        let Some((ram_tier, of_record)) =
            ram_tier.and_then(|ram_tier| Some((ram_tier, ram_tier.records.get(&record)?)))
        else {
            return;
        };
        if self.index.lock().records[record].applied.is_some() {
            return;
        }
        let mut now = locked(&of_record.now);
        let into = ram_tier.part(self, record, extent);
        assert_eq!(bytes.len(), into.len(), "the bytes must have the size of the extent");
        // SAFETY: `bytes` and `into` have the same length, asserted above, and do not overlap. The lock on
        // `CachedVersions` excludes other copies, and the engine stages records in RAM only while no module computes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into.as_ptr().as_ptr(), bytes.len()) };
        now.versions[extent as usize] = version;
    }

    /// Returns the RAM tier, or `None` if no record is kept in RAM. Also returns `None` in a forked child, which cannot
    /// see the memory of the RAM tier.
    pub(crate) fn ram_tier(&self) -> Option<Arc<RamTier>> {
        self.index.lock().ram_tier.clone().filter(|ram_tier| !ram_tier.maker.is_elsewhere())
    }

    /// Checks a chunk of values in memory against the chunk's checksum in the newest version of the record. If the
    /// checksums differ, marks the record's values as stale and fails.
    pub(crate) fn check_in_ram(&self, ram_tier: &RamTier, record: usize, chunk: u32) -> Result<()> {
        let number = (self.layout.record(record).first_extent + chunk) as usize;
        let (version, stored) = {
            let index = self.index.lock();
            let slots = &index.records[record];
            let stored = slots.applied.is_none().then(|| index.sum(usize::from(slots.live), number));
            (slots.newest().0, stored)
        };
        let now = ram_tier.now(record);
        let wanted = stored.unwrap_or(now.sums[chunk as usize]);
        drop(now);
        if self.sum_of(record, chunk, version, bytes_of(&ram_tier.part(self, record, chunk))) == wanted {
            return Ok(());
        }
        self.invalidate_values(record);
        Err(self.written_in_place(record))
    }

    /// Returns the error for values in memory that were written to in place.
    pub(crate) fn written_in_place(&self, record: usize) -> Error {
        let name = &self.description.records[record].name;
        Error::Usage(format!(
            "the values of {name:?} were written to in place while the model computed, in a way that torch cannot \
             detect, such as .data: call zero_grad(), then change the values within \
             memascend.materialized(model, modify=True)"
        ))
    }

    /// Checks `bytes`, a copy of an extent in memory, against the checksum of the extent in the slot of `hold`. If the
    /// checksums differ, marks the record's values as stale and fails. Skips the check if memory has the only copy of
    /// this version.
    pub(crate) fn check_copy(&self, hold: &Hold<&Self>, extent: u32, bytes: &[u8], place: (u64, u64)) -> Result<()> {
        if hold.alone || hold.check(extent, bytes, place).is_ok() {
            return Ok(());
        }
        self.invalidate_values(hold.record);
        Err(self.written_in_place(hold.record))
    }
}

impl RamTier {
    /// Returns the memory of an extent of a record that is in RAM.
    pub(crate) fn part(&self, store: &Store, record: usize, extent: u32) -> Shared {
        let (of_record, laid) = (&self.records[&record], store.layout.record(record));
        let extent: Extent = store.layout.extent(&store.description, record, extent);
        let at = match extent.content {
            Content::Values { .. } => of_record.values + (extent.at - laid.values_at) as usize,
            _ => of_record.state + (extent.at - laid.state_at) as usize,
        };
        let part = self.memory.part(at, extent.bytes() as usize);
        part.unwrap_or_else(|| unreachable!("the RAM tier has memory for every extent"))
    }

    /// Locks the [`CachedVersions`] of a record.
    pub(crate) fn now(&self, record: usize) -> MutexGuard<'_, CachedVersions> {
        locked(&self.records[&record].now)
    }
}

impl Index {
    /// Increments `ram_tier_epoch` if the record is in RAM: memory may have extents of the record in a version that is
    /// staged or was discarded.
    pub(crate) fn note_stale(&mut self, record: usize) {
        if self.ram_tier.as_ref().is_some_and(|ram_tier| ram_tier.records.contains_key(&record)) {
            self.ram_tier_epoch += 1;
        }
    }
}
