//! Makes space for the log and for the second places of spilled gradients. Schedules when each record is written whole.
//!
//! [Note: Turns] A record's gradients stay in the log until the record is written whole. Each record has a turn, 0 to
//! `steps - 1`, and is written whole once in `steps` steps. Each turn has about the same number of bytes. `steps` is
//! chosen so that the ring has space for the gradients of `steps` steps.

use std::{cmp::Reverse, collections::BTreeMap};

use memascend_mem::Wait;

use crate::{
    Description, Dtype, Durability, Error, LogState, Result, Store,
    head::{head_bytes_max, is_gradient},
    layout::PAGE_BYTES,
    log::Member,
    places::paged,
    ring::Ring,
};

/// The largest sizes in bytes that a step can have in the log.
#[derive(Debug, Clone, Copy)]
struct StepBytes {
    /// All gradients and the head.
    all: u64,
    /// The largest piece: a chunk of a gradient, or the head.
    extent: u64,
    /// Only the head.
    head: u64,
}

impl Description {
    /// Returns the size in bytes of a log for the gradients of `records`, if each record is written whole once in
    /// `steps` steps. Each item of `records` is a record and the dtype of its gradients.
    #[must_use]
    pub fn log_bytes(&self, records: &[(usize, Dtype)], steps: u32) -> u64 {
        let of_step = self.log_step(records, &[]);
        if steps == 0 { 0 } else { Ring::bytes_for(u64::from(steps), of_step.all, of_step.extent).unwrap_or(u64::MAX) }
    }

    /// Returns the size in bytes of the second places for all spilled gradients, plus the size of a log for heads.
    /// These heads name gradients of the records in `deferred`. Returns 0 if `deferred` is empty.
    #[must_use]
    pub fn places_bytes(&self, deferred: &[usize]) -> u64 {
        let spilled: u64 = self.records.iter().filter_map(|one| Some(paged(one.elements() * one.spill?.bytes()))).sum();
        let of_step = self.log_step(&[], deferred);
        if deferred.is_empty() { 0 } else { spilled + Ring::bytes_for(1, of_step.all, of_step.extent).unwrap_or(0) }
    }

    /// Returns the largest sizes that a step can have in the log. The step logs gradients of `records`, and defers
    /// updates of the records in `deferred`.
    fn log_step(&self, records: &[(usize, Dtype)], deferred: &[usize]) -> StepBytes {
        let (mut all, mut extent) = (0, 0);
        for &(record, dtype) in records {
            let elements = self.records[record].elements();
            all += paged(elements * dtype.bytes());
            extent = extent.max(paged(elements.min(u64::from(self.chunk_elements)) * dtype.bytes()));
        }
        let named = || records.iter().map(|&(record, _)| record).chain(deferred.iter().copied());
        let chunks =
            named().map(|record| self.records[record].elements().div_ceil(u64::from(self.chunk_elements))).sum();
        let head = head_bytes_max(named().count() as u64, chunks);
        StepBytes { all: all + head, extent: extent.max(head), head }
    }
}

impl Store {
    /// Returns the size in bytes of a record's gradient in the log: whole pages.
    pub fn gradient_bytes(&self, record: usize, dtype: Dtype) -> Result<u64> {
        self.known(record)?;
        Ok(paged(self.description.records[record].elements() * dtype.bytes()))
    }

    /// Makes space for a log of the gradients of `records`. From then on, before each commit the caller must stage the
    /// records that [`Store::due`] returns.
    ///
    /// Returns the number of steps for which the log has space, at most `steps`. Returns 0 if there is no space: each
    /// step must then write the records whole. Files grow as needed. On a raw device, the log takes the space after the
    /// end of the store.
    ///
    /// A log that is not empty keeps its content and its size. A caller that needs second places must call
    /// [`Store::keep_places`] first.
    pub fn keep_log(&self, records: &[(usize, Dtype)], steps: u32) -> Result<u32> {
        if self.durability == Durability::None {
            return Err(Error::Usage("with durability \"none\" a store has no log: use durability \"step\"".into()));
        }
        for &(record, dtype) in records {
            self.known(record)?;
            if !is_gradient(dtype) {
                return Err(Error::Invalid(format!(
                    "a log cannot hold gradients of {}: use float32, bfloat16 or float16",
                    dtype.name()
                )));
            }
        }
        let deferred = self.index.lock().log.deferred.clone();
        let StepBytes { all: of_step, extent, head } = self.description.log_step(records, &deferred);
        let is_needed = !self.index.lock().log.live.ahead.is_empty();
        let ring = if is_needed || steps == 0 {
            self.index.lock().log.ring
        } else {
            let wanted = Ring::bytes_for(u64::from(steps), of_step, extent);
            let wanted = wanted.ok_or_else(|| {
                Error::Invalid(format!("a gradient log of {steps} steps is too large: pass a smaller log_steps"))
            })?;
            let ring = self.room_for_log(wanted, Ring::bytes_for(1, of_step, extent).unwrap_or(wanted))?;
            // If there is no space for gradients, keep the ring that `keep_places` made for the heads of deferred
            // updates.
            if ring.bytes == 0 && !deferred.is_empty() { self.index.lock().log.ring } else { ring }
        };
        let steps = Ring::steps_in(ring.bytes, of_step, extent).min(u64::from(steps)) as u32;
        let mut index = self.index.lock();
        index.writable()?;
        let log = &mut index.log;
        if !is_needed {
            (log.ring, log.live.next) = (ring, 0);
        }
        (log.steps, log.head_bytes_max, log.members) = (steps, log.head_bytes_max.max(head), BTreeMap::new());
        if steps == 0 {
            return Ok(0);
        }
        // Assign each record, the largest record first, to the turn that has the fewest bytes so far. See
        // [Note: Turns].
        let mut by_bytes: Vec<(u64, usize, Dtype)> = Vec::with_capacity(records.len());
        for &(record, dtype) in records {
            let (values, state) = self.layout.ram_tier_bytes(&self.description, record);
            by_bytes.push((values + state, record, dtype));
        }
        by_bytes.sort_by_key(|&(bytes, record, _)| (Reverse(bytes), record));
        let mut turns = vec![0_u64; steps as usize];
        for (bytes, record, dtype) in by_bytes {
            let turn = (0..turns.len()).min_by_key(|&turn| turns[turn]).unwrap_or(0);
            turns[turn] += bytes;
            log.members.insert(record, Member { dtype, turn: turn as u32 });
        }
        Ok(steps)
    }

