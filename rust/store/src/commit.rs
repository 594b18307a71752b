//! Commits a step: waits for the step's writes, writes the log head and the table, flushes the devices, then writes the
//! root.
//!
//! [Note: Root last] The root of generation `g + 1` is written only after a flush of everything that this root names.
//! Nothing that root `g` names is overwritten before root `g + 1` is durable. So after a crash the store has either the
//! whole previous step or the whole new step.
//!
//! [`Durability::None`] is an exception: one commit writes a durable root that marks the store as unclosed. Later
//! commits write no table and no root, and overwrite slots that the roots on storage name. [`Store::close`] then writes
//! the table and a root of the last commit.

use std::sync::Arc;

use memascend_mem::Wait;

use crate::{
    Durability, Error, Head, Result, StepHead, Store, Transfer,
    buffer::first,
    features::{IDENTITY, LOG, PLACES, RANKS},
    index::{AfterCommit, Index, Phase},
    layout::PAGE_BYTES,
    log::Live,
    root::{Beside, LogFields, Root, Run},
    store::CATALOG_CHUNK_BYTES,
    table::table_checksum,
};

/// The arguments of a commit. The staged extents are in the index, and not among these arguments.
#[derive(Debug, Clone, Default)]
pub struct Commit {
    /// The number of committed steps, including the step of this commit.
    pub step: u64,
    /// The user's new value; `None` keeps the current value.
    pub user: Option<String>,
    /// The new hyperparameters; `None` keeps the current hyperparameters.
    pub hyperparameters: Option<String>,
    /// Names the gradients that were appended to the log for this step; `None` if no gradient was appended.
    pub log: Option<StepHead>,
    /// The run to which the commit belongs, if the run has several ranks; `None` keeps the run of the last commit.
    pub run: Option<Run>,
}

/// The part of the catalog that a commit writes to storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Nothing: the commit changes only the index in memory.
    Memory,
    /// The table, and a durable root that marks the store as unclosed. Later commits use [`Reach::Memory`].
    Unclosed,
    /// The table, and a durable root that does not mark the store as unclosed. With [`Durability::Step`] also the
    /// step's log head, if the step has logged gradients.
    Durable,
}

impl Store {
    /// Makes all staged records live, and durable according to the store's [`Durability`]. Returns the new generation.
    ///
    /// Fails, and changes nothing that a reader sees, if a record is staged only in part or a write of the step failed.
    /// After a failed write, the caller must discard the step. After [`Error::Broken`], only opening the store again
    /// shows whether the step was committed.
    pub fn commit(&self, commit: Commit, wait: Wait<'_>) -> Result<u64> {
        self.commit_agreed(commit, wait, &mut || true)
    }

    /// Commits as [`Store::commit`] does, together with other ranks. Calls `agree` before the staged slots become live:
    /// if the commit writes a root, after the flush and before the write of the root. If `agree` returns `false`, the
    /// commit fails with [`Error::Interrupted`] and changes nothing that a reader sees.
    pub fn commit_agreed(&self, commit: Commit, mut wait: Wait<'_>, agree: &mut dyn FnMut() -> bool) -> Result<u64> {
        let bounds = [
            ("user value", &commit.user, self.description.user_bytes_max),
            ("hyperparameters", &commit.hyperparameters, self.description.hyperparameters_bytes_max),
        ];
        for (name, text, bytes_max) in bounds {
            if let Some(text) = text.as_ref().filter(|text| text.len() > bytes_max as usize) {
                return Err(Error::Invalid(format!(
                    "the size of the {name} is {} bytes, but the store can keep at most {bytes_max}: pass fewer bytes",
                    text.len()
                )));
            }
        }
        let reach = {
            let mut index = self.when(&mut wait, "writes of the step", |index| index.writing == 0)?;
            index.writable()?;
            if let Some(error) = &index.failed {
                return Err(Error::Usage(format!(
                    "a write of this step failed, so the step can only be discarded: {error}"
                )));
            }
            if let Some(record) = index.records.iter().position(|slots| slots.pending.is_staged() && slots.missing > 0)
            {
                let (name, missing) = (&self.description.records[record].name, index.records[record].missing);
                return Err(Error::Usage(format!(
                    "{name:?} is staged only in part: {missing} extents are missing. Stage these extents, or discard \
                     the step"
                )));
            }
            index.phase = Phase::Committing;
            match self.durability {
                // The first commit is always durable: without a durable root the store cannot be opened.
                _ if index.generation == 0 => Reach::Durable,
                // The store was opened with gradients in a durable log. This commit writes the records to which these
                // gradients were replayed, and drops that log: so this commit must be durable too.
                _ if index.log.found.is_some() && commit.log.is_none() => Reach::Durable,
                Durability::Step => Reach::Durable,
                Durability::None if index.root_is_unclosed => Reach::Memory,
                Durability::None => Reach::Unclosed,
            }
        };
        // From here on, dropping the volume no longer restores the length and mode that the files had before they were
        // opened. A new file is kept only after `take_name` has renamed it.
        self.volume.keep();
        let result = self.write_commit(commit, reach, agree);
        let mut index = self.index.lock();
        if matches!(index.phase, Phase::Committing) {
            index.phase = Phase::Open;
        }
        if let Err(error) = &result {
            index.next_step = index.step;
            if let Error::Broken(cause) = error {
                index.fail_with(Arc::clone(cause));
            }
        }
        drop(index);
        self.index.notify_all();
        result
    }

