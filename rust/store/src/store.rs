//! The store itself: what it is made of, and what it says of itself.

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

/// What survives what. Staging is the same in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Every commit survives a loss of power.
    #[default]
    Step,
    /// Nothing is kept before [`Store::close`]; a store that was not closed is refused.
    None,
}

/// Bytes of the two buffers that tables and roots are written from.
pub(crate) const CATALOG_CHUNK_BYTES: usize = 16 * PAGE_BYTES as usize;

/// Settles these records, all of which lack their last update, and waits for that.
pub type Settler = dyn Fn(&[usize]) -> Result<()> + Send + Sync;

/// State on SSD. See the crate's description.
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
    /// Memory that the catalog passes through.
    pub(crate) scratch: Scratch,
    pub(crate) counters: Counting,
    /// Copies of labels and description that are damaged, until a commit repairs them.
    pub(crate) to_repair: Mutex<Vec<Damage>>,
    /// Applies gradients of the log.
    pub(crate) arithmetic: OnceLock<Arithmetic>,
    /// Settles records that are read and lack their last update.
    pub(crate) settler: Mutex<Option<Arc<Settler>>>,
    /// The records whose staged bytes are compared with those of other stores.
    pub(crate) compared: OnceLock<Vec<bool>>,
}

/// Memory of the buffers that the catalog is written from, and of the texts.
pub(crate) fn buffer_bytes(description: &Description) -> u64 {
    2 * CATALOG_CHUNK_BYTES as u64
        + u64::from(description.user_bytes_max)
        + u64::from(description.hyperparameters_bytes_max)
}

/// Memory of the description.
pub(crate) fn names_bytes(description: &Description) -> u64 {
    description.records.iter().map(|record| record.name.len() as u64 + 256).sum()
}

/// Where a record stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordState {
    /// Which slot is live.
    pub slot: u8,
    /// The generation whose commit wrote it.
    pub version: u64,
    /// Its count of updates.
    pub step: u64,
    /// Whether a step is staged for it.
    pub staged: bool,
}

/// Identity, last commit and sizes of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Its identity.
    pub uuid: [u8; 16],
    /// Counts commits.
    pub generation: u64,
    /// Committed steps.
    pub step: u64,
    /// The run of several ranks that the last commit belongs to.
    pub run: Run,
    /// The user's value.
    pub user: String,
    /// The hyperparameters, as the last commit saw them.
    pub hyperparameters: String,
    /// Bytes of one slot of values and state.
    pub slot_bytes: u64,
    /// Bytes of it all on storage.
    pub total_bytes: u64,
    /// Bytes of memory that the index holds: it grows with the state.
    pub index_bytes: u64,
    /// Of that, what the checksums of spilled gradients take.
    pub spill_index_bytes: u64,
    /// Bytes of the buffers that the catalog is written from, and room for the user's value and the hyperparameters.
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

    /// What it holds.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Where it lies.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The volume below.
    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// The index of the record called `name`.
    pub fn record(&self, name: &str) -> Result<usize> {
        let found = self.description.records.iter().position(|record| record.name == name);
        found.ok_or_else(|| Error::Invalid(format!("the store has no record {name:?}")))
    }

    /// Where a record stands.
    pub fn record_state(&self, record: usize) -> Result<RecordState> {
        self.known(record)?;
        let index = self.index.lock();
        let slots = &index.records[record];
        let (version, step) = slots.newest();
        // What is found with a log is newer than its slot before it is replayed, too.
        let ahead = index.log.live.ahead.get(&record).filter(|_| slots.applied.is_none());
        let step = ahead.map_or(step, |ahead| ahead.step);
        Ok(RecordState { slot: slots.live, version, step, staged: slots.pending.is_staged() })
    }

    /// Identity, last commit and sizes.
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

    /// What it has done for its readers.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters.read()
    }

    /// Notes for how long a caller waited for values that somebody else reads or computes.
    pub fn note_wait(&self, time: Duration) {
        self.counters.waited(time);
    }

    pub(crate) fn known(&self, record: usize) -> Result<()> {
        let count = self.description.records.len();
        if record < count { Ok(()) } else { Err(Error::Invalid(format!("record {record} of {count}"))) }
    }

    /// The index, once it is `ready`.
    pub(crate) fn when(
        &self,
        wait: &mut Wait<'_>,
        what: &'static str,
        ready: impl Fn(&Index) -> bool,
    ) -> Result<MutexGuard<'_, Index>> {
        self.index.wait_until(wait, ready).map_err(|ended| Error::of_wait(ended, what))
    }

    /// The same for the end of reads: nobody may wait for one, and then nobody else says that it ended.
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

    /// The checksum of an extent.
    pub(crate) fn sum_of(&self, record: usize, extent: u32, version: u64, bytes: &[u8]) -> u64 {
        checksum(&self.uuid, Subject::Extent, (record as u64, u64::from(extent)), version, bytes)
    }

    pub(crate) fn corrupt(&self, what: impl Into<String>, place: (u64, u64), why: impl Into<String>) -> Error {
        Error::corrupt(&self.path, what, place, why)
    }

    /// An extent in words.
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
