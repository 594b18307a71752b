//! Tests the arena and the chunk ring against a simple model, with random plans, random orders and many threads.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use memascend_mem::{Arena, ChunkRing, Error, Layout, Lease, OnFork, Pin, Region, Wait};
use proptest::prelude::*;

type Outcome = Result<(), TestCaseError>;

fn region(bytes: usize) -> Region {
    Region::new(bytes, Pin::Off, OnFork::Copy, "test").unwrap_or_else(|error| panic!("{error}"))
}

/// A step of the caller: take a lease of a size, or return one of the leases that the caller holds.
#[derive(Debug, Clone)]
enum Step {
    Take(usize),
    Give(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1_usize..70_000).prop_map(Step::Take),
        2 => any::<prop::sample::Index>().prop_map(Step::Give),
    ];
    prop::collection::vec(step, 1..200)
}

fn plan() -> impl Strategy<Value = Vec<(usize, usize)>> {
    prop::collection::vec((1_usize..60_000, 1_usize..6), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(200), ..ProptestConfig::default() })]

    /// The arena must grant a lease if the smallest slot size that fits the lease has an unused slot, and only then. No
    /// two leases may share a byte. The bytes of a lease may change only through this lease. The counters of the arena
    /// must equal the counters of the model.
    #[test]
    fn random_leases_of_an_arena_match_the_model(plan in plan(), steps in steps()) {
        let layout = Layout::unbounded(&plan).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let region = region(layout.reserved_bytes());
        let arena = Arena::new(&region, &plan).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let owner = arena.owner("model").map_err(|error| TestCaseError::fail(error.to_string()))?;
        let mut free = BTreeMap::<usize, usize>::new();
        for (bytes, count) in plan {
            *free.entry(bytes).or_default() += count;
        }
        let mut held: Vec<(usize, u8, Lease)> = Vec::new();
        let (mut asked, mut peak) = (0, 0);
        for (mark, step) in (0_u8..=255).cycle().zip(steps) {
            match step {
                Step::Take(bytes) => {
                    let class = free.range_mut(bytes..).next();
                    match (arena.lease(bytes, owner, Wait::never()), class) {
                        (Ok(mut lease), Some((class, left))) => {
                            prop_assert!(*left > 0, "granted more leases than the plan has slots");
                            prop_assert_eq!(lease.slot_bytes(), *class);
                            prop_assert_eq!(lease.len(), bytes);
                            *left -= 1;
                            lease.as_mut_slice().fill(mark);
                            held.push((*class, mark, lease));
                            asked += bytes;
                            peak = peak.max(asked);
                        }
                        (Err(Error::TimedOut { holders, .. }), Some((_, left))) => {
                            prop_assert_eq!(*left, 0, "rejected a lease although the plan has an unused slot");
                            prop_assert_eq!(&holders[0].owner, "model");
                        }
                        (Err(Error::NoSuchClass { .. }), None) => {}
                        (outcome, class) => prop_assert!(false, "{outcome:?} where the model has {class:?}"),
                    }
                }
                Step::Give(index) if !held.is_empty() => {
                    let (class, _, lease) = held.swap_remove(index.index(held.len()));
                    asked -= lease.len();
                    *free.entry(class).or_default() += 1;
                }
                Step::Give(_) => {}
            }
        }
        for (_, mark, lease) in &held {
            prop_assert!(lease.as_slice().iter().all(|byte| byte == mark), "another lease changed these bytes");
        }
        let stats = arena.stats();
        prop_assert_eq!(stats.total.bytes, asked);
        prop_assert_eq!(stats.total.peak_bytes, peak);
        prop_assert_eq!(stats.total.leases, held.len());
        prop_assert_eq!(stats.in_use_bytes, held.iter().map(|(class, ..)| class).sum::<usize>());
        drop(held);
        prop_assert_eq!(arena.stats().total.bytes, 0);
    }

    /// After leases were taken and returned in any order, the arena must grant all slots of the plan at once.
    #[test]
    fn all_planned_slots_are_granted_after_random_leases(plan in plan(), steps in steps()) {
        let layout = Layout::unbounded(&plan).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let region = region(layout.reserved_bytes());
        let arena = Arena::new(&region, &plan).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let owner = arena.owner("model").map_err(|error| TestCaseError::fail(error.to_string()))?;
        let mut held = Vec::new();
        for step in steps {
            match step {
                Step::Take(bytes) => held.extend(arena.lease(bytes, owner, Wait::never())),
                Step::Give(index) if !held.is_empty() => drop(held.swap_remove(index.index(held.len()))),
                Step::Give(_) => {}
            }
        }
        held.clear();
        for class in layout.classes() {
            for _ in 0..class.count {
                let lease = arena.lease(class.bytes, owner, Wait::never());
                held.push(lease.map_err(|error| TestCaseError::fail(error.to_string()))?);
            }
        }
        prop_assert_eq!(held.iter().map(Lease::len).sum::<usize>(), layout.asked_bytes());
    }
}

/// Threads take a chunk, fill it with their mark, check it and return it. If two threads held the same chunk, a thread
/// could find the mark of another thread.
#[test]
fn chunk_ring_leases_a_chunk_to_one_thread_at_a_time() -> Outcome {
    const CHUNK_BYTES: usize = 4096;
    const CHUNKS: usize = 3;
    const THREADS: u8 = 8;
    let region = region(CHUNK_BYTES * CHUNKS);
    let ring = ChunkRing::new(&region, CHUNK_BYTES, CHUNKS).map_err(|error| TestCaseError::fail(error.to_string()))?;
    let rounds = cases(2000);
    let work = |mark: u8| -> Result<(), Error> {
        let owner = ring.owner(&format!("thread {mark}"))?;
        for _ in 0..rounds {
            let mut chunk = ring.lease(owner, Wait::at_most(Duration::from_secs(60)))?;
            chunk.as_mut_slice().fill(mark);
            std::hint::black_box(&mut chunk);
            assert!(chunk.as_slice().iter().all(|&byte| byte == mark));
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|mark| scope.spawn(move || work(mark))).collect();
        for thread in threads {
            assert!(matches!(thread.join(), Ok(Ok(()))));
        }
    });
    let stats = ring.stats();
    assert_eq!((stats.total.bytes, stats.total.leases), (0, 0));
    assert!(stats.classes[0].peak <= CHUNKS);
    let by_owner: HashMap<_, _> = stats.owners.into_iter().collect();
    assert_eq!(by_owner.len(), usize::from(THREADS));
    assert_eq!(by_owner.values().map(|owner| owner.waits).sum::<u64>(), stats.total.waits);
    Ok(())
}

/// Returns `usual`, or the value of the environment variable `PROPTEST_CASES` if this value is smaller. Under Valgrind,
/// a run with `usual` cases would take an hour.
fn cases(usual: u32) -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .map_or(usual, |cases: u32| cases.min(usual))
}
