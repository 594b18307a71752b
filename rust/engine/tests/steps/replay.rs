//! Tests that a log is replayed to the bits of a store whose entries were updated and written each step.

use std::{collections::BTreeSet, sync::Arc};

use memascend_engine::{By, Engine, Gradient, Momentum, Options, Rule, rule_of};
use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{COMPACT, Commit, Create, Description, Dtype, Existing, Format, StepHead, Store, Update};

use crate::setup::{self, Contents, MASTER_AND_MOMENTS, MOMENTS, adam, contents, first, ok, parameter, volume};

const STEPS: u64 = 9;
const MOMENTUM: [(&str, Dtype); 1] = [("momentum_buffer", Dtype::F32)];

/// A master of their own, one beside, a compact one, none; several chunks, one and none.
fn description() -> Description {
    let entries = vec![
        parameter("float32", Dtype::F32, 6151, Format::Plain, &MOMENTS),
        parameter("float16", Dtype::F16, 2049, Format::Plain, &MASTER_AND_MOMENTS),
        parameter("bfloat16", Dtype::Bf16, 13, Format::Plain, &MASTER_AND_MOMENTS),
        parameter("compact", Dtype::Bf16, 6151, Format::Compact, &COMPACT),
        parameter("nothing", Dtype::Bf16, 0, Format::Compact, &COMPACT),
        parameter("momentum", Dtype::F32, 6151, Format::Plain, &MOMENTUM),
        parameter("momentum of a master", Dtype::Bf16, 2049, Format::Plain, &[MASTER_AND_MOMENTS[0], MOMENTUM[0]]),
        parameter("no state", Dtype::F32, 4100, Format::Plain, &[]),
        parameter("a master alone", Dtype::F16, 6151, Format::Plain, &MASTER_AND_MOMENTS[..1]),
    ];
    let each = entries.len();
    setup::description(entries, each)
}

fn engine(store: Store) -> Engine {
    ok(Engine::new(Arc::new(store), &Options::default()))
}

fn filled(disks: &[SimDisk]) -> Engine {
    let mut how = Create::default();
    how.uuid = Some([9; 16]);
    let engine = engine(ok(Store::create_on(volume(disks, &Faults::default()), 8192, description(), &how)));
    for (entry, described) in description().entries.iter().enumerate() {
        let mut rng = Rng::new(entry as u64);
        let values = numbers(&mut rng, described.dtype, described.elements());
        ok(engine.fill(entry, first(values, described.state.len(), 0), Wait::forever()));
    }
    ok(engine.commit(Commit::default(), Wait::forever()));
    engine
}

fn numbers(rng: &mut Rng, dtype: Dtype, count: u64) -> Vec<u8> {
    let one = |_| {
        let drawn = u16::try_from(rng.below(65_536)).unwrap_or(0);
        let value = f32::from(drawn) / 32_768.0 - 1.0;
        match dtype {
            Dtype::F32 => value.to_le_bytes().to_vec(),
            // A number between 1 and 2, and a sign.
            Dtype::F16 => (drawn & 0x83ff | 0x3c00).to_le_bytes().to_vec(),
            _ => value.to_le_bytes()[2..].to_vec(),
        }
    };
    (0..count).flat_map(one).collect()
}

/// What an entry is updated by: Adam, or SGD with momentum or without, each in all that it has.
fn hyperparameters(entry: usize, step: u64) -> Rule {
    let lr = 1e-2 / f64::from(u32::try_from(step).unwrap_or(1));
    if entry < 5 {
        return adam(lr, step).into();
    }
    let has_momentum = description().entries[entry].has_momentum();
    let nesterov = entry == 5;
    Momentum {
        lr,
        // What is kept of it stays as it is where a step has none.
        momentum: if has_momentum && step != 4 { 0.9 } else { 0.0 },
        dampening: if nesterov { 0.0 } else { 0.25 },
        weight_decay: if entry == 6 { 0.0 } else { 0.1 },
        nesterov: nesterov && step != 4,
        step,
        grad_scale: 0.5,
        maximize: entry == 7,
        seed: 0,
    }
    .into()
}

/// The gradient of an entry in a step, if it has one.
fn gradient(entry: usize, step: u64) -> Option<(Dtype, Vec<u8>)> {
    let described = &description().entries[entry];
    // Of its own dtype, or of float32.
    let dtype = if entry == 2 { Dtype::F32 } else { described.dtype };
    let has = !(step + entry as u64).is_multiple_of(4);
    has.then(|| (dtype, numbers(&mut Rng::new(step << 8 | entry as u64), dtype, described.elements())))
}

