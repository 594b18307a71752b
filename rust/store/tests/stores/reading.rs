//! Tests reads of live values: whole units, parts of units, parts that other threads check, and units in the RAM tier.
//! Each read must return the values of a single commit.

use std::sync::Arc;

use crate::model::{self, Seen, check, commit, ok, size};
use memascend_mem::{Pin, Wait};
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{Checkers, Commit, Error, Parts, Store};

// --- units ------------------------------------------------------------------------------

fn trained(disks: &[SimDisk], steps: u64) -> Arc<Store> {
    let store =
        Store::create_on(model::volume(disks, &Faults::default()), model::STRIPE, model::description(), &model::how());
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    (0..=steps).for_each(|step| ok(commit(&store, step)));
    Arc::new(store)
}

fn room(store: &Store, unit: usize) -> Vec<u8> {
    vec![0xee; size(store.layout().unit_bytes(unit))]
}

/// Returns the values that a unit must have after commit number `commit`.
fn expected(store: &Store, unit: usize, commit: u64) -> Vec<u8> {
    let mut bytes = vec![0; room(store, unit).len()];
    for record in store.records_of(unit) {
        let mut at = size(store.layout().in_unit(record, unit));
        for extent in &model::after(commit)[&record].extents[..store.layout().chunks_of(record) as usize] {
            bytes[at..at + extent.len()].copy_from_slice(extent);
            at += extent.len();
        }
    }
    bytes
}

#[test]
fn fetch_returns_the_last_committed_values_and_version() {
    for count in 1..=3 {
        let store = trained(&model::disks(count), 4);
        for unit in 0..3 {
            let memory = Seen::new(store.layout().unit_bytes(unit));
            let fetch = ok(store.fetch(unit, memory.clone()));
            // Step 0 made generation 1, so step 4 made generation 5. The fetch of unit 1 also returns 5, although the
            // records of unit 1 have several versions.
            let version = ok(fetch.wait(Wait::forever()));
            assert_eq!((version, fetch.is_done()), (5, true), "unit {unit}");
            assert_eq!(fetch.wait(Wait::forever()).unwrap_or(0), 5);
            assert!(memory.bytes() == expected(&store, unit, 4), "unit {unit} on {count} devices");
        }
        let counters = store.counters();
        let bytes: u64 = (0..3).map(|unit| store.layout().unit_bytes(unit)).sum();
        assert_eq!((counters.fetches, counters.fetched_bytes), (3, bytes));
        assert!(counters.waited.as_nanos() > 0);
    }
}

/// Waits until `is_done` returns true, that is, until the devices have finished. Does not call `wait` on a fetch.
fn ended(is_done: impl Fn() -> bool) {
    while !is_done() {
        std::thread::yield_now();
    }
}

#[test]
fn completed_fetch_keeps_its_values_while_commits_overwrite_its_slots() {
    let store = trained(&model::disks(1), 1);
    let memory = Seen::new(store.layout().unit_bytes(0));
    let fetch = ok(store.fetch(0, memory.clone()));
    ended(|| fetch.is_done());
    // The devices have read the slots of `fetch`, so commits may overwrite these slots although `fetch` is still alive.
    for step in 2..=5 {
        ok(commit(&store, step));
    }
    assert_eq!(
        fetch.wait(Wait::forever()).unwrap_or(0),
        2,
        "the fetch must be checked with the checksums of its own commit"
    );
    assert!(memory.bytes() == expected(&store, 0, 1));
    assert_eq!(check(&store, "after the fetch"), 5);
}

#[test]
fn parts_hold_their_slots_until_each_was_read_once() {
    let store = trained(&model::disks(1), 1);
    let parts = ok(store.parts(0, 8192));
    let (parts, places) = (Arc::new(parts), room(&store, 0).len());
    let sizes: Vec<(u64, u64)> = parts.places().collect();
    assert!(sizes.len() > 1, "{sizes:?}");
    ok(commit(&store, 2));
    let begun = |index: usize| {
        let memory = Seen::new(sizes[index].1);
        parts.begin(index, memory.clone()).map(|fetch| (fetch, memory))
    };
    let mut fetches = Vec::new();
    for index in 0..sizes.len() {
        // The parts that were not read yet must keep their slots, so no new step of record 0 can begin.
        let refused = store.begin(0, 3, Wait::never());
        assert!(matches!(refused, Err(Error::TimedOut(_))), "{refused:?}");
        fetches.push(ok(begun(index)));
    }
    ended(|| fetches.iter().all(|(fetch, _)| fetch.is_done()));
    // Reads a part again. This must work until a step overwrites the part's slot.
    let (again, _) = ok(begun(0));
    ok(again.wait(Wait::forever()));
    drop(again);
    ok(commit(&store, 3));
    let mut whole = vec![0; places];
    for ((fetch, memory), (start, bytes)) in fetches.iter().zip(&sizes) {
        ok(fetch.wait(Wait::forever()));
        let start = size(*start);
        whole[start..start + size(*bytes)].copy_from_slice(&memory.bytes());
    }
    assert!(whole == expected(&store, 0, 1), "the parts must have the values of the commit at which they were listed");
    let refused = begun(0).map(drop);
    assert!(matches!(&refused, Err(Error::Usage(why)) if why.contains("overwritten")), "{refused:?}");
}

