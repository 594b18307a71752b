//! Reads records one after the other, checks their checksums, and passes their tensors to a callback in parts.

use std::collections::VecDeque;

use memascend_mem::Wait;

use crate::{Error, ExtentRead, Result, Scratch, Shared, Store, buffer::bytes_of};

/// The largest number of [`Turn`]s whose reads are in flight.
const DEPTH: usize = 4;

/// A part of a tensor, in memory.
pub struct Part {
    /// The number of the tensor: 0 for the record's values, then 1, 2, ... for its state tensors in the order of the
    /// description.
    pub tensor: usize,
    /// The offset of the part's first byte in the tensor.
    pub start: usize,
    /// The bytes of the part.
    pub memory: Shared,
}

/// The reads of some extents of one record. `visit` receives these extents in one call.
struct Turn<'a> {
    record: usize,
    reads: Vec<(u32, Reading<'a>)>,
}

enum Reading<'a> {
    Begun(ExtentRead<'a, Shared>),
    /// The newest state, computed from the slot and the log. It is in memory already.
    Newest(Shared),
}

impl Store {
    /// Passes each of `records`, in this order, to `visit`: the values and the state of each chunk together, then the
    /// other state tensors part by part.
    ///
    /// Each call of `visit` receives a record and some of its parts, and returns `false` to stop. `visit` must not keep
    /// the memory of the parts, because later reads use this memory again.
    ///
    /// # Errors
    /// Fails if a record does not exist or cannot be settled, a device fails, an extent or a gradient in the log is
    /// damaged, only memory had the newest version of a record and no longer has it, `visit` stops the scan, or a
    /// commit changes a record during the scan.
    pub fn scan(&self, records: &[usize], visit: &mut dyn FnMut(usize, Vec<Part>) -> bool) -> Result<()> {
        let mut versions = Vec::with_capacity(records.len());
        // If a record is behind, settling gives the record the version of the next commit. See
        // [Note: Deferred updates] in `newest_state.rs`.
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
            if visit(turn.record, parts) { Ok(()) } else { Err(Error::Interrupted("a scan of the store")) }
        };
        for (&record, &version) in records.iter().zip(&versions) {
            // Settle one record at a time, so that `visit` can stop the scan in between.
            self.settled([record])?;
            let replay = self.missing_gradients(record);
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
                let reads = if let (Some(replay), Some(room), [values, state @ ..]) = (&replay, &room, &parts[..]) {
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

    /// Yields the groups of extents that `visit` receives together.
    fn turns(&self, record: usize) -> impl Iterator<Item = Vec<u32>> + use<> {
        let chunks = self.layout.chunks_of(record);
        let stated = chunks > 0 && self.description.records[record].chunked().next().is_some();
        let others = if stated { 2 * chunks } else { chunks };
        let of_chunk = move |chunk| if stated { vec![chunk, chunks + chunk] } else { vec![chunk] };
        (0..chunks).map(of_chunk).chain((others..self.layout.extents_of(record)).map(|extent| vec![extent]))
    }

    /// Waits for the extents of a turn, checks that the extents have `version`, and cuts the extents into parts of
    /// tensors.
    fn arrived(&self, record: usize, reads: Vec<(u32, Reading<'_>)>, version: u64) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        for (number, read) in reads {
            let (memory, read) = match read {
                Reading::Begun(read) => read.wait()?,
                Reading::Newest(memory) => (memory, version),
            };
            if read != version {
                let name = &self.description.records[record].name;
                return Err(Error::Usage(format!("a commit changed {name:?} while it was read: read it again")));
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
