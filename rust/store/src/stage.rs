//! Stages records: writes their new bytes to the slots that are not live. A commit makes these slots live, and a
//! discard drops the new bytes.

use memascend_mem::Wait;

use crate::{
    Buffer, Error, Head, LoggedGradient, Result, StepWrite, Store,
    buffer::bytes_of,
    checksum::{Subject, checksum},
    index::{Index, Pending, Slots},
};

impl Store {
    /// Begins to stage a record with its state after update number `step`. The caller must stage every extent of the
    /// record before a commit.
    ///
    /// Waits until no read of the slot to be written is open.
    pub fn begin(&self, record: usize, step: u64, wait: Wait<'_>) -> Result<()> {
        self.begin_as(record, Some(step), wait)
    }

    /// Begins to settle a record that is behind: before a commit, the caller must stage every extent of the record with
    /// the deferred update applied. Once all extents are written, readers see the settled slot, and a discard does not
    /// drop this slot. Does nothing if the settling has begun already. See [Note: Deferred updates] in
    /// `newest_state.rs`.
    ///
    /// Waits for reads of the slot, as [`Store::begin`] does.
    pub fn begin_settling(&self, record: usize, wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        {
            let index = self.index.lock();
            if index.records[record].pending == Pending::Settled {
                return Ok(());
            }
            if !index.is_behind(record) {
                let name = &self.description.records[record].name;
                return Err(Error::Usage(format!("{name:?} has no deferred update to settle")));
            }
        }
        self.begin_as(record, None, wait)
    }

    /// True if a step is being made: a record is staged or announced, or a gradient is appended. Settled records do
    /// not count.
    #[must_use]
    pub fn is_staging(&self) -> bool {
        let index = self.index.lock();
        let is_of_step = |slots: &Slots| !matches!(slots.pending, Pending::Nothing | Pending::Settled);
        !index.log.appended.is_empty() || index.records.iter().any(is_of_step)
    }

    /// True if a record is being staged, and the write of this extent has begun.
    #[must_use]
    pub fn is_extent_staged(&self, record: usize, extent: u32) -> bool {
        let index = self.index.lock();
        let number = (self.layout.record(record).first_extent + extent) as usize;
        index.records[record].pending.is_staged() && index.written.has(number)
    }

    /// Begins to stage a record. With a `step`, stages the record's state after update number `step`. Without a `step`,
    /// settles a record that is behind, and stages any other record as a snapshot of the RAM tier.
    pub(crate) fn begin_as(&self, record: usize, step: Option<u64>, wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let free = |index: &Index| {
            let slots = &index.records[record];
            slots.pending.is_staged() || slots.reads[slots.other_slot()] == 0 || index.writable().is_err()
        };
        let mut index = self.when_read(wait, "the end of reads of the slot to be written", free)?;
        index.writable()?;
        let pending = index.records[record].pending;
        if pending.is_staged() || (step.is_some() && pending != Pending::Nothing) {
            let name = &self.description.records[record].name;
            return Err(Error::Usage(format!("{name:?} is staged already: commit or discard the step first")));
        }
        let is_behind = index.is_behind(record);
        if is_behind && step.is_some() {
            let name = &self.description.records[record].name;
            return Err(Error::Usage(format!(
                "{name:?} does not have its last update yet: settle the record and commit first"
            )));
        }
        let settled = is_behind.then(|| index.log.live.ahead[&record].step);
        let version = index.generation + 1;
        let extents = index.extents_of(record);
        for extent in extents.clone() {
            index.written.set(extent as usize, false);
        }
        let slots = &mut index.records[record];
        let slot = slots.other_slot();
        slots.pending = match (step, pending) {
            (Some(_), _) => Pending::Staged,
            (None, _) if settled.is_some() => Pending::Settled,
            (None, Pending::InMemory { update }) => Pending::Snapshot { update: Some(update) },
            (None, _) => Pending::Snapshot { update: None },
        };
        slots.missing = extents.len() as u32;
        slots.digest = 0;
        slots.versions[slot] = version;
        slots.steps[slot] = step.or(settled).unwrap_or(slots.newest().1);
        if step.is_some() {
            // From now on `stage` replaces the record's extents in RAM, one by one.
            index.note_stale(record);
        }
        Ok(())
    }

