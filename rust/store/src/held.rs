//! Holds entries in memory for as long as the store is open: their values, bound where they lie, and their state.
//!
//! Each piece is in memory under the version of what it holds. Where storage has the newest version, too, what is staged
//! replaces the piece in memory at once: a discard makes that stale, and [`Store::refresh`] reads it again. Where an
//! update was applied in memory alone (`applied`), memory is the only copy, and nothing but an update writes to it.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
};

use memascend_mem::{Arena, KeepGoing, OnFork, Pin, Region, Wait, fork_generation, locked};

use crate::{
    Buffer, Content, Description, Error, Layout, Result, Shared, Store,
    buffer::bytes_of,
    holds::Hold,
    index::{Index, closed},
    layout::Piece,
    verify::in_flight,
};

/// Pieces that are read at once where many are.
const DEPTH: usize = 16;

/// Memory in which some entries are held.
#[derive(Debug)]
pub(crate) struct RamTier {
    memory: Shared,
    entries: BTreeMap<usize, HeldEntry>,
    /// Where the values of each unit lie of which all entries are held.
    units: BTreeMap<usize, Range<usize>>,
    /// The process that has it: a forked child sees zeros there.
    generation: u32,
}

#[derive(Debug)]
struct HeldEntry {
    /// Where its values and its state begin in the memory.
    values: usize,
    state: usize,
    now: Mutex<Now>,
}

/// What memory holds of an entry. Whoever reads or writes that memory has this locked, but for those who compute with the
/// values and for an update.
#[derive(Debug)]
pub(crate) struct Now {
    /// The version of each piece; 0: nothing, or what is no version's.
    pub(crate) versions: Box<[u64]>,
    /// Of the values, where memory alone has them; otherwise the index knows.
    pub(crate) sums: Box<[u64]>,
}

impl Layout {
    /// What it takes to hold an entry: bytes of its values, and of its state.
    #[must_use]
    pub fn held_bytes(&self, description: &Description, entry: usize) -> (u64, u64) {
        let bytes = |pieces: Range<u32>| pieces.map(|piece| self.piece(description, entry, piece).bytes()).sum();
        let chunks = self.chunks_of(entry);
        (bytes(0..chunks), bytes(chunks..self.pieces_of(entry)))
    }
}

impl Store {
    /// Holds entries from now on, in memory of [`Layout::held_bytes`] for each; nothing is read now. What was held before
    /// is not any more. `keep_going` is asked while the memory is made, as by [`Region::interruptible`].
    pub fn hold(&self, entries: &[usize], pin: Pin, keep_going: KeepGoing<'_>) -> Result<()> {
        if self.index.lock().has_applied() {
            return Err(Error::Usage(
                "memory has the only copy of parameters kept in RAM: close the store first".into(),
            ));
        }
        self.index.lock().held = None;
        let made = self.made_room(entries, pin, keep_going)?.map(Arc::new);
        let mut index = self.index.lock();
        if index.is_closed() {
            return Err(closed());
        }
        index.held = made;
        Ok(())
    }

    fn made_room(&self, entries: &[usize], pin: Pin, keep_going: KeepGoing<'_>) -> Result<Option<RamTier>> {
        let mut held = BTreeMap::new();
        for &entry in entries {
            self.known(entry)?;
            let chunks = self.layout.chunks_of(entry) as usize;
            let versions = vec![0; self.layout.pieces_of(entry) as usize].into();
            let now = Mutex::new(Now { versions, sums: vec![0; chunks].into() });
            held.insert(entry, HeldEntry { values: 0, state: 0, now });
        }
        // The values of all of them, so that those of a unit lie as it is fetched; then their state.
        let mut end = 0;
        for (&entry, of_entry) in &mut held {
            of_entry.values = end;
            end += self.layout.held_bytes(&self.description, entry).0 as usize;
        }
        let units = (0..self.description.units.len()).filter_map(|unit| {
            // An entry without values needs no place: whoever chooses what is held may leave it out.
            let valued = |&entry: &usize| self.layout.held_bytes(&self.description, entry).0 > 0;
            let mut entries = self.entries_of(unit).filter(valued).peekable();
            let first = held.get(entries.peek()?)?.values;
            let nbytes = self.layout.unit_bytes(unit) as usize;
            let whole = entries.all(|entry| held.contains_key(&entry));
            whole.then_some((unit, first..first + nbytes))
        });
        let units = units.collect();
        for (&entry, of_entry) in &mut held {
            of_entry.state = end;
            end += self.layout.held_bytes(&self.description, entry).1 as usize;
        }
        if end == 0 {
            return Ok(None);
        }
        let region = Region::interruptible(end, pin, OnFork::Wipe, "held entries", keep_going)?;
        let arena = Arena::new(&region, &[(end, 1)])?;
        let memory = Shared::new(arena.lease(end, arena.owner("held entries")?, Wait::never())?);
        Ok(Some(RamTier { memory, entries: held, units, generation: fork_generation() }))
    }

