//! Indexes every record and extent of a store, in memory.
//!
//! For each extent, the index takes 16 bytes of checksums and one bit. For each record it takes about 100 bytes.
//!
//! [Note: Two slots] Readers see a record's live slot: the slot that the last commit made live. A step is staged into
//! the other slot, and the next commit makes that slot live. There are two exceptions. If `Slots::applied` is set, only
//! the RAM tier has the newest state, and readers read it there. If a record is settled (`Pending::Settled`), readers
//! see the staged slot even before the next commit.

use std::{ops::Range, sync::Arc};

use crate::{
    Description, Error, Layout, Result,
    log::GradientLog,
    ram_tier::RamTier,
    root::{Beside, Run},
    table::Sections,
};

/// The two slots of a record ([Note: Two slots]), and the change that the next commit makes to these slots.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots {
    /// The slot that the last commit made live.
    pub(crate) live: u8,
    /// The change that the next commit makes.
    pub(crate) pending: Pending,
    /// For each slot, the generation of the commit that made the slot live or will make it live.
    pub(crate) versions: [u64; 2],
    /// For each slot, the count of updates that are applied in the record's state there.
    pub(crate) steps: [u64; 2],
    /// For each slot, the number of open reads.
    pub(crate) reads: [u32; 2],
    /// Number of extents whose staging is not complete.
    pub(crate) missing: u32,
    /// Number of writes of the record's extents in flight.
    pub(crate) writing: u32,
    /// The sum of the checksums of the staged extents. The sum does not depend on the store's uuid, so that stores can
    /// be compared. 0 for a record that [`Store::compare`](crate::Store::compare) did not select.
    pub(crate) digest: u64,
    /// If only the RAM tier has the newest state: the version and the count of updates of this state. Otherwise `None`.
    pub(crate) applied: Option<(u64, u64)>,
}

/// The change that the next commit makes to a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Pending {
    /// No change.
    #[default]
    Nothing,
    /// The slot that is not live becomes live. The staging of this slot has begun, and may be complete.
    Staged,
    /// The slot that is not live becomes live. This slot is staged with the state that the RAM tier has before the
    /// commit. If `update` is set, the update with this number is applied in the RAM tier after the commit.
    Snapshot { update: Option<u64> },
    /// Update number `update` is applied in the RAM tier after the commit.
    InMemory { update: u64 },
    /// The slot that is not live becomes live. This slot is staged with the deferred update, which is not applied in
    /// the live slot. Readers see the staged slot as soon as all of its extents are written, even before a root names
    /// it.
    Settled,
}

impl Pending {
    /// True if the staging of the slot that is not live has begun.
    pub(crate) fn is_staged(self) -> bool {
        matches!(self, Self::Staged | Self::Snapshot { .. } | Self::Settled)
    }

    /// True if the staging of the slot that is not live, with the state of the RAM tier, has begun.
    pub(crate) fn is_snapshot(self) -> bool {
        matches!(self, Self::Snapshot { .. })
    }
}

impl Slots {
    /// Returns the version and the count of updates of the state that readers see.
    pub(crate) fn newest(&self) -> (u64, u64) {
        let seen = self.seen_slot();
        self.applied.unwrap_or((self.versions[seen], self.steps[seen]))
    }

    /// True if the record is settled and all of its extents are written.
    pub(crate) fn is_settled(&self) -> bool {
        self.pending == Pending::Settled && self.missing == 0 && self.writing == 0
    }

    /// Returns the slot that readers see.
    pub(crate) fn seen_slot(&self) -> usize {
        if self.is_settled() { self.other_slot() } else { usize::from(self.live) }
    }

    /// Applies the commit of `generation` to the record: swaps the slots if the slot that is not live is staged.
    /// Returns how the record's copy in the RAM tier relates to the commit.
    pub(crate) fn committed(&mut self, generation: u64) -> AfterCommit {
        let (before, _) = self.newest();
        let pending = std::mem::take(&mut self.pending);
        let was_alone = self.applied.is_some();
        if pending.is_staged() {
            self.live ^= 1;
            self.applied = None;
        }
        match pending {
            Pending::Staged if was_alone => AfterCommit::Older,
            Pending::Snapshot { update: None } => AfterCommit::Written(before),
            Pending::Snapshot { update: Some(update) } | Pending::InMemory { update } => {
                self.applied = Some((generation, update));
                AfterCommit::Same
            }
            Pending::Staged | Pending::Settled | Pending::Nothing => AfterCommit::Same,
        }
    }

    /// Returns the slot that is live after the next commit.
    pub(crate) fn next_slot(&self) -> usize {
        usize::from(self.live ^ u8::from(self.pending.is_staged()))
    }

