//! Applies updates to records in RAM once a commit has made them; `close` writes these records.
//!
//! An update is announced before its commit, and applied after it. Then memory has the only copy of the record until
//! [`Store::write_applied`] writes that to the slot that is not live.

use std::{collections::VecDeque, sync::Arc};

use memascend_mem::Wait;

use crate::{
    Commit, Durability, Error, Result, Shared, StepWrite, Store,
    buffer::bytes_of,
    commit::Reach,
    index::{Index, Pending},
    ram_tier::RamTier,
};

/// Extents that are written at once.
const DEPTH: usize = 16;

/// A record whose update a commit has made, and which is in memory as it was before: whoever has this applies it.
pub struct InMemoryUpdate<'a> {
    store: &'a Store,
    ram_tier: Arc<RamTier>,
    record: usize,
    version: u64,
}

impl Store {
    /// Whether updates of records in RAM are applied in memory: where nothing is to be durable before the end.
    #[must_use]
    pub fn applies(&self) -> bool {
        self.durability == Durability::None
    }

    /// Announces that the next commit makes update number `step` of a record in RAM, which is applied after it. What is stale
    /// in memory is read; reads of the record that are open are waited for. Again is fine.
    pub fn announce(&self, record: usize, step: u64, wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.refresh(&[record], &mut |_, _| true)?;
        let free = |index: &Index| index.records[record].reads == [0, 0] || index.writable().is_err();
        let mut index = self.when_read(wait, "the end of reads of what is in RAM", free)?;
        index.writable()?;
        let slots = &mut index.records[record];
        slots.pending = match slots.pending {
            Pending::Nothing | Pending::InMemory { .. } => Pending::InMemory { update: step },
            Pending::Snapshot { .. } => Pending::Snapshot { update: Some(step) },
            Pending::Staged | Pending::Settled => {
                let name = &self.description.records[record].name;
                return Err(Error::Usage(format!("{name:?} is staged already; commit or discard that first")));
            }
        };
        Ok(())
    }

    /// Checks that nobody wrote to a chunk of the values of a record in RAM.
    pub fn check_values(&self, record: usize, chunk: u32) -> Result<()> {
        match self.ram_tier() {
            Some(ram_tier) => self.check_in_ram(&ram_tier, record, chunk),
            None => Ok(()),
        }
    }

    /// The memory of an extent that is in RAM.
    #[must_use]
    pub fn ram_tier_extent(&self, record: usize, extent: u32) -> Option<Shared> {
        let ram_tier = self.ram_tier()?;
        (self.is_in_ram(record) && extent < self.layout.extents_of(record)).then(|| ram_tier.part(self, record, extent))
    }

    /// The update of a record that was announced, once its commit was made.
    pub fn application(&self, record: usize) -> Result<InMemoryUpdate<'_>> {
        let version = self.record_state(record)?.version;
        let ram_tier = self.ram_tier().ok_or_else(|| Error::Usage("nothing is in RAM".into()))?;
        Ok(InMemoryUpdate { store: self, ram_tier, record, version })
    }

    /// Says that an update could not be applied: what memory has of it is of no step.
    pub fn fail_application(&self, record: usize, why: &str) {
        let name = &self.description.records[record].name;
        let error = Error::Usage(format!(
            "the update of {name:?} in memory was not applied to its end ({why}): {}",
            if self.applies() {
                "go back to a checkpoint"
            } else {
                "close the store and open it again: its log has the step"
            }
        ));
        self.index.lock().break_by(Arc::new(error));
        self.index.notify_all();
    }

    /// Writes the records of which memory has the newest copy, and commits that as a part of the last step; the log ends
    /// with it. What else is staged is dropped. `progress` gets bytes done and of all, and ends it by `false`; called
    /// again, it goes on where it was.
    pub fn write_applied(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let step = {
            let index = self.index.lock();
            if index.is_closed() || !index.has_applied() {
                return Ok(());
            }
            index.step
        };
        self.drop_others()?;
        self.stage_applied(progress)?;
        self.commit(Commit { step, ..Commit::default() }, Wait::forever()).map(drop)
    }

    /// Stages the records of which memory has the newest copy.
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
                        return Err(Error::Interrupted("writing what is in RAM"));
                    }
                }
                flying.push_back((self.stage_in_ram(record, extent)?, nbytes));
            }
        }
        flying.into_iter().try_for_each(|(write, _)| write.wait().map(drop))
    }

    /// Forgets what is staged, but for snapshots of what memory has.
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

    /// Whether all of a record is staged from memory.
    fn is_written(&self, record: usize) -> bool {
        let slots = &self.index.lock().records[record];
        slots.pending.is_snapshot() && slots.missing == 0
    }

    /// Gives up what only memory has, where it has something: nothing is committed any more, and the store stays unclosed,
    /// which whoever opens it is told.
    pub fn give_up_applied(&self) {
        let mut index = self.index.lock();
        if index.has_applied() {
            index.break_by(Arc::new(Error::Usage("what only memory had was given up as it was closed".into())));
        }
    }

    /// Before the end: writes what only memory has, and makes it durable.
    pub(crate) fn close_applied(&self) -> Result<()> {
        let step = Some(self.index.lock()).filter(|index| index.has_applied()).map(|index| index.step);
        if let Some(step) = step {
            self.stage_applied(&mut |_, _| true)?;
            self.carry_out(Commit { step, ..Commit::default() }, Reach::Memory, &mut || true)?;
        }
        Ok(())
    }
}

impl InMemoryUpdate<'_> {
    /// The memory of an extent, which is the caller's until [`InMemoryUpdate::applied`].
    #[must_use]
    pub fn part(&self, extent: u32) -> Shared {
        self.ram_tier.part(self.store, self.record, extent)
    }

    /// A chunk was updated, values and state.
    pub fn chunk_applied(&self, chunk: u32) {
        let sum = self.store.sum_of(self.record, chunk, self.version, bytes_of(&self.part(chunk)));
        self.ram_tier.now(self.record).sums[chunk as usize] = sum;
    }

    /// All of it was.
    pub fn applied(self) {
        self.ram_tier.now(self.record).versions.fill(self.version);
    }
}
