//! Tests a store with a log: death and loss of power at every request, damage in it, replays that are cut short.
//!
//! What is found is the last committed step, or the one whose commit was in flight, and never a mixture.

use std::time::Duration;

use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, Rng, SimDisk},
};
use memascend_store::{Create, Durability, Error, Existing, Store};

mod logged;
mod toy;

use logged::State;

/// What a run had done when it ended.
#[derive(Debug, Clone, Copy, Default)]
struct Ended {
    committed: Option<u64>,
    /// The commit that had begun.
    tried: Option<u64>,
}

fn ok<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn disks(count: usize) -> Vec<SimDisk> {
    (0..count).map(|_| SimDisk::new((2 << 20) / count)).collect()
}

fn states(commits: u64) -> Vec<State> {
    let faults = Faults::default();
    let store = Store::create_on(toy::volume(&disks(1), &faults), toy::STRIPE, toy::description(), &toy::how());
    logged::states(&ok(store), commits)
}

/// Commits until a number, or the first error; one that was begun and forgotten comes before some.
fn train(store: &Store, states: &[State], from: u64, to: u64, ended: &mut Ended) -> Result<(), Error> {
    for commit in from..=to {
        if commit % 5 == 3 {
            abandoned(store, states, commit)?;
        }
        ended.tried = Some(commit);
        logged::commit(store, states, commit)?;
        ended.committed = Some(commit);
    }
    Ok(())
}

/// Appends and stages some of a step and forgets it, as a skipped step does.
fn abandoned(store: &Store, states: &[State], commit: u64) -> Result<(), Error> {
    for (entry, dtype) in logged::HELD.into_iter().take(2) {
        let garbage = vec![0x55; logged::gradient(store, entry, dtype, commit).len()];
        for write in logged::append(store, entry, dtype, &garbage)?.into_iter().flatten() {
            write.wait()?;
        }
    }
    logged::stage(store, 7, &logged::after(states, commit - 1)[&7])?;
    store.discard(Wait::forever())
}

fn begun(disks: &[SimDisk], faults: &Faults, how: &Create, steps: u32, states: &[State], to: u64) -> Ended {
    let mut ended = Ended::default();
    let store = Store::create_on(toy::volume(disks, faults), toy::STRIPE, toy::description(), how);
    if let Ok(store) = store {
        ended.tried = Some(0);
        if logged::commit(&store, states, 0).is_ok() {
            ended.committed = Some(0);
            if let Ok(kept) = store.keep_log(&logged::HELD, steps) {
                assert_eq!(kept, steps);
                drop(train(&store, states, 1, to, &mut ended));
            }
        }
    }
    ended
}

/// Opens what is left, and says that it is a commit that it may be, with its bytes.
fn reopened(disks: &[SimDisk], how: &Create, ended: Ended, states: &[State], name: &str) -> Option<Store> {
    match toy::open(disks, how) {
        Ok(store) => {
            let commit = logged::committed(&store);
            let may_be = Some(commit) == ended.committed || Some(commit) == ended.tried;
            assert!(may_be, "{name}: commit {commit} after {ended:?}");
            let state = logged::replayed(&store).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(state == *logged::after(states, commit), "{name}: commit {commit}");
            Some(store)
        }
        Err(error) => {
            assert!(ended.committed.is_none(), "{name}: after {ended:?}: {error}");
            assert!(
                matches!(error, Error::Refused { .. } | Error::Unfilled { .. } | Error::Corrupt { .. }),
                "{name}: {error}"
            );
            None
        }
    }
}

fn requests(store: &Store) -> u64 {
    let stats = store.volume().stats();
    assert_eq!(stats.retried + stats.continued, 0, "{stats:?}");
    stats.written.requests + stats.read.requests + stats.flushes
}

