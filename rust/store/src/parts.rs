//! Reads a unit part by part through memory smaller than the unit, on the way to a device.

use std::{
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Instant,
};

use memascend_mem::{Wait, locked};
use memascend_nvme::{Lane, Ticket};

use crate::{Buffer, Error, Result, Shared, Store, buffer::bytes_of, holds::Hold};

/// The values of a unit, all of one commit, cut into parts of whole extents that are read one by one.
///
/// Until every part was read once, or it is dropped, nothing is staged into the slots that it reads.
pub struct Parts {
    store: Arc<Store>,
    reading: Arc<Reading>,
    cuts: Vec<Cut>,
}

/// The reads of units that hold slots: one may end without anybody waiting for it.
#[derive(Default)]
pub(crate) struct OpenReads(Mutex<Vec<Weak<Reading>>>);

/// What the parts of a unit are read under, and which of them are.
struct Reading {
    holds: Vec<Hold<Arc<Store>>>,
    flights: Mutex<Flights>,
}

struct Flights {
    /// Parts that were begun.
    begun: Vec<bool>,
    flying: Vec<Weak<dyn Flight>>,
}

/// A part that may be on its way.
trait Flight: Send + Sync {
    fn has_ended(&self) -> bool;
}

/// Extents that follow each other in the unit.
struct Cut {
    /// Where it begins in the unit.
    start: u64,
    bytes: u64,
    extents: Vec<CutExtent>,
}

struct CutExtent {
    record: usize,
    /// Which of the holds; `None` where the record lacks its last update, and somebody computes its values.
    hold: Option<usize>,
    /// Which of the record's.
    number: u32,
    /// Where it begins in its part.
    at: u64,
    /// Where it is in the volume, and its bytes.
    place: (u64, u64),
}

/// A part on its way into memory. Dropping it waits for the devices.
pub struct PartFetch<B: Buffer + Sync> {
    state: Arc<Mutex<FetchState<B>>>,
}

enum FetchState<B: Buffer + Sync> {
    Flying(Flying<B>),
    /// It was waited for, and this is what came of it.
    Ended(Result<()>),
}

struct Flying<B: Buffer + Sync> {
    tickets: Vec<Ticket<Shared<B>>>,
    memory: Shared<B>,
    parts: Arc<Parts>,
    index: usize,
}

/// Values of a part that nobody reads: of a record that lacks its last update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lacking {
    /// Whose.
    pub record: usize,
    /// The first of its chunks, and how many.
    pub first: u32,
    /// As above.
    pub count: u32,
    /// Where they begin in the part.
    pub at: u64,
    /// Their bytes: whole pages.
    pub bytes: u64,
}

impl Store {
    /// The values of a unit as the last commit left them, in parts of at most `bytes_max` bytes. Nothing is read yet.
    pub fn parts(self: &Arc<Self>, unit: usize, bytes_max: u64) -> Result<Parts> {
        self.settled(self.records_of(unit))?;
        self.parts_lacking(unit, bytes_max, &[])
    }

    /// The same, without the values of some records, which [`Parts::lacking`] names.
    pub fn parts_lacking(self: &Arc<Self>, unit: usize, bytes_max: u64, lacking: &[usize]) -> Result<Parts> {
        let Some(name) = self.description.units.get(unit) else {
            return Err(Error::Invalid(format!("unit {unit} of {}", self.description.units.len())));
        };
        let mut holds = Vec::new();
        {
            let mut index = self.index.lock();
            let read = self.records_of(unit).filter(|record| !lacking.contains(record));
            let with_values = read.filter(|&record| self.layout.chunks_of(record) > 0);
            let live = |record| Hold::live(Arc::clone(self), &mut index, record, 0..self.layout.chunks_of(record));
            holds.extend(with_values.map(live));
        }
        let mut parts: Vec<Cut> = Vec::new();
        for record in self.records_of(unit).filter(|&record| self.layout.chunks_of(record) > 0) {
            let number = holds.iter().position(|hold| hold.record == record);
            let slot = number.map_or(0, |number| holds[number].slot);
            let first = self.layout.extent(&self.description, record, 0).at;
            for extent in 0..self.layout.chunks_of(record) {
                let layout = self.layout.extent(&self.description, record, extent);
                let (at, bytes) = (self.layout.in_unit(record, unit) + layout.at - first, layout.bytes());
                if bytes > bytes_max {
                    return Err(Error::Invalid(format!(
                        "an extent of unit {name:?} has {bytes} bytes, and parts have {bytes_max}"
                    )));
                }
                match parts.last() {
                    Some(part) if part.start + part.bytes == at && part.bytes + bytes <= bytes_max => {}
                    _ => parts.push(Cut { start: at, bytes: 0, extents: Vec::new() }),
                }
                if let Some(part) = parts.last_mut() {
                    let place = (self.layout.offset(&layout, slot), bytes);
                    part.extents.push(CutExtent { record, hold: number, number: extent, at: part.bytes, place });
                    part.bytes += bytes;
                }
            }
        }
        self.counters.began(0);
        let flights = Flights { begun: vec![false; parts.len()], flying: Vec::new() };
        let reading = Arc::new(Reading { holds, flights: Mutex::new(flights) });
        self.reads.add(&reading);
        Ok(Parts { store: Arc::clone(self), reading, cuts: parts })
    }
}

