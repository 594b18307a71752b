//! Indexes every entry and piece of a store, in memory.
//!
//! It takes at most 64 bytes per MiB of state, and 72 bytes and a name for each entry.

use std::{ops::Range, sync::Arc};

use crate::{
    Description, Error, Layout, Result,
    held::Held,
    log::Log,
    root::{Beside, Run},
    table::Sections,
};

/// What is known of an entry.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots {
    /// Which slot readers see.
    pub(crate) live: u8,
    /// Whether the other one is being staged, or is.
    pub(crate) staged: bool,
    /// It is staged from memory, as it is there.
    pub(crate) snapshot: bool,
    /// The generation whose commit made (or will make) each slot live.
    pub(crate) versions: [u64; 2],
    /// The entry's own count of updates.
    pub(crate) steps: [u64; 2],
    /// Reads that are open, of each slot.
    pub(crate) reads: [u32; 2],
    /// Pieces that are still to be staged.
    pub(crate) missing: u32,
    /// Writes of its pieces in flight.
    pub(crate) writing: u32,
    /// The count of updates of the one that the next commit makes, where it is held and that is applied in memory.
    pub(crate) announced: Option<u64>,
    /// Version and count of updates of what memory alone has: the live slot is older.
    pub(crate) applied: Option<(u64, u64)>,
}

impl Slots {
    /// Version and count of updates of what readers see.
    pub(crate) fn newest(&self) -> (u64, u64) {
        let live = usize::from(self.live);
        self.applied.unwrap_or((self.versions[live], self.steps[live]))
    }

    /// A commit was made, of this generation.
    pub(crate) fn committed(&mut self, generation: u64) -> Kept {
        let (mut kept, (before, _)) = (Kept::Same, self.newest());
        let snapshot = std::mem::take(&mut self.snapshot);
        if std::mem::take(&mut self.staged) {
            self.live ^= 1;
            let alone = self.applied.take().is_some();
            kept = if snapshot {
                Kept::Written(before)
            } else if alone {
                Kept::Older
            } else {
                Kept::Same
            };
        }
        if let Some(step) = self.announced.take() {
            self.applied = Some((generation, step));
            kept = Kept::Same;
        }
        kept
    }

    /// The slot that is live after the next commit.
    pub(crate) fn next_slot(&self) -> usize {
        usize::from(self.live ^ u8::from(self.staged))
    }

    pub(crate) fn other_slot(&self) -> usize {
        usize::from(self.live ^ 1)
    }
}

/// What a commit made of what is in memory of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
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
    /// The texts as they are read, page by page.
    pub(crate) user_bytes: Vec<u8>,
    pub(crate) hyperparameters_bytes: Vec<u8>,
    pub(crate) entries: Vec<Slots>,
    sums: [Vec<u64>; 2],
    /// The first piece of each entry, and the end.
    starts: Vec<u32>,
    /// Pieces that were staged.
    pub(crate) written: Bits,
    /// Pages in which each table slot differs from what is true.
    pub(crate) dirty: [Bits; 2],
    pub(crate) page_sums: [Vec<u64>; 2],
    /// Writes of pieces in flight.
    pub(crate) writing: u32,
    pub(crate) committing: bool,
    pub(crate) closed: bool,
    /// What a write of this step failed with.
    pub(crate) failed: Option<Error>,
    /// What a commit failed with after which nobody knows which root is on storage.
    pub(crate) broken: Option<Arc<Error>>,
    /// The flags of the root on storage.
    pub(crate) root_flags: u32,
    /// Its generation, which commits in memory leave behind.
    pub(crate) root_generation: u64,
    /// The run of several ranks that the last commit belongs to.
    pub(crate) run: Run,
    /// What the page of each root holds.
    pub(crate) root_pages: [Beside; 2],
    /// The page of the root that is to be marked empty before anything is staged: this is the commit before it.
    pub(crate) given_up: Option<u64>,
    /// Where entries are held in memory, if any are.
    pub(crate) held: Option<Arc<Held>>,
    pub(crate) log: Log,
    /// Counts what made held pieces stale.
    pub(crate) held_epoch: u64,
}

