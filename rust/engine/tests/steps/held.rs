//! Tests updates of held entries: the bits of streamed ones through random lives, nothing half-way, nothing read or written.

use std::{
    slice,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use memascend_engine::{Application, By, Cause, Chunk, Engine, Function, Gradient, Late, Options};
use memascend_mem::{Pin, Wait};
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{Buffer, Commit, Create, Description, Dtype, Durability, Format, Store};

use crate::setup::{self, Contents, MOMENTS, adam, contents, first, ok, parameter, volume};

const NUMEL: u64 = 5000;
const NAMES: [&str; 4] = ["one", "two", "three", "four"];

fn description() -> Description {
    let entry = |name: &str| parameter(name, Dtype::F32, NUMEL, Format::Plain, &MOMENTS);
    setup::description(NAMES.map(entry).into(), 2)
}

fn bytes(value: f32) -> Vec<u8> {
    let values = (0..NUMEL).map(|index| value * (1.0 + f32::from(u16::try_from(index % 97).unwrap_or(0))));
    values.flat_map(f32::to_le_bytes).collect()
}

/// A run on a disk of its own, which holds some entries.
struct Life {
    disk: SimDisk,
    engine: Engine,
    durability: Durability,
}

fn how(durability: Durability) -> Create {
    let mut how = Create::default();
    how.durability = durability;
    how
}

impl Life {
    fn new(durability: Durability, held: &[usize]) -> Self {
        let disk = SimDisk::new(2 << 20);
        let store = ok(Store::create_on(
            volume(slice::from_ref(&disk), &Faults::default()),
            8192,
            description(),
            &how(durability),
        ));
        let life = Self { engine: engine(store, held), disk, durability };
        for entry in 0..NAMES.len() {
            ok(life.engine.fill(entry, first(bytes(0.5), 2, 0), Wait::forever()));
        }
        ok(life.engine.commit(Commit::default(), Wait::forever()));
        life
    }

    fn reopened(self, held: &[usize]) -> Self {
        let Self { disk, engine: old, durability } = self;
        old.close();
        ok(old.store().close(Wait::forever()));
        drop(old);
        let store = ok(Store::open_on(volume(slice::from_ref(&disk), &Faults::default()), 8192, &how(durability)));
        ok(store.verify(&mut |_, _| true));
        Self { engine: engine(store, held), disk, durability }
    }

    fn state(&self) -> Contents {
        contents(self.engine.store())
    }
}

fn engine(store: Store, held: &[usize]) -> Engine {
    ok(store.hold(held, Pin::Off, &mut || true));
    ok(store.refresh(held, &mut |_, _| true));
    let mut options = Options::default();
    (options.whole_bytes, options.whole_next_bytes) = (1 << 17, 1 << 17);
    options.threads = std::num::NonZeroUsize::new(3).unwrap_or(std::num::NonZeroUsize::MIN);
    ok(Engine::new(Arc::new(store), &options))
}

fn gradient(value: f32) -> Gradient {
    ok(Gradient::new(Box::new(bytes(value)), Dtype::F32))
}

/// What one step does, the same in each life.
fn step(life: &Life, step: u64, rng: &mut Rng) {
    let (engine, store) = (&life.engine, life.engine.store());
    let mut touched = Vec::new();
    for entry in 0..NAMES.len() {
        let count = ok(store.entry_state(entry)).step + 1;
        let value = 0.001 * (f32::from(u16::try_from(rng.below(200)).unwrap_or(0)) - 100.0);
        match rng.below(7) {
            // An idle one.
            0 => continue,
            1 | 2 => ok(engine.update(entry, By::Given(gradient(value)), None, adam(1e-2, count), Wait::forever())),
            choice @ (5 | 6) => {
                let late = if choice == 5 { Late::Always } else { Late::Rehearsed };
                ok(engine.apply(entry, halving(late, count, rng.below(2) == 0), None, Wait::forever()));
            }
            3 => {
                ok(engine.spill(entry, gradient(value), false, Wait::forever()));
                ok(engine.spill(entry, gradient(0.5), true, Wait::forever()));
                ok(engine.update(entry, By::Spilled(vec![0.3, 0.7]), None, adam(1e-2, count), Wait::forever()));
            }
            _ => {
                ok(engine.fill(entry, first(bytes(value), 2, count), Wait::forever()));
            }
        }
        touched.push(entry);
    }
    match rng.below(6) {
        0 => {
            // What is spilled by then stays.
            ok(engine.finish(Wait::forever()));
            ok(engine.discard(Wait::forever()));
        }
        1 => {
            ok(engine.finish(Wait::forever()));
            if let Some(&entry) = touched.first() {
                ok(engine.discard_entry(entry, Wait::forever()));
            }
            ok(engine.commit(Commit { step, ..Commit::default() }, Wait::forever()).map(drop));
        }
        _ => ok(engine.commit(Commit { step, ..Commit::default() }, Wait::forever()).map(drop)),
    }
}

/// Halves everything and counts its calls; fails in one of them.
struct Halving {
    calls: Arc<AtomicUsize>,
    fails_at: usize,
}

impl Function for Halving {
    fn call(&self, chunk: Chunk) -> Result<(), Cause> {
        if self.calls.fetch_add(1, Relaxed) + 1 == self.fails_at {
            return Err(Arc::new(std::io::Error::other("told to")));
        }
        for part in chunk.state.iter().chain([&chunk.values]) {
            // SAFETY: the chunk's memory is the call's.
            let bytes = unsafe { slice::from_raw_parts_mut(part.as_ptr().as_ptr(), part.len()) };
            for number in bytes.chunks_exact_mut(4) {
                let half = 0.5 * f32::from_le_bytes([number[0], number[1], number[2], number[3]]);
                number.copy_from_slice(&half.to_le_bytes());
            }
        }
        Ok(())
    }
}

/// A function, in chunks or whole.
fn halving(late: Late, step: u64, whole: bool) -> Application {
    counted(&Arc::default(), 0, late, step, whole)
}

fn counted(calls: &Arc<AtomicUsize>, fails_at: usize, late: Late, step: u64, whole: bool) -> Application {
    let function = Box::new(Halving { calls: Arc::clone(calls), fails_at });
    Application { function, nbytes: 0, step, spilled: false, whole, wide: false, late }
}

#[test]
fn a_rehearsal_that_fails_ends_its_step_alone_and_moves_nothing() {
    let life = Life::new(Durability::None, &ALL);
    updated(&life, 1);
    ok(life.engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever()));
    let (before, moved) = (life.state(), life.engine.store().volume().stats());
    for whole in [false, true] {
        // Three chunks: the second call fails, or the one of the second entry.
        let calls = Arc::new(AtomicUsize::new(0));
        for entry in [1, 2] {
            let fails_at = if whole { 2 } else { 5 };
            let apply = counted(&calls, fails_at, Late::Rehearsed, 2, whole);
            ok(life.engine.apply(entry, apply, None, Wait::forever()));
        }
        let failed = life.engine.commit(Commit { step: 2, ..Commit::default() }, Wait::forever());
        assert!(failed.is_err_and(|error| error.to_string().contains("told to")));
        ok(life.engine.discard(Wait::forever()));
        assert_eq!(life.state(), before);
    }
    let calls = Arc::new(AtomicUsize::new(0));
    ok(life.engine.apply(1, counted(&calls, 0, Late::Rehearsed, 2, true), None, Wait::forever()));
    // Whoever asks what it decided waits for the trial, and the commit does not begin another.
    ok(life.engine.finish(Wait::forever()));
    assert_eq!(calls.load(Relaxed), 1);
    assert_eq!(life.state(), before);
    // Others do not agree: it is as if there had been none.
    assert!(
        life.engine.commit_agreed(Commit { step: 2, ..Commit::default() }, Wait::forever(), &mut || false).is_err()
    );
    assert_eq!(life.state(), before);
    ok(life.engine.commit(Commit { step: 2, ..Commit::default() }, Wait::forever()));
    assert_eq!(calls.load(Relaxed), 2);
    assert_eq!(ok(life.engine.store().entry_state(1)).step, 2);
    assert_ne!(life.state()[1], before[1]);
    let after = life.engine.store().volume().stats();
    assert_eq!((after.read.bytes, after.written.bytes), (moved.read.bytes, moved.written.bytes));
}

