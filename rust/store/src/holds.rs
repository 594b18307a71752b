//! Holds slots while they are read: nothing is staged into them meanwhile.

use std::{
    ops::{Deref, Range},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::{Error, Result, Store, index::Index, log::Ahead};

/// A hold on one slot of a record: nothing is staged into it meanwhile. What is needed to check bytes that were read
/// under it is in it, and outlives it.
pub(crate) struct Hold<S: Deref<Target = Store>> {
    pub(crate) store: S,
    pub(crate) record: usize,
    pub(crate) slot: usize,
    pub(crate) version: u64,
    /// Only memory has this version: nothing is to be read from the slot.
    pub(crate) alone: bool,
    /// What the slot lacked of the last commit when it was taken.
    lacks: Option<Ahead>,
    /// The first of the extents that may be checked, and their checksums.
    first: u32,
    sums: Box<[u64]>,
    /// Changed under the index's lock.
    open: AtomicBool,
}

impl<S: Deref<Target = Store>> Hold<S> {
    /// A hold on the live slot of a record, to read some of its extents.
    pub(crate) fn live(store: S, index: &mut Index, record: usize, extents: Range<u32>) -> Self {
        let slots = &index.records[record];
        let of = (slots.newest().0, slots.applied.is_some());
        let slot = slots.seen_slot();
        let lacks = index.log.live.ahead.get(&record).copied().filter(|_| !slots.is_settled());
        let mut hold = Self::on(store, index, (record, extents, slot), of);
        hold.lacks = lacks;
        hold
    }

    /// The same, of what the slot holds, though memory or the log has something newer.
    pub(crate) fn stored(store: S, index: &mut Index, record: usize, extents: Range<u32>) -> Self {
        let slots = &index.records[record];
        let slot = usize::from(slots.live);
        let of = (slots.versions[slot], false);
        Self::on(store, index, (record, extents, slot), of)
    }

    fn on(
        store: S,
        index: &mut Index,
        (record, extents, slot): (usize, Range<u32>, usize),
        (version, alone): (u64, bool),
    ) -> Self {
        index.records[record].reads[slot] += 1;
        let (first, start) = (extents.start, store.layout.record(record).first_extent);
        let sums = extents.map(|extent| index.sum(slot, (start + extent) as usize)).collect();
        Self { store, record, slot, version, alone, lacks: None, first, sums, open: AtomicBool::new(true) }
    }

    /// Refuses to take for a record what its slot holds, where gradients that a commit names come after it.
    pub(crate) fn require_newest(&self) -> Result<()> {
        let Some(lacks) = self.lacks else { return Ok(()) };
        if !lacks.is_spilled {
            return Err(self.store.not_applied(self.record));
        }
        let name = &self.store.description.records[self.record].name;
        Err(Error::Usage(format!(
            "a commit has left the last update of {name:?} to the step after it, and nobody had made it; begin anew"
        )))
    }

    /// Compares an extent that was read with its checksum.
    pub(crate) fn check(&self, extent: u32, bytes: &[u8], place: (u64, u64)) -> Result<()> {
        let (store, record) = (&*self.store, self.record);
        let wanted = self.sums[(extent - self.first) as usize];
        let got = store.sum_of(record, extent, self.version, bytes);
        if got == wanted {
            return Ok(());
        }
        let why = format!(
            "its checksum is {got:016x} and the catalog says {wanted:016x}; what was written is not what is there; \
             `memascend store verify` says whether the commit before is whole, which existing=\"previous\" opens"
        );
        Err(store.corrupt(store.named(record, extent), place, why))
    }

    /// Lets go of the slot: it was read.
    pub(crate) fn release(&self) {
        let mut index = self.store.index.lock();
        if self.open.swap(false, Relaxed) {
            index.records[self.record].reads[self.slot] -= 1;
            drop(index);
            self.store.index.notify_all();
        }
    }

    /// Takes the slot again, if it still holds what it held.
    pub(crate) fn retake(&self) -> Result<()> {
        let mut index = self.store.index.lock();
        if self.open.load(Relaxed) {
            return Ok(());
        }
        let slots = &mut index.records[self.record];
        let stands = if self.alone { slots.newest().0 } else { slots.versions[self.slot] };
        if stands != self.version {
            let name = &self.store.description.records[self.record].name;
            return Err(Error::Usage(format!(
                "the values of {name:?} that these parts are of were read once and are overwritten now; begin anew"
            )));
        }
        slots.reads[self.slot] += 1;
        self.open.store(true, Relaxed);
        Ok(())
    }
}

impl<S: Deref<Target = Store>> Drop for Hold<S> {
    fn drop(&mut self) {
        self.release();
    }
}
