//! Tests entries that are held in memory: the same bytes as from storage, fewer reads, nothing of a step that was discarded.

use std::sync::Arc;

use memascend_mem::{Pin, Wait};
use memascend_nvme::sim::{Faults, Rng};
use memascend_store::{Error, Store};

mod toy;

use toy::Seen;

fn ok<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn created(disks: &[memascend_nvme::sim::SimDisk]) -> Store {
    let store = Store::create_on(toy::volume(disks, &Faults::default()), toy::STRIPE, toy::description(), &toy::how());
    let store = ok(store);
    ok(toy::step(&store, 0));
    store
}

fn hold(store: &Store, entries: &[usize]) {
    ok(store.hold(entries, Pin::Off, &mut || true));
    ok(store.refresh(entries, &mut |_, _| true));
}

fn read_bytes(store: &Store) -> u64 {
    store.volume().stats().read.bytes
}

/// The values of a unit as a fetch gives them.
fn fetched(store: &Arc<Store>, unit: usize) -> Vec<u8> {
    let memory = Seen::new(usize::try_from(store.layout().unit_bytes(unit)).unwrap_or(0));
    let fetch = ok(store.fetch(unit, memory.clone()));
    ok(fetch.wait(Wait::forever()).map(drop));
    memory.bytes()
}

#[test]
fn what_is_held_is_read_once() {
    let disks = toy::disks(2);
    let store = created(&disks);
    let all: Vec<usize> = (0..store.description().entries.len()).collect();
    let before = read_bytes(&store);
    hold(&store, &all);
    let once = read_bytes(&store) - before;
    assert!(once > 0, "it was read when it was held");
    assert_eq!(toy::check(&store, "from memory"), 0);
    for step in 1..4 {
        ok(toy::step(&store, step));
        assert_eq!(toy::check(&store, "from memory"), step);
    }
    assert_eq!(read_bytes(&store) - before, once, "all of it was held");
    let store = Arc::new(store);
    for unit in 0..3 {
        let from_memory = fetched(&store, unit);
        hold(&store, &[]);
        assert_eq!(from_memory, fetched(&store, unit), "unit {unit}");
        hold(&store, &all);
    }
    assert!(store.counters().held_bytes > 0);
    // Every write went to storage, too, and a verification looks there.
    let before = read_bytes(&store);
    let verified = ok(store.verify(&mut |_, _| true));
    assert_eq!(read_bytes(&store) - before, verified.bytes);
    ok(store.close(Wait::forever()));
    drop(store);
    assert_eq!(toy::check(&ok(toy::open(&disks, &toy::how())), "reopened"), 3);
}

#[test]
fn a_step_that_was_discarded_leaves_nothing_of_it() {
    let store = created(&toy::disks(1));
    hold(&store, &[0, 3, 4]);
    ok(toy::step(&store, 1));
    ok(toy::step(&store, 2));
    // The same version twice, with other bytes: the first is forgotten.
    ok(toy::abandoned(&store, 3));
    assert_eq!(toy::check(&store, "discarded"), 2);
    ok(toy::abandoned(&store, 3));
    ok(toy::step(&store, 3));
    assert_eq!(toy::check(&store, "staged anew"), 3);
    // Staged and not committed: readers see the last commit.
    ok(toy::stage(&store, 0, 4, 0xbeef));
    assert_eq!(toy::check(&store, "staged"), 3);
}

#[test]
fn what_was_fresh_is_stale_after_a_discard() {
    let store = created(&toy::disks(1));
    hold(&store, &[0]);
    for of_one in [false, true] {
        ok(toy::stage(&store, 0, 1, 0xbeef));
        // Whoever looks now finds in memory what is staged, and remembers when.
        let epoch = store.held_epoch();
        ok(if of_one { store.discard_entry(0, Wait::forever()) } else { store.discard(Wait::forever()) });
        assert_ne!(store.held_epoch(), epoch, "what memory has is no version's");
        ok(store.refresh(&[0], &mut |_, _| true));
        assert_eq!(toy::check(&store, "read again"), 0);
    }
}

#[test]
fn random_lives_agree_with_a_store_that_holds_nothing() {
    toy::side_by_side(0..40, |seed| {
        let mut rng = Rng::new(seed);
        let disks = toy::disks(1 + rng.below(3));
        let mut store = created(&disks);
        let (mut step, name) = (0, format!("seed {seed}"));
        for _ in 0..20 {
            match rng.below(6) {
                0 => {
                    let entries: Vec<usize> = (0..8).filter(|_| rng.below(2) == 0).collect();
                    hold(&store, &entries);
                }
                1 => ok(toy::abandoned(&store, step + 1)),
                2 => {
                    ok(store.close(Wait::forever()));
                    drop(store);
                    store = ok(toy::open(&disks, &toy::how()));
                    hold(&store, &[rng.below(8)]);
                }
                3 => {}
                _ => {
                    step += 1;
                    ok(toy::step(&store, step));
                }
            }
            assert_eq!(toy::check(&store, &name), step, "{name}");
        }
    });
}

#[test]
fn what_cannot_be_held_is_refused_and_nothing_is_held() {
    let store = created(&toy::disks(1));
    assert!(matches!(store.hold(&[99], Pin::Off, &mut || true), Err(Error::Invalid(_))));
    assert_eq!(toy::check(&store, "nothing held"), 0);
    ok(store.close(Wait::forever()));
    assert!(matches!(store.hold(&[0], Pin::Off, &mut || true), Err(Error::Usage(_))));
}
