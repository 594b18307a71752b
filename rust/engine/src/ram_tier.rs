//! Keeps the gradients and updates of the RAM tier's records until their step is committed. Where a streamed record
//! spills its gradient to storage, a record in RAM keeps its gradient in memory here.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    num::NonZeroUsize,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard},
};

use memascend_math::{Check, Exec, FloatsMut, add, add_doubles};
use memascend_mem::locked;
use memascend_store::{Buffer, Dtype, LoggedRule, LoggedUpdate, StepHead, Store};

use crate::{
    Error, Gradient, Result,
    fill::copied,
    gradient::{Host, doubles},
    job::Work,
    spill::{measure, spill_dtype},
    turn::Turn,
    workbench::{Workbench, bytes_mut, floats},
};

/// An update of a record in RAM that waits for its step.
pub(crate) struct Waiting {
    pub(crate) record: usize,
    /// The number of this update in the record's count of updates.
    pub(crate) step: u64,
    pub(crate) work: Box<dyn Work>,
    /// Whether the update is applied in memory after the commit; otherwise the pipeline stages it before the commit.
    pub(crate) applies: bool,
    /// The update's rule for the log, if the log has its gradient.
    pub(crate) rule: Option<LoggedRule>,
}

/// Waiting updates and kept gradients of records in RAM.
#[derive(Default)]
pub(crate) struct RamTierGradients(Mutex<WaitingUpdates>);

#[derive(Default)]
pub(crate) struct WaitingUpdates {
    jobs: Vec<Waiting>,
    /// The records of `jobs`. This is a set because each new update looks up its record among thousands of jobs.
    records: HashSet<usize>,
    /// Gradients that are kept in memory instead of spilled, by record.
    kept: BTreeMap<usize, Arc<Kept>>,
    /// Bytes of gradients in `jobs` and `kept`. Each change updates this number, because summing thousands of jobs
    /// would take long.
    bytes: usize,
    peak: usize,
}

impl WaitingUpdates {
    /// Returns the bytes of gradients in `jobs` and `kept`.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the peak of [`WaitingUpdates::bytes`].
    pub(crate) fn peak(&self) -> usize {
        self.peak
    }

    fn add_bytes(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.peak = self.peak.max(self.bytes);
    }

    /// Removes the jobs for which `asked` is true, and returns them in their order.
    fn take(&mut self, asked: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let (taken, left): (Vec<_>, Vec<_>) = self.jobs.drain(..).partition(asked);
        self.jobs = left;
        for job in &taken {
            self.went(job);
        }
        taken
    }

    /// Subtracts the bytes of a job that was removed from `jobs`, and removes its record from `records`.
    fn went(&mut self, job: &Waiting) {
        self.bytes -= job.work.nbytes();
        self.records.remove(&job.record);
    }

    /// Sets or removes the kept gradient of a record, and returns the previous one.
    fn replace_kept(&mut self, record: usize, kept: Option<Kept>) -> Option<Arc<Kept>> {
        let bytes = kept.as_ref().map_or(0, |kept| kept.memory.len());
        let replaced = match kept {
            Some(kept) => self.kept.insert(record, Arc::new(kept)),
            None => self.kept.remove(&record),
        };
        self.bytes -= replaced.as_ref().map_or(0, |replaced| replaced.memory.len());
        self.add_bytes(bytes);
        replaced
    }
}

