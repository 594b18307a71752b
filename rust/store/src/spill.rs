//! Spills gradients to space beside the slots, in one of two places of each record.
//!
//! What is spilled belongs to no step, and nothing of it is known after the store was opened again; unless a commit makes it
//! the record's newest update ([`Store::append_spilled`]). Then it stays as it is until another commit: what is spilled
//! meanwhile goes to the record's other place. Checksums are in memory; those of a committed gradient are in its head, too.

use std::sync::{Mutex, MutexGuard, OnceLock};

use memascend_math::Check;
use memascend_mem::locked;

use crate::{Buffer, Description, Dtype, Error, Layout, Result, Store, Transfer, buffer::bytes_of, layout::PAGE_BYTES};

/// The room of one record.
#[derive(Debug)]
struct Room {
    /// Its first checksum.
    first: u32,
    /// What the gradient that lies there whole has in it; `None` while it is written, and where nothing is.
    whole: Option<Check>,
    /// In which place it lies, and in which one it is being written.
    at: u8,
    to: u8,
    /// The place that the newest commit names.
    committed: Option<u8>,
    /// What the checksums of each place are bound to: the generation of the commit that would name it.
    generations: [u64; 2],
}

#[derive(Debug)]
struct Rooms {
    rooms: Box<[Room]>,
    /// Of every chunk of every record that may spill, in each place.
    sums: [Box<[u64]>; 2],
}

/// The rooms for spilled gradients, and the checksums of what is in them.
#[derive(Debug)]
pub(crate) struct Spill {
    rooms: Mutex<Rooms>,
    /// Where the second places begin in the volume, once there are any.
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

    /// Bytes of memory that one takes: a few words for each record and 24 for each chunk that may spill, of which 8 are for
    /// the values that are computed before they are written.
    pub(crate) fn bytes(description: &Description, layout: &Layout) -> u64 {
        let spilling = (0..description.records.len()).filter(|&record| description.records[record].spill.is_some());
        let sums: u64 = spilling.map(|record| u64::from(layout.chunks_of(record)) * 24).sum();
        sums + (description.records.len() * size_of::<Room>()) as u64
    }

    fn lock(&self) -> MutexGuard<'_, Rooms> {
        locked(&self.rooms)
    }

    /// Gives each record a second place, of which the first begins there.
    pub(crate) fn add_places(&self, offset: u64) {
        self.second.get_or_init(|| offset);
    }

    pub(crate) fn has_places(&self) -> bool {
        self.second.get().is_some()
    }

    /// A commit was made: the gradients that are spilled of some records are `named` by it, and slots still `lack` those of
    /// the commit before.
    pub(crate) fn committed(&self, named: impl Fn(usize) -> bool, lack: impl Fn(usize) -> bool) {
        for (record, room) in self.lock().rooms.iter_mut().enumerate() {
            let before = room.committed.filter(|_| lack(record));
            room.committed = if named(record) { Some(room.at) } else { before };
        }
    }
}

/// A gradient that was spilled, as a commit names it: where each chunk lies, and its checksum.
pub(crate) type Laid = Box<[(u64, u64)]>;

/// A chunk of a spilled gradient that is being read. Dropping it waits.
pub struct SpillRead<'a, B: Buffer> {
    store: &'a Store,
    transfer: Transfer<B>,
    record: usize,
    chunk: u32,
    /// The place that it is read from.
    from: u8,
}

impl Store {
    /// The dtype of gradients that the record has room for.
    fn spills(&self, record: usize) -> Result<Dtype> {
        self.known(record)?;
        let described = &self.description.records[record];
        described.spill.ok_or_else(|| {
            Error::Invalid(format!("{:?} was described without room for gradients that spill", described.name))
        })
    }

    /// Bytes of a chunk of a spilled gradient, and the whole pages that it lies in.
    pub fn spill_bytes(&self, record: usize, chunk: u32) -> Result<(u64, u64)> {
        let used = self.description.elements_of_chunk(record, chunk) as u64 * self.spills(record)?.bytes();
        Ok((used, used.next_multiple_of(PAGE_BYTES)))
    }

