//! Reading live slots. Every byte is checked before it is handed over.

use std::ops::Range;

use memascend_nvme::Ticket;

use crate::{Buffer, Error, Result, Shared, Store, buffer::bytes_of};

/// A hold on one slot of an entry: nothing is staged into it meanwhile.
struct Hold<'a> {
    store: &'a Store,
    entry: usize,
    slot: usize,
    version: u64,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.store.index.lock().entries[self.entry].reads[self.slot] -= 1;
        self.store.index.notify();
    }
}

/// A piece that is being read.
pub struct PieceRead<'a, B: Buffer> {
    // Dropped in this order: the slot is held until the device is done.
    ticket: Option<Ticket<B>>,
    hold: Hold<'a>,
    piece: u32,
    place: (u64, u64),
}

/// The values of a unit that are being read.
pub struct UnitRead<'a> {
    tickets: Vec<Ticket<Shared>>,
    holds: Vec<Hold<'a>>,
    memory: Shared,
    unit: usize,
}

impl Store {
    fn hold(&self, entry: usize) -> Hold<'_> {
        let mut index = self.index.lock();
        let slots = &mut index.entries[entry];
        let slot = usize::from(slots.live);
        slots.reads[slot] += 1;
        Hold { store: self, entry, slot, version: slots.versions[slot] }
    }

    /// Begins to read a live piece into a buffer of whole pages.
    pub fn read<B: Buffer>(&self, entry: usize, piece: u32, buffer: B) -> Result<PieceRead<'_, B>> {
        self.known(entry)?;
        let name = &self.description.entries[entry].name;
        if piece >= self.layout.pieces_of(entry) {
            return Err(Error::Invalid(format!("{name:?} has {} pieces, not {piece}", self.layout.pieces_of(entry))));
        }
        let layout = self.layout.piece(&self.description, entry, piece);
        if buffer.len() as u64 != layout.bytes() {
            let (got, wanted) = (buffer.len(), layout.bytes());
            return Err(Error::Invalid(format!("piece {piece} of {name:?} has {wanted} bytes, not {got}")));
        }
        let hold = self.hold(entry);
        let place = (self.layout.offset(&layout, hold.slot), layout.bytes());
        let ticket = self.volume.read(buffer, place.0).map_err(|refused| refused.error)?;
        Ok(PieceRead { ticket: Some(ticket), hold, piece, place })
    }

    /// Begins to read the values of all entries of a unit, each at [`Layout::in_unit`](crate::Layout::in_unit). Entries
    /// that lie side by side in one slot are one read.
    pub fn read_unit(&self, unit: usize, memory: Shared) -> Result<UnitRead<'_>> {
        let (name, wanted) = match self.description.units.get(unit) {
            Some(name) => (name, self.layout.unit_bytes(unit)),
            None => return Err(Error::Invalid(format!("unit {unit} of {}", self.description.units.len()))),
        };
        if memory.len() as u64 != wanted {
            return Err(Error::Invalid(format!("unit {name:?} has {wanted} bytes, not {}", memory.len())));
        }
        let mut read = UnitRead { tickets: Vec::new(), holds: Vec::new(), memory, unit };
        let members = self.entries_of(unit);
        let mut runs: Vec<(u64, u64, u64)> = Vec::new();
        for entry in members {
            let chunks = self.layout.chunks_of(entry);
            if chunks == 0 {
                continue;
            }
            let hold = self.hold(entry);
            let first = self.layout.piece(&self.description, entry, 0);
            let last = self.layout.piece(&self.description, entry, chunks - 1);
            let (from, bytes) = (self.layout.offset(&first, hold.slot), last.at + last.bytes() - first.at);
            read.holds.push(hold);
            match runs.last_mut() {
                Some((_, start, length)) if *start + *length == from => *length += bytes,
                _ => runs.push((self.layout.in_unit(entry, unit), from, bytes)),
            }
        }
        for (into, from, bytes) in runs {
            let part = read.memory.part(into as usize, bytes as usize);
            let part = part.ok_or_else(|| Error::Invalid(format!("unit {name:?} does not fit its memory")))?;
            read.tickets.push(self.volume.read(part, from).map_err(|refused| refused.error)?);
        }
        Ok(read)
    }

    /// The entries of a unit.
    #[must_use]
    pub fn entries_of(&self, unit: usize) -> Range<usize> {
        let entries = &self.description.entries;
        let until = |unit: usize| entries.partition_point(|entry| (entry.unit as usize) < unit);
        until(unit)..until(unit + 1)
    }

    fn check_piece(&self, hold: &Hold<'_>, piece: u32, bytes: &[u8], place: (u64, u64)) -> Result<()> {
        let number = (self.layout.entry(hold.entry).first_piece + piece) as usize;
        let wanted = self.index.lock().sum(hold.slot, number);
        let got = self.sum_of_bytes(hold.entry, piece, hold.version, bytes);
        if got == wanted {
            return Ok(());
        }
        let why = format!(
            "its checksum is {got:016x} and the catalog says {wanted:016x}; what was written is not what is there"
        );
        Err(self.corrupt(self.named(hold.entry, piece), place, why))
    }
}

impl<B: Buffer> PieceRead<'_, B> {
    /// Whether the device is done with it.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ticket.as_ref().is_none_or(Ticket::is_done)
    }

    /// Waits, checks, and gives the buffer and the version that it holds.
    pub fn wait(mut self) -> Result<(B, u64)> {
        let ticket = self.ticket.take().ok_or_else(|| Error::Usage("this read was waited for already".into()))?;
        let finished = ticket.wait();
        finished.result?;
        self.hold.store.check_piece(&self.hold, self.piece, bytes_of(&finished.buffer), self.place)?;
        Ok((finished.buffer, self.hold.version))
    }
}

impl<B: Buffer> Drop for PieceRead<'_, B> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            drop(ticket.wait());
        }
    }
}

impl UnitRead<'_> {
    /// Whether the device is done with it.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.tickets.iter().all(Ticket::is_done)
    }

    /// Waits, checks every piece, and gives the memory and the version of each entry that has values, in order.
    pub fn wait(mut self) -> Result<(Shared, Vec<(usize, u64)>)> {
        let mut failed = None;
        for ticket in std::mem::take(&mut self.tickets) {
            if let Err(error) = ticket.wait().result {
                failed.get_or_insert(error);
            }
        }
        if let Some(error) = failed {
            return Err(error.into());
        }
        let bytes = bytes_of(&self.memory);
        for hold in &self.holds {
            let (store, entry) = (hold.store, hold.entry);
            let start = store.layout.in_unit(entry, self.unit);
            let first = store.layout.piece(&store.description, entry, 0).at;
            for piece in 0..store.layout.chunks_of(entry) {
                let layout = store.layout.piece(&store.description, entry, piece);
                let from = (start + layout.at - first) as usize;
                let place = (store.layout.offset(&layout, hold.slot), layout.bytes());
                store.check_piece(hold, piece, &bytes[from..from + layout.bytes() as usize], place)?;
            }
        }
        let versions = self.holds.iter().map(|hold| (hold.entry, hold.version)).collect();
        Ok((self.memory.clone(), versions))
    }
}

impl Drop for UnitRead<'_> {
    fn drop(&mut self) {
        // The slots are held until the devices are done.
        for ticket in self.tickets.drain(..) {
            drop(ticket.wait());
        }
    }
}