    /// Begins to write an extent of a record after [`Store::begin`], [`Store::begin_settling`] or
    /// [`Store::begin_snapshot`]. The buffer has the extent's whole pages, padded with zeros.
    pub fn stage<B: Buffer>(&self, record: usize, extent: u32, buffer: B) -> Result<StepWrite<'_, B>> {
        let place = self.fitting_extent(record, extent, buffer.len())?;
        let name = &self.description.records[record].name;
        let version = self.index.lock().generation + 1;
        let sum = self.sum_of(record, extent, version, bytes_of(&buffer));
        let number = (self.layout.record(record).first_extent + extent) as usize;
        let digest = self.digest_of(record, extent, bytes_of(&buffer));
        let (slot, ram_tier) = {
            let mut index = self.index.lock();
            index.writable()?;
            let slots = &index.records[record];
            let slot = slots.other_slot();
            if !slots.pending.is_staged() || slots.versions[slot] != version {
                return Err(Error::Usage(format!(
                    "the staging of {name:?} was not begun, or has ended: begin it again"
                )));
            }
            if index.written.has(number) {
                return Err(Error::Usage(format!(
                    "extent {extent} of {name:?} is staged already: stage each extent once"
                )));
            }
            index.written.set(number, true);
            index.set_sum(slot, number, sum);
            index.writing += 1;
            let slots = &mut index.records[record];
            slots.writing += 1;
            slots.digest = slots.digest.wrapping_add(digest);
            // Copy only `Staged` records to the RAM tier: snapshots have the bytes that are in RAM already, and settled
            // records are not in RAM.
            (slot, index.ram_tier.clone().filter(|_| index.records[record].pending == Pending::Staged))
        };
        // Store the bytes under the version of the next commit: before that commit, and after a discard, no read asks
        // for this version.
        self.keep(ram_tier.as_deref(), (record, extent), version, bytes_of(&buffer));
        self.write_of_step(buffer, self.layout.offset(&place, slot), record, Self::staged)
    }

    /// Selects the records that [`Store::digest`] covers. Only the first call has an effect.
    pub fn compare(&self, records: &[usize]) {
        let mut compared = vec![false; self.description.records.len()];
        for &record in records {
            if let Some(one) = compared.get_mut(record) {
                *one = true;
            }
        }
        self.compared.get_or_init(|| compared);
    }

    /// Returns a digest of the staged bytes and deferred updates of the records that [`Store::compare`] selected,
    /// without the bytes of snapshots. Two stores of the same records have equal digests if these bytes and updates are
    /// equal. The digest includes deferred updates only while a commit is in progress.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let index = self.index.lock();
        let is_compared = |slots: &&Slots| matches!(slots.pending, Pending::Staged | Pending::Settled);
        let staged = index.records.iter().filter(is_compared);
        staged.fold(index.log.digest, |sum: u64, slots| sum.wrapping_add(slots.digest))
    }

    /// Returns a digest of the updates that a commit defers, for the records that [`Store::compare`] selected. The
    /// digest covers the record, the rule and the number of each deferred update.
    pub(crate) fn digest_of_left(&self, index: &Index, head: &Head) -> u64 {
        let Some(compared) = self.compared.get() else { return 0 };
        let is_left = |logged: &&LoggedGradient| {
            compared[logged.record] && index.log.appended.get(&logged.record).is_some_and(|one| one.is_spilled)
        };
        head.logged_gradients.iter().filter(is_left).fold(0, |sum: u64, logged| {
            let mut rule = Vec::new();
            head.rules[logged.rule as usize].encode(&mut rule);
            let place = (logged.record as u64, logged.step);
            sum.wrapping_add(checksum(&[0; 16], Subject::Gradient, place, 0, &rule))
        })
    }

    /// Returns the number that one extent adds to [`Store::digest`]; 0 if [`Store::compare`] did not select the
    /// extent's record.
    fn digest_of(&self, record: usize, extent: u32, bytes: &[u8]) -> u64 {
        let place = (record as u64, u64::from(extent));
        let is_compared = self.compared.get().is_some_and(|compared| compared[record]);
        if is_compared { checksum(&[0; 16], Subject::Extent, place, 0, bytes) } else { 0 }
    }

    /// Waits for the step's writes in flight. Then discards all staged slots, announced updates and appended gradients,
    /// but keeps settled slots. Live slots stay unchanged.
    pub fn discard(&self, mut wait: Wait<'_>) -> Result<()> {
        let mut index = self.when(&mut wait, "writes of the step", |index| index.writing == 0)?;
        index.writable()?;
        index.forget_step();
        Ok(())
    }

    /// Waits for the record's writes of extents in flight. Then discards the staged slot, the announced update and the
    /// appended gradient of the record, but keeps a settled slot.
    pub fn discard_record(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let ended = |index: &Index| index.records[record].writing == 0;
        let mut index = self.when(&mut wait, "writes of the record", ended)?;
        index.writable()?;
        index.forget(record);
        Ok(())
    }

    /// Notes in the index that the write of an extent ended. `is_whole` is false if the write failed.
    fn staged(index: &mut Index, record: usize, is_whole: bool) {
        let slots = &mut index.records[record];
        slots.writing -= 1;
        slots.missing = slots.missing.saturating_sub(u32::from(is_whole));
    }
}
