//! Tests updates that a step leaves to the next one: the bits of updates that are made at once, whatever comes between.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use memascend_engine::{By, Engine};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, Rng, SimDisk},
};
use memascend_store::{Buffer, Commit, Create, Durability, Existing, Shared, Store};

use crate::{
    replay::resumed,
    setup::{
        ALL, Contents, Life, RunPlan, begun, contents, first, gradient, kinds, many, ok, opened, rule, size, volume,
    },
};

/// Memory that a test looks at once an engine is done with it.
fn memory(nbytes: u64) -> Shared<Vec<u8>> {
    Shared::new(vec![0xee; size(nbytes)])
}

fn bytes(memory: &Shared<Vec<u8>>) -> Vec<u8> {
    // SAFETY: the tests look when nothing is on its way to it.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().as_ptr(), memory.len()) }.to_vec()
}

/// The values of a unit.
fn unit(engine: &Engine, unit: usize, settles: bool) -> memascend_engine::Result<Vec<u8>> {
    let into = memory(engine.store().layout().unit_bytes(unit));
    engine.fetch(unit, into.clone(), settles)?.wait(Wait::forever())?;
    Ok(bytes(&into))
}

fn units(store: &Store) -> usize {
    store.description().units.len()
}

/// What a process that is killed now leaves.
fn left(disk: &SimDisk) -> Contents {
    let store = ok(opened(&SimDisk::of(disk.bytes()), &Faults::default(), Durability::Step));
    memascend_engine::apply_logs(&store);
    ok(store.verify(&mut |_, _| true));
    contents(&store)
}

/// A life whose updates are made at once, and one that leaves some of the same to the next step.
struct Twins {
    plan: RunPlan,
    plain: Life,
    late: Life,
    /// What the last commit left of `plain`, and which records that of `late` left behind.
    wanted: Contents,
    behind: BTreeSet<usize>,
    /// What was done of each kind.
    seen: [u64; SEEN.len()],
}

const SEEN: [&str; 8] = ["deferred", "at once", "added", "taken back", "discarded", "caught up", "computed", "killed"];

/// How a record gets its update in `late`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Now,
    Later,
}

impl Twins {
    fn new(plan: RunPlan) -> Self {
        let (plain, late) = (Life::new(&RunPlan::streamed()), Life::new(&plan));
        let wanted = plain.contents();
        Self { plan, plain, late, wanted, behind: BTreeSet::new(), seen: [0; SEEN.len()] }
    }

    fn both(&self, work: impl Fn(&Engine) -> memascend_engine::Result<()>) {
        ok(work(&self.plain.engine));
        ok(work(&self.late.engine));
    }

    fn note(&mut self, what: &str) {
        let at = SEEN.iter().position(|name| *name == what);
        self.seen[at.unwrap_or_else(|| panic!("{what}"))] += 1;
    }

    /// Spills the same of a record in both.
    fn spill(&mut self, record: usize, seed: u64, rng: &mut Rng) {
        let adds = rng.below(3) == 0 && self.plain.engine.spilled(record, Wait::forever()).is_ok();
        self.both(|engine| engine.spill(record, gradient(record, seed), adds, Wait::forever()));
        if rng.below(3) == 0 {
            self.both(|engine| engine.spill(record, gradient(record, seed + 1), true, Wait::forever()));
            self.note("added");
        }
    }

    fn update(&mut self, record: usize, factors: &[f32], when: When) {
        let numbers = rule(record, ok(self.plain.store().record_state(record)).step + 1);
        assert_eq!(ok(self.plain.store().record_state(record)).step, ok(self.late.store().record_state(record)).step);
        let at_once =
            |engine: &Engine| engine.update(record, By::Spilled(factors.to_vec()), None, numbers, Wait::forever());
        ok(at_once(&self.plain.engine));
        if when == When::Later && ok(self.late.engine.defer(record, numbers, factors, Wait::forever())) {
            self.note("deferred");
        } else {
            assert!(!self.behind.contains(&record), "it was left behind, so it can be left behind again");
            ok(at_once(&self.late.engine));
            self.note("at once");
        }
    }

