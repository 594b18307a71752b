//! Holds back the updates of records in RAM until their step ends. Keeps the spilled gradients of these records in
//! memory. The spilled gradient of any other record goes to storage.

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

/// An update of a record in RAM that is held back until the step ends.
pub(crate) struct Waiting {
    pub(crate) record: usize,
    /// The number of this update, counted from 1 over all updates of the record.
    pub(crate) step: u64,
    pub(crate) work: Box<dyn Work>,
    /// True if the update is applied in memory after the commit. Otherwise the pipeline stages the update before the
    /// commit.
    pub(crate) applies: bool,
    /// The rule that the log stores for this update. `None` if the gradient is not in the log.
    pub(crate) rule: Option<LoggedRule>,
}

/// The waiting updates and the kept gradients of all records in RAM.
#[derive(Default)]
pub(crate) struct RamTierGradients(Mutex<WaitingUpdates>);

#[derive(Default)]
pub(crate) struct WaitingUpdates {
    jobs: Vec<Waiting>,
    /// The records of `jobs`. A set is used because each new update looks up its record among thousands of jobs.
    records: HashSet<usize>,
    /// The gradients that are kept in memory and not spilled, by record.
    kept: BTreeMap<usize, Arc<Kept>>,
    /// The sum of `Work::nbytes` of `jobs`, and the bytes of the gradients in `kept`. Each change updates this number,
    /// because summing thousands of jobs would take long.
    bytes: usize,
    peak: usize,
}

impl WaitingUpdates {
    /// Returns the bytes of the tensors that `jobs` and `kept` hold.
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

    /// Removes the jobs for which `asked` returns true, and returns these jobs in the order of `jobs`.
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

    /// Sets or removes the kept gradient of a record. Returns the gradient that was kept before.
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
            return Err(Error::Usage(format!(
                "an update of {name:?} is staged already; commit or discard the step first"
            )));
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

    /// Returns the head that the log stores for the step. The head lists the updates whose gradients are in the log,
    /// and the deferred updates. Returns `None` if the step has neither kind of update.
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

    /// Removes and returns the next update that the pipeline stages before the commit. The caller takes and queues one
    /// update at a time. So the remaining updates are still in `jobs` if Ctrl-C interrupts the caller.
    pub(crate) fn next_through(&self) -> Option<Waiting> {
        let mut state = self.lock();
        let at = state.jobs.iter().position(|job| !job.applies)?;
        let job = state.jobs.remove(at);
        state.went(&job);
        Some(job)
    }

    /// Returns the record and the number of each update that is applied in memory after the commit. The updates stay in
    /// `jobs`.
    pub(crate) fn applying(&self) -> Vec<(usize, u64)> {
        self.lock().jobs.iter().filter(|job| job.applies).map(|job| (job.record, job.step)).collect()
    }

    /// Removes and returns the updates that are applied in memory after the commit. The first list has the updates by
    /// kernels of this library. The second list has the calls of functions of the user.
    pub(crate) fn take_applying(&self) -> (Vec<Waiting>, Vec<Waiting>) {
        let applying = self.lock().take(|job| job.applies);
        applying.into_iter().partition(|job| job.work.is_ours())
    }

    /// True if an update waits.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.lock().jobs.is_empty()
    }

    /// Drops the waiting updates. If `record` is given, drops only the update of this record. The kept gradients stay.
    pub(crate) fn discard(&self, record: Option<usize>) {
        let dropped = self.lock().take(|job| record.is_none_or(|record| job.record == record));
        // Drop the callers' buffers without holding the lock.
        drop(dropped);
    }

    // --- gradients that are kept in memory instead of spilled -----------------------

    /// Keeps a gradient in memory. With `adds`, adds `gradient` to the gradient that is kept already. Computes this sum
    /// in float32, or in float64 for float64 gradients. Rounds the sum once, to the dtype of the kept gradient.
    pub(crate) fn keep(&self, store: &Store, record: usize, gradient: &Gradient, adds: bool) -> Result<()> {
        let dtype = spill_dtype(store, record)?;
        let given = gradient.memory()?;
        let memory = if adds { Host::new(self.sum(store, record, &**given, dtype)?) } else { given };
        let spilled = measured(store, record, &**memory, dtype)?;
        let replaced = self.lock().replace_kept(record, Some(Kept { memory, dtype, spilled }));
        drop(replaced);
        Ok(())
    }

    /// Returns the sum of the kept gradient and `given`, in new memory. The kept gradient itself must not change,
    /// because it may be in memory of the caller.
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

/// The gradient of a record in RAM. It is kept in memory instead of spilled to storage.
pub(crate) struct Kept {
    pub(crate) memory: Arc<Host>,
    pub(crate) dtype: Dtype,
    pub(crate) spilled: Check,
}

impl Kept {
    /// Copies a chunk of the gradient to the staging chunk, to the part that is reserved for a spilled gradient.
    pub(crate) fn lay(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let (part, used) = bench.spill_part(turn.record, turn.index, &turn.memory)?;
        let element = self.dtype.bytes() as usize;
        let start = bench.elements(turn.record, turn.index).start * element;
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        copied(&**self.memory, start, &mut unsafe { bytes_mut(&part) }[..used]);
        Ok(())
    }

    /// Copies the whole gradient to `into`. Returns an error if `into` has another size.
    pub(crate) fn read(&self, store: &Store, record: usize, into: &mut dyn Buffer) -> Result<()> {
        if into.len() != self.memory.len() {
            let (name, wanted, got) = (&store.description().records[record].name, self.memory.len(), into.len());
            return Err(Error::Invalid(format!(
                "the gradient of {name:?} has {wanted} bytes, but the memory for it has {got}: give memory of the \
                 gradient's size"
            )));
        }
        // SAFETY: both buffers are mapped while they are borrowed, and have the same length; `into` is borrowed
        // exclusively.
        unsafe { std::ptr::copy_nonoverlapping(self.memory.as_ptr(), into.as_mut_ptr().as_ptr(), into.len()) };
        Ok(())
    }
}

/// Returns the [`Check`] of a gradient: whether all elements are finite, and the sum of their squares. Checks one chunk
/// after the other, as a `Spill` job does.
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

/// A gradient in memory that the engine has allocated. The memory is aligned for any dtype.
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
            // SAFETY: the assertion above keeps the elements inside `words`, and `words` is borrowed exclusively.
            Dtype::Bf16 => FloatsMut::Bf16(unsafe { std::slice::from_raw_parts_mut(first.cast(), count) }),
            // SAFETY: the assertion above keeps the elements inside `words`, and `words` is borrowed exclusively.
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
