//! Tests panics of jobs and of users' functions. After a panic, calls must return an error, except discards, and the
//! store must keep its last commit. Also tests that closing the engine or discarding the step ends a job that waits for
//! a reader of its slot.

use std::time::Duration;

use memascend_nvme::{
    Options as VolumeOptions, Volume,
    sim::{self, Faults, SimDisk},
};
use memascend_store::{Commit, Create, Description, Dtype, Format, Kind, Record};

use super::*;
use crate::{
    FunctionInput, WideState,
    job::Work,
    turn::Turn,
    workbench::{Read, Workbench, Write},
};

const NUMEL: u64 = 5000;
/// Bounds the waits after a panic, so that a hang fails the test.
const PATIENCE: Duration = Duration::from_secs(30);

/// The point at which the job panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Claim,
    Begin,
    Turns,
    Reads,
    Compute,
    /// In `compute`, while the job holds the queue's lock.
    Locked,
    Writes,
    Counted,
    Drop,
}

/// A job that panics at `at`.
struct Panicking {
    at: At,
    shared: Arc<Shared>,
    dropped: bool,
}

impl Panicking {
    fn reach(&self, at: At) {
        assert!(self.at != at, "reached {at:?}");
    }
}

impl Work for Panicking {
    fn nbytes(&self) -> usize {
        100
    }

    fn leaves(&self) -> Leaves {
        Leaves::Gradient
    }

    fn claim(&self, _bench: &Workbench<'_>, _record: usize) -> Result<bool> {
        self.reach(At::Claim);
        Ok(true)
    }

    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        self.reach(At::Begin);
        bench.begin(record, 1)
    }

    fn turns(&self, bench: &Workbench<'_>, record: usize) -> u32 {
        self.reach(At::Turns);
        bench.chunks_of(record)
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        let read = bench.read(turn.record, turn.index, &turn.memory)?;
        // Panics while `read` is in flight.
        self.reach(At::Reads);
        Ok(vec![read])
    }

    fn compute(&self, _bench: &Workbench<'_>, _turn: &Turn) -> Result<()> {
        self.reach(At::Compute);
        let _locked = (self.at == At::Locked).then(|| self.shared.queue.lock());
        self.reach(At::Locked);
        Ok(())
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let write = bench.stage(turn.record, turn.index, &turn.memory)?;
        self.reach(At::Writes);
        Ok(vec![write])
    }

    fn counted<'a>(&self, _counters: &'a mut Counters) -> Option<&'a mut u64> {
        self.reach(At::Counted);
        None
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        assert!(self.at != At::Drop || std::mem::replace(&mut self.dropped, true), "reached Drop");
    }
}

