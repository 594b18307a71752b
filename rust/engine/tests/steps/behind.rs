//! Tests records that are behind: a commit has deferred their last update, and no job has written this update yet.
//! Covers damage, full disks, rejected calls, failing reads and writes, and fetches during commits.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use memascend_engine::{Engine, GradientSource};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, Rng, SimDisk},
};
use memascend_store::{Commit, Create, Durability, Existing, Store};

use crate::{
    deferred::{bytes, filling, memory, some_step, steps, unit, units},
    replay::resumed,
    setup::{
        ALL, Contents, Life, RunPlan, begun, contents, first, gradient, kinds, many, ok, opened, rule, size, volume,
    },
};

/// Returns a run that has deferred all updates of its second step. Also returns the contents before the first step and
/// after each step, and the record and the offset of each chunk of the gradients that the last commit names.
fn left_behind() -> (Life, Vec<Contents>, Vec<(usize, u64)>) {
    let plan = RunPlan::deferring(Durability::Step);
    let (life, eager) = (Life::new(&plan), Life::new(&RunPlan::streamed()));
    let (mut left, mut places) = (vec![eager.contents()], Vec::new());
    for step in 1..=2 {
        places.clear();
        for record in ALL {
            ok(eager.engine.spill(record, gradient(record, step), false, Wait::forever()));
            let before = life.disk.operations().len();
            ok(life.engine.spill(record, gradient(record, step), false, Wait::forever()));
            ok(life.engine.finish(Wait::forever()));
            let begun = life.disk.operations();
            let written = begun[before..].iter().filter(|(action, _)| *action == Action::Write);
            places.extend(written.map(|&(_, at)| (record, at)));
        }
        for record in ALL {
            let numbers = rule(record, step);
            ok(eager.engine.update(record, GradientSource::Spilled(vec![0.3]), None, numbers, Wait::forever()));
            assert!(ok(life.engine.defer(record, numbers, &[0.3], Wait::forever())));
        }
        ok(eager.commit(step));
        ok(life.commit(step));
        left.push(eager.contents());
    }
    (life, left, places)
}

/// Returns the text of an error, or an empty text for `Ok`.
fn said<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    result.map_or_else(|error| error.to_string(), |_| String::new())
}

/// Checks that an error names the record of the damaged gradient, and the offset `at` of the damaged chunk.
fn names(error: &str, record: usize, at: u64) {
    let name = &kinds().records[record].name;
    assert!(error.contains(&format!("gradient of {name:?}")) && error.contains("damaged"), "{name} at {at}: {error}");
    assert!(error.contains(&at.to_string()), "{error}, not at {at}");
}

#[test]
fn resume_names_a_damaged_deferred_gradient_and_previous_opens() {
    let (life, left, places) = left_behind();
    let image = life.killed().bytes();
    assert!(places.len() > 20, "{places:?}");
    for (record, at) in places {
        let disk = SimDisk::of(image.clone());
        disk.flip(size(at) + 1, 4);
        let damaged = disk.bytes();
        let looked = ok(opened(&disk, &Faults::default(), Durability::Step));
        names(&said(looked.verify(&mut |_, _| true)), record, at);
        drop(looked);
        names(&said(resumed(Existing::Resume, &disk)), record, at);
        assert!(disk.bytes() == damaged, "a rejected resume must change nothing");
        assert!(resumed(Existing::Previous, &disk).as_ref() == Ok(&left[1]), "{record} at {at}");
        assert!(
            resumed(Existing::Resume, &disk).as_ref() == Ok(&left[1]),
            "{record} at {at}: must fall back to the commit before"
        );
    }
    assert!(resumed(Existing::Resume, &SimDisk::of(image)).as_ref() == Ok(&left[2]));
}

