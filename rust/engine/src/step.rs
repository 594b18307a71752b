//! Commits or drops a step: begins the updates of records in RAM, and waits for the rest.

use std::time::Instant;

use memascend_mem::Wait;
use memascend_store::Commit;

use crate::{
    Engine, Error, Result,
    engine::Shared,
    job::Job,
    log_record::{Keep, may_log},
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

    /// Lets an update of a record in RAM wait for its step: until then somebody computes with what it changes.
    pub(crate) fn wait_for_step(&self, waiting: Waiting) -> Result<()> {
        self.shared.queue.lock().failure()?;
        self.ram_tier.require_none(&self.shared.store, waiting.record)?;
        self.ram_tier.wait(waiting);
        Ok(())
    }

    /// The same of one that is applied in memory, where its gradient finds room in the log or nothing is to be durable:
    /// what is written of it goes on its way now.
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
        self.push_of_step(Job::new(record, Keep { gradient, whole: store.is_due(record) }), wait)
    }

    /// Queues a job of the step. Where the queue does not take it, the step has failed: it would lack the job.
    pub(crate) fn push_of_step(&self, job: Job, wait: &mut Wait<'_>) -> Result<()> {
        let begun = self.shared.queue.push(job, wait);
        if let Err(error) = &begun {
            self.shared.queue.lock().failed.get_or_insert_with(|| error.clone());
        }
        begun
    }

    /// Queues the updates of records in RAM that are staged before the commit.
    fn begin_through(&self, wait: &mut Wait<'_>) -> Result<()> {
        while let Some(Waiting { record, work, .. }) = self.ram_tier.next_through() {
            self.push_of_step(Job::boxed(record, work), wait)?;
        }
        Ok(())
    }

    /// Has everything of the step written but what is applied in memory.
    fn write_all(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.begin_through(wait)?;
        self.shared.queue.wait(wait, "updates", QueueState::is_idle)?.failure()?;
        // Those without a gradient in this step.
        for record in self.shared.store.due() {
            self.push_of_step(Job::new(record, Keep { gradient: None, whole: true }), wait)?;
        }
        self.settle_rest(wait)?;
        self.name_deferred(wait)
    }

    /// Waits until every update is staged. The first error of the step is raised here or by an update, once.
    pub fn finish(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        self.begin_through(&mut wait)?;
        self.drain(wait)
    }

    /// As [`Engine::finish`], but for updates of records in RAM, which begin with that or with the commit.
    pub fn drain(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        let mut state = self.shared.queue.wait(&mut wait, "updates", QueueState::is_idle)?;
        state.failure()
    }

    /// Waits for every update, and makes the step live and durable; then applies what is applied in memory. An error before
    /// that leaves the last commit as it is.
    pub fn commit(&self, commit: Commit, wait: Wait<'_>) -> Result<u64> {
        self.commit_agreed(commit, wait, &mut || true)
    }

    /// The same with others: `agree` is asked when all is flushed and nothing names it yet. `false` ends it as an error does.
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
        // What fetches of other threads compute with is of one commit.
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

    /// Has functions applied to records in RAM, by the pipeline's thread, and waits for all of them: Ctrl-C would
    /// split a step that is committed. Where one fails, the run is at its end, which the store says from then on.
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

    /// Drops what waits, drains what is in flight, and forgets what was staged. A step that failed is over.
    pub fn discard(&self, mut wait: Wait<'_>) -> Result<()> {
        self.here()?;
        self.cancel(None);
        self.ram_tier.discard(None);
        self.shared.deferred.discard(None);
        let _pause = self.shared.queue.paused(&mut wait, "updates", QueueState::is_idle)?;
        {
            let mut state = self.shared.queue.lock();
            state.failed = None;
            state.told = false;
        }
        Ok(self.shared.store.discard(wait)?)
    }

    /// As [`Engine::discard`] for one record alone: the others go on. A step that failed stays so.
    pub fn discard_record(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.cancel(Some(record));
        self.ram_tier.discard(Some(record));
        self.shared.deferred.discard(Some(record));
        let _pause = self.shared.queue.paused(&mut wait, "updates", |state| !state.has(record))?;
        Ok(self.shared.store.discard_record(record, wait)?)
    }

    /// As [`Engine::discard_record`], but what was begun of the record ends first: a gradient that it spills stays.
    pub fn take_back(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let _pause = self.shared.queue.paused(&mut wait, "updates", |state| !state.has(record))?;
        self.ram_tier.discard(Some(record));
        self.shared.deferred.discard(Some(record));
        Ok(self.shared.store.discard_record(record, wait)?)
    }

    /// Drops what waits and cancels what runs, of one record alone if one is given.
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