    /// What each record gets in a step.
    fn record(&mut self, record: usize, seed: u64, rng: &mut Rng) {
        let may_be_now = !self.behind.contains(&record);
        let when = if may_be_now && rng.below(3) == 0 { When::Now } else { When::Later };
        let factors: Vec<f32> = [0.3, 1.7, 0.9].into_iter().take(rng.below(4)).collect();
        match rng.below(8) {
            0 => return,
            1 if may_be_now => {
                let tensors = kinds().records[record].state.len();
                let step = ok(self.plain.store().record_state(record)).step + 1;
                let values = gradient_bytes(record, seed);
                return self.both(|engine| engine.fill(record, first(values.clone(), tensors, step), Wait::forever()));
            }
            2 => {
                self.spill(record, seed + 7, rng);
                self.update(record, &factors, when);
                self.both(|engine| engine.take_back(record, Wait::forever()));
                self.note("taken back");
            }
            3 => {
                self.spill(record, seed + 7, rng);
                self.update(record, &factors, when);
                // What lies there of the gradient is the chance of the moment.
                self.both(|engine| {
                    engine.discard_record(record, Wait::forever())?;
                    engine.drop_spilled(record, Wait::forever())
                });
            }
            _ => {}
        }
        self.spill(record, seed, rng);
        self.update(record, &factors, when);
    }

    /// Reads some of what the last commit left, in every way, and compares it.
    fn look(&mut self, place: &str, rng: &mut Rng) {
        let (late, store) = (&self.late.engine, self.late.store());
        let before = late.counters().computed;
        let (number, record, settles) = (rng.below(units(store)), rng.below(ALL.len()), rng.below(3) == 0);
        match rng.below(7) {
            0 => {
                let mut tensors: Vec<Vec<u8>> =
                    ok(store.tensor_bytes(record)).into_iter().map(|bytes| vec![0; bytes]).collect();
                ok(store.read_record(record, &mut tensors.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>()));
                assert!(tensors == self.wanted[record].1, "{place}: record {record}");
            }
            1 => ok(late.settle_later(record, &mut Wait::forever())),
            2 => drop(ok(late.fetch(number, memory(store.layout().unit_bytes(number)), settles))),
            3 | 4 => {
                let wanted = ok(unit(&self.plain.engine, number, false));
                let parts = ok(late.parts(number, 8192, settles));
                for (index, (start, nbytes)) in parts.places().enumerate() {
                    if rng.below(4) > 0 {
                        let into = memory(nbytes);
                        ok(ok(parts.begin(index, into.clone(), None)).wait(Wait::forever()));
                        let of_part = &wanted[size(start)..size(start + nbytes)];
                        assert!(bytes(&into) == of_part, "{place}: part {index} of unit {number}, {settles}");
                    }
                }
            }
            5 if self.plan.durability == Durability::Step => {
                assert!(left(&self.late.disk) == self.wanted, "{place}: as a kill leaves it");
            }
            _ => {
                let (wanted, got) = (ok(unit(&self.plain.engine, number, false)), ok(unit(late, number, settles)));
                assert!(got == wanted, "{place}: unit {number}, {settles}");
            }
        }
        if self.late.engine.counters().computed > before {
            self.note("computed");
        }
    }

    fn catch_up(&mut self) {
        let is_behind = self.late.engine.is_behind();
        assert_eq!(is_behind, !self.behind.is_empty());
        assert_eq!(ok(self.late.engine.catch_up(Wait::forever())), is_behind);
        assert!(!self.late.engine.is_behind() && self.late.engine.behind() == 0);
        if is_behind {
            self.note("caught up");
        }
        self.behind.clear();
    }

    fn looks(&mut self, place: &str, rng: &mut Rng) {
        for _ in 0..rng.below(4) {
            self.look(place, rng);
        }
    }

    fn step(&mut self, number: u64, rng: &mut Rng) {
        let place = format!("step {number}, {:?}", self.plan);
        self.looks(&place, rng);
        if rng.below(4) == 0 {
            self.catch_up();
            self.looks(&place, rng);
        }
        let mut seed = number << 4;
        loop {
            for record in ALL {
                self.record(record, seed, rng);
                if rng.below(6) == 0 {
                    self.look(&place, rng);
                }
            }
            self.looks(&place, rng);
            if rng.below(4) > 0 {
                break;
            }
            self.both(|engine| engine.finish(Wait::forever()));
            self.both(|engine| engine.discard(Wait::forever()));
            self.note("discarded");
            self.looks(&place, rng);
            if rng.below(3) == 0 {
                self.catch_up();
            }
            seed += 1 << 3;
        }
        let named = |life: &Life| ALL.into_iter().filter(|&record| life.store().is_behind(record)).collect();
        ok(self.plain.commit(number));
        ok(self.late.commit(number));
        self.behind = named(&self.late);
        self.wanted = self.plain.contents();
        assert_eq!(self.late.spilled(), self.plain.spilled(), "{place}");
    }

