//! Stages writes to slots that are not live.

use memascend_mem::Wait;

use crate::{
    Buffer, Error, Result, StepWrite, Store,
    buffer::bytes_of,
    index::{Index, Pending},
};

impl Store {
    /// Begins to stage an entry, as its update number `step`. Every piece of it has to follow before a commit.
    ///
    /// Waits until the devices are done with every read of the slot that it will be written to.
    pub fn begin(&self, entry: usize, step: u64, wait: Wait<'_>) -> Result<()> {
        self.begin_as(entry, Some(step), wait)
    }

    /// The same; without a step, of a snapshot: what is staged is what memory has of the entry.
    pub(crate) fn begin_as(&self, entry: usize, step: Option<u64>, wait: Wait<'_>) -> Result<()> {
        self.known(entry)?;
        let free = |index: &Index| {
            let slots = &index.entries[entry];
            slots.pending.is_staged() || slots.reads[slots.other_slot()] == 0 || index.writable().is_err()
        };
        let mut index = self.when_read(wait, "the end of reads of the slot to be written", free)?;
        index.writable()?;
        let pending = index.entries[entry].pending;
        if pending.is_staged() || (step.is_some() && pending != Pending::Nothing) {
            let name = &self.description.entries[entry].name;
            return Err(Error::Usage(format!("{name:?} is staged already; commit or discard that first")));
        }
        let version = index.generation + 1;
        let pieces = index.pieces_of(entry);
        for piece in pieces.clone() {
            index.written.set(piece as usize, false);
        }
        let slots = &mut index.entries[entry];
        let slot = slots.other_slot();
        slots.pending = match (step, pending) {
            (Some(_), _) => Pending::Staged,
            (None, Pending::InMemory { update }) => Pending::Snapshot { update: Some(update) },
            (None, _) => Pending::Snapshot { update: None },
        };
        slots.missing = pieces.len() as u32;
        slots.versions[slot] = version;
        slots.steps[slot] = step.unwrap_or(slots.newest().1);
        if step.is_some() {
            // What is staged replaces what is held, piece by piece.
            index.note_stale(entry);
        }
        Ok(())
    }

    /// Begins to write a piece of an entry whose staging was begun. The buffer holds whole pages; what fills the last
    /// one should be zeros.
    pub fn stage<B: Buffer>(&self, entry: usize, piece: u32, buffer: B) -> Result<StepWrite<'_, B>> {
        self.known(entry)?;
        let name = &self.description.entries[entry].name;
        if piece >= self.layout.pieces_of(entry) {
            return Err(Error::Invalid(format!("{name:?} has {} pieces, not {piece}", self.layout.pieces_of(entry))));
        }
        let place = self.layout.piece(&self.description, entry, piece);
        if buffer.len() as u64 != place.bytes() {
            let (got, wanted) = (buffer.len(), place.bytes());
            return Err(Error::Invalid(format!("piece {piece} of {name:?} has {wanted} bytes, not {got}")));
        }
        let version = self.index.lock().generation + 1;
        let sum = self.sum_of(entry, piece, version, &buffer);
        let number = (self.layout.entry(entry).first_piece + piece) as usize;
        let (slot, held) = {
            let mut index = self.index.lock();
            index.writable()?;
            let slots = &index.entries[entry];
            let slot = slots.other_slot();
            if !slots.pending.is_staged() || slots.versions[slot] != version {
                return Err(Error::Usage(format!("the staging of {name:?} was not begun, or was discarded")));
            }
            if index.written.has(number) {
                return Err(Error::Usage(format!("piece {piece} of {name:?} is staged already")));
            }
            index.written.set(number, true);
            index.set_sum(slot, number, sum);
            index.writing += 1;
            index.entries[entry].writing += 1;
            // A snapshot is what is held.
            (slot, index.held.clone().filter(|_| !index.entries[entry].pending.is_snapshot()))
        };
        // Under the version that its commit makes live: until then, and after a discard, nothing finds it.
        self.keep(held.as_deref(), (entry, piece), version, bytes_of(&buffer));
        self.write_of_step(buffer, self.layout.offset(&place, slot), entry, Self::staged)
    }

    /// Forgets everything that is staged, after what is in flight of it. The live slots are as they were.
    pub fn discard(&self, mut wait: Wait<'_>) -> Result<()> {
        let mut index = self.when(&mut wait, "writes of the step", |index| index.writing == 0)?;
        index.writable()?;
        (0..index.entries.len()).for_each(|entry| index.forget(entry));
        index.log.discard();
        index.failed = None;
        Ok(())
    }

    /// Forgets what is staged of one entry, after what is in flight.
    pub fn discard_entry(&self, entry: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(entry)?;
        let ended = |index: &Index| index.entries[entry].writing == 0;
        let mut index = self.when(&mut wait, "writes of the entry", ended)?;
        index.writable()?;
        index.forget(entry);
        Ok(())
    }

    fn staged(index: &mut Index, entry: usize, is_whole: bool) {
        let slots = &mut index.entries[entry];
        slots.writing -= 1;
        slots.missing = slots.missing.saturating_sub(u32::from(is_whole));
    }
}
