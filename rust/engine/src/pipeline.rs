//! The pipeline: reads, arithmetic and writes of different chunks at once, in a fixed order.
//!
//! Chunks are taken in the order of the queue, across parameters. Half of the staging chunks are ahead, being read; one
//! is being computed; the others are being written. The order of operations depends on the jobs alone, never on time, so
//! that a run on a simulated device can be repeated.

use std::{collections::VecDeque, mem, num::NonZeroUsize, rc::Rc, time::Instant};

use memascend_math::{Bf16, Exec, F16, FloatsMut, Scalars, State as AdamState, adam};
use memascend_mem::{ChunkRing, Lease, OwnerId, Wait};
use memascend_store::{Buffer, Dtype, PieceRead, PieceWrite, Shared, Store};

use crate::{Counters, Error, Gradient, Result, queue::Queue};

/// Staging chunks unless the caller says otherwise.
pub const CHUNKS_DEFAULT: usize = 4;

/// One parameter's update.
pub(crate) struct Job {
    pub(crate) entry: usize,
    pub(crate) gradient: Gradient,
    pub(crate) scalars: Scalars,
    /// The entry's count of updates, this one included.
    pub(crate) step: u64,
}

impl Job {
    pub(crate) fn nbytes(&self) -> usize {
        self.gradient.nbytes()
    }
}

/// A chunk that is being read.
struct Reading<'a> {
    job: Rc<Job>,
    chunk: u32,
    state: PieceRead<'a, Shared>,
    values: Values<'a>,
}

/// The values of a chunk.
enum Values<'a> {
    /// Room for what the update computes: the state has a master.
    Room(Shared),
    /// They are the master themselves.
    Master(PieceRead<'a, Shared>),
}

/// A chunk that is being written.
struct Writing<'a> {
    writes: [PieceWrite<'a, Shared>; 2],
}

