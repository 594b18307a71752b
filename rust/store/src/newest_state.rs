//! Rebuilds the newest state of a record, chunk by chunk: its live slot, then the gradients of the log.
//!
//! For whoever looks at a store that has a log, and for values in RAM that somebody wrote to. Nothing is written to storage.

use std::sync::{Arc, MutexGuard};

use memascend_mem::locked;

use crate::{
    Dtype, Error, LoggedRule, Replay, Result, Scratch, Settler, Shared, Store, buffer::bytes_of, ram_tier::Now,
    ram_tier::RamTier,
};

/// Applies one gradient of the log to a chunk, by arithmetic that the store does not have; or why it cannot.
pub type Arithmetic = fn(&Store, &LoggedChunk<'_>) -> std::result::Result<(), String>;

/// A chunk of a record, and a gradient that is to be applied to it.
#[derive(Debug)]
pub struct LoggedChunk<'a> {
    /// Whose.
    pub record: usize,
    /// Which.
    pub chunk: u32,
    /// What the gradient is applied with.
    pub rule: &'a LoggedRule,
    /// The extents of values and state, which are the callee's, as is the gradient.
    pub values: Shared,
    /// As above; none of a record whose chunks have no state.
    pub state: Option<Shared>,
    /// Whole pages, with the chunk's elements at the beginning.
    pub gradient: Shared,
    /// The gradient's.
    pub dtype: Dtype,
}

impl Store {
    /// Memory for what is read of the log.
    pub(crate) fn log_room(&self) -> Result<Scratch> {
        let chunk = u64::from(self.description.chunk_elements) * Dtype::F32.bytes();
        Scratch::new(chunk as usize, 1, "gradients of the log")
    }

    /// Says who applies gradients of the log, where no one was named yet.
    pub fn apply_with(&self, arithmetic: Arithmetic) {
        self.arithmetic.get_or_init(|| arithmetic);
    }

    /// Says who settles records that are read, from now on.
    pub fn settle_with(&self, settler: Box<Settler>) {
        *locked(&self.settler) = Some(settler.into());
    }

    /// Whether the last commit left a record behind, and nobody has settled it yet.
    #[must_use]
    pub fn is_behind(&self, record: usize) -> bool {
        self.index.lock().is_behind(record)
    }

    /// Has those of some records settled that lack their last update.
    pub(crate) fn settled(&self, records: impl IntoIterator<Item = usize>) -> Result<()> {
        let Some(settler) = locked(&self.settler).clone() else { return Ok(()) };
        let behind: Vec<usize> = records.into_iter().filter(|&record| self.is_behind(record)).collect();
        if behind.is_empty() { Ok(()) } else { settler(&behind) }
    }

    /// The number of a record's first element in the whole parameter.
    #[must_use]
    pub fn first_element(&self, record: usize) -> u64 {
        self.description.first_elements.get(record).copied().unwrap_or(0)
    }

    /// What the live slot of a record lacks, where nobody applied that yet.
    pub(crate) fn lacking(&self, record: usize) -> Option<Arc<Replay>> {
        let index = self.index.lock();
        let lacks = index.records.get(record)?.applied.is_none() && index.log.is_ahead(record);
        index.log.found.clone().filter(|_| lacks)
    }

    /// Reads a chunk of a record into the memory of its two extents, with all that the log has of it applied.
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

    /// Puts chunks of a record in RAM together anew, of which memory had the only whole copy until somebody wrote to it.
    pub(crate) fn rebuild(&self, ram_tier: &RamTier, record: usize, chunks: &[u32]) -> Result<()> {
        let replay = self.committed_log()?;
        let (room, count) = (self.log_room()?, self.layout.chunks_of(record));
        let version = self.record_state(record)?.version;
        let has_state = self.description.records[record].chunked().next().is_some();
        for &chunk in chunks {
            let mut now: MutexGuard<'_, Now> = ram_tier.now(record);
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
