//! Reads live slots piece by piece, every byte checked before it is handed over.

use std::ops::Range;

use crate::{Buffer, Error, Result, Store, Transfer, buffer::bytes_of, held::RamTier, holds::Hold, layout::Piece};

/// Where a piece comes from.
enum Source<B: Buffer> {
    Storage(Transfer<B>),
    /// It was held in memory, and is here.
    Memory(B),
}

/// A piece that is being read.
pub struct PieceRead<'a, B: Buffer> {
    // Dropped in this order: the slot is held until the device is done.
    source: Source<B>,
    hold: Hold<&'a Store>,
    piece: u32,
    place: (u64, u64),
}

impl Store {
    /// Begins to read a live piece into a buffer of whole pages; from memory, where it is held.
    pub fn read<B: Buffer>(&self, entry: usize, piece: u32, buffer: B) -> Result<PieceRead<'_, B>> {
        let read = self.read_from(self.held().as_deref(), entry, piece, buffer)?;
        if matches!(read.source, Source::Storage(_)) { self.not_ahead(entry).map(|()| read) } else { Ok(read) }
    }

    /// Refuses to take for an entry what its slot holds, where the log has gradients that come after it.
    pub(crate) fn not_ahead(&self, entry: usize) -> Result<()> {
        let is_ahead = self.index.lock().log.is_ahead(entry);
        if entry < self.description.entries.len() && is_ahead { Err(self.not_applied(entry)) } else { Ok(()) }
    }

    pub(crate) fn not_applied(&self, entry: usize) -> Error {
        let name = &self.description.entries[entry].name;
        Error::Usage(format!(
            "the newest state of {name:?} is what its slot holds and then the gradients of the log: replay that first"
        ))
    }

    /// As [`Store::read`], from storage alone where nothing is held.
    pub(crate) fn read_from<B: Buffer>(
        &self,
        memory: Option<&RamTier>,
        entry: usize,
        piece: u32,
        mut buffer: B,
    ) -> Result<PieceRead<'_, B>> {
        let layout = self.fitting_piece(entry, piece, buffer.len())?;
        let hold = Hold::live(self, &mut self.index.lock(), entry, piece..piece + 1);
        let place = (self.layout.offset(&layout, hold.slot), layout.bytes());
        let source = if self.copy_held(memory, (entry, piece), hold.version, &mut buffer) {
            Source::Memory(buffer)
        } else if hold.alone {
            return Err(self.lost(entry));
        } else {
            Source::Storage(Transfer::begun(self.volume.read(buffer, place.0))?)
        };
        Ok(PieceRead { source, hold, piece, place })
    }

    /// Begins to read a piece of an entry as its live slot has it, without what memory or the log has that is newer.
    pub fn read_slot<B: Buffer>(&self, entry: usize, piece: u32, buffer: B) -> Result<PieceRead<'_, B>> {
        let layout = self.fitting_piece(entry, piece, buffer.len())?;
        let hold = Hold::stored(self, &mut self.index.lock(), entry, piece..piece + 1);
        let place = (self.layout.offset(&layout, hold.slot), layout.bytes());
        let source = Source::Storage(Transfer::begun(self.volume.read(buffer, place.0))?);
        Ok(PieceRead { source, hold, piece, place })
    }

    fn fitting_piece(&self, entry: usize, piece: u32, nbytes: usize) -> Result<Piece> {
        self.known(entry)?;
        let name = &self.description.entries[entry].name;
        if piece >= self.layout.pieces_of(entry) {
            return Err(Error::Invalid(format!("{name:?} has {} pieces, not {piece}", self.layout.pieces_of(entry))));
        }
        let layout = self.layout.piece(&self.description, entry, piece);
        if nbytes as u64 != layout.bytes() {
            let wanted = layout.bytes();
            return Err(Error::Invalid(format!("piece {piece} of {name:?} has {wanted} bytes, not {nbytes}")));
        }
        Ok(layout)
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
            if index.log.is_ahead(entry) {
                return Ok(false);
            }
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
        !matches!(&self.source, Source::Storage(transfer) if !transfer.is_done())
    }

    /// Bytes that come from storage: all of it, or none where it was held.
    #[must_use]
    pub fn storage_bytes(&self) -> u64 {
        if matches!(self.source, Source::Storage(_)) { self.place.1 } else { 0 }
    }

    /// Waits, checks, and gives the buffer and the version that it holds.
    pub fn wait(self) -> Result<(B, u64)> {
        let Self { source, hold, piece, place } = self;
        let buffer = match source {
            Source::Storage(transfer) => {
                let buffer = transfer.wait()?;
                hold.check(piece, bytes_of(&buffer), place)?;
                buffer
            }
            Source::Memory(buffer) => {
                hold.store.check_copy(&hold, piece, bytes_of(&buffer), place)?;
                buffer
            }
        };
        Ok((buffer, hold.version))
    }
}
