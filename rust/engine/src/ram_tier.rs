//! Gradients of records in RAM: they wait in memory until a step is committed, also those that others would spill.

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
    /// The record's count of updates, this one included.
    pub(crate) step: u64,
    pub(crate) work: Box<dyn Work>,
    /// It is applied in memory once the step is committed; else it goes through the pipeline before.
    pub(crate) applies: bool,
    /// What the log says of it, where its gradient is appended there.
    pub(crate) rule: Option<LoggedRule>,
}

/// What waits of records in RAM.
#[derive(Default)]
pub(crate) struct RamTierGradients(Mutex<WaitingUpdates>);

#[derive(Default)]
pub(crate) struct WaitingUpdates {
    jobs: Vec<Waiting>,
    /// The records of these: one of thousands is looked for with each gradient.
    records: HashSet<usize>,
    kept: BTreeMap<usize, Arc<Kept>>,
    /// Bytes of gradients of both, kept as they come and go for the same reason.
    bytes: usize,
    peak: usize,
}

impl WaitingUpdates {
    /// Bytes of gradients.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The most of them.
    pub(crate) fn peak(&self) -> usize {
        self.peak
    }

    fn add_bytes(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.peak = self.peak.max(self.bytes);
    }

    /// Takes the jobs that are asked for, in their order.
    fn take(&mut self, asked: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let (taken, left): (Vec<_>, Vec<_>) = self.jobs.drain(..).partition(asked);
        self.jobs = left;
        for job in &taken {
            self.went(job);
        }
        taken
    }

    fn went(&mut self, job: &Waiting) {
        self.bytes -= job.work.nbytes();
        self.records.remove(&job.record);
    }

    /// Keeps the gradient of a record, or none; the one that was kept.
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

    /// Refuses a record of which an update waits.
    pub(crate) fn require_none(&self, store: &Store, record: usize) -> Result<()> {
        if self.lock().records.contains(&record) {
            let name = &store.description().records[record].name;
            return Err(Error::Usage(format!("{name:?} is staged already; commit or discard that first")));
        }
        Ok(())
    }

    /// Lets an update wait.
    pub(crate) fn wait(&self, waiting: Waiting) {
        let mut state = self.lock();
        state.add_bytes(waiting.work.nbytes());
        state.records.insert(waiting.record);
        state.jobs.push(waiting);
    }

    /// What the log says of the updates whose gradients are appended there, and of those that are deferred, if there are any.
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

    /// Those that go through the pipeline; the next one, so that one that is interrupted takes no other with it.
    pub(crate) fn next_through(&self) -> Option<Waiting> {
        let mut state = self.lock();
        let at = state.jobs.iter().position(|job| !job.applies)?;
        let job = state.jobs.remove(at);
        state.went(&job);
        Some(job)
    }

    /// Those that are applied in memory, which stay until they are taken.
    pub(crate) fn applying(&self) -> Vec<(usize, u64)> {
        self.lock().jobs.iter().filter(|job| job.applies).map(|job| (job.record, job.step)).collect()
    }

    /// Takes these: those of our own arithmetic, and calls of a function.
    pub(crate) fn take_applying(&self) -> (Vec<Waiting>, Vec<Waiting>) {
        let applying = self.lock().take(|job| job.applies);
        applying.into_iter().partition(|job| job.work.is_ours())
    }

    /// Whether an update waits.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.lock().jobs.is_empty()
    }

    /// Drops what waits, of one record alone if one is given. What is kept stays.
    pub(crate) fn discard(&self, record: Option<usize>) {
        let dropped = self.lock().take(|job| record.is_none_or(|record| job.record == record));
        // A caller's memory is let go without the lock.
        drop(dropped);
    }

    // --- gradients that others would spill ------------------------------------------

    /// Keeps a gradient, or adds it to the one that is kept, in its dtype, computed in fp32 and rounded once.
    pub(crate) fn keep(&self, store: &Store, record: usize, gradient: &Gradient, adds: bool) -> Result<()> {
        let dtype = spill_dtype(store, record)?;
        let given = gradient.memory()?;
        let memory = if adds { Host::new(self.sum(store, record, &**given, dtype)?) } else { given };
        let spilled = measured(store, record, &**memory, dtype)?;
        let replaced = self.lock().replace_kept(record, Some(Kept { memory, dtype, spilled }));
        drop(replaced);
        Ok(())
    }

    /// The sum of what is kept and what is given. What is kept may be the caller's, so it stays as it is.
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

/// A gradient that is kept in memory as others are spilled.
pub(crate) struct Kept {
    pub(crate) memory: Arc<Host>,
    pub(crate) dtype: Dtype,
    pub(crate) spilled: Check,
}

impl Kept {
    /// Copies a chunk to where a staging chunk has what was read of a spilled gradient.
    pub(crate) fn lay(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let (part, used) = bench.spill_part(turn.record, turn.index, &turn.memory)?;
        let element = self.dtype.bytes() as usize;
        let start = bench.elements(turn.record, turn.index).start * element;
        // SAFETY: nothing is in flight of this chunk, which is this turn's.
        copied(&**self.memory, start, &mut unsafe { bytes_mut(&part) }[..used]);
        Ok(())
    }

    /// Copies all of it to memory that nobody else uses.
    pub(crate) fn read(&self, store: &Store, record: usize, into: &mut dyn Buffer) -> Result<()> {
        if into.len() != self.memory.len() {
            let (name, wanted, got) = (&store.description().records[record].name, self.memory.len(), into.len());
            return Err(Error::Invalid(format!("the gradient of {name:?} has {wanted} bytes, not {got}")));
        }
        // SAFETY: both are mapped while they are held, and of one length; `into` is the caller's.
        unsafe { std::ptr::copy_nonoverlapping(self.memory.as_ptr(), into.as_mut_ptr().as_ptr(), into.len()) };
        Ok(())
    }
}

/// As a spilled gradient is measured: chunk by chunk.
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

/// Memory of our own for a gradient.
struct Own {
    words: Vec<u64>,
    nbytes: usize,
}

impl Own {
    fn copy_of(memory: &dyn Buffer) -> Self {
        let nbytes = memory.len();
        let mut words = vec![0_u64; nbytes.div_ceil(size_of::<u64>())];
        // SAFETY: room for at least as many bytes, initialised, and ours alone.
        let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), nbytes) };
        copied(memory, 0, bytes);
        Self { words, nbytes }
    }

    fn doubles(&mut self) -> &mut [f64] {
        // SAFETY: words are as long and aligned as a float64, of which any bits are one; they are ours alone.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len()) }
    }

    fn floats(&mut self, dtype: Dtype, count: usize) -> FloatsMut<'_> {
        let (first, bytes) = (self.words.as_mut_ptr(), dtype.bytes() as usize);
        assert!(count * bytes <= self.nbytes, "elements past the end of a gradient");
        match dtype {
            // SAFETY: inside the memory, which is aligned for any of the three and ours alone; any bits are a float.
            Dtype::F32 => FloatsMut::F32(unsafe { std::slice::from_raw_parts_mut(first.cast(), count) }),
            // SAFETY: as above.
            Dtype::Bf16 => FloatsMut::Bf16(unsafe { std::slice::from_raw_parts_mut(first.cast(), count) }),
            // SAFETY: as above.
            _ => FloatsMut::F16(unsafe { std::slice::from_raw_parts_mut(first.cast(), count) }),
        }
    }
}

// SAFETY: the words stay where they are for as long as it lives.
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
