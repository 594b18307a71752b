//! Tests a power loss at every point of short runs and at random points of long ones.
//!
//! What is found is the last committed step, or the one whose commit was in flight, and never a mixture.

mod toy;

use std::time::Duration;

use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, Rng, SimDisk},
};
use memascend_store::{Create, Durability, Error, Store};

/// What a run had done when it ended.
#[derive(Debug, Clone, Copy, Default)]
struct Ended {
    committed: Option<u64>,
    /// The step whose commit had begun.
    tried: Option<u64>,
}

/// Trains until `steps` or the first error.
fn train(store: &Store, from: u64, steps: u64, skip: impl Fn(u64) -> bool, ended: &mut Ended) -> Result<(), Error> {
    for step in from..=steps {
        if step > 1 && skip(step) {
            toy::abandoned(store, step)?;
        }
        ended.tried = Some(step);
        toy::step(store, step)?;
        ended.committed = Some(step);
    }
    Ok(())
}

fn run(disks: &[SimDisk], faults: &Faults, how: &Create, steps: u64) -> Ended {
    let mut ended = Ended::default();
    let store = Store::create_on(toy::volume(disks, faults), toy::STRIPE, toy::description(), how);
    if let Ok(store) = store {
        drop(train(&store, 0, steps, |step| step % 3 == 2, &mut ended));
    }
    ended
}

/// Opens what is left and says that it is one of the steps that it may be.
fn reopened(disks: &[SimDisk], how: &Create, ended: Ended, seed: &str) {
    match toy::open(disks, how) {
        Ok(store) => {
            let step = toy::check(&store, seed);
            assert!(Some(step) == ended.committed || Some(step) == ended.tried, "{seed}: step {step} after {ended:?}");
        }
        Err(error) => {
            assert!(ended.committed.is_none(), "{seed}: after {ended:?}: {error}");
            let named = matches!(error, Error::Refused { .. } | Error::Unfilled { .. } | Error::Corrupt { .. });
            assert!(named, "{seed}: {error}");
        }
    }
}

fn requests(count: usize, how: &Create, steps: u64) -> u64 {
    let disks = toy::disks(count);
    let store = Store::create_on(toy::volume(&disks, &Faults::default()), toy::STRIPE, toy::description(), how);
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    train(&store, 0, steps, |step| step % 3 == 2, &mut Ended::default()).unwrap_or_else(|error| panic!("{error}"));
    let stats = store.volume().stats();
    assert_eq!(stats.retried + stats.continued, 0, "{stats:?}");
    stats.written.requests + stats.read.requests + stats.flushes * count as u64
}

#[test]
fn every_crash_point_of_a_short_run() {
    for count in [1, 2] {
        let how = toy::how();
        let points = requests(count, &how, 3);
        assert!(points > 80, "{points}");
        toy::side_by_side(0..points + 1, |point| {
            let disks = toy::disks(count);
            let faults = Faults { dies_after: Some(point), ..Faults::default() };
            let ended = run(&disks, &faults, &how, 3);
            for loss in 0..toy::many(6, 2) {
                let left: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
                reopened(&left, &how, ended, &format!("{count} devices, point {point}, loss {loss}"));
            }
            // The process died and the machine did not.
            reopened(&disks, &how, ended, &format!("{count} devices, point {point}, killed"));
        });
    }
}

#[test]
fn a_killed_process_loses_nothing_with_durability_close() {
    let mut how = toy::how();
    how.durability = Durability::Close;
    let points = requests(1, &how, 3);
    for point in 0..=points {
        let disks = toy::disks(1);
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        let ended = run(&disks, &faults, &how, 3);
        reopened(&disks, &how, ended, &format!("point {point}"));
    }
}

#[test]
fn without_durability_a_store_is_whole_after_close_and_refused_before() {
    let mut how = toy::how();
    how.durability = Durability::None;
    let disks = toy::disks(1);
    let ended = run(&disks, &Faults::default(), &how, 4);
    assert_eq!(ended.committed, Some(4));
    let refused = toy::open(&disks, &how).map(drop).map_err(|error| error.to_string());
    assert!(refused.as_ref().is_err_and(|why| why.contains("was not closed")), "{refused:?}");

    let disks = toy::disks(1);
    let store = Store::create_on(toy::volume(&disks, &Faults::default()), toy::STRIPE, toy::description(), &how);
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    train(&store, 0, 5, |step| step == 3, &mut Ended::default()).unwrap_or_else(|error| panic!("{error}"));
    store.close(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
    drop(store);
    let left = [disks[0].after_power_loss(1)];
    let store = toy::open(&left, &how).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(toy::check(&store, "closed"), 5);
}

/// Errors, retries, short transfers, reordering and a loss of power, again and again on the same devices.
fn life(seed: u64) {
    let mut rng = Rng::new(seed);
    let count = 1 + rng.below(2);
    let how = toy::how();
    let name = format!("seed {seed}");
    let mut disks = toy::disks(count);
    let mut ended = Ended::default();
    for epoch in 0..4 {
        let faults = Faults {
            seed: rng.bits(),
            short: 30,
            temporary: 30,
            errors: vec![(Action::Write, libc::EIO, 8), (Action::Flush, libc::EIO, 20)],
            delay: Duration::ZERO,
            reorder: true,
            dies_after: rng.chance(700).then(|| 40 + rng.below(300) as u64),
        };
        let opened = if ended.committed.is_none() {
            disks = toy::disks(count);
            ended = Ended::default();
            Store::create_on(toy::volume(&disks, &faults), toy::STRIPE, toy::description(), &how)
        } else {
            Store::open_on(toy::volume(&disks, &faults), toy::STRIPE, &how)
        };
        if let Ok(store) = opened {
            let from = ended.committed.map_or(0, |step| step + 1);
            let mut tries = 0;
            while let Err(error) =
                train(&store, ended.committed.map_or(0, |step| step + 1), from + 5, |step| step % 4 == 1, &mut ended)
            {
                tries += 1;
                // What failed before its commit is discarded and done again; after a failed commit only reopening helps.
                if tries > 3 || matches!(error, Error::Broken(_)) || store.discard(Wait::forever()).is_err() {
                    break;
                }
            }
        }
        let loss = rng.bits();
        if rng.chance(700) {
            disks = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
        }
        let name = format!("{name}, epoch {epoch}");
        reopened(&disks, &how, ended, &name);
        if let Ok(store) = toy::open(&disks, &how) {
            ended = Ended { committed: Some(store.info().step), tried: Some(store.info().step) };
        } else {
            ended = Ended::default();
        }
    }
}

#[test]
fn random_lives() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("MEMASCEND_SEED") {
        return life(seed);
    }
    let seeds = number("MEMASCEND_SEEDS").unwrap_or(toy::many(1000, 120));
    toy::side_by_side(0..seeds, |seed| {
        let lived = std::panic::catch_unwind(|| life(seed));
        assert!(lived.is_ok(), "run it again with MEMASCEND_SEED={seed}");
    });
}