    /// Whether an entry is held.
    #[must_use]
    pub fn is_held(&self, entry: usize) -> bool {
        self.held().is_some_and(|held| held.entries.contains_key(&entry))
    }

    /// The values of a unit where they are held, if all of its entries are. [`Store::refresh`] says when they are those of
    /// the last commit.
    #[must_use]
    pub fn held_unit(&self, unit: usize) -> Option<Shared> {
        let held = self.held()?;
        let range = held.units.get(&unit)?;
        held.memory.part(range.start, range.len())
    }

    /// Counts what made pieces in memory stale. As long as the count stays, a piece that is fresh stays fresh.
    #[must_use]
    pub fn held_epoch(&self) -> u64 {
        self.index.lock().held_epoch
    }

    /// Says that the values of an entry in memory are not those of its version any more: somebody wrote to them.
    pub fn spoil(&self, entry: usize) {
        if let Some(of_entry) = self.held().as_ref().and_then(|held| held.entries.get(&entry)) {
            let mut now = locked(&of_entry.now);
            let chunks = self.layout.chunks_of(entry) as usize;
            now.versions[..chunks].fill(0);
            drop(now);
            self.index.lock().held_epoch += 1;
        }
    }

    /// Reads what is held of some entries, and is stale, from storage. `progress` gets bytes done and of all, and ends
    /// it by `false`.
    pub fn refresh(&self, entries: &[usize], progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let Some(held) = self.held() else { return Ok(()) };
        let (mut stale, mut lost) = (Vec::new(), Vec::new());
        for &entry in entries {
            let Some(of_entry) = held.entries.get(&entry) else { continue };
            let (version, alone) = {
                let slots = &self.index.lock().entries[entry];
                (slots.newest().0, slots.applied.is_some())
            };
            let now = locked(&of_entry.now);
            let pieces = (0..).zip(&now.versions).filter(|&(_, &has)| has != version).map(|(piece, _)| piece);
            if alone {
                // The state is as it was: somebody wrote to values.
                let chunks: Vec<u32> = pieces.filter(|&piece| piece < self.layout.chunks_of(entry)).collect();
                lost.extend((!chunks.is_empty()).then_some((entry, chunks)));
            } else {
                stale.extend(pieces.map(|piece| (entry, piece)));
            }
        }
        for (entry, chunks) in lost {
            if !self.index.lock().log.is_ahead(entry) {
                return Err(self.lost(entry));
            }
            self.rebuild(&held, entry, &chunks)?;
        }
        let bytes = |&(entry, piece): &(usize, u32)| self.layout.piece(&self.description, entry, piece).bytes();
        let all = stale.iter().map(bytes).sum();
        let mut done = 0;
        let begin = |(entry, piece)| {
            let into = held.part(self, entry, piece);
            Ok((entry, piece, into.len() as u64, self.read_from(None, entry, piece, into)?))
        };
        in_flight(DEPTH, stale.into_iter(), begin, |(entry, piece, bytes, read)| {
            let (_, version) = read.wait()?;
            locked(&held.entries[&entry].now).versions[piece as usize] = version;
            done += bytes;
            if progress(done, all) { Ok(()) } else { Err(Error::Interrupted("reading what is held")) }
        })
    }

    /// That values in memory, the only ones, were written to; or are another process's.
    pub(crate) fn lost(&self, entry: usize) -> Error {
        let name = &self.description.entries[entry].name;
        if self.index.lock().held.as_ref().is_some_and(|held| held.generation != fork_generation()) {
            return Error::Usage(format!(
                "{name:?} is in the memory of the process that opened the store, and this one was forked from it: use it there"
            ));
        }
        Error::Usage(format!(
            "the values of {name:?} were written to in place while the model computed, and there is no other copy of them: \
             go back to a checkpoint. A store of one's own (storage=) with durability=\"step\" keeps one"
        ))
    }