#[test]
fn deferred_update_names_a_damaged_gradient_and_loses_no_step() {
    let places = left_behind().2;
    for (turn, &(record, at)) in places.iter().enumerate().step_by(many(1, 4)) {
        let (life, left, _) = left_behind();
        let (engine, store) = (&life.engine, life.store());
        life.disk.flip(size(at) + 1, 4);
        let of = size(u64::from(kinds().records[record].unit));
        names(&said(unit(engine, of, turn % 2 == 0)), record, at);
        let mut tensors: Vec<Vec<u8>> =
            ok(store.tensor_bytes(record)).into_iter().map(|bytes| vec![0; bytes]).collect();
        let mut tensors: Vec<&mut [u8]> = tensors.iter_mut().map(Vec::as_mut_slice).collect();
        names(&said(store.read_record(record, &mut tensors)), record, at);
        names(&said(engine.catch_up(Wait::forever())), record, at);
        life.disk.flip(size(at) + 1, 4);
        ok(engine.discard(Wait::forever()));
        assert!(ok(engine.catch_up(Wait::forever())));
        assert!(life.contents() == left[2]);
        assert!(resumed(Existing::Resume, &life.killed()).as_ref() == Ok(&left[2]));
    }
}

#[test]
fn previous_commit_opens_until_a_settle_or_spill_writes() {
    type Write = fn(&Engine);
    let writes: [(&str, Write); 3] = [
        ("settled", |engine| {
            ok(engine.settle_later(0, &mut Wait::forever()));
            ok(engine.finish(Wait::forever()));
        }),
        ("fetched", |engine| drop(ok(unit(engine, 0, true)))),
        ("spilled", |engine| {
            ok(engine.spill(0, gradient(0, 9), false, Wait::forever()));
            ok(engine.finish(Wait::forever()));
        }),
    ];
    for (name, write) in writes {
        let (life, left, _) = left_behind();
        let of_disk = |existing| resumed(existing, &SimDisk::of(life.disk.bytes()));
        // Fetches every unit without `settles`, so the fetches must write nothing.
        for of in 0..units(life.store()) {
            ok(unit(&life.engine, of, false));
        }
        assert!(of_disk(Existing::Previous).as_ref() == Ok(&left[1]), "{name}");
        write(&life.engine);
        let refused = said(of_disk(Existing::Previous));
        assert!(refused.contains("belongs to the previous commit"), "{name}: {refused}");
        assert!(of_disk(Existing::Resume).as_ref() == Ok(&left[2]), "{name}");
        ok(life.engine.discard(Wait::forever()));
        assert!(life.contents() == left[2], "{name}");
    }
}

#[test]
fn store_without_space_for_second_places_defers_no_update() {
    let whole =
        ok(Store::create_on(volume(&[SimDisk::new(4 << 20)], &Faults::default()), 8192, kinds(), &Create::default()));
    let (total, needed) = (whole.info().total_bytes, whole.description().places_bytes(&ALL));
    drop(whole);
    let mut made = Vec::new();
    for extra in [0, 4096, needed / 2, needed - 4096, needed + (64 << 10)] {
        let disk = SimDisk::new(size(total + extra));
        let there = volume(std::slice::from_ref(&disk), &Faults::default());
        let store = ok(Store::create_on(there, 8192, kinds(), &Create::default()));
        let engine = ok(begun(store, &RunPlan::streamed()));
        for record in ALL {
            let tensors = kinds().records[record].state.len();
            ok(engine.fill(record, first(filling(record, 1), tensors, 0), Wait::forever()));
        }
        ok(engine.commit(Commit::default(), Wait::forever()));
        let (store, before) = (engine.store(), disk.bytes());
        let (size_before, log) = (store.volume().size_bytes(), store.log_state());
        let has = ok(store.keep_places(&ALL));
        made.push(has);
        assert_eq!(ok(store.damaged()).len(), 0);
        if !has {
            assert!(disk.bytes() == before, "{extra} bytes more");
            assert_eq!((store.volume().size_bytes(), store.log_state()), (size_before, log));
        }
        ok(engine.spill(0, gradient(0, 1), false, Wait::forever()));
        assert_eq!(store.defers(0), has);
        assert_eq!(ok(engine.defer(0, rule(0, 1), &[], Wait::forever())), has);
        if !has {
            ok(engine.update(0, GradientSource::Spilled(vec![]), None, rule(0, 1), Wait::forever()));
        }
        ok(engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever()));
        let step = contents(store);
        drop(engine);
        assert!(resumed(Existing::Resume, &disk).as_ref() == Ok(&step));
    }
    assert_eq!(made, [false, false, false, false, true]);
}