fn ok<T, E: std::fmt::Display>(result: std::result::Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn bytes(value: f32) -> Vec<u8> {
    std::iter::repeat_n(value.to_le_bytes(), usize::try_from(NUMEL).unwrap_or(0)).flatten().collect()
}

fn volume(disk: &SimDisk) -> Volume {
    let faults = Faults { delay: Duration::from_millis(2), ..Faults::default() };
    ok(sim::open(std::slice::from_ref(disk), &faults, &VolumeOptions::default()))
}

fn filled(disk: &SimDisk) -> Engine {
    let record = |name: &str| Record {
        name: name.into(),
        kind: Kind::Parameter,
        unit: 0,
        dtype: Dtype::F32,
        shape: vec![NUMEL],
        order: vec![],
        spill: Some(Dtype::F32),
        format: Format::Plain,
        state: vec![],
    };
    let description = Description {
        chunk_elements: 4096,
        user_bytes_max: 0,
        hyperparameters_bytes_max: 0,
        optimizer: "SGD".into(),
        units: vec!["all".into()],
        records: ["one", "two"].map(record).into(),
        first_elements: vec![],
    };
    let store = ok(Store::create_on(volume(disk), 8192, description, &Create::default()));
    let options =
        Options { queue_bytes_max: 30_000, whole_bytes: 1 << 16, whole_next_bytes: 1 << 16, ..Options::default() };
    let engine = ok(Engine::new(Arc::new(store), &options));
    for record in 0..2 {
        let first = First { values: Box::new(bytes(1.0)), state: vec![], wide: WideState::default(), step: 0 };
        ok(engine.fill(record, first, Wait::forever()));
    }
    ok(engine.commit(Commit::default(), Wait::forever()));
    engine
}

fn spill(engine: &Engine, record: usize) -> Result<()> {
    let gradient = ok(Gradient::new(Box::new(bytes(2.0)), Dtype::F32));
    engine.spill(record, gradient, false, Wait::at_most(PATIENCE))
}

/// Checks that calls on `engine` return an error about the panic `what`, except discards, which must succeed. Then
/// closes the engine, and checks that the store still has its first commit.
fn check_panic_reported(engine: &Engine, disk: &SimDisk, what: &str) {
    let panicked = |result: &Result<()>| matches!(result, Err(Error::Panicked(why)) if why.contains(what));
    let patient = || Wait::at_most(PATIENCE);
    let finish = engine.finish(patient());
    assert!(panicked(&finish), "{what}: {finish:?}");
    let commit = engine.commit(Commit { step: 1, ..Commit::default() }, patient()).map(drop);
    assert!(panicked(&commit), "{what}: {commit:?}");
    for record in 0..2 {
        let spilled = engine.spilled(record, patient()).map(drop);
        assert!(panicked(&spilled), "{what}: {spilled:?}");
        let read = engine.read_spilled(record, Box::new(bytes(0.0)), patient());
        assert!(matches!(read, Err(Error::Panicked(_))), "{what}: {read:?}");
        ok(engine.discard_record(record, patient()));
    }
    ok(engine.discard(patient()));
    let later = spill(engine, 0);
    assert!(panicked(&later), "{what}: a later spill must report the panic: {later:?}");
    assert_eq!(engine.queued_bytes(), 0, "{what}");
    engine.close();
    engine.close();
    let store = engine.store();
    assert_eq!(store.volume().stats().in_flight, 0, "{what}: requests are still in flight");
    ok(store.close(patient()));
    ok(store.volume().close(patient()));
    let again = ok(Store::open_on(volume(disk), 8192, &Create::default()));
    assert_eq!((again.info().generation, again.info().step), (1, 0), "{what}");
    ok(again.verify(&mut |_, _| true));
}

#[test]
fn panic_in_a_job_fails_a_waiting_finish_and_later_calls() {
    let all = [At::Claim, At::Begin, At::Turns, At::Reads, At::Compute, At::Locked, At::Writes, At::Counted, At::Drop];
    for at in all {
        let disk = SimDisk::new(1 << 20);
        let engine = filled(&disk);
        // This job begins before the panicking job, so its writes may be in flight at the panic. The test also queues a
        // job after the panicking job.
        ok(spill(&engine, 1));
        let work = Panicking { at, shared: Arc::clone(&engine.shared), dropped: false };
        ok(engine.shared.queue.push(Job::new(0, work), &mut Wait::forever()));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| engine.finish(Wait::at_most(PATIENCE)));
            // This call succeeds before the engine's thread ends, and fails afterwards. The test accepts both results.
            drop(spill(&engine, 1));
            let waited = waiting.join().unwrap_or_else(|_| panic!("the waiting thread"));
            assert!(matches!(&waited, Err(Error::Panicked(_))), "{at:?}: {waited:?}");
        });
        check_panic_reported(&engine, &disk, &format!("reached {at:?}"));
    }
}

#[test]
fn panic_in_an_applied_function_fails_later_calls() {
    for input in [FunctionInput::InChunks, FunctionInput::Whole] {
        let disk = SimDisk::new(1 << 20);
        let engine = filled(&disk);
        // With `FunctionInput::Whole`, the function runs on a separate thread. While it runs, the pipeline may read the
        // second record.
        for record in 0..2 {
            let application = Application {
                function: Box::new(|_| panic!("a fault of the caller's")),
                nbytes: 0,
                step: 1,
                spilled: false,
                input,
                after_commit: false,
            };
            drop(engine.apply(record, application, None, Wait::forever()));
        }
        check_panic_reported(&engine, &disk, "a fault of the caller's");
    }
}

#[test]
fn close_and_discard_end_a_job_that_waits_for_a_reader_of_its_slot() {
    for close in [false, true] {
        let disk = SimDisk::new(1 << 20);
        let engine = filled(&disk);
        let store = Arc::clone(engine.store());
        // `parts` holds the live slot of the record until `parts` is dropped or all parts are read. So the second fill
        // below has to wait for this slot.
        let parts = ok(store.parts(0, 1 << 20));
        let fill = || First { values: Box::new(bytes(3.0)), state: vec![], wide: WideState::default(), step: 1 };
        ok(engine.fill(0, fill(), Wait::forever()));
        ok(engine.commit(Commit { step: 1, ..Commit::default() }, Wait::at_most(PATIENCE)));
        ok(engine.fill(0, fill(), Wait::forever()));
        assert!(
            engine.finish(Wait::at_most(Duration::from_millis(100))).is_err(),
            "the fill must wait for the read of the slot"
        );
        if close {
            engine.close();
        } else {
            ok(engine.discard(Wait::at_most(PATIENCE)));
            ok(engine.finish(Wait::at_most(PATIENCE)));
            drop(parts);
            ok(engine.fill(0, fill(), Wait::forever()));
            ok(engine.commit(Commit { step: 2, ..Commit::default() }, Wait::at_most(PATIENCE)));
        }
        assert_eq!(store.info().step, if close { 1 } else { 2 });
    }
}