/// What the gradients of an entry are multiplied by.
fn factors(entry: usize) -> Vec<f32> {
    if entry == 3 || entry == 6 { vec![0.3, 1.7] } else { Vec::new() }
}

/// Updates and writes every entry, and gives what each step left.
fn streamed() -> Vec<Contents> {
    let engine = filled(&[SimDisk::new(4 << 20)]);
    let mut left = vec![contents(engine.store())];
    for step in 1..=STEPS {
        for entry in 0..description().entries.len() {
            let Some((dtype, bytes)) = gradient(entry, step) else { continue };
            let numbers = hyperparameters(entry, ok(engine.store().entry_state(entry)).step + 1);
            let gradient = ok(Gradient::new(Box::new(bytes), dtype));
            let by = if factors(entry).is_empty() {
                By::Given(gradient)
            } else {
                ok(engine.spill(entry, gradient, false, Wait::forever()));
                By::Spilled(factors(entry))
            };
            ok(engine.update(entry, by, None, numbers, Wait::forever()));
        }
        ok(engine.commit(Commit { step, ..Commit::default() }, Wait::forever()));
        left.push(contents(engine.store()));
    }
    left
}

/// Logs every gradient; `left` is what memory would hold.
fn logged(disks: &[SimDisk], left: &[Contents], steps: u32) {
    let engine = filled(disks);
    let store = engine.store();
    let entries: Vec<(usize, Dtype)> = (0..)
        .zip(description().entries)
        .map(|(entry, of)| (entry, if entry == 2 { Dtype::F32 } else { of.dtype }))
        .collect();
    assert_eq!(ok(store.keep_log(&entries, steps)), steps);
    for (step, before) in (1..=STEPS).zip(left) {
        let mut head = StepHead::default();
        for (entry, (updates, _)) in before.iter().enumerate() {
            let Some((dtype, bytes)) = gradient(entry, step) else { continue };
            assert!(ok(store.begin_append(entry, dtype)));
            let chunk_bytes = 2048 * usize::try_from(dtype.bytes()).unwrap_or(0);
            for (chunk, part) in (0..).zip(bytes.chunks(chunk_bytes)) {
                let mut part = part.to_vec();
                part.resize(part.len().next_multiple_of(4096), 0);
                ok(ok(store.append(entry, chunk, part)).wait());
            }
            let rule =
                ok(rule_of(&description().entries[entry], &hyperparameters(entry, updates + 1), &factors(entry)));
            head.updates.push(Update { entry, rule: u32::try_from(head.rules.len()).unwrap_or(0), step: updates + 1 });
            head.rules.push(rule);
        }
        for entry in store.due() {
            let (step, tensors) = &before[entry];
            let tensors: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
            ok(store.stage_entry(entry, *step, &tensors, Wait::forever()));
        }
        ok(store.commit(Commit { step, log: Some(head), ..Commit::default() }, Wait::forever()));
    }
}

fn opened(disks: &[SimDisk], faults: &Faults) -> memascend_store::Result<Engine> {
    opened_as(Existing::Resume, disks, faults)
}

fn opened_as(existing: Existing, disks: &[SimDisk], faults: &Faults) -> memascend_store::Result<Engine> {
    let mut how = Create::default();
    how.existing = existing;
    Store::open_on(volume(disks, faults), 8192, &how).map(engine)
}

/// Opens a store and ends its log.
fn resumed(existing: Existing, disk: &SimDisk) -> Result<Contents, String> {
    let engine = opened_as(existing, std::slice::from_ref(disk), &Faults::default()).map_err(|why| why.to_string())?;
    engine.replay(&mut |_, _| true).map_err(|why| why.to_string())?;
    Ok(contents(engine.store()))
}

/// Whether the commit before the newest one is whole.
fn previous_is_whole(disk: &SimDisk) -> bool {
    let there = volume(std::slice::from_ref(disk), &Faults::default());
    let examined = ok(Store::examine_on(there, 8192, &Create::default(), &mut |_, _| true));
    examined.last().is_some_and(|older| older.damages.is_empty())
}

