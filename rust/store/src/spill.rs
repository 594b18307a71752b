//! Spills gradients to an area of the store outside the slots.
//!
//! [Note: Places of a spilled gradient] Each record whose description has a spill dtype has one place for a gradient,
//! or two places after [`Store::keep_places`]. A spilled gradient belongs to no step and is forgotten when the store is
//! closed, unless a commit names it as the record's deferred update ([`Store::append_spilled`]). A gradient that the
//! newest commit names is not overwritten: the next gradient goes to the record's other place. Checksums of spilled
//! gradients are in memory; a head also stores the checksums of the gradients that it names. A checksum is bound to the
//! generation of the commit that may name the gradient.

use std::sync::{Mutex, MutexGuard, OnceLock};

use memascend_math::Check;
use memascend_mem::locked;

use crate::{Buffer, Description, Dtype, Error, Layout, Result, Store, Transfer, buffer::bytes_of, layout::PAGE_BYTES};

/// The state of one record's places for spilled gradients.
#[derive(Debug)]
struct Room {
    /// Index in `Rooms::sums` of the checksum of the record's first chunk.
    first: u32,
    /// The overflow check and sum of squares of the complete gradient in place `at`; `None` if there is no complete
    /// gradient, and while a gradient is being written.
    whole: Option<Check>,
    /// The place of the latest complete gradient.
    at: u8,
    /// The place to which `write_spill` writes.
    to: u8,
    /// The place of the gradient that the newest commit names, until the gradient is applied in the live slot. `None`
    /// if there is no such gradient.
    committed: Option<u8>,
    /// For each place, the generation of the commit that may name the gradient there. The gradient's checksums are
    /// bound to this generation.
    generations: [u64; 2],
}

#[derive(Debug)]
struct Rooms {
    rooms: Box<[Room]>,
    /// For each place, the checksums of all chunks of all records whose gradients may be spilled.
    sums: [Box<[u64]>; 2],
}

/// The places of spilled gradients. See [Note: Places of a spilled gradient].
#[derive(Debug)]
pub(crate) struct Spill {
    rooms: Mutex<Rooms>,
    /// The offset in the volume of the second places, once they exist.
    second: OnceLock<u64>,
}

impl Spill {
    pub(crate) fn new(description: &Description, layout: &Layout) -> Self {
        let mut first = 0;
        let rooms = (0..description.records.len())
            .map(|record| {
                let room = Room { first, whole: None, at: 0, to: 0, committed: None, generations: [0; 2] };
                if description.records[record].spill.is_some() {
                    first += layout.chunks_of(record);
                }
                room
            })
            .collect();
        let sums = [vec![0; first as usize].into(), vec![0; first as usize].into()];
        Self { rooms: Mutex::new(Rooms { rooms, sums }), second: OnceLock::new() }
    }

    /// Returns the bytes of memory that a `Spill` takes: a `Room` for each record, and 24 bytes for each chunk of a
    /// gradient that may be spilled. Of these 24 bytes, 16 are checksums in both places, and 8 are the checksum of the
    /// chunk's updated values, which the engine keeps for a deferred update.
    pub(crate) fn bytes(description: &Description, layout: &Layout) -> u64 {
        let spilling = (0..description.records.len()).filter(|&record| description.records[record].spill.is_some());
        let sums: u64 = spilling.map(|record| u64::from(layout.chunks_of(record)) * 24).sum();
        sums + (description.records.len() * size_of::<Room>()) as u64
    }

    fn lock(&self) -> MutexGuard<'_, Rooms> {
        locked(&self.rooms)
    }

    /// Gives each record that has a place a second place, in an area that begins at `offset` in the volume.
    pub(crate) fn add_places(&self, offset: u64) {
        self.second.get_or_init(|| offset);
    }

    pub(crate) fn has_places(&self) -> bool {
        self.second.get().is_some()
    }

    /// Notes a commit. The commit named the spilled gradients of the records for which `named` is true. For any other
    /// record, the gradient that an earlier commit named stays committed if `lack` is true: this gradient is still not
    /// applied in the live slot.
    pub(crate) fn committed(&self, named: impl Fn(usize) -> bool, lack: impl Fn(usize) -> bool) {
        for (record, room) in self.lock().rooms.iter_mut().enumerate() {
            let before = room.committed.filter(|_| lack(record));
            room.committed = if named(record) { Some(room.at) } else { before };
        }
    }
}