    /// Returns the slot that is not live.
    pub(crate) fn other_slot(&self) -> usize {
        usize::from(self.live ^ 1)
    }
}

/// How a record's copy in the RAM tier, if the record has a copy there, relates to a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterCommit {
    /// The commit did not make the copy stale, or the engine is about to update the copy to the version of the commit.
    Same,
    /// The commit wrote the copy to storage. The field is the copy's version before the commit. The caller then sets
    /// the copy's version to that of the commit.
    Written(u64),
    /// Before the commit, only the copy had the newest version. The commit wrote a newer state to storage, so the copy
    /// is stale now.
    Older,
}

/// A set of small numbers, with one bit for each number.
#[derive(Debug, Clone)]
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize, all: bool) -> Self {
        Self(vec![if all { u64::MAX } else { 0 }; count.div_ceil(64)])
    }

    pub(crate) fn has(&self, bit: usize) -> bool {
        self.0[bit / 64] >> (bit % 64) & 1 == 1
    }

    pub(crate) fn set(&mut self, bit: usize, to: bool) {
        let mask = 1 << (bit % 64);
        if to { self.0[bit / 64] |= mask } else { self.0[bit / 64] &= !mask }
    }
}

/// Whether the store accepts staging. Every phase except `Open` is a reason to reject staging.
#[derive(Debug)]
pub(crate) enum Phase {
    Open,
    /// The store was opened with `Existing::Previous`. Before anything can be staged, `Store::go_back` must overwrite
    /// the page of the newer or damaged root, in root slot `newest`, with a mark.
    Previous {
        newest: u64,
    },
    /// A commit is in progress.
    Committing,
    Closed,
    /// A commit or an update in memory failed, or [`Store::give_up_applied`](crate::Store::give_up_applied) abandoned
    /// updates, so the newest state is unknown or incomplete. Staging fails with this error until the store is opened
    /// again.
    Broken(Arc<Error>),
}

#[derive(Debug)]
pub(crate) struct Index {
    /// The generation of the last commit.
    pub(crate) generation: u64,
    /// The generation at which the store was opened.
    pub(crate) found_generation: u64,
    /// The number of committed steps.
    pub(crate) step: u64,
    /// The number of committed steps after the commit in progress.
    pub(crate) next_step: u64,
    pub(crate) user: String,
    pub(crate) hyperparameters: String,
    pub(crate) records: Vec<Slots>,
    /// For each slot, the checksum of every extent.
    sums: [Vec<u64>; 2],
    /// The number of the first extent of each record, then the number of all extents.
    starts: Vec<u32>,
    /// The extents whose write was begun since the last `begin` of their record.
    pub(crate) written: Bits,
    /// For each table slot, the pages whose content on storage is out of date.
    pub(crate) dirty: [Bits; 2],
    /// For each table slot, the checksum of every page.
    pub(crate) page_sums: [Vec<u64>; 2],
    /// The number of the step's writes in flight: writes of extents, and of chunks of gradients.
    pub(crate) writing: u32,
    pub(crate) phase: Phase,
    /// The first error of a write of this step.
    pub(crate) failed: Option<Error>,
    /// True if the newest root on storage says that the store is not closed.
    pub(crate) root_is_unclosed: bool,
    /// The generation of the newest root on storage. Commits that are only in memory have later generations.
    pub(crate) root_generation: u64,
    /// The run to which the last commit belongs, if the run has several ranks.
    pub(crate) run: Run,
    /// For each root slot, the content of its page.
    pub(crate) root_pages: [Beside; 2],
    /// The memory of the records that are kept in RAM; `None` if no record is kept in RAM.
    pub(crate) ram_tier: Option<Arc<RamTier>>,
    /// The write-ahead log of gradients.
    pub(crate) log: GradientLog,
    /// Counts the events that may have made extents in the RAM tier stale.
    pub(crate) ram_tier_epoch: u64,
}

impl Index {
    pub(crate) fn new(description: &Description, layout: &Layout, sections: &Sections) -> Self {
        let extents = layout.extents() as usize;
        let pages = sections.pages() as usize;
        let records = description.records.len();
        let mut starts: Vec<u32> = (0..records).map(|record| layout.record(record).first_extent).collect();
        starts.push(layout.extents());
        Self {
            generation: 0,
            found_generation: 0,
            step: 0,
            next_step: 0,
            user: String::new(),
            hyperparameters: String::new(),
            records: vec![Slots::default(); records],
            sums: [vec![0; extents], vec![0; extents]],
            starts,
            written: Bits::new(extents, false),
            dirty: [Bits::new(pages, true), Bits::new(pages, true)],
            page_sums: [vec![0; pages], vec![0; pages]],
            writing: 0,
            phase: Phase::Open,
            failed: None,
            root_is_unclosed: false,
            root_generation: 0,
            run: Run::default(),
            root_pages: [Beside::Mark; 2],
            ram_tier: None,
            log: GradientLog::default(),
            ram_tier_epoch: 0,
        }
    }