impl RamTierGradients {
    pub(crate) fn lock(&self) -> MutexGuard<'_, WaitingUpdates> {
        locked(&self.0)
    }

    /// Returns an error if an update of the record waits.
    pub(crate) fn require_none(&self, store: &Store, record: usize) -> Result<()> {
        if self.lock().records.contains(&record) {
            let name = &store.description().records[record].name;
            return Err(Error::Usage(format!("{name:?} is staged already; commit or discard that first")));
        }
        Ok(())
    }

    /// Adds a waiting update.
    pub(crate) fn wait(&self, waiting: Waiting) {
        let mut state = self.lock();
        state.add_bytes(waiting.work.nbytes());
        state.records.insert(waiting.record);
        state.jobs.push(waiting);
    }

    /// Returns the step's head for the log: the updates whose gradients the log has, and the deferred updates. Returns
    /// `None` if there are no such updates.
    pub(crate) fn head(&self, deferred: Vec<(usize, u64, LoggedRule)>) -> Option<StepHead> {
        let (mut head, mut numbers) = (StepHead::default(), HashMap::new());
        let state = self.lock();
        let appended = state.jobs.iter().filter_map(|job| Some((job.record, job.step, job.rule.clone()?)));
        for (record, step, rule) in appended.chain(deferred) {
            let next = u32::try_from(head.rules.len()).unwrap_or(u32::MAX);
            let number = *numbers.entry(rule.clone()).or_insert(next);
            if number == next {
                head.rules.push(rule);
            }
            head.updates.push(LoggedUpdate { record, rule: number, step });
        }
        (!head.updates.is_empty()).then_some(head)
    }

    /// Removes and returns the next update that the pipeline stages before the commit. The caller queues one update at
    /// a time, so an interrupt loses no update that is still in `jobs`.
    pub(crate) fn next_through(&self) -> Option<Waiting> {
        let mut state = self.lock();
        let at = state.jobs.iter().position(|job| !job.applies)?;
        let job = state.jobs.remove(at);
        state.went(&job);
        Some(job)
    }

    /// Returns record and update number of the updates that are applied in memory. The updates stay in `jobs`.
    pub(crate) fn applying(&self) -> Vec<(usize, u64)> {
        self.lock().jobs.iter().filter(|job| job.applies).map(|job| (job.record, job.step)).collect()
    }

    /// Removes and returns the updates that are applied in memory: first those by our own kernels, then calls of
    /// functions.
    pub(crate) fn take_applying(&self) -> (Vec<Waiting>, Vec<Waiting>) {
        let applying = self.lock().take(|job| job.applies);
        applying.into_iter().partition(|job| job.work.is_ours())
    }

    /// True if an update waits.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.lock().jobs.is_empty()
    }

    /// Drops waiting updates; if `record` is given, only that record's. Kept gradients stay.
    pub(crate) fn discard(&self, record: Option<usize>) {
        let dropped = self.lock().take(|job| record.is_none_or(|record| job.record == record));
        // Drop the callers' buffers without holding the lock.
        drop(dropped);
    }

    // --- gradients that are kept in memory instead of spilled -----------------------

    /// Keeps a gradient in memory. With `adds`, adds it to the kept gradient: computes in fp32 (float64 gradients: in
    /// float64), and rounds the sum once, to the kept gradient's dtype.
    pub(crate) fn keep(&self, store: &Store, record: usize, gradient: &Gradient, adds: bool) -> Result<()> {
        let dtype = spill_dtype(store, record)?;
        let given = gradient.memory()?;
        let memory = if adds { Host::new(self.sum(store, record, &**given, dtype)?) } else { given };
        let spilled = measured(store, record, &**memory, dtype)?;
        let replaced = self.lock().replace_kept(record, Some(Kept { memory, dtype, spilled }));
        drop(replaced);
        Ok(())
    }

    /// Returns the sum of the kept gradient and `given`, in new memory: the kept gradient may be in the caller's
    /// memory, which must not change.
    fn sum(&self, store: &Store, record: usize, given: &dyn Buffer, dtype: Dtype) -> Result<Box<Own>> {
        let kept = self.kept(record).ok_or_else(|| crate::spill::nothing(store, record))?;
        let mut own = Own::copy_of(&**kept.memory);
        let count = own.len() / dtype.bytes() as usize;
        if dtype == Dtype::F64 {
            add_doubles(own.doubles(), doubles(given, 0, count))?;
            return Ok(Box::new(own));
        }
        add(own.floats(dtype, count), floats(given, dtype, 0, count), Exec::new(NonZeroUsize::MIN)?)?;
        Ok(Box::new(own))
    }

    pub(crate) fn kept(&self, record: usize) -> Option<Arc<Kept>> {
        self.lock().kept.get(&record).map(Arc::clone)
    }

    pub(crate) fn forget(&self, record: usize) {
        let dropped = self.lock().replace_kept(record, None);
        drop(dropped);
    }
}

