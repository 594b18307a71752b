//! Tests runs that keep records in RAM, with and without a gradient log. After crashes and replays, these runs must
//! have the same bits as a streamed run.

use std::{sync::Arc, sync::atomic::Ordering::Relaxed};

use memascend_engine::GradientSource;
use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{Durability, Store};

use crate::setup::{ALL, Life, RunPlan, begun, contents, gradient, halving, many, ok, opened, random_step, rule, size};

/// Makes updates without a commit, then ends the run and returns its disk. `by` selects the end: 0 writes the RAM tier
/// and closes the store, 1 interrupts the writing of the RAM tier and closes the store, 2 loses power, 3 kills the
/// process. With `Durability::None`, only closes the store.
fn ended(life: Life, plan: &RunPlan, by: usize, seed: u64) -> SimDisk {
    for record in 0..3 {
        // Makes an update that is never committed, so the next run must not see the update.
        let count = ok(life.store().record_state(record)).step + 1;
        ok(life.engine.update(
            record,
            GradientSource::Given(gradient(record, seed)),
            None,
            rule(record, count),
            Wait::forever(),
        ));
    }
    life.engine.close();
    let store = Arc::clone(life.store());
    let disk = life.killed();
    match by {
        _ if plan.durability == Durability::None => ok(store.close(Wait::forever())),
        0 => {
            ok(store.write_applied(&mut |_, _| true));
            ok(store.close(Wait::forever()));
            assert_eq!(store.log_state().steps, 0, "a closed store must have no log");
        }
        1 => {
            // Interrupts `write_applied`. The store must keep complete state and the log.
            let mut calls = 0;
            let ended = store.write_applied(&mut |_, _| {
                calls += 1;
                calls < 2
            });
            assert!(ended.is_err() || calls < 2);
            ok(store.close(Wait::forever()));
        }
        2 => return disk.after_power_loss(seed),
        _ => {}
    }
    disk
}

#[test]
fn random_plans_and_endings_have_the_bits_of_a_streamed_run() {
    const STEPS: u64 = 26;
    let streamed = Life::new(&RunPlan::streamed());
    let mut left = vec![(streamed.contents(), streamed.spilled())];
    for number in 1..=STEPS {
        ok(random_step(&streamed.engine, number));
        left.push((streamed.contents(), streamed.spilled()));
    }
    let (mut logged, mut ends) = (0, [0; 4]);
    for seed in 0..many(10, 7) {
        let mut rng = Rng::new(seed);
        let mut plan = || RunPlan {
            durability: if rng.below(3) > 0 { Durability::Step } else { Durability::None },
            held: ALL.into_iter().filter(|_| rng.below(4) > 0).collect(),
            log_steps: u32::try_from(rng.below(5)).unwrap_or(0),
            deferred: vec![],
        };
        let mut now = plan();
        let mut life = Life::new(&now);
        let mut chance = Rng::new(1000 + seed);
        for number in 1..=STEPS {
            ok(random_step(&life.engine, number));
            let place = format!("seed {seed}, step {number}, {now:?}");
            let wanted = &left[size(number)];
            assert!(life.contents() == wanted.0, "{place}");
            assert_eq!(life.spilled(), wanted.1, "{place}");
            let state = life.store().log_state();
            assert!(state.steps <= u64::from(now.log_steps), "{place}: {state:?}");
            logged += state.steps;
            if chance.below(4) == 0 {
                let by = chance.below(4);
                ends[by] += 1;
                let disk = ended(life, &now, by, seed << 8 | number);
                now = plan();
                // Reads the store before a replay: the store applies its log to the records that `contents` reads.
                let looked = ok(opened(&disk, &Faults::default(), Durability::Step));
                memascend_engine::apply_logs(&looked);
                ok(looked.verify(&mut |_, _| true));
                assert!(contents(&looked) == wanted.0, "{place}, looked at after {by}");
                drop(looked);
                life = Life::opened(disk, &now);
                assert!(life.contents() == wanted.0, "{place}, ended by {by}");
            }
        }
    }
    assert!(logged > 100 && ends.iter().all(|&count| count > 3), "{logged} {ends:?}");
}