    /// Returns the size in bytes that the index of a store takes on the heap, without the user's value, the
    /// hyperparameters, the log and the RAM tier.
    pub(crate) fn bytes(description: &Description, layout: &Layout, sections: &Sections) -> u64 {
        let (extents, pages) = (u64::from(layout.extents()), sections.pages());
        let records = description.records.len() as u64;
        let sums = (extents + pages) * 16;
        let bits = (extents.div_ceil(64) + pages.div_ceil(64) * 2) * 8;
        sums + bits + records * size_of::<Slots>() as u64 + (records + 1) * 4
    }

    /// Returns the number of extents in the store.
    pub(crate) fn extent_count(&self) -> u64 {
        self.sums[0].len() as u64
    }

    /// Returns the numbers of a record's extents.
    pub(crate) fn extents_of(&self, record: usize) -> Range<u32> {
        self.starts[record]..self.starts[record + 1]
    }

    /// Returns the record that an extent belongs to.
    fn record_of(&self, extent: usize) -> usize {
        // A record without extents has the same start as the next record: take the last record with this start.
        self.starts.partition_point(|&start| start as usize <= extent) - 1
    }

    /// Returns the checksum that an extent has after the next commit.
    pub(crate) fn next_sum(&self, extent: usize) -> u64 {
        self.sums[self.records[self.record_of(extent)].next_slot()][extent]
    }

    pub(crate) fn set_live_sum(&mut self, extent: usize, sum: u64) {
        let slot = usize::from(self.records[self.record_of(extent)].live);
        self.sums[slot][extent] = sum;
    }

    pub(crate) fn sum(&self, slot: usize, extent: usize) -> u64 {
        self.sums[slot][extent]
    }

    pub(crate) fn set_sum(&mut self, slot: usize, extent: usize, sum: u64) {
        self.sums[slot][extent] = sum;
    }

    /// Fails if the store does not accept staging. The error gives the reason.
    pub(crate) fn writable(&self) -> Result<()> {
        match &self.phase {
            Phase::Open => Ok(()),
            Phase::Broken(error) => Err(Error::Broken(Arc::clone(error))),
            Phase::Closed => Err(closed()),
            Phase::Previous { .. } => {
                Err(Error::Usage("the store is at the previous commit: drop the newest commit with go_back()".into()))
            }
            Phase::Committing => Err(Error::Usage("a commit is in progress: wait until it has ended".into())),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }

    /// Makes all later staging fail with `error`. If an earlier call gave another error, that earlier error stays.
    pub(crate) fn fail_with(&mut self, error: Arc<Error>) {
        if !matches!(self.phase, Phase::Broken(_)) {
            self.phase = Phase::Broken(error);
        }
    }

    /// Closes the store to all later staging. If `fail_with` was called before, staging continues to fail with the
    /// error of `fail_with`.
    pub(crate) fn close(&mut self) {
        if !matches!(self.phase, Phase::Broken(_)) {
            self.phase = Phase::Closed;
        }
    }

    /// True if only the RAM tier has the newest state of some record.
    pub(crate) fn has_ram_only_state(&self) -> bool {
        self.records.iter().any(|slots| slots.applied.is_some())
    }

    /// True if a deferred update is not applied in the record's live slot, and the record is not settled yet.
    pub(crate) fn is_behind(&self, record: usize) -> bool {
        let is_spilled = self.log.live.ahead.get(&record).is_some_and(|ahead| ahead.is_spilled);
        is_spilled && !self.records[record].is_settled()
    }

    /// Drops a record's staged slot, announced update and appended gradient. A settled slot stays, because it has the
    /// state of the last commit.
    pub(crate) fn forget(&mut self, record: usize) {
        let slots = &mut self.records[record];
        if slots.is_settled() {
            self.log.appended.remove(&record);
            return;
        }
        slots.missing = 0;
        // `stage` writes extents to the RAM tier only for a `Staged` record: these extents are stale now.
        if std::mem::take(&mut slots.pending) == Pending::Staged {
            self.note_stale(record);
        }
        self.log.appended.remove(&record);
    }

    /// Drops all staged slots (except settled slots), announced updates and appended gradients, and the error of a
    /// failed write.
    pub(crate) fn forget_step(&mut self) {
        (0..self.records.len()).for_each(|record| self.forget(record));
        self.log.discard();
        self.failed = None;
    }
}

pub(crate) fn closed() -> Error {
    Error::Usage("the store has been closed: open it again".into())
}
