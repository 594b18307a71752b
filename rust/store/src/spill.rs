//! Spills gradients to scratch space beside the slots, with checksums in memory alone.
//!
//! What is spilled belongs to no step and no version. Nothing of it is known after the store was opened again.

use std::sync::{Mutex, MutexGuard};

use memascend_math::Check;
use memascend_mem::locked;

use crate::{
    Buffer, Description, Dtype, Error, Layout, Result, Store, Transfer,
    buffer::bytes_of,
    checksum::{Subject, checksum},
    layout::PAGE_BYTES,
};

/// The room of one record.
#[derive(Debug)]
struct Room {
    /// Its first checksum.
    first: u32,
    /// What the gradient that lies there whole has in it; `None` while it is written, and where nothing is.
    whole: Option<Check>,
}

#[derive(Debug)]
struct Rooms {
    rooms: Box<[Room]>,
    /// Of every chunk of every record that may spill.
    sums: Box<[u64]>,
}

/// The rooms for spilled gradients, and the checksums of what is in them.
#[derive(Debug)]
pub(crate) struct Spill(Mutex<Rooms>);

impl Spill {
    pub(crate) fn new(description: &Description, layout: &Layout) -> Self {
        let mut first = 0;
        let rooms = (0..description.records.len())
            .map(|record| {
                let room = Room { first, whole: None };
                if description.records[record].spill.is_some() {
                    first += layout.chunks_of(record);
                }
                room
            })
            .collect();
        Self(Mutex::new(Rooms { rooms, sums: vec![0; first as usize].into() }))
    }

    /// Bytes of memory that one takes: a word or so for each record and 8 for each chunk that may spill.
    pub(crate) fn bytes(description: &Description, layout: &Layout) -> u64 {
        let spilling = (0..description.records.len()).filter(|&record| description.records[record].spill.is_some());
        let sums: u64 = spilling.map(|record| u64::from(layout.chunks_of(record)) * 8).sum();
        sums + (description.records.len() * size_of::<Room>()) as u64
    }

    fn lock(&self) -> MutexGuard<'_, Rooms> {
        locked(&self.0)
    }
}

/// A chunk of a spilled gradient that is being read. Dropping it waits.
pub struct SpillRead<'a, B: Buffer> {
    store: &'a Store,
    transfer: Transfer<B>,
    record: usize,
    chunk: u32,
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

    /// Where a chunk lies, checked against the buffer for it.
    fn spill_place(&self, record: usize, chunk: u32, buffer: &impl Buffer) -> Result<u64> {
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
        let before = u64::from(chunk) * u64::from(self.description.chunk_elements) * dtype.bytes();
        Ok(self.layout.spill_offset(record) + before)
    }

    /// What lies in the room of a record; `None` where nothing does, or not the whole of it.
    pub fn spilled(&self, record: usize) -> Result<Option<Check>> {
        self.spills(record)?;
        Ok(self.spill.lock().rooms[record].whole)
    }

    /// Says that all chunks of a record's gradient are written, or that what lies there is nothing any more.
    pub fn set_spilled(&self, record: usize, whole: Option<Check>) -> Result<()> {
        self.spills(record)?;
        self.spill.lock().rooms[record].whole = whole;
        Ok(())
    }

    /// Begins to write a chunk of a gradient. What fills the buffer's last page should be zeros.
    pub fn write_spill<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<Transfer<B>> {
        let offset = self.spill_place(record, chunk, &buffer)?;
        let sum = self.spill_sum(record, chunk, bytes_of(&buffer));
        {
            let mut rooms = self.spill.lock();
            let place = (rooms.rooms[record].first + chunk) as usize;
            rooms.sums[place] = sum;
        }
        Transfer::begun(self.volume.write(buffer, offset))
    }

    /// Begins to read a chunk of a gradient that was written since the store was opened.
    pub fn read_spill<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<SpillRead<'_, B>> {
        let offset = self.spill_place(record, chunk, &buffer)?;
        Ok(SpillRead { store: self, transfer: Transfer::begun(self.volume.read(buffer, offset))?, record, chunk })
    }

    fn spill_sum(&self, record: usize, chunk: u32, bytes: &[u8]) -> u64 {
        checksum(&self.uuid, Subject::Spill, (record as u64, u64::from(chunk)), 0, bytes)
    }
}

impl<B: Buffer> SpillRead<'_, B> {
    /// Waits, checks, and gives the buffer.
    pub fn wait(self) -> Result<B> {
        let Self { store, transfer, record, chunk } = self;
        let buffer = transfer.wait()?;
        let wanted = {
            let rooms = store.spill.lock();
            rooms.sums[(rooms.rooms[record].first + chunk) as usize]
        };
        let got = store.spill_sum(record, chunk, bytes_of(&buffer));
        if got == wanted {
            return Ok(buffer);
        }
        let place = (store.spill_place(record, chunk, &buffer)?, buffer.len() as u64);
        let name = &store.description.records[record].name;
        let why = format!("its checksum is {got:016x} and {wanted:016x} was written");
        Err(store.corrupt(format!("chunk {chunk} of the spilled gradient of {name:?}"), place, why))
    }
}
