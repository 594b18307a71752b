//! Stages snapshots: records in RAM from where they lie, as they are before the step that is being made.
//!
//! So what the log has of a record before that step is needed no more. Memory is not changed by it, nor by its end.

use memascend_mem::Wait;

use crate::{Error, Result, Shared, StepWrite, Store, log::Member};

impl Store {
    /// The records that are to be staged whole for the next commit, with the state that they have before it, so that the log
    /// keeps its room; those left out that are staged already.
    #[must_use]
    pub fn due(&self) -> Vec<usize> {
        let index = self.index.lock();
        let due = |&(&record, &member): &(&usize, &Member)| {
            !index.records[record].pending.is_staged() && index.log.is_due(record, member)
        };
        index.log.members.iter().filter(due).map(|(&record, _)| record).collect()
    }

    /// Whether one record is.
    #[must_use]
    pub fn is_due(&self, record: usize) -> bool {
        let index = self.index.lock();
        let member = index.log.members.get(&record);
        member.is_some_and(|&member| !index.records[record].pending.is_staged() && index.log.is_due(record, member))
    }

    /// Begins to stage a record in RAM as it is in memory. Every extent of it has to follow ([`Store::stage_in_ram`]).
    ///
    /// Waits as [`Store::begin`] does.
    pub fn begin_snapshot(&self, record: usize, wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.refresh(&[record], &mut |_, _| true)?;
        self.begin_as(record, None, wait)
    }

    /// Begins to write an extent of a record from where it is in RAM: nothing may write to it meanwhile.
    pub fn stage_in_ram(&self, record: usize, extent: u32) -> Result<StepWrite<'_, Shared>> {
        self.known(record)?;
        let name = &self.description.records[record].name;
        let Some(part) = self.ram_tier_extent(record, extent) else {
            return Err(Error::Usage(format!("{name:?} is not in RAM")));
        };
        if extent < self.layout.chunks_of(record) {
            self.check_values(record, extent)?;
        }
        self.stage(record, extent, part)
    }

    /// Notes that records were written as they are in memory, where they had another version.
    pub(crate) fn note_written(&self, records: &[(usize, u64)], generation: u64) {
        let Some(ram_tier) = self.ram_tier().filter(|_| !records.is_empty()) else { return };
        for &(record, before) in records {
            // But for what somebody wrote to meanwhile.
            ram_tier.now(record).versions.iter_mut().filter(|version| **version == before).for_each(|version| {
                *version = generation;
            });
        }
    }
}
