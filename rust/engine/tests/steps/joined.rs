//! Tests runs that hold entries and keep a log: the bits of streamed ones through random lives, crashes and replays.

use std::{num::NonZeroUsize, slice, sync::Arc};

use memascend_engine::{By, Engine, Gradient, Hyperparameters, Momentum, Options, Rule};
use memascend_mem::{Pin, Wait};
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{COMPACT, Commit, Create, Description, Dtype, Durability, Entry, Format, Store};

use crate::setup::{self, Contents, MASTER_AND_MOMENTS, MOMENTS, adam, contents, first, ok, parameter, volume};

const COUNT: usize = 10;
const ALL: [usize; COUNT] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
/// Those of SGD, and of these those that have a momentum.
const SGD: [usize; 4] = [4, 7, 8, 9];
const MOMENTUM: [usize; 2] = [4, 7];

/// Each kind of master and of moments that has a kernel; several chunks, one and none.
fn description() -> Description {
    let entry = |(name, dtype, numel, format): (&str, Dtype, u64, Format)| match (format, dtype) {
        _ if name == "SGD" => parameter(name, dtype, numel, format, &[("momentum_buffer", Dtype::F32)]),
        _ if name == "no state" => parameter(name, dtype, numel, format, &[]),
        _ if name == "a master" => parameter(name, dtype, numel, format, &MASTER_AND_MOMENTS[..1]),
        (Format::Plain, Dtype::F32) => parameter(name, dtype, numel, format, &MOMENTS),
        (Format::Plain, _) => parameter(name, dtype, numel, format, &MASTER_AND_MOMENTS),
        (Format::Compact, _) => parameter(name, dtype, numel, format, &COMPACT),
        _ => {
            let entry = parameter(name, dtype, numel, format, &[]);
            Entry { state: ok(entry.state_in(format, name == "momentum")), ..entry }
        }
    };
    let entries = [
        ("float32", Dtype::F32, 5000, Format::Plain),
        ("compact", Dtype::Bf16, 6151, Format::Compact),
        ("float16", Dtype::F16, 2049, Format::Plain),
        ("8 bits", Dtype::Bf16, 4500, Format::CompactEightBit),
        ("momentum", Dtype::Bf16, 2100, Format::CompactEightBit),
        ("by chance", Dtype::Bf16, 13, Format::StochasticBf16),
        ("nothing", Dtype::Bf16, 0, Format::Compact),
        ("SGD", Dtype::F32, 4100, Format::Plain),
        ("no state", Dtype::F32, 2100, Format::Plain),
        ("a master", Dtype::F16, 13, Format::Plain),
    ];
    setup::description(entries.map(entry).into(), 3)
}

/// Numbers around one, of a dtype.
fn numbers(seed: u64, dtype: Dtype, count: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut one = || {
        let drawn = u16::try_from(rng.below(65_536)).unwrap_or(0);
        match dtype {
            Dtype::F32 => (f32::from(drawn) / 32_768.0 - 1.0).to_le_bytes().to_vec(),
            Dtype::F16 => (drawn & 0x83ff | 0x3c00).to_le_bytes().to_vec(),
            _ => (drawn & 0x807f | 0x3f00).to_le_bytes().to_vec(),
        }
    };
    (0..count).flat_map(|_| one()).collect()
}

fn values(entry: usize, seed: u64) -> Vec<u8> {
    let described = &description().entries[entry];
    numbers(seed << 8 | entry as u64, described.dtype, described.elements())
}

/// What a run is begun with.
#[derive(Debug, Clone)]
struct Way {
    durability: Durability,
    held: Vec<usize>,
    log_steps: u32,
}

struct Life {
    disk: SimDisk,
    engine: Engine,
}

