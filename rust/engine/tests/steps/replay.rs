//! Tests that the replay of a gradient log gives the same bits as a run that wrote every updated record in each step.

use std::collections::BTreeSet;

use memascend_engine::Engine;
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Create, Durability, Existing, Store};

use crate::setup::{ALL, Contents, Life, RunPlan, begun, contents, many, ok, opened, size, volume};

const STEPS: u64 = 9;

/// Returns the disk of a run that was killed after [`STEPS`] steps, and the contents before the first step and after
/// each step.
fn killed(plan: &RunPlan) -> (SimDisk, Vec<Contents>) {
    let life = Life::new(plan);
    let mut left = vec![life.contents()];
    for step in 1..=STEPS {
        ok(life.update_all(step));
        for record in ALL.into_iter().filter(|&record| (step + record as u64) % 5 == 2) {
            ok(life.engine.discard_record(record, memascend_mem::Wait::forever()));
        }
        ok(life.commit(step));
        left.push(life.contents());
    }
    (life.killed(), left)
}

fn logged(steps: u32) -> (SimDisk, Vec<Contents>) {
    killed(&RunPlan::held(Durability::Step, steps))
}

/// Opens a store and starts an engine on it, without a replay of the store's log.
fn found(disk: &SimDisk, faults: &Faults) -> memascend_store::Result<Engine> {
    found_as(Existing::Resume, disk, faults)
}

fn found_as(existing: Existing, disk: &SimDisk, faults: &Faults) -> memascend_store::Result<Engine> {
    let mut how = Create::default();
    how.existing = existing;
    let store = Store::open_on(volume(std::slice::from_ref(disk), faults), 8192, &how)?;
    Ok(ok(Engine::new(std::sync::Arc::new(store), &memascend_engine::Options::default())))
}

/// Opens a store, replays its log, and returns the store's contents.
pub(crate) fn resumed(existing: Existing, disk: &SimDisk) -> Result<Contents, String> {
    let engine = found_as(existing, disk, &Faults::default()).map_err(|why| why.to_string())?;
    engine.replay(&mut |_, _| true).map_err(|why| why.to_string())?;
    Ok(contents(engine.store()))
}

/// Returns true if the older of the store's two commits is undamaged.
fn previous_is_whole(disk: &SimDisk) -> bool {
    let there = volume(std::slice::from_ref(disk), &Faults::default());
    let examined = ok(Store::examine_on(there, 8192, &Create::default(), &mut |_, _| true));
    examined.last().is_some_and(|older| older.damages.is_empty())
}

/// Returns the kind and the offset of each extent of the slots from which a replay starts, and of each page of the log.
/// The replay need not read every page of the log.
fn needed(disk: &SimDisk) -> Vec<(&'static str, u64)> {
    let engine = ok(found(disk, &Faults::default()));
    let store = engine.store();
    let replay = store.pending_replay().unwrap_or_default();
    let mut places = Vec::new();
    for record in replay.records() {
        let slot = ok(store.record_state(record)).slot;
        let chunks = store.layout().chunks_of(record);
        for extent in 0..store.layout().extents_of(record) {
            let kind = if extent < chunks { "values" } else { "state" };
            let place = store.layout().extent(store.description(), record, extent);
            places.push((kind, store.layout().offset(&place, usize::from(slot))));
        }
    }
    let log = store.log_state();
    let bytes = disk.bytes();
    for offset in (log.offset..log.offset + log.bytes).step_by(4096) {
        let at = size(offset);
        places.push((if bytes[at..].starts_with(b"mascstep") { "head" } else { "gradient" }, offset));
    }
    places
}

#[test]
fn replay_gives_the_bits_of_a_streamed_run() {
    let (_, left) = killed(&RunPlan::streamed());
    let last = &left[size(STEPS)];
    for steps in [1, 3, 16] {
        let (disk, logged) = logged(steps);
        assert!(logged == left, "{steps} steps");
        let engine = ok(found(&disk, &Faults::default()));
        assert!(engine.store().pending_replay().is_some());
        let (mut reported, mut all) = (0, 0);
        assert!(ok(engine.replay(&mut |done, of| {
            (reported, all) = (done, of);
            true
        })));
        assert!(all > 0 && reported <= all);
        assert!(contents(engine.store()) == *last, "{steps} steps");
        assert!(!ok(engine.replay(&mut |_, _| true)), "a second replay must find nothing");
        drop(engine);
        assert!(contents(ok(found(&disk, &Faults::default())).store()) == *last);
    }
}

#[test]
fn interrupted_or_killed_replay_can_be_repeated() {
    let (disk, left) = logged(16);
    let ended = ok(found(&disk.after_power_loss(0), &Faults::default()));
    assert!(ended.replay(&mut |_, _| false).is_err(), "interrupted before the first record");
    assert!(ended.replay(&mut |done, _| done == 0).is_err(), "interrupted after some records were staged");
    assert!(ended.store().pending_replay().is_some());
    assert!(ok(ended.replay(&mut |_, _| true)), "a replay after the interruptions must succeed");
    let mut died = 0;
    for point in (0..).step_by(many(7, 17)) {
        let dying = disk.after_power_loss(point);
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        let done = found(&dying, &faults).is_ok_and(|engine| engine.replay(&mut |_, _| true).is_ok());
        let store = ok(opened(&dying.after_power_loss(point), &Faults::default(), Durability::Step));
        let again = ok(begun(store, &RunPlan::streamed()));
        assert!(contents(again.store()) == left[size(STEPS)], "point {point}");
        if done {
            break;
        }
        died += 1;
    }
    assert!(died > 5, "{died}");
}

#[test]
fn replay_rejects_damaged_pages_before_writing() {
    let (whole, left) = logged(3);
    let (newest, before) = (&left[size(STEPS)], &left[size(STEPS - 1)]);
    let whole = whole.bytes();
    let (mut refused, mut gone_back) = (BTreeSet::new(), BTreeSet::new());
    for (number, (kind, offset)) in needed(&SimDisk::of(whole.clone())).into_iter().enumerate() {
        if kind != "head" && number % many(1, 5) > 0 {
            continue;
        }
        let disk = SimDisk::of(whole.clone());
        disk.flip(size(offset), 1);
        let damaged = disk.bytes();
        // Resumes twice, as a program that is restarted after an error does.
        let resumes = [resumed(Existing::Resume, &disk), resumed(Existing::Resume, &disk)];
        if let [Ok(found), _] = resumes {
            assert!(kind != "values" && kind != "state", "the replay starts from the damaged extent, so it must fail");
            assert!(found == *newest, "{kind} at {offset}: the replay must not use this page");
            continue;
        }
        assert!(resumes.iter().all(|resume| resume.as_ref().is_err_and(|why| why.contains("damaged"))), "{resumes:?}");
        assert!(disk.bytes() == damaged, "{kind} at {offset}: a rejected resume must change nothing");
        refused.insert(kind);
        let previous = resumed(Existing::Previous, &disk);
        if previous_is_whole(&SimDisk::of(damaged)) {
            assert!(previous.as_ref() == Ok(before), "{kind} at {offset}: {previous:?}");
            gone_back.insert(kind);
        } else {
            assert!(previous.is_err(), "{kind} at {offset}");
        }
    }
    assert_eq!(refused, ["gradient", "head", "state", "values"].into());
    assert_eq!(gone_back, ["gradient", "head", "state", "values"].into());
}