/// The offset and the checksum of each chunk of a spilled gradient. A commit names the gradient by this list.
pub(crate) type SpilledChunks = Box<[(u64, u64)]>;

/// The read of a chunk of a spilled gradient. Dropping a `SpillRead` waits for the device.
pub struct SpillRead<'a, B: Buffer> {
    store: &'a Store,
    transfer: Transfer<B>,
    record: usize,
    chunk: u32,
    /// The place that the chunk is read from.
    from: u8,
}

impl Store {
    /// Returns the dtype of the record's spilled gradients. Fails if the record's description has no such dtype.
    fn spills(&self, record: usize) -> Result<Dtype> {
        self.known(record)?;
        let described = &self.description.records[record];
        described.spill.ok_or_else(|| {
            Error::Invalid(format!(
                "{:?} was described without room for spilled gradients: describe the dtype of these gradients",
                described.name
            ))
        })
    }

    /// Returns the size in bytes of a chunk of a spilled gradient, and this size rounded up to whole pages.
    pub fn spill_bytes(&self, record: usize, chunk: u32) -> Result<(u64, u64)> {
        let used = self.description.elements_of_chunk(record, chunk) as u64 * self.spills(record)?.bytes();
        Ok((used, used.next_multiple_of(PAGE_BYTES)))
    }

    /// Returns the offset in the volume of a chunk of the gradient in `place`. Fails if the record has no such chunk,
    /// or the buffer is not as large as the chunk's pages.
    fn spill_place(&self, (record, place): (usize, u8), chunk: u32, buffer: &impl Buffer) -> Result<u64> {
        let (name, dtype) = (&self.description.records[record].name, self.spills(record)?);
        if chunk >= self.layout.chunks_of(record) {
            return Err(Error::Invalid(format!(
                "{name:?} has only {} chunks: there is no chunk {chunk}",
                self.layout.chunks_of(record)
            )));
        }
        let (_, wanted) = self.spill_bytes(record, chunk)?;
        if buffer.len() as u64 != wanted {
            let got = buffer.len();
            return Err(Error::Invalid(format!(
                "chunk {chunk} of the gradient of {name:?} needs a buffer of {wanted} bytes, not {got}"
            )));
        }
        Ok(self.place_of_spill((record, place), chunk, dtype))
    }

    /// Returns the offset in the volume of a chunk of the gradient in `place`.
    fn place_of_spill(&self, (record, place): (usize, u8), chunk: u32, dtype: Dtype) -> u64 {
        let start = match (place, self.spill.second.get()) {
            (1, Some(second)) => second + self.layout.in_spill(record),
            _ => self.layout.spill_offset(record),
        };
        start + u64::from(chunk) * u64::from(self.description.chunk_elements) * dtype.bytes()
    }

    /// Returns the overflow check and sum of squares of a record's spilled gradient; `None` if the record has no
    /// complete spilled gradient.
    pub fn spilled(&self, record: usize) -> Result<Option<Check>> {
        self.spills(record)?;
        Ok(self.spill.lock().rooms[record].whole)
    }

    /// Notes that all chunks of a record's gradient were written; `whole` has the gradient's overflow check and sum of
    /// squares. If `whole` is `None`, notes that the record has no spilled gradient.
    pub fn set_spilled(&self, record: usize, whole: Option<Check>) -> Result<()> {
        self.spills(record)?;
        let mut rooms = self.spill.lock();
        let room = &mut rooms.rooms[record];
        room.whole = whole;
        if whole.is_some() {
            room.at = room.to;
        }
        Ok(())
    }

    /// Begins to spill a gradient. If `adds` is true, the caller will write the sum of this gradient and the gradient
    /// that was spilled before. Chooses a place that the newest commit does not name.
    ///
    /// The record counts as having no spilled gradient until the caller calls [`Store::set_spilled`]. If `adds` is
    /// true, the caller can still read a chunk of the earlier gradient until it writes the chunk with the same number.
    pub fn begin_spill(&self, record: usize, adds: bool) -> Result<()> {
        self.spills(record)?;
        let generation = self.index.lock().generation + 1;
        let may_move = self.spill.has_places();
        let mut rooms = self.spill.lock();
        let room = &mut rooms.rooms[record];
        room.whole = None;
        // With `adds`, true if a commit was made since the earlier gradient was spilled. The checksums of that gradient
        // are then bound to the generation of the commit that was made, and not to the generation of the next commit.
        let is_old = adds && room.generations[usize::from(room.at)] != generation;
        room.to = match room.committed {
            Some(place) => 1 - place,
            None if is_old && may_move => 1 - room.at,
            None => room.at,
        };
        if room.to != room.at || !adds {
            room.generations[usize::from(room.to)] = generation;
        }
        Ok(())
    }

