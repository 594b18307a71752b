//! Reads the values of a unit part by part, through memory that may be smaller than the unit.
//!
//! [Note: Holds of a unit] A `Parts` holds the slot of each record whose values it reads, so that nothing is staged
//! into these slots before every part was read once. A hold can end as soon as the devices have read all parts, even if
//! the caller never waits for the parts: a writer that needs a slot calls `OpenReads::settle`, which releases the holds
//! of ended reads.

use std::{
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Instant,
};

use memascend_mem::{Wait, locked};
use memascend_nvme::{Lane, Ticket};

use crate::{Buffer, Error, Result, Shared, Store, buffer::bytes_of, holds::Hold};

/// The values of a unit at one commit, cut into parts. Each part has whole extents, and parts are read one by one.
///
/// Nothing is staged into the slots of these values until every part was read once, or the `Parts` is dropped.
pub struct Parts {
    store: Arc<Store>,
    reading: Arc<Reading>,
    cuts: Vec<PartLayout>,
}

/// All [`Reading`]s of a store that are not dropped yet. See [Note: Holds of a unit].
#[derive(Default)]
pub(crate) struct OpenReads(Mutex<Vec<Weak<Reading>>>);

/// The holds on slots that a [`Parts`] has, and the state of its reads.
struct Reading {
    holds: Vec<Hold<Arc<Store>>>,
    flights: Mutex<Flights>,
}

struct Flights {
    /// True for each part whose read was begun at least once.
    begun: Vec<bool>,
    flying: Vec<Weak<dyn PendingRead>>,
}

/// A read of a part into a buffer of any type.
trait PendingRead: Send + Sync {
    fn has_ended(&self) -> bool;
}

/// A part of a unit: consecutive extents.
struct PartLayout {
    /// Offset of the part in the unit.
    start: u64,
    bytes: u64,
    extents: Vec<PartExtent>,
}

struct PartExtent {
    record: usize,
    /// Index in `Reading::holds`; `None` if an update of the record is deferred: the engine then computes the values.
    hold: Option<usize>,
    /// Number of the extent in the record.
    number: u32,
    /// Offset of the extent in its part.
    at: u64,
    /// Offset in the volume, and size in bytes.
    place: (u64, u64),
}

/// The read of a part into memory. Dropping a `PartFetch` waits for the devices.
pub struct PartFetch<B: Buffer + Sync> {
    state: Arc<Mutex<FetchState<B>>>,
}

enum FetchState<B: Buffer + Sync> {
    InFlight(InFlight<B>),
    /// The outcome of the read, after `wait` has waited for the tickets and checked the extents.
    Ended(Result<()>),
}

struct InFlight<B: Buffer + Sync> {
    tickets: Vec<Ticket<Shared<B>>>,
    memory: Shared<B>,
    parts: Arc<Parts>,
    index: usize,
}

/// Consecutive chunks, in a part, of a record with a deferred update. [`Parts::begin`] does not read these chunks: the
/// caller computes their values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeferredRun {
    /// The record of the chunks.
    pub record: usize,
    /// The number of the first chunk.
    pub first: u32,
    /// The number of chunks in the run.
    pub count: u32,
    /// The offset of the run in the part.
    pub at: u64,
    /// The size of the run in bytes: whole pages.
    pub bytes: u64,
}

impl Store {
    /// Returns the values of a unit at the last commit, in parts of at most `bytes_max` bytes. Reads no values yet, but
    /// settles the unit's records that are behind. See [Note: Deferred updates] in `newest_state.rs`.
    pub fn parts(self: &Arc<Self>, unit: usize, bytes_max: u64) -> Result<Parts> {
        self.settled(self.records_of(unit))?;
        self.parts_without(unit, bytes_max, &[])
    }