    /// Copies a piece that is held in this version to `into`, which has its size and which nothing uses; `false` where it
    /// is not held.
    pub(crate) fn copy_held(
        &self,
        held: Option<&RamTier>,
        (entry, piece): (usize, u32),
        version: u64,
        into: &mut impl Buffer,
    ) -> bool {
        let Some((held, of_entry)) = held.and_then(|held| Some((held, held.entries.get(&entry)?))) else {
            return false;
        };
        let now = locked(&of_entry.now);
        if version == 0 || now.versions[piece as usize] != version {
            return false;
        }
        let from = held.part(self, entry, piece);
        assert_eq!(into.len(), from.len(), "room of another size than the piece");
        // SAFETY: both have room for the piece; the memory is the lock's holder's, and `into` the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().as_ptr(), into.as_mut_ptr().as_ptr(), into.len()) };
        self.counters.took_held(into.len() as u64);
        true
    }

    /// Holds a piece that is written now, if its entry is one that is held; not where memory has the only copy of what it
    /// replaces.
    pub(crate) fn keep(&self, held: Option<&RamTier>, (entry, piece): (usize, u32), version: u64, bytes: &[u8]) {
        let Some((held, of_entry)) = held.and_then(|held| Some((held, held.entries.get(&entry)?))) else { return };
        if self.index.lock().entries[entry].applied.is_some() {
            return;
        }
        let mut now = locked(&of_entry.now);
        let into = held.part(self, entry, piece);
        assert_eq!(bytes.len(), into.len(), "a piece of another size");
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into.as_ptr().as_ptr(), bytes.len()) };
        now.versions[piece as usize] = version;
    }

    /// Where entries are held now. Nowhere in a forked child, which reads storage then, and is refused.
    pub(crate) fn held(&self) -> Option<Arc<RamTier>> {
        self.index.lock().held.clone().filter(|held| held.generation == fork_generation())
    }

    /// That a piece of values in memory is what its version was left as.
    pub(crate) fn check_held(&self, held: &RamTier, entry: usize, chunk: u32) -> Result<()> {
        let number = (self.layout.entry(entry).first_piece + chunk) as usize;
        let (version, stored) = {
            let index = self.index.lock();
            let slots = &index.entries[entry];
            let stored = slots.applied.is_none().then(|| index.sum(usize::from(slots.live), number));
            (slots.newest().0, stored)
        };
        let now = held.now(entry);
        let wanted = stored.unwrap_or(now.sums[chunk as usize]);
        drop(now);
        if self.sum_of_bytes(entry, chunk, version, bytes_of(&held.part(self, entry, chunk))) == wanted {
            return Ok(());
        }
        self.spoil(entry);
        Err(self.written_in_place(entry))
    }

    pub(crate) fn written_in_place(&self, entry: usize) -> Error {
        let name = &self.description.entries[entry].name;
        Error::Usage(format!(
            "the values of {name:?} were written to in place while the model computed, past torch's counters (.data?): \
             call zero_grad(), and change them within memascend.materialized(model, modify=True)"
        ))
    }

    /// A piece that is read from memory, checked as one that is read from storage where that has it, too.
    pub(crate) fn check_copy(&self, hold: &Hold<&Self>, piece: u32, bytes: &[u8], place: (u64, u64)) -> Result<()> {
        if hold.alone || hold.check(piece, bytes, place).is_ok() {
            return Ok(());
        }
        self.spoil(hold.entry);
        Err(self.written_in_place(hold.entry))
    }
}

impl RamTier {
    /// The memory of a piece.
    pub(crate) fn part(&self, store: &Store, entry: usize, piece: u32) -> Shared {
        let (of_entry, laid) = (&self.entries[&entry], store.layout.entry(entry));
        let piece: Piece = store.layout.piece(&store.description, entry, piece);
        let at = match piece.content {
            Content::Values { .. } => of_entry.values + (piece.at - laid.values_at) as usize,
            _ => of_entry.state + (piece.at - laid.state_at) as usize,
        };
        let part = self.memory.part(at, piece.bytes() as usize);
        part.unwrap_or_else(|| unreachable!("room was made for every piece of what is held"))
    }

    /// What memory holds of an entry.
    pub(crate) fn now(&self, entry: usize) -> MutexGuard<'_, Now> {
        locked(&self.entries[&entry].now)
    }
}

impl Index {
    /// Says that what is in memory of an entry may be of a version that is not live: one that is staged, or was.
    pub(crate) fn note_stale(&mut self, entry: usize) {
        if self.held.as_ref().is_some_and(|held| held.entries.contains_key(&entry)) {
            self.held_epoch += 1;
        }
    }
}
