//! Overlaps reads, arithmetic and writes of several turns, in a fixed order.
//!
//! The pipeline runs the turns of jobs in the order of the queue, and the turns of urgent jobs before all others. It
//! computes one turn at a time. Meanwhile it reads the next turns into half of the staging chunks, and writes earlier
//! turns from the other half. With the same jobs in the queue, the order of operations never depends on how long an
//! operation takes, so that a run on a simulated device can be repeated. The pipeline begins a job that is not urgent
//! after all operations of earlier jobs of the same record have ended.
//!
//! A function that gets a whole record runs on the thread of [`Caller`]. Meanwhile the pipeline writes the previous
//! whole record and reads the next whole record, if the engine has memory for two whole records. The pipeline never
//! polls the call. It waits for the call in three cases: before it starts the next function, if nothing else is left to
//! do, and after an error. So two functions never run at once. A turn that frees the memory of a whole record waits for
//! earlier turns only, so there is no deadlock.

use std::{
    cell::Cell,
    collections::VecDeque,
    mem,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use memascend_mem::Wait;
use memascend_store::{Scratch, Shared, Store};

use crate::{
    Counters, Error, Result,
    caller::Caller,
    job::{Job, Work},
    queue::Queue,
    turn::{Leaves, Mark, Turn},
    workbench::{Read, Workbench, Write},
};

/// The default number of staging chunks. A benchmark simulated a disk that reaches its full speed only with four
/// requests of 1 MiB in flight, and used a spin loop as the arithmetic. With 4 chunks, the pipeline reached 0.8 of the
/// speed of I/O without arithmetic. With 12 chunks, it reached at least 0.95. With 16 chunks, it was no faster than
/// with 12.
pub const CHUNKS_DEFAULT: usize = 12;
/// The longest time that the pipeline waits for a staging chunk. A chunk becomes free when its turn has ended. If no
/// chunk becomes free within this time, functions of the user have kept tensors of chunks.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// A job that has begun. Rust drops the fields in the order of their declaration. So `work` drops the caller's tensors
/// before `_room` subtracts the bytes of these tensors from the queue.
struct Begun<'a> {
    work: Box<dyn Work>,
    turns: u32,
    /// The turn in which [`Caller`] calls a function on a separate thread. `None` if the job has no such turn.
    called_at: Option<u32>,
    _room: Room<'a>,
    running: Rc<Running<'a>>,
}

/// The bytes that a job occupies in the queue. Dropping a `Room` frees these bytes.
struct Room<'a> {
    queue: &'a Queue,
    nbytes: usize,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.queue.lock().queued_bytes -= self.nbytes;
        self.queue.notify();
    }
}

/// Keeps a job among the running jobs of the queue. The value is dropped after the last operation of the job has ended,
/// also if the job has failed or was cancelled.
struct Running<'a> {
    store: &'a Store,
    queue: &'a Queue,
    mark: Arc<Mark>,
    /// True once a write of the job has failed, or [`Pipeline::fail`] has dropped a write of the job.
    failed: Cell<bool>,
}

impl Running<'_> {
    /// Records an error of the job before the job ends. So a caller that finds the job ended, or finds no spilled
    /// gradient, also finds the reason. The queue keeps only the first error of a step. An error of an urgent job ends
    /// only this job, and the step continues.
    fn record_error(&self, result: Result<()>) -> Result<()> {
        let Err(error) = &result else { return Ok(()) };
        if self.mark.urgent {
            self.mark.fail(error);
            return Ok(());
        }
        self.queue.lock().failed.get_or_insert_with(|| error.clone());
        result
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let whole = self.mark.is_completed() && !self.mark.is_cancelled() && !self.failed.get();
        if !whole {
            lose_spilled(self.store, &self.mark);
        }
        self.queue.lock().ended(&self.mark);
        self.queue.notify();
    }
}

/// Forgets the spilled gradient of a record, if the job with this mark should have written the gradient. Call this if
/// the job failed, or was cancelled or dropped: the store then does not have the gradient that the caller spilled.
pub(crate) fn lose_spilled(store: &Store, mark: &Mark) {
    if mark.leaves == Leaves::Gradient {
        // `set_spilled` fails only for a record without a place for gradients.
        drop(store.set_spilled(mark.record, None));
    }
}