    /// Begins to write a chunk of a gradient after [`Store::begin_spill`]. The buffer's last page should be padded
    /// with zeros.
    pub fn write_spill<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<Transfer<B>> {
        let (used, _) = self.spill_bytes(record, chunk)?;
        let (to, generation) = {
            let rooms = self.spill.lock();
            let room = &rooms.rooms[record];
            (room.to, room.generations[usize::from(room.to)])
        };
        let offset = self.spill_place((record, to), chunk, &buffer)?;
        let sum = self.gradient_sum((record, chunk), generation, &bytes_of(&buffer)[..used as usize]);
        {
            let mut rooms = self.spill.lock();
            let number = (rooms.rooms[record].first + chunk) as usize;
            rooms.sums[usize::from(to)][number] = sum;
        }
        Transfer::begun(self.volume.write(buffer, offset))
    }

    /// Begins to read a chunk of the latest complete gradient that was spilled since the store was opened.
    pub fn read_spill<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<SpillRead<'_, B>> {
        let from = self.spill.lock().rooms[record].at;
        self.read_place((record, from), chunk, buffer)
    }

    /// Begins to read a chunk of the gradient that the newest commit names ([`Store::append_spilled`]) and that is not
    /// applied in the live slot.
    pub fn read_committed<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<SpillRead<'_, B>> {
        let from = self.spill.lock().rooms[record].committed;
        let from = from.ok_or_else(|| {
            let name = &self.description.records[record].name;
            Error::Usage(format!("the last commit deferred no update of {name:?}, so there is no gradient to read"))
        })?;
        self.read_place((record, from), chunk, buffer)
    }

    fn read_place<B: Buffer>(&self, (record, from): (usize, u8), chunk: u32, buffer: B) -> Result<SpillRead<'_, B>> {
        let offset = self.spill_place((record, from), chunk, &buffer)?;
        let transfer = Transfer::begun(self.volume.read(buffer, offset))?;
        Ok(SpillRead { store: self, transfer, record, chunk, from })
    }

    /// Returns the spilled gradient of a record if the commit `generation` may name it: the gradient is complete, its
    /// checksums are bound to that generation, and it is not in the place that the last commit names.
    pub(crate) fn laid_spill(&self, record: usize, generation: u64) -> Option<SpilledChunks> {
        let dtype = self.description.records.get(record)?.spill?;
        let rooms = self.spill.lock();
        let room = &rooms.rooms[record];
        let at = usize::from(room.at);
        if room.whole.is_none() || room.generations[at] != generation || room.committed == Some(room.at) {
            return None;
        }
        let chunk = |chunk: u32| {
            let place = self.place_of_spill((record, room.at), chunk, dtype);
            (place, rooms.sums[at][(room.first + chunk) as usize])
        };
        Some((0..self.layout.chunks_of(record)).map(chunk).collect())
    }
}

impl<B: Buffer> SpillRead<'_, B> {
    /// Waits for the device, checks the chunk, and returns the buffer.
    pub fn wait(self) -> Result<B> {
        let Self { store, transfer, record, chunk, from } = self;
        let (number, generation) = {
            let rooms = store.spill.lock();
            let room = &rooms.rooms[record];
            ((room.first + chunk) as usize, room.generations[usize::from(from)])
        };
        let buffer = transfer.wait()?;
        let wanted = store.spill.lock().sums[usize::from(from)][number];
        let (used, _) = store.spill_bytes(record, chunk)?;
        let got = store.gradient_sum((record, chunk), generation, &bytes_of(&buffer)[..used as usize]);
        if got == wanted {
            return Ok(buffer);
        }
        let place = (store.spill_place((record, from), chunk, &buffer)?, buffer.len() as u64);
        let name = &store.description.records[record].name;
        let why = format!("its checksum is {got:016x}, but {wanted:016x} was written: check the device");
        Err(store.corrupt(format!("chunk {chunk} of the spilled gradient of {name:?}"), place, why))
    }
}
