//! Commits a step: data, table, flush, root. Everything that is staged becomes live at once.

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

/// What a commit says beside what was staged.
#[derive(Debug, Clone, Default)]
pub struct Commit {
    /// Committed steps, this one included.
    pub step: u64,
    /// The user's value, if it changes.
    pub user: Option<String>,
    /// The hyperparameters, if they change.
    pub hyperparameters: Option<String>,
    /// The gradients of the step that were appended to the log, if any were.
    pub log: Option<StepHead>,
    /// The run of several ranks that it belongs to, if that changes.
    pub run: Option<Run>,
}

/// How a commit reaches storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Not at all.
    Memory,
    /// For good, with a root that says that the store is not closed: commits in memory follow.
    Unclosed,
    /// For good.
    Durable,
}

impl Store {
    /// Makes everything that is staged live, and durable as the store's durability says. Returns the generation.
    ///
    /// Fails, and changes nothing that a reader sees, where a record is staged in part or a write failed: discard then.
    pub fn commit(&self, commit: Commit, wait: Wait<'_>) -> Result<u64> {
        self.commit_agreed(commit, wait, &mut || true)
    }

    /// The same with others: `agree` is asked when all is flushed and nothing names it yet. `false` ends it as an error does.
    pub fn commit_agreed(&self, commit: Commit, mut wait: Wait<'_>, agree: &mut dyn FnMut() -> bool) -> Result<u64> {
        let bounds = [
            ("user value", &commit.user, self.description.user_bytes_max),
            ("hyperparameters", &commit.hyperparameters, self.description.hyperparameters_bytes_max),
        ];
        for (name, text, bytes_max) in bounds {
            if let Some(text) = text.as_ref().filter(|text| text.len() > bytes_max as usize) {
                return Err(Error::Invalid(format!(
                    "the {name} has {} bytes, at most {bytes_max} are kept",
                    text.len()
                )));
            }
        }
        let reach = {
            let mut index = self.when(&mut wait, "writes of the step", |index| index.writing == 0)?;
            index.writable()?;
            if let Some(error) = &index.failed {
                return Err(Error::Usage(format!("a write of this step failed, so it can only be discarded: {error}")));
            }
            if let Some(record) = index.records.iter().position(|slots| slots.pending.is_staged() && slots.missing > 0)
            {
                let (name, missing) = (&self.description.records[record].name, index.records[record].missing);
                return Err(Error::Usage(format!("{name:?} is staged in part, {missing} extents are missing")));
            }
            index.phase = Phase::Committing;
            match self.durability {
                // The very first commit is what makes a store, whatever comes after it.
                _ if index.generation == 0 => Reach::Durable,
                // What a log was replayed to is as durable as the log was.
                _ if index.log.found.is_some() && commit.log.is_none() => Reach::Durable,
                Durability::Step => Reach::Durable,
                Durability::None if index.root_is_unclosed => Reach::Memory,
                Durability::None => Reach::Unclosed,
            }
        };
        // Length and mode that opening its files gave them stay from here on; a new file does once it takes its name.
        self.volume.keep();
        let result = self.carry_out(commit, reach, agree);
        let mut index = self.index.lock();
        if matches!(index.phase, Phase::Committing) {
            index.phase = Phase::Open;
        }
        if let Err(error) = &result {
            index.next_step = index.step;
            if let Error::Broken(cause) = error {
                index.break_by(Arc::clone(cause));
            }
        }
        drop(index);
        self.index.notify_all();
        result
    }