impl Index {
    pub(crate) fn new(description: &Description, layout: &Layout, sections: &Sections) -> Self {
        let pieces = layout.pieces() as usize;
        let pages = sections.pages() as usize;
        let entries = description.entries.len();
        let mut starts: Vec<u32> = (0..entries).map(|entry| layout.entry(entry).first_piece).collect();
        starts.push(layout.pieces());
        Self {
            generation: 0,
            found_generation: 0,
            step: 0,
            next_step: 0,
            user: String::new(),
            hyperparameters: String::new(),
            user_bytes: Vec::new(),
            hyperparameters_bytes: Vec::new(),
            entries: vec![Slots::default(); entries],
            sums: [vec![0; pieces], vec![0; pieces]],
            starts,
            written: Bits::new(pieces, false),
            dirty: [Bits::new(pages, true), Bits::new(pages, true)],
            page_sums: [vec![0; pages], vec![0; pages]],
            writing: 0,
            committing: false,
            closed: false,
            failed: None,
            broken: None,
            root_flags: 0,
            root_generation: 0,
            run: Run::default(),
            root_pages: [Beside::Unknown; 2],
            given_up: None,
            held: None,
            log: Log::default(),
            held_epoch: 0,
        }
    }

    /// Heap bytes that it holds, beside the texts.
    pub(crate) fn bytes(description: &Description, layout: &Layout, sections: &Sections) -> u64 {
        let (pieces, pages) = (u64::from(layout.pieces()), sections.pages());
        let entries = description.entries.len() as u64;
        let sums = (pieces + pages) * 16;
        let bits = (pieces.div_ceil(64) + pages.div_ceil(64) * 2) * 8;
        sums + bits + entries * size_of::<Slots>() as u64 + (entries + 1) * 4
    }

    pub(crate) fn piece_count(&self) -> u64 {
        self.sums[0].len() as u64
    }

    pub(crate) fn pieces_of(&self, entry: usize) -> Range<u32> {
        self.starts[entry]..self.starts[entry + 1]
    }

    fn entry_of(&self, piece: usize) -> usize {
        // Entries without pieces share their start with the next: the last of them is the one.
        self.starts.partition_point(|&start| start as usize <= piece) - 1
    }

    /// The checksum that a piece has after the next commit.
    pub(crate) fn next_sum(&self, piece: usize) -> u64 {
        self.sums[self.entries[self.entry_of(piece)].next_slot()][piece]
    }

    pub(crate) fn set_live_sum(&mut self, piece: usize, sum: u64) {
        let slot = usize::from(self.entries[self.entry_of(piece)].live);
        self.sums[slot][piece] = sum;
    }

    pub(crate) fn sum(&self, slot: usize, piece: usize) -> u64 {
        self.sums[slot][piece]
    }

    pub(crate) fn set_sum(&mut self, slot: usize, piece: usize, sum: u64) {
        self.sums[slot][piece] = sum;
    }

    /// Whether staging may go on.
    pub(crate) fn writable(&self) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(Error::Broken(Arc::clone(error)));
        }
        if self.closed {
            return Err(Error::Usage("the store has been closed; open it again".into()));
        }
        if self.given_up.is_some() {
            return Err(Error::Usage("the newest commit is still there: go back to the one before it first".into()));
        }
        if self.committing {
            return Err(Error::Usage("a commit is under way; wait for it".into()));
        }
        Ok(())
    }

    /// Forgets what was staged of an entry.
    pub(crate) fn forget(&mut self, entry: usize) {
        let slots = &mut self.entries[entry];
        // A snapshot left memory as it was.
        let snapshot = std::mem::take(&mut slots.snapshot);
        if std::mem::take(&mut slots.staged) && !snapshot {
            self.note_stale(entry);
        }
        self.entries[entry].announced = None;
        self.entries[entry].missing = 0;
        self.log.discard_entry(entry);
    }
}
