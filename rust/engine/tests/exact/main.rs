//! Tests that updates through the engine give the kernel's bits, and that faults end a step and no more.

mod training;

use std::sync::Arc;

use memascend_engine::{By, Gradient};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, SimDisk},
};
use memascend_store::{Create, Dtype, Store};

use crate::training::{
    Training, description, differing, disks, engine, gradient, hyperparameters, opened, reference, touched, training,
    volume,
};

#[test]
fn a_hundred_steps_are_those_in_memory() {
    for chunks in [2, 4, 7] {
        let mut training = training(&disks(), chunks);
        for step in 1..=100 {
            if step % 10 == 7 {
                // A step that is skipped costs nothing.
                training.backward(step + 1000).unwrap_or_else(|error| panic!("{error}"));
                training.engine.discard(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
            }
            training.backward(step).unwrap_or_else(|error| panic!("{error}"));
            training.commit(step).unwrap_or_else(|error| panic!("{error}"));
        }
        assert_eq!(differing(training.engine.store(), &training.held), Vec::<String>::new(), "{chunks} chunks");
        let counters = training.engine.counters();
        assert!(counters.updates > 1000 && counters.state_read == counters.state_written, "{counters:?}");
    }
}

#[test]
fn a_failed_step_is_told_once_and_the_next_one_is_exact() {
    for seed in 0..60 {
        let disks = disks();
        let Training { engine: first, held } = training(&disks, 4);
        drop(first);
        let errors = vec![(Action::Write, libc_eio(), 6), (Action::Read, libc_eio(), 6)];
        let volume = volume(&disks, &Faults { seed, errors, reorder: true, ..Faults::default() });
        // Opening reads too, and may be what fails.
        let Ok(store) = Store::open_on(volume, 8192, &Create::default()).map(Arc::new) else { continue };
        let mut training = Training { engine: engine(store, 4), held };
        let (mut step, mut failures) = (1, 0);
        while step <= 6 && failures < 40 {
            let result = training.backward(step).and_then(|()| training.commit(step));
            match result {
                Ok(()) => step += 1,
                Err(error) => {
                    failures += 1;
                    assert!(error.to_string().contains("errno 5"), "seed {seed}: {error}");
                    let again = training.engine.finish(Wait::forever());
                    if let Err(again) = again {
                        assert!(again.to_string().contains("only be discarded"), "seed {seed}: {again}");
                    }
                    if training.engine.discard(Wait::forever()).is_err() {
                        break;
                    }
                }
            }
        }
        // Everything that was committed, and nothing else.
        let Training { engine, held } = training;
        engine.close();
        drop(engine);
        let store = opened(&disks, &Faults::default());
        let last = store.info().step;
        assert!(last + 1 == step || last == step, "seed {seed}");
        if last + 1 == step {
            assert_eq!(differing(&store, &held), Vec::<String>::new(), "seed {seed}");
        }
    }
}

fn libc_eio() -> i32 {
    5
}

#[test]
fn what_cannot_be_updated_is_refused_by_name() {
    let training = training(&disks(), 2);
    let update = |entry: usize, bytes: usize, dtype| {
        let gradient = Gradient::new(Box::new(vec![0_u8; bytes]), dtype)?;
        training.engine.update(entry, By::Given(gradient), None, hyperparameters(1), Wait::forever())
    };
    let text = |result: memascend_engine::Result<()>| result.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(text(update(99, 2, Dtype::Bf16)).contains("entry 99"));
    assert!(text(update(1, 2, Dtype::Bf16)).contains("has 1 elements, not 13"));
    assert!(text(update(1, 26, Dtype::I16)).contains("int16"));
    training.engine.close();
    assert!(text(update(1, 26, Dtype::Bf16)).contains("closed"));
    training.engine.close();
}

#[test]
fn power_lost_at_any_point_of_a_step() {
    // Counted once without a crash, then every point.
    let base = disks();
    let Training { engine: first, held } = training(&base, 4);
    drop(first);
    let image: Vec<Vec<u8>> = base.iter().map(SimDisk::bytes).collect();
    let copies = || image.iter().cloned().map(SimDisk::of).collect::<Vec<SimDisk>>();
    let mut points = 0;
    loop {
        let disks = copies();
        let faults = Faults { dies_after: Some(points), ..Faults::default() };
        let store = Store::open_on(volume(&disks, &faults), 8192, &Create::default());
        let mut done = 0;
        let mut tried = 0;
        let mut states = vec![held.clone()];
        if let Ok(store) = store {
            let mut training = Training { engine: engine(Arc::new(store), 4), held: held.clone() };
            for step in 1..=2 {
                if training.backward(step).is_err() {
                    break;
                }
                tried = step;
                // The reference runs also where the commit fails: it may have been made all the same.
                let committed = training.commit(step).is_ok();
                if !committed {
                    for (entry, described) in description().entries.iter().enumerate() {
                        let Some(update) = touched(entry, step) else { continue };
                        let numel = usize::try_from(described.elements()).unwrap_or(0);
                        let bytes = gradient(entry, described.dtype, numel, step);
                        reference(&mut training.held[entry], described.dtype, &bytes, update);
                    }
                    states.push(training.held.clone());
                    break;
                }
                states.push(training.held.clone());
                done = step;
            }
        }
        for loss in 0..3 {
            let left: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
            let store = opened(&left, &Faults::default());
            let step = store.info().step;
            assert!(step == done || step == tried, "point {points}, loss {loss}: {step}, {done} done, {tried} tried");
            let state = &states[usize::try_from(step).unwrap_or(0)];
            assert_eq!(differing(&store, state), Vec::<String>::new(), "point {points}, loss {loss}");
        }
        if done == 2 {
            break;
        }
        points += 1;
    }
    assert!(points > 60, "{points}");
}
