//! Rebuilds the newest state of a record, chunk by chunk: reads the record's live slot, then applies the logged
//! gradients that are not applied in that slot. Writes nothing to storage.
//!
//! `Store::scan` uses this module if the store was opened with a log. `Store::refresh` uses this module if values in
//! the RAM tier were overwritten in place and the live slot is older than these values.
//!
//! [Note: Deferred updates] A commit may name a record's spilled gradient instead of writing the updated record
//! (`Store::append_spilled`). Until the record is settled, it is *behind*: one update is not applied in its live slot.
//! To *settle* the record means to stage its other slot with this update applied (`Store::begin_settling`). Readers see
//! the settled slot as soon as this slot is complete, although no root names the slot before the next commit.

use std::sync::{Arc, MutexGuard};

use memascend_mem::locked;

use crate::{
    Dtype, Error, LoggedRule, Replay, Result, Scratch, Settler, Shared, Store, buffer::bytes_of,
    ram_tier::CachedVersions, ram_tier::RamTier,
};

/// A function that applies one logged gradient to a chunk in place, or returns the reason why it cannot. The engine
/// provides this function, because this crate has no optimizer kernels.
pub type Arithmetic = fn(&Store, &LoggedChunk<'_>) -> std::result::Result<(), String>;

/// A chunk of a record, and the logged gradient to apply to it.
#[derive(Debug)]
pub struct LoggedChunk<'a> {
    /// The index of the record.
    pub record: usize,
    /// The number of the chunk in the record.
    pub chunk: u32,
    /// The kernel to call, and the numbers that the kernel uses.
    pub rule: &'a LoggedRule,
    /// The extent of values. The called function may write to `values`, `state` and `gradient`. Nothing else uses this
    /// memory during the call.
    pub values: Shared,
    /// The extent of state; `None` if the record has no chunked state.
    pub state: Option<Shared>,
    /// The gradient in whole pages: the chunk's elements, then padding.
    pub gradient: Shared,
    /// The dtype of the gradient.
    pub dtype: Dtype,
}

impl Store {
    /// Allocates memory for one chunk of a logged gradient of any dtype.
    pub(crate) fn log_room(&self) -> Result<Scratch> {
        let chunk = u64::from(self.description.chunk_elements) * Dtype::F32.bytes();
        Scratch::new(chunk as usize, 1, "gradients of the log")
    }

    /// Sets the function that applies logged gradients. Only the first call has an effect.
    pub fn apply_with(&self, arithmetic: Arithmetic) {
        self.arithmetic.get_or_init(|| arithmetic);
    }

    /// Sets the function that settles records before they are read. Replaces a function that was set before.
    pub fn settle_with(&self, settler: Box<Settler>) {
        *locked(&self.settler) = Some(settler.into());
    }

    /// True if a commit deferred the record's last update, and the record is not settled yet. See
    /// [Note: Deferred updates].
    #[must_use]
    pub fn is_behind(&self, record: usize) -> bool {
        self.index.lock().is_behind(record)
    }

    /// Calls the function that [`Store::settle_with`] set, to settle the records of `records` that are behind. Does
    /// nothing if no function was set.
    pub(crate) fn settled(&self, records: impl IntoIterator<Item = usize>) -> Result<()> {
        let Some(settler) = locked(&self.settler).clone() else { return Ok(()) };
        let behind: Vec<usize> = records.into_iter().filter(|&record| self.is_behind(record)).collect();
        if behind.is_empty() { Ok(()) } else { settler(&behind) }
    }

    /// Returns the index of a record's first element in the whole parameter: 0 if the record is a whole parameter.
    #[must_use]
    pub fn first_element(&self, record: usize) -> u64 {
        self.description.first_elements.get(record).copied().unwrap_or(0)
    }

    /// Returns the log that the store was opened with, if gradients of this log are not applied in the live slot of
    /// `record`. Returns `None` if the live slot or memory has the newest version of the record.
    pub(crate) fn missing_gradients(&self, record: usize) -> Option<Arc<Replay>> {
        let index = self.index.lock();
        let lacks = index.records.get(record)?.applied.is_none() && index.log.is_ahead(record);
        index.log.found.clone().filter(|_| lacks)
    }

    /// Reads a chunk of a record into `values` and `state`, and applies each logged gradient that is not applied in the
    /// live slot. `room` is memory for one chunk of a gradient.
    pub(crate) fn read_newest(
        &self,
        replay: &Replay,
        (record, chunk): (usize, u32),
        (values, state): (&Shared, Option<&Shared>),
        room: &Scratch,
    ) -> Result<()> {
        let arithmetic = self.arithmetic.get().ok_or_else(|| self.not_applied(record))?;
        let of_values = self.read_slot(record, chunk, values.clone())?;
        if let Some(state) = state {
            self.read_slot(record, self.layout.chunks_of(record) + chunk, state.clone())?.wait()?;
        }
        of_values.wait()?;
        for (head, logged) in replay.of(record) {
            let nbytes = self.gradient_chunk_bytes(record, logged.dtype, chunk)?;
            let gradient = self.read_logged(head, logged, chunk, room.part(nbytes)?)?.wait()?;
            let (rule, dtype) = (&head.rules[logged.rule as usize], logged.dtype);
            let (values, state) = (values.clone(), state.cloned());
            let logged = LoggedChunk { record, chunk, rule, values, state, gradient, dtype };
            arithmetic(self, &logged).map_err(Error::Invalid)?;
        }
        Ok(())
    }

    /// Rebuilds chunks of a record in the RAM tier from the record's live slot and the log. The caller passes chunks
    /// whose newest version was only in memory, until other code wrote to their values in place.
    pub(crate) fn rebuild(&self, ram_tier: &RamTier, record: usize, chunks: &[u32]) -> Result<()> {
        let replay = self.committed_log()?;
        let (room, count) = (self.log_room()?, self.layout.chunks_of(record));
        let version = self.record_state(record)?.version;
        let has_state = self.description.records[record].chunked().next().is_some();
        for &chunk in chunks {
            let mut now: MutexGuard<'_, CachedVersions> = ram_tier.now(record);
            let values = ram_tier.part(self, record, chunk);
            let state = has_state.then(|| ram_tier.part(self, record, count + chunk));
            self.read_newest(&replay, (record, chunk), (&values, state.as_ref()), &room)?;
            now.sums[chunk as usize] = self.sum_of(record, chunk, version, bytes_of(&values));
            now.versions[chunk as usize] = version;
            if has_state {
                now.versions[(count + chunk) as usize] = version;
            }
        }
        Ok(())
    }
}