    /// Makes second places for spilled gradients, so that updates of the records in `deferred` can be deferred
    /// ([`Store::append_spilled`]). Returns `false`, and changes nothing, if `deferred` is empty, if there is no space,
    /// if the log is not empty, or if second places exist already.
    ///
    /// Must be called before [`Store::keep_log`].
    pub fn keep_places(&self, deferred: &[usize]) -> Result<bool> {
        for &record in deferred {
            self.known(record)?;
        }
        let mut deferred = deferred.to_vec();
        deferred.sort_unstable();
        deferred.dedup();
        let is_needed = !self.index.lock().log.live.ahead.is_empty();
        if is_needed || deferred.is_empty() || self.spill.has_places() {
            return Ok(false);
        }
        let StepBytes { all, extent, head } = self.description.log_step(&[], &deferred);
        let heads = Ring::bytes_for(1, all, extent)
            .ok_or_else(|| Error::Invalid("log heads are too large: defer fewer records".into()))?;
        let (start, second) = (self.layout.end(), self.layout.spill_area_bytes());
        if self.room_for_log(second + heads, second + heads)?.bytes == 0 {
            return Ok(false);
        }
        self.spill.add_places(start);
        let mut index = self.index.lock();
        let log = &mut index.log;
        (log.ring, log.live.next) = (Ring { offset: start + second, bytes: heads }, 0);
        (log.head_bytes_max, log.deferred) = (head, deferred);
        Ok(true)
    }

    /// Returns a ring after the store and its second places for gradients. Grows the store's files if necessary. The
    /// ring has `wanted` bytes, or fewer if the volume has less space. If fewer than `least` bytes fit, returns an
    /// empty ring.
    fn room_for_log(&self, wanted: u64, least: u64) -> Result<Ring> {
        let devices = self.layout.devices;
        let second = if self.spill.has_places() { self.layout.spill_area_bytes() } else { 0 };
        let offset = self.layout.end() + second;
        let there = |size: u64| devices.before_second_labels(size).saturating_sub(offset);
        let mut bytes = there(self.volume.size_bytes());
        if bytes < wanted {
            // Halve the size until the file system has the space.
            let mut tried = wanted;
            while tried > bytes && tried >= least {
                if self.volume.grow(devices.with_second_labels_after(offset + tried))? {
                    // The volume has a new end: write the second labels there before the log overwrites the old second
                    // labels.
                    self.put_second_labels()?;
                    self.volume.flush(Wait::forever())?;
                    // Drop repairs of second labels at their old places, which now belong to the log.
                    self.note_damaged_copies()?;
                    break;
                }
                // Try `least` last.
                tried = if tried > least { (tried / 2 / PAGE_BYTES * PAGE_BYTES).max(least) } else { 0 };
            }
            bytes = there(self.volume.size_bytes());
        }
        let bytes = bytes.min(wanted) / PAGE_BYTES * PAGE_BYTES;
        Ok(if bytes < least { Ring::default() } else { Ring { offset, bytes } })
    }

    /// Returns the size and the contents of the log at the last commit.
    #[must_use]
    pub fn log_state(&self) -> LogState {
        let index = self.index.lock();
        let live = &index.log.live;
        // With durability "none", storage has a log only if the store was opened with a log.
        let is_logged = self.durability == Durability::Step || index.log.found.is_some();
        let is_logged = is_logged && !live.ahead.is_empty();
        let (steps, records) = if is_logged { (live.heads.len(), live.ahead.len()) } else { (0, 0) };
        let Ring { offset, bytes } = index.log.ring;
        LogState { offset, bytes, steps: steps as u64, records: records as u64 }
    }
}
