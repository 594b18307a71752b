//! Tests runs of every durability that are killed or lose power at any point, one after the other on the same devices.
//!
//! Opening yields a commit of which every byte is right, or refuses by name. It never yields a store whose reads fail
//! later.

mod toy;

use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, Rng, SimDisk},
};
use memascend_store::{Create, Durability, Error, Store};

/// Steps of a run that is not cut short.
const STEPS: u64 = 4;

/// What is known of the devices.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// No loss takes this step away, nor what came after it from a run that promised more.
    durable: Option<u64>,
    /// The last step that was committed, and the last whose commit had begun.
    committed: Option<u64>,
    tried: Option<u64>,
    /// Whether a run that does not promise to survive a loss of power has begun to commit.
    risked: bool,
    /// Whether a run that keeps nothing before it is closed has.
    unclosed: bool,
    boot: u8,
}

/// How a run ends that nothing cuts short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Closed,
    Killed,
}

fn how(durability: Durability, boot: u8) -> Create {
    let mut how = toy::how();
    how.durability = durability;
    how.boot = Some([boot + 1; 16]);
    how
}

impl Known {
    fn settled(&mut self, step: u64) {
        (self.durable, self.committed, self.tried) = (Some(step), Some(step), Some(step));
        (self.risked, self.unclosed) = (false, false);
    }

    /// One run: opened or made, some steps, some of them discarded first, closed or not.
    fn live(&mut self, disks: &[SimDisk], faults: &Faults, durability: Durability, steps: u64, end: End) -> u64 {
        let how = how(durability, self.boot);
        let volume = toy::volume(disks, faults);
        let store = match self.committed {
            None => Store::create_on(volume, toy::STRIPE, toy::description(), &how),
            Some(_) => Store::open_on(volume, toy::STRIPE, &how),
        };
        let Ok(store) = store else { return 0 };
        if self.committed.is_some() {
            // What opening found is there for good.
            self.settled(store.info().step);
        }
        drop(self.train(&store, durability, steps, end));
        let stats = store.volume().stats();
        stats.written.requests + stats.read.requests + stats.flushes * disks.len() as u64
    }

    fn train(&mut self, store: &Store, durability: Durability, steps: u64, end: End) -> Result<(), Error> {
        let from = self.committed.map_or(0, |step| step + 1);
        for step in from..from + steps {
            if step > 0 && step % 3 == 2 {
                toy::abandoned(store, step)?;
            }
            self.tried = Some(step);
            // The first commit of all makes a store, whatever its durability.
            self.risked |= durability != Durability::Step && step > 0;
            self.unclosed |= durability == Durability::None && step > 0;
            toy::step(store, step)?;
            self.committed = Some(step);
            if durability == Durability::Step || step == 0 {
                self.durable = Some(step);
            }
        }
        if end == End::Closed {
            store.close(Wait::forever())?;
            if let Some(step) = self.committed {
                self.settled(step);
            }
        }
        Ok(())
    }

    /// Opens what a kill, or a loss of power, left.
    fn opened(&mut self, disks: &[SimDisk], lost_power: bool, name: &str) -> bool {
        self.boot += u8::from(lost_power);
        let name = format!("{name}: {self:?}, lost power {lost_power}");
        match toy::open(disks, &how(Durability::Step, self.boot)) {
            Ok(store) => {
                let step = toy::check(&store, &name);
                let least = if lost_power || self.unclosed { self.durable } else { self.committed };
                assert!(Some(step) >= least && Some(step) <= self.tried, "{name}: step {step}");
                self.settled(step);
                true
            }
            Err(error) => {
                let allowed = self.durable.is_none() || self.unclosed || self.risked && lost_power;
                assert!(allowed, "{name}: {error}");
                assert!(
                    matches!(error, Error::Refused { .. } | Error::Unfilled { .. } | Error::Corrupt { .. }),
                    "{name}: {error}"
                );
                false
            }
        }
    }
}

/// Runs on the same devices, each with how it ends; power stays.
type Story = &'static [(Durability, u64, End)];

const STORIES: [Story; 7] = [
    &[(Durability::Close, STEPS, End::Closed)],
    &[(Durability::Close, STEPS, End::Killed), (Durability::Close, STEPS, End::Killed)],
    &[(Durability::Step, 2, End::Closed), (Durability::Close, STEPS, End::Killed)],
    &[(Durability::Close, 3, End::Killed), (Durability::Step, STEPS, End::Killed)],
    &[(Durability::Step, 2, End::Killed), (Durability::None, STEPS, End::Closed), (Durability::Close, 3, End::Killed)],
    &[(Durability::Close, 3, End::Killed), (Durability::Close, 0, End::Closed), (Durability::Step, 1, End::Killed)],
    &[(Durability::Close, 3, End::Killed), (Durability::None, STEPS, End::Killed)],
];

