//! Queues jobs, up to a bound in bytes. If a backward makes gradients faster than the disk writes them, the backward
//! waits for room in the queue.

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
    /// Urgent jobs. The pipeline takes them before the jobs in `jobs`.
    urgent: VecDeque<Job>,
    /// The marks of the jobs that the pipeline has taken and that have not ended.
    running: Vec<Arc<Mark>>,
    /// The sum of `Work::nbytes` of the waiting jobs, and of the running jobs that the pipeline has not computed to the
    /// end.
    pub(crate) queued_bytes: usize,
    /// True while the pipeline has a job, or an operation in flight.
    busy: bool,
    /// The number of living [`Pause`]s. While a [`Pause`] lives, the pipeline begins no urgent job, because the owner
    /// of the [`Pause`] changes data that urgent jobs read.
    pauses: u32,
    pub(crate) closing: bool,
    /// The first error of the step. `failure` returns this error once. A failed step can only be discarded.
    pub(crate) failed: Option<Error>,
    /// True once `failure` has returned the error in `failed`.
    pub(crate) is_reported: bool,
    /// The error that ended the pipeline's thread before the engine was closed. No job runs after this error.
    ended_by: Option<Error>,
    /// `piped` is a copy of the counters of the pipeline's `Workbench`. `counters` has the counts that any thread adds
    /// under the lock.
    pub(crate) piped: Counters,
    pub(crate) counters: Counters,
}

impl QueueState {
    /// True if no job waits and none runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.urgent.is_empty() && !self.busy
    }

    /// Returns the error that ended the pipeline's thread early, if any.
    pub(crate) fn alive(&self) -> Result<()> {
        self.ended_by.clone().map_or(Ok(()), Err)
    }

    /// Returns an error if the pipeline's thread has ended early, or if the step has failed. For a failed step, the
    /// first call returns the first error of the step. Later calls return an error which says that the step can only be
    /// discarded.
    pub(crate) fn failure(&mut self) -> Result<()> {
        self.alive()?;
        match &self.failed {
            None => Ok(()),
            Some(error) if !self.is_reported => {
                self.is_reported = true;
                Err(error.clone())
            }
            Some(error) => Err(Error::Usage(format!("this step failed, so it can only be discarded: {error}"))),
        }
    }

    fn take_urgent(&mut self) -> Option<Job> {
        if self.pauses == 0 { self.urgent.pop_front() } else { None }
    }

    /// Removes the mark of an ended job from `running`.
    pub(crate) fn ended(&mut self, mark: &Arc<Mark>) {
        self.running.retain(|running| !Arc::ptr_eq(running, mark));
    }

    /// Removes a job that the pipeline took but never began: subtracts the bytes of the job, and removes its mark from
    /// `running`.
    pub(crate) fn dropped(&mut self, job: &Job) {
        self.queued_bytes -= job.mark.nbytes;
        self.ended(&job.mark);
    }

    /// True if a job of the record waits or runs.
    pub(crate) fn has(&self, record: usize) -> bool {
        self.marks().any(|mark| mark.record == record)
    }

    /// True if the job with this mark waits or runs.
    pub(crate) fn holds(&self, mark: &Arc<Mark>) -> bool {
        self.marks().any(|known| Arc::ptr_eq(known, mark))
    }

    /// Returns what the record's place for a spilled gradient will contain if all jobs of the record succeed.
    pub(crate) fn leaves(&self, record: usize) -> Leaves {
        let of_record = self.marks().filter(|mark| mark.record == record && mark.leaves != Leaves::Same);
        of_record.last().map_or(Leaves::Same, |mark| mark.leaves)
    }

    /// Returns the marks of the running jobs, then the marks of the waiting jobs, in the order in which the jobs run.
    fn marks(&self) -> impl Iterator<Item = &Arc<Mark>> {
        self.running.iter().chain(self.urgent.iter().chain(&self.jobs).map(|job| &job.mark))
    }

    /// Cancels the running jobs that are not urgent. If `record` is given, cancels only jobs of this record.
    pub(crate) fn cancel(&self, record: Option<usize>) {
        self.running
            .iter()
            .filter(|mark| !mark.urgent && record.is_none_or(|record| mark.record == record))
            .for_each(|mark| mark.cancel());
    }

    /// Ends the queue after the pipeline's thread has ended early. From now on, `alive` and `failure` return `error`.
    /// Returns the waiting jobs, and the marks of all jobs.
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

    /// Removes and returns the waiting jobs that are not urgent. If `record` is given, removes only jobs of this
    /// record.
    pub(crate) fn drop_waiting(&mut self, record: Option<usize>) -> Vec<Job> {
        let (dropped, kept): (Vec<Job>, Vec<Job>) =
            self.jobs.drain(..).partition(|job| record.is_none_or(|record| job.mark.record == record));
        self.jobs = kept.into();
        self.queued_bytes -= dropped.iter().map(|job| job.mark.nbytes).sum::<usize>();
        dropped
    }
}

