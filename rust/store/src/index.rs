//! Indexes every record and extent of a store, in memory.
//!
//! It takes at most 64 bytes per MiB of state, and 80 bytes and a name for each record.

use std::{ops::Range, sync::Arc};

use crate::{
    Description, Error, Layout, Result,
    log::GradientLog,
    ram_tier::RamTier,
    root::{Beside, Run},
    table::Sections,
};

/// The two slots of a record, and what the next commit makes of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots {
    /// Which slot readers see.
    pub(crate) live: u8,
    pub(crate) pending: Pending,
    /// The generation whose commit made (or will make) each slot live.
    pub(crate) versions: [u64; 2],
    /// The record's own count of updates.
    pub(crate) steps: [u64; 2],
    /// Reads that are open, of each slot.
    pub(crate) reads: [u32; 2],
    /// Extents that are still to be staged.
    pub(crate) missing: u32,
    /// Writes of its extents in flight.
    pub(crate) writing: u32,
    /// Where stores are compared: a sum of checksums of what is staged, which depend on no store.
    pub(crate) digest: u64,
    /// Version and count of updates of what memory alone has: the live slot is older.
    pub(crate) applied: Option<(u64, u64)>,
}

/// What the next commit changes of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Pending {
    #[default]
    Nothing,
    /// The slot that is not live becomes live. It is being staged, or is staged.
    Staged,
    /// The same, with what memory has of the record before the commit; then update number `update`, if there is one, is
    /// applied in memory.
    Snapshot { update: Option<u64> },
    /// An update of this number is applied in memory once the commit is made.
    InMemory { update: u64 },
    /// The slot that is not live gets the record with the update that its live slot lacks; readers see it as soon as all of
    /// it is there, though no root names it yet.
    Settled,
}

impl Pending {
    /// Whether a slot is being staged, or is.
    pub(crate) fn is_staged(self) -> bool {
        matches!(self, Self::Staged | Self::Snapshot { .. } | Self::Settled)
    }

    pub(crate) fn is_snapshot(self) -> bool {
        matches!(self, Self::Snapshot { .. })
    }
}

impl Slots {
    /// Version and count of updates of what readers see.
    pub(crate) fn newest(&self) -> (u64, u64) {
        let seen = self.seen_slot();
        self.applied.unwrap_or((self.versions[seen], self.steps[seen]))
    }

    /// Whether the record is settled, and all of it written.
    pub(crate) fn is_settled(&self) -> bool {
        self.pending == Pending::Settled && self.missing == 0 && self.writing == 0
    }

    /// The slot that readers see.
    pub(crate) fn seen_slot(&self) -> usize {
        if self.is_settled() { self.other_slot() } else { usize::from(self.live) }
    }

    /// A commit was made, of this generation.
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

    /// The slot that is live after the next commit.
    pub(crate) fn next_slot(&self) -> usize {
        usize::from(self.live ^ u8::from(self.pending.is_staged()))
    }

    pub(crate) fn other_slot(&self) -> usize {
        usize::from(self.live ^ 1)
    }
}

/// What a commit made of what is in memory of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterCommit {
    /// What it was: of the newest version, or about to be updated.
    Same,
    /// It is what was written now, and had this version before.
    Written(u64),
    /// Something else was written.
    Older,
}

/// A set of small numbers.
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

/// Whether staging may begin, and why not.
#[derive(Debug)]
pub(crate) enum Phase {
    Open,
    /// The commit before the newest was opened. The newest one's root, in the page of this slot, is to be marked empty
    /// before anything is staged.
    Previous {
        newest: u64,
    },
    Committing,
    Closed,
    /// A commit failed with this, and nobody knows which root is on storage.
    Broken(Arc<Error>),
}