#[test]
fn power_loss_with_held_records_leaves_a_complete_step() {
    const STEPS: u64 = 8;
    let plan = RunPlan::held(Durability::Step, 3);
    let first = Life::new(&plan);
    let mut left = vec![first.contents()];
    let begin = ended(first, &plan, 2, 1);
    let calm = Life::opened(begin.after_power_loss(0), &plan);
    for number in 1..=STEPS {
        ok(random_step(&calm.engine, number));
        left.push(calm.contents());
    }
    let mut died = 0;
    for point in (0..).step_by(23) {
        let disk = begin.after_power_loss(0);
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        let lived = (|| {
            let engine = begun(opened(&disk, &faults, plan.durability).ok()?, &plan).ok()?;
            let failed = (1..=STEPS).find(|&number| random_step(&engine, number).is_err());
            failed.map_or(Some(STEPS), |failed| Some(failed - 1))
        })();
        let found = Life::opened(disk.after_power_loss(point), &plan);
        let contents = found.contents();
        let said = lived.unwrap_or(0);
        // The store has the last step whose commit returned. It may also have the next step, if the power failed after
        // the write of this step's commit.
        let mut at = (0..=STEPS).filter(|&number| left[size(number)] == contents);
        assert!(at.any(|number| number == said || number == said + 1), "point {point}: {said}");
        ok(found.store().verify(&mut |_, _| true));
        if lived == Some(STEPS) {
            break;
        }
        died += 1;
    }
    assert!(died > 10, "{died}");
}

/// Overwrites the first byte of a unit's values in the RAM tier.
fn scribble(store: &Store, unit: usize) {
    let memory = store.ram_tier_unit(unit).unwrap_or_else(|| panic!("the unit must be in RAM"));
    // SAFETY: the memory is mapped while `memory` lives, and no update runs at the same time.
    unsafe { memory.as_ptr().as_ptr().write(0xAB) };
}

#[test]
fn refresh_restores_overwritten_values_from_slot_and_log() {
    let plan = RunPlan::held(Durability::Step, 4);
    let life = Life::new(&plan);
    for number in 1..=6 {
        ok(random_step(&life.engine, number));
    }
    let (store, before) = (life.store(), life.contents());
    assert!(store.log_state().records > 3);
    (0..2).for_each(|unit| scribble(store, unit));
    for record in ALL {
        store.invalidate_values(record);
    }
    ok(store.refresh(&ALL, &mut |_, _| true));
    assert!(life.contents() == before);
    ok(random_step(&life.engine, 7));
    let other = Life::opened(ended(life, &plan, 2, 5), &plan);
    assert_eq!(other.store().log_state().steps, 0);
}

#[test]
fn commit_rejects_held_values_that_were_written_to_in_place() {
    for durability in [Durability::Step, Durability::None] {
        let life = Life::new(&RunPlan::held(durability, 0));
        let (store, before) = (life.store(), life.contents());
        ok(life.update_all(1));
        scribble(store, 0);
        let refused = life.commit(1);
        assert!(refused.is_err_and(|error| error.to_string().contains("written to in place")), "{durability:?}");
        ok(life.engine.discard(Wait::forever()));
        // No update has been committed yet, so storage still has the current values. The store reads these values from
        // storage again.
        assert!(life.contents() == before);
        ok(life.update_all(1));
        ok(life.commit(1));
        let newest = life.contents();
        scribble(store, 0);
        ok(life.update_all(2));
        assert!(life.commit(2).is_err());
        ok(life.engine.discard(Wait::forever()));
        if durability == Durability::Step {
            assert!(life.contents() == newest);
        } else {
            let mut tensors: Vec<Vec<u8>> = newest[0].1.clone();
            let mut tensors: Vec<&mut [u8]> = tensors.iter_mut().map(Vec::as_mut_slice).collect();
            let lost = store.read_record(0, &mut tensors);
            assert!(lost.is_err_and(|error| error.to_string().contains("no other copy")));
        }
    }
}

