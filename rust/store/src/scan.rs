//! Walks over live records: reads and checks every byte once, in order.

use std::collections::VecDeque;

use memascend_mem::Wait;

use crate::{Error, ExtentRead, Result, Scratch, Shared, Store, buffer::bytes_of};

/// Chunks in flight.
const DEPTH: usize = 4;

/// A part of a tensor, in memory.
pub struct Part {
    /// Which tensor of the record: 0 is its values, then its state as it is described.
    pub tensor: usize,
    /// The first byte, in the tensor.
    pub start: usize,
    /// The bytes.
    pub memory: Shared,
}

/// The extents of a chunk, being read.
struct Turn<'a> {
    record: usize,
    reads: Vec<(u32, Reading<'a>)>,
}

enum Reading<'a> {
    Begun(ExtentRead<'a, Shared>),
    /// It was put together with what the log has.
    Newest(Shared),
}

impl Store {
    /// Shows the parts of live records: of a chunk, its values and its state together; other tensors part by part.
    ///
    /// `visit` gets the record and ends the walk by `false`. Memory is taken again after the call, and must not be kept.
    pub fn scan(&self, records: &[usize], visit: &mut dyn FnMut(usize, Vec<Part>) -> bool) -> Result<()> {
        let mut versions = Vec::with_capacity(records.len());
        // What a record is settled to has the version of the next commit.
        let next = self.index.lock().generation + 1;
        for &record in records {
            let version = self.record_state(record)?.version;
            versions.push(if self.is_behind(record) { next } else { version });
        }
        let (state, values) = self.description.staging_bytes();
        let values_at = state as usize;
        let chunk = ((state + values) as usize).max(1);
        let scratch = Scratch::new(chunk, DEPTH, "store scan")?;
        let mut flying: VecDeque<(Turn<'_>, u64)> = VecDeque::with_capacity(DEPTH);
        let room = self.pending_replay().map(|_| self.log_room()).transpose()?;
        let mut show = |flying: &mut VecDeque<(Turn<'_>, u64)>| -> Result<()> {
            let Some((turn, version)) = flying.pop_front() else { return Ok(()) };
            let parts = self.arrived(turn.record, turn.reads, version)?;
            if visit(turn.record, parts) { Ok(()) } else { Err(Error::Interrupted("a walk over the store")) }
        };
        for (&record, &version) in records.iter().zip(&versions) {
            // One after the other, so that a walk can be interrupted.
            self.settled([record])?;
            let lacking = self.lacking(record);
            for extents in self.turns(record) {
                if flying.len() == DEPTH {
                    show(&mut flying)?;
                }
                let memory = Shared::new(scratch.lease(Wait::forever())?);
                let mut parts = Vec::with_capacity(extents.len());
                for &extent in &extents {
                    let at = if extent < self.layout.chunks_of(record) { values_at } else { 0 };
                    let bytes = self.layout.extent(&self.description, record, extent).bytes();
                    let part = memory.part(at, bytes as usize);
                    let part = part.ok_or_else(|| Error::Invalid("an extent is larger than a chunk".into()))?;
                    parts.push(part);
                }
                let reads = if let (Some(replay), Some(room), [values, state @ ..]) = (&lacking, &room, &parts[..]) {
                    self.read_newest(replay, (record, extents[0]), (values, state.first()), room)?;
                    extents.into_iter().zip(parts.into_iter().map(Reading::Newest)).collect()
                } else {
                    let read = |(extent, part)| Ok((extent, Reading::Begun(self.read(record, extent, part)?)));
                    extents.into_iter().zip(parts).map(read).collect::<Result<_>>()?
                };
                flying.push_back((Turn { record, reads }, version));
            }
        }
        while !flying.is_empty() {
            show(&mut flying)?;
        }
        Ok(())
    }

    /// Extents that are shown together.
    fn turns(&self, record: usize) -> impl Iterator<Item = Vec<u32>> + use<> {
        let chunks = self.layout.chunks_of(record);
        let stated = chunks > 0 && self.description.records[record].chunked().next().is_some();
        let others = if stated { 2 * chunks } else { chunks };
        let of_chunk = move |chunk| if stated { vec![chunk, chunks + chunk] } else { vec![chunk] };
        (0..chunks).map(of_chunk).chain((others..self.layout.extents_of(record)).map(|extent| vec![extent]))
    }

    fn arrived(&self, record: usize, reads: Vec<(u32, Reading<'_>)>, version: u64) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        for (number, read) in reads {
            let (memory, read) = match read {
                Reading::Begun(read) => read.wait()?,
                Reading::Newest(memory) => (memory, version),
            };
            if read != version {
                let name = &self.description.records[record].name;
                return Err(Error::Usage(format!("{name:?} was committed while it was read; read it again")));
            }
            let extent = self.layout.extent(&self.description, record, number);
            for (tensor, range, at) in self.runs(record, &extent) {
                let part = memory.part(at, range.len());
                let memory = part.ok_or_else(|| Error::Invalid("a part is larger than its extent".into()))?;
                debug_assert_eq!(bytes_of(&memory).len(), range.len(), "all of the part");
                parts.push(Part { tensor, start: range.start, memory });
            }
        }
        Ok(parts)
    }
}