    /// Ends `late`, and begins it anew in another way.
    fn begin_anew(mut self, plan: RunPlan, seed: u64, rng: &mut Rng) -> Self {
        let by = if self.plan.durability == Durability::None { 0 } else { rng.below(3) };
        if by == 0 {
            ok(self.late.engine.discard(Wait::forever()));
            self.catch_up();
            self.late.engine.close();
            ok(self.late.store().write_applied(&mut |_, _| true));
            ok(self.late.store().close(Wait::forever()));
        }
        let disk = self.late.killed();
        let disk = if by == 1 { disk.after_power_loss(seed) } else { disk };
        self.late = Life::opened(disk, &plan);
        assert!(self.late.contents() == self.wanted, "ended by {by}: {:?}", self.plan);
        for record in ALL {
            ok(self.plain.engine.drop_spilled(record, Wait::forever()));
        }
        (self.plan, self.behind) = (plan, BTreeSet::new());
        self.note("killed");
        self
    }
}

fn gradient_bytes(record: usize, seed: u64) -> Vec<u8> {
    let described = &kinds().records[record];
    let element = size(described.dtype.bytes());
    let pattern = if element == 4 { 0.25_f32.to_le_bytes().to_vec() } else { vec![0x10, 0x3d] };
    let scale = u8::try_from(seed % 4).unwrap_or(0);
    let mut all = pattern.repeat(size(described.elements()));
    all.iter_mut().step_by(element).for_each(|byte| *byte ^= scale);
    all
}

#[test]
fn lives_that_leave_updates_to_the_next_step_have_the_bits_of_one_that_does_not() {
    let mut seen = [0; SEEN.len()];
    for seed in 0..many(100, 8) {
        let mut rng = Rng::new(seed);
        let plan = |rng: &mut Rng| {
            let held: Vec<usize> = ALL.into_iter().filter(|_| rng.below(5) == 0).collect();
            let deferred = ALL.into_iter().filter(|_| rng.below(8) > 0).collect();
            let held = if rng.below(2) == 0 { held } else { vec![] };
            RunPlan {
                durability: if rng.below(3) > 0 { Durability::Step } else { Durability::None },
                log_steps: if held.is_empty() { 0 } else { u32::try_from(rng.below(4)).unwrap_or(0) },
                held,
                deferred,
            }
        };
        let mut twins = Twins::new(plan(&mut rng));
        for number in 1..=16 {
            twins.step(number, &mut rng);
            if rng.below(4) == 0 {
                let plan = plan(&mut rng);
                twins = twins.begin_anew(plan, seed << 8 | number, &mut rng);
            }
        }
        assert!(twins.late.contents() == twins.wanted, "seed {seed}");
        seen.iter_mut().zip(twins.seen).for_each(|(all, one)| *all += one);
    }
    assert!(seen.iter().all(|&count| count > 10), "{SEEN:?}: {seen:?}");
}

/// A step with some of everything: its forward, gradients, sums, a discard; its updates made at once where it says so.
fn some_step(engine: &Engine, number: u64, at_once: bool) -> memascend_engine::Result<()> {
    let (store, mut rng) = (engine.store(), Rng::new(number));
    for of in 0..units(store) {
        let settles = rng.below(2) == 0;
        unit(engine, of, settles)?;
    }
    let caught_up = number.is_multiple_of(3);
    if caught_up {
        engine.catch_up(Wait::forever())?;
    }
    for turn in 0..=u64::from(number.is_multiple_of(4)) {
        for record in ALL {
            if rng.below(6) == 0 {
                continue;
            }
            let numbers = rule(record, store.record_state(record)?.step + 1);
            engine.spill(record, gradient(record, number * 2 + turn), false, Wait::forever())?;
            if rng.below(3) == 0 {
                engine.spill(record, gradient(record, number), true, Wait::forever())?;
            }
            let factors = &[0.3, 1.7][..rng.below(3)];
            let now = rng.below(4) == 0 && caught_up;
            if now || at_once || !engine.defer(record, numbers, factors, Wait::forever())? {
                engine.update(record, By::Spilled(factors.to_vec()), None, numbers, Wait::forever())?;
            }
        }
        if turn == 0 && number.is_multiple_of(4) {
            engine.finish(Wait::forever())?;
            engine.discard(Wait::forever())?;
        }
    }
    engine.commit(Commit { step: number, ..Commit::default() }, Wait::forever()).map(drop)
}

/// What each step leaves.
fn steps(steps: u64) -> Vec<Contents> {
    let plain = Life::new(&RunPlan::streamed());
    let mut left = vec![plain.contents()];
    for number in 1..=steps {
        ok(some_step(&plain.engine, number, true));
        left.push(plain.contents());
    }
    left
}