#[test]
fn rejected_defer_or_catch_up_changes_nothing() {
    let (life, left, _) = left_behind();
    let engine = &life.engine;
    ok(engine.discard(Wait::forever()));
    ok(engine.drop_spilled(0, Wait::forever()));
    assert!(said(engine.defer(0, rule(0, 3), &[], Wait::forever())).contains("no gradient of"));
    ok(engine.spill(0, gradient(0, 3), false, Wait::forever()));
    assert!(!ok(engine.defer(0, rule(0, 3), &[1.0; 17], Wait::forever())), "more factors than the log keeps");
    assert!(said(engine.defer(0, rule(4, 3), &[], Wait::forever())).contains("does not have the state of SGD"));
    assert!(ok(engine.defer(0, rule(0, 3), &[0.5], Wait::forever())));
    assert!(said(engine.defer(0, rule(0, 4), &[0.7], Wait::forever())).contains("is staged already"));
    assert!(said(engine.catch_up(Wait::forever())).contains("a step is staged"));
    ok(life.commit(3));
    let eager = Life::new(&RunPlan::streamed());
    for step in 1..=3 {
        for record in if step < 3 { &ALL[..] } else { &ALL[..1] } {
            let factor = if step < 3 { 0.3 } else { 0.5 };
            ok(eager.engine.spill(*record, gradient(*record, step), false, Wait::forever()));
            let numbers = rule(*record, step);
            ok(eager.engine.update(*record, GradientSource::Spilled(vec![factor]), None, numbers, Wait::forever()));
        }
        ok(eager.commit(step));
    }
    assert!(life.contents() == eager.contents());
    assert!(life.contents()[1] == left[2][1]);
}

#[test]
fn fetches_during_steps_return_one_commit_or_fail() {
    const STEPS: u64 = 9;
    let eager = Life::new(&RunPlan::streamed());
    let of_units = |engine: &Engine| (0..units(engine.store())).map(|of| ok(unit(engine, of, false))).collect();
    let mut wanted: Vec<Vec<Vec<u8>>> = vec![of_units(&eager.engine)];
    for number in 1..=STEPS {
        ok(some_step(&eager.engine, number, true));
        wanted.push(of_units(&eager.engine));
    }
    let mut fetched = 0;
    for round in 0..many(40, 4) {
        let life = Life::new(&RunPlan::deferring(Durability::Step));
        let (engine, store) = (&life.engine, life.store());
        let ended = AtomicBool::new(false);
        fetched += std::thread::scope(|scope| {
            let reader = |seed: u64| {
                let (ended, wanted) = (&ended, &wanted);
                move || {
                    let (mut rng, mut fetched) = (Rng::new(seed), 0);
                    while !ended.load(Relaxed) {
                        let (of, settles) = (rng.below(units(store)), rng.below(2) == 0);
                        let before = store.info().step;
                        let got = unit(engine, of, settles);
                        let after = store.info().step;
                        match got {
                            Ok(got) => {
                                let mut of_steps = (before..=after).map(|step| &wanted[size(step)][of]);
                                assert!(of_steps.any(|one| *one == got), "unit {of}, {before} to {after}, {settles}");
                                fetched += 1;
                            }
                            // A commit can overwrite the values during the fetch. The fetch must then fail with this
                            // error.
                            Err(error) => assert!(error.to_string().contains("begin the read again"), "{error}"),
                        }
                    }
                    fetched
                }
            };
            let readers = [scope.spawn(reader(round)), scope.spawn(reader(round + 1000))];
            for number in 1..=STEPS {
                ok(some_step(engine, number, false));
            }
            ended.store(true, Relaxed);
            readers.into_iter().map(|reader| reader.join().unwrap_or_else(|_| panic!("a reader"))).sum::<u64>()
        });
        ok(engine.catch_up(Wait::forever()));
        assert!(of_units(engine) == wanted[size(STEPS)]);
    }
    assert!(fetched > 100, "{fetched}");
}