#[test]
fn random_lives_with_what_is_held_have_the_bits_of_streamed_ones() {
    for seed in 0..6 {
        for durability in [Durability::Step, Durability::None] {
            let mut choice = Rng::new(seed);
            let chosen = |rng: &mut Rng| (0..NAMES.len()).filter(|_| rng.below(3) > 0).collect::<Vec<usize>>();
            let mut lives = [Life::new(durability, &[]), Life::new(durability, &chosen(&mut choice))];
            for number in 1..9 {
                for life in &lives {
                    step(life, number, &mut Rng::new(seed * 100 + number));
                }
                if choice.below(4) == 0 {
                    let [streamed, held] = lives;
                    lives = [streamed.reopened(&[]), held.reopened(&chosen(&mut choice))];
                }
                let [streamed, held] = &lives;
                assert_eq!(streamed.state(), held.state(), "seed {seed}, {durability:?}, step {number}");
                for entry in 0..NAMES.len() {
                    let spilled = |life: &Life| life.engine.spilled(entry, Wait::forever()).ok();
                    assert_eq!(spilled(streamed), spilled(held), "seed {seed}, step {number}");
                }
            }
        }
    }
}

const ALL: [usize; 4] = [0, 1, 2, 3];

fn updated(life: &Life, count: u64) {
    for entry in ALL {
        ok(life.engine.update(entry, By::Given(gradient(0.1)), None, adam(1e-2, count), Wait::forever()));
    }
}