#[test]
fn fetch_error_names_the_damaged_record_or_reports_the_failed_device() {
    let disks = model::disks(1);
    let store = trained(&disks, 1);
    let extent = store.layout().extent(store.description(), 4, 1);
    let slot = store.record_state(4).map_or(0, |state| state.slot);
    disks[0].flip(size(store.layout().offset(&extent, slot.into())) + 17, 4);
    let fetch = ok(store.fetch(1, room(&store, 1)));
    for _ in 0..2 {
        let found = fetch.wait(Wait::forever());
        assert!(matches!(&found, Err(Error::Corrupt { what, .. }) if what == "chunk 1 of \"odd\""), "{found:?}");
    }
    // The damage must not prevent a read of another unit, or the commit of a step.
    let other = ok(store.fetch(0, room(&store, 0)));
    assert_eq!(other.wait(Wait::forever()).unwrap_or(0), 2);
    ok(commit(&store, 2));
    drop((store, fetch, other));

    drop(trained(&disks, 1));
    // Cuts the power after each number of requests. With few requests, the opening of the store fails. With more, the
    // fetch fails. With enough requests, both succeed.
    let outcome = |requests: u64| {
        let faults = Faults { dies_after: Some(requests), ..Faults::default() };
        let store = Arc::new(Store::open_on(model::volume(&disks, &faults), model::STRIPE, &model::how()).ok()?);
        let fetch = ok(store.fetch(1, room(&store, 1)));
        Some(fetch.wait(Wait::forever()))
    };
    let outcomes: Vec<_> = (0..100).filter_map(outcome).collect();
    assert!(matches!(outcomes.first(), Some(Err(Error::Storage(_)))), "{outcomes:?}");
    assert!(matches!(outcomes.last(), Some(Ok(2))), "{outcomes:?}");
}

#[test]
fn fetch_rejects_a_wrong_unit_or_buffer_and_waits_again_after_a_timeout() {
    let slow = Faults { delay: std::time::Duration::from_millis(200), seed: 3, ..Faults::default() };
    let disks = model::disks(1);
    drop(trained(&disks, 1));
    let store = Store::open_on(model::volume(&disks, &slow), model::STRIPE, &model::how());
    let store = Arc::new(store.unwrap_or_else(|error| panic!("{error}")));
    assert!(matches!(store.fetch(3, vec![]), Err(Error::Invalid(_))));
    assert!(matches!(store.fetch(0, vec![0; 4096]), Err(Error::Invalid(_))));
    let fetch = ok(store.fetch(1, room(&store, 1)));
    assert!(fetch.wait(Wait::never()).is_err());
    assert_eq!(fetch.wait(Wait::forever()).unwrap_or(0), 2);
}

#[test]
fn description_sizes_equal_the_sizes_of_the_created_store() {
    for count in 1..=3 {
        let disks = model::disks(count);
        let store = trained(&disks, 1);
        let sizes = ok(model::description().sizes(count, Some(model::STRIPE)));
        let info = store.info();
        assert_eq!(
            (sizes.total_bytes, sizes.slot_bytes, sizes.index_bytes, sizes.buffer_bytes),
            (info.total_bytes, info.slot_bytes, info.index_bytes, info.buffer_bytes)
        );
        let units: Vec<u64> = (0..3).map(|unit| store.layout().unit_bytes(unit)).collect();
        assert_eq!(sizes.unit_bytes, units);
        store.commit(Commit { step: 2, user: Some("x".repeat(60)), ..Commit::default() }, Wait::forever()).ok();
        assert_eq!(store.info().index_bytes, sizes.index_bytes);
    }
    assert!(model::description().sizes(0, None).is_err());
    assert!(model::description().sizes(33, None).is_err());
}

// --- parts that other threads check -------------------------------------------------------

/// Returns the parts of a unit. A part has at most `2^n` bytes, with the smallest `n` for which each extent of the unit
/// fits into one part.
fn smallest_parts(store: &Arc<Store>, unit: usize) -> Arc<Parts> {
    let bytes = (12..40).map(|power| 1 << power);
    let parts = bytes.map(|bytes| store.parts(unit, bytes)).find_map(Result::ok);
    Arc::new(parts.unwrap_or_else(|| panic!("no parts")))
}

