//! Tests staging and commits. A commit must make all staged records live, or fail. A commit must write every changed
//! page of the table.

use crate::model::{self, Contents, check, content, ok};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, SimDisk},
};
use memascend_store::{Commit, Description, Dtype, Error, Store};

fn committed(store: &Store, step: u64) -> Result<u64, Error> {
    store.commit(Commit { step, ..Commit::default() }, Wait::forever())
}

#[test]
fn a_commit_with_one_extent_missing_is_refused_and_changes_nothing() {
    let store = model::trained(&model::disks(2), 2);
    let mut refused = 0;
    for record in 0..store.description().records.len() {
        for missing in 0..store.layout().extents_of(record) {
            ok(store.begin(record, 3, Wait::forever()));
            assert!(
                store.begin(record, 3, Wait::forever()).is_err_and(|why| why.to_string().contains("staged already"))
            );
            for extent in (0..store.layout().extents_of(record)).filter(|&extent| extent != missing) {
                ok(ok(store.stage(record, extent, vec![0xaa; model::extent_bytes(&store, record, extent)])).wait());
            }
            let Err(Error::Usage(message)) = committed(&store, 3) else {
                panic!("record {record} was committed without its extent {missing}")
            };
            assert!(message.contains("1 extents are missing"), "{message}");
            ok(if missing == 0 {
                store.discard_record(record, Wait::forever())
            } else {
                store.discard(Wait::forever())
            });
            assert_eq!(check(&store, "after a commit in part"), 2);
            refused += 1;
        }
    }
    assert!(refused > 8, "{refused}");
    ok(model::commit(&store, 3));
    assert_eq!(check(&store, "after refusals"), 3);
}

#[test]
fn commit_of_a_step_with_a_failed_write_is_rejected_after_discard_record() {
    let disks = model::disks(1);
    let garbage = model::contents(&model::trained(&disks, 2), 0, 9, 3);
    let faults = Faults { errors: vec![(Action::Write, model::EIO, 1000)], ..Faults::default() };
    let store = ok(Store::open_on(model::volume(&disks, &faults), model::STRIPE, &model::how()));
    assert!(matches!(model::stage(&store, 0, &garbage), Err(Error::Storage(_))));
    // Discards only this record. The step must still not be committable, because it would miss the update of this
    // record.
    ok(store.discard_record(0, Wait::forever()));
    let Err(Error::Usage(message)) = committed(&store, 3) else {
        panic!("the commit must fail because a write failed")
    };
    assert!(message.contains("a write of this step failed"), "{message}");
    // Discards the whole step. Now the store lets the commit begin, and the commit fails because the device fails.
    ok(store.discard(Wait::forever()));
    assert!(matches!(committed(&store, 3), Err(Error::Storage(_))));
    drop(store);
    assert_eq!(model::opened(&disks, &model::how()), Ok(2));
}

#[test]
fn a_slot_is_not_staged_into_while_a_read_of_it_is_open() {
    let store = model::trained(&model::disks(1), 1);
    let open = ok(store.read(0, 0, vec![0; model::extent_bytes(&store, 0, 0)]));
    // Commits step 2, whose bytes go to the other slot. So the open read must still return version 2, which is the
    // state of step 1.
    ok(model::commit(&store, 2));
    let refused = store.begin(0, 3, Wait::never());
    assert!(matches!(refused, Err(Error::TimedOut(_))), "{refused:?}");
    assert_eq!(ok(open.wait()), (model::after(1)[&0].extents[0].clone(), 2));
    ok(model::commit(&store, 3));
    assert_eq!(check(&store, "after the read"), 3);
}

#[test]
fn begin_rejects_a_record_whose_update_is_announced() {
    let mut how = model::how();
    how.durability = memascend_store::Durability::None;
    let store = model::created_as(&model::disks(1), &how);
    ok(model::commit(&store, 0));
    ok(store.hold(&[0], memascend_mem::Pin::Off, &mut || true));
    ok(store.announce(0, 1, Wait::forever()));
    let refused = store.begin(0, 1, Wait::forever());
    assert!(refused.is_err_and(|why| why.to_string().contains("staged already")));
    ok(store.discard(Wait::forever()));
    ok(model::commit(&store, 1));
    assert_eq!(check(&store, "discarded and staged"), 1);
}

