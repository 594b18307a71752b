//! Tracks updates that are applied to records in RAM after their commit. Writes the updated records to storage before
//! the store is closed.
//!
//! The engine announces an update before the update's commit ([`Store::announce`]), and applies the update in memory
//! after the commit ([`Store::application`]). From then on memory has the only copy of the record's newest version,
//! until [`Store::write_applied`], a snapshot or, with [`Durability::None`], [`Store::close`] writes this version to
//! the slot that is not live.

use std::{collections::VecDeque, sync::Arc};

use memascend_mem::Wait;

use crate::{
    Commit, Durability, Error, Result, Shared, StepWrite, Store,
    buffer::bytes_of,
    commit::Reach,
    index::{Index, Pending},
    ram_tier::RamTier,
};

/// The largest number of writes in flight in `stage_applied`.
const DEPTH: usize = 16;

/// A committed update that is not applied in memory yet. The caller who gets this value applies the update. For each
/// chunk, the caller updates the memory ([`InMemoryUpdate::part`]), then calls [`InMemoryUpdate::chunk_applied`]. At
/// the end, the caller calls [`InMemoryUpdate::applied`].
pub struct InMemoryUpdate<'a> {
    store: &'a Store,
    ram_tier: Arc<RamTier>,
    record: usize,
    version: u64,
}

impl Store {
    /// True if updates of records in RAM are applied in memory without a log: with [`Durability::None`].
    #[must_use]
    pub fn applies(&self) -> bool {
        self.durability == Durability::None
    }

    /// Announces update number `step` of a record in RAM: the next commit includes the update, and the caller applies
    /// it in memory after that commit. Reads stale extents of the record first, and waits until all open reads of the
    /// record end. May be called again before the commit.
    pub fn announce(&self, record: usize, step: u64, wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.refresh(&[record], &mut |_, _| true)?;
        let free = |index: &Index| index.records[record].reads == [0, 0] || index.writable().is_err();
        let mut index = self.when_read(wait, "the end of reads of a record in RAM", free)?;
        index.writable()?;
        let slots = &mut index.records[record];
        slots.pending = match slots.pending {
            Pending::Nothing | Pending::InMemory { .. } => Pending::InMemory { update: step },
            Pending::Snapshot { .. } => Pending::Snapshot { update: Some(step) },
            Pending::Staged | Pending::Settled => {
                let name = &self.description.records[record].name;
                return Err(Error::Usage(format!("{name:?} is staged already: commit or discard the step first")));
            }
        };
        Ok(())
    }

    /// Checks that a chunk of values of a record in RAM was not written to in place since its last update.
    pub fn check_values(&self, record: usize, chunk: u32) -> Result<()> {
        match self.ram_tier() {
            Some(ram_tier) => self.check_in_ram(&ram_tier, record, chunk),
            None => Ok(()),
        }
    }

    /// Returns the memory of an extent; `None` if the record is not in RAM or has no such extent.
    #[must_use]
    pub fn ram_tier_extent(&self, record: usize, extent: u32) -> Option<Shared> {
        let ram_tier = self.ram_tier()?;
        (self.is_in_ram(record) && extent < self.layout.extents_of(record)).then(|| ram_tier.part(self, record, extent))
    }