#[test]
fn fetch_begun_during_a_commit_returns_one_commit_or_fails() {
    let (mut anew, mut fetched) = (0, 0);
    for round in 0..many(40, 6) {
        let (life, left, _) = left_behind();
        let plan = RunPlan::deferring(Durability::Step);
        let faults = Faults { seed: round, delay: Duration::from_millis(2), reorder: true, ..Faults::default() };
        // `begun` makes the deferred updates of step 2. Steps 3 and 4 then defer new updates. No other run makes steps
        // 3 and 4, so the test has no expected values for these steps. Instead, the test compares each fetch with
        // fetches before and after the commit of step 4.
        let disk = life.killed();
        let engine = ok(begun(ok(opened(&disk, &faults, plan.durability)), &plan));
        let defer_all = |step: u64| {
            for record in ALL {
                ok(engine.spill(record, gradient(record, step), false, Wait::forever()));
                assert!(ok(engine.defer(record, rule(record, step), &[], Wait::forever())));
            }
        };
        assert!(contents(engine.store()) == left[2]);
        defer_all(3);
        ok(engine.commit(Commit { step: 3, ..Commit::default() }, Wait::forever()));
        let of_units = || (0..units(engine.store())).map(|of| ok(unit(&engine, of, false))).collect::<Vec<_>>();
        let before = of_units();
        defer_all(4);
        let mut begun = Vec::new();
        let agree = &mut || {
            for of in 0..units(engine.store()) {
                let into = memory(engine.store().layout().unit_bytes(of));
                begun.push((of, ok(engine.fetch(of, into.clone(), round % 2 == 0)), into));
            }
            true
        };
        ok(engine.commit_agreed(Commit { step: 4, ..Commit::default() }, Wait::forever(), agree));
        let after = of_units();
        for (of, fetch, into) in begun {
            match fetch.wait(Wait::forever()) {
                Ok(()) => {
                    let got = bytes(&into);
                    assert!(got == before[of] || got == after[of], "unit {of}, round {round}");
                    fetched += 1;
                }
                Err(error) => {
                    assert!(error.to_string().contains("begin the read again"), "{error}");
                    anew += 1;
                }
            }
        }
    }
    assert!(anew + fetched > 0, "{anew} {fetched}");
}

#[test]
fn part_read_after_a_later_commit_is_rejected() {
    let (life, ..) = left_behind();
    let engine = &life.engine;
    let parts = ok(engine.parts(0, 8192, true));
    let nbytes = parts.places().next().map_or(0, |(_, nbytes)| nbytes);
    let first_part = memory(nbytes);
    ok(ok(parts.begin(0, first_part, None)).wait(Wait::forever()));
    for record in ALL {
        ok(engine.spill(record, gradient(record, 3), false, Wait::forever()));
        assert!(ok(engine.defer(record, rule(record, 3), &[], Wait::forever())));
    }
    ok(life.commit(3));
    let (index, (_, nbytes)) = parts.places().enumerate().nth(1).unwrap_or_else(|| panic!("a part"));
    let later = parts.begin(index, memory(nbytes), None).and_then(|part| part.wait(Wait::forever()));
    assert!(said(later).contains("begin the read again"));
}

#[test]
fn read_record_returns_the_version_after_the_deferred_update() {
    let (life, left, _) = left_behind();
    let store = life.store();
    for record in ALL {
        let mut tensors: Vec<Vec<u8>> =
            ok(store.tensor_bytes(record)).into_iter().map(|bytes| vec![0; bytes]).collect();
        let mut slices: Vec<&mut [u8]> = tensors.iter_mut().map(Vec::as_mut_slice).collect();
        let version = ok(store.read_record(record, &mut slices));
        assert_eq!(version, ok(store.record_state(record)).version);
        assert!(tensors == left[2][record].1);
    }
}

#[test]
fn only_records_in_the_deferred_list_defer_updates() {
    let life = Life::new(&RunPlan { deferred: vec![3, 1], ..RunPlan::streamed() });
    for record in ALL {
        ok(life.engine.spill(record, gradient(record, 1), false, Wait::forever()));
        assert_eq!(ok(life.engine.defer(record, rule(record, 1), &[], Wait::forever())), [1, 3].contains(&record));
    }
    ok(life.commit(1));
    assert_eq!(life.engine.behind(), 2);
}