#[test]
fn every_crash_point_of_a_short_run() {
    const COMMITS: u64 = 7;
    let states = states(COMMITS);
    let how = toy::how();
    let whole = disks(1);
    let store = Store::create_on(toy::volume(&whole, &Faults::default()), toy::STRIPE, toy::description(), &how);
    let store = ok(store);
    ok(logged::commit(&store, &states, 0));
    let first = requests(&store);
    ok(store.keep_log(&logged::HELD, 2));
    ok(train(&store, &states, 1, COMMITS, &mut Ended::default()));
    let points = requests(&store);
    assert!(points > first + 100, "{first} and then {points}");
    toy::side_by_side(first..points + 1, |point| {
        let disks = disks(1);
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        let ended = begun(&disks, &faults, &how, 2, &states, COMMITS);
        for loss in 0..2 {
            let left = [disks[0].after_power_loss(loss)];
            reopened(&left, &how, ended, &states, &format!("point {point}, loss {loss}"));
        }
        // The process died and the machine did not.
        reopened(&disks, &how, ended, &states, &format!("point {point}, killed"));
    });
}

#[test]
fn a_replay_that_is_cut_short_is_done_again() {
    const COMMITS: u64 = 6;
    let states = states(COMMITS);
    let how = toy::how();
    let found = disks(1);
    let ended = begun(&found, &Faults::default(), &how, 16, &states, COMMITS);
    let ended = Ended { tried: ended.committed, ..ended };
    let settle = |disks: &[SimDisk], faults: &Faults| -> Result<u64, Error> {
        let store = Store::open_on(toy::volume(disks, faults), toy::STRIPE, &how)?;
        let state = logged::replayed(&store)?;
        logged::settled(&store, &state)?;
        Ok(requests(&store))
    };
    let points = ok(settle(&[found[0].after_power_loss(0)], &Faults::default()));
    toy::side_by_side(0..points + 1, |point| {
        let disks = [found[0].after_power_loss(point)];
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        let settled = settle(&disks, &faults);
        assert_eq!(settled.is_ok(), point == points, "point {point}");
        let disks = [disks[0].after_power_loss(point)];
        let name = format!("point {point}");
        let store = reopened(&disks, &how, ended, &states, &name).unwrap_or_else(|| panic!("{name}: no store"));
        ok(logged::settled(&store, logged::after(&states, COMMITS)));
        assert_eq!((store.log_state().steps, store.pending_replay().is_none()), (0, true), "{name}");
        ok(store.close(Wait::forever()));
        drop(store);
        let store = reopened(&disks, &how, ended, &states, &name).unwrap_or_else(|| panic!("{name}: no store"));
        assert!(store.pending_replay().is_none(), "{name}");
    });
}

#[test]
fn a_flipped_bit_in_what_the_root_names_is_named_and_any_other_is_not_seen() {
    const COMMITS: u64 = 6;
    let states = states(COMMITS);
    let how = toy::how();
    let found = disks(1);
    begun(&found, &Faults::default(), &how, 16, &states, COMMITS);
    let store = ok(toy::open(&found, &how));
    let log = store.log_state();
    assert!(log.steps >= 4 && log.entries == 5, "{log:?}");
    let (begin, end) = (log.offset, log.offset + log.bytes);
    drop(store);
    let (mut gradients, mut heads, mut unseen) = (0, 0_u64, 0);
    for page in (begin..end.min(begin + (240 << 10))).step_by(4096) {
        let disks = [found[0].after_power_loss(0)];
        disks[0].flip(usize::try_from(page).unwrap_or(0) + 3, 4);
        let opened = toy::open(&disks, &how);
        match opened.and_then(|store| logged::replayed(&store).map(|state| (store, state))) {
            Ok((store, state)) => {
                assert!(state == states[states.len() - 1], "offset {page}");
                ok(store.verify(&mut |_, _| true));
                unseen += 1;
            }
            Err(Error::Corrupt { what, offset, nbytes, .. }) => {
                assert!((offset..offset + nbytes).contains(&page), "{what}, not at offset {page}");
                if what.contains("of the gradient of") {
                    gradients += 1;
                    let store = ok(toy::open(&disks, &how));
                    assert!(store.verify(&mut |_, _| true).is_err_and(|error| error.to_string().contains(&what)));
                } else {
                    assert!(what.contains("head of"), "{what}");
                    heads += 1;
                }
            }
            Err(error) => panic!("offset {page}: {error}"),
        }
    }
    assert!(gradients > 8 && heads == log.steps && unseen > 5, "{gradients}, {heads}, {unseen}");
}

