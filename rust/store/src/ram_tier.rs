//! Holds records in memory for as long as the store is open: their values, bound where they lie, and their state.
//!
//! Each extent is in memory under the version of what it holds. Where storage has the newest version, too, what is staged
//! replaces the extent in memory at once: a discard makes that stale, and [`Store::refresh`] reads it again. Where an
//! update was applied in memory alone (`applied`), memory is the only copy, and nothing but an update writes to it.

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

/// Extents that are read at once where many are.
const DEPTH: usize = 16;

/// Memory in which some records are in RAM.
#[derive(Debug)]
pub(crate) struct RamTier {
    memory: Shared,
    records: BTreeMap<usize, RamTierRecord>,
    /// Where the values of each unit lie of which all records are in RAM.
    units: BTreeMap<usize, Range<usize>>,
    /// The process that has it: a forked child sees zeros there.
    maker: Maker,
}

#[derive(Debug)]
struct RamTierRecord {
    /// Where its values and its state begin in the memory.
    values: usize,
    state: usize,
    now: Mutex<Now>,
}

/// What memory holds of a record. Whoever reads or writes that memory has this locked, but for those who compute with the
/// values and for an update.
#[derive(Debug)]
pub(crate) struct Now {
    /// The version of each extent; 0: nothing, or what is no version's.
    pub(crate) versions: Box<[u64]>,
    /// Of the values, where memory alone has them; otherwise the index knows.
    pub(crate) sums: Box<[u64]>,
}

impl Layout {
    /// What it takes to hold a record: bytes of its values, and of its state.
    #[must_use]
    pub fn ram_tier_bytes(&self, description: &Description, record: usize) -> (u64, u64) {
        let bytes = |extents: Range<u32>| extents.map(|extent| self.extent(description, record, extent).bytes()).sum();
        let chunks = self.chunks_of(record);
        (bytes(0..chunks), bytes(chunks..self.extents_of(record)))
    }
}

impl Store {
    /// Holds records from now on, in memory of [`Layout::ram_tier_bytes`] for each; nothing is read now. What was in RAM before
    /// is not any more. `keep_going` is asked while the memory is made, as by [`Region::interruptible`].
    pub fn hold(&self, records: &[usize], pin: Pin, keep_going: KeepGoing<'_>) -> Result<()> {
        if self.index.lock().has_applied() {
            return Err(Error::Usage(
                "memory has the only copy of parameters kept in RAM: close the store first".into(),
            ));
        }
        self.index.lock().ram_tier = None;
        let made = self.made_room(records, pin, keep_going)?.map(Arc::new);
        let mut index = self.index.lock();
        if index.is_closed() {
            return Err(closed());
        }
        index.ram_tier = made;
        Ok(())
    }

    fn made_room(&self, records: &[usize], pin: Pin, keep_going: KeepGoing<'_>) -> Result<Option<RamTier>> {
        let mut ram_tier = BTreeMap::new();
        for &record in records {
            self.known(record)?;
            let chunks = self.layout.chunks_of(record) as usize;
            let versions = vec![0; self.layout.extents_of(record) as usize].into();
            let now = Mutex::new(Now { versions, sums: vec![0; chunks].into() });
            ram_tier.insert(record, RamTierRecord { values: 0, state: 0, now });
        }
        // The values of all of them, so that those of a unit lie as it is fetched; then their state.
        let mut end = 0;
        for (&record, of_record) in &mut ram_tier {
            of_record.values = end;
            end += self.layout.ram_tier_bytes(&self.description, record).0 as usize;
        }
        let units = (0..self.description.units.len()).filter_map(|unit| {
            // A record without values needs no place: whoever chooses what is in RAM may leave it out.
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

    /// Whether a record is in RAM.
    #[must_use]
    pub fn is_in_ram(&self, record: usize) -> bool {
        self.ram_tier().is_some_and(|ram_tier| ram_tier.records.contains_key(&record))
    }

    /// The values of a unit where they are in RAM, if all of its records are. [`Store::refresh`] says when they are those of
    /// the last commit.
    #[must_use]
    pub fn ram_tier_unit(&self, unit: usize) -> Option<Shared> {
        let ram_tier = self.ram_tier()?;
        let range = ram_tier.units.get(&unit)?;
        ram_tier.memory.part(range.start, range.len())
    }

    /// Counts what made extents in memory stale. As long as the count stays, an extent that is fresh stays fresh.
    #[must_use]
    pub fn ram_tier_epoch(&self) -> u64 {
        self.index.lock().ram_tier_epoch
    }

    /// Says that the values of a record in memory are not those of its version any more: somebody wrote to them.
    pub fn spoil(&self, record: usize) {
        if let Some(of_record) = self.ram_tier().as_ref().and_then(|ram_tier| ram_tier.records.get(&record)) {
            let mut now = locked(&of_record.now);
            let chunks = self.layout.chunks_of(record) as usize;
            now.versions[..chunks].fill(0);
            drop(now);
            self.index.lock().ram_tier_epoch += 1;
        }
    }

    /// Reads what is in RAM of some records, and is stale, from storage. `progress` gets bytes done and of all, and ends
    /// it by `false`.
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
                // The state is as it was: somebody wrote to values.
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
            if progress(done, all) { Ok(()) } else { Err(Error::Interrupted("reading what is in RAM")) }
        })
    }