#[test]
fn power_that_fails_at_any_request_leaves_a_whole_step() {
    const STEPS: u64 = 6;
    let wanted = steps(STEPS);
    for plan in [
        RunPlan::deferring(Durability::Step),
        RunPlan { held: vec![0, 2, 4], log_steps: 3, ..RunPlan::deferring(Durability::Step) },
    ] {
        let begin = Life::new(&plan).killed();
        let mut died = 0;
        for point in (0..).step_by(many(1, 41)) {
            let disk = begin.after_power_loss(0);
            let faults = Faults { dies_after: Some(point), ..Faults::default() };
            let lived = (|| {
                let engine = begun(opened(&disk, &faults, plan.durability).ok()?, &plan).ok()?;
                let failed = (1..=STEPS).find(|&number| some_step(&engine, number, false).is_err());
                failed.map_or(Some(STEPS), |failed| Some(failed - 1))
            })();
            let said = lived.unwrap_or(0);
            for left in [disk.after_power_loss(point), SimDisk::of(disk.bytes())] {
                let found = Life::opened(left, &plan);
                let contents = found.contents();
                // What was said to be committed is there, or the commit whose answer never came.
                let mut at = (0..=STEPS).filter(|&number| wanted[size(number)] == contents);
                assert!(at.any(|number| number == said || number == said + 1), "point {point}: {said}");
                ok(found.store().verify(&mut |_, _| true));
                // It goes on from there.
                if said == STEPS - 1 && found.store().info().step == said {
                    ok(some_step(&found.engine, STEPS, false));
                    assert!(found.contents() == wanted[size(STEPS)], "point {point}, gone on");
                }
            }
            if lived == Some(STEPS) {
                break;
            }
            died += 1;
        }
        assert!(died > 10, "{died}");
    }
}

/// A life that has left all of its second step to the third one; what each left, and where the gradients lie that the
/// last commit names.
fn left_behind() -> (Life, Vec<Contents>, Vec<(usize, u64)>) {
    let plan = RunPlan::deferring(Durability::Step);
    let (life, plain) = (Life::new(&plan), Life::new(&RunPlan::streamed()));
    let (mut left, mut places) = (vec![plain.contents()], Vec::new());
    for step in 1..=2 {
        places.clear();
        for record in ALL {
            ok(plain.engine.spill(record, gradient(record, step), false, Wait::forever()));
            let before = life.disk.operations().len();
            ok(life.engine.spill(record, gradient(record, step), false, Wait::forever()));
            ok(life.engine.finish(Wait::forever()));
            let begun = life.disk.operations();
            let written = begun[before..].iter().filter(|(action, _)| *action == Action::Write);
            places.extend(written.map(|&(_, at)| (record, at)));
        }
        for record in ALL {
            let numbers = rule(record, step);
            ok(plain.engine.update(record, By::Spilled(vec![0.3]), None, numbers, Wait::forever()));
            assert!(ok(life.engine.defer(record, numbers, &[0.3], Wait::forever())));
        }
        ok(plain.commit(step));
        ok(life.commit(step));
        left.push(plain.contents());
    }
    (life, left, places)
}

/// What an error says; nothing where there is none.
fn said<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    result.map_or_else(|error| error.to_string(), |_| String::new())
}

/// That an error says that the gradient of a record is damaged, and where.
fn names(error: &str, record: usize, at: u64) {
    let name = &kinds().records[record].name;
    assert!(error.contains(&format!("gradient of {name:?}")) && error.contains("damaged"), "{name} at {at}: {error}");
    assert!(error.contains(&at.to_string()), "{error}, not at {at}");
}

#[test]
fn a_flipped_bit_in_a_gradient_that_a_commit_names_is_named() {
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
        assert!(disk.bytes() == damaged, "a refusal changes nothing");
        assert!(resumed(Existing::Previous, &disk).as_ref() == Ok(&left[1]), "{record} at {at}");
        assert!(resumed(Existing::Resume, &disk).as_ref() == Ok(&left[1]), "{record} at {at}: gone back to");
    }
    assert!(resumed(Existing::Resume, &SimDisk::of(image)).as_ref() == Ok(&left[2]));
}

#[test]
fn a_flipped_bit_is_named_where_the_update_is_made_and_nothing_is_lost_by_that() {
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
fn the_commit_before_is_whole_until_something_is_written() {
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
        // Looking writes nothing.
        for of in 0..units(life.store()) {
            ok(unit(&life.engine, of, false));
        }
        assert!(of_disk(Existing::Previous).as_ref() == Ok(&left[1]), "{name}");
        write(&life.engine);
        let refused = said(of_disk(Existing::Previous));
        assert!(refused.contains("belongs to the commit before"), "{name}: {refused}");
        assert!(of_disk(Existing::Resume).as_ref() == Ok(&left[2]), "{name}");
        ok(life.engine.discard(Wait::forever()));
        assert!(life.contents() == left[2], "{name}");
    }
}

