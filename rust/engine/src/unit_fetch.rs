//! Fetches the values of units. Reads the values from storage, and computes the values of records with a deferred
//! update ([Note: deferred updates]).

use std::{
    ptr::NonNull,
    sync::{Arc, Mutex},
    time::Instant,
};

use memascend_mem::{Wait, locked};
use memascend_store::{Buffer, Checkers, Checking, DeferredRun, Parts, Shared as Memory};

use crate::{
    Engine, Error, Result,
    deferred::{Behind, overwritten},
    engine::Shared,
    queue::QueueState,
    turn::Mark,
    workbench::Workbench,
};

/// The memory for computed values. It stays alive until the job has copied the values.
pub(crate) struct Room {
    first: NonNull<u8>,
    nbytes: usize,
    _memory: Box<dyn Send>,
}

// SAFETY: nothing else uses the memory until the job that owns this `Room` has ended.
unsafe impl Send for Room {}

impl Room {
    fn new<B: Buffer + Sync>(memory: Memory<B>) -> Self {
        Self { first: memory.as_ptr(), nbytes: memory.len(), _memory: Box::new(memory) }
    }

    /// Copies the values of one chunk to the memory. `number` is the position of this chunk among the chunks in the
    /// memory, counted from 0.
    pub(crate) fn put(&self, number: u64, values: &[u8], bench: &Workbench<'_>, record: usize) {
        let description = bench.store.description();
        let full = u64::from(description.chunk_elements) * description.records[record].dtype.bytes();
        let start = (number * full) as usize;
        assert!(start + values.len() <= self.nbytes, "values past the end of their memory");
        // SAFETY: the assertion above keeps the destination inside the memory.
        let first = unsafe { self.first.as_ptr().add(start) };
        // SAFETY: nothing else uses this part of the memory. `values` is in a staging chunk, which is disjoint from the
        // memory.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), first, values.len()) };
    }
}

/// The values of a unit after the last commit, divided into parts; see [`Parts`].
pub struct UnitParts {
    shared: Arc<Shared>,
    parts: Arc<Parts>,
    /// The records of the unit that have a deferred update, each with its update.
    behind: Vec<(usize, Arc<Behind>)>,
    settles: bool,
}

/// A part of a unit that is being fetched into memory.
pub struct UnitFetch<B: Buffer + Sync> {
    shared: Arc<Shared>,
    part: Option<Checking<Memory<B>>>,
    computed: Mutex<Vec<Computed>>,
    memory: Memory<B>,
    settles: bool,
    counts_wait: bool,
}

/// Values of a record that an urgent job computes.
struct Computed {
    run: DeferredRun,
    behind: Arc<Behind>,
    mark: Arc<Mark>,
}

impl Engine {
    /// Divides the values of a unit into parts of at most `bytes_max` bytes. Reads nothing yet. A fetch of a part
    /// computes the values of records with a deferred update. If `settles` is true, the fetch also stages the chunks
    /// that it computes.
    pub fn parts(&self, unit: usize, bytes_max: u64, settles: bool) -> Result<UnitParts> {
        self.here()?;
        let shared = &self.shared;
        let behind = shared.records_behind(unit);
        let records: Vec<usize> = behind.iter().map(|&(record, _)| record).collect();
        let parts = Arc::new(shared.store.parts_without(unit, bytes_max, &records)?);
        Ok(UnitParts { shared: Arc::clone(shared), parts, behind, settles })
    }

    /// Starts to fetch the values of all records of a unit into `memory`, which must have the size of the unit. The
    /// reads of the fetch go ahead of all queued I/O, and the jobs of the fetch are urgent. [`Engine::parts`] explains
    /// `settles`.
    pub fn fetch<B: Buffer + Sync>(&self, unit: usize, memory: B, settles: bool) -> Result<UnitFetch<B>> {
        let parts = self.parts(unit, u64::MAX, settles)?;
        let store = &self.shared.store;
        let wanted = store.layout().unit_bytes(unit);
        if memory.len() as u64 != wanted {
            let name = &store.description().units[unit];
            return Err(Error::Invalid(format!(
                "unit {name:?} has {wanted} bytes, but the memory for it has {}: give memory of {wanted} bytes",
                memory.len()
            )));
        }
        parts.begun((wanted > 0).then_some(0), memory, None, true)
    }
}

impl Shared {
    /// Returns the records of a unit that have a deferred update, each with its update.
    fn records_behind(&self, unit: usize) -> Vec<(usize, Arc<Behind>)> {
        if unit >= self.store.description().units.len() {
            return Vec::new();
        }
        let behind = |record| Some((record, self.deferred.behind(&self.store, record)?));
        self.store.records_of(unit).filter_map(behind).collect()
    }

