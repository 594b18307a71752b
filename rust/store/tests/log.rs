//! Tests the log of gradients: entries whose slots are old, and what opening makes of them.

use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Commit, Create, Dtype, Error, Rule, StepHead, Store, Update};

mod logged;
mod toy;

fn ok<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Disks with room for a log of many steps.
fn disks(count: usize) -> Vec<SimDisk> {
    (0..count).map(|_| SimDisk::new((4 << 20) / count)).collect()
}

fn created(disks: &[SimDisk], how: &Create) -> Store {
    ok(Store::create_on(toy::volume(disks, &Faults::default()), toy::STRIPE, toy::description(), how))
}

#[test]
fn what_was_logged_is_there_after_a_crash_at_any_commit() {
    const COMMITS: u64 = 27;
    for steps in [1, 2, 16] {
        for count in [1, 2] {
            let disks = disks(count);
            let store = created(&disks, &toy::how());
            let states = logged::states(&store, COMMITS);
            ok(logged::commit(&store, &states, 0));
            assert_eq!(ok(store.keep_log(&logged::HELD, steps)), steps);
            for commit in 1..=COMMITS {
                ok(logged::commit(&store, &states, commit));
                assert!(store.log_state().steps <= u64::from(steps), "{:?}", store.log_state());
                // Whoever kills the process now leaves this.
                let left: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(commit)).collect();
                let found = ok(toy::open(&left, &toy::how()));
                assert_eq!(logged::committed(&found), commit);
                let name = format!("{steps} steps, {count} devices, commit {commit}");
                assert!(ok(logged::replayed(&found)) == *logged::after(&states, commit), "{name}");
                ok(found.verify(&mut |_, _| true));
            }
            assert!(store.log_state().entries > 0);
            drop(store);
        }
    }
}

#[test]
fn less_room_is_fewer_steps_and_none_is_none() {
    let states = logged::states(&created(&disks(1), &toy::how()), 30);
    let mut seen = Vec::new();
    for extra in [0_usize, 60, 120, 1000] {
        let disks = [SimDisk::new((560 + extra) << 10)];
        let store = created(&disks, &toy::how());
        ok(logged::commit(&store, &states, 0));
        let steps = ok(store.keep_log(&logged::HELD, 16));
        seen.push(steps);
        for commit in 1..=30 {
            // Whoever has no room is written whole.
            ok(logged::commit(&store, &states, commit));
        }
        assert_eq!(store.log_state().steps > 0, steps > 0, "{steps} steps");
        drop(store);
        let found = ok(toy::open(&disks, &toy::how()));
        assert!(ok(logged::replayed(&found)) == states[30], "{steps} steps");
        assert!(found.damaged().is_ok_and(|damaged| damaged.is_empty()), "the second labels stay");
    }
    assert!(seen.is_sorted() && seen[0] == 0 && seen.iter().any(|&steps| (1..16).contains(&steps)), "{seen:?}");
    assert_eq!(seen.last(), Some(&16));
}

#[test]
fn a_ring_whose_entries_are_not_written_whole_fills_up_and_keeps_what_is_needed() {
    let disks = disks(1);
    let store = created(&disks, &toy::how());
    let mut state = logged::states(&store, 0).remove(0);
    ok(logged::commit(&store, &[state.clone()], 0));
    assert_eq!(ok(store.keep_log(&logged::HELD[..1], 2)), 2);
    let (entry, dtype) = logged::HELD[0];
    let mut refused = 0;
    for step in 1..8 {
        let gradient = logged::gradient(&store, entry, dtype, step);
        let Some(writes) = ok(logged::append(&store, entry, dtype, &gradient)) else {
            refused += 1;
            continue;
        };
        for write in writes {
            ok(write.wait());
        }
        let held = state.entry(entry).or_insert_with(|| unreachable!());
        logged::update(held, &gradient, 1);
        let rule = Rule { name: "toy".into(), arithmetic: 1, numbers: vec![("factor".into(), 1)], factors: vec![] };
        let log = Some(StepHead { rules: vec![rule], updates: vec![Update { entry, rule: 0, step: held.step }] });
        ok(store.commit(Commit { step, log, ..Commit::default() }, Wait::forever()));
        assert!(!store.due().is_empty() || step < 2);
    }
    assert!(refused > 2);
    drop(store);
    assert!(ok(logged::replayed(&ok(toy::open(&disks, &toy::how())))) == state);
}