/// All runs of a story but the last as they are, the last until its request number `point`.
fn told(story: Story, disks: &[SimDisk], point: Option<u64>) -> (Known, u64) {
    let mut known = Known::default();
    let mut requests = 0;
    for (index, &(durability, steps, end)) in story.iter().enumerate() {
        let dies_after = point.filter(|_| index + 1 == story.len());
        let faults = Faults { dies_after, ..Faults::default() };
        requests = known.live(disks, &faults, durability, steps, end);
    }
    (known, requests)
}

#[test]
fn power_is_lost_at_every_point() {
    for (number, story) in STORIES.into_iter().enumerate() {
        let count = 1 + number % 2;
        let (_, points) = told(story, &toy::disks(count), None);
        assert!(points > 20, "story {number}: {points}");
        // After every change every other point, which ones is for the number of the story to say.
        let stride = toy::many(1, 2);
        toy::side_by_side(0..points / stride + 1, |turn| {
            let point = turn * stride + number as u64 % stride;
            let disks = toy::disks(count);
            let (known, _) = told(story, &disks, Some(point));
            for loss in 0..toy::many(8, 2) {
                let left: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
                known.clone().opened(&left, true, &format!("story {number}, point {point}, loss {loss}"));
            }
            known.clone().opened(&disks, false, &format!("story {number}, point {point}, killed"));
        });
    }
}

/// Errors, retries, short transfers, reordering, kills and losses of power, again and again on the same devices.
fn life(seed: u64) {
    let mut rng = Rng::new(seed);
    let count = 1 + rng.below(2);
    let mut disks = toy::disks(count);
    let mut known = Known::default();
    for epoch in 0..6 {
        let faults = Faults {
            seed: rng.bits(),
            short: 30,
            temporary: 30,
            errors: vec![(Action::Write, libc::EIO, 3), (Action::Flush, libc::EIO, 20)],
            reorder: true,
            dies_after: rng.chance(600).then(|| 40 + rng.below(300) as u64),
            ..Faults::default()
        };
        let durability = [Durability::Close, Durability::Close, Durability::Step, Durability::None][rng.below(4)];
        let end = if rng.chance(500) { End::Closed } else { End::Killed };
        known.live(&disks, &faults, durability, rng.below(6) as u64, end);
        let lost_power = rng.chance(600);
        if lost_power {
            let loss = rng.bits();
            disks = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
        }
        if known.tried.is_none() || !known.opened(&disks, lost_power, &format!("seed {seed}, epoch {epoch}")) {
            (disks, known) = (toy::disks(count), Known { boot: known.boot, ..Known::default() });
        }
    }
}

#[test]
fn random_lives() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("MEMASCEND_SEED") {
        return life(seed);
    }
    toy::side_by_side(0..number("MEMASCEND_SEEDS").unwrap_or(toy::many(400, 60)), |seed| {
        let lived = std::panic::catch_unwind(|| life(seed));
        assert!(lived.is_ok(), "run it again with MEMASCEND_SEED={seed}");
    });
}

#[test]
fn without_a_boot_nothing_counts_as_flushed() {
    // The process was killed and the machine stayed up, as far as anybody could tell.
    for (boot, whole) in [([7; 16], true), ([0; 16], false)] {
        let mut how = toy::how();
        how.durability = Durability::Close;
        how.boot = Some(boot);
        let disks = toy::disks(1);
        let volume = toy::volume(&disks, &Faults::default());
        let store = Store::create_on(volume, toy::STRIPE, toy::description(), &how);
        let store = store.unwrap_or_else(|error| panic!("{error}"));
        (0..=2).for_each(|step| toy::step(&store, step).unwrap_or_else(|error| panic!("{error}")));
        let live = usize::from(store.entry_state(0).map_or(0, |state| state.slot));
        let piece = store.layout().piece(store.description(), 0, 0);
        let offset = usize::try_from(store.layout().offset_in(&piece, live)).unwrap_or(0);
        drop(store);
        toy::check(&toy::open(&disks, &how).unwrap_or_else(|error| panic!("{error}")), "whole");
        disks[0].flip(offset, 1);
        let opened = toy::open(&disks, &how).map(drop);
        assert_eq!(opened.is_ok(), whole, "{opened:?}");
    }
}