    /// Makes the last commit durable where the store's durability left that open; drops what is staged. The store can
    /// still be read, and nothing can be staged any more.
    pub fn close(&self, mut wait: Wait<'_>) -> Result<()> {
        let mut index = self.when(&mut wait, "writes of the step", |index| index.writing == 0)?;
        match index.phase {
            Phase::Broken(_) | Phase::Closed => {
                index.ram_tier = None;
                return Ok(());
            }
            // Nothing was done with it, and the newest commit stays.
            Phase::Previous { .. } => {
                index.close();
                return Ok(());
            }
            Phase::Open | Phase::Committing => index.writable()?,
        }
        index.forget_step();
        drop(index);
        // Elsewhere the log has it.
        if self.durability == Durability::None {
            self.close_applied()?;
        }
        let mut index = self.index.lock();
        if self.durability == Durability::None && !index.log.live.ahead.is_empty() {
            // Nobody has settled them: the store stays unclosed, which whoever opens it is told.
            index.root_is_unclosed = false;
        }
        index.close();
        index.ram_tier = None;
        // Whoever committed nothing leaves both commits as they were found.
        if !index.root_is_unclosed || index.generation == index.found_generation {
            return Ok(());
        }
        let takes_its_place = (index.generation + 1 - index.root_generation).is_multiple_of(2);
        let commit = Commit { step: index.step, ..Commit::default() };
        drop(index);
        let carry_out = |commit| self.carry_out(commit, Reach::Durable, &mut || true).map(drop);
        carry_out(commit.clone())?;
        // Commits in memory wrote over what both roots named. Where the one that said so is gone, the other one does not,
        // and names what is live now, too.
        if takes_its_place { carry_out(commit) } else { Ok(()) }
    }

    /// Has nothing be written any more, by [`Store::close`] either: what is committed stays as it is.
    pub fn end(&self) {
        self.index.lock().close();
        self.index.notify_all();
    }

    pub(crate) fn carry_out(&self, commit: Commit, reach: Reach, agree: &mut dyn FnMut() -> bool) -> Result<u64> {
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
                // Some of its pages may have come to storage, and say what was not committed.
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

    /// Marks the pages that this commit changes, for both slots of the table.
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

    /// Writes head, table and root of the next generation, unless the commit stays in memory.
    fn write_catalog(
        &self,
        reach: Reach,
        (live, head): (&mut Live, Option<&Head>),
        agree: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let mut agreed = || if agree() { Ok(()) } else { Err(Error::Interrupted("the others' agreement")) };
        if reach == Reach::Memory {
            return agreed();
        }
        let generation = self.index.lock().generation + 1;
        let slot = generation & 1;
        // Elsewhere it is in memory, and what lacks updates is settled before the end.
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
        // Never one flush for data and root together: the root must not come first.
        self.volume.flush(Wait::forever()).map_err(|error| Error::Broken(Arc::new(error.into())))?;
        agreed()?;
        self.write_root(&root).map_err(|error| Error::Broken(Arc::new(error)))?;
        self.take_name()
    }

    /// Names the file of a new store: from its first root on there is a store.
    fn take_name(&self) -> Result<()> {
        self.volume.take_name().map_err(|error| match error.into() {
            // Nobody finds it, so whoever stages again may write over what the root names.
            error if self.volume.is_pending() => error,
            error => Error::Broken(Arc::new(error)),
        })
    }

    fn write_table(&self, slot: usize) -> Result<()> {
        let pages = self.sections.pages();
        let mut page = 0;
        while page < pages {
            let mut lease = self.scratch.lease(Wait::forever())?;
            // The next run of pages that this slot lacks.
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

    fn write_root(&self, root: &Root) -> Result<()> {
        let slot = root.generation & 1;
        self.write_root_page(slot, &root.encode())?;
        self.index.lock().root_pages[slot as usize] = Beside::Root(root.generation);
        Ok(())
    }

    /// Writes what stands in the page of a root.
    pub(crate) fn write_root_page(&self, slot: u64, page: &[u8]) -> Result<()> {
        let offset = self.layout.devices.root_offset(slot);
        Transfer::begun(self.volume.write_durable(self.padded(page)?, offset))?.wait().map(drop)
    }
}

const _: () = assert!(CATALOG_CHUNK_BYTES as u64 >= PAGE_BYTES);