#[test]
fn what_is_wrong_is_refused_and_changes_nothing() {
    let disks = disks(1);
    let store = created(&disks, &toy::how());
    let states = logged::states(&store, 3);
    ok(logged::commit(&store, &states, 0));
    let (entry, dtype) = logged::HELD[0];
    assert!(!ok(store.begin_append(entry, dtype)), "there is no log yet");
    assert!(store.keep_log(&[(entry, Dtype::I32)], 2).is_err_and(|error| error.to_string().contains("int32")));
    ok(store.keep_log(&logged::HELD, 2));
    ok(logged::commit(&store, &states, 1));
    let said = |error: Result<u64, Error>| error.err().map(|error| error.to_string()).unwrap_or_default();
    let commit =
        |log: StepHead| said(store.commit(Commit { step: 2, log: Some(log), ..Commit::default() }, Wait::forever()));
    let rule = Rule { name: "toy".into(), ..Rule::default() };
    let update = |entry| Update { entry, rule: 0, step: 2 };
    let head = StepHead { rules: vec![rule.clone()], updates: vec![update(entry)] };
    assert!(commit(head.clone()).contains("0 gradients were appended, and the step names 1"));
    assert!(!ok(store.begin_append(entry, Dtype::F32)), "a log for other gradients");
    assert!(ok(store.begin_append(entry, dtype)));
    assert!(
        store.append(entry, 0, vec![0; 512]).is_err_and(|error| error.to_string().contains("has 4096 bytes, not 512"))
    );
    ok(ok(store.append(entry, 0, vec![0; 4096])).wait());
    assert!(store.append(entry, 0, vec![0; 4096]).is_err_and(|error| error.to_string().contains("appended already")));
    assert!(commit(head.clone()).contains("appended in part, 2 chunks lack"));
    for chunk in 1..3 {
        ok(ok(store.append(entry, chunk, vec![0; 4096])).wait());
    }
    assert!(commit(StepHead::default()).contains("1 gradients were appended, and the step names 0"));
    let other = StepHead { updates: vec![update(1)], ..head.clone() };
    assert!(commit(other).contains("entry 1 is named, and its gradient was not appended"));
    let other = StepHead { updates: vec![Update { rule: 1, ..update(entry) }], ..head.clone() };
    assert!(commit(other).contains("by rule 1 of 1"));
    let long = Rule { numbers: vec![("x".repeat(60), 0); 10], ..rule };
    assert!(commit(StepHead { rules: vec![long], ..head }).contains("at most 512"));
    // What its slot holds is not what the entry is.
    let read = store.read(entry, 0, vec![0; 4096]).map(drop);
    assert!(read.is_err_and(|error| error.to_string().contains("replay that first")));
    ok(store.discard(Wait::forever()));
    assert_eq!((store.log_state().steps, store.info().step), (1, 1));
    ok(logged::commit(&store, &states, 2));
    drop(store);
    let found = ok(toy::open(&disks, &toy::how()));
    assert!(ok(logged::replayed(&found)) == states[2]);
    // Closing without a replay leaves it as it was.
    ok(found.close(Wait::forever()));
    drop(found);
    assert!(ok(logged::replayed(&ok(toy::open(&disks, &toy::how())))) == states[2]);
}

#[test]
fn files_grow_and_their_second_labels_move() {
    let folder = std::env::temp_dir().join(format!("memascend-log-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap_or_else(|error| panic!("{error}"));
    let paths = [folder.join("one"), folder.join("two")];
    let (store, _) = ok(Store::create(&paths, toy::description(), &toy::how()));
    let states = logged::states(&store, 20);
    ok(logged::commit(&store, &states, 0));
    let length = || std::fs::metadata(&paths[0]).map_or(0, |metadata| metadata.len());
    let before = length();
    assert_eq!(ok(store.keep_log(&logged::HELD, 16)), 16);
    assert!(length() > before);
    assert!(ok(store.damaged()).is_empty(), "{:?}", store.damaged());
    for commit in 1..=20 {
        ok(logged::commit(&store, &states, commit));
    }
    drop(store);
    // Cut to what a store without a log needs, it is refused by name.
    let cut = length() - 8192;
    for path in &paths {
        let file = std::fs::File::options().write(true).open(path);
        file.and_then(|file| file.set_len(cut)).unwrap_or_else(|error| panic!("{error}"));
    }
    let refused = Store::open(&paths, &toy::how()).map(drop).map_err(|error| error.to_string());
    assert!(refused.as_ref().is_err_and(|why| why.contains("it says that the log lies in")), "{refused:?}");
    for path in &paths {
        let file = std::fs::File::options().write(true).open(path);
        file.and_then(|file| file.set_len(cut + 8192)).unwrap_or_else(|error| panic!("{error}"));
    }
    let found = ok(Store::open(&paths, &toy::how()));
    let state = ok(logged::replayed(&found));
    assert!(state == states[20]);
    ok(logged::settled(&found, &state));
    ok(found.close(Wait::forever()));
    drop(found);
    let found = ok(Store::open(&paths, &toy::how()));
    assert!(found.pending_replay().is_none());
    drop(found);
    std::fs::remove_dir_all(&folder).unwrap_or_else(|error| panic!("{error}"));
}