    /// Does what [`Store::parts`] does, but settles nothing, and leaves out the values of the records in `deferred`:
    /// [`Parts::deferred_runs`] returns the places of these values in a part.
    pub fn parts_without(self: &Arc<Self>, unit: usize, bytes_max: u64, deferred: &[usize]) -> Result<Parts> {
        let Some(name) = self.description.units.get(unit) else {
            return Err(Error::Invalid(format!(
                "there is no unit {unit}: the store has {} units, counted from 0",
                self.description.units.len()
            )));
        };
        let mut holds = Vec::new();
        {
            let mut index = self.index.lock();
            let read = self.records_of(unit).filter(|record| !deferred.contains(record));
            let with_values = read.filter(|&record| self.layout.chunks_of(record) > 0);
            let live = |record| Hold::live(Arc::clone(self), &mut index, record, 0..self.layout.chunks_of(record));
            holds.extend(with_values.map(live));
        }
        let mut parts: Vec<PartLayout> = Vec::new();
        for record in self.records_of(unit).filter(|&record| self.layout.chunks_of(record) > 0) {
            let number = holds.iter().position(|hold| hold.record == record);
            let slot = number.map_or(0, |number| holds[number].slot);
            let first = self.layout.extent(&self.description, record, 0).at;
            for extent in 0..self.layout.chunks_of(record) {
                let layout = self.layout.extent(&self.description, record, extent);
                let (at, bytes) = (self.layout.in_unit(record, unit) + layout.at - first, layout.bytes());
                if bytes > bytes_max {
                    return Err(Error::Invalid(format!(
                        "an extent of unit {name:?} has {bytes} bytes, but parts hold {bytes_max}: use larger parts"
                    )));
                }
                match parts.last() {
                    Some(part) if part.start + part.bytes == at && part.bytes + bytes <= bytes_max => {}
                    _ => parts.push(PartLayout { start: at, bytes: 0, extents: Vec::new() }),
                }
                if let Some(part) = parts.last_mut() {
                    let place = (self.layout.offset(&layout, slot), bytes);
                    part.extents.push(PartExtent { record, hold: number, number: extent, at: part.bytes, place });
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
    /// Returns the newest version among the records whose values this `Parts` reads; 0 if there is no such record.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.reading.holds.iter().map(|hold| hold.version).max().unwrap_or(0)
    }

    /// For each part, yields its offset in the unit and its size in bytes.
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.cuts.iter().map(|part| (part.start, part.bytes))
    }

    /// Returns the runs of chunks that [`Parts::begin`] does not read when it reads part `index`.
    #[must_use]
    pub fn deferred_runs(&self, index: usize) -> Vec<DeferredRun> {
        let mut found: Vec<DeferredRun> = Vec::new();
        let extents = self.cuts.get(index).map_or(&[][..], |part| &part.extents);
        for extent in extents.iter().filter(|extent| extent.hold.is_none()) {
            match found.last_mut() {
                Some(run) if run.record == extent.record => {
                    run.count += 1;
                    run.bytes += extent.place.1;
                }
                _ => found.push(DeferredRun {
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

    /// Copies the extents of a part that are in the RAM tier to `memory`. Begins to read all other extents, except
    /// those in [`Parts::deferred_runs`], ahead of queued I/O of [`Lane::Second`].
    ///
    /// `memory` must have exactly the size of the part, and may begin at any address. Reads are faster if `memory`
    /// begins on a page.
    pub fn begin<B: Buffer + Sync>(self: &Arc<Self>, index: usize, memory: B) -> Result<PartFetch<B>> {
        let Some(part) = self.cuts.get(index) else {
            return Err(Error::Invalid(format!(
                "there is no part {index}: the unit has {} parts, counted from 0",
                self.cuts.len()
            )));
        };
        if memory.len() as u64 != part.bytes {
            return Err(Error::Invalid(format!(
                "part {index} needs a buffer of {} bytes, not {}",
                part.bytes,
                memory.len()
            )));
        }
        let (memory, parts) = (Shared::new(memory), Arc::clone(self));
        let mut flying = InFlight { tickets: Vec::new(), memory, parts, index };
        // One read covers extents that are adjacent in the volume. An item of `runs` is one read: the offset in the
        // part, the offset in the volume, and the size in bytes.
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
        // Keep the lock until this read is in `flights.flying`: until then, `release_if_ended` must not release the
        // holds.
        let mut flights = self.reading.lock();
        self.reading.holds.iter().try_for_each(Hold::retake)?;
        for (into, from, bytes) in runs {
            let into = flying.memory.part(into as usize, bytes as usize);
            let into = into.ok_or_else(|| Error::Invalid(format!("part {index} does not fit into its memory")))?;
            let ticket = self.store.volume.read_in(Lane::First, into, from).map_err(|refused| refused.error)?;
            flying.tickets.push(ticket);
        }
        // Count bytes for each part, since the caller may not read all parts of a unit.
        self.store.counters.began_part(from_storage);
        let state = Arc::new(Mutex::new(FetchState::InFlight(flying)));
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

    /// Releases the holds of all readings that have ended. The caller must not have the index's lock, because releasing
    /// a hold takes this lock.
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

    /// Releases the slots if the read of every part was begun and no read is in flight. Never waits for I/O.
    fn release_if_ended(&self) {
        let flights = self.lock();
        let ended = |flight: &Weak<dyn PendingRead>| flight.upgrade().is_none_or(|flight| flight.has_ended());
        if flights.begun.iter().all(|&begun| begun) && flights.flying.iter().all(ended) {
            self.holds.iter().for_each(Hold::release);
        }
    }
}

impl<B: Buffer + Sync> PendingRead for Mutex<FetchState<B>> {
    fn has_ended(&self) -> bool {
        // If `try_lock` fails, another thread has the lock, perhaps in `PartFetch::wait`, and the read may not have
        // ended.
        self.try_lock().is_ok_and(|state| state.is_done())
    }
}

impl<B: Buffer + Sync> PartFetch<B> {
    /// True if the devices are done with the read. May be false while another thread is in [`PartFetch::wait`]. Never
    /// waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.state.has_ended()
    }

    /// Waits for the devices, then checks the extents. Does not check values that the engine computes, or that only the
    /// RAM tier has. Once the read has ended, later calls return the same outcome. After a success, the caller may use
    /// the part's memory again.
    ///
    /// # Errors
    /// Fails if `wait` ends first, a device fails, or the checksum of an extent is wrong.
    pub fn wait(&self, mut wait: Wait<'_>) -> Result<()> {
        let deadline = wait.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = locked(&self.state);
        if let FetchState::InFlight(flying) = &*state {
            for ticket in &flying.tickets {
                let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                let keep_waiting = wait.keep_waiting.as_mut().map(|keep| &mut **keep as &mut dyn FnMut() -> bool);
                ticket.wait_until(Wait { timeout, keep_waiting })?;
            }
            *state = FetchState::Ended(flying.ended());
        }
        match &*state {
            FetchState::InFlight(_) => Ok(()),
            FetchState::Ended(result) => result.clone(),
        }
    }
}

impl<B: Buffer + Sync> FetchState<B> {
    fn is_done(&self) -> bool {
        match self {
            Self::InFlight(flying) => flying.tickets.iter().all(Ticket::is_done),
            Self::Ended(_) => true,
        }
    }
}

impl<B: Buffer + Sync> InFlight<B> {
    /// Returns the outcome of the read and checks its extents. Every ticket must be done.
    fn ended(&self) -> Result<()> {
        for ticket in &self.tickets {
            ticket.outcome().unwrap_or(Err(memascend_nvme::Error::Closed))?;
        }
        for extent in &self.parts.cuts[self.index].extents {
            // Skip values that the engine computes: the engine's thread may still be writing these values to this
            // memory.
            let Some(hold) = extent.hold.map(|hold| &self.parts.reading.holds[hold]) else { continue };
            let part = self.memory.part(extent.at as usize, extent.place.1 as usize);
            if let Some(part) = part.filter(|_| !hold.alone) {
                hold.check(extent.number, bytes_of(&part), extent.place)?;
            }
        }
        Ok(())
    }
}

impl<B: Buffer + Sync> Drop for InFlight<B> {
    fn drop(&mut self) {
        // Wait until no device writes to `memory`: if `Parts::begin` failed, some reads may be in flight.
        for ticket in &self.tickets {
            while !ticket.is_done() && ticket.wait_until(Wait::forever()).is_err() {}
        }
    }
}