#[test]
fn second_update_of_a_record_is_rejected_until_settle_or_discard() {
    let (life, ..) = left_behind();
    let (engine, store) = (&life.engine, life.store());
    ok(engine.spill(0, gradient(0, 3), false, Wait::forever()));
    ok(engine.finish(Wait::forever()));
    assert!(said(store.append_spilled(0)).contains("does not have its last update yet: settle the record first"));
    assert!(ok(engine.catch_up(Wait::forever())));
    ok(engine.spill(0, gradient(0, 3), false, Wait::forever()));
    ok(engine.update(0, GradientSource::Spilled(vec![]), None, rule(0, 3), Wait::forever()));
    assert!(ok(engine.defer(0, rule(0, 3), &[], Wait::forever())));
    assert!(said(life.commit(3)).contains("staged already"));
    ok(engine.discard(Wait::forever()));
    ok(engine.update(0, GradientSource::Spilled(vec![]), None, rule(0, 3), Wait::forever()));
    ok(life.commit(3));
}

#[test]
fn non_durable_run_resumes_only_if_it_caught_up_before_close() {
    for catches_up in [false, true] {
        let life = Life::new(&RunPlan::deferring(Durability::None));
        for step in 1..=2 {
            ok(some_step(&life.engine, step, false));
        }
        assert!(life.engine.is_behind());
        let wanted = steps(2).swap_remove(2);
        if catches_up {
            assert!(ok(life.engine.catch_up(Wait::forever())));
            assert!(life.contents() == wanted);
        }
        life.engine.close();
        ok(life.store().close(Wait::forever()));
        let found = resumed(Existing::Resume, &life.killed());
        if catches_up {
            assert!(found.as_ref() == Ok(&wanted));
        } else {
            assert!(said(found).contains("was not closed"));
        }
    }
}

#[test]
fn step_after_a_device_error_is_repeated_from_the_last_commit() {
    const STEPS: u64 = 5;
    let wanted = steps(STEPS);
    let image = Life::new(&RunPlan::deferring(Durability::Step)).killed();
    let (mut failures, mut whole) = (0, 0);
    for seed in 0..many(400, 15) {
        let disk = SimDisk::of(image.bytes());
        let errors = vec![(Action::Write, 5, 8), (Action::Read, 5, 8)];
        let faults = Faults { seed, errors, reorder: true, ..Faults::default() };
        let plan = RunPlan::deferring(Durability::Step);
        let engine = opened(&disk, &faults, plan.durability).ok().and_then(|store| begun(store, &plan).ok());
        let Some(engine) = engine else { continue };
        let (mut number, mut tries) = (1, 0);
        while number <= STEPS && tries < 40 {
            tries += 1;
            match some_step(&engine, number, false) {
                Ok(()) => number += 1,
                Err(error) => {
                    failures += 1;
                    let name = error.to_string();
                    assert!(name.contains("errno 5") || name.contains("only be discarded"), "seed {seed}: {name}");
                    // A fetch may succeed although the step has failed. It must then return the values of the last
                    // commit.
                    if let Ok(values) = unit(&engine, 0, seed % 2 == 0) {
                        let now = size(engine.store().info().step);
                        let tensors = wanted[now][..3].iter().map(|(_, tensors)| &tensors[0]);
                        assert!(tensors.into_iter().all(|one| contains(&values, one)), "seed {seed}, step {now}");
                    }
                    if engine.discard(Wait::forever()).is_err() {
                        break;
                    }
                    number = engine.store().info().step + 1;
                }
            }
        }
        let step = engine.store().info().step;
        drop(engine);
        let found = ok(resumed(Existing::Resume, &SimDisk::of(disk.bytes())));
        // The disk may have stored a commit although it reported an error for the write of this commit.
        let mut at = (0..=STEPS).filter(|&number| wanted[size(number)] == found);
        assert!(at.any(|number| number == step || number == step + 1), "seed {seed}: {step}");
        whole += u64::from(step == STEPS);
    }
    assert!(failures > 20 && whole > 2, "{failures} {whole}");
}

