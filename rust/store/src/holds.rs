//! Holds slots for readers: while a hold on a slot is open, nothing is staged into that slot.

use std::{
    ops::{Deref, Range},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::{Error, Result, Store, checksum::mismatch, index::Index, log::Ahead};

/// A hold on one slot of a record. While the hold is open, [`Store::begin`] waits before it stages into that slot. The
/// hold has the version and checksums of the slot, so a reader can still check bytes after the reader has released the
/// slot.
pub(crate) struct Hold<S: Deref<Target = Store>> {
    pub(crate) store: S,
    pub(crate) record: usize,
    pub(crate) slot: usize,
    pub(crate) version: u64,
    /// True if only the RAM tier has this version. The slot then has an older version and must not be read.
    pub(crate) alone: bool,
    /// The committed gradients that were not applied in the slot when the hold was taken; `None` if all gradients were
    /// applied, and in a hold of [`Hold::stored`].
    lacks: Option<Ahead>,
    /// The number, in the record, of the extent whose checksum is first in `sums`.
    first: u32,
    /// The checksums of the extents that may be checked.
    sums: Box<[u64]>,
    /// True while the index counts this hold as an open read. This field is changed only under the index's lock.
    open: AtomicBool,
}

impl<S: Deref<Target = Store>> Hold<S> {
    /// Takes a hold on the record's slot that readers see. The hold has the checksums of `extents`.
    pub(crate) fn live(store: S, index: &mut Index, record: usize, extents: Range<u32>) -> Self {
        let slots = &index.records[record];
        let of = (slots.newest().0, slots.applied.is_some());
        let slot = slots.seen_slot();
        let lacks = index.log.live.ahead.get(&record).copied().filter(|_| !slots.is_settled());
        let mut hold = Self::on(store, index, (record, extents, slot), of);
        hold.lacks = lacks;
        hold
    }

    /// Takes a hold on the slot that the last commit made live, even if the RAM tier or the log has newer state.
    pub(crate) fn stored(store: S, index: &mut Index, record: usize, extents: Range<u32>) -> Self {
        let slots = &index.records[record];
        let slot = usize::from(slots.live);
        let of = (slots.versions[slot], false);
        Self::on(store, index, (record, extents, slot), of)
    }

    /// Counts an open read of `slot`, and copies the checksums of `extents`.
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

    /// Fails if committed gradients are not applied in the slot: the slot's bytes are then older than the record's
    /// newest state. See [Note: Newest state] in `log.rs`.
    pub(crate) fn require_newest(&self) -> Result<()> {
        let Some(lacks) = self.lacks else { return Ok(()) };
        if !lacks.is_spilled {
            return Err(self.store.not_applied(self.record));
        }
        let name = &self.store.description.records[self.record].name;
        Err(Error::Usage(format!(
            "the last update of {name:?} was deferred to the next step, and was not applied when this read began: \
             begin the read again"
        )))
    }

    /// Compares the checksum of an extent's `bytes`, which were read at `place`, with the checksum in the hold.
    pub(crate) fn check(&self, extent: u32, bytes: &[u8], place: (u64, u64)) -> Result<()> {
        let (store, record) = (&*self.store, self.record);
        let wanted = self.sums[(extent - self.first) as usize];
        let got = store.sum_of(record, extent, self.version, bytes);
        if got == wanted {
            return Ok(());
        }
        Err(store.corrupt(store.named(record, extent), place, mismatch(got, wanted)))
    }

    /// Releases the slot after its read. Does nothing if the slot is released already.
    pub(crate) fn release(&self) {
        let mut index = self.store.index.lock();
        if self.open.swap(false, Relaxed) {
            index.records[self.record].reads[self.slot] -= 1;
            drop(index);
            self.store.index.notify_all();
        }
    }

    /// Holds the slot again after `release`. Fails if the slot no longer has the version of the hold or, if `alone` is
    /// set, if this version is no longer the newest version of the record.
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
                "the values of {name:?} were overwritten after the first read of their unit had ended: begin \
                 the read again"
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
