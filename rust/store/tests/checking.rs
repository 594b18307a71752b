//! Tests parts checked on other threads: the same bytes and errors, and no access to freed memory.

use std::sync::Arc;

use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Checkers, Error, Parts, Store};

mod toy;

use toy::Seen;

fn trained(disks: &[SimDisk]) -> Arc<Store> {
    let store = Store::create_on(toy::volume(disks, &Faults::default()), toy::STRIPE, toy::description(), &toy::how());
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    (0..=3).for_each(|step| toy::step(&store, step).unwrap_or_else(|error| panic!("{error}")));
    Arc::new(store)
}

/// The smallest parts there are: the largest piece of the unit.
fn parts(store: &Arc<Store>, unit: usize) -> Arc<Parts> {
    let bytes = (12..40).map(|power| 1 << power);
    let parts = bytes.map(|bytes| store.parts(unit, bytes)).find_map(Result::ok);
    Arc::new(parts.unwrap_or_else(|| panic!("no parts")))
}

fn rooms(parts: &Arc<Parts>) -> Vec<Seen> {
    parts.places().map(|(_, bytes)| Seen::new(usize::try_from(bytes).unwrap_or(0))).collect()
}

fn read(parts: &Arc<Parts>, checkers: &Checkers<Seen>, rooms: &[Seen]) -> Vec<Result<(), Error>> {
    let begun: Vec<_> = rooms
        .iter()
        .enumerate()
        .map(|(index, room)| parts.begin(index, room.clone()).map(|part| checkers.check(part)))
        .collect();
    // The last ones first: each is told of by itself.
    let ended = begun.iter().rev().map(|part| match part {
        Ok(part) => {
            let first = part.wait(Wait::forever());
            assert!(part.is_done());
            assert_eq!(first.is_ok(), part.wait(Wait::forever()).is_ok(), "another answer the second time");
            first
        }
        Err(error) => Err(error.clone()),
    });
    let mut ended: Vec<_> = ended.collect();
    ended.reverse();
    ended
}

#[test]
fn parts_are_the_same_whoever_checks_them() {
    let store = trained(&toy::disks(2));
    for unit in 0..3 {
        let parts = parts(&store, unit);
        let expected = rooms(&parts);
        for (index, room) in expected.iter().enumerate() {
            let part = parts.begin(index, room.clone()).unwrap_or_else(|error| panic!("{error}"));
            part.wait(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
        }
        for threads in 0..=3 {
            let checkers = Checkers::new(threads);
            assert_eq!(checkers.threads(), threads);
            let found = rooms(&parts);
            assert!(read(&parts, &checkers, &found).iter().all(Result::is_ok));
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.bytes(), expected.bytes(), "unit {unit} with {threads} threads");
            }
        }
    }
}

#[test]
fn a_changed_byte_is_told_by_its_part_alone() {
    let disks = toy::disks(1);
    let store = trained(&disks);
    let parts = parts(&store, 1);
    let whole = rooms(&parts);
    assert!(read(&parts, &Checkers::new(1), &whole).iter().all(Result::is_ok));
    assert!(whole.len() > 1, "one part alone shows nothing");
    let damaged = whole.len() / 2;
    let length = whole[damaged].bytes().len().min(64);
    let image = disks[0].bytes();
    let at = image.windows(length).position(|bytes| *bytes == whole[damaged].bytes()[..length]);
    disks[0].flip(at.unwrap_or_else(|| panic!("the part is not on the disk")), 0x10);
    for threads in 0..=2 {
        let outcomes = read(&parts, &Checkers::new(threads), &rooms(&parts));
        for (index, outcome) in outcomes.iter().enumerate() {
            assert_eq!(index == damaged, matches!(outcome, Err(Error::Corrupt { .. })), "part {index}: {outcome:?}");
        }
    }
}

#[test]
fn what_is_dropped_is_let_go_and_what_was_handed_over_is_checked() {
    let store = trained(&toy::disks(1));
    let parts = parts(&store, 1);
    let checkers = Checkers::new(2);
    for room in rooms(&parts).into_iter().take(1) {
        let part = parts.begin(0, room.clone()).unwrap_or_else(|error| panic!("{error}"));
        let checking = checkers.check(part);
        drop(checking);
        // The checkers have let go of the memory; the disk's own thread does in a moment.
        let began = std::time::Instant::now();
        while room.clones() > 1 {
            assert!(began.elapsed().as_secs() < 60, "somebody still has the memory");
            std::thread::yield_now();
        }
    }
    // Those that were handed over are checked before the threads end.
    let rooms = rooms(&parts);
    let begun: Vec<_> = (0..rooms.len())
        .map(|index| parts.begin(index, rooms[index].clone()).unwrap_or_else(|error| panic!("{error}")))
        .map(|part| checkers.check(part))
        .collect();
    drop(checkers);
    for part in begun {
        assert!(part.is_done());
        part.wait(Wait::never()).unwrap_or_else(|error| panic!("{error}"));
    }
}