/// The table keeps `COUNT` records on three pages. `ON_PAGES` has the index of one record on each of these pages.
const COUNT: usize = 400;
const ON_PAGES: [usize; 3] = [0, 200, 399];

fn stage_one(store: &Store, record: usize, update: u64) {
    ok(model::stage(store, record, &Contents { extents: vec![content(record, 0, update, 4096)], step: update }));
}

#[test]
fn commit_rewrites_table_pages_that_previous_commits_changed() {
    let disks = [SimDisk::new(8 << 20)];
    let records = (0..COUNT).map(|number| model::record(&format!("record {number}"), 0, Dtype::F32, &[1], &[]));
    let records = records.map(|record| memascend_store::Record { spill: None, ..record }).collect();
    let description = Description { units: vec!["all".into()], records, ..model::description() };
    let volume = model::volume(&disks, &Faults::default());
    let store = ok(Store::create_on(volume, model::STRIPE, description, &model::how()));
    (0..COUNT).for_each(|record| stage_one(&store, record, 0));
    ok(committed(&store, 0));
    let mut expected = vec![0; COUNT];
    for step in 1..=12 {
        let [given_up, record] = [0, 1].map(|next| ON_PAGES[model::size((step + next) % 3)]);
        if step > 6 {
            // Makes a commit whose `agree` returns `false`. The commit fails after it has written its pages, so later
            // commits must write these pages again.
            stage_one(&store, given_up, 100 + step);
            let (user, before) = (Some("given up".into()), store.info().user);
            let commit = Commit { step, user, ..Commit::default() };
            assert!(store.commit_agreed(commit, Wait::forever(), &mut || false).is_err());
            assert_eq!(store.info().user, before);
            ok(store.discard(Wait::forever()));
        }
        expected[record] = step;
        stage_one(&store, record, step);
        ok(committed(&store, step));
        let found = ok(model::open(&disks, &model::how()));
        for (record, &update) in expected.iter().enumerate() {
            assert_eq!(ok(found.record_state(record)).step, update, "record {record}");
            let (bytes, _) = ok(ok(found.read(record, 0, vec![0; 4096])).wait());
            assert!(bytes == content(record, 0, update, 4096), "record {record}");
        }
    }
}

#[test]
fn record_whose_checksums_span_several_table_pages_reads_back() {
    let disks = [SimDisk::new(8 << 20)];
    let large = model::record("large", 0, Dtype::Bf16, &[600 * 2048], &[]);
    let records = vec![memascend_store::Record { spill: None, ..large }];
    let description = Description { units: vec!["all".into()], records, ..model::description() };
    let volume = model::volume(&disks, &Faults::default());
    let store = ok(Store::create_on(volume, model::STRIPE, description, &model::how()));
    // Makes four commits. The first commit to each of the two tables writes all pages of the table, and only later
    // commits skip unchanged pages.
    for step in 0..4 {
        ok(model::stage(&store, 0, &model::contents(&store, 0, step, 0)));
        ok(committed(&store, step));
    }
    let wanted = model::contents(&store, 0, 3, 0);
    drop(store);
    let found = ok(model::open(&disks, &model::how()));
    for (extent, bytes) in (0..).zip(&wanted.extents) {
        assert!(ok(ok(found.read(0, extent, vec![0; bytes.len()])).wait()).0 == *bytes, "extent {extent}");
    }
}

#[test]
fn digest_covers_staged_bytes_and_ignores_discarded_bytes() {
    let [once, again] = [1, 1].map(|last| model::trained(&model::disks(1), last));
    for store in [&once, &again] {
        store.compare(&[0]);
    }
    ok(model::stage(&again, 0, &model::contents(&again, 0, 9, 2)));
    let dropped = again.digest();
    ok(again.discard(Wait::forever()));
    for store in [&once, &again] {
        ok(model::stage(store, 0, &model::after(2)[&0]));
    }
    assert_eq!(once.digest(), again.digest());
    assert_ne!(once.digest(), dropped);
}
