//! Commits or discards a step: starts the updates of records in RAM, and waits for all other updates.

use std::time::Instant;

use memascend_mem::Wait;
use memascend_store::Commit;

use crate::{
    Engine, Error, Result,
    engine::Shared,
    job::Job,
    log_record::{RamTierWrite, may_log},
    pipeline::lose_spilled,
    queue::QueueState,
    ram_tier::Waiting,
    ram_tier_updates::Workers,
    update::KernelUpdate,
};

impl Engine {
    pub(crate) fn push(&self, job: Job, wait: &mut Wait<'_>) -> Result<()> {
        self.shared.queue.push(job, wait)
    }

    /// Holds back an update of a record in RAM until `finish` or the commit: until then the model computes with the
    /// record.
    pub(crate) fn wait_for_step(&self, waiting: Waiting) -> Result<()> {
        self.shared.queue.lock().failure()?;
        self.ram_tier.require_none(&self.shared.store, waiting.record)?;
        self.ram_tier.wait(waiting);
        Ok(())
    }

    /// Holds back an update like [`Engine::wait_for_step`]. Marks it as applied in memory if its gradient has room in
    /// the log, or if the store's durability is "none". If the gradient has room in the log, queues a job that writes
    /// the gradient to the log and, if the record is due, the whole record.
    pub(crate) fn wait_to_update(
        &self,
        record: usize,
        step: u64,
        update: KernelUpdate,
        wait: &mut Wait<'_>,
    ) -> Result<()> {
        let store = &self.shared.store;
        self.shared.queue.lock().failure()?;
        self.ram_tier.require_none(store, record)?;
        let logged = if store.applies() || !may_log(store, record) { None } else { update.logged(store, record)? };
        let logged = match logged {
            Some((gradient, rule)) if store.begin_append(record, gradient.dtype)? => Some((gradient, rule)),
            Some(_) if store.is_logged(record) => {
                self.shared.queue.lock().counters.unlogged += 1;
                None
            }
            _ => None,
        };
        let applies = store.applies() || logged.is_some();
        let (gradient, rule) = logged.unzip();
        self.ram_tier.wait(Waiting { record, step, work: Box::new(update), applies, rule });
        if gradient.is_none() {
            return Ok(());
        }
        self.push_of_step(Job::new(record, RamTierWrite { gradient, whole: store.is_due(record) }), wait)
    }

    /// Queues a job of the step. If the queue rejects the job, the step fails, since it lacks the job.
    pub(crate) fn push_of_step(&self, job: Job, wait: &mut Wait<'_>) -> Result<()> {
        let begun = self.shared.queue.push(job, wait);
        if let Err(error) = &begun {
            self.shared.queue.lock().failed.get_or_insert_with(|| error.clone());
        }
        begun
    }

    /// Queues the held-back updates of records in RAM that the pipeline stages before the commit.
    fn begin_through(&self, wait: &mut Wait<'_>) -> Result<()> {
        while let Some(Waiting { record, work, .. }) = self.ram_tier.next_through() {
            self.push_of_step(Job::boxed(record, work), wait)?;
        }
        Ok(())
    }

    /// Writes all of the step except the updates that are applied in memory.
    fn write_all(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.begin_through(wait)?;
        self.shared.queue.wait(wait, "updates", QueueState::is_idle)?.failure()?;
        // `due` returns only records without a logged gradient in this step: the `RamTierWrite` jobs of `wait_to_update`
        // have staged the other due records.
        for record in self.shared.store.due() {
            self.push_of_step(Job::new(record, RamTierWrite { gradient: None, whole: true }), wait)?;
        }
        self.settle_rest(wait)?;
        self.name_deferred(wait)
    }

    /// Waits until every update is staged. The first error of the step is returned once, by this call or an earlier
    /// one.
    pub fn finish(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        self.begin_through(&mut wait)?;
        self.drain(wait)
    }

    /// Waits until the queue is empty. Unlike [`Engine::finish`], does not start the updates of records in RAM.
    pub fn drain(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        let mut state = self.shared.queue.wait(&mut wait, "updates", QueueState::is_idle)?;
        state.failure()
    }

    /// Waits until every update that the pipeline stages before a commit is staged, makes the step live and durable,
    /// and then applies the remaining updates, in memory. An error before the step is live leaves the last commit as it
    /// is.
    pub fn commit(&self, commit: Commit, wait: Wait<'_>) -> Result<u64> {
        self.commit_agreed(commit, wait, &mut || true)
    }

