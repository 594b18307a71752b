//! Tests spilled gradients on simulated devices whose reads and writes can fail.

use std::{sync::Arc, time::Duration};

use memascend_engine::{Engine, Gradient, GradientSource, Hyperparameters, Options};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, SimDisk},
};
use memascend_store::{Commit, Create, Description, Dtype, Format, Store};

use crate::setup::{self, MOMENTS, adam, first, many, ok, parameter, volume};

const NUMEL: u64 = 5000;
const NAMES: [&str; 2] = ["one", "two"];

fn description() -> Description {
    let record = |name: &str| parameter(name, Dtype::F32, NUMEL, Format::Plain, &MOMENTS);
    setup::description(NAMES.map(record).into(), NAMES.len())
}

fn engine(store: Store) -> Engine {
    let mut options = Options::default();
    options.queue_bytes_max = 30_000;
    ok(Engine::new(Arc::new(store), &options))
}

fn bytes(value: f32) -> Vec<u8> {
    std::iter::repeat_n(value.to_le_bytes(), usize::try_from(NUMEL).unwrap_or(0)).flatten().collect()
}

fn filled() -> Vec<Vec<u8>> {
    let disks = vec![SimDisk::new(1 << 20)];
    let store = ok(Store::create_on(volume(&disks, &Faults::default()), 8192, description(), &Create::default()));
    let engine = engine(store);
    for record in 0..NAMES.len() {
        ok(engine.fill(record, first(bytes(1.0), 2, 0), Wait::forever()));
    }
    ok(engine.commit(Commit::default(), Wait::forever()));
    drop(engine);
    disks.iter().map(SimDisk::bytes).collect()
}

fn spill(engine: &Engine, record: usize, value: f32, add: bool) -> memascend_engine::Result<()> {
    engine.spill(record, Gradient::new(Box::new(bytes(value)), Dtype::F32)?, add, Wait::forever())
}

fn numbers(step: u64) -> Hyperparameters {
    Hyperparameters { weight_decay: 0.0, grad_scale: 1.0, ..adam(1e-2, step) }
}

/// Spills the sum of three gradients for each record, then updates each record by half of its sum.
fn step(engine: &Engine) -> memascend_engine::Result<()> {
    for record in 0..NAMES.len() {
        spill(engine, record, 1.0, false)?;
    }
    for value in [2.0, 3.0] {
        for record in 0..NAMES.len() {
            spill(engine, record, value, true)?;
        }
    }
    for record in 0..NAMES.len() {
        engine.update(record, GradientSource::Spilled(vec![0.5]), None, numbers(1), Wait::forever())?;
    }
    engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever())?;
    Ok(())
}