#[derive(Debug)]
pub(crate) struct Index {
    pub(crate) generation: u64,
    /// What it was when the store was opened.
    pub(crate) found_generation: u64,
    /// Committed steps, and what the commit that is being made says they are.
    pub(crate) step: u64,
    pub(crate) next_step: u64,
    pub(crate) user: String,
    pub(crate) hyperparameters: String,
    pub(crate) records: Vec<Slots>,
    sums: [Vec<u64>; 2],
    /// The first extent of each record, and the end.
    starts: Vec<u32>,
    /// Extents that were staged.
    pub(crate) written: Bits,
    /// Pages in which each table slot differs from what is true.
    pub(crate) dirty: [Bits; 2],
    pub(crate) page_sums: [Vec<u64>; 2],
    /// Writes of extents in flight.
    pub(crate) writing: u32,
    pub(crate) phase: Phase,
    /// What a write of this step failed with.
    pub(crate) failed: Option<Error>,
    /// Whether the root on storage says that the store is not closed.
    pub(crate) root_is_unclosed: bool,
    /// The generation of that root: commits that are made in memory alone have later ones.
    pub(crate) root_generation: u64,
    /// The run of several ranks that the last commit belongs to.
    pub(crate) run: Run,
    /// What the page of each root holds.
    pub(crate) root_pages: [Beside; 2],
    /// Where records are kept in RAM, if any are.
    pub(crate) ram_tier: Option<Arc<RamTier>>,
    pub(crate) log: GradientLog,
    /// Counts what made extents in RAM stale.
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

    /// Heap bytes that it holds, beside the texts.
    pub(crate) fn bytes(description: &Description, layout: &Layout, sections: &Sections) -> u64 {
        let (extents, pages) = (u64::from(layout.extents()), sections.pages());
        let records = description.records.len() as u64;
        let sums = (extents + pages) * 16;
        let bits = (extents.div_ceil(64) + pages.div_ceil(64) * 2) * 8;
        sums + bits + records * size_of::<Slots>() as u64 + (records + 1) * 4
    }

    pub(crate) fn extent_count(&self) -> u64 {
        self.sums[0].len() as u64
    }

    pub(crate) fn extents_of(&self, record: usize) -> Range<u32> {
        self.starts[record]..self.starts[record + 1]
    }

    fn record_of(&self, extent: usize) -> usize {
        // Records without extents share their start with the next: the last of them is the one.
        self.starts.partition_point(|&start| start as usize <= extent) - 1
    }

    /// The checksum that an extent has after the next commit.
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

    /// Whether staging may go on.
    pub(crate) fn writable(&self) -> Result<()> {
        match &self.phase {
            Phase::Open => Ok(()),
            Phase::Broken(error) => Err(Error::Broken(Arc::clone(error))),
            Phase::Closed => Err(closed()),
            Phase::Previous { .. } => {
                Err(Error::Usage("the newest commit is still there: go back to the one before it first".into()))
            }
            Phase::Committing => Err(Error::Usage("a commit is under way; wait for it".into())),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }

    /// Has nothing be staged any more, for this reason or an earlier one.
    pub(crate) fn break_by(&mut self, error: Arc<Error>) {
        if !matches!(self.phase, Phase::Broken(_)) {
            self.phase = Phase::Broken(error);
        }
    }

    /// Has nothing be staged any more.
    pub(crate) fn close(&mut self) {
        if !matches!(self.phase, Phase::Broken(_)) {
            self.phase = Phase::Closed;
        }
    }

    /// Whether memory has the only copy of the newest state of any record.
    pub(crate) fn has_applied(&self) -> bool {
        self.records.iter().any(|slots| slots.applied.is_some())
    }

    /// Whether the live slot of a record lacks an update, and nothing else has it.
    pub(crate) fn is_behind(&self, record: usize) -> bool {
        let is_spilled = self.log.live.ahead.get(&record).is_some_and(|ahead| ahead.is_spilled);
        is_spilled && !self.records[record].is_settled()
    }

    /// Forgets what was staged of a record; not what it was settled to, which is of the last commit.
    pub(crate) fn forget(&mut self, record: usize) {
        let slots = &mut self.records[record];
        if slots.is_settled() {
            self.log.appended.remove(&record);
            return;
        }
        slots.missing = 0;
        // Only this has written to memory.
        if std::mem::take(&mut slots.pending) == Pending::Staged {
            self.note_stale(record);
        }
        self.log.appended.remove(&record);
    }

    /// Forgets everything that was staged, and the failure of it.
    pub(crate) fn forget_step(&mut self) {
        (0..self.records.len()).for_each(|record| self.forget(record));
        self.log.discard();
        self.failed = None;
    }
}

pub(crate) fn closed() -> Error {
    Error::Usage("the store has been closed; open it again".into())
}