impl Parts {
    /// The newest version among the records: 0 where none has values.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.reading.holds.iter().map(|hold| hold.version).max().unwrap_or(0)
    }

    /// Where each part begins in the unit, and its bytes.
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.cuts.iter().map(|part| (part.start, part.bytes))
    }

    /// What a part has of records that lack their last update: runs of chunks.
    #[must_use]
    pub fn lacking(&self, index: usize) -> Vec<Lacking> {
        let mut found: Vec<Lacking> = Vec::new();
        let extents = self.cuts.get(index).map_or(&[][..], |part| &part.extents);
        for extent in extents.iter().filter(|extent| extent.hold.is_none()) {
            match found.last_mut() {
                Some(run) if run.record == extent.record => {
                    run.count += 1;
                    run.bytes += extent.place.1;
                }
                _ => found.push(Lacking {
                    record: extent.record,
                    first: extent.number,
                    count: 1,
                    at: extent.at,
                    bytes: extent.place.1,
                }),
            }
        }
        found
    }

    /// Begins to read a part into memory of exactly its size, before all other I/O that waits. Memory that does not
    /// begin on a page is right, and slower.
    pub fn begin<B: Buffer + Sync>(self: &Arc<Self>, index: usize, memory: B) -> Result<PartFetch<B>> {
        let Some(part) = self.cuts.get(index) else {
            return Err(Error::Invalid(format!("part {index} of {}", self.cuts.len())));
        };
        if memory.len() as u64 != part.bytes {
            return Err(Error::Invalid(format!("part {index} has {} bytes, not {}", part.bytes, memory.len())));
        }
        let (memory, parts) = (Shared::new(memory), Arc::clone(self));
        let mut flying = Flying { tickets: Vec::new(), memory, parts, index };
        // Extents that lie side by side in one slot are one read: where in the part, where in the volume, bytes.
        let mut runs: Vec<(u64, u64, u64)> = Vec::new();
        let (cache, mut from_storage) = (self.store.ram_tier(), 0);
        for extent in &part.extents {
            let (from, bytes) = extent.place;
            let Some(hold) = extent.hold.map(|hold| &self.reading.holds[hold]) else { continue };
            let into = flying.memory.part(extent.at as usize, bytes as usize);
            let is_in_ram = |mut into| {
                self.store.copy_in_ram(cache.as_deref(), (hold.record, extent.number), hold.version, &mut into)
            };
            if into.is_some_and(is_in_ram) {
                continue;
            }
            if hold.alone {
                return Err(self.store.lost(hold.record));
            }
            hold.require_newest()?;
            from_storage += bytes;
            match runs.last_mut() {
                Some((_, start, length)) if *start + *length == from => *length += bytes,
                _ => runs.push((extent.at, from, bytes)),
            }
        }
        // None of them ends before this one is known.
        let mut flights = self.reading.lock();
        self.reading.holds.iter().try_for_each(Hold::retake)?;
        for (into, from, bytes) in runs {
            let into = flying.memory.part(into as usize, bytes as usize);
            let into = into.ok_or_else(|| Error::Invalid(format!("part {index} does not fit its memory")))?;
            let ticket = self.store.volume.read_in(Lane::First, into, from).map_err(|refused| refused.error)?;
            flying.tickets.push(ticket);
        }
        // Not all of a unit's need be read.
        self.store.counters.began_part(from_storage);
        let state = Arc::new(Mutex::new(FetchState::Flying(flying)));
        let flight: Weak<Mutex<FetchState<B>>> = Arc::downgrade(&state);
        flights.flying.retain(|flight| flight.strong_count() > 0);
        flights.flying.push(flight);
        flights.begun[index] = true;
        Ok(PartFetch { state })
    }
}