#[test]
fn without_room_for_second_places_nothing_changes_and_updates_are_made_at_once() {
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
            ok(engine.fill(record, first(gradient_bytes(record, 1), tensors, 0), Wait::forever()));
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
            ok(engine.update(0, By::Spilled(vec![]), None, rule(0, 1), Wait::forever()));
        }
        ok(engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever()));
        let step = contents(store);
        drop(engine);
        assert!(resumed(Existing::Resume, &disk).as_ref() == Ok(&step));
    }
    assert_eq!(made, [false, false, false, false, true]);
}

#[test]
fn a_refused_call_changes_nothing() {
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
    let plain = Life::new(&RunPlan::streamed());
    for step in 1..=3 {
        for record in if step < 3 { &ALL[..] } else { &ALL[..1] } {
            let factor = if step < 3 { 0.3 } else { 0.5 };
            ok(plain.engine.spill(*record, gradient(*record, step), false, Wait::forever()));
            let numbers = rule(*record, step);
            ok(plain.engine.update(*record, By::Spilled(vec![factor]), None, numbers, Wait::forever()));
        }
        ok(plain.commit(step));
    }
    assert!(life.contents() == plain.contents());
    assert!(life.contents()[1] == left[2][1]);
}

#[test]
fn what_other_threads_fetch_is_of_one_commit_while_steps_are_made() {
    const STEPS: u64 = 9;
    let plain = Life::new(&RunPlan::streamed());
    let of_units = |engine: &Engine| (0..units(engine.store())).map(|of| ok(unit(engine, of, false))).collect();
    let mut wanted: Vec<Vec<Vec<u8>>> = vec![of_units(&plain.engine)];
    for number in 1..=STEPS {
        ok(some_step(&plain.engine, number, true));
        wanted.push(of_units(&plain.engine));
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
                            // A commit was made meanwhile.
                            Err(error) => assert!(error.to_string().contains("begin anew"), "{error}"),
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
fn a_fetch_that_is_begun_while_a_commit_is_made_is_of_one_commit() {
    let (mut anew, mut fetched) = (0, 0);
    for round in 0..many(40, 6) {
        let (life, left, _) = left_behind();
        let plan = RunPlan::deferring(Durability::Step);
        let faults = Faults { seed: round, delay: Duration::from_millis(2), reorder: true, ..Faults::default() };
        // What was left behind is replayed, so that it is left anew, by a step that nobody else has made.
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
                    assert!(error.to_string().contains("begin anew"), "{error}");
                    anew += 1;
                }
            }
        }
    }
    assert!(anew + fetched > 0, "{anew} {fetched}");
}

#[test]
fn parts_that_are_begun_after_a_commit_are_not_of_another_one() {
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
    assert!(said(later).contains("begin anew"));
}

#[test]
fn what_is_read_of_a_record_that_was_behind_has_the_version_that_it_has_then() {
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
fn only_updates_that_there_is_room_to_name_are_deferred() {
    let life = Life::new(&RunPlan { deferred: vec![3, 1], ..RunPlan::streamed() });
    for record in ALL {
        ok(life.engine.spill(record, gradient(record, 1), false, Wait::forever()));
        assert_eq!(ok(life.engine.defer(record, rule(record, 1), &[], Wait::forever())), [1, 3].contains(&record));
    }
    ok(life.commit(1));
    assert_eq!(life.engine.behind(), 2);
}

#[test]
fn a_record_is_updated_by_one_gradient_in_a_step_and_by_one_that_a_slot_lacks() {
    let (life, ..) = left_behind();
    let (engine, store) = (&life.engine, life.store());
    ok(engine.spill(0, gradient(0, 3), false, Wait::forever()));
    ok(engine.finish(Wait::forever()));
    assert!(said(store.append_spilled(0)).contains("lacks its last update; settle it first"));
    assert!(ok(engine.catch_up(Wait::forever())));
    ok(engine.spill(0, gradient(0, 3), false, Wait::forever()));
    ok(engine.update(0, By::Spilled(vec![]), None, rule(0, 3), Wait::forever()));
    assert!(ok(engine.defer(0, rule(0, 3), &[], Wait::forever())));
    assert!(said(life.commit(3)).contains("staged already"));
    ok(engine.discard(Wait::forever()));
    ok(engine.update(0, By::Spilled(vec![]), None, rule(0, 3), Wait::forever()));
    ok(life.commit(3));
}
