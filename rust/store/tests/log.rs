//! Tests the log of gradients: entries whose slots are old, and what opening makes of them.

use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Create, Error, Store};

mod logged;
mod toy;

fn ok<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Disks with room for a log of many steps.
fn disks(count: usize) -> Vec<SimDisk> {
    (0..count).map(|_| SimDisk::new((4 << 20) / count)).collect()
}

fn created(disks: &[SimDisk], how: &Create) -> Store {
    ok(Store::create_on(toy::volume(disks, &Faults::default()), toy::STRIPE, toy::description(), how))
}

#[test]
fn what_was_logged_is_there_after_a_crash_at_any_commit() {
    const COMMITS: u64 = 40;
    for steps in [1, 2, 16] {
        for count in [1, 2] {
            let disks = disks(count);
            let store = created(&disks, &toy::how());
            let states = logged::states(&store, COMMITS);
            ok(logged::commit(&store, &states, 0));
            assert_eq!(ok(store.keep_log(&logged::HELD, steps)), steps);
            for commit in 1..=COMMITS {
                ok(logged::commit(&store, &states, commit));
                assert!(store.log_state().steps <= u64::from(steps), "{:?}", store.log_state());
                // Whoever kills the process now leaves this.
                let left: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(commit)).collect();
                let found = ok(toy::open(&left, &toy::how()));
                assert_eq!(logged::committed(&found), commit);
                let name = format!("{steps} steps, {count} devices, commit {commit}");
                assert!(ok(logged::replayed(&found)) == *logged::after(&states, commit), "{name}");
                ok(found.verify(&mut |_, _| true));
            }
            assert!(store.log_state().entries > 0);
            drop(store);
        }
    }
}