fn rooms(parts: &Arc<Parts>) -> Vec<Seen> {
    parts.places().map(|(_, bytes)| Seen::new(bytes)).collect()
}

fn read_all(parts: &Arc<Parts>, checkers: &Checkers<Seen>, rooms: &[Seen]) -> Vec<Result<(), Error>> {
    let begun: Vec<_> = rooms
        .iter()
        .enumerate()
        .map(|(index, room)| parts.begin(index, room.clone()).map(|part| checkers.check(part)))
        .collect();
    // Waits for the last part first, to test that each part reports its own outcome.
    let ended = begun.iter().rev().map(|part| match part {
        Ok(part) => {
            let first = part.wait(Wait::forever());
            assert!(part.is_done());
            assert_eq!(first.is_ok(), part.wait(Wait::forever()).is_ok(), "a second wait must return the same outcome");
            first
        }
        Err(error) => Err(error.clone()),
    });
    let mut ended: Vec<_> = ended.collect();
    ended.reverse();
    ended
}

#[test]
fn parts_have_the_same_bytes_with_any_number_of_checker_threads() {
    let store = trained(&model::disks(2), 3);
    for unit in 0..3 {
        let parts = smallest_parts(&store, unit);
        let expected = rooms(&parts);
        for (index, room) in expected.iter().enumerate() {
            let part = ok(parts.begin(index, room.clone()));
            ok(part.wait(Wait::forever()));
        }
        for threads in 0..=3 {
            let checkers = Checkers::new(threads);
            assert_eq!(checkers.threads(), threads);
            let found = rooms(&parts);
            assert!(read_all(&parts, &checkers, &found).iter().all(Result::is_ok));
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.bytes(), expected.bytes(), "unit {unit} with {threads} threads");
            }
        }
    }
}

#[test]
fn only_the_part_with_the_damaged_byte_reports_corruption() {
    let disks = model::disks(1);
    let store = trained(&disks, 3);
    let parts = smallest_parts(&store, 1);
    let whole = rooms(&parts);
    assert!(read_all(&parts, &Checkers::new(1), &whole).iter().all(Result::is_ok));
    assert!(whole.len() > 1, "the test needs several parts");
    let damaged = whole.len() / 2;
    let length = whole[damaged].bytes().len().min(64);
    let image = disks[0].bytes();
    let at = image.windows(length).position(|bytes| *bytes == whole[damaged].bytes()[..length]);
    disks[0].flip(at.unwrap_or_else(|| panic!("the part is not on the disk")), 0x10);
    for threads in 0..=2 {
        let outcomes = read_all(&parts, &Checkers::new(threads), &rooms(&parts));
        for (index, outcome) in outcomes.iter().enumerate() {
            assert_eq!(index == damaged, matches!(outcome, Err(Error::Corrupt { .. })), "part {index}: {outcome:?}");
        }
    }
}

#[test]
fn dropped_part_frees_its_memory_and_dropped_checkers_finish_all_parts() {
    let store = trained(&model::disks(1), 3);
    let parts = smallest_parts(&store, 1);
    let checkers = Checkers::new(2);
    for room in rooms(&parts).into_iter().take(1) {
        let part = ok(parts.begin(0, room.clone()));
        let checking = checkers.check(part);
        drop(checking);
        // The checkers have already released the memory. Waits until the thread of the simulated disk has released it,
        // too.
        let began = std::time::Instant::now();
        while room.clones() > 1 {
            assert!(began.elapsed().as_secs() < 60, "a thread still holds the memory");
            std::thread::yield_now();
        }
    }
    // Drops the checkers while parts may still be unchecked. The drop must end the checkers' threads only after they
    // have checked all parts.
    let rooms = rooms(&parts);
    let begun: Vec<_> = (0..rooms.len())
        .map(|index| ok(parts.begin(index, rooms[index].clone())))
        .map(|part| checkers.check(part))
        .collect();
    drop(checkers);
    for part in begun {
        assert!(part.is_done());
        ok(part.wait(Wait::never()));
    }
}

// --- records that are kept in RAM ------------------------------------------------------

fn hold(store: &Store, records: &[usize]) {
    ok(store.hold(records, Pin::Off, &mut || true));
    ok(store.refresh(records, &mut |_, _| true));
}

fn read_bytes(store: &Store) -> u64 {
    store.volume().stats().read.bytes
}

