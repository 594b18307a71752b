//! Holds entries in memory: every piece that is written or read is kept there, and then read from there.
//!
//! Writes go to storage as ever, so what is durable does not change. A piece is held under the version of what it holds:
//! one that was staged is found once its commit made that version live, one that was discarded never.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex},
};

use memascend_mem::{Arena, KeepGoing, Lease, OnFork, Pin, Region, Wait, locked};

use crate::{Buffer, Content, Description, Error, Layout, Result, Store, layout::Piece};

/// Memory in which some entries are held.
#[derive(Debug)]
pub(crate) struct Held {
    memory: Lease,
    entries: BTreeMap<usize, HeldEntry>,
}

#[derive(Debug)]
struct HeldEntry {
    /// Where its values and its state begin in the memory.
    values: usize,
    state: usize,
    /// What each piece holds; 0: nothing. Whoever touches the memory has this locked.
    versions: Mutex<Box<[u64]>>,
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
    /// Holds entries from now on, as they are read or written, in memory of [`Layout::held_bytes`] for each; nothing is read
    /// now. What was held before is not any more. `keep_going` is asked while the memory is made, as by
    /// [`Region::interruptible`].
    pub fn hold(&self, entries: &[usize], keep_going: KeepGoing<'_>) -> Result<()> {
        self.index.lock().held = None;
        let (mut held, mut end) = (BTreeMap::new(), 0);
        for &entry in entries {
            self.known(entry)?;
            let pieces = self.layout.pieces_of(entry);
            let (of_values, of_state) = self.layout.held_bytes(&self.description, entry);
            let state = end + of_values as usize;
            let versions = Mutex::new(vec![0; pieces as usize].into());
            held.insert(entry, HeldEntry { values: end, state, versions });
            end = state + of_state as usize;
        }
        let made = if end == 0 {
            None
        } else {
            let region = Region::interruptible(end, Pin::Off, OnFork::Wipe, "held entries", keep_going)?;
            let arena = Arena::new(&region, &[(end, 1)])?;
            let memory = arena.lease(end, arena.owner("held entries")?, Wait::never())?;
            Some(Arc::new(Held { memory, entries: held }))
        };
        let mut index = self.index.lock();
        if index.closed {
            return Err(Error::Usage("the store has been closed; open it again".into()));
        }
        index.held = made;
        Ok(())
    }

    /// Copies a piece that is held in this version to `into`, which has its size and which nothing uses; `false` where it
    /// is not held.
    pub(crate) fn copy_held(
        &self,
        held: Option<&Held>,
        (entry, piece): (usize, u32),
        version: u64,
        into: &impl Buffer,
    ) -> bool {
        let Some((held, of_entry)) = held.and_then(|held| Some((held, held.entries.get(&entry)?))) else {
            return false;
        };
        let versions = locked(&of_entry.versions);
        if version == 0 || versions[piece as usize] != version {
            return false;
        }
        let layout = self.layout.piece(&self.description, entry, piece);
        let from = held.address(of_entry, self.layout.entry(entry), &layout);
        assert_eq!(into.len() as u64, layout.bytes(), "room of another size than the piece");
        // SAFETY: both have room for the piece; the memory is the lock's holder's, and `into` the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_ptr().as_ptr(), into.len()) };
        self.counters.took_held(layout.bytes());
        true
    }

    /// Holds a piece that is written now, if its entry is one that is held.
    pub(crate) fn keep(&self, held: Option<&Held>, (entry, piece): (usize, u32), version: u64, bytes: &[u8]) {
        let Some((held, of_entry)) = held.and_then(|held| Some((held, held.entries.get(&entry)?))) else { return };
        let mut versions = locked(&of_entry.versions);
        let layout = self.layout.piece(&self.description, entry, piece);
        assert_eq!(bytes.len() as u64, layout.bytes(), "a piece of another size");
        let into = held.address(of_entry, self.layout.entry(entry), &layout);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
        versions[piece as usize] = version;
    }

    /// Holds a piece that was read, if its entry is one that is held and this version of it is not.
    pub(crate) fn keep_read(&self, held: Option<&Held>, (entry, piece): (usize, u32), version: u64, bytes: &[u8]) {
        let Some(of_entry) = held.and_then(|held| held.entries.get(&entry)) else { return };
        let is_new = locked(&of_entry.versions)[piece as usize] != version;
        if is_new {
            self.keep(held, (entry, piece), version, bytes);
        }
    }

    /// Where entries are held now.
    pub(crate) fn held(&self) -> Option<Arc<Held>> {
        self.index.lock().held.clone()
    }
}

impl Held {
    fn address(&self, entry: &HeldEntry, layout: &crate::layout::EntryLayout, piece: &Piece) -> *mut u8 {
        let at = match piece.content {
            Content::Values { .. } => entry.values + (piece.at - layout.values_at) as usize,
            _ => entry.state + (piece.at - layout.state_at) as usize,
        };
        assert!(at + piece.bytes() as usize <= self.memory.len(), "a piece past the end of what is held");
        // SAFETY: inside the memory, see above.
        unsafe { self.memory.as_ptr().as_ptr().add(at) }
    }
}
