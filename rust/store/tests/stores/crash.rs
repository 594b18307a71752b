//! Tests kills and losses of power, at regular points of short runs and at random points of long runs.
//!
//! The next opening must find the last durable commit or a later commit, and never a mixture of two commits. If no
//! commit is durable, or a run with durability "none" was not closed, the opening may also fail with an error that
//! names the reason.

use crate::model::{self, COMMITS, EIO, LOGGED, STRIPE, check, commit, copies, many, ok, side_by_side};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, Rng, SimDisk},
};
use memascend_store::{Durability, Error, Existing, Store};

/// How a run ends if no fault ends it earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Closed,
    Killed,
}

/// One run on some devices.
#[derive(Debug, Clone, Copy)]
struct Run {
    durability: Durability,
    commits: u64,
    /// The number of steps for which the log has space. With 0 there is no log.
    log: u32,
    /// If true, the run first replays the log of the previous run, if there is one.
    settles: bool,
    end: End,
}

/// Returns a run whose steps are durable.
const fn durable(commits: u64, log: u32, end: End) -> Run {
    Run { durability: Durability::Step, commits, log, settles: false, end }
}

/// Returns a run with durability "none".
const fn in_memory(commits: u64, end: End) -> Run {
    Run { durability: Durability::None, commits, log: 0, settles: true, end }
}

/// A run that replays the log and commits no step.
const SETTLING: Run = Run { settles: true, ..durable(0, 0, End::Closed) };

/// The commits that the devices may have.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// The last durable commit. An opening must find this commit or a later commit.
    durable: Option<u64>,
    /// The last commit that succeeded.
    committed: Option<u64>,
    /// The last commit that was begun.
    tried: Option<u64>,
    /// True if a run with durability "none" has begun a commit other than the store's first, and was not closed.
    unclosed: bool,
}

impl Known {
    fn settled(commit: u64) -> Self {
        Self { durable: Some(commit), committed: Some(commit), tried: Some(commit), unclosed: false }
    }

    /// Carries out one run: opens or creates the store, and makes the commits. Before some commits, it makes and
    /// discards another step. Closes the store if `run.end` says so. Returns the number of requests that the devices
    /// got, or 0 if the store could not be opened or created.
    fn live(&mut self, disks: &[SimDisk], faults: &Faults, run: &Run) -> u64 {
        let mut how = model::how();
        how.durability = run.durability;
        let volume = model::volume(disks, faults);
        let store = match self.committed {
            None => Store::create_on(volume, STRIPE, model::description(), &how),
            Some(_) => Store::open_on(volume, STRIPE, &how),
        };
        let Ok(store) = store else { return 0 };
        drop(self.train(&store, run));
        let stats = store.volume().stats();
        stats.written.requests + stats.read.requests + stats.flushes * disks.len() as u64
    }

    fn train(&mut self, store: &Store, run: &Run) -> Result<(), Error> {
        if run.settles {
            model::settle(store)?;
        }
        let from = self.committed.map_or(0, |commit| commit + 1);
        if from > 0 && run.log > 0 {
            store.keep_log(&LOGGED, run.log)?;
        }
        // After `Error::Broken`, the store must be opened again. After any other error, discards the step. Tries at
        // most three times.
        for _ in 0..3 {
            match self.steps(store, run, from + run.commits) {
                Err(error) if matches!(error, Error::Broken(_)) => return Err(error),
                Err(_) => store.discard(Wait::forever())?,
                Ok(()) => break,
            }
        }
        if run.end == End::Closed {
            store.close(Wait::forever())?;
            *self = self.committed.map_or_else(Self::default, Self::settled);
        }
        Ok(())
    }

    fn steps(&mut self, store: &Store, run: &Run, to: u64) -> Result<(), Error> {
        for number in self.committed.map_or(0, |commit| commit + 1)..to.min(COMMITS) {
            if number > 0 && number % 3 == 2 {
                model::abandon(store, number)?;
            }
            self.tried = Some(number);
            // The first commit of a store is always durable. With durability "none", later commits are not durable
            // until the store is closed.
            self.unclosed |= run.durability == Durability::None && number > 0;
            commit(store, number)?;
            self.committed = Some(number);
            if run.durability == Durability::Step || number == 0 {
                self.durable = Some(number);
            }
            if number == 0 && run.log > 0 {
                store.keep_log(&LOGGED, run.log)?;
            }
        }
        Ok(())
    }

    /// Opens the store, and checks that the store's commit is one of the commits that the runs can have left. Returns
    /// `false` if the opening fails. The opening may only fail if no commit is durable, or if a run with durability
    /// "none" was not closed.
    fn opened(&mut self, disks: &[SimDisk], lost_power: bool, name: &str) -> bool {
        let name = format!("{name}: {self:?}, lost power {lost_power}");
        match model::open(disks, &model::how()) {
            Ok(store) => {
                let found = check(&store, &name);
                let least = if lost_power || self.unclosed { self.durable } else { self.committed };
                assert!(Some(found) >= least && Some(found) <= self.tried, "{name}: commit {found}");
                *self = Self::settled(found);
                true
            }
            Err(error) => {
                assert!(self.durable.is_none() || self.unclosed, "{name}: {error}");
                let named = matches!(error, Error::Refused { .. } | Error::Unfilled { .. } | Error::Corrupt { .. });
                assert!(named, "{name}: {error}");
                false
            }
        }
    }
}

/// Each story is a sequence of runs on the same devices. The test ends the last run early, by a fault.
const STORIES: [&[Run]; 8] = [
    &[durable(4, 0, End::Killed)],
    &[durable(4, 0, End::Closed)],
    &[durable(1, 0, End::Killed), durable(7, 2, End::Killed)],
    &[durable(7, 16, End::Killed), SETTLING],
    &[durable(4, 3, End::Killed), in_memory(3, End::Closed)],
    &[in_memory(4, End::Closed)],
    &[durable(3, 0, End::Closed), in_memory(4, End::Killed)],
    &[in_memory(3, End::Closed), in_memory(0, End::Closed), durable(2, 0, End::Killed)],
];