/// While a `Pause` lives, the pipeline begins no urgent job.
pub(crate) struct Pause<'a>(&'a Queue);

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.0.lock().pauses -= 1;
        self.0.notify();
    }
}

/// The queue, which callers and the pipeline share.
pub(crate) struct Queue {
    state: Guarded<QueueState>,
    bytes_max: usize,
    /// The thread of the pipeline. It must not wait for the engine, because it would wait for itself.
    worker: OnceLock<ThreadId>,
    /// The thread that calls the functions of the user. The pipeline waits for this thread, so this thread must not
    /// wait for the engine.
    caller: OnceLock<ThreadId>,
}

impl Queue {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { state: Guarded::default(), bytes_max, worker: OnceLock::new(), caller: OnceLock::new() }
    }

    /// Registers the current thread as the pipeline's thread.
    pub(crate) fn work_here(&self) {
        self.worker.get_or_init(|| thread::current().id());
    }

    /// Registers the thread that calls the functions of the user.
    pub(crate) fn calls_on(&self, thread: ThreadId) {
        self.caller.get_or_init(|| thread);
    }

    /// True if the current thread is the pipeline's thread, or the thread that calls the functions of the user.
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

    /// Adds a job once the queue has room for its bytes. A job whose bytes exceed the bound is added once
    /// `queued_bytes` is 0. Returns an error if the step has failed, the pipeline's thread has ended early, or the
    /// engine is closed, and the errors of [`Queue::wait`].
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
            return Err(Error::Usage("the engine has been closed; start a new engine".into()));
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

    /// Adds an urgent job, whose results a caller waits for. The pipeline runs this job before all jobs that are not
    /// urgent. The queue accepts it even if the step has failed.
    pub(crate) fn push_urgent(&self, job: Job) -> Result<()> {
        let mut state = self.lock();
        state.alive()?;
        if state.closing {
            return Err(Error::Usage("the engine has been closed; start a new engine".into()));
        }
        state.urgent.push_back(job);
        drop(state);
        self.notify();
        Ok(())
    }

    /// Waits until `ready` returns true. From then on, the pipeline begins no urgent job until the returned [`Pause`]
    /// is dropped.
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

    /// Takes the next urgent job. Returns `None` if no urgent job waits, or if a [`Pause`] lives.
    pub(crate) fn next_urgent(&self) -> Option<Job> {
        let mut state = self.lock();
        let job = state.take_urgent()?;
        state.busy = true;
        state.running.push(Arc::clone(&job.mark));
        Some(job)
    }

    /// Takes the next job. If no job waits, `or_wait` decides: if it is false, returns `None`; if it is true, waits for
    /// a job, and returns `None` only if the engine is closing. The pipeline sets `or_wait` only if nothing is in
    /// flight. So the queue counts as idle during this wait.
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

    /// Waits until `ready` returns true, and returns the locked state. Does not hold the lock while `wait.keep_waiting`
    /// runs. Returns an error if the wait ends first, or if a thread of the engine makes this call.
    pub(crate) fn wait(
        &self,
        wait: &mut Wait<'_>,
        what: &'static str,
        ready: impl Fn(&QueueState) -> bool,
    ) -> Result<MutexGuard<'_, QueueState>> {
        if self.is_worker() {
            return Err(Error::Usage(
                "a function that the engine runs cannot wait for the engine: wait after the function has returned"
                    .into(),
            ));
        }
        let waited = self.state.wait_until(wait, ready);
        waited.map_err(|ended| memascend_store::Error::of_wait(ended, what).into())
    }
}
