//! Tests that an entry that is staged in part is never committed: whichever piece is missing, nothing changes.

use memascend_mem::Wait;
use memascend_nvme::{Action, sim::Faults};
use memascend_store::{Commit, Error, Store};

mod toy;

#[test]
fn a_commit_with_one_piece_missing_is_refused_and_changes_nothing() {
    let disks = toy::disks(2);
    let store = Store::create_on(toy::volume(&disks, &Faults::default()), toy::STRIPE, toy::description(), &toy::how());
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    (0..=2).for_each(|step| toy::step(&store, step).unwrap_or_else(|error| panic!("{error}")));
    let mut refused = 0;
    for entry in 0..store.description().entries.len() {
        for missing in 0..store.layout().pieces_of(entry) {
            store.begin(entry, 3, Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
            for piece in (0..store.layout().pieces_of(entry)).filter(|&piece| piece != missing) {
                let nbytes = store.layout().piece(store.description(), entry, piece).bytes();
                let bytes = vec![0xaa; usize::try_from(nbytes).unwrap_or(0)];
                let write = store.stage(entry, piece, bytes).unwrap_or_else(|error| panic!("{error}"));
                write.wait().unwrap_or_else(|error| panic!("{error}"));
            }
            let commit = Commit { step: 3, ..Commit::default() };
            let Err(Error::Usage(message)) = store.commit(commit, Wait::forever()) else {
                panic!("entry {entry} was committed without its piece {missing}")
            };
            assert!(message.contains("1 pieces are missing"), "{message}");
            store.discard(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(toy::check(&store, "after a commit in part"), 2);
            refused += 1;
        }
    }
    assert!(refused > 8, "{refused}");
}

#[test]
fn a_step_of_which_a_write_failed_is_not_committed_without_the_entry_either() {
    let disks = toy::disks(1);
    let store = Store::create_on(toy::volume(&disks, &Faults::default()), toy::STRIPE, toy::description(), &toy::how());
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    (0..=2).for_each(|step| toy::step(&store, step).unwrap_or_else(|error| panic!("{error}")));
    drop(store);
    let faults = Faults { errors: vec![(Action::Write, libc::EIO, 1000)], ..Faults::default() };
    let store = Store::open_on(toy::volume(&disks, &faults), toy::STRIPE, &toy::how());
    let store = store.unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(toy::stage(&store, 0, 3, 0), Err(Error::Storage(_))));
    // The others of the step would come without it.
    store.discard_entry(0, Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
    let Err(Error::Usage(message)) = store.commit(Commit { step: 3, ..Commit::default() }, Wait::forever()) else {
        panic!("the failure was forgotten")
    };
    assert!(message.contains("a write of this step failed"), "{message}");
    drop(store);
    let store = toy::open(&disks, &toy::how()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(toy::check(&store, "after a write that failed"), 2);
}