/// Fetches a unit and returns its values.
fn fetched(store: &Arc<Store>, unit: usize) -> Vec<u8> {
    let memory = Seen::new(store.layout().unit_bytes(unit));
    let fetch = ok(store.fetch(unit, memory.clone()));
    ok(fetch.wait(Wait::forever()).map(drop));
    memory.bytes()
}

#[test]
fn records_in_the_ram_tier_are_read_from_storage_once() {
    let disks = model::disks(2);
    let store = model::trained(&disks, 0);
    let all: Vec<usize> = (0..store.description().records.len()).collect();
    let before = read_bytes(&store);
    hold(&store, &all);
    let once = read_bytes(&store) - before;
    assert!(once > 0, "refresh read the records into RAM");
    assert_eq!(check(&store, "from memory"), 0);
    for step in 1..4 {
        ok(commit(&store, step));
        assert_eq!(check(&store, "from memory"), step);
    }
    assert_eq!(read_bytes(&store) - before, once, "all later reads came from RAM");
    let store = Arc::new(store);
    for unit in 0..3 {
        let from_memory = fetched(&store, unit);
        hold(&store, &[]);
        assert_eq!(from_memory, fetched(&store, unit), "unit {unit}");
        hold(&store, &all);
    }
    assert!(store.counters().ram_tier_bytes > 0);
    // Commits have also written the records to storage. A verification must read them from storage, not from RAM.
    let before = read_bytes(&store);
    let verified = ok(store.verify(&mut |_, _| true));
    assert_eq!(read_bytes(&store) - before, verified.bytes);
    ok(store.close(Wait::forever()));
    drop(store);
    assert_eq!(check(&ok(model::open(&disks, &model::how())), "reopened"), 3);
}

#[test]
fn reads_from_the_ram_tier_never_see_discarded_or_uncommitted_steps() {
    let store = model::trained(&model::disks(1), 0);
    hold(&store, &[0, 3, 4]);
    ok(commit(&store, 1));
    ok(commit(&store, 2));
    // Stages wrong bytes for step 3 and discards them, twice. Afterwards, reads must not return these bytes.
    ok(model::abandon(&store, 3));
    assert_eq!(check(&store, "discarded"), 2);
    ok(model::abandon(&store, 3));
    ok(commit(&store, 3));
    assert_eq!(check(&store, "staged anew"), 3);
    // Stages a record without a commit. Readers must still see the last commit.
    ok(model::stage(&store, 0, &model::contents(&store, 0, 0xbeef, 4)));
    assert_eq!(check(&store, "staged"), 3);
}

#[test]
fn discard_changes_the_ram_tier_epoch_and_refresh_restores_the_record() {
    let store = model::trained(&model::disks(1), 0);
    hold(&store, &[0]);
    for of_one in [false, true] {
        ok(model::stage(&store, 0, &model::contents(&store, 0, 0xbeef, 1)));
        // At this epoch of the RAM tier, RAM has the staged bytes.
        let epoch = store.ram_tier_epoch();
        ok(if of_one { store.discard_record(0, Wait::forever()) } else { store.discard(Wait::forever()) });
        assert_ne!(store.ram_tier_epoch(), epoch, "a discard must change the epoch, because RAM has discarded bytes");
        ok(store.refresh(&[0], &mut |_, _| true));
        assert_eq!(check(&store, "read again"), 0);
    }
}

#[test]
fn reads_equal_the_last_commit_after_random_holds_discards_and_reopens() {
    model::side_by_side(0..40, |seed| {
        let mut rng = Rng::new(seed);
        let disks = model::disks(1 + rng.below(3));
        let mut store = model::trained(&disks, 0);
        let (mut step, name) = (0, format!("seed {seed}"));
        for _ in 0..20 {
            match rng.below(6) {
                0 => {
                    let records: Vec<usize> = (0..8).filter(|_| rng.below(2) == 0).collect();
                    hold(&store, &records);
                }
                1 => ok(model::abandon(&store, step + 1)),
                2 => {
                    ok(store.close(Wait::forever()));
                    drop(store);
                    store = ok(model::open(&disks, &model::how()));
                    hold(&store, &[rng.below(8)]);
                }
                3 => {}
                _ => {
                    step += 1;
                    ok(commit(&store, step));
                }
            }
            assert_eq!(check(&store, &name), step, "{name}");
        }
    });
}

#[test]
fn hold_rejects_an_unknown_record_and_a_closed_store() {
    let store = model::trained(&model::disks(1), 0);
    assert!(matches!(store.hold(&[99], Pin::Off, &mut || true), Err(Error::Invalid(_))));
    assert_eq!(check(&store, "nothing in RAM"), 0);
    ok(store.close(Wait::forever()));
    assert!(matches!(store.hold(&[0], Pin::Off, &mut || true), Err(Error::Usage(_))));
}