fn begun(store: Store, way: &Way) -> memascend_engine::Result<Engine> {
    let mut options = Options::default();
    options.threads = NonZeroUsize::new(2).unwrap_or(NonZeroUsize::MIN);
    let store = Arc::new(store);
    store.hold(&way.held, Pin::Off, &mut || true)?;
    let engine = Engine::new(Arc::clone(&store), &options)?;
    engine.replay(&mut |_, _| true)?;
    store.refresh(&way.held, &mut |_, _| true)?;
    if way.durability != Durability::None && way.log_steps > 0 {
        let entries: Vec<_> = way.held.iter().map(|&entry| (entry, description().entries[entry].dtype)).collect();
        assert_eq!(store.keep_log(&entries, way.log_steps)?, way.log_steps);
    }
    Ok(engine)
}

fn how(durability: Durability) -> Create {
    let mut how = Create::default();
    (how.durability, how.uuid, how.boot) = (durability, Some([7; 16]), Some([3; 16]));
    how
}

impl Life {
    fn new(way: &Way) -> Self {
        let disk = SimDisk::new(4 << 20);
        let store = ok(Store::create_on(
            volume(slice::from_ref(&disk), &Faults::default()),
            8192,
            description(),
            &how(way.durability),
        ));
        let engine = ok(begun(store, &Way { log_steps: 0, ..way.clone() }));
        for entry in ALL {
            let first = first(values(entry, 0), description().entries[entry].state.len(), 0);
            ok(engine.fill(entry, first, Wait::forever()));
        }
        ok(engine.commit(Commit::default(), Wait::forever()));
        drop(engine);
        Self::opened(disk, way)
    }

    fn opened(disk: SimDisk, way: &Way) -> Self {
        let store = ok(Store::open_on(volume(slice::from_ref(&disk), &Faults::default()), 8192, &how(way.durability)));
        Self { engine: ok(begun(store, way)), disk }
    }

    /// Ends it: closed, or as a kill leaves it, or a loss of power.
    fn ended(self, way: &Way, by: usize, seed: u64) -> SimDisk {
        let Self { disk, engine } = self;
        for entry in 0..3 {
            // What nobody committed is no part of it.
            let count = ok(engine.store().entry_state(entry)).step + 1;
            let gradient = ok(Gradient::new(Box::new(values(entry, seed)), description().entries[entry].dtype));
            ok(engine.update(entry, By::Given(gradient), None, rule(entry, count), Wait::forever()));
        }
        engine.close();
        let store = Arc::clone(engine.store());
        drop(engine);
        match by {
            0 => {
                ok(store.write_applied(&mut |_, _| true));
                ok(store.close(Wait::forever()));
                assert_eq!(store.log_state().steps, 0, "a store that was closed has no log");
                drop(store);
                disk
            }
            1 => {
                // Interrupted: what is there is whole, with the log.
                let mut calls = 0;
                let ended = store.write_applied(&mut |_, _| {
                    calls += 1;
                    calls < 2
                });
                assert!(ended.is_err() || calls < 2);
                ok(store.close(Wait::forever()));
                drop(store);
                disk
            }
            _ if way.durability == Durability::Step => disk.after_power_loss(seed),
            _ => {
                // Killed: what was written is there.
                drop(store);
                disk
            }
        }
    }

    fn contents(&self) -> Contents {
        contents(self.engine.store())
    }
}

fn rule(entry: usize, step: u64) -> Rule {
    let (lr, grad_scale, seed) = (1e-2 / f64::from(u32::try_from(step).unwrap_or(1)), 0.25, 11);
    if SGD.contains(&entry) {
        return Momentum {
            lr,
            momentum: if MOMENTUM.contains(&entry) { 0.9 } else { 0.0 },
            dampening: 0.1,
            weight_decay: 0.1,
            nesterov: false,
            step,
            grad_scale,
            maximize: false,
            seed,
        }
        .into();
    }
    Hyperparameters { seed, ..adam(lr, step) }.into()
}