/// What the pipeline's thread works with.
pub(crate) struct Pipeline<'a> {
    store: &'a Store,
    queue: &'a Queue,
    ring: &'a ChunkRing,
    owner: OwnerId,
    chunks: usize,
    state_bytes_max: usize,
    exec: Exec,
    current: Option<(Rc<Job>, u32)>,
    reading: VecDeque<Reading<'a>>,
    writing: VecDeque<Writing<'a>>,
    counters: Counters,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(
        store: &'a Store,
        queue: &'a Queue,
        ring: &'a ChunkRing,
        owner: OwnerId,
        chunks: usize,
    ) -> Result<Self> {
        let (state_bytes_max, _) = store.description().staging_bytes();
        Ok(Self {
            store,
            queue,
            ring,
            owner,
            chunks,
            state_bytes_max: usize::try_from(state_bytes_max).unwrap_or(usize::MAX),
            exec: Exec::new(NonZeroUsize::MIN)?,
            current: None,
            reading: VecDeque::with_capacity(chunks),
            writing: VecDeque::with_capacity(chunks),
            counters: Counters::default(),
        })
    }

    /// Works until the engine closes.
    pub(crate) fn serve(&mut self) {
        loop {
            let result = self.turn();
            if let Err(error) = result {
                self.fail(error);
            }
            let mut state = self.queue.lock();
            let idle = mem::take(&mut self.counters);
            merge(&mut state.counters, &idle);
            if state.closing && state.is_idle() && self.is_empty() {
                return;
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.current.is_none() && self.reading.is_empty() && self.writing.is_empty()
    }

    /// One chunk further.
    fn turn(&mut self) -> Result<()> {
        // At least one is ahead, and at most half.
        let ahead_max = self.chunks.div_ceil(2);
        while self.reading.len() < ahead_max {
            let Some((job, chunk)) = self.next_chunk()? else { break };
            if self.reading.len() + self.writing.len() == self.chunks {
                self.finish_write()?;
            }
            self.begin_read(job, chunk)?;
        }
        if let Some(reading) = self.reading.pop_front() {
            return self.compute(reading);
        }
        // Nothing is ahead: what is being written is all there is.
        while !self.writing.is_empty() {
            self.finish_write()?;
        }
        self.queue.notify();
        Ok(())
    }

    /// The next chunk of the job at hand, or of the next job. Waits for one only when nothing is in flight.
    fn next_chunk(&mut self) -> Result<Option<(Rc<Job>, u32)>> {
        loop {
            if let Some((job, chunk)) = self.current.take() {
                if chunk < self.store.layout().chunks_of(job.entry) {
                    self.current = Some((Rc::clone(&job), chunk + 1));
                    return Ok(Some((job, chunk)));
                }
                self.retire(job);
            }
            let or_wait = self.reading.is_empty() && self.writing.is_empty();
            let Some(job) = self.queue.next(or_wait) else { return Ok(None) };
            let (entry, step) = (job.entry, job.step);
            self.current = Some((Rc::new(job), 0));
            self.store.begin(entry, step, Wait::forever())?;
        }
    }

    /// Lets go of a job whose last chunk has been computed, or will be: the last hold ends it.
    fn retire(&mut self, job: Rc<Job>) {
        if let Some(job) = Rc::into_inner(job) {
            self.counters.updates += 1;
            let bytes = job.nbytes();
            drop(job);
            self.queue.lock().done(bytes);
            self.queue.notify();
        }
    }

    fn begin_read(&mut self, job: Rc<Job>, chunk: u32) -> Result<()> {
        let began = Instant::now();
        let lease = self.ring.lease(self.owner, Wait::forever())?;
        let read = self.reads(&job, chunk, lease);
        self.counters.reading += began.elapsed();
        match read {
            Ok((state, values)) => self.reading.push_back(Reading { job, chunk, state, values }),
            Err(error) => {
                self.retire(job);
                return Err(error);
            }
        }
        Ok(())
    }

    fn reads(&self, job: &Job, chunk: u32, lease: Lease) -> Result<(PieceRead<'a, Shared>, Values<'a>)> {
        let (store, memory) = (self.store, Shared::new(lease));
        let part = |start, piece: u32| {
            let bytes = store.layout().piece(store.description(), job.entry, piece).bytes();
            let part = memory.part(start, usize::try_from(bytes).unwrap_or(usize::MAX));
            part.ok_or_else(|| Error::Invalid("a piece is larger than a staging chunk".into()))
        };
        let chunks = store.layout().chunks_of(job.entry);
        let values = part(self.state_bytes_max, chunk)?;
        let values = match store.description().entries[job.entry].dtype {
            Dtype::F32 => Values::Master(store.read(job.entry, chunk, values)?),
            _ => Values::Room(values),
        };
        Ok((store.read(job.entry, chunks + chunk, part(0, chunks + chunk)?)?, values))
    }

    fn compute(&mut self, reading: Reading<'a>) -> Result<()> {
        let Reading { job, chunk, state, values } = reading;
        let computed = self.computed(&job, chunk, state, values);
        self.retire(job);
        computed
    }

    fn computed(&mut self, job: &Job, chunk: u32, state: PieceRead<'a, Shared>, values: Values<'a>) -> Result<()> {
        let began = Instant::now();
        let (state, _) = state.wait()?;
        let values = match values {
            Values::Room(values) => values,
            Values::Master(read) => {
                let (values, _) = read.wait()?;
                self.counters.values_read += values.len() as u64;
                values
            }
        };
        let read = Instant::now();
        self.counters.reading += read - began;
        self.update(job, chunk, &state, &values)?;
        let computed = Instant::now();
        self.counters.computing += computed - read;
        self.counters.chunks += 1;
        self.counters.state_read += state.len() as u64;
        self.counters.state_written += state.len() as u64;
        self.counters.values_written += values.len() as u64;
        let chunks = self.store.layout().chunks_of(job.entry);
        let state = self.store.stage(job.entry, chunks + chunk, state);
        let values = self.store.stage(job.entry, chunk, values);
        self.counters.sealing += computed.elapsed();
        // Both are kept if one failed: dropping a write waits for it.
        let (state, values) = (state?, values?);
        self.writing.push_back(Writing { writes: [state, values] });
        Ok(())
    }

    /// The arithmetic on one chunk.
    fn update(&self, job: &Job, chunk: u32, state: &Shared, values: &Shared) -> Result<()> {
        let description = self.store.description();
        let elements = description.elements_of_chunk(job.entry, chunk);
        let dtype = description.entries[job.entry].dtype;
        let mut starts = description.in_chunk(job.entry, elements).map(|(_, start, _)| start);
        let memory = state.as_ptr().as_ptr();
        let mut next = || {
            let start = starts.next().ok_or_else(|| Error::Invalid("an entry without Adam's state".into()))?;
            // SAFETY: the tensors of a chunk lie side by side in its piece, aligned to 64 bytes; nothing else uses the
            // chunk between the end of its reads and the beginning of its writes.
            Ok::<_, Error>(unsafe { elements_mut::<f32>(memory, start, elements) })
        };
        let gradient = job.gradient.part(chunk as usize * description.chunk_elements as usize, elements);
        let memory = values.as_ptr().as_ptr();
        let used = elements * usize::try_from(dtype.bytes()).unwrap_or(1);
        // SAFETY: inside the piece; what fills its last page is written as zeros.
        unsafe { elements_mut::<u8>(memory, used, values.len() - used) }.fill(0);
        let (master, out) = match dtype {
            Dtype::F32 => {
                // SAFETY: as for the state, in the part of the chunk that is for values.
                (unsafe { elements_mut::<f32>(memory, 0, elements) }, None)
            }
            Dtype::Bf16 => {
                // SAFETY: as above.
                (next()?, Some(FloatsMut::Bf16(unsafe { elements_mut::<Bf16>(memory, 0, elements) })))
            }
            _ => {
                // SAFETY: as above.
                (next()?, Some(FloatsMut::F16(unsafe { elements_mut::<F16>(memory, 0, elements) })))
            }
        };
        let state = AdamState { master, exp_avg: next()?, exp_avg_sq: next()? };
        Ok(adam(state, gradient, out, &job.scalars, self.exec)?)
    }

    fn finish_write(&mut self) -> Result<()> {
        let Some(writing) = self.writing.pop_front() else { return Ok(()) };
        let began = Instant::now();
        let mut result = Ok(());
        for write in writing.writes {
            if let Err(error) = write.wait() {
                result = Err(error.into());
            }
        }
        self.counters.writing += began.elapsed();
        result
    }

    /// Ends the step: what waits is dropped, what is in flight is drained, the first error is kept.
    fn fail(&mut self, error: Error) {
        self.writing.clear();
        for Reading { job, state, values, .. } in mem::take(&mut self.reading) {
            drop((state, values));
            self.retire(job);
        }
        if let Some((job, _)) = self.current.take() {
            self.retire(job);
        }
        let mut state = self.queue.lock();
        state.failed.get_or_insert(error);
        let waiting = state.drop_waiting();
        drop(state);
        drop(waiting);
        self.queue.notify();
    }
}

fn merge(into: &mut Counters, from: &Counters) {
    into.updates += from.updates;
    into.chunks += from.chunks;
    into.state_read += from.state_read;
    into.values_read += from.values_read;
    into.state_written += from.state_written;
    into.values_written += from.values_written;
    into.reading += from.reading;
    into.computing += from.computing;
    into.sealing += from.sealing;
    into.writing += from.writing;
}

/// # Safety
/// `memory + start` is aligned for `T` and holds `count` of them, initialised, that nothing else uses while the slice lives.
unsafe fn elements_mut<'a, T>(memory: *mut u8, start: usize, count: usize) -> &'a mut [T] {
    // SAFETY: the caller's.
    let first = unsafe { memory.add(start) }.cast::<T>();
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts_mut(first, count) }
}