/// A gradient of a record in RAM. It is kept in memory, while a streamed record would spill it to storage.
pub(crate) struct Kept {
    pub(crate) memory: Arc<Host>,
    pub(crate) dtype: Dtype,
    pub(crate) spilled: Check,
}

impl Kept {
    /// Copies a chunk of the gradient to the part of the staging chunk into which a spilled gradient would be read.
    pub(crate) fn lay(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let (part, used) = bench.spill_part(turn.record, turn.index, &turn.memory)?;
        let element = self.dtype.bytes() as usize;
        let start = bench.elements(turn.record, turn.index).start * element;
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        copied(&**self.memory, start, &mut unsafe { bytes_mut(&part) }[..used]);
        Ok(())
    }

    /// Copies the whole gradient to `into`.
    pub(crate) fn read(&self, store: &Store, record: usize, into: &mut dyn Buffer) -> Result<()> {
        if into.len() != self.memory.len() {
            let (name, wanted, got) = (&store.description().records[record].name, self.memory.len(), into.len());
            return Err(Error::Invalid(format!("the gradient of {name:?} has {wanted} bytes, not {got}")));
        }
        // SAFETY: both buffers are mapped while they are borrowed, and have the same length; `into` is borrowed
        // exclusively.
        unsafe { std::ptr::copy_nonoverlapping(self.memory.as_ptr(), into.as_mut_ptr().as_ptr(), into.len()) };
        Ok(())
    }
}

/// Returns the check (finite or not, sum of squares) of a gradient, merged chunk by chunk as for a spilled gradient.
fn measured(store: &Store, record: usize, memory: &dyn Buffer, dtype: Dtype) -> Result<Check> {
    let (mut found, exec) = (Check::NOTHING, Exec::new(NonZeroUsize::MIN)?);
    let mut start = 0;
    for chunk in 0..store.layout().chunks_of(record) {
        let count = store.description().elements_of_chunk(record, chunk);
        found.merge(&measure(memory, dtype, start, count, exec));
        start += count;
    }
    Ok(found)
}

/// A gradient in memory that the engine owns, aligned for any dtype.
struct Own {
    words: Vec<u64>,
    nbytes: usize,
}

impl Own {
    fn copy_of(memory: &dyn Buffer) -> Self {
        let nbytes = memory.len();
        let mut words = vec![0_u64; nbytes.div_ceil(size_of::<u64>())];
        // SAFETY: `words` has at least `nbytes` bytes, which are initialised and borrowed by nothing else.
        let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), nbytes) };
        copied(memory, 0, bytes);
        Self { words, nbytes }
    }

    fn doubles(&mut self) -> &mut [f64] {
        // SAFETY: `u64` has the size and alignment of `f64`, every bit pattern is an `f64`, and `self` is borrowed
        // exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len()) }
    }

    fn floats(&mut self, dtype: Dtype, count: usize) -> FloatsMut<'_> {
        let (first, bytes) = (self.words.as_mut_ptr(), dtype.bytes() as usize);
        assert!(count * bytes <= self.nbytes, "elements past the end of a gradient");
        match dtype {
            // SAFETY: the assertion above keeps the elements inside `words`, which is aligned for the three types and
            // borrowed exclusively. Every bit pattern is a float.
            Dtype::F32 => FloatsMut::F32(unsafe { std::slice::from_raw_parts_mut(first.cast(), count) }),
            // SAFETY: as above.
            Dtype::Bf16 => FloatsMut::Bf16(unsafe { std::slice::from_raw_parts_mut(first.cast(), count) }),
            // SAFETY: as above.
            _ => FloatsMut::F16(unsafe { std::slice::from_raw_parts_mut(first.cast(), count) }),
        }
    }
}

// SAFETY: nothing resizes `words`, so its memory stays at one address while `self` lives.
unsafe impl Buffer for Own {
    fn as_ptr(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }

    fn as_mut_ptr(&mut self) -> NonNull<u8> {
        NonNull::from(self.words.as_mut_slice()).cast()
    }

    fn len(&self) -> usize {
        self.nbytes
    }
}