/// Returns true if `values` stand at the start of a page of `memory`. `memory` has the values of a unit.
fn contains(memory: &[u8], values: &[u8]) -> bool {
    (0..memory.len().max(1)).step_by(4096).any(|at| memory[at..].starts_with(values))
}

#[test]
fn close_ends_open_fetches_and_keeps_the_committed_step() {
    let (mut fetched, mut refused) = (0, 0);
    for round in 0..many(60, 12) {
        let (life, ..) = left_behind();
        let (disk, plan) = (life.killed(), RunPlan::deferring(Durability::Step));
        let faults = Faults { seed: round, delay: Duration::from_millis(1), ..Faults::default() };
        let engine = ok(begun(ok(opened(&disk, &faults, plan.durability)), &plan));
        for record in ALL {
            ok(engine.spill(record, gradient(record, 3), false, Wait::forever()));
            assert!(ok(engine.defer(record, rule(record, 3), &[], Wait::forever())));
        }
        ok(engine.commit(Commit { step: 3, ..Commit::default() }, Wait::forever()));
        let all = units(engine.store());
        let reads = (0..all).map(|of| {
            let into = memory(engine.store().layout().unit_bytes(of));
            (ok(engine.fetch(of, into.clone(), round % 2 == 0)), into)
        });
        let reads: Vec<_> = reads.collect();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| reads.iter().map(|(fetch, _)| fetch.wait(Wait::forever()).is_ok()).collect());
            engine.close();
            let ended: Vec<bool> = waiting.join().unwrap_or_else(|_| panic!("a fetch"));
            fetched += ended.iter().filter(|ok| **ok).count();
        });
        let fetched = engine.fetch(0, memory(engine.store().layout().unit_bytes(0)), true);
        if let Err(error) = fetched.and_then(|fetch| fetch.wait(Wait::forever())) {
            assert!(error.to_string().contains("has been closed"), "{error}");
            refused += 1;
        }
        drop(reads);
        drop(engine);
        let found = ok(resumed(Existing::Resume, &disk));
        assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), vec![3; ALL.len()], "round {round}");
    }
    assert!(fetched > 10 && refused > 0, "{fetched} {refused}");
}

#[test]
fn discard_keeps_settled_updates_while_a_reader_is_open() {
    let (life, left, _) = left_behind();
    let (engine, store) = (&life.engine, life.store());
    ok(engine.settle_later(0, &mut Wait::forever()));
    ok(engine.finish(Wait::forever()));
    ok(unit(engine, 1, true));
    let settled: Vec<usize> = ALL.into_iter().filter(|&record| !store.is_behind(record)).collect();
    assert_eq!(settled, [0, 3, 4, 5]);
    // Keeps a read of unit 1 open until both discards and `catch_up` have returned. The updates of unit 1 are already
    // staged.
    let parts = ok(store.parts(1, 1 << 20));
    let before = engine.counters();
    ok(engine.discard_record(0, Wait::forever()));
    ok(engine.discard(Wait::forever()));
    assert!(settled.iter().all(|&record| !store.is_behind(record)));
    assert_eq!(engine.behind(), ALL.len() - settled.len());
    assert!(ok(engine.catch_up(Wait::forever())));
    let rest = (ALL.len() - settled.len()) as u64;
    assert_eq!(engine.counters().updates - before.updates, rest, "each of the other records is written once");
    drop(parts);
    assert!(life.contents() == left[2]);
}

#[test]
fn parts_without_an_update_are_rejected_after_the_update_is_settled() {
    let (life, ..) = left_behind();
    let store = life.store();
    // Imitates a reader that looked for deferred updates before the last commit, found none, and then took the slots
    // after the commit.
    let parts = std::sync::Arc::new(ok(store.parts_without(0, 1 << 20, &[])));
    for record in store.records_of(0) {
        ok(life.engine.settle_later(record, &mut Wait::forever()));
    }
    ok(life.engine.finish(Wait::forever()));
    let nbytes = parts.places().map(|(_, nbytes)| nbytes).sum();
    assert!(said(parts.begin(0, memory(nbytes))).contains("begin the read again"));
}
