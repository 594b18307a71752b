//! Tests reads of whole units: checked, of one commit, holding their slots, whatever the devices do.

use std::sync::Arc;

use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Commit, Error, Store};

mod toy;

use toy::Seen;

fn trained(disks: &[SimDisk], steps: u64) -> Arc<Store> {
    let store = Store::create_on(toy::volume(disks, &Faults::default()), toy::STRIPE, toy::description(), &toy::how());
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    (0..=steps).for_each(|step| toy::step(&store, step).unwrap_or_else(|error| panic!("{error}")));
    Arc::new(store)
}

fn room(store: &Store, unit: usize) -> Vec<u8> {
    vec![0xee; usize::try_from(store.layout().unit_bytes(unit)).unwrap_or(0)]
}

/// What a unit holds after `step` steps.
fn expected(store: &Store, unit: usize, step: u64) -> Vec<u8> {
    let mut bytes = vec![0; room(store, unit).len()];
    for entry in store.entries_of(unit) {
        let mut at = usize::try_from(store.layout().in_unit(entry, unit)).unwrap_or(0);
        for piece in 0..store.layout().chunks_of(entry) {
            let nbytes = store.layout().piece(store.description(), entry, piece).bytes();
            let nbytes = usize::try_from(nbytes).unwrap_or(0);
            bytes[at..at + nbytes].copy_from_slice(&toy::content(entry, piece, toy::updates(step)[entry], nbytes));
            at += nbytes;
        }
    }
    bytes
}

