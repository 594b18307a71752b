//! Tests that deferred updates give the same bits as updates that are made at once. Between a step and its deferred
//! updates, the tests fetch values, discard steps, kill runs and cut the power.

use std::collections::BTreeSet;

use memascend_engine::{Engine, GradientSource};
use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{Buffer, Commit, Durability, Shared, Store};

use crate::setup::{
    ALL, Contents, Life, RunPlan, begun, contents, first, gradient, kinds, many, ok, opened, rule, size,
};

/// Returns memory for a fetch. The engine fills the memory, and the test reads it after the fetch.
pub(crate) fn memory(nbytes: u64) -> Shared<Vec<u8>> {
    Shared::new(vec![0xee; size(nbytes)])
}

pub(crate) fn bytes(memory: &Shared<Vec<u8>>) -> Vec<u8> {
    // SAFETY: the tests read the memory only after its fetch has ended, so no thread writes to it.
    unsafe { std::slice::from_raw_parts(memory.as_ptr().as_ptr(), memory.len()) }.to_vec()
}

/// Fetches a unit and returns its values. With `settles`, the fetch also causes the engine to write the deferred
/// updates of the unit.
pub(crate) fn unit(engine: &Engine, unit: usize, settles: bool) -> memascend_engine::Result<Vec<u8>> {
    let into = memory(engine.store().layout().unit_bytes(unit));
    engine.fetch(unit, into.clone(), settles)?.wait(Wait::forever())?;
    Ok(bytes(&into))
}

pub(crate) fn units(store: &Store) -> usize {
    store.description().units.len()
}

/// Returns the contents that the store would have if the process were killed at this moment.
fn left(disk: &SimDisk) -> Contents {
    let store = ok(opened(&SimDisk::of(disk.bytes()), &Faults::default(), Durability::Step));
    memascend_engine::apply_logs(&store);
    ok(store.verify(&mut |_, _| true));
    contents(&store)
}

/// Two runs with the same updates. `eager` makes all updates at once, and `late` defers some updates.
struct Twins {
    plan: RunPlan,
    eager: Life,
    late: Life,
    /// `wanted` is the contents of `eager` after the last commit. `behind` has the records whose updates this commit
    /// deferred in `late`; `catch_up` and `begin_anew` empty it.
    wanted: Contents,
    behind: BTreeSet<usize>,
    /// How often each event of [`SEEN`] happened.
    seen: [u64; SEEN.len()],
}

const SEEN: [&str; 9] =
    ["deferred", "at once", "added", "kept", "taken back", "discarded", "caught up", "computed", "killed"];

/// When the run `late` makes an update: at once, or later as a deferred update.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Now,
    Later,
}

impl Twins {
    fn new(plan: RunPlan) -> Self {
        let (eager, late) = (Life::new(&RunPlan::streamed()), Life::new(&plan));
        let wanted = eager.contents();
        Self { plan, eager, late, wanted, behind: BTreeSet::new(), seen: [0; SEEN.len()] }
    }

    fn both(&self, work: impl Fn(&Engine) -> memascend_engine::Result<()>) {
        ok(work(&self.eager.engine));
        ok(work(&self.late.engine));
    }

    fn note(&mut self, what: &str) {
        let at = SEEN.iter().position(|name| *name == what);
        self.seen[at.unwrap_or_else(|| panic!("{what}"))] += 1;
    }

    /// Spills the same gradients of a record in both runs.
    fn spill(&mut self, record: usize, seed: u64, rng: &mut Rng) {
        let adds = rng.below(3) == 0 && self.eager.engine.spilled(record, Wait::forever()).is_ok();
        self.both(|engine| engine.spill(record, gradient(record, seed), adds, Wait::forever()));
        if rng.below(3) == 0 {
            self.both(|engine| engine.spill(record, gradient(record, seed + 1), true, Wait::forever()));
            self.note("added");
        }
    }

    fn update(&mut self, record: usize, factors: &[f32], when: When) {
        let numbers = rule(record, ok(self.eager.store().record_state(record)).step + 1);
        assert_eq!(ok(self.eager.store().record_state(record)).step, ok(self.late.store().record_state(record)).step);
        let at_once = |engine: &Engine| {
            engine.update(record, GradientSource::Spilled(factors.to_vec()), None, numbers, Wait::forever())
        };
        ok(at_once(&self.eager.engine));
        if when == When::Later && ok(self.late.engine.defer(record, numbers, factors, Wait::forever())) {
            self.note("deferred");
        } else {
            assert!(!self.behind.contains(&record), "a record that is behind must accept another deferred update");
            ok(at_once(&self.late.engine));
            self.note("at once");
        }
    }