    /// That values in memory, the only ones, were written to; or are another process's.
    pub(crate) fn lost(&self, record: usize) -> Error {
        let name = &self.description.records[record].name;
        if self.index.lock().ram_tier.as_ref().is_some_and(|ram_tier| ram_tier.maker.is_elsewhere()) {
            return Error::Usage(format!(
                "{name:?} is in the memory of the process that opened the store, and this one was forked from it: use it there"
            ));
        }
        Error::Usage(format!(
            "the values of {name:?} were written to in place while the model computed, and there is no other copy of them: \
             go back to a checkpoint. A store of one's own (storage=) with durability=\"step\" keeps one"
        ))
    }

    /// Copies an extent that is in RAM in this version to `into`, which has its size and which nothing uses; `false` where it
    /// is not in RAM.
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
        assert_eq!(into.len(), from.len(), "room of another size than the extent");
        // SAFETY: both have room for the extent; the memory is the lock's holder's, and `into` the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().as_ptr(), into.as_mut_ptr().as_ptr(), into.len()) };
        self.counters.took_in_ram(into.len() as u64);
        true
    }

    /// Holds an extent that is written now, if its record is one that is in RAM; not where memory has the only copy of what it
    /// replaces.
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
        assert_eq!(bytes.len(), into.len(), "an extent of another size");
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into.as_ptr().as_ptr(), bytes.len()) };
        now.versions[extent as usize] = version;
    }

    /// Where records are kept now. Nowhere in a forked child, which reads storage then, and is refused.
    pub(crate) fn ram_tier(&self) -> Option<Arc<RamTier>> {
        self.index.lock().ram_tier.clone().filter(|ram_tier| !ram_tier.maker.is_elsewhere())
    }

    /// That an extent of values in memory is what its version was left as.
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
        self.spoil(record);
        Err(self.written_in_place(record))
    }

    pub(crate) fn written_in_place(&self, record: usize) -> Error {
        let name = &self.description.records[record].name;
        Error::Usage(format!(
            "the values of {name:?} were written to in place while the model computed, past torch's counters (.data?): \
             call zero_grad(), and change them within memascend.materialized(model, modify=True)"
        ))
    }

    /// An extent that is read from memory, checked as one that is read from storage where that has it, too.
    pub(crate) fn check_copy(&self, hold: &Hold<&Self>, extent: u32, bytes: &[u8], place: (u64, u64)) -> Result<()> {
        if hold.alone || hold.check(extent, bytes, place).is_ok() {
            return Ok(());
        }
        self.spoil(hold.record);
        Err(self.written_in_place(hold.record))
    }
}

impl RamTier {
    /// The memory of an extent.
    pub(crate) fn part(&self, store: &Store, record: usize, extent: u32) -> Shared {
        let (of_record, laid) = (&self.records[&record], store.layout.record(record));
        let extent: Extent = store.layout.extent(&store.description, record, extent);
        let at = match extent.content {
            Content::Values { .. } => of_record.values + (extent.at - laid.values_at) as usize,
            _ => of_record.state + (extent.at - laid.state_at) as usize,
        };
        let part = self.memory.part(at, extent.bytes() as usize);
        part.unwrap_or_else(|| unreachable!("room was made for every extent of what is in RAM"))
    }

    /// What memory holds of a record.
    pub(crate) fn now(&self, record: usize) -> MutexGuard<'_, Now> {
        locked(&self.records[&record].now)
    }
}

impl Index {
    /// Says that what is in memory of a record may be of a version that is not live: one that is staged, or was.
    pub(crate) fn note_stale(&mut self, record: usize) {
        if self.ram_tier.as_ref().is_some_and(|ram_tier| ram_tier.records.contains_key(&record)) {
            self.ram_tier_epoch += 1;
        }
    }
}
