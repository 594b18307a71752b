//! Reads live slots piece by piece, every byte checked before it is handed over.

use std::ops::Range;

use memascend_nvme::Ticket;

use crate::{Buffer, Error, Result, Store, buffer::bytes_of, holds::Hold};

/// A piece that is being read.
pub struct PieceRead<'a, B: Buffer> {
    // Dropped in this order: the slot is held until the device is done.
    ticket: Option<Ticket<B>>,
    hold: Hold<&'a Store>,
    piece: u32,
    place: (u64, u64),
}

impl Store {
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
        let hold = Hold::live(self, &mut self.index.lock(), entry, piece..piece + 1);
        let place = (self.layout.offset(&layout, hold.slot), layout.bytes());
        let ticket = self.volume.read(buffer, place.0).map_err(|refused| refused.error)?;
        Ok(PieceRead { ticket: Some(ticket), hold, piece, place })
    }

    /// Whether a buffer of whole pages holds a live piece, bit for bit, as if it had been read just now.
    pub fn holds(&self, entry: usize, piece: u32, buffer: &impl Buffer) -> Result<bool> {
        self.known(entry)?;
        if piece >= self.layout.pieces_of(entry) {
            return Ok(false);
        }
        let place = self.layout.piece(&self.description, entry, piece);
        let number = (self.layout.entry(entry).first_piece + piece) as usize;
        let (version, wanted) = {
            let index = self.index.lock();
            let slots = &index.entries[entry];
            let live = usize::from(slots.live);
            (slots.versions[live], index.sum(live, number))
        };
        Ok(buffer.len() as u64 == place.bytes() && self.sum_of(entry, piece, version, buffer) == wanted)
    }

    /// The entries of a unit.
    #[must_use]
    pub fn entries_of(&self, unit: usize) -> Range<usize> {
        let entries = &self.description.entries;
        let until = |unit: usize| entries.partition_point(|entry| (entry.unit as usize) < unit);
        until(unit)..until(unit + 1)
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
        self.hold.check(self.piece, bytes_of(&finished.buffer), self.place)?;
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
