//! Tests the upgrade of version-1 stores in place: whole at every moment, through kills and power loss.

mod toy;
mod version_1;

use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Create, Error, Existing, Store};

/// More than an upgrade needs.
const ROOM: usize = 64 << 10;

/// In a boot that is none of those in which the stores were written.
fn how() -> Create {
    let mut how = toy::how();
    how.boot = Some([9; 16]);
    how
}

fn upgraded(disks: &[SimDisk], faults: &Faults) -> Result<bool, Error> {
    Store::upgrade_on(toy::volume(disks, faults), toy::STRIPE, &how())
}

fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn opened(disks: &[SimDisk]) -> Result<Store, Error> {
    toy::open(disks, &how())
}

/// A store that was upgraded: the step it was at, both of its roots, and training that goes on.
fn whole(disks: &[SimDisk], step: u64, name: &str) {
    let store = ok(opened(disks));
    assert_eq!(toy::check(&store, name), step, "{name}");
    assert_eq!(ok(store.damaged()), Vec::<String>::new(), "{name}");
    drop(store);
    let left = without_newest_root(disks);
    assert_eq!(toy::check(&ok(opened(&left)), name), step, "{name}: its other root");
    let store = ok(opened(disks));
    ok(toy::step(&store, step + 1));
    ok(store.close(Wait::forever()));
    drop(store);
    assert_eq!(toy::check(&ok(opened(disks)), name), step + 1, "{name}: a step later");
}

/// The same devices after the newest root was lost and the other one opened in its place.
fn without_newest_root(disks: &[SimDisk]) -> Vec<SimDisk> {
    let generation = ok(opened(disks)).info().generation;
    // The labels take a stripe of each device, and the roots follow.
    let at = if disks.len() == 1 { 4096 } else { usize::try_from(toy::STRIPE).unwrap_or(0) };
    let at = at + usize::try_from(generation & 1).unwrap_or(0) * 4096;
    let copy = |(index, disk): (usize, &SimDisk)| {
        let mut bytes = disk.bytes();
        if index == 0 {
            bytes[at..at + 4096].fill(0);
        }
        SimDisk::of(bytes)
    };
    let left: Vec<SimDisk> = disks.iter().enumerate().map(copy).collect();
    let refused = opened(&left).map(drop).map_err(|error| error.to_string());
    assert!(refused.as_ref().is_err_and(|why| why.contains("it is blank")), "{refused:?}");
    let mut previous = how();
    previous.existing = Existing::Previous;
    drop(ok(toy::open(&left, &previous)));
    left
}

#[test]
fn what_version_1_wrote_is_opened_by_no_one_and_upgraded() {
    // Closed, killed after a commit, written without a flush by a boot that has gone, closed with durability "none".
    for (name, step) in [("one", 3), ("two", 4), ("three", 3), ("unflushed", 3), ("closed", 4)] {
        let disks = version_1::disks(name, ROOM);
        let before: Vec<Vec<u8>> = disks.iter().map(SimDisk::bytes).collect();
        let refused = opened(&disks).map(drop).map_err(|error| error.to_string());
        assert!(refused.as_ref().is_err_and(|why| why.contains("`memascend store upgrade`")), "{name}: {refused:?}");
        assert!(before.iter().zip(&disks).all(|(before, disk)| *before == disk.bytes()), "{name}: nothing was changed");
        assert!(ok(upgraded(&disks, &Faults::default())), "{name}");
        assert!(!ok(upgraded(&disks, &Faults::default())), "{name}: once is enough");
        whole(&disks, step, name);
    }
}

#[test]
fn what_cannot_be_upgraded_says_why_and_stays_as_it_is() {
    let tight = version_1::disks("one", 0);
    let flipped = version_1::disks("unflushed", ROOM);
    // Every page behind the catalog: also those that the newest root names.
    (20..flipped[0].bytes().len() / 4096).for_each(|page| flipped[0].flip(page * 4096 + 100, 1));
    for (disks, words) in [
        (tight, "needs 12288 bytes more than its devices hold"),
        (version_1::disks("unclosed", ROOM), "was not closed"),
        (version_1::disks("unfinished", ROOM), "first write did not finish"),
        (flipped, "not closed before the machine went down"),
    ] {
        let before = disks[0].bytes();
        let refused = upgraded(&disks, &Faults::default()).map_err(|error| error.to_string());
        assert!(refused.as_ref().is_err_and(|why| why.contains(words)), "{words}: {refused:?}");
        assert!(disks[0].bytes() == before, "{words}");
    }
}

/// Upgrades with the power gone after so many requests, and says whether that was before the end.
fn cut(name: &str, step: u64, after: u64) -> bool {
    let disks = version_1::disks(name, ROOM);
    let faults = Faults { dies_after: Some(after), ..Faults::default() };
    let ended = upgraded(&disks, &faults);
    for loss in (0..8).step_by(toy::many(1, 7)) {
        // The last is a process that died on a machine that did not.
        let left: Vec<SimDisk> = match loss {
            7 => disks.iter().map(|disk| SimDisk::of(disk.bytes())).collect(),
            loss => disks.iter().map(|disk| disk.after_power_loss(loss)).collect(),
        };
        let seed = format!("{name}, dead after {after}, loss {loss}");
        match opened(&left) {
            Ok(store) => assert_eq!(toy::check(&store, &seed), step, "{seed}"),
            Err(error) => {
                assert!(ended.is_err(), "{seed}: {error}");
                assert!(error.to_string().contains("`memascend store upgrade`"), "{seed}: {error}");
                assert!(
                    upgraded(&left, &Faults::default()).unwrap_or_else(|error| panic!("{seed}: {error}")),
                    "{seed}"
                );
            }
        }
        whole(&left, step, &seed);
    }
    ended.is_err()
}

#[test]
fn a_kill_or_a_loss_of_power_at_any_request_leaves_one_version_or_the_other() {
    for (name, step) in [("one", 3), ("two", 4), ("three", 3), ("unflushed", 3)] {
        let mut requests = 0;
        while cut(name, step, requests) {
            requests += 1;
        }
        assert!(requests > 15, "{name}: {requests}");
    }
}

#[test]
fn an_upgrade_that_is_cut_twice_comes_to_its_end() {
    for first in (0..200).step_by(toy::many(3, 11)) {
        let disks = version_1::disks("two", ROOM);
        drop(upgraded(&disks, &Faults { dies_after: Some(first), ..Faults::default() }));
        let disks: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(first)).collect();
        for second in (0..60).step_by(toy::many(7, 19)) {
            let disks: Vec<SimDisk> = disks.iter().map(|disk| SimDisk::of(disk.bytes())).collect();
            drop(upgraded(&disks, &Faults { dies_after: Some(second), ..Faults::default() }));
            let disks: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(second)).collect();
            let name = format!("cut after {first} and {second}");
            upgraded(&disks, &Faults::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(toy::check(&ok(opened(&disks)), &name), 4);
        }
    }
}
