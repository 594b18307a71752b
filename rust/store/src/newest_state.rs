//! Rebuilds the newest state of an entry, chunk by chunk: its live slot, then the gradients of the log.
//!
//! For whoever looks at a store that has a log, and for held values that somebody wrote to. Nothing is written to storage.

use std::{
    fmt::Debug,
    sync::{Arc, MutexGuard},
};

use crate::{Dtype, Error, Replay, Result, Rule, Scratch, Shared, Store, buffer::bytes_of, held::Now, held::RamTier};

/// Arithmetic that the store does not have: applies gradients of the log.
pub trait Arithmetic: Debug + Send + Sync {
    /// Applies one gradient to a chunk; says why it cannot.
    fn apply(&self, store: &Store, logged: &LoggedChunk<'_>) -> std::result::Result<(), String>;
}

/// A chunk of an entry, and a gradient that is to be applied to it.
#[derive(Debug)]
pub struct LoggedChunk<'a> {
    /// Whose.
    pub entry: usize,
    /// Which.
    pub chunk: u32,
    /// What the gradient is applied with.
    pub rule: &'a Rule,
    /// The pieces of values and state, which are the callee's, as is the gradient.
    pub values: Shared,
    /// As above; none of an entry whose chunks have no state.
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
    pub fn apply_with(&self, arithmetic: Arc<dyn Arithmetic>) {
        self.arithmetic.get_or_init(|| arithmetic);
    }

    /// The number of an entry's first element in the whole parameter.
    #[must_use]
    pub fn first_element(&self, entry: usize) -> u64 {
        self.description.first_elements.get(entry).copied().unwrap_or(0)
    }

    /// What the live slot of an entry lacks, where nobody applied that yet.
    pub(crate) fn lacking(&self, entry: usize) -> Option<Arc<Replay>> {
        let index = self.index.lock();
        let lacks = index.entries.get(entry)?.applied.is_none() && index.log.is_ahead(entry);
        index.log.found.clone().filter(|_| lacks)
    }

    /// Reads a chunk of an entry into the memory of its two pieces, with all that the log has of it applied.
    pub(crate) fn read_newest(
        &self,
        replay: &Replay,
        (entry, chunk): (usize, u32),
        (values, state): (&Shared, Option<&Shared>),
        room: &Scratch,
    ) -> Result<()> {
        let arithmetic = self.arithmetic.get().ok_or_else(|| self.not_applied(entry))?;
        let of_values = self.read_slot(entry, chunk, values.clone())?;
        if let Some(state) = state {
            self.read_slot(entry, self.layout.chunks_of(entry) + chunk, state.clone())?.wait()?;
        }
        of_values.wait()?;
        for (head, record) in replay.of(entry) {
            let nbytes = self.gradient_chunk_bytes(entry, record.dtype, chunk)?;
            let gradient = self.read_record(head, record, chunk, room.part(nbytes)?)?.wait()?;
            let (rule, dtype) = (&head.rules[record.rule as usize], record.dtype);
            let (values, state) = (values.clone(), state.cloned());
            let logged = LoggedChunk { entry, chunk, rule, values, state, gradient, dtype };
            arithmetic.apply(self, &logged).map_err(Error::Invalid)?;
        }
        Ok(())
    }

    /// Puts chunks of a held entry together anew, of which memory had the only whole copy until somebody wrote to it.
    pub(crate) fn rebuild(&self, held: &RamTier, entry: usize, chunks: &[u32]) -> Result<()> {
        let replay = self.committed_log()?;
        let (room, count) = (self.log_room()?, self.layout.chunks_of(entry));
        let version = self.entry_state(entry)?.version;
        let has_state = self.description.entries[entry].chunked().next().is_some();
        for &chunk in chunks {
            let mut now: MutexGuard<'_, Now> = held.now(entry);
            let values = held.part(self, entry, chunk);
            let state = has_state.then(|| held.part(self, entry, count + chunk));
            self.read_newest(&replay, (entry, chunk), (&values, state.as_ref()), &room)?;
            now.sums[chunk as usize] = self.sum_of_bytes(entry, chunk, version, bytes_of(&values));
            now.versions[chunk as usize] = version;
            if has_state {
                now.versions[(count + chunk) as usize] = version;
            }
        }
        Ok(())
    }
}