    /// Returns the announced and committed update of a record. The caller applies this update.
    pub fn application(&self, record: usize) -> Result<InMemoryUpdate<'_>> {
        let version = self.record_state(record)?.version;
        let ram_tier = self
            .ram_tier()
            .ok_or_else(|| Error::Usage("no record is kept in RAM, so there is no update to apply in memory".into()))?;
        Ok(InMemoryUpdate { store: self, ram_tier, record, version })
    }

    /// Reports that applying an update failed. Memory then has a mix of two steps, so nothing can be staged from then
    /// on.
    pub fn fail_application(&self, record: usize, why: &str) {
        let name = &self.description.records[record].name;
        let error = Error::Usage(format!(
            "the update of {name:?} in memory was not applied to its end ({why}), so memory has a mix of two steps: {}",
            if self.applies() {
                "load a checkpoint"
            } else {
                "close the store and open it again, which restores the step from the log"
            }
        ));
        self.index.lock().fail_with(Arc::new(error));
        self.index.notify_all();
    }

    /// Writes each record whose newest version only memory has, and commits these writes as a part of the last step.
    /// Does nothing if there is no such record. The commit also ends the log, unless a record is behind. Discards
    /// everything else that is staged, except settled slots. `progress` receives the bytes done and the total, and
    /// returns `false` to stop. The next call then continues where this call stopped.
    pub fn write_applied(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let step = {
            let index = self.index.lock();
            if index.is_closed() || !index.has_ram_only_state() {
                return Ok(());
            }
            index.step
        };
        self.drop_others()?;
        self.stage_applied(progress)?;
        self.commit(Commit { step, ..Commit::default() }, Wait::forever()).map(drop)
    }

    /// Stages each record whose newest version only memory has.
    fn stage_applied(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let alone: Vec<usize> = {
            let index = self.index.lock();
            (0..index.records.len()).filter(|&record| index.records[record].applied.is_some()).collect()
        };
        let bytes = |record: usize| {
            let (values, state) = self.layout.ram_tier_bytes(&self.description, record);
            values + state
        };
        let (all, mut done) = (alone.iter().map(|&record| bytes(record)).sum(), 0);
        let mut flying: VecDeque<(StepWrite<'_, Shared>, u64)> = VecDeque::with_capacity(DEPTH);
        for &record in &alone {
            if self.is_written(record) {
                done += bytes(record);
                continue;
            }
            self.index.lock().forget(record);
            self.refresh(&[record], &mut |_, _| true)?;
            self.begin_snapshot(record, Wait::forever())?;
            for extent in 0..self.layout.extents_of(record) {
                let nbytes = self.layout.extent(&self.description, record, extent).bytes();
                if flying.len() == DEPTH
                    && let Some((write, nbytes)) = flying.pop_front()
                {
                    write.wait()?;
                    done += nbytes;
                    if !progress(done, all) {
                        return Err(Error::Interrupted("writes of records kept in RAM"));
                    }
                }
                flying.push_back((self.stage_in_ram(record, extent)?, nbytes));
            }
        }
        flying.into_iter().try_for_each(|(write, _)| write.wait().map(drop))
    }

    /// Discards everything that is staged, except snapshots and settled slots. If a record has both a snapshot and an
    /// announced update, discards only the update.
    fn drop_others(&self) -> Result<()> {
        let mut index = self.when(&mut Wait::forever(), "writes of the step", |index| index.writing == 0)?;
        index.writable()?;
        for record in 0..index.records.len() {
            match &mut index.records[record].pending {
                Pending::Snapshot { update } => *update = None,
                _ => index.forget(record),
            }
        }
        index.log.discard();
        index.failed = None;
        Ok(())
    }

    /// True if every extent of a record is staged from memory.
    fn is_written(&self, record: usize) -> bool {
        let slots = &self.index.lock().records[record];
        slots.pending.is_snapshot() && slots.missing == 0
    }

    /// Abandons the versions that only memory has. If there are any, nothing can be committed from then on. With
    /// [`Durability::None`], the store also stays marked as unclosed, and the next opening reports that the store was
    /// not closed.
    pub fn give_up_applied(&self) {
        let mut index = self.index.lock();
        if index.has_ram_only_state() {
            index.fail_with(Arc::new(Error::Usage(
                "updates that only memory had were abandoned when the store was closed".into(),
            )));
        }
    }

    /// Writes each record whose newest version only memory has, and commits these writes in memory. `Store::close`, the
    /// caller, makes that commit durable, unless a record is behind.
    pub(crate) fn close_applied(&self) -> Result<()> {
        let step = Some(self.index.lock()).filter(|index| index.has_ram_only_state()).map(|index| index.step);
        if let Some(step) = step {
            self.stage_applied(&mut |_, _| true)?;
            self.write_commit(Commit { step, ..Commit::default() }, Reach::Memory, &mut || true)?;
        }
        Ok(())
    }
}

impl InMemoryUpdate<'_> {
    /// Returns the memory of an extent. Only the caller may use this memory until [`InMemoryUpdate::applied`].
    #[must_use]
    pub fn part(&self, extent: u32) -> Shared {
        self.ram_tier.part(self.store, self.record, extent)
    }

    /// Notes the checksum of a chunk whose values and state the caller has updated.
    pub fn chunk_applied(&self, chunk: u32) {
        let sum = self.store.sum_of(self.record, chunk, self.version, bytes_of(&self.part(chunk)));
        self.ram_tier.now(self.record).sums[chunk as usize] = sum;
    }

    /// Notes that every chunk was updated: memory has the record's newest version.
    pub fn applied(self) {
        self.ram_tier.now(self.record).versions.fill(self.version);
    }
}