/// Checks every record. It must have no spilled gradient, or the sum of its first one, two or three gradients.
fn whole_or_nothing(engine: &Engine, what: &str) {
    for record in 0..NAMES.len() {
        match engine.spilled(record, Wait::forever()) {
            Ok(found) => {
                let sums = [1.0, 9.0, 36.0_f64];
                let elements = f64::from(u32::try_from(NUMEL).unwrap_or(0));
                let is = |sum: &f64| (found.squares.value() - sum * elements).abs() < 1.0;
                assert!(sums.iter().any(is), "{what}: {found:?}");
                let read = engine.read_spilled(record, Box::new(bytes(0.0)), Wait::forever());
                read.unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            Err(error) => assert!(error.to_string().contains("no gradient of"), "{what}: {error}"),
        }
    }
}

#[test]
fn spill_finds_nonfinite_elements_in_every_chunk() {
    let disks = [SimDisk::new(1 << 20)];
    let store = ok(Store::create_on(volume(&disks, &Faults::default()), 8192, description(), &Create::default()));
    let engine = engine(store);
    // Tests the first and the last element of each of the three chunks.
    for index in [0, 2047, 2048, 4095, 4096, 4999] {
        let mut gradient = bytes(1.0);
        gradient[index * 4..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        ok(engine.spill(0, ok(Gradient::new(Box::new(gradient), Dtype::F32)), false, Wait::forever()));
        assert!(ok(engine.spilled(0, Wait::forever())).nonfinite, "element {index}");
        ok(spill(&engine, 0, 1.0, true));
        assert!(ok(engine.spilled(0, Wait::forever())).nonfinite, "element {index}, added to");
        ok(spill(&engine, 0, 1.0, false));
        assert!(!ok(engine.spilled(0, Wait::forever())).nonfinite, "replaced");
    }
}

#[test]
fn queued_gradients_stay_within_the_byte_bound() {
    let disks: Vec<SimDisk> = filled().into_iter().map(SimDisk::of).collect();
    let faults = Faults { delay: Duration::from_millis(2), ..Faults::default() };
    let engine = engine(ok(Store::open_on(volume(&disks, &faults), 8192, &Create::default())));
    (0..20).for_each(|number| ok(spill(&engine, number % 2, 1.0, false)));
    let peak = engine.counters().queued_peak;
    assert!((20_000..=30_000).contains(&peak), "{peak} bytes");
}

#[test]
fn failed_read_or_write_leaves_a_complete_spilled_sum_or_none() {
    let image = filled();
    let mut failures = 0;
    let seeds = many(300, 100);
    for seed in 0..seeds {
        let disks: Vec<SimDisk> = image.iter().cloned().map(SimDisk::of).collect();
        let errors = vec![(Action::Write, 5, 12), (Action::Read, 5, 12)];
        let faults = Faults { seed, errors, reorder: true, ..Faults::default() };
        let Ok(store) = Store::open_on(volume(&disks, &faults), 8192, &Create::default()) else { continue };
        let engine = engine(store);
        if let Err(error) = step(&engine) {
            failures += 1;
            assert!(is_cause(&error), "seed {seed}: {error}");
            if engine.discard(Wait::forever()).is_err() {
                continue;
            }
            // Reading the gradients back may also fail. So this check uses only their sums of squares, which the engine
            // has in memory.
            for record in 0..NAMES.len() {
                if let Ok(found) = engine.spilled(record, Wait::forever()) {
                    let sums = [1.0, 9.0, 36.0].map(|sum| sum * 5000.0);
                    assert!(sums.iter().any(|sum| (found.squares.value() - sum).abs() < 1.0), "seed {seed}: {found:?}");
                }
            }
        }
    }
    assert!(failures > seeds / 3, "{failures}");
}

/// A write error of the device makes a spill fail. The first call after this spill, or the `finish` after this call,
/// must return the device error, and not "no gradient", although the gradient is lost. Only later calls may say that
/// the step has failed.
#[test]
fn first_call_after_a_failed_spill_returns_the_device_error() {
    type Ask = fn(&Engine) -> memascend_engine::Result<()>;
    let asks: [(&str, Ask); 6] = [
        ("spilled", |engine| engine.spilled(0, Wait::forever()).map(drop)),
        ("read_spilled", |engine| engine.read_spilled(0, Box::new(bytes(0.0)), Wait::forever())),
        ("update_spilled", |engine| {
            engine.update(0, GradientSource::Spilled(vec![]), None, numbers(1), Wait::forever())
        }),
        ("spill", |engine| spill(engine, 0, 1.0, true)),
        ("finish", |engine| engine.finish(Wait::forever())),
        ("commit", |engine| engine.commit(Commit::default(), Wait::forever()).map(drop)),
    ];
    let image = filled();
    for (name, ask) in asks {
        // Makes the call at once in 30 runs, so that the error happens at different moments of the call. In the last
        // run, makes the call long after the error.
        for pause in std::iter::repeat_n(Duration::ZERO, 30).chain([Duration::from_millis(20)]) {
            let disks: Vec<SimDisk> = image.iter().cloned().map(SimDisk::of).collect();
            let faults = Faults { errors: vec![(Action::Write, 5, 1000)], ..Faults::default() };
            let engine = engine(ok(Store::open_on(volume(&disks, &faults), 8192, &Create::default())));
            ok(spill(&engine, 0, 1.0, false));
            std::thread::sleep(pause);
            let heard = ask(&engine).and_then(|()| engine.finish(Wait::forever()));
            assert!(heard.is_err_and(|error| is_cause(&error)), "{name} after {pause:?}");
            let again = ask(&engine);
            assert!(again.is_err_and(|error| error.to_string().contains("only be discarded")), "{name}, again");
            ok(engine.discard(Wait::forever()));
            let left = engine.spilled(0, Wait::forever());
            assert!(left.is_err_and(|error| error.to_string().contains("no gradient of")), "{name}, after {pause:?}");
        }
    }
}

/// Returns true if the error is the error of the device. Returns false for a later error, which only says that the step
/// has failed.
fn is_cause(error: &memascend_engine::Error) -> bool {
    let said = error.to_string();
    said.contains("errno 5") && !said.contains("only be discarded")
}

#[test]
fn discard_at_any_moment_leaves_a_complete_spilled_sum_or_none() {
    let image = filled();
    for round in 0..40 {
        let disks: Vec<SimDisk> = image.iter().cloned().map(SimDisk::of).collect();
        let engine = engine(ok(Store::open_on(volume(&disks, &Faults::default()), 8192, &Create::default())));
        for record in 0..NAMES.len() {
            ok(spill(&engine, record, 1.0, false));
            ok(spill(&engine, record, 2.0, true));
            if round % 4 < 2 {
                ok(engine.discard_record(round % 2, Wait::forever()));
            }
        }
        if round % 4 > 1 {
            ok(engine.discard(Wait::forever()));
        }
        whole_or_nothing(&engine, &format!("round {round}"));
        ok(step(&engine));
        whole_or_nothing(&engine, &format!("round {round}, after"));
    }
}

#[test]
fn power_loss_at_any_point_leaves_a_complete_step_and_no_spill() {
    let image = filled();
    let mut points = 0;
    loop {
        let disks: Vec<SimDisk> = image.iter().cloned().map(SimDisk::of).collect();
        let faults = Faults { dies_after: Some(points), ..Faults::default() };
        let done = Store::open_on(volume(&disks, &faults), 8192, &Create::default())
            .is_ok_and(|store| step(&engine(store)).is_ok());
        for loss in 0..2 {
            let left: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
            let store = ok(Store::open_on(volume(&left, &Faults::default()), 8192, &Create::default()));
            assert!(!done || store.info().step == 1, "point {points}");
            ok(store.verify(&mut |_, _| true));
            let engine = engine(store);
            for record in 0..NAMES.len() {
                let spilled = engine.spilled(record, Wait::forever());
                assert!(spilled.is_err_and(|error| error.to_string().contains("no gradient of")), "point {points}");
            }
        }
        if done {
            break;
        }
        points += 1;
    }
    assert!(points > 60, "{points}");
}

fn spilling(engine: &Engine, record: usize, value: f32, step: u64) -> memascend_engine::Result<()> {
    let gradient = Gradient::new(Box::new(bytes(value)), Dtype::F32)?;
    engine.update_spilling(record, gradient, None, numbers(step), Wait::forever())
}

fn fresh(image: &[Vec<u8>], faults: &Faults) -> Engine {
    let disks: Vec<SimDisk> = image.iter().cloned().map(SimDisk::of).collect();
    engine(ok(Store::open_on(volume(&disks, faults), 8192, &Create::default())))
}

/// Commits a step, and returns the bytes of record 0 in the store.
fn committed(engine: &Engine, step: u64) -> Vec<u8> {
    ok(engine.commit(Commit { step, ..Commit::default() }, Wait::forever()));
    let store = engine.store();
    let mut all = Vec::new();
    for extent in 0..store.layout().extents_of(0) {
        let place = store.layout().extent(store.description(), 0, extent);
        let room = vec![0; usize::try_from(place.bytes()).unwrap_or(0)];
        all.extend(ok(ok(store.read(0, extent, room)).wait()).0);
    }
    all
}

#[test]
fn spilling_update_equals_spill_then_update_and_can_be_taken_back() {
    let image = filled();
    let waits = fresh(&image, &Faults::default());
    ok(spill(&waits, 0, 0.3, false));
    let measured = ok(waits.spilled(0, Wait::forever()));
    ok(waits.update(0, GradientSource::Spilled(Vec::new()), None, numbers(1), Wait::forever()));
    let wanted = committed(&waits, 1);

    let engine = fresh(&image, &Faults::default());
    ok(spilling(&engine, 0, 0.3, 1));
    assert_eq!(format!("{:?}", ok(engine.spilled(0, Wait::forever()))), format!("{measured:?}"));
    assert!(committed(&engine, 1) == wanted);
    assert_eq!(engine.counters().spill_read, 0);

    // Calls `take_back` at different moments of the update. Each time, the spilled gradient must remain, and another
    // update must be able to use half of this gradient.
    let halved = fresh(&image, &Faults::default());
    ok(spill(&halved, 0, 0.3, false));
    ok(halved.update(0, GradientSource::Spilled(vec![0.5]), None, numbers(1), Wait::forever()));
    let wanted = committed(&halved, 1);
    for pause in std::iter::repeat_n(Duration::ZERO, 30).chain([Duration::from_millis(20)]) {
        let engine = fresh(&image, &Faults::default());
        ok(spilling(&engine, 0, 0.3, 1));
        std::thread::sleep(pause);
        ok(engine.take_back(0, Wait::forever()));
        ok(engine.read_spilled(0, Box::new(bytes(0.0)), Wait::forever()));
        assert_eq!(format!("{:?}", ok(engine.spilled(0, Wait::forever()))), format!("{measured:?}"));
        ok(engine.update(0, GradientSource::Spilled(vec![0.5]), None, numbers(1), Wait::forever()));
        assert!(committed(&engine, 1) == wanted);
    }
}

#[test]
fn discarded_spilling_update_leaves_a_complete_gradient_or_none() {
    let image = filled();
    let elements = f64::from(u32::try_from(NUMEL).unwrap_or(0));
    for pause in std::iter::repeat_n(Duration::ZERO, 30) {
        let engine = fresh(&image, &Faults::default());
        ok(spilling(&engine, 0, 0.3, 1));
        std::thread::sleep(pause);
        ok(engine.discard_record(0, Wait::forever()));
        if let Ok(found) = engine.spilled(0, Wait::forever()) {
            assert!((found.squares.value() - 0.09 * elements).abs() < 1.0, "{found:?}");
            ok(engine.read_spilled(0, Box::new(bytes(0.0)), Wait::forever()));
        }
    }
    let mut failures = 0;
    for seed in 0..100 {
        let errors = vec![(Action::Write, 5, 40), (Action::Read, 5, 40)];
        let faults = Faults { seed, errors, reorder: true, ..Faults::default() };
        let disks: Vec<SimDisk> = image.iter().cloned().map(SimDisk::of).collect();
        let Ok(store) = Store::open_on(volume(&disks, &faults), 8192, &Create::default()) else { continue };
        let engine = engine(store);
        let done = spilling(&engine, 0, 0.3, 1).and_then(|()| engine.finish(Wait::forever()));
        if let Err(error) = done {
            failures += 1;
            assert!(is_cause(&error), "seed {seed}: {error}");
            if engine.discard(Wait::forever()).is_err() {
                continue;
            }
            // Reading the gradient back may also fail. So this check uses only its sum of squares, which the engine has
            // in memory.
            if let Ok(found) = engine.spilled(0, Wait::forever()) {
                assert!((found.squares.value() - 0.09 * elements).abs() < 1.0, "seed {seed}: {found:?}");
            }
        }
    }
    assert!(failures > 20, "{failures}");
}
