//! Commits or discards a step. A commit waits for the updates that the pipeline stages, makes the step live, and then
//! applies the remaining updates in memory.

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

    /// Holds back an update of a record in RAM until `finish` or the commit, because the model computes with the record
    /// until then.
    pub(crate) fn wait_for_step(&self, waiting: Waiting) -> Result<()> {
        self.shared.queue.lock().failure()?;
        self.ram_tier.require_none(&self.shared.store, waiting.record)?;
        self.ram_tier.wait(waiting);
        Ok(())
    }

    /// Holds back `update`, like [`Engine::wait_for_step`]. The update will be applied in memory if the durability of
    /// the store is "none", or if the log accepts its gradient (`Store::begin_append`). Otherwise the pipeline stages
    /// the update before the commit. For a gradient that the log accepts, this function queues a job that writes the
    /// gradient to the log. If the record is due (`Store::is_due`), this job also writes the whole record.
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

    /// Queues a job of the step. If the queue rejects the job, the step fails, because it is incomplete without the
    /// job.
    pub(crate) fn push_of_step(&self, job: Job, wait: &mut Wait<'_>) -> Result<()> {
        let begun = self.shared.queue.push(job, wait);
        if let Err(error) = &begun {
            self.shared.queue.lock().failed.get_or_insert_with(|| error.clone());
        }
        begun
    }

    /// Queues the held-back updates that the pipeline stages before the commit.
    fn begin_through(&self, wait: &mut Wait<'_>) -> Result<()> {
        while let Some(Waiting { record, work, .. }) = self.ram_tier.next_through() {
            self.push_of_step(Job::boxed(record, work), wait)?;
        }
        Ok(())
    }

    /// Writes everything that belongs to the step, except the updates that are applied in memory after the commit.
    fn write_all(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.begin_through(wait)?;
        self.shared.queue.wait(wait, "updates", QueueState::is_idle)?.failure()?;
        // `due` returns only records whose gradient was not logged in this step. The `RamTierWrite` jobs of
        // `wait_to_update` have staged all other due records.
        for record in self.shared.store.due() {
            self.push_of_step(Job::new(record, RamTierWrite { gradient: None, whole: true }), wait)?;
        }
        self.settle_rest(wait)?;
        self.name_deferred(wait)
    }

    /// Waits until the pipeline has staged every update that it stages before a commit. The first error of the step is
    /// returned once: by this call or by an earlier call.
    pub fn finish(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        self.begin_through(&mut wait)?;
        self.drain(wait)
    }

    /// Waits until every queued job has ended. Unlike [`Engine::finish`], this function does not start the updates of
    /// records in RAM.
    pub fn drain(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        let mut state = self.shared.queue.wait(&mut wait, "updates", QueueState::is_idle)?;
        state.failure()
    }

    /// Waits until the pipeline has staged every update that it stages before a commit. Then makes the step live, and
    /// also durable unless the durability of the store is "none", and applies the remaining updates in memory. Returns
    /// the generation of the commit. If an error occurs before the step is live, the last commit stays live.
    pub fn commit(&self, commit: Commit, wait: Wait<'_>) -> Result<u64> {
        self.commit_agreed(commit, wait, &mut || true)
    }

    /// Commits like [`Engine::commit`], together with other ranks. Calls `agree` before the step becomes live: if the
    /// store writes a root, after the flush and before the write of the root. If `agree` returns `false`, the commit
    /// fails, and the last commit stays live.
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
        // Hold back urgent jobs during the commit: a fetch on another thread must not mix the data of two commits.
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

    /// Queues jobs that apply functions of the user to records in RAM, and waits for these jobs. Ignores Ctrl-C,
    /// because a committed step must be applied completely. If a function fails, the store rejects all later staging
    /// and commits, because the records in memory then belong to no step.
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

    /// Drops the held-back updates and the queued jobs that are not urgent, waits until all other jobs have ended, and
    /// forgets the staged step. If the step had failed, a new step can begin now.
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

    /// Drops the queued jobs of a record that are not urgent, waits until its other jobs have ended, and forgets its
    /// held-back or staged update. Jobs of other records continue. If the step has failed, it stays failed.
    pub fn discard_record(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.cancel(Some(record));
        self.ram_tier.discard(Some(record));
        self.shared.deferred.discard(Some(record));
        let _pause = self.shared.queue.paused(&mut wait, "updates", |state| !state.has(record))?;
        Ok(self.shared.store.discard_record(record, wait)?)
    }

    /// Waits for the jobs of a record, then forgets its held-back or staged update. Unlike [`Engine::discard_record`],
    /// this function keeps a gradient that the jobs have spilled.
    pub fn take_back(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let _pause = self.shared.queue.paused(&mut wait, "updates", |state| !state.has(record))?;
        self.ram_tier.discard(Some(record));
        self.shared.deferred.discard(Some(record));
        Ok(self.shared.store.discard_record(record, wait)?)
    }

    /// Drops the queued jobs and cancels the running jobs, except urgent jobs. If `record` is given, does this only for
    /// jobs of this record.
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