/// Where what a replay needs begins, by its kind: pieces of slots that it starts from, gradients and heads of the log.
fn needed(disk: &SimDisk) -> Vec<(&'static str, u64)> {
    let found = ok(opened(std::slice::from_ref(disk), &Faults::default()));
    let store = found.store();
    let replay = store.pending_replay().unwrap_or_default();
    let mut places = Vec::new();
    for entry in replay.entries() {
        let slot = ok(store.entry_state(entry)).slot;
        let chunks = store.layout().chunks_of(entry);
        for piece in 0..store.layout().pieces_of(entry) {
            let kind = if piece < chunks { "values" } else { "state" };
            let place = store.layout().piece(store.description(), entry, piece);
            places.push((kind, store.layout().offset_in(&place, usize::from(slot))));
        }
    }
    let log = store.log_state();
    let bytes = disk.bytes();
    for offset in (log.offset..log.offset + log.bytes).step_by(4096) {
        let at = usize::try_from(offset).unwrap_or(0);
        places.push((if bytes[at..].starts_with(b"mascstep") { "head" } else { "gradient" }, offset));
    }
    places
}

#[test]
fn it_gives_the_bits_of_a_run_that_wrote_them() {
    let left = streamed();
    for steps in [1, 3, 16] {
        let disks = [SimDisk::new(4 << 20)];
        logged(&disks, &left, steps);
        let found = ok(opened(&disks, &Faults::default()));
        assert!(found.store().pending_replay().is_some());
        let (mut told, mut all) = (0, 0);
        assert!(ok(found.replay(&mut |done, of| {
            (told, all) = (done, of);
            true
        })));
        assert!(all > 0 && told <= all);
        assert!(contents(found.store()) == left[left.len() - 1], "{steps} steps");
        assert!(!ok(found.replay(&mut |_, _| true)), "there is nothing left of it");
        drop(found);
        assert!(contents(ok(opened(&disks, &Faults::default())).store()) == left[left.len() - 1]);
    }
}

#[test]
fn whoever_ends_it_or_dies_in_it_leaves_the_log() {
    let left = streamed();
    let found = [SimDisk::new(4 << 20)];
    logged(&found, &left, 16);
    let ended = ok(opened(&found, &Faults::default()));
    assert!(ended.replay(&mut |_, _| false).is_err(), "before anything");
    assert!(ended.replay(&mut |done, _| done == 0).is_err(), "when some of it was staged");
    assert!(ended.store().pending_replay().is_some());
    assert!(ok(ended.replay(&mut |_, _| true)), "after that it is done all the same");
    drop(ended);
    logged(&found, &left, 16);
    let mut died = 0;
    for point in (0..).step_by(7) {
        let disks = [found[0].after_power_loss(point)];
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        let done = match opened(&disks, &faults) {
            Ok(engine) => engine.replay(&mut |_, _| true).is_ok(),
            Err(_) => false,
        };
        let left_there = [disks[0].after_power_loss(point)];
        let again = ok(opened(&left_there, &Faults::default()));
        ok(again.replay(&mut |_, _| true));
        assert!(contents(again.store()) == left[left.len() - 1], "point {point}");
        if done {
            break;
        }
        died += 1;
    }
    assert!(died > 5, "{died}");
}

#[test]
fn what_is_damaged_is_refused_before_anything_is_written() {
    let left = streamed();
    let (newest, before) = (&left[left.len() - 1], &left[left.len() - 2]);
    let whole = SimDisk::new(4 << 20);
    logged(std::slice::from_ref(&whole), &left, 3);
    let whole = whole.bytes();
    let (mut refused, mut gone_back) = (BTreeSet::new(), BTreeSet::new());
    let long = std::env::var_os("MEMASCEND_TEST_LONG").is_some();
    for (number, (kind, offset)) in needed(&SimDisk::of(whole.clone())).into_iter().enumerate() {
        if !(long || kind == "head" || number % 5 == 0) {
            continue;
        }
        let disk = SimDisk::of(whole.clone());
        disk.flip(usize::try_from(offset).unwrap_or(0), 1);
        let damaged = disk.bytes();
        // A program that is started again and again.
        let resumes = [resumed(Existing::Resume, &disk), resumed(Existing::Resume, &disk)];
        if let [Ok(found), _] = resumes {
            assert!(kind != "values" && kind != "state", "the replay starts from it");
            assert!(found == *newest, "{kind} at {offset}: it is no part of the log any more");
            continue;
        }
        assert!(resumes.iter().all(|resume| resume.as_ref().is_err_and(|why| why.contains("damaged"))), "{resumes:?}");
        assert!(disk.bytes() == damaged, "{kind} at {offset}: a refusal changes nothing");
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