#[test]
fn the_commit_before_is_whole_until_the_next_one_begins() {
    const COMMITS: u64 = 24;
    let states = states(COMMITS);
    let (how, mut before) = (toy::how(), toy::how());
    before.existing = Existing::Previous;
    for steps in [1, 3] {
        let disks = disks(1);
        let store = Store::create_on(toy::volume(&disks, &Faults::default()), toy::STRIPE, toy::description(), &how);
        let store = ok(store);
        ok(logged::commit(&store, &states, 0));
        ok(store.keep_log(&logged::HELD, steps));
        for commit in 1..=COMMITS {
            ok(logged::commit(&store, &states, commit));
            let left = [disks[0].after_power_loss(0)];
            let ended = Ended { committed: Some(commit - 1), tried: None };
            let name = format!("{steps} steps, before commit {commit}");
            drop(reopened(&left, &before, ended, &states, &name).unwrap_or_else(|| panic!("{name}: no store")));
            // It was gone back to for good, and goes on from there.
            let store = reopened(&left, &how, ended, &states, &name).unwrap_or_else(|| panic!("{name}: no store"));
            ok(store.keep_log(&logged::HELD, steps));
            ok(logged::commit(&store, &states, commit));
            drop(store);
            drop(reopened(&left, &how, Ended { committed: Some(commit), tried: None }, &states, &name));
        }
    }
}

/// Errors, retries, reordering, loss of power, other room and other ways to go on, again and again on the same devices.
fn life(seed: u64, states: &[State]) {
    let mut rng = Rng::new(seed);
    let mut how = toy::how();
    let count = 1 + rng.below(2);
    if rng.chance(300) {
        how.durability = Durability::Close;
    }
    let mut disks = disks(count);
    let mut ended = Ended::default();
    for epoch in 0..5 {
        let name = format!("seed {seed}, epoch {epoch}");
        let faults = Faults {
            seed: rng.bits(),
            short: 30,
            temporary: 30,
            errors: vec![(Action::Write, libc::EIO, 5), (Action::Flush, libc::EIO, 10)],
            delay: Duration::ZERO,
            reorder: true,
            dies_after: rng.chance(700).then(|| 40 + rng.below(500) as u64),
        };
        let (steps, settles) = ([1, 2, 3, 16][rng.below(4)], rng.chance(500));
        let mut live = || -> Result<(), Error> {
            let store = if ended.committed.is_none() {
                let volume = toy::volume(&disks, &faults);
                let store = Store::create_on(volume, toy::STRIPE, toy::description(), &how)?;
                ended.tried = Some(0);
                logged::commit(&store, states, 0)?;
                ended.committed = Some(0);
                store
            } else {
                let store = Store::open_on(toy::volume(&disks, &faults), toy::STRIPE, &how)?;
                let state = logged::replayed(&store)?;
                assert!(state == *logged::after(states, logged::committed(&store)), "{name}");
                if settles {
                    logged::settled(&store, &state)?;
                }
                store
            };
            store.keep_log(&logged::HELD, steps)?;
            let to = ended.committed.unwrap_or(0) + 12;
            for _ in 0..4 {
                let from = ended.committed.map_or(0, |commit| commit + 1);
                match train(&store, states, from, to, &mut ended) {
                    Err(error) if matches!(error, Error::Broken(_)) => return Err(error),
                    Err(_) => store.discard(Wait::forever())?,
                    Ok(()) => return Ok(()),
                }
            }
            Ok(())
        };
        drop(live());
        let loss = rng.bits();
        if how.durability == Durability::Step && rng.chance(700) {
            disks = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
        }
        let store = reopened(&disks, &how, ended, states, &name);
        let commit = store.as_ref().map(logged::committed);
        drop(store);
        if commit.is_none() {
            disks = self::disks(count);
        }
        ended = Ended { committed: commit, tried: commit };
    }
}

#[test]
fn random_lives() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let states = states(80);
    if let Some(seed) = number("MEMASCEND_SEED") {
        return life(seed, &states);
    }
    let seeds = number("MEMASCEND_SEEDS").unwrap_or(25);
    toy::side_by_side(0..seeds, |seed| {
        let lived = std::panic::catch_unwind(|| life(seed, &states));
        assert!(lived.is_ok(), "run it again with MEMASCEND_SEED={seed}");
    });
}
