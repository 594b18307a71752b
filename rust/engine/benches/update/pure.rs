//! Reads and writes as many bytes in a volume as the update does, but without arithmetic, checksums or a catalog.

use std::{collections::VecDeque, path::PathBuf};

use memascend_mem::{ChunkRing, OnFork, Pin, Region, Wait};
use memascend_nvme::{Options, Ticket, Volume};
use memascend_store::Shared;

use crate::{
    Outcome,
    subject::{Layout, RECORDS, VALUE_BYTES},
};

type Moving = (Shared, Ticket<Shared>, Option<Ticket<Shared>>);

/// A volume with the size of a store's two slots, and staging memory with the size of the engine's staging memory.
pub(crate) struct Pure {
    pub(crate) path: PathBuf,
    volume: Volume,
    ring: ChunkRing,
    chunks: usize,
    elements: usize,
    staged: usize,
    layout: Layout,
}

impl Pure {
    pub(crate) fn new(
        path: PathBuf,
        (chunks, elements): (usize, usize),
        staged: usize,
        layout: Layout,
    ) -> Outcome<Self> {
        let chunk_bytes = elements * (layout.state_bytes() + VALUE_BYTES);
        let mut options = Options::default();
        options.size_bytes = Some((2 * chunks * chunk_bytes) as u64);
        let volume = Volume::open(&[&path], &options)?;
        let region = Region::new(staged * chunk_bytes, Pin::Off, OnFork::Wipe, "pure")?;
        let ring = ChunkRing::new(&region, chunk_bytes, staged)?;
        Ok(Self { path, volume, ring, chunks, elements, staged, layout })
    }

    pub(crate) fn close(self) -> Outcome<()> {
        Ok(self.volume.close(Wait::forever())?)
    }

    /// Returns the number of bytes of both slots together.
    pub(crate) fn bytes(&self) -> usize {
        2 * self.chunks * self.elements * (self.layout.state_bytes() + VALUE_BYTES)
    }

    /// For each chunk of a record, reads the state from `slot`, and the values if the update reads them. Writes state
    /// and values to the other slot. Keeps the same number of chunks in flight as the engine does.
    pub(crate) fn record(&self, record: usize, slot: usize) -> Outcome<()> {
        let Self { volume, ring, chunks, elements, staged, layout, .. } = self;
        let (chunks, elements, staged) = (*chunks, *elements, *staged);
        let owner = ring.owner("pure")?;
        let (state, values) = (elements * layout.state_bytes(), elements * VALUE_BYTES);
        let values_at = 2 * chunks * state;
        let read = |part: Option<Shared>, from: usize| -> Outcome<Ticket<Shared>> {
            let part = part.ok_or("a chunk is too small for its state")?;
            Ok(volume.read(part, from as u64).map_err(|refused| refused.error)?)
        };
        let mut reading: VecDeque<(usize, Moving)> = VecDeque::new();
        let mut writing: VecDeque<[Ticket<Shared>; 2]> = VecDeque::new();
        let each = chunks / RECORDS;
        let (mut begun, end) = (record * each, (record + 1) * each);
        while begun < end || !reading.is_empty() {
            while begun < end && reading.len() < staged.div_ceil(2) {
                if reading.len() + writing.len() == staged {
                    for ticket in writing.pop_front().into_iter().flatten() {
                        ticket.wait().result?;
                    }
                }
                let memory = Shared::new(ring.lease(owner, Wait::forever())?);
                let index = slot * chunks + begun;
                let half = (layout.read_bytes() > 0)
                    .then(|| read(memory.part(state, values), values_at + index * values))
                    .transpose()?;
                let ticket = read(memory.part(0, state), index * state)?;
                reading.push_back((begun, (memory, ticket, half)));
                begun += 1;
            }
            let Some((index, (memory, ticket, half))) = reading.pop_front() else { break };
            if let Some(half) = half {
                half.wait().result?;
            }
            let finished = ticket.wait();
            finished.result?;
            let other = (1 - slot) * chunks + index;
            let half = memory.part(state, values).ok_or("a chunk is too small for its state")?;
            let one = volume.write(finished.buffer, (other * state) as u64).map_err(|refused| refused.error)?;
            let two = volume.write(half, (values_at + other * values) as u64).map_err(|refused| refused.error)?;
            writing.push_back([one, two]);
        }
        for ticket in writing.into_iter().flatten() {
            ticket.wait().result?;
        }
        Ok(())
    }
}