    /// Where a chunk lies in one of the places, checked against the buffer for it.
    fn spill_place(&self, (record, place): (usize, u8), chunk: u32, buffer: &impl Buffer) -> Result<u64> {
        let (name, dtype) = (&self.description.records[record].name, self.spills(record)?);
        if chunk >= self.layout.chunks_of(record) {
            return Err(Error::Invalid(format!("{name:?} has {} chunks, not {chunk}", self.layout.chunks_of(record))));
        }
        let (_, wanted) = self.spill_bytes(record, chunk)?;
        if buffer.len() as u64 != wanted {
            let got = buffer.len();
            return Err(Error::Invalid(format!(
                "chunk {chunk} of the gradient of {name:?} has {wanted} bytes, not {got}"
            )));
        }
        Ok(self.place_of_spill((record, place), chunk, dtype))
    }

    fn place_of_spill(&self, (record, place): (usize, u8), chunk: u32, dtype: Dtype) -> u64 {
        let start = match (place, self.spill.second.get()) {
            (1, Some(second)) => second + self.layout.in_spill(record),
            _ => self.layout.spill_offset(record),
        };
        start + u64::from(chunk) * u64::from(self.description.chunk_elements) * dtype.bytes()
    }

    /// What lies in the room of a record; `None` where nothing does, or not the whole of it.
    pub fn spilled(&self, record: usize) -> Result<Option<Check>> {
        self.spills(record)?;
        Ok(self.spill.lock().rooms[record].whole)
    }

    /// Says that all chunks of a record's gradient are written, or that what lies there is nothing any more.
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

    /// Begins a gradient, or adds to the one that is there; it goes to a place that the newest commit does not name. Nothing
    /// counts as spilled until [`Store::set_spilled`] says so; what was there can be read meanwhile, each chunk before it
    /// is written.
    pub fn begin_spill(&self, record: usize, adds: bool) -> Result<()> {
        self.spills(record)?;
        let generation = self.index.lock().generation + 1;
        let may_move = self.spill.has_places();
        let mut rooms = self.spill.lock();
        let room = &mut rooms.rooms[record];
        room.whole = None;
        // What is there may have been spilled before another commit, to which its checksums are bound.
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

    /// Begins to write a chunk of a gradient that was begun. What fills the buffer's last page should be zeros.
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

    /// Begins to read a chunk of a gradient that was written since the store was opened.
    pub fn read_spill<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<SpillRead<'_, B>> {
        let from = self.spill.lock().rooms[record].at;
        self.read_place((record, from), chunk, buffer)
    }

    /// Begins to read a chunk of the gradient that the newest commit names ([`Store::append_spilled`]).
    pub fn read_committed<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<SpillRead<'_, B>> {
        let from = self.spill.lock().rooms[record].committed;
        let from = from.ok_or_else(|| {
            let name = &self.description.records[record].name;
            Error::Usage(format!("the last commit has no gradient of {name:?} that its slot lacks"))
        })?;
        self.read_place((record, from), chunk, buffer)
    }

    fn read_place<B: Buffer>(&self, (record, from): (usize, u8), chunk: u32, buffer: B) -> Result<SpillRead<'_, B>> {
        let offset = self.spill_place((record, from), chunk, &buffer)?;
        let transfer = Transfer::begun(self.volume.read(buffer, offset))?;
        Ok(SpillRead { store: self, transfer, record, chunk, from })
    }

    /// The spilled gradient of a record, where the commit of a generation may name it: it is whole, its checksums are bound
    /// to that generation, and it does not lie where the last commit has one.
    pub(crate) fn laid_spill(&self, record: usize, generation: u64) -> Option<Laid> {
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
    /// Waits, checks, and gives the buffer.
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
        let why = format!("its checksum is {got:016x} and {wanted:016x} was written");
        Err(store.corrupt(format!("chunk {chunk} of the spilled gradient of {name:?}"), place, why))
    }
}