#[test]
fn a_unit_is_what_was_committed_last_and_its_version_says_so() {
    for count in 1..=3 {
        let store = trained(&toy::disks(count), 4);
        for unit in 0..3 {
            let memory = Seen::new(room(&store, unit).len());
            let fetch = store.fetch(unit, memory.clone()).unwrap_or_else(|error| panic!("{error}"));
            // Generation 1 is step 0; unit 1 has entries of several versions.
            let version = fetch.wait(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
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

/// Waits until the devices are done, and nobody waits for the fetch.
fn ended(is_done: impl Fn() -> bool) {
    while !is_done() {
        std::thread::yield_now();
    }
}

#[test]
fn a_fetch_that_ended_holds_nothing_and_says_what_was_there_whenever_it_is_asked() {
    let store = trained(&toy::disks(1), 1);
    let memory = Seen::new(room(&store, 0).len());
    let fetch = store.fetch(0, memory.clone()).unwrap_or_else(|error| panic!("{error}"));
    ended(|| fetch.is_done());
    // The slots that it read are written by the step after the next commit, and it still lives.
    for step in 2..=5 {
        toy::step(&store, step).unwrap_or_else(|error| panic!("{error}"));
    }
    assert_eq!(fetch.wait(Wait::forever()).unwrap_or(0), 2, "checked by what was known when it began");
    assert!(memory.bytes() == expected(&store, 0, 1));
    assert_eq!(toy::check(&store, "after the fetch"), 5);
}

#[test]
fn parts_hold_their_slots_until_each_was_read_once() {
    let store = trained(&toy::disks(1), 1);
    let parts = store.parts(0, 8192).unwrap_or_else(|error| panic!("{error}"));
    let (parts, places) = (Arc::new(parts), room(&store, 0).len());
    let sizes: Vec<(u64, u64)> = parts.places().collect();
    assert!(sizes.len() > 1, "{sizes:?}");
    toy::step(&store, 2).unwrap_or_else(|error| panic!("{error}"));
    let begun = |index: usize| {
        let memory = Seen::new(usize::try_from(sizes[index].1).unwrap_or(0));
        parts.begin(index, memory.clone()).map(|fetch| (fetch, memory))
    };
    let mut fetches = Vec::new();
    for index in 0..sizes.len() {
        // What was not read yet is needed still.
        let refused = store.begin(0, 3, Wait::never());
        assert!(matches!(refused, Err(Error::TimedOut(_))), "{refused:?}");
        fetches.push(begun(index).unwrap_or_else(|error| panic!("{error}")));
    }
    ended(|| fetches.iter().all(|(fetch, _)| fetch.is_done()));
    // As long as nothing is written there, they may be read again.
    let (again, _) = begun(0).unwrap_or_else(|error| panic!("{error}"));
    again.wait(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
    drop(again);
    toy::step(&store, 3).unwrap_or_else(|error| panic!("{error}"));
    let mut whole = vec![0; places];
    for ((fetch, memory), (start, bytes)) in fetches.iter().zip(&sizes) {
        fetch.wait(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
        let start = usize::try_from(*start).unwrap_or(0);
        whole[start..start + usize::try_from(*bytes).unwrap_or(0)].copy_from_slice(&memory.bytes());
    }
    assert!(whole == expected(&store, 0, 1), "of the commit that they were begun at");
    let refused = begun(0).map(drop);
    assert!(matches!(&refused, Err(Error::Usage(why)) if why.contains("overwritten")), "{refused:?}");
}

#[test]
fn a_changed_byte_is_named_with_its_entry_and_a_failed_device_is_an_error() {
    let disks = toy::disks(1);
    let store = trained(&disks, 1);
    let piece = store.layout().piece(store.description(), 4, 1);
    let slot = store.entry_state(4).map_or(0, |state| state.slot);
    disks[0].flip(usize::try_from(store.layout().offset_in(&piece, slot.into())).unwrap_or(0) + 17, 4);
    let fetch = store.fetch(1, room(&store, 1)).unwrap_or_else(|error| panic!("{error}"));
    for _ in 0..2 {
        let found = fetch.wait(Wait::forever());
        assert!(matches!(&found, Err(Error::Corrupt { what, .. }) if what == "chunk 1 of \"odd\""), "{found:?}");
    }
    // Other units are whole, and a step goes on.
    let other = store.fetch(0, room(&store, 0)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(other.wait(Wait::forever()).unwrap_or(0), 2);
    toy::step(&store, 2).unwrap_or_else(|error| panic!("{error}"));
    drop((store, fetch, other));

    drop(trained(&disks, 1));
    // The power goes at each request in turn: opening fails, then the fetch does, then nothing.
    let outcome = |requests: u64| {
        let faults = Faults { dies_after: Some(requests), ..Faults::default() };
        let store = Arc::new(Store::open_on(toy::volume(&disks, &faults), toy::STRIPE, &toy::how()).ok()?);
        let fetch = store.fetch(1, room(&store, 1)).unwrap_or_else(|error| panic!("{error}"));
        Some(fetch.wait(Wait::forever()))
    };
    let outcomes: Vec<_> = (0..100).filter_map(outcome).collect();
    assert!(matches!(outcomes.first(), Some(Err(Error::Storage(_)))), "{outcomes:?}");
    assert!(matches!(outcomes.last(), Some(Ok(2))), "{outcomes:?}");
}

#[test]
fn what_does_not_fit_is_refused_and_an_interrupted_wait_can_be_made_again() {
    let slow = Faults { delay: std::time::Duration::from_millis(200), seed: 3, ..Faults::default() };
    let disks = toy::disks(1);
    drop(trained(&disks, 1));
    let store = Store::open_on(toy::volume(&disks, &slow), toy::STRIPE, &toy::how());
    let store = Arc::new(store.unwrap_or_else(|error| panic!("{error}")));
    assert!(matches!(store.fetch(3, vec![]), Err(Error::Invalid(_))));
    assert!(matches!(store.fetch(0, vec![0; 4096]), Err(Error::Invalid(_))));
    let fetch = store.fetch(1, room(&store, 1)).unwrap_or_else(|error| panic!("{error}"));
    assert!(fetch.wait(Wait::never()).is_err());
    assert_eq!(fetch.wait(Wait::forever()).unwrap_or(0), 2);
}

#[test]
fn sizes_come_from_the_description_alone() {
    for count in 1..=3 {
        let disks = toy::disks(count);
        let store = trained(&disks, 1);
        let sizes = toy::description().sizes(count, Some(toy::STRIPE)).unwrap_or_else(|error| panic!("{error}"));
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
    assert!(toy::description().sizes(0, None).is_err());
    assert!(toy::description().sizes(33, None).is_err());
}
