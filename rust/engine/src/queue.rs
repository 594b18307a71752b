//! Queues jobs, bounded in bytes, so that the backward waits for a slower disk.

use std::{
    collections::VecDeque,
    sync::{Arc, MutexGuard, OnceLock},
    thread::{self, ThreadId},
    time::Instant,
};

use memascend_mem::{Guarded, Wait};

use crate::{
    Counters, Error, Result,
    job::Job,
    turn::{Leaves, Mark},
};

#[derive(Default)]
pub(crate) struct QueueState {
    jobs: VecDeque<Job>,
    /// Those that go before.
    urgent: VecDeque<Job>,
    /// Jobs that were taken and have not ended.
    running: Vec<Arc<Mark>>,
    /// Bytes of the callers' tensors that wait or are being used.
    pub(crate) queued_bytes: usize,
    /// The pipeline has something in hand or in flight.
    busy: bool,
    /// Callers that change what urgent jobs read: none of these is begun meanwhile.
    pauses: u32,
    pub(crate) closing: bool,
    /// The first error of the step, until a caller has heard of it; then the step only can be discarded.
    pub(crate) failed: Option<Error>,
    pub(crate) told: bool,
    /// What the pipeline's thread ended by before its time. From then on nothing is done any more.
    ended_by: Option<Error>,
    /// What the pipeline has counted, and what everything else has.
    pub(crate) piped: Counters,
    pub(crate) counters: Counters,
}

impl QueueState {
    /// Whether nothing waits and nothing runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.urgent.is_empty() && !self.busy
    }

    /// That the pipeline's thread has not ended before its time.
    pub(crate) fn alive(&self) -> Result<()> {
        self.ended_by.clone().map_or(Ok(()), Err)
    }

    /// The step's error, the first time; that it failed, later.
    pub(crate) fn failure(&mut self) -> Result<()> {
        self.alive()?;
        match &self.failed {
            None => Ok(()),
            Some(error) if !self.told => {
                self.told = true;
                Err(error.clone())
            }
            Some(error) => Err(Error::Usage(format!("this step failed, so it can only be discarded: {error}"))),
        }
    }

    fn take_urgent(&mut self) -> Option<Job> {
        if self.pauses == 0 { self.urgent.pop_front() } else { None }
    }

    /// A job that was taken has ended.
    pub(crate) fn ended(&mut self, mark: &Arc<Mark>) {
        self.running.retain(|running| !Arc::ptr_eq(running, mark));
    }

    /// A job that was taken will not be begun.
    pub(crate) fn dropped(&mut self, job: &Job) {
        self.queued_bytes -= job.mark.nbytes;
        self.ended(&job.mark);
    }

    /// Whether a job of a record waits or runs.
    pub(crate) fn has(&self, record: usize) -> bool {
        self.marks().any(|mark| mark.record == record)
    }

    /// Whether a job waits or runs.
    pub(crate) fn holds(&self, mark: &Arc<Mark>) -> bool {
        self.marks().any(|known| Arc::ptr_eq(known, mark))
    }

    /// What the jobs of a record leave in its room for a gradient, if all of them succeed.
    pub(crate) fn leaves(&self, record: usize) -> Leaves {
        let of_record = self.marks().filter(|mark| mark.record == record && mark.leaves != Leaves::Same);
        of_record.last().map_or(Leaves::Same, |mark| mark.leaves)
    }

    /// Jobs that run, then those that wait, in their order.
    fn marks(&self) -> impl Iterator<Item = &Arc<Mark>> {
        self.running.iter().chain(self.urgent.iter().chain(&self.jobs).map(|job| &job.mark))
    }

    /// Tells the jobs that run (of one record alone, if one is given) to end as soon as may be.
    pub(crate) fn cancel(&self, record: Option<usize>) {
        self.running
            .iter()
            .filter(|mark| !mark.urgent && record.is_none_or(|record| mark.record == record))
            .for_each(|mark| mark.cancel());
    }

    /// Nobody works any more: whoever waits, and whoever comes, is told why. Gives the jobs back that waited, and the marks
    /// of all.
    pub(crate) fn end_by(&mut self, error: Error) -> (Vec<Job>, Vec<Arc<Mark>>) {
        self.ended_by = Some(error);
        let marks = self.marks().map(Arc::clone).collect();
        let mut dropped = self.drop_waiting(None);
        dropped.extend(self.urgent.drain(..));
        self.running.clear();
        self.queued_bytes = 0;
        self.busy = false;
        (dropped, marks)
    }

    /// Drops what waits, of one record alone if one is given.
    pub(crate) fn drop_waiting(&mut self, record: Option<usize>) -> Vec<Job> {
        let (dropped, kept): (Vec<Job>, Vec<Job>) =
            self.jobs.drain(..).partition(|job| record.is_none_or(|record| job.mark.record == record));
        self.jobs = kept.into();
        self.queued_bytes -= dropped.iter().map(|job| job.mark.nbytes).sum::<usize>();
        dropped
    }
}