impl OpenReads {
    fn add(&self, read: &Arc<Reading>) {
        let mut reads = locked(&self.0);
        reads.retain(|read| read.strong_count() > 0);
        reads.push(Arc::downgrade(read));
    }

    /// Lets those that have ended go. Not under the index's lock, which they take.
    pub(crate) fn settle(&self) {
        let reads: Vec<Arc<Reading>> = locked(&self.0).iter().filter_map(Weak::upgrade).collect();
        for read in reads {
            read.release_if_ended();
        }
    }
}

impl Reading {
    fn lock(&self) -> MutexGuard<'_, Flights> {
        locked(&self.flights)
    }

    /// Lets go of the slots if every part was read. Never waits.
    fn release_if_ended(&self) {
        let flights = self.lock();
        let ended = |flight: &Weak<dyn Flight>| flight.upgrade().is_none_or(|flight| flight.has_ended());
        if flights.begun.iter().all(|&begun| begun) && flights.flying.iter().all(ended) {
            self.holds.iter().for_each(Hold::release);
        }
    }
}

impl<B: Buffer + Sync> Flight for Mutex<FetchState<B>> {
    fn has_ended(&self) -> bool {
        // Whoever has it locked waits for it.
        self.try_lock().is_ok_and(|state| state.is_done())
    }
}

impl<B: Buffer + Sync> PartFetch<B> {
    /// Whether the devices are done with it. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.state.has_ended()
    }

    /// Waits, and checks every extent; waiting again says the same again. Once that succeeded, the memory is the caller's
    /// again.
    pub fn wait(&self, mut wait: Wait<'_>) -> Result<()> {
        let deadline = wait.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = locked(&self.state);
        if let FetchState::Flying(flying) = &*state {
            for ticket in &flying.tickets {
                let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                let keep_waiting = wait.keep_waiting.as_mut().map(|keep| &mut **keep as &mut dyn FnMut() -> bool);
                ticket.wait_until(Wait { timeout, keep_waiting })?;
            }
            *state = FetchState::Ended(flying.ended());
        }
        match &*state {
            FetchState::Flying(_) => Ok(()),
            FetchState::Ended(result) => result.clone(),
        }
    }
}

impl<B: Buffer + Sync> FetchState<B> {
    fn is_done(&self) -> bool {
        match self {
            Self::Flying(flying) => flying.tickets.iter().all(Ticket::is_done),
            Self::Ended(_) => true,
        }
    }
}

impl<B: Buffer + Sync> Flying<B> {
    /// What came of it, once every ticket is done.
    fn ended(&self) -> Result<()> {
        for ticket in &self.tickets {
            ticket.outcome().unwrap_or(Err(memascend_nvme::Error::Closed))?;
        }
        for extent in &self.parts.cuts[self.index].extents {
            // What others compute may still be written meanwhile, so that nothing of it is looked at.
            let Some(hold) = extent.hold.map(|hold| &self.parts.reading.holds[hold]) else { continue };
            let part = self.memory.part(extent.at as usize, extent.place.1 as usize);
            if let Some(part) = part.filter(|_| !hold.alone) {
                hold.check(extent.number, bytes_of(&part), extent.place)?;
            }
        }
        Ok(())
    }
}

impl<B: Buffer + Sync> Drop for Flying<B> {
    fn drop(&mut self) {
        // Also where only some of its reads were begun.
        for ticket in &self.tickets {
            while !ticket.is_done() && ticket.wait_until(Wait::forever()).is_err() {}
        }
    }
}
