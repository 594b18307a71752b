//! Tests the gradient log. While the log has gradients that a record's live slot does not have yet, opening the store
//! must offer a replay of these gradients.

use memascend_mem::Wait;
use memascend_nvme::sim::SimDisk;
use memascend_store::{Commit, Dtype, Error, LoggedRule, LoggedUpdate, StepHead, Store};

use crate::model::{self, LOGGED, after, check, commit, large_disks, many, ok};

#[test]
fn logged_steps_are_replayed_after_a_crash_at_any_commit() {
    for steps in [1, 2, 16] {
        for count in [1, 2] {
            let disks = large_disks(count);
            let store = model::trained(&disks, 0);
            assert_eq!(ok(store.keep_log(&LOGGED, steps)), steps);
            for number in 1..=27 {
                ok(commit(&store, number));
                assert!(store.log_state().steps <= u64::from(steps), "{:?}", store.log_state());
                if number % many(1, 3) > 0 {
                    continue;
                }
                // Opens copies of the devices, as a loss of power at this point may leave the devices.
                let found = ok(model::open(&model::after_loss(&disks, number), &model::how()));
                let name = format!("{steps} steps, {count} devices, commit {number}");
                assert_eq!(check(&found, &name), number, "{name}");
                ok(found.verify(&mut |_, _| true));
            }
            assert!(store.log_state().records > 0);
        }
    }
}

#[test]
fn keep_log_keeps_fewer_steps_with_less_free_space() {
    let mut seen = Vec::new();
    for extra in [0_usize, 60, 120, 1000] {
        let disks = [SimDisk::new((560 + extra) << 10)];
        let store = model::trained(&disks, 0);
        let steps = ok(store.keep_log(&LOGGED, 16));
        seen.push(steps);
        // If the log has no space for a record's gradient, `commit` writes the whole record.
        (1..=30).for_each(|number| ok(commit(&store, number)));
        assert_eq!(store.log_state().steps > 0, steps > 0, "{steps} steps");
        drop(store);
        let found = ok(model::open(&disks, &model::how()));
        assert_eq!(check(&found, "with less room"), 30);
        assert!(ok(found.damaged()).is_empty(), "the second labels must be undamaged");
    }
    assert!(seen.is_sorted() && seen[0] == 0 && seen.iter().any(|&steps| (1..16).contains(&steps)), "{seen:?}");
    assert_eq!(seen.last(), Some(&16));
}

#[test]
fn full_log_rejects_appends_and_keeps_the_gradients_that_replay_needs() {
    let disks = large_disks(1);
    let store = model::trained(&disks, 0);
    let mut state = after(0).clone();
    assert_eq!(ok(store.keep_log(&LOGGED[..1], 2)), 2);
    let (record, dtype) = LOGGED[0];
    let mut refused = 0;
    for step in 1..8 {
        let gradient = model::gradient(&store, record, dtype, step);
        let Some(writes) = ok(model::append(&store, record, dtype, &gradient)) else {
            refused += 1;
            continue;
        };
        for write in writes {
            ok(write.wait());
        }
        let held = state.entry(record).or_insert_with(|| unreachable!());
        model::update(held, &gradient, 1);
        let rule =
            LoggedRule { name: "toy".into(), arithmetic: 1, numbers: vec![("factor".into(), 1)], factors: vec![] };
        let log =
            Some(StepHead { rules: vec![rule], updates: vec![LoggedUpdate { record, rule: 0, step: held.step }] });
        ok(store.commit(Commit { step, log, ..Commit::default() }, Wait::forever()));
        assert!(!store.due().is_empty() || step < 2);
    }
    assert!(refused > 2);
    drop(store);
    assert!(ok(model::replayed(&ok(model::open(&disks, &model::how())))) == state);
}