    /// Commits like [`Engine::commit`], together with other ranks: calls `agree` when all data is flushed and no root
    /// names it yet. If `agree` returns `false`, the commit fails like after an error.
    pub fn commit_agreed(&self, commit: Commit, mut wait: Wait<'_>, agree: &mut dyn FnMut() -> bool) -> Result<u64> {
        self.here()?;
        self.write_all(&mut wait)?;
        let Shared { store, staging, chunks, .. } = &*self.shared;
        let workers = Workers { store, staging, threads: self.threads.get().min(*chunks) };
        let applying = self.ram_tier.applying();
        for &(record, step) in &applying {
            let keep_waiting = wait.keep_waiting.as_mut().map(|keep| &mut **keep as &mut dyn FnMut() -> bool);
            store.announce(record, step, Wait { timeout: wait.timeout, keep_waiting })?;
        }
        workers.check(&applying)?;
        let log = self.ram_tier.head(self.shared.deferred.named());
        // Urgent jobs wait during the commit: a fetch of another thread must compute from one commit only.
        let pause = self.shared.queue.paused(&mut wait, "updates", QueueState::is_idle)?;
        let generation = store.commit_agreed(Commit { log, ..commit }, wait, agree)?;
        self.shared.deferred.committed(store)?;
        drop(pause);
        let began = Instant::now();
        let (ours, calls) = self.ram_tier.take_applying();
        let updates = ours.len() as u64;
        let chunks = workers.apply(ours)?;
        self.call_after_commit(calls)?;
        let mut state = self.shared.queue.lock();
        state.counters.updates += updates;
        state.counters.chunks += chunks;
        state.counters.applying += began.elapsed();
        Ok(generation)
    }

    /// Applies functions to records in RAM by jobs of the pipeline, and waits for all of these jobs. Ignores Ctrl-C,
    /// which would split a committed step. If a function fails, the store returns an error from then on: memory matches
    /// no step.
    fn call_after_commit(&self, waiting: Vec<Waiting>) -> Result<()> {
        let Some(first) = waiting.first().map(|job| job.record) else { return Ok(()) };
        let store = &self.shared.store;
        let called = || {
            let mut applications = Vec::with_capacity(waiting.len());
            for job in waiting {
                applications.push((job.record, store.application(job.record)?));
                self.shared.queue.push(Job::boxed(job.record, job.work), &mut Wait::forever())?;
            }
            self.shared.queue.wait(&mut Wait::forever(), "updates", QueueState::is_idle)?.failure()?;
            for (record, application) in applications {
                (0..store.layout().chunks_of(record)).for_each(|chunk| application.chunk_applied(chunk));
                application.applied();
            }
            Ok(())
        };
        called().inspect_err(|error: &Error| store.fail_application(first, &error.to_string()))
    }

    /// Drops queued jobs, drains running jobs, and forgets the staged step. This ends a failed step.
    pub fn discard(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        self.cancel(None);
        self.ram_tier.discard(None);
        self.shared.deferred.discard(None);
        let _pause = self.shared.queue.paused(&mut wait, "updates", QueueState::is_idle)?;
        {
            let mut state = self.shared.queue.lock();
            state.failed = None;
            state.is_reported = false;
        }
        Ok(self.shared.store.discard(wait)?)
    }

    /// Drops a record's queued jobs, drains its running jobs, and forgets its staged update; other records' jobs go on.
    /// A failed step stays failed.
    pub fn discard_record(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.cancel(Some(record));
        self.ram_tier.discard(Some(record));
        self.shared.deferred.discard(Some(record));
        let _pause = self.shared.queue.paused(&mut wait, "updates", |state| !state.has(record))?;
        Ok(self.shared.store.discard_record(record, wait)?)
    }

    /// Waits for the jobs of a record, then forgets its staged update. Unlike [`Engine::discard_record`], it keeps a
    /// gradient that these jobs spilled.
    pub fn take_back(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let _pause = self.shared.queue.paused(&mut wait, "updates", |state| !state.has(record))?;
        self.ram_tier.discard(Some(record));
        self.shared.deferred.discard(Some(record));
        Ok(self.shared.store.discard_record(record, wait)?)
    }

    /// Drops queued jobs and cancels running jobs; if `record` is given, only the jobs of that record.
    pub(crate) fn cancel(&self, record: Option<usize>) {
        let mut state = self.shared.queue.lock();
        let dropped = state.drop_waiting(record);
        state.cancel(record);
        drop(state);
        self.shared.queue.notify();
        for job in &dropped {
            lose_spilled(&self.shared.store, &job.mark);
        }
    }
}
