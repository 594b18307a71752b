//! Defines `Store`, its queries, and the waits on its index.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
    time::Duration,
};

use memascend_mem::{Guarded, Wait};
use memascend_nvme::Volume;

use crate::{
    Arithmetic, Counters, Create, Description, Error, Layout, Result, Scratch,
    checksum::{Subject, Uuid, checksum},
    copies::Damage,
    counters::Counting,
    index::Index,
    layout::PAGE_BYTES,
    parts::OpenReads,
    root::Run,
    spill::Spill,
    table::Sections,
};

/// Which commits survive a loss of power or the end of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Every commit.
    #[default]
    Step,
    /// Only the last commit before [`Store::close`]. If the process commits but ends without `close`, the next opening
    /// rejects the store, unless the last commit was the store's first commit, or the commit that ended a replay of the
    /// log.
    None,
}

/// The size in bytes of each of the two buffers through which the catalog is read and written.
pub(crate) const CATALOG_CHUNK_BYTES: usize = 16 * PAGE_BYTES as usize;

/// A function that settles the given records, all of which are behind, before it returns. See [Note: Deferred updates]
/// in `newest_state.rs`.
pub type Settler = dyn Fn(&[usize]) -> Result<()> + Send + Sync;

/// Training state on SSD. See the crate's documentation.
pub struct Store {
    pub(crate) volume: Volume,
    pub(crate) path: Arc<Path>,
    pub(crate) uuid: Uuid,
    pub(crate) description: Description,
    pub(crate) description_checksum: u64,
    pub(crate) layout: Layout,
    pub(crate) sections: Sections,
    pub(crate) index: Guarded<Index>,
    pub(crate) spill: Spill,
    pub(crate) reads: OpenReads,
    pub(crate) durability: Durability,
    /// Buffers through which the catalog is read and written.
    pub(crate) scratch: Scratch,
    pub(crate) counters: Counting,
    /// Damaged copies of labels and description, until a commit repairs them.
    pub(crate) to_repair: Mutex<Vec<Damage>>,
    /// Applies logged gradients; set by [`Store::apply_with`].
    pub(crate) arithmetic: OnceLock<Arithmetic>,
    /// Settles records before they are read; set by [`Store::settle_with`].
    pub(crate) settler: Mutex<Option<Arc<Settler>>>,
    /// For each record, true if [`Store::digest`] covers it; set by [`Store::compare`].
    pub(crate) compared: OnceLock<Vec<bool>>,
}

/// Returns the size in bytes of the catalog's buffers, plus the largest sizes of the user's value and of the
/// hyperparameters.
pub(crate) fn buffer_bytes(description: &Description) -> u64 {
    2 * CATALOG_CHUNK_BYTES as u64
        + u64::from(description.user_bytes_max)
        + u64::from(description.hyperparameters_bytes_max)
}

/// Returns an estimate of the bytes of memory that the description takes.
pub(crate) fn names_bytes(description: &Description) -> u64 {
    description.records.iter().map(|record| record.name.len() as u64 + 256).sum()
}

/// The state of a record at the last commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordState {
    /// The number of the live slot: 0 or 1.
    pub slot: u8,
    /// The version of the record that readers see: the generation of the commit that made this version. For a settled
    /// record, the generation of the next commit.
    pub version: u64,
    /// The record's count of updates.
    pub step: u64,
    /// True if the record is staged for the next commit.
    pub staged: bool,
}

/// The identity, the last commit and the sizes of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// The store's uuid.
    pub uuid: [u8; 16],
    /// The number of the last commit; 0 before the first commit.
    pub generation: u64,
    /// The number of committed steps.
    pub step: u64,
    /// The run to which the last commit belongs, if the run has several ranks. See [`Run`].
    pub run: Run,
    /// The user's value as of the last commit: any text.
    pub user: String,
    /// The hyperparameters of the last commit.
    pub hyperparameters: String,
    /// The sum over all records of the bytes of one slot, for values and state.
    pub slot_bytes: u64,
    /// Bytes of the store on storage, without the second places of spilled gradients and without the log.
    pub total_bytes: u64,
    /// Bytes of memory for the index, the description and the checksums of spilled gradients. Grows with the state.
    pub index_bytes: u64,
    /// The part of `index_bytes` for spilled gradients: their checksums and the state of their places.
    pub spill_index_bytes: u64,
    /// Bytes of memory for the catalog's buffers, the user's value and the hyperparameters.
    pub buffer_bytes: u64,
}

impl Store {
    pub(crate) fn new(
        volume: Volume,
        uuid: Uuid,
        description: Description,
        layout: Layout,
        how: &Create,
    ) -> Result<Self> {
        let path: Arc<Path> =
            volume.devices().first().map_or(Path::new("").into(), |device| device.path.as_path().into());
        let scratch = Scratch::new(CATALOG_CHUNK_BYTES, 2, "store catalog")?;
        let sections = Sections::new(&description, layout.extents());
        let description_checksum = checksum(&uuid, Subject::Description, (0, 0), 0, &description.encode());
        let index = Guarded::new(Index::new(&description, &layout, &sections));
        let spill = Spill::new(&description, &layout);
        Ok(Self {
            volume,
            path,
            uuid,
            description,
            description_checksum,
            layout,
            sections,
            index,
            spill,
            reads: OpenReads::default(),
            durability: how.durability,
            scratch,
            counters: Counting::default(),
            to_repair: Mutex::default(),
            arithmetic: OnceLock::new(),
            settler: Mutex::default(),
            compared: OnceLock::new(),
        })
    }

