//! Applies updates to held entries in memory once a commit has made them; `close` writes these entries.
//!
//! An update is announced before its commit, and applied after it. Then memory has the only copy of the entry until
//! [`Store::write_applied`] writes that to the slot that is not live.

use std::{collections::VecDeque, sync::Arc};

use memascend_mem::Wait;

use crate::{
    Commit, Durability, Error, Result, Shared, StepWrite, Store,
    buffer::bytes_of,
    commit::Reach,
    held::RamTier,
    index::{Index, Pending},
};

/// Pieces that are written at once.
const DEPTH: usize = 16;

/// An entry whose update a commit has made, and which is in memory as it was before: whoever has this applies it.
pub struct InMemoryUpdate<'a> {
    store: &'a Store,
    held: Arc<RamTier>,
    entry: usize,
    version: u64,
}

impl Store {
    /// Whether updates of held entries are applied in memory: where nothing is to be durable before the end.
    #[must_use]
    pub fn applies(&self) -> bool {
        self.durability == Durability::None
    }

    /// Announces that the next commit makes update number `step` of a held entry, which is applied after it. What is stale
    /// in memory is read; reads of the entry that are open are waited for. Again is fine.
    pub fn announce(&self, entry: usize, step: u64, wait: Wait<'_>) -> Result<()> {
        self.known(entry)?;
        self.refresh(&[entry], &mut |_, _| true)?;
        let free = |index: &Index| index.entries[entry].reads == [0, 0] || index.writable().is_err();
        let mut index = self.when_read(wait, "the end of reads of what is held", free)?;
        index.writable()?;
        let slots = &mut index.entries[entry];
        slots.pending = match slots.pending {
            Pending::Nothing | Pending::InMemory { .. } => Pending::InMemory { update: step },
            Pending::Snapshot { .. } => Pending::Snapshot { update: Some(step) },
            Pending::Staged => {
                let name = &self.description.entries[entry].name;
                return Err(Error::Usage(format!("{name:?} is staged already; commit or discard that first")));
            }
        };
        Ok(())
    }

    /// Checks that nobody wrote to a chunk of the values of a held entry in memory.
    pub fn check_values(&self, entry: usize, chunk: u32) -> Result<()> {
        match self.held() {
            Some(held) => self.check_held(&held, entry, chunk),
            None => Ok(()),
        }
    }

    /// The memory of a piece that is held.
    #[must_use]
    pub fn held_piece(&self, entry: usize, piece: u32) -> Option<Shared> {
        let held = self.held()?;
        (self.is_held(entry) && piece < self.layout.pieces_of(entry)).then(|| held.part(self, entry, piece))
    }

    /// The update of an entry that was announced, once its commit was made.
    pub fn application(&self, entry: usize) -> Result<InMemoryUpdate<'_>> {
        let version = self.entry_state(entry)?.version;
        let held = self.held().ok_or_else(|| Error::Usage("nothing is held".into()))?;
        Ok(InMemoryUpdate { store: self, held, entry, version })
    }

    /// Says that an update could not be applied: what memory has of it is of no step.
    pub fn fail_application(&self, entry: usize, why: &str) {
        let name = &self.description.entries[entry].name;
        let error = Error::Usage(format!(
            "the update of {name:?} in memory was not applied to its end ({why}): {}",
            if self.applies() {
                "go back to a checkpoint"
            } else {
                "close the store and open it again: its log has the step"
            }
        ));
        self.index.lock().break_by(Arc::new(error));
        self.index.notify_all();
    }

    /// Writes the entries of which memory has the newest copy, and commits that as a part of the last step; the log ends
    /// with it. What else is staged is dropped. `progress` gets bytes done and of all, and ends it by `false`; called
    /// again, it goes on where it was.
    pub fn write_applied(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let step = {
            let index = self.index.lock();
            if index.is_closed() || !index.has_applied() {
                return Ok(());
            }
            index.step
        };
        self.drop_others()?;
        self.stage_applied(progress)?;
        self.commit(Commit { step, ..Commit::default() }, Wait::forever()).map(drop)
    }

    /// Stages the entries of which memory has the newest copy.
    fn stage_applied(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let alone: Vec<usize> = {
            let index = self.index.lock();
            (0..index.entries.len()).filter(|&entry| index.entries[entry].applied.is_some()).collect()
        };
        let bytes = |entry: usize| {
            let (values, state) = self.layout.held_bytes(&self.description, entry);
            values + state
        };
        let (all, mut done) = (alone.iter().map(|&entry| bytes(entry)).sum(), 0);
        let mut flying: VecDeque<(StepWrite<'_, Shared>, u64)> = VecDeque::with_capacity(DEPTH);
        for &entry in &alone {
            if self.is_written(entry) {
                done += bytes(entry);
                continue;
            }
            self.index.lock().forget(entry);
            self.refresh(&[entry], &mut |_, _| true)?;
            self.begin_snapshot(entry, Wait::forever())?;
            for piece in 0..self.layout.pieces_of(entry) {
                let nbytes = self.layout.piece(&self.description, entry, piece).bytes();
                if flying.len() == DEPTH
                    && let Some((write, nbytes)) = flying.pop_front()
                {
                    write.wait()?;
                    done += nbytes;
                    if !progress(done, all) {
                        return Err(Error::Interrupted("writing what is held"));
                    }
                }
                flying.push_back((self.stage_held(entry, piece)?, nbytes));
            }
        }
        flying.into_iter().try_for_each(|(write, _)| write.wait().map(drop))
    }

    /// Forgets what is staged, but for snapshots of what memory has.
    fn drop_others(&self) -> Result<()> {
        let mut index = self.when(&mut Wait::forever(), "writes of the step", |index| index.writing == 0)?;
        index.writable()?;
        for entry in 0..index.entries.len() {
            match &mut index.entries[entry].pending {
                Pending::Snapshot { update } => *update = None,
                _ => index.forget(entry),
            }
        }
        index.log.discard();
        index.failed = None;
        Ok(())
    }

    /// Whether all of an entry is staged from memory.
    fn is_written(&self, entry: usize) -> bool {
        let slots = &self.index.lock().entries[entry];
        slots.pending.is_snapshot() && slots.missing == 0
    }

    /// Gives up what only memory has, where it has something: nothing is committed any more, and the store stays unclosed,
    /// which whoever opens it is told.
    pub fn give_up_applied(&self) {
        let mut index = self.index.lock();
        if index.has_applied() {
            index.break_by(Arc::new(Error::Usage("what only memory had was given up as it was closed".into())));
        }
    }

    /// Before the end: writes what only memory has, and makes it durable.
    pub(crate) fn close_applied(&self) -> Result<()> {
        let step = Some(self.index.lock()).filter(|index| index.has_applied()).map(|index| index.step);
        if let Some(step) = step {
            self.stage_applied(&mut |_, _| true)?;
            self.carry_out(Commit { step, ..Commit::default() }, Reach::Memory, &mut || true)?;
        }
        Ok(())
    }
}

impl InMemoryUpdate<'_> {
    /// The memory of a piece, which is the caller's until [`InMemoryUpdate::applied`].
    #[must_use]
    pub fn part(&self, piece: u32) -> Shared {
        self.held.part(self.store, self.entry, piece)
    }

    /// A chunk was updated, values and state.
    pub fn chunk_applied(&self, chunk: u32) {
        let sum = self.store.sum_of_bytes(self.entry, chunk, self.version, bytes_of(&self.part(chunk)));
        self.held.now(self.entry).sums[chunk as usize] = sum;
    }

    /// All of it was.
    pub fn applied(self) {
        self.held.now(self.entry).versions.fill(self.version);
    }
}
