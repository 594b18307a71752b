//! Tests functions that get whole records. While a function runs, the pipeline can read the next record and write the
//! previous record. The order of these operations must not depend on timing.

use std::{
    slice,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread::{self, sleep},
    time::{Duration, Instant},
};

use memascend_engine::{Application, Cause, Engine, FunctionInput, Options};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, Rng, SimDisk},
};
use memascend_store::{Commit, Create, Description, Dtype, Format, Store};

use crate::setup::{self, Contents, MOMENTS, changing, contents, first, ok, parameter, volume};

/// The number of elements of each record. Each record but the last fits into `EACH` bytes. The last record fits into
/// `2 * EACH` bytes.
const NUMELS: [u64; 6] = [5000, 5000, 4097, 5000, 5000, 10_000];
/// The record whose function blocks the pipeline until all jobs are queued.
const GATE: usize = 0;
const EACH: usize = 3 * 4 * 5056;
const PATIENCE: Duration = Duration::from_secs(30);

fn description() -> Description {
    let record = |(number, &numel)| parameter(&format!("{number}"), Dtype::F32, numel, Format::Plain, &MOMENTS);
    setup::description(NUMELS.iter().enumerate().map(record).collect(), 2)
}

fn bytes(numel: u64) -> Vec<u8> {
    (0..numel).flat_map(|index| f32::from(u16::try_from(index % 97).unwrap_or(0)).to_le_bytes()).collect()
}

fn engine_on(disk: &SimDisk, chunks: usize, (whole, next): (usize, usize)) -> Engine {
    let store =
        Store::create_on(volume(slice::from_ref(disk), &Faults::default()), 8192, description(), &Create::default());
    let mut options = Options::default();
    (options.chunks, options.whole_bytes, options.whole_next_bytes) = (chunks, whole, next);
    let engine = ok(Engine::new(Arc::new(ok(store)), &options));
    for (record, &numel) in NUMELS.iter().enumerate() {
        ok(engine.fill(record, first(bytes(numel), 2, 0), Wait::forever()));
    }
    ok(engine.commit(Commit::default(), Wait::forever()));
    engine
}

fn engine(chunks: usize, slots: (usize, usize)) -> Engine {
    engine_on(&SimDisk::new(2 << 20), chunks, slots)
}

fn apply(
    engine: &Engine,
    (record, step, whole): (usize, u64, bool),
    before: impl Fn() -> Result<(), Cause> + Send + Sync + 'static,
) {
    let function = changing(before, |number| 1.0 + number);
    let input = if whole { FunctionInput::Whole } else { FunctionInput::InChunks };
    let application = Application { function, nbytes: 0, step, spilled: false, input, after_commit: false };
    ok(engine.apply(record, application, None, Wait::at_most(PATIENCE)));
}

/// A function for the argument `before` of [`apply`]. The function does nothing.
const NOTHING: fn() -> Result<(), Cause> = || Ok(());

fn failing(what: &str) -> Result<(), Cause> {
    Err(Arc::new(std::io::Error::other(what.to_owned())))
}