    /// Drops staged records. Afterwards nothing can be staged. Records can still be read, except those whose newest
    /// state only memory had.
    ///
    /// With [`Durability::None`], the last commit may be only in memory: this call makes that commit durable, except in
    /// two cases. After [`Error::Broken`], this call writes nothing. If the live slot of a record lacks a deferred
    /// update, this call writes no closing root. The next open then rejects a store that is marked as unclosed.
    pub fn close(&self, mut wait: Wait<'_>) -> Result<()> {
        let mut index = self.when(&mut wait, "writes of the step", |index| index.writing == 0)?;
        match index.phase {
            Phase::Broken(_) | Phase::Closed => {
                index.ram_tier = None;
                return Ok(());
            }
            // The caller has not called `go_back`, so the newest commit stays.
            Phase::Previous { .. } => {
                index.close();
                return Ok(());
            }
            Phase::Open | Phase::Committing => index.writable()?,
        }
        index.forget_step();
        drop(index);
        // With `Durability::Step` nothing needs to be written here: the log has the gradients of all updates that were
        // applied only in memory.
        if self.durability == Durability::None {
            self.close_applied()?;
        }
        let mut index = self.index.lock();
        if self.durability == Durability::None && !index.log.live.ahead.is_empty() {
            // Committed gradients of the records in `ahead` are not applied in the records' live slots. Clearing the
            // flag makes the code below return before it writes a closing root. So if a root on storage marks the store
            // as unclosed, the next open rejects the store.
            index.root_is_unclosed = false;
        }
        index.close();
        index.ram_tier = None;
        // If no commit was made since the store was opened, both roots stay unchanged.
        if !index.root_is_unclosed || index.generation == index.found_generation {
            return Ok(());
        }
        let replaces_unclosed_root = (index.generation + 1 - index.root_generation).is_multiple_of(2);
        let commit = Commit { step: index.step, ..Commit::default() };
        drop(index);
        let write_commit = |commit| self.write_commit(commit, Reach::Durable, &mut || true).map(drop);
        write_commit(commit.clone())?;
        // In-memory commits overwrote data that the two old roots name. Only one of these roots is marked as unclosed.
        // If the closing root replaced the marked root, the unmarked root is left and names overwritten data: replace
        // the unmarked root with a second closing root.
        if replaces_unclosed_root { write_commit(commit) } else { Ok(()) }
    }

    /// Ends all staging, as [`Store::close`] does, but writes nothing. A later [`Store::close`] also writes nothing, so
    /// the roots on storage stay unchanged.
    pub fn end(&self) {
        self.index.lock().close();
        self.index.notify_all();
    }

