//! Tests tables of several pages: each of the two names what was committed, whichever pages a commit changed.

mod toy;

use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Commit, Description, Dtype, Error, Store};

/// Entries of which the table has three pages, and one on each.
const COUNT: usize = 400;
const ON_PAGES: [usize; 3] = [0, 200, 399];

fn ok<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn created(disks: &[SimDisk]) -> Store {
    let entries = (0..COUNT).map(|number| toy::entry(&format!("entry {number}"), 0, Dtype::F32, &[1], &[]));
    let description = Description {
        units: vec!["all".into()],
        entries: entries.map(|entry| memascend_store::Entry { spill: None, ..entry }).collect(),
        ..toy::description()
    };
    let store = ok(Store::create_on(toy::volume(disks, &Faults::default()), toy::STRIPE, description, &toy::how()));
    (0..COUNT).for_each(|entry| ok(toy::stage(&store, entry, 0, 0)));
    committed(&store, 0);
    store
}

fn committed(store: &Store, step: u64) {
    ok(store.commit(Commit { step, ..Commit::default() }, Wait::forever()).map(drop));
}

/// That a store that is opened now has these counts of updates, and the bytes that belong to them.
fn check(disks: &[SimDisk], expected: &[u64]) {
    let store = ok(toy::open(disks, &toy::how()));
    for (entry, &update) in expected.iter().enumerate() {
        assert_eq!(ok(store.entry_state(entry)).step, update, "entry {entry}");
        let (bytes, _) = ok(ok(store.read(entry, 0, vec![0; 4096])).wait());
        assert!(bytes == toy::content(entry, 0, update, 4096), "entry {entry}");
    }
}

#[test]
fn a_page_that_one_commit_changed_is_in_the_table_of_the_next_one() {
    let disks = [SimDisk::new(8 << 20)];
    let store = created(&disks);
    let mut expected = vec![0; COUNT];
    for step in 1..=9 {
        let entry = ON_PAGES[usize::try_from(step % 3).unwrap_or(0)];
        expected[entry] = step;
        ok(toy::stage(&store, entry, step, 0));
        committed(&store, step);
        check(&disks, &expected);
    }
}

#[test]
fn pages_of_a_commit_that_others_did_not_agree_to_are_written_again() {
    let disks = [SimDisk::new(8 << 20)];
    let store = created(&disks);
    let mut expected = vec![0; COUNT];
    for step in 1..=6 {
        let [given_up, entry] = [0, 1].map(|next| ON_PAGES[usize::try_from((step + next) % 3).unwrap_or(0)]);
        ok(toy::stage(&store, given_up, 100 + step, 0));
        let refused = store.commit_agreed(Commit { step, ..Commit::default() }, Wait::forever(), &mut || false);
        assert!(refused.is_err());
        ok(store.discard(Wait::forever()));
        expected[entry] = step;
        ok(toy::stage(&store, entry, step, 0));
        committed(&store, step);
        check(&disks, &expected);
    }
}