#[test]
fn a_step_of_what_is_all_held_reads_nothing_and_writes_only_what_is_durable() {
    for (durability, writes) in [(Durability::Step, true), (Durability::None, false)] {
        let life = Life::new(durability, &ALL);
        updated(&life, 1);
        ok(life.engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever()));
        let before = life.engine.store().volume().stats();
        updated(&life, 2);
        assert_eq!(life.engine.counters().waiting, 4 * NUMEL * 4, "gradients wait");
        ok(life.engine.commit(Commit { step: 2, ..Commit::default() }, Wait::forever()));
        let after = life.engine.store().volume().stats();
        assert_eq!(after.read.bytes, before.read.bytes, "{durability:?}");
        assert_eq!(after.written.bytes > before.written.bytes, writes, "{durability:?}");
        assert_eq!(life.engine.counters().waiting, 0);
    }
}

/// Writes to the first values of a unit where they are held.
fn scribble(store: &Store) {
    let memory = store.held_unit(0).unwrap_or_else(|| panic!("all of it is held"));
    // SAFETY: nothing computes with it now.
    unsafe { memory.as_ptr().as_ptr().write(0xAB) };
}

#[test]
fn values_that_somebody_wrote_to_are_refused_before_the_commit_and_read_again_where_they_are() {
    for durability in [Durability::Step, Durability::None] {
        let life = Life::new(durability, &ALL);
        let store = life.engine.store();
        let before = life.state();
        updated(&life, 1);
        scribble(store);
        let refused = life.engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever());
        assert!(refused.is_err_and(|error| error.to_string().contains("written to in place")), "{durability:?}");
        ok(life.engine.discard(Wait::forever()));
        // Nothing was applied in memory alone yet, so that storage has it.
        assert_eq!(life.state(), before);
        updated(&life, 1);
        ok(life.engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever()));
        let newest = life.state();
        scribble(store);
        updated(&life, 2);
        assert!(life.engine.commit(Commit { step: 2, ..Commit::default() }, Wait::forever()).is_err());
        ok(life.engine.discard(Wait::forever()));
        if durability == Durability::Step {
            assert_eq!(life.state(), newest);
        } else {
            let lost = store.read_entry(0, &mut [&mut bytes(0.0), &mut bytes(0.0), &mut bytes(0.0)]);
            assert!(lost.is_err_and(|error| error.to_string().contains("no other copy")));
        }
    }
}

#[test]
fn an_update_waits_for_reads_of_what_it_changes() {
    let life = Life::new(Durability::None, &ALL);
    updated(&life, 1);
    ok(life.engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever()));
    let store = life.engine.store();
    let parts = ok(store.parts(0, 1 << 20));
    updated(&life, 2);
    let patience = Wait::at_most(std::time::Duration::from_millis(50));
    assert!(life.engine.commit(Commit { step: 2, ..Commit::default() }, patience).is_err(), "a unit is being read");
    drop(parts);
    ok(life.engine.commit(Commit { step: 2, ..Commit::default() }, Wait::forever()));
    assert_eq!(ok(store.entry_state(0)).step, 2);
}