/// What one step does, the same in each life; whether it was committed.
fn step(engine: &Engine, number: u64) -> memascend_engine::Result<bool> {
    let (store, mut rng) = (engine.store(), Rng::new(number << 16));
    for entry in ALL {
        let described = &description().entries[entry];
        let count = store.entry_state(entry)?.step + 1;
        let gradient = |seed: u64| Gradient::new(Box::new(values(entry, number * 2 + seed)), described.dtype);
        match rng.below(8) {
            // An idle one.
            0 => {}
            1..=4 => engine.update(entry, By::Given(gradient(0)?), None, rule(entry, count), Wait::forever())?,
            5 => {
                // It is dropped, and comes anew, or not.
                engine.update(entry, By::Given(gradient(1)?), None, rule(entry, count), Wait::forever())?;
                engine.discard_entry(entry, Wait::forever())?;
                if rng.below(2) == 0 {
                    engine.update(entry, By::Given(gradient(0)?), None, rule(entry, count), Wait::forever())?;
                }
            }
            6 => {
                engine.spill(entry, gradient(0)?, false, Wait::forever())?;
                engine.spill(entry, gradient(1)?, true, Wait::forever())?;
                engine.update(entry, By::Spilled(vec![0.3, 0.7]), None, rule(entry, count), Wait::forever())?;
            }
            _ => {
                // As a load does.
                engine.fill(entry, first(values(entry, number), described.state.len(), count), Wait::forever())?;
            }
        }
    }
    if rng.below(6) == 0 {
        engine.discard(Wait::forever())?;
        return Ok(false);
    }
    engine.commit(Commit { step: number, ..Commit::default() }, Wait::forever())?;
    Ok(true)
}

#[test]
fn random_lives_have_the_bits_of_a_streamed_one_however_they_end() {
    const STEPS: u64 = 26;
    let streamed = Life::new(&Way { durability: Durability::Step, held: vec![], log_steps: 0 });
    let mut left = vec![streamed.contents()];
    for number in 1..=STEPS {
        ok(step(&streamed.engine, number));
        left.push(streamed.contents());
    }
    let (mut logged, mut ends) = (0, [0; 4]);
    for seed in 0..8 {
        let mut rng = Rng::new(seed);
        let mut way = || Way {
            durability: if rng.below(2) == 0 { Durability::Step } else { Durability::Close },
            held: ALL.into_iter().filter(|_| rng.below(4) > 0).collect(),
            log_steps: u32::try_from(rng.below(5)).unwrap_or(0),
        };
        let mut now = way();
        let mut life = Life::new(&now);
        let mut chance = Rng::new(1000 + seed);
        for number in 1..=STEPS {
            ok(step(&life.engine, number));
            let place = format!("seed {seed}, step {number}, {now:?}");
            assert!(life.contents() == left[usize::try_from(number).unwrap_or(0)], "{place}");
            let state = life.engine.store().log_state();
            assert!(state.steps <= u64::from(now.log_steps), "{place}: {state:?}");
            logged += state.steps;
            if chance.below(4) == 0 {
                let by = chance.below(4);
                ends[by] += 1;
                let disk = life.ended(&now, by, seed << 8 | number);
                now = way();
                // Somebody only looks.
                let looked = ok(Store::open_on(
                    volume(slice::from_ref(&disk), &Faults::default()),
                    8192,
                    &how(Durability::Step),
                ));
                memascend_engine::apply_logs(&looked);
                ok(looked.verify(&mut |_, _| true));
                assert!(
                    contents(&looked) == left[usize::try_from(number).unwrap_or(0)],
                    "{place}, looked at after {by}"
                );
                drop(looked);
                life = Life::opened(disk, &now);
                assert!(life.contents() == left[usize::try_from(number).unwrap_or(0)], "{place}, ended by {by}");
            }
        }
    }
    assert!(logged > 100 && ends.iter().all(|&count| count > 3), "{logged} {ends:?}");
}