fn devices(story: &[Run], number: usize) -> Vec<SimDisk> {
    if story.iter().any(|run| run.log > 0) { model::large_disks(1) } else { model::disks(1 + number % 2) }
}

#[test]
fn run_killed_at_any_request_opens_at_a_committed_step() {
    for (number, story) in STORIES.into_iter().enumerate() {
        let (begun, last) = (devices(story, number), story[story.len() - 1]);
        let mut known = Known::default();
        for run in &story[..story.len() - 1] {
            known.live(&begun, &Faults::default(), run);
        }
        let mut uncut = known;
        let points = uncut.live(&copies(&begun), &Faults::default(), &last);
        assert!(points > 20, "story {number}: {points}");
        // Without `MEMASCEND_TEST_LONG`, tries every 17th point. The first point differs from story to story.
        let stride = many(1, 17);
        side_by_side(0..points / stride + 1, |turn| {
            let point = turn * stride + number as u64 % stride;
            let disks = copies(&begun);
            let mut known = known;
            known.live(&disks, &Faults { dies_after: Some(point), ..Faults::default() }, &last);
            for loss in 0..many(6, 2) {
                let left = model::after_loss(&disks, loss);
                let mut powerless = known;
                powerless.opened(&left, true, &format!("story {number}, point {point}, loss {loss}"));
            }
            let name = format!("story {number}, point {point}, killed");
            if known.opened(&disks, false, &name) {
                // Continues training from the commit that was found. This must work whatever was in flight.
                known.live(&disks, &Faults::default(), &Run { settles: true, ..durable(2, 1, End::Closed) });
                assert!(known.opened(&disks, false, &name), "{name}: closed");
            }
        });
    }
}

#[test]
fn non_durable_run_opens_after_close_and_is_rejected_after_a_kill() {
    for (end, whole) in [(End::Killed, false), (End::Closed, true)] {
        let (disks, mut known) = (model::disks(1), Known::default());
        known.live(&disks, &Faults::default(), &in_memory(5, end));
        let found = model::opened(&model::after_loss(&disks, 1), &model::how());
        let refused = found.as_ref().is_err_and(|why| why.contains("was not closed"));
        assert!(if whole { found == Ok(4) } else { refused }, "{found:?}");
    }
}

#[test]
fn settled_log_is_empty_and_needs_no_replay() {
    let (disks, mut known) = (model::large_disks(1), Known::default());
    known.live(&disks, &Faults::default(), &durable(7, 16, End::Killed));
    let store = ok(model::open(&disks, &model::how()));
    assert!(store.pending_replay().is_some());
    ok(model::settle(&store));
    assert_eq!((store.log_state().steps, store.pending_replay().is_none()), (0, true));
    ok(store.close(Wait::forever()));
    drop(store);
    let store = ok(model::open(&disks, &model::how()));
    assert_eq!((store.pending_replay().is_none(), check(&store, "settled")), (true, 6));
}

#[test]
fn previous_commit_opens_after_every_commit_with_a_log() {
    let (newest, before) = (model::how(), model::existing(Existing::Previous));
    for log in [1, 3] {
        let disks = model::large_disks(1);
        let store = model::trained(&disks, 0);
        ok(store.keep_log(&LOGGED, log));
        for number in 1..=24 {
            ok(commit(&store, number));
            let left = model::after_loss(&disks, 0);
            assert_eq!(model::opened(&left, &before), Ok(number - 1), "log of {log}");
            // `Existing::Previous` has made the previous commit the newest commit. Continues training from this commit.
            let other = ok(model::open(&left, &newest));
            assert_eq!(check(&other, "gone back"), number - 1);
            ok(other.keep_log(&LOGGED, log));
            ok(commit(&other, number));
            drop(other);
            assert_eq!(model::opened(&left, &newest), Ok(number), "log of {log}");
        }
    }
}

/// Carries out several runs one after another, with errors, retries, short transfers, reordering, kills and losses of
/// power.
fn life(seed: u64) {
    let mut rng = Rng::new(seed);
    let count = 1 + rng.below(2);
    let fresh = |rng: &mut Rng| if rng.chance(500) { model::disks(count) } else { model::large_disks(count) };
    let (mut disks, mut known) = (fresh(&mut rng), Known::default());
    for epoch in 0..6 {
        let faults = Faults {
            seed: rng.bits(),
            short: 30,
            temporary: 30,
            errors: vec![(Action::Write, EIO, 5), (Action::Flush, EIO, 15)],
            reorder: true,
            dies_after: rng.chance(650).then(|| 40 + rng.below(400) as u64),
            ..Faults::default()
        };
        let end = if rng.chance(400) { End::Closed } else { End::Killed };
        let run = if rng.chance(250) {
            in_memory(rng.below(6) as u64, end)
        } else {
            let settles = rng.chance(500);
            Run { settles, ..durable(rng.below(12) as u64, [0, 0, 1, 2, 3, 16][rng.below(6)], end) }
        };
        known.live(&disks, &faults, &run);
        let lost_power = rng.chance(650);
        if lost_power {
            disks = model::after_loss(&disks, rng.bits());
        }
        if known.tried.is_none() || !known.opened(&disks, lost_power, &format!("seed {seed}, epoch {epoch}, {run:?}")) {
            (disks, known) = (fresh(&mut rng), Known::default());
        }
    }
}

#[test]
fn random_lives_open_at_a_committed_step() {
    model::lives(many(1000, 24), life);
}