/// While it lives, urgent jobs wait.
pub(crate) struct Pause<'a>(&'a Queue);

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.0.lock().pauses -= 1;
        self.0.notify();
    }
}

/// The queue, shared by callers and the pipeline.
pub(crate) struct Queue {
    state: Guarded<QueueState>,
    bytes_max: usize,
    /// The pipeline's thread, which must not wait for itself.
    worker: OnceLock<ThreadId>,
    /// The one on which it has functions called, which it waits for.
    caller: OnceLock<ThreadId>,
}

impl Queue {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { state: Guarded::default(), bytes_max, worker: OnceLock::new(), caller: OnceLock::new() }
    }

    /// Says that this thread is the pipeline's.
    pub(crate) fn work_here(&self) {
        self.worker.get_or_init(|| thread::current().id());
    }

    /// Says on which thread functions are called.
    pub(crate) fn calls_on(&self, thread: ThreadId) {
        self.caller.get_or_init(|| thread);
    }

    /// Whether this thread is one that the pipeline works with.
    pub(crate) fn is_worker(&self) -> bool {
        let here = Some(&thread::current().id());
        self.worker.get() == here || self.caller.get() == here
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock()
    }

    pub(crate) fn notify(&self) {
        self.state.notify_all();
    }

    /// Adds a job when there is room. One that holds more than the bound is let in alone.
    pub(crate) fn push(&self, job: Job, wait: &mut Wait<'_>) -> Result<()> {
        let bytes = job.mark.nbytes;
        let bytes_max = self.bytes_max;
        let has_room = |state: &QueueState| {
            state.failed.is_some()
                || state.ended_by.is_some()
                || state.closing
                || state.queued_bytes == 0
                || state.queued_bytes + bytes <= bytes_max
        };
        let mut state = self.wait(wait, "room in the queue", has_room)?;
        state.failure()?;
        if state.closing {
            return Err(Error::Usage("the engine has been closed".into()));
        }
        state.queued_bytes += bytes;
        if job.work.is_of_a_step() {
            state.counters.queued_peak = state.counters.queued_peak.max(state.queued_bytes as u64);
        }
        state.jobs.push_back(job);
        drop(state);
        self.notify();
        Ok(())
    }

    /// Adds a job that somebody waits to compute with: it goes before others, also where the step has failed.
    pub(crate) fn push_urgent(&self, job: Job) -> Result<()> {
        let mut state = self.lock();
        state.alive()?;
        if state.closing {
            return Err(Error::Usage("the engine has been closed".into()));
        }
        state.urgent.push_back(job);
        drop(state);
        self.notify();
        Ok(())
    }

    /// Waits until `ready`; from then on no urgent job is begun until what this gives is dropped.
    pub(crate) fn paused(
        &self,
        wait: &mut Wait<'_>,
        what: &'static str,
        ready: impl Fn(&QueueState) -> bool,
    ) -> Result<Pause<'_>> {
        let mut state = self.wait(wait, what, ready)?;
        state.pauses += 1;
        drop(state);
        Ok(Pause(self))
    }

    /// The next of those jobs, if there is one.
    pub(crate) fn next_urgent(&self) -> Option<Job> {
        let mut state = self.lock();
        let job = state.take_urgent()?;
        state.busy = true;
        state.running.push(Arc::clone(&job.mark));
        Some(job)
    }

    /// The next job; `None` if there is none now and `or_wait` is false, or if the engine is closing. Who would wait has
    /// nothing in flight.
    pub(crate) fn next(&self, or_wait: bool) -> Option<Job> {
        let mut state = self.lock();
        loop {
            let job = state.take_urgent();
            if let Some(job) = job.or_else(|| state.jobs.pop_front()) {
                state.busy = true;
                state.running.push(Arc::clone(&job.mark));
                return Some(job);
            }
            if or_wait {
                state.busy = false;
                self.notify();
            }
            if !or_wait || state.closing {
                return None;
            }
            let began = Instant::now();
            state = self.state.sleep(state);
            state.counters.idle += began.elapsed();
        }
    }

    /// Waits until `ready`; the lock is free while `keep_waiting` runs.
    pub(crate) fn wait(
        &self,
        wait: &mut Wait<'_>,
        what: &'static str,
        ready: impl Fn(&QueueState) -> bool,
    ) -> Result<MutexGuard<'_, QueueState>> {
        if self.is_worker() {
            return Err(Error::Usage("a function on the engine's thread cannot wait for the engine".into()));
        }
        let waited = self.state.wait_until(wait, ready);
        waited.map_err(|ended| memascend_store::Error::of_wait(ended, what).into())
    }
}