/// Waits until `is_so` returns true. After [`PATIENCE`], returns an error with the text `what`.
fn soon(what: &str, is_so: impl Fn() -> bool) -> Result<(), Cause> {
    let began = Instant::now();
    while !is_so() {
        if began.elapsed() > PATIENCE {
            return failing(what);
        }
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Blocks the pipeline in the function of record [`GATE`] until `begin` has queued its jobs.
fn at_once(engine: &Engine, step: u64, begin: impl FnOnce()) {
    let gate = Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
    let waits = Arc::clone(&gate);
    apply(engine, (GATE, step, false), move || {
        waits.0.store(true, Relaxed);
        soon("opened", || waits.1.load(Relaxed))
    });
    assert!(soon("reached", || gate.0.load(Relaxed)).is_ok());
    begin();
    gate.1.store(true, Relaxed);
}

fn commit(engine: &Engine, step: u64) {
    ok(engine.commit(Commit { step, ..Commit::default() }, Wait::at_most(PATIENCE)));
}

fn moved(store: &Store) -> (u64, u64) {
    let stats = store.volume().stats();
    (stats.read.bytes, stats.written.bytes)
}

/// Returns the numbers of bytes that a job on the record reads and writes. The bytes of a commit do not count.
fn of_record(engine: &Engine, record: usize) -> (u64, u64) {
    let before = moved(engine.store());
    apply(engine, (record, 1, true), NOTHING);
    ok(engine.finish(Wait::at_most(PATIENCE)));
    let after = moved(engine.store());
    ok(engine.discard(Wait::at_most(PATIENCE)));
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn next_record_is_read_and_previous_written_while_a_function_runs() {
    for chunks in [2, 3, 4, 12] {
        let engine = engine(chunks, (2 * EACH, EACH));
        let (gate, each) = (of_record(&engine, GATE), [1, 2, 3, 4].map(|record| of_record(&engine, record)));
        let store = Arc::clone(engine.store());
        let (reads, writes) = moved(&store);
        at_once(&engine, 1, || {
            let (mut read, mut written) = (reads + gate.0 + each[0].0, writes + gate.1);
            for (number, record) in (1..5).enumerate() {
                read += each.get(number + 1).map_or(0, |next| next.0);
                let (store, reads, writes) = (Arc::clone(&store), read, written);
                apply(&engine, (record, 1, true), move || {
                    soon("read and written", || moved(&store).0 >= reads && moved(&store).1 >= writes)
                });
                written += each[number].1;
            }
        });
        commit(&engine, 1);
    }
}

#[test]
fn without_a_next_slot_only_chunked_jobs_run_during_a_function() {
    let engine = engine(4, (2 * EACH, 0));
    let (gate, each) = (of_record(&engine, GATE), [1, 2, 3].map(|record| of_record(&engine, record)));
    let store = Arc::clone(engine.store());
    let before = moved(&store).0 + gate.0 + each[0].0;
    at_once(&engine, 1, || {
        let (seen, other) = (Arc::clone(&store), each[1].0);
        apply(&engine, (1, 1, true), move || {
            soon("read", || moved(&seen).0 >= before + other)?;
            sleep(Duration::from_millis(100));
            if moved(&seen).0 == before + other { Ok(()) } else { failing("more was read") }
        });
        let first = first(bytes(NUMELS[4]), 2, 1);
        ok(engine.fill(4, first, Wait::forever()));
        // Queues an update by one of our kernels. This update must not wait for the function of record 1.
        let gradient = ok(memascend_engine::Gradient::new(Box::new(bytes(NUMELS[2])), Dtype::F32));
        let by = memascend_engine::GradientSource::Given(gradient);
        ok(engine.update(2, by, None, setup::adam(1e-3, 1), Wait::forever()));
        apply(&engine, (3, 1, true), NOTHING);
    });
    commit(&engine, 1);
}

/// Returns the contents of the store after three steps. `slots` has the sizes of the engine's two slots of memory for
/// whole records; a slot of size 0 does not exist. The functions sleep for 0, 1 or 2 times `patience` milliseconds.
fn trained(chunks: usize, slots: (usize, usize), patience: u64) -> Contents {
    let engine = engine(chunks, slots);
    for step in 1..4 {
        at_once(&engine, step, || {
            for record in 1..NUMELS.len() {
                let time = Duration::from_millis(patience * (record as u64 % 3));
                // The function of record 3 gets the record chunk by chunk.
                apply(&engine, (record, step, record != 3), move || {
                    sleep(time);
                    Ok(())
                });
            }
        });
        if step == 2 {
            ok(engine.discard_record(5, Wait::at_most(PATIENCE)));
            apply(&engine, (5, step, true), NOTHING);
        }
        commit(&engine, step);
    }
    contents(engine.store())
}

#[test]
fn stored_bytes_do_not_depend_on_slots_chunks_or_timing() {
    let wanted = trained(12, (2 * EACH, 0), 0);
    assert!(wanted.iter().all(|(step, _)| *step == 3));
    assert_eq!(wanted[1].1[0][..4], 3.0_f32.to_le_bytes());
    // `next` is the size of the second slot. With 0 there is no second slot. With `EACH`, every record except the last
    // record fits into the slot. With `2 * EACH`, every record fits into the slot.
    for chunks in [2, 4, 12] {
        for next in [0, EACH, 2 * EACH] {
            for patience in [0, 7] {
                assert!(trained(chunks, (2 * EACH, next), patience) == wanted, "{chunks} chunks, {next}, {patience}");
            }
        }
    }
}

/// Returns the operations of a step in the order in which they began, without those that began before all jobs were
/// queued.
fn operations(slots: (usize, usize), patience: u64) -> Vec<(Action, u64)> {
    let disk = SimDisk::new(2 << 20);
    let engine = engine_on(&disk, 4, slots);
    let mut before = 0;
    at_once(&engine, 1, || {
        for record in 1..NUMELS.len() {
            let time = Duration::from_millis(patience * (record as u64 % 3));
            apply(&engine, (record, 1, record != 3), move || {
                sleep(time);
                Ok(())
            });
        }
        before = disk.operations().len();
    });
    ok(engine.finish(Wait::at_most(PATIENCE)));
    disk.operations().split_off(before)
}

#[test]
fn the_order_of_operations_depends_on_the_jobs_alone() {
    for slots in [(2 * EACH, 0), (2 * EACH, EACH), (2 * EACH, 2 * EACH)] {
        let wanted = operations(slots, 0);
        assert!(wanted.len() > 50, "{wanted:?}");
        for patience in [1, 20] {
            assert_eq!(operations(slots, patience), wanted, "{slots:?}");
        }
    }
}

#[test]
fn failed_function_ends_the_step_and_calls_no_later_function() {
    let engine = engine(4, (2 * EACH, 2 * EACH));
    let before = contents(engine.store());
    for fails_at in 1..NUMELS.len() {
        let calls = Arc::new(AtomicUsize::new(0));
        at_once(&engine, 1, || {
            for record in 1..NUMELS.len() {
                let counted = Arc::clone(&calls);
                apply(&engine, (record, 1, true), move || {
                    counted.fetch_add(1, Relaxed);
                    if record == fails_at { failing("told to") } else { Ok(()) }
                });
            }
        });
        let failed = engine.finish(Wait::at_most(PATIENCE));
        let wanted = format!("a function that the engine called for \"{fails_at}\" failed: told to");
        assert!(failed.as_ref().is_err_and(|error| error.to_string() == wanted), "{failed:?}");
        assert_eq!(calls.load(Relaxed), fails_at, "no function is called after a function that failed");
        ok(engine.discard(Wait::at_most(PATIENCE)));
        assert!(contents(engine.store()) == before);
        assert_eq!(engine.queued_bytes(), 0);
    }
    // The engine has released the memory of the failed functions, so the next step must work.
    at_once(&engine, 1, || (1..NUMELS.len()).for_each(|record| apply(&engine, (record, 1, true), NOTHING)));
    commit(&engine, 1);
}

#[test]
fn discard_during_functions_leaves_each_record_complete() {
    let mut rng = Rng::new(5);
    let engine = engine(4, (2 * EACH, EACH));
    let mut counts = [0_u64; NUMELS.len()];
    for round in 1..40 {
        let calls = Arc::new(AtomicUsize::new(0));
        for (record, count) in counts.iter().enumerate() {
            let calls = Arc::clone(&calls);
            apply(&engine, (record, count + 1, record != 3), move || {
                calls.fetch_add(1, Relaxed);
                sleep(Duration::from_micros(500));
                Ok(())
            });
        }
        sleep(Duration::from_micros(rng.below(6000) as u64));
        let dropped = rng.below(NUMELS.len() + 1);
        if dropped == NUMELS.len() {
            ok(engine.discard(Wait::at_most(PATIENCE)));
        } else {
            ok(engine.discard_record(dropped, Wait::at_most(PATIENCE)));
            counts.iter_mut().enumerate().filter(|(record, _)| *record != dropped).for_each(|(_, count)| *count += 1);
        }
        commit(&engine, round);
        for (record, (step, tensors)) in contents(engine.store()).into_iter().enumerate() {
            assert_eq!(step, counts[record], "round {round}, record {record}");
            #[expect(clippy::cast_precision_loss, reason = "a small number")]
            let wanted = (step as f32).to_le_bytes();
            assert!(tensors[1].chunks_exact(4).all(|number| number == wanted), "round {round}, record {record}");
        }
    }
}

#[test]
fn close_waits_for_the_running_function_and_commits_nothing() {
    let disk = SimDisk::new(2 << 20);
    let engine = engine_on(&disk, 4, (2 * EACH, EACH));
    let before = contents(engine.store());
    let (begun, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (begins, ends) = (Arc::clone(&begun), Arc::clone(&ended));
    apply(&engine, (1, 1, true), move || {
        begins.store(true, Relaxed);
        sleep(Duration::from_millis(50));
        ends.store(true, Relaxed);
        Ok(())
    });
    let later = Arc::new(AtomicUsize::new(0));
    for record in 2..NUMELS.len() {
        let later = Arc::clone(&later);
        apply(&engine, (record, 1, true), move || {
            later.fetch_add(1, Relaxed);
            Ok(())
        });
    }
    assert!(soon("begun", || begun.load(Relaxed)).is_ok());
    engine.close();
    assert!(ended.load(Relaxed));
    assert_eq!(later.load(Relaxed), 0);
    assert_eq!(engine.store().volume().stats().in_flight, 0);
    assert!(contents(engine.store()) == before);
}

#[test]
fn functions_run_on_one_own_thread_where_finish_is_rejected() {
    let engine = Arc::new(engine(4, (2 * EACH, EACH)));
    let seen = Arc::new(Mutex::new(Vec::new()));
    for record in 1..NUMELS.len() {
        let (theirs, seen) = (Arc::downgrade(&engine), Arc::clone(&seen));
        apply(&engine, (record, 1, true), move || {
            let name = thread::current().name().map(str::to_owned);
            let waited =
                theirs.upgrade().map(|engine| engine.finish(Wait::forever()).map_err(|error| error.to_string()));
            seen.lock().unwrap_or_else(|_| panic!("poisoned")).push((thread::current().id(), name, waited));
            Ok(())
        });
    }
    ok(engine.finish(Wait::at_most(PATIENCE)));
    let seen = seen.lock().unwrap_or_else(|_| panic!("poisoned"));
    assert_eq!(seen.len(), NUMELS.len() - 1);
    for (thread, name, waited) in &*seen {
        assert_eq!((*thread, name.as_deref()), (seen[0].0, Some("memascend-call")));
        let refused = waited.as_ref().is_some_and(Result::is_err);
        assert!(refused, "{waited:?}");
    }
}