    /// Applies `commit` to the index, writes the part of the catalog that `reach` selects, and makes the staged slots
    /// live. If the write fails or `agree` returns `false`, restores the user's value, the hyperparameters and the run.
    pub(crate) fn write_commit(&self, commit: Commit, reach: Reach, agree: &mut dyn FnMut() -> bool) -> Result<u64> {
        let (mut live, head) = {
            let index = self.index.lock();
            let is_staged = |record: usize| index.records[record].pending.is_staged();
            index.log.after((index.generation + 1, commit.step), is_staged, commit.log.as_ref())?
        };
        let before = {
            let mut index = self.index.lock();
            index.next_step = commit.step;
            let user = commit.user.map(|text| std::mem::replace(&mut index.user, text));
            let hyperparameters =
                commit.hyperparameters.map(|text| std::mem::replace(&mut index.hyperparameters, text));
            self.mark_dirty(&mut index, user.is_some(), hyperparameters.is_some());
            index.log.digest = head.as_ref().map_or(0, |head| self.digest_of_left(&index, head));
            let run = commit.run.map(|run| std::mem::replace(&mut index.run, run));
            (user, hyperparameters, run)
        };
        let made_durable = self.write_catalog(reach, (&mut live, head.as_ref()), agree);
        let mut index = self.index.lock();
        match made_durable {
            Ok(()) => {
                index.generation += 1;
                index.step = index.next_step;
                let spills = index.log.appended_spills();
                index.log.committed(live);
                self.spill.committed(|record| spills.contains(&record), |record| index.log.is_ahead(record));
                if reach != Reach::Memory {
                    (index.root_is_unclosed, index.root_generation) = (reach == Reach::Unclosed, index.generation);
                }
                let (generation, mut stale, mut written) = (index.generation, 0, Vec::new());
                for (record, slots) in index.records.iter_mut().enumerate() {
                    match slots.committed(generation) {
                        AfterCommit::Same => {}
                        AfterCommit::Written(before) => written.push((record, before)),
                        AfterCommit::Older => stale += 1,
                    }
                }
                index.ram_tier_epoch += stale;
                drop(index);
                self.note_written(&written, generation);
                Ok(generation)
            }
            Err(error) => {
                // Some table pages of the failed commit may already be on storage. Mark all pages of that table slot
                // dirty, so that the next commit writes all of them again.
                let slot = (index.generation + 1) as usize & 1;
                (0..self.sections.pages()).for_each(|page| index.dirty[slot].set(page as usize, true));
                if let Some(text) = before.0 {
                    index.user = text;
                }
                if let Some(text) = before.1 {
                    index.hyperparameters = text;
                }
                if let Some(run) = before.2 {
                    index.run = run;
                }
                Err(error)
            }
        }
    }

    /// Marks the table pages that this commit changes as dirty in both table slots.
    fn mark_dirty(&self, index: &mut Index, user: bool, hyperparameters: bool) {
        let sections = &self.sections;
        let mark = |index: &mut Index, pages: std::ops::Range<u64>| {
            for page in pages {
                index.dirty.iter_mut().for_each(|dirty| dirty.set(page as usize, true));
            }
        };
        mark(index, 0..1);
        if user {
            mark(index, sections.user.clone());
        }
        if hyperparameters {
            mark(index, sections.hyperparameters.clone());
        }
        for record in 0..index.records.len() {
            if index.records[record].pending.is_staged() {
                let page = sections.page_of_record(record);
                mark(index, page..page + 1);
                let extents = index.extents_of(record);
                mark(index, sections.pages_of_sums(extents));
            }
        }
    }