    /// Updates a record in a step, fills it, or does nothing. `rng` selects the action and the gradients.
    fn record(&mut self, record: usize, seed: u64, rng: &mut Rng) {
        let may_be_now = !self.behind.contains(&record);
        let when = if may_be_now && rng.below(3) == 0 { When::Now } else { When::Later };
        let factors: Vec<f32> = [0.3, 1.7, 0.9].into_iter().take(rng.below(4)).collect();
        match rng.below(8) {
            0 => return,
            1 if may_be_now => {
                let tensors = kinds().records[record].state.len();
                let step = ok(self.eager.store().record_state(record)).step + 1;
                let values = filling(record, seed);
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
                // A discard may keep or lose the spilled gradient, because the spill may or may not have ended. So both
                // runs drop the gradient.
                self.both(|engine| {
                    engine.discard_record(record, Wait::forever())?;
                    engine.drop_spilled(record, Wait::forever())
                });
            }
            _ => {}
        }
        let lies_there = self.eager.engine.spilled(record, Wait::forever()).is_ok();
        if lies_there && rng.below(5) == 0 {
            // Spills no new gradient. The update uses the gradient that is already spilled.
            self.note("kept");
        } else {
            self.spill(record, seed, rng);
        }
        self.update(record, &factors, when);
    }

    /// Compares some values of the last commit of `late` with the values of `eager`, queues a job that settles a
    /// record, or drops a fetch without waiting for it. `rng` selects the action.
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
                let wanted = ok(unit(&self.eager.engine, number, false));
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
                assert!(left(&self.late.disk) == self.wanted, "{place}: the contents after a kill differ");
            }
            _ => {
                let (wanted, got) = (ok(unit(&self.eager.engine, number, false)), ok(unit(late, number, settles)));
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
        ok(self.eager.commit(number));
        ok(self.late.commit(number));
        self.behind = named(&self.late);
        self.wanted = self.eager.contents();
        assert_eq!(self.late.spilled(), self.eager.spilled(), "{place}");
    }

    /// Ends the run `late`, and opens its disk again with another plan. With `Durability::None`, closes the store.
    /// Otherwise `rng` selects how the run ends.
    fn begin_anew(mut self, plan: RunPlan, seed: u64, rng: &mut Rng) -> Self {
        let by = if self.plan.durability == Durability::None { 0 } else { rng.below(4) };
        if by == 0 {
            ok(self.late.engine.discard(Wait::forever()));
            self.catch_up();
            self.late.engine.close();
            ok(self.late.store().write_applied(&mut |_, _| true));
            ok(self.late.store().close(Wait::forever()));
        }
        if by == 3 {
            // Closes the store without writing the deferred updates.
            ok(self.late.engine.discard(Wait::forever()));
            self.late.engine.close();
            ok(self.late.store().write_applied(&mut |_, _| true));
            ok(self.late.store().close(Wait::forever()));
        }
        let disk = self.late.killed();
        let disk = if by == 1 { disk.after_power_loss(seed) } else { disk };
        self.late = Life::opened(disk, &plan);
        assert!(self.late.contents() == self.wanted, "ended by {by}: {:?}", self.plan);
        for record in ALL {
            ok(self.eager.engine.drop_spilled(record, Wait::forever()));
        }
        (self.plan, self.behind) = (plan, BTreeSet::new());
        self.note("killed");
        self
    }
}

/// Returns values with which a record is filled. The values depend on `seed`.
pub(crate) fn filling(record: usize, seed: u64) -> Vec<u8> {
    let described = &kinds().records[record];
    let element = size(described.dtype.bytes());
    let pattern = if element == 4 { 0.25_f32.to_le_bytes().to_vec() } else { vec![0x10, 0x3d] };
    let scale = u8::try_from(seed % 4).unwrap_or(0);
    let mut all = pattern.repeat(size(described.elements()));
    all.iter_mut().step_by(element).for_each(|byte| *byte ^= scale);
    all
}

#[test]
fn random_runs_with_deferred_updates_have_the_bits_of_an_eager_run() {
    let mut seen = [0; SEEN.len()];
    for seed in 0..many(100, 4) {
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

/// Makes one step with fetches, gradients, sums of gradients and perhaps a discard. `number` determines the actions.
/// With `at_once`, no update is deferred.
pub(crate) fn some_step(engine: &Engine, number: u64, at_once: bool) -> memascend_engine::Result<()> {
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
                engine.update(record, GradientSource::Spilled(factors.to_vec()), None, numbers, Wait::forever())?;
            }
        }
        if turn == 0 && number.is_multiple_of(4) {
            engine.finish(Wait::forever())?;
            engine.discard(Wait::forever())?;
        }
    }
    engine.commit(Commit { step: number, ..Commit::default() }, Wait::forever()).map(drop)
}

/// Makes `steps` steps without deferred updates. Returns the contents before the first step and after each step.
pub(crate) fn steps(steps: u64) -> Vec<Contents> {
    let eager = Life::new(&RunPlan::streamed());
    let mut left = vec![eager.contents()];
    for number in 1..=steps {
        ok(some_step(&eager.engine, number, true));
        left.push(eager.contents());
    }
    left
}

#[test]
fn power_loss_with_deferred_updates_leaves_a_complete_step() {
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
                // The store is at the last step whose commit returned, or at the next step, if the run died after the
                // write of this step's commit.
                let mut at = (0..=STEPS).filter(|&number| wanted[size(number)] == contents);
                assert!(at.any(|number| number == said || number == said + 1), "point {point}: {said}");
                ok(found.store().verify(&mut |_, _| true));
                // Makes the last step from the recovered state, to check that a run can continue.
                if said == STEPS - 1 && found.store().info().step == said {
                    ok(some_step(&found.engine, STEPS, false));
                    assert!(
                        found.contents() == wanted[size(STEPS)],
                        "point {point}: the run continues with wrong values"
                    );
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