#[test]
fn power_that_fails_at_any_request_leaves_a_whole_step() {
    const STEPS: u64 = 8;
    let way = Way { durability: Durability::Step, held: ALL.to_vec(), log_steps: 3 };
    let first = Life::new(&way);
    let mut left = vec![first.contents()];
    let begin = first.ended(&way, 2, 1);
    let calm = Life::opened(begin.after_power_loss(0), &way);
    for number in 1..=STEPS {
        ok(step(&calm.engine, number));
        left.push(calm.contents());
    }
    let mut died = 0;
    for point in (0..).step_by(23) {
        let disk = begin.after_power_loss(0);
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        let lived = (|| {
            let store = Store::open_on(volume(slice::from_ref(&disk), &faults), 8192, &how(way.durability)).ok()?;
            let engine = begun(store, &way).ok()?;
            (1..=STEPS).find(|&number| step(&engine, number).is_err()).map_or(Some(STEPS), |failed| Some(failed - 1))
        })();
        let found = Life::opened(disk.after_power_loss(point), &way);
        let contents = found.contents();
        let said = lived.unwrap_or(0);
        // What was said to be committed is there, or the commit whose answer never came.
        let at = (0..=STEPS).filter(|&number| left[usize::try_from(number).unwrap_or(0)] == contents);
        assert!(at.into_iter().any(|number| number == said || number == said + 1), "point {point}: {said}");
        ok(found.engine.store().verify(&mut |_, _| true));
        if lived == Some(STEPS) {
            break;
        }
        died += 1;
    }
    assert!(died > 10, "{died}");
}

#[test]
fn values_that_somebody_wrote_to_are_put_together_anew_from_slot_and_log() {
    let way = Way { durability: Durability::Step, held: ALL.to_vec(), log_steps: 4 };
    let life = Life::new(&way);
    for number in 1..=6 {
        ok(step(&life.engine, number));
    }
    let (store, before) = (life.engine.store(), life.contents());
    assert!(store.log_state().entries > 3);
    for unit in 0..2 {
        let memory = store.held_unit(unit).unwrap_or_else(|| panic!("all of it is held"));
        // SAFETY: nothing computes with it now.
        unsafe { memory.as_ptr().as_ptr().write(0xAB) };
    }
    for entry in ALL {
        store.spoil(entry);
    }
    ok(store.refresh(&ALL, &mut |_, _| true));
    assert!(life.contents() == before);
    ok(step(&life.engine, 7));
    let other = Life::opened(life.ended(&way, 2, 5), &way);
    assert_eq!(other.engine.store().log_state().steps, 0);
}

#[test]
fn what_is_written_each_step_is_the_gradient_and_a_part_of_the_rest() {
    let way = Way { durability: Durability::Step, held: ALL.to_vec(), log_steps: 4 };
    let life = Life::new(&way);
    let (store, engine) = (life.engine.store(), &life.engine);
    let mut written = Vec::new();
    for number in 1..=16 {
        let before = store.volume().stats().written.bytes;
        for entry in ALL {
            let described = &description().entries[entry];
            let gradient = ok(Gradient::new(Box::new(values(entry, number)), described.dtype));
            ok(engine.update(entry, By::Given(gradient), None, rule(entry, number), Wait::forever()));
        }
        let reads = store.volume().stats().read.bytes;
        ok(engine.commit(Commit { step: number, ..Commit::default() }, Wait::forever()));
        assert_eq!(store.volume().stats().read.bytes, reads, "nothing is read");
        written.push(store.volume().stats().written.bytes - before);
    }
    let whole: u64 =
        ALL.iter().map(|&entry| store.layout().held_bytes(store.description(), entry)).map(|(v, s)| v + s).sum();
    let gradients: u64 =
        ALL.iter().map(|&entry| ok(store.gradient_bytes(entry, description().entries[entry].dtype))).sum();
    let later: u64 = written[4..].iter().sum();
    // Beside them a head, pages of the table and a root.
    let expected = 12 * gradients + 3 * whole;
    assert!(later >= expected && later < expected + 12 * 9 * 4096, "{later} {expected} {written:?}");
}