    /// Returns the description of the store's records.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the places of all records and areas.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the volume of files or devices that the store is on.
    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Returns the index of the record with this name.
    pub fn record(&self, name: &str) -> Result<usize> {
        let found = self.description.records.iter().position(|record| record.name == name);
        found.ok_or_else(|| Error::Invalid(format!("the store has no record {name:?}")))
    }

    /// Returns the state of a record at the last commit.
    pub fn record_state(&self, record: usize) -> Result<RecordState> {
        self.known(record)?;
        let index = self.index.lock();
        let slots = &index.records[record];
        let (version, step) = slots.newest();
        // If logged gradients are not applied in the live slot or in memory yet, the count of updates is the count in
        // the last of these gradients. The count in the slot is older.
        let ahead = index.log.live.ahead.get(&record).filter(|_| slots.applied.is_none());
        let step = ahead.map_or(step, |ahead| ahead.step);
        Ok(RecordState { slot: slots.live, version, step, staged: slots.pending.is_staged() })
    }

    /// Returns the identity, the last commit and the sizes of the store.
    #[must_use]
    pub fn info(&self) -> Info {
        let index = self.index.lock();
        Info {
            uuid: self.uuid,
            generation: index.generation,
            step: index.step,
            run: index.run,
            user: index.user.clone(),
            hyperparameters: index.hyperparameters.clone(),
            slot_bytes: self.layout.slot_bytes(),
            total_bytes: self.layout.total_bytes(),
            index_bytes: Index::bytes(&self.description, &self.layout, &self.sections)
                + names_bytes(&self.description)
                + Spill::bytes(&self.description, &self.layout),
            spill_index_bytes: Spill::bytes(&self.description, &self.layout),
            buffer_bytes: buffer_bytes(&self.description),
        }
    }

    /// Returns the counters of reads since the store was opened.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters.read()
    }

    /// Adds to [`Counters::waited`] the time that a caller waited for a fetch outside
    /// [`Fetch::wait`](crate::Fetch::wait).
    pub fn note_wait(&self, time: Duration) {
        self.counters.waited(time);
    }

    /// Fails if the store has no record with this index.
    pub(crate) fn known(&self, record: usize) -> Result<()> {
        let count = self.description.records.len();
        if record < count {
            Ok(())
        } else {
            Err(Error::Invalid(format!("there is no record {record}: the store has {count} records, counted from 0")))
        }
    }

    /// Waits until `ready` is true for the index, and returns the locked index. `what` names the condition in the error
    /// of a wait that ends too early.
    pub(crate) fn when(
        &self,
        wait: &mut Wait<'_>,
        what: &'static str,
        ready: impl Fn(&Index) -> bool,
    ) -> Result<MutexGuard<'_, Index>> {
        self.index.wait_until(wait, ready).map_err(|ended| Error::of_wait(ended, what))
    }

    /// Does what [`Store::when`] does, for a condition on open reads. While it waits, it releases the holds of unit
    /// reads that have ended, because the callers of these reads may never wait for the reads. See
    /// [Note: Holds of a unit] in `parts.rs`.
    pub(crate) fn when_read(
        &self,
        wait: Wait<'_>,
        what: &'static str,
        ready: impl Fn(&Index) -> bool,
    ) -> Result<MutexGuard<'_, Index>> {
        let Wait { timeout, mut keep_waiting } = wait;
        let mut settled = || {
            self.reads.settle();
            keep_waiting.as_mut().is_none_or(|keep_waiting| keep_waiting())
        };
        self.reads.settle();
        self.when(&mut Wait { timeout, keep_waiting: Some(&mut settled) }, what, ready)
    }

    /// Returns the checksum of an extent's bytes at a version.
    pub(crate) fn sum_of(&self, record: usize, extent: u32, version: u64, bytes: &[u8]) -> u64 {
        checksum(&self.uuid, Subject::Extent, (record as u64, u64::from(extent)), version, bytes)
    }

    /// Returns [`Error::Corrupt`] for a place (offset, bytes) of this store.
    pub(crate) fn corrupt(&self, what: impl Into<String>, place: (u64, u64), why: impl Into<String>) -> Error {
        Error::corrupt(&self.path, what, place, why)
    }

    /// Describes an extent in an error.
    pub(crate) fn named(&self, record: usize, extent: u32) -> String {
        use crate::Content;
        let described = &self.description.records[record];
        let name = &described.name;
        match self.layout.extent(&self.description, record, extent).content {
            Content::Values { chunk } => format!("chunk {chunk} of {name:?}"),
            Content::State { chunk } => format!("chunk {chunk} of the state of {name:?}"),
            Content::Whole { tensor, part } => {
                let tensor = described.whole().nth(tensor as usize).map_or("state", |tensor| &tensor.name);
                format!("part {part} of {tensor:?} of {name:?}")
            }
        }
    }
}