    /// Writes the log head (only with [`Durability::Step`]), the table and, after a flush and a call of `agree`, the
    /// root of the next generation. For [`Reach::Memory`], only calls `agree`.
    fn write_catalog(
        &self,
        reach: Reach,
        (live, head): (&mut Live, Option<&Head>),
        agree: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let mut agreed = || if agree() { Ok(()) } else { Err(Error::Interrupted("the agreement of the other ranks")) };
        if reach == Reach::Memory {
            return agreed();
        }
        let generation = self.index.lock().generation + 1;
        let slot = generation & 1;
        // With `Durability::None` the log stays in memory: the caller must settle deferred updates before `close`.
        let is_logged = self.durability == Durability::Step;
        if let Some(head) = head.filter(|_| is_logged) {
            self.write_head(live, head)?;
        }
        self.write_table(slot as usize)?;
        self.repair_copies();
        let root = {
            let index = self.index.lock();
            Root {
                uuid: self.uuid,
                generation,
                table_bytes: self.layout.table_pages * PAGE_BYTES,
                table_checksum: table_checksum(&self.uuid, generation, &index.page_sums[slot as usize]),
                description_bytes: self.layout.description_bytes,
                description_checksum: self.description_checksum,
                is_unclosed: reach == Reach::Unclosed,
                places: self.layout.places,
                beside: index.root_pages[1 - slot as usize],
                log: if is_logged { live.of_root(index.log.ring) } else { LogFields::default() },
                run: index.run,
                features: [
                    (LOG, is_logged && !live.ahead.is_empty()),
                    (PLACES, is_logged && live.has_spilled()),
                    (RANKS, index.run != Run::default()),
                    (IDENTITY, index.run != Run::default()),
                ]
                .into_iter()
                .filter(|&(_, used)| used)
                .map(|(feature, _)| feature.to_owned())
                .collect(),
                ..Root::default()
            }
        };
        // Flush the data before the root is written, and never flush the data and the root together: the root must not
        // come first ([Note: Root last]).
        self.volume.flush(Wait::forever()).map_err(|error| Error::Broken(Arc::new(error.into())))?;
        agreed()?;
        self.write_root(&root).map_err(|error| Error::Broken(Arc::new(error)))?;
        self.take_name()
    }

    /// Renames the file of a new store from its pending name to its final name, once the first root is durable. Does
    /// nothing if the file has its final name already.
    fn take_name(&self) -> Result<()> {
        self.volume.take_name().map_err(|error| match error.into() {
            // The file still has its pending name, so no reader opens it: the caller may stage again over the data that
            // this root names.
            error if self.volume.is_pending() => error,
            error => Error::Broken(Arc::new(error)),
        })
    }

    /// Writes the dirty pages of a table slot; one write covers consecutive dirty pages.
    fn write_table(&self, slot: usize) -> Result<()> {
        let pages = self.sections.pages();
        let mut page = 0;
        while page < pages {
            let mut lease = self.scratch.lease(Wait::forever())?;
            // Encode the next consecutive dirty pages, at most as many as fit into the lease.
            let (start, count) = {
                let mut index = self.index.lock();
                while page < pages && !index.dirty[slot].has(page as usize) {
                    page += 1;
                }
                let start = page;
                for bytes in lease.as_mut_slice().chunks_exact_mut(PAGE_BYTES as usize) {
                    if page == pages || !index.dirty[slot].has(page as usize) {
                        break;
                    }
                    let sum = self.sections.encode(&index, page, &self.uuid, bytes);
                    index.page_sums[slot][page as usize] = sum;
                    page += 1;
                }
                (start, page - start)
            };
            if count > 0 {
                let part = first(lease, count * PAGE_BYTES)?;
                let offset = self.layout.places.table[slot] + start * PAGE_BYTES;
                Transfer::begun(self.volume.write(part, offset))?.wait()?;
                let mut index = self.index.lock();
                (start..page).for_each(|page| index.dirty[slot].set(page as usize, false));
            }
        }
        Ok(())
    }

    /// Writes a root durably to the root slot of its generation.
    fn write_root(&self, root: &Root) -> Result<()> {
        let slot = root.generation & 1;
        self.write_root_page(slot, &root.encode())?;
        self.index.lock().root_pages[slot as usize] = Beside::Root(root.generation);
        Ok(())
    }

    /// Writes `page` durably to root slot `slot`. `page` has a root or a mark.
    pub(crate) fn write_root_page(&self, slot: u64, page: &[u8]) -> Result<()> {
        let offset = self.layout.devices.root_offset(slot);
        Transfer::begun(self.volume.write_durable(self.padded(page)?, offset))?.wait().map(drop)
    }
}

const _: () = assert!(CATALOG_CHUNK_BYTES as u64 >= PAGE_BYTES);