#[test]
fn step_of_held_records_reads_nothing_and_writes_only_if_durable() {
    for (durability, log_steps) in [(Durability::Step, 4), (Durability::None, 0)] {
        let life = Life::new(&RunPlan::held(durability, log_steps));
        let store = life.store();
        let gradients: u64 = ALL.iter().map(|&record| gradient(record, 1).nbytes() as u64).sum();
        let mut written = Vec::new();
        for number in 1..=16 {
            let before = store.volume().stats();
            for record in ALL {
                let rule = rule(record, number);
                ok(life.engine.update(
                    record,
                    GradientSource::Given(gradient(record, number)),
                    None,
                    rule,
                    Wait::forever(),
                ));
            }
            assert_eq!(life.engine.counters().waiting, gradients, "gradients wait");
            ok(life.commit(number));
            assert_eq!(life.engine.counters().waiting, 0);
            let after = store.volume().stats();
            assert_eq!(after.read.bytes, before.read.bytes, "nothing is read");
            written.push(after.written.bytes - before.written.bytes);
        }
        let later: u64 = written[4..].iter().sum();
        if durability == Durability::None {
            assert_eq!(later, 0);
            continue;
        }
        let whole: u64 = ALL
            .iter()
            .map(|&record| store.layout().ram_tier_bytes(store.description(), record))
            .map(|(v, s)| v + s)
            .sum();
        let spill = |record: usize| store.description().records[record].spill.map(|dtype| (record, dtype));
        let pages =
            ALL.iter().filter_map(|&record| spill(record)).map(|(of, dtype)| ok(store.gradient_bytes(of, dtype)));
        // Each of the last twelve steps writes every gradient, a head in the log, some pages of the store's table, and
        // a root. Within these twelve steps, each record is written whole three times.
        let expected = 12 * pages.sum::<u64>() + 3 * whole;
        assert!(later >= expected && later < expected + 12 * 9 * 4096, "{later} {expected} {written:?}");
    }
}

#[test]
fn after_commit_function_runs_only_after_the_commit_and_writes_nothing() {
    let life = Life::new(&RunPlan::held(Durability::None, 0));
    ok(life.update_all(1));
    ok(life.commit(1));
    for (whole, after_commit) in [(false, true), (true, true), (false, false), (true, false)] {
        let (before, written) = (life.contents(), life.store().volume().stats().written.bytes);
        let count = before[0].0 + 1;
        let (application, calls) = halving(count, (whole, after_commit));
        ok(life.engine.apply(0, application, None, Wait::forever()));
        // The function `agree` returns `false` here, so the commit must have no effect.
        let commit = memascend_store::Commit { step: count, ..Default::default() };
        assert!(life.engine.commit_agreed(commit, Wait::forever(), &mut || false).is_err());
        assert!(life.contents() == before);
        if after_commit {
            assert_eq!(calls.load(Relaxed), 0);
        } else {
            ok(life.engine.discard(Wait::forever()));
            ok(life.engine.apply(0, halving(count, (whole, false)).0, None, Wait::forever()));
        }
        ok(life.commit(count));
        assert_eq!(life.store().volume().stats().written.bytes > written, !after_commit, "whole {whole}");
        let halved = |bytes: &[u8]| 0.5 * f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let wanted: Vec<u8> = before[0].1[0].chunks_exact(4).flat_map(|number| halved(number).to_le_bytes()).collect();
        assert!(life.contents()[0].1[0] == wanted);
    }
}

#[test]
fn commit_waits_for_reads_of_an_updated_held_unit() {
    let life = Life::new(&RunPlan::held(Durability::None, 0));
    ok(life.update_all(1));
    ok(life.commit(1));
    let parts = ok(life.store().parts(0, 1 << 20));
    ok(life.update_all(2));
    let patience = Wait::at_most(std::time::Duration::from_millis(50));
    assert!(life.engine.commit(memascend_store::Commit::default(), patience).is_err(), "a unit is being read");
    drop(parts);
    ok(life.commit(2));
    assert_eq!(ok(life.store().record_state(0)).step, 2);
}