#[test]
fn rejected_append_or_step_head_changes_nothing() {
    let disks = large_disks(1);
    let store = model::trained(&disks, 0);
    let (record, dtype) = LOGGED[0];
    assert!(!ok(store.begin_append(record, dtype)), "there is no log yet");
    assert!(store.keep_log(&[(record, Dtype::I32)], 2).is_err_and(|error| error.to_string().contains("int32")));
    ok(store.keep_log(&LOGGED, 2));
    ok(commit(&store, 1));
    let said = |error: Result<u64, Error>| error.err().map(|error| error.to_string()).unwrap_or_default();
    let refused =
        |log: StepHead| said(store.commit(Commit { step: 2, log: Some(log), ..Commit::default() }, Wait::forever()));
    let rule = LoggedRule { name: "toy".into(), ..LoggedRule::default() };
    let update = |record| LoggedUpdate { record, rule: 0, step: 2 };
    let head = StepHead { rules: vec![rule.clone()], updates: vec![update(record)] };
    assert!(refused(head.clone()).contains("0 gradients were appended, and the step names 1"));
    assert!(!ok(store.begin_append(record, Dtype::F32)), "the log accepts gradients of one dtype only");
    assert!(ok(store.begin_append(record, dtype)));
    assert!(
        store.append(record, 0, vec![0; 512]).is_err_and(|error| error.to_string().contains("of 4096 bytes, not 512"))
    );
    ok(ok(store.append(record, 0, vec![0; 4096])).wait());
    assert!(store.append(record, 0, vec![0; 4096]).is_err_and(|error| error.to_string().contains("appended already")));
    assert!(refused(head.clone()).contains("appended in part, 2 chunks are missing"));
    for chunk in 1..3 {
        ok(ok(store.append(record, chunk, vec![0; 4096])).wait());
    }
    assert!(refused(StepHead::default()).contains("1 gradients were appended, and the step names 0"));
    let other = StepHead { updates: vec![update(1)], ..head.clone() };
    assert!(refused(other).contains("the step names record 1, whose gradient was not appended"));
    let other = StepHead { updates: vec![LoggedUpdate { rule: 1, ..update(record) }], ..head.clone() };
    assert!(refused(other).contains("by rule 1 of 1"));
    let long = LoggedRule { numbers: vec![("x".repeat(60), 0); 10], ..rule };
    assert!(refused(StepHead { rules: vec![long], ..head }).contains("at most 512"));
    // The record's last gradient is only in the log, so `Store::read` must fail.
    let read = store.read(record, 0, vec![0; 4096]).map(drop);
    assert!(read.is_err_and(|error| error.to_string().contains("replay the log first")));
    ok(store.discard(Wait::forever()));
    assert_eq!((store.log_state().steps, store.info().step), (1, 1));
    ok(commit(&store, 2));
    drop(store);
    let found = ok(model::open(&disks, &model::how()));
    assert_eq!(check(&found, "found"), 2);
    // Closes the store without a replay, which must leave the log unchanged.
    ok(found.close(Wait::forever()));
    drop(found);
    assert_eq!(model::opened(&disks, &model::how()), Ok(2));
}

#[test]
fn keep_log_grows_the_files_and_moves_their_second_labels() {
    let folder = model::Folder::new("log");
    let paths = folder.paths(2);
    let (store, _) = ok(Store::create(&paths, model::description(), &model::how()));
    ok(commit(&store, 0));
    let length = || ok(std::fs::metadata(&paths[0])).len();
    let cut_to = |length: u64| {
        for path in &paths {
            ok(std::fs::File::options().write(true).open(path).and_then(|file| file.set_len(length)));
        }
    };
    let before = length();
    assert_eq!(ok(store.keep_log(&LOGGED, 16)), 16);
    assert!(length() > before);
    assert!(ok(store.damaged()).is_empty(), "{:?}", store.damaged());
    (1..=20).for_each(|number| ok(commit(&store, number)));
    drop(store);
    // Cuts the end of each file off, so that the log no longer fits. Opening the store must fail with an error that
    // names the log.
    let whole = length();
    cut_to(whole - 8192);
    let refused = Store::open(&paths, &model::how()).map(drop).map_err(|error| error.to_string());
    assert!(refused.as_ref().is_err_and(|why| why.contains("it says that the log lies in")), "{refused:?}");
    cut_to(whole);
    let found = ok(Store::open(&paths, &model::how()));
    assert_eq!(check(&found, "found"), 20);
    ok(model::settle(&found));
    ok(found.close(Wait::forever()));
    drop(found);
    assert!(ok(Store::open(&paths, &model::how())).pending_replay().is_none());
}