impl Begun<'_> {
    /// True if the turn calls a function of the user, on the thread of the pipeline or on the thread of [`Caller`].
    fn calls(&self, turn: u32) -> bool {
        self.called_at.map_or_else(|| !self.work.is_ours(), |called_at| called_at == turn)
    }
}

/// A turn that is being read. Rust drops `reads` before `turn`. So the reads have ended before `turn` frees the staging
/// chunk.
struct Reading<'a> {
    reads: Vec<Read<'a>>,
    turn: Turn,
    job: Rc<Begun<'a>>,
}

/// A turn that is being written.
struct Writing<'a> {
    writes: Vec<Write<'a>>,
    running: Rc<Running<'a>>,
}

/// The state of the pipeline's thread.
pub(crate) struct Pipeline<'a> {
    /// This field comes first, so that a panic drops it first. The drop waits for the running call, which uses data of
    /// the job in `calling`.
    caller: Caller,
    bench: Workbench<'a>,
    queue: &'a Queue,
    staging: &'a Scratch,
    chunks: usize,
    /// The job that the pipeline is working on, and the next turn of this job.
    current: Option<(Rc<Begun<'a>>, u32)>,
    /// The urgent job that the pipeline is working on, and the next turn of this job. Its turns run before the turns of
    /// `current`.
    urgent: Option<(Rc<Begun<'a>>, u32)>,
    /// The job whose function `caller` runs now, and the turn of that call.
    calling: Option<(Rc<Begun<'a>>, u32)>,
    /// Jobs whose functions have returned, each with its next turn. These turns run before the turns of new jobs.
    called: VecDeque<(Rc<Begun<'a>>, u32)>,
    /// A job that the pipeline has taken from the queue but cannot begin yet.
    next: Option<Job>,
    reading: VecDeque<Reading<'a>>,
    writing: VecDeque<Writing<'a>>,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(
        queue: &'a Queue,
        staging: &'a Scratch,
        bench: Workbench<'a>,
        caller: Caller,
        chunks: usize,
    ) -> Self {
        let (reading, writing) = (VecDeque::with_capacity(chunks), VecDeque::with_capacity(chunks));
        let (current, urgent, calling, next) = (None, None, None, None);
        Self {
            caller,
            bench,
            queue,
            staging,
            chunks,
            current,
            urgent,
            calling,
            called: VecDeque::new(),
            next,
            reading,
            writing,
        }
    }

    /// Runs turns until the engine closes.
    pub(crate) fn serve(&mut self) {
        loop {
            let result = self.turn();
            if let Err(error) = result {
                self.fail(error);
            }
            let mut state = self.queue.lock();
            state.piped = self.bench.counters;
            if state.closing && state.is_idle() && self.is_empty() {
                return;
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.current.is_none()
            && self.urgent.is_none()
            && self.called.is_empty()
            && self.next.is_none()
            && self.is_still()
    }

    /// True if no turn is being read, called or written.
    fn is_still(&self) -> bool {
        self.reading.is_empty() && self.calling.is_none() && self.writing.is_empty()
    }

    /// Starts the reads of the next turns, then computes the first turn whose reads were started. If there is no such
    /// turn, waits for the writes, or for the function call if there are no writes.
    fn turn(&mut self) -> Result<()> {
        // Read at least one turn ahead. Use half of the staging chunks, rounded up, for turns that are being read.
        let ahead_max = self.chunks.div_ceil(2);
        while self.reading.len() < ahead_max {
            let Some((job, turn)) = self.next_turn()? else { break };
            if self.reading.len() + self.writing.len() == self.chunks {
                self.finish_write()?;
            }
            self.begin_read(job, turn)?;
        }
        if let Some(reading) = self.reading.pop_front() {
            return self.compute(reading);
        }
        // No turn is left to compute. Wait for the call only if there are no writes to wait for.
        if self.writing.is_empty() {
            self.finish_call()?;
        }
        while !self.writing.is_empty() {
            self.finish_write()?;
        }
        self.queue.notify();
        Ok(())
    }

    /// Returns the next turn to read. This is a turn of the urgent job, else of the current job, else of a job in
    /// `called`, else of a new job. Waits for a new job only if nothing is in flight. Returns `None` if there is no
    /// such turn, or if the next job cannot begin yet.
    fn next_turn(&mut self) -> Result<Option<(Rc<Begun<'a>>, u32)>> {
        loop {
            if let Some((job, turn)) = self.urgent.take() {
                if turn == job.turns || job.running.mark.is_cancelled() {
                    continue;
                }
                self.urgent = Some((Rc::clone(&job), turn + 1));
                return Ok(Some((job, turn)));
            }
            if let Some(job) = self.queue.next_urgent() {
                self.begin(job)?;
                continue;
            }
            while let Some((job, turn)) = self.current.take().or_else(|| self.called.pop_front()) {
                if turn == job.turns || job.running.mark.is_cancelled() {
                    continue;
                }
                // If this turn calls a function, `called` keeps the job after the call. So `current` must not keep the
                // job.
                if job.called_at != Some(turn) {
                    self.current = Some((Rc::clone(&job), turn + 1));
                }
                return Ok(Some((job, turn)));
            }
            let or_wait = self.is_still();
            let Some(job) = self.next.take().or_else(|| self.queue.next(or_wait)) else { return Ok(None) };
            // An urgent job does not wait, because it changes no data that an earlier job of the record uses.
            if !job.mark.urgent && self.is_in_flight(job.mark.record) {
                self.next = Some(job);
                return Ok(None);
            }
            if let Some(later) = self.begin(job)? {
                self.next = Some(later);
                return Ok(None);
            }
        }
    }

    /// True if a turn of the record is being read, called or written.
    fn is_in_flight(&self, record: usize) -> bool {
        self.reading.iter().any(|reading| reading.job.running.mark.record == record)
            || self.calling.iter().any(|(job, _)| job.running.mark.record == record)
            || self.writing.iter().any(|writing| writing.running.mark.record == record)
    }

    /// Begins a job, or drops the job if it is cancelled, and returns `None`. If the memory that the job needs is not
    /// free yet, returns the job instead.
    fn begin(&mut self, job: Job) -> Result<Option<Job>> {
        let claimed = if job.mark.is_cancelled() { Ok(true) } else { job.work.claim(&self.bench, job.mark.record) };
        if matches!(claimed, Ok(false)) && !self.is_still() {
            return Ok(Some(job));
        }
        let is_urgent = job.mark.urgent;
        let Job { work, mark } = job;
        let (queue, record) = (self.queue, mark.record);
        let room = Room { queue, nbytes: mark.nbytes };
        let running = Rc::new(Running { store: self.bench.store, queue, mark, failed: Cell::new(false) });
        if running.mark.is_cancelled() {
            return Ok(None);
        }
        running.record_error(claimed.and_then(|free| if free { Ok(()) } else { Err(kept()) }))?;
        let turns = work.turns(&self.bench, record);
        self.bench.beginning.replace(Some(Arc::clone(&running.mark)));
        let begun = work.begin(&self.bench, record);
        if begun.is_err() && running.mark.is_cancelled() {
            return Ok(None);
        }
        running.record_error(begun)?;
        if running.mark.is_cancelled() {
            return Ok(None);
        }
        if turns == 0 {
            count(&*work, &mut self.bench.counters);
            running.mark.complete();
            return Ok(None);
        }
        let called_at = work.called_at(&self.bench, record);
        let begun = Some((Rc::new(Begun { work, turns, called_at, _room: room, running }), 0));
        *(if is_urgent { &mut self.urgent } else { &mut self.current }) = begun;
        Ok(None)
    }

    fn begin_read(&mut self, job: Rc<Begun<'a>>, turn: u32) -> Result<()> {
        let running = Rc::clone(&job.running);
        running.record_error(self.read(job, turn))
    }

    fn read(&mut self, job: Rc<Begun<'a>>, turn: u32) -> Result<()> {
        let began = Instant::now();
        let lease = self.staging.lease(Wait::at_most(LEASE_TIMEOUT)).map_err(|error| match error {
            memascend_mem::Error::TimedOut { .. } => kept(),
            error => error.into(),
        })?;
        let turn = Turn { record: job.running.mark.record, index: turn, memory: Shared::new(lease) };
        let reads = job.work.reads(&self.bench, &turn);
        self.bench.counters.reading += began.elapsed();
        self.reading.push_back(Reading { reads: reads?, turn, job });
        Ok(())
    }

    fn compute(&mut self, reading: Reading<'a>) -> Result<()> {
        let running = Rc::clone(&reading.job.running);
        running.record_error(self.computed(reading))
    }

    fn computed(&mut self, reading: Reading<'a>) -> Result<()> {
        let Reading { reads, turn, job } = reading;
        if job.calls(turn.index) {
            self.finish_call()?;
        }
        if job.running.mark.is_cancelled() {
            return Ok(());
        }
        if job.called_at == Some(turn.index) {
            let call = job.work.call(&self.bench, &turn)?;
            self.caller.begin(self.queue, call)?;
            self.calling = Some((job, turn.index));
            return Ok(());
        }
        let bench = &mut self.bench;
        let began = Instant::now();
        for read in reads {
            bench.arrived(read)?;
        }
        let arrived = Instant::now();
        bench.counters.reading += arrived - began;
        job.work.compute(bench, &turn)?;
        let computed = Instant::now();
        bench.counters.computing += computed - arrived;
        bench.counters.chunks += 1;
        let writes = job.work.writes(bench, &turn);
        bench.counters.sealing += computed.elapsed();
        self.writing.push_back(Writing { writes: writes?, running: Rc::clone(&job.running) });
        if turn.index + 1 == job.turns {
            count(&*job.work, &mut bench.counters);
            job.running.mark.complete();
        }
        Ok(())
    }

    /// Waits for the function call that is running, if there is one. The remaining turns of the job that made the call
    /// then run before new jobs.
    fn finish_call(&mut self) -> Result<()> {
        let Some((job, turn)) = self.calling.take() else { return Ok(()) };
        let began = Instant::now();
        let result = self.caller.wait();
        self.bench.counters.computing += began.elapsed();
        self.bench.counters.chunks += 1;
        job.running.record_error(result)?;
        if turn + 1 == job.turns {
            count(&*job.work, &mut self.bench.counters);
            job.running.mark.complete();
        } else {
            self.called.push_back((job, turn + 1));
        }
        Ok(())
    }

    fn finish_write(&mut self) -> Result<()> {
        let Some(writing) = self.writing.pop_front() else { return Ok(()) };
        let began = Instant::now();
        let mut result = Ok(());
        for write in writing.writes {
            if let Err(error) = write.wait() {
                writing.running.failed.set(true);
                result = result.and(Err(error));
            }
        }
        self.bench.counters.writing += began.elapsed();
        writing.running.record_error(result)
    }

    /// Ends the step after an error: records the first error, drops all jobs that are not urgent, and waits for the
    /// operations of these jobs.
    fn fail(&mut self, error: Error) {
        let mut state = self.queue.lock();
        state.failed.get_or_insert(error);
        let mut waiting = state.drop_waiting(None);
        drop(state);
        // Urgent jobs continue, so keep their reads and writes.
        let (kept, ended) = mem::take(&mut self.writing).into_iter().partition(|one| one.running.mark.urgent);
        self.writing = kept;
        let ended: VecDeque<Writing<'_>> = ended;
        for writing in ended {
            writing.running.failed.set(true);
        }
        self.reading.retain(|reading| reading.job.running.mark.urgent);
        self.current = None;
        if let Some(job) = self.next.take() {
            self.queue.lock().dropped(&job);
            waiting.push(job);
        }
        for job in &waiting {
            lose_spilled(self.bench.store, &job.mark);
        }
        drop(waiting);
        // Wait for the call last, because `wait` panics if the function has panicked. The result of the call does not
        // matter, because the step has failed already.
        if let Some(calling) = self.calling.take() {
            drop(self.caller.wait());
            drop(calling);
        }
        self.called.clear();
        self.queue.notify();
    }
}

/// Increments the counter of a job whose last turn is computed.
fn count(work: &dyn Work, counters: &mut Counters) {
    if let Some(count) = work.counted(counters) {
        *count += 1;
    }
}

/// Returns the error for staging memory that is not free, although no operation in flight uses it.
fn kept() -> Error {
    Error::Usage(
        "a function returned but still holds tensors of its chunk: delete these tensors before the function returns"
            .into(),
    )
}
