//! Stages snapshots: writes records from the RAM tier to storage, in their state before the step in progress.
//!
//! After the commit, the log no longer needs these records' gradients of earlier steps. Writing a snapshot does not
//! change the record in memory.

use memascend_mem::Wait;

use crate::{Error, Result, Shared, StepWrite, Store, log::Member};

impl Store {
    /// Returns the records that the caller must stage whole for the next commit, with their state before that commit,
    /// so that the log does not run out of space. Leaves out records that are staged already. See [Note: Turns] in
    /// `room.rs`.
    #[must_use]
    pub fn due(&self) -> Vec<usize> {
        let index = self.index.lock();
        let due = |&(&record, &member): &(&usize, &Member)| {
            !index.records[record].pending.is_staged() && index.log.is_due(record, member)
        };
        index.log.members.iter().filter(due).map(|(&record, _)| record).collect()
    }

    /// True if [`Store::due`] returns this record.
    #[must_use]
    pub fn is_due(&self, record: usize) -> bool {
        let index = self.index.lock();
        let member = index.log.members.get(&record);
        member.is_some_and(|&member| !index.records[record].pending.is_staged() && index.log.is_due(record, member))
    }

    /// Begins to stage a record that is kept in RAM, with the state that the record has in RAM. The caller must then
    /// stage every extent of the record ([`Store::stage_in_ram`]).
    ///
    /// Waits for reads of the slot, as [`Store::begin`] does.
    pub fn begin_snapshot(&self, record: usize, wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.refresh(&[record], &mut |_, _| true)?;
        self.begin_as(record, None, wait)
    }

    /// Begins to write an extent of a record from the RAM tier's memory. Nothing may write to that memory until the
    /// write ends.
    pub fn stage_in_ram(&self, record: usize, extent: u32) -> Result<StepWrite<'_, Shared>> {
        self.known(record)?;
        let name = &self.description.records[record].name;
        let Some(part) = self.ram_tier_extent(record, extent) else {
            return Err(Error::Usage(format!("{name:?} is not kept in RAM, so it cannot be staged from there")));
        };
        if extent < self.layout.chunks_of(record) {
            self.check_values(record, extent)?;
        }
        self.stage(record, extent, part)
    }

    /// Sets the version in memory of each fresh extent of `records` to `generation`. The commit of this generation has
    /// written these records from memory to storage. Each item of `records` has a record and its version before the
    /// commit.
    pub(crate) fn note_written(&self, records: &[(usize, u64)], generation: u64) {
        let Some(ram_tier) = self.ram_tier().filter(|_| !records.is_empty()) else { return };
        for &(record, before) in records {
            // An extent whose version is not `before` became stale in the meantime, and stays stale.
            ram_tier.now(record).versions.iter_mut().filter(|version| **version == before).for_each(|version| {
                *version = generation;
            });
        }
    }
}
