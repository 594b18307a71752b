//! Replays the gradient log of a store that was not closed. Uses the same kernels that apply gradients in a step.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use memascend_mem::Wait;
use memascend_store::{Commit, Dtype, LoggedRead, Scratch, Shared};

use crate::{
    Engine, Error, Result,
    job::{Job, Work},
    logged::{applied, chunk_bytes, fitting},
    rule::Taken,
    turn::Turn,
    workbench::{Read, Workbench, Write, inside},
};

/// The number of gradients that a turn reads ahead.
const AHEAD: usize = 4;

/// A job that applies the logged gradients of one record.
struct RecordReplay {
    replay: Arc<memascend_store::Replay>,
    /// The rule of each gradient, in the order of the log.
    rules: Vec<(Taken, Vec<f32>)>,
    /// Memory for the gradients that are read ahead.
    room: Arc<Scratch>,
    /// How many bytes of gradients the replay has applied so far, counted over all records.
    done: Arc<AtomicU64>,
    step: u64,
}

impl Engine {
    /// Applies the gradients in the log of the store, writes the updated records whole, and commits them as a part of
    /// the last step. After that, the store has no log. Returns `false` if the store had no log. Before the first
    /// write, verifies all data that the replay will read ([`Store::check_log`](memascend_store::Store::check_log)).
    /// `progress` gets two numbers: the bytes of gradients that are done, and the bytes of all gradients. If `progress`
    /// returns `false`, the replay ends with an error, and the last commit and its log stay valid.
    ///
    /// No other job may be queued during the replay.
    pub fn replay(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<bool> {
        let store = Arc::clone(self.store());
        let Some(replay) = store.pending_replay() else { return Ok(false) };
        let mut jobs = Vec::new();
        let (done, mut all) = (Arc::new(AtomicU64::new(0)), 0);
        let chunk = u64::from(store.description().chunk_elements) * Dtype::F32.bytes();
        let room = Scratch::new(chunk as usize, AHEAD, "gradients of the log")?;
        let room = Arc::new(room);
        for record in replay.records() {
            let (mut rules, mut step) = (Vec::new(), 0);
            for (head, logged) in replay.of(record) {
                rules.push(fitting(&store, record, &head.rules[logged.rule as usize])?);
                all += store.gradient_bytes(record, logged.dtype)?;
                step = logged.step;
            }
            let (replay, room, done) = (Arc::clone(&replay), Arc::clone(&room), Arc::clone(&done));
            jobs.push(Job::new(record, RecordReplay { replay, rules, room, done, step }));
        }
        let mut report = || progress(done.load(Relaxed), all);
        // Verify first, because staging overwrites the previous commit. If the last commit is damaged, the user can
        // still open the previous commit with `existing="previous"`.
        store.check_log(&mut report)?;
        let replayed = if report() { self.replayed(jobs, &mut report) } else { Err(interrupted()) };
        if replayed.is_err() {
            self.discard(Wait::forever())?;
        }
        replayed.map(|()| true)
    }

    fn replayed(&self, jobs: Vec<Job>, keep_waiting: &mut dyn FnMut() -> bool) -> Result<()> {
        for job in jobs {
            self.push(job, &mut Wait { timeout: None, keep_waiting: Some(keep_waiting) })?;
        }
        self.finish(Wait { timeout: None, keep_waiting: Some(keep_waiting) })?;
        if !keep_waiting() {
            return Err(interrupted());
        }
        let step = self.store().info().step;
        self.commit(Commit { step, ..Commit::default() }, Wait::forever()).map(drop)
    }
}

impl Work for RecordReplay {
    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        bench.begin(record, self.step)
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let values = bench.store.read_slot(record, chunk, bench.part(record, chunk, memory)?)?;
        let mut reads = vec![Read::Values(values)];
        if let Some(state) = bench.state_extent(record, chunk) {
            let state = bench.store.read_slot(record, state, bench.part(record, state, memory)?)?;
            reads.push(Read::State(state));
        }
        Ok(reads)
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let mut logged_gradients = self.replay.of(turn.record);
        let mut flying: VecDeque<(Dtype, LoggedRead<'_, Shared>)> = VecDeque::with_capacity(AHEAD);
        for rule in &self.rules {
            while flying.len() < AHEAD
                && let Some((head, logged)) = logged_gradients.next()
            {
                let bytes = chunk_bytes(bench, turn, logged.dtype);
                let memory = Shared::new(self.room.lease(Wait::never())?);
                let read = bench.store.read_logged(head, logged, turn.index, inside(&memory, 0, bytes)?)?;
                flying.push_back((logged.dtype, read));
            }
            let Some((dtype, read)) = flying.pop_front() else { break };
            let gradient = read.wait()?;
            applied(bench, turn, rule, (&gradient, dtype))?;
            self.done.fetch_add(chunk_bytes(bench, turn, dtype) as u64, Relaxed);
        }
        Ok(())
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let &Turn { record, index: chunk, ref memory } = turn;
        bench.stage_chunk(record, chunk, memory)
    }
}

fn interrupted() -> Error {
    memascend_store::Error::Interrupted("the replay of the log").into()
}