    /// Queues a job that computes values of a record with a deferred update, and copies these values to `memory`. If
    /// `settles` is true, the job also stages the computed chunks. Returns an error if a later commit has overwritten
    /// the values.
    fn compute<B: Buffer + Sync>(
        &self,
        (run, behind): (DeferredRun, Arc<Behind>),
        memory: &Memory<B>,
        settles: bool,
    ) -> Result<Computed> {
        let DeferredRun { record, first, count, at, bytes } = run;
        if behind.is_over() {
            return Err(overwritten(&self.store, record));
        }
        let part = memory.part(at as usize, bytes as usize);
        let name = &self.store.description().records[record].name;
        let outside =
            || Error::Invalid(format!("{name:?} needs {bytes} bytes of the memory at offset {at}: give more memory"));
        let room = part.map(Room::new).ok_or_else(outside)?;
        let job = self.computing((record, Arc::clone(&behind)), (first, count), room, settles);
        let mark = Arc::clone(&job.mark);
        self.queue.push_urgent(job)?;
        Ok(Computed { run, behind, mark })
    }
}

impl UnitParts {
    /// Returns, for each part, the offset of its first byte in the unit, and its number of bytes.
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.parts.places()
    }

    /// Starts to fetch a part into `memory`, which must have exactly the size of the part; see [`Parts::begin`]. If
    /// `checkers` is given, its threads verify the data that is read.
    pub fn begin<B: Buffer + Sync>(
        &self,
        index: usize,
        memory: B,
        checkers: Option<&Checkers<Memory<B>>>,
    ) -> Result<UnitFetch<B>> {
        self.begun(Some(index), memory, checkers, false)
    }

    fn begun<B: Buffer + Sync>(
        &self,
        index: Option<usize>,
        memory: B,
        checkers: Option<&Checkers<Memory<B>>>,
        counts_wait: bool,
    ) -> Result<UnitFetch<B>> {
        let memory = Memory::new(memory);
        let begin = |index: usize| {
            let part = self.parts.begin(index, memory.clone())?;
            Ok::<_, Error>(match checkers {
                Some(checkers) => checkers.check(part),
                None => Checking::from(part),
            })
        };
        let part = index.map(begin).transpose()?;
        let runs = index.map_or_else(Vec::new, |index| self.parts.deferred_runs(index));
        let compute = |run: DeferredRun| {
            let (_, behind) = self
                .behind
                .iter()
                .find(|&&(record, _)| record == run.record)
                .ok_or_else(|| Error::Invalid("report this bug: a record has no deferred update".into()))?;
            self.shared.compute((run, Arc::clone(behind)), &memory, self.settles)
        };
        let computed = runs.into_iter().map(compute).collect::<Result<_>>()?;
        let (shared, settles) = (Arc::clone(&self.shared), self.settles);
        Ok(UnitFetch { shared, part, computed: Mutex::new(computed), memory, settles, counts_wait })
    }
}

impl<B: Buffer + Sync> UnitFetch<B> {
    /// True only if all reads and jobs of the fetch have ended, with or without an error. Never waits for them.
    #[must_use]
    pub fn is_done(&self) -> bool {
        // If the lock is taken, another thread is in `wait` or in this function: report that the fetch is not done yet.
        let Ok(computed) = self.computed.try_lock() else { return false };
        let state = self.shared.queue.lock();
        let is_computed = computed.iter().all(|one| !state.holds(&one.mark));
        is_computed && self.part.as_ref().is_none_or(Checking::is_done)
    }

    /// Waits for the fetch, and verifies every extent that was read. Once the fetch has ended, later calls return the
    /// same result. After a successful wait, the caller may use the memory again.
    pub fn wait(&self, mut wait: Wait<'_>) -> Result<()> {
        let began = Instant::now();
        let result = self.waited(&mut wait);
        if self.counts_wait {
            self.shared.store.note_wait(began.elapsed());
        }
        result
    }

    fn waited(&self, wait: &mut Wait<'_>) -> Result<()> {
        let mut computed = locked(&self.computed);
        for one in computed.iter_mut() {
            loop {
                let ended = |state: &QueueState| !state.holds(&one.mark);
                self.shared.queue.wait(wait, "the values of a unit", ended)?.alive()?;
                one.mark.result()?;
                if one.mark.is_completed() {
                    break;
                }
                // The job was dropped before it computed the values: queue another job.
                let what = (one.run, Arc::clone(&one.behind));
                *one = self.shared.compute(what, &self.memory, self.settles)?;
            }
        }
        let Some(part) = &self.part else { return Ok(()) };
        let keep_waiting = wait.keep_waiting.as_mut().map(|keep| &mut **keep as &mut dyn FnMut() -> bool);
        Ok(part.wait(Wait { timeout: wait.timeout, keep_waiting })?)
    }
}

impl<B: Buffer + Sync> Drop for UnitFetch<B> {
    fn drop(&mut self) {
        // Do not cancel a job that settles a record, because later readers need the settled record.
        if !self.settles {
            locked(&self.computed).iter().for_each(|one| one.mark.cancel());
        }
    }
}
