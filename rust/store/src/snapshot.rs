//! Stages snapshots: held entries from where they lie, as they are before the step that is being made.
//!
//! So what the log has of an entry before that step is needed no more. Memory is not changed by it, nor by its end.

use memascend_mem::Wait;

use crate::{Error, Result, Shared, StepWrite, Store, log::Member};

impl Store {
    /// The entries that are to be staged whole for the next commit, with the state that they have before it, so that the log
    /// keeps its room; those left out that are staged already.
    #[must_use]
    pub fn due(&self) -> Vec<usize> {
        let index = self.index.lock();
        let due = |&(&entry, &member): &(&usize, &Member)| {
            !index.entries[entry].pending.is_staged() && index.log.is_due(entry, member)
        };
        index.log.members.iter().filter(due).map(|(&entry, _)| entry).collect()
    }

    /// Whether one entry is.
    #[must_use]
    pub fn is_due(&self, entry: usize) -> bool {
        let index = self.index.lock();
        let member = index.log.members.get(&entry);
        member.is_some_and(|&member| !index.entries[entry].pending.is_staged() && index.log.is_due(entry, member))
    }

    /// Begins to stage a held entry as it is in memory. Every piece of it has to follow ([`Store::stage_held`]).
    ///
    /// Waits as [`Store::begin`] does.
    pub fn begin_snapshot(&self, entry: usize, wait: Wait<'_>) -> Result<()> {
        self.known(entry)?;
        self.refresh(&[entry], &mut |_, _| true)?;
        self.begin_as(entry, None, wait)
    }

    /// Begins to write a piece of an entry from where it is held: nothing may write to it meanwhile.
    pub fn stage_held(&self, entry: usize, piece: u32) -> Result<StepWrite<'_, Shared>> {
        self.known(entry)?;
        let name = &self.description.entries[entry].name;
        let Some(part) = self.held_piece(entry, piece) else {
            return Err(Error::Usage(format!("{name:?} is not held")));
        };
        if piece < self.layout.chunks_of(entry) {
            self.check_values(entry, piece)?;
        }
        self.stage(entry, piece, part)
    }

    /// Notes that entries were written as they are in memory, where they had another version.
    pub(crate) fn note_written(&self, entries: &[(usize, u64)], generation: u64) {
        let Some(held) = self.held().filter(|_| !entries.is_empty()) else { return };
        for &(entry, before) in entries {
            // But for what somebody wrote to meanwhile.
            held.now(entry).versions.iter_mut().filter(|version| **version == before).for_each(|version| {
                *version = generation;
            });
        }
    }
}
