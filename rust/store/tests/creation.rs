//! Tests what whoever dies while a store is made leaves: the store that was there, nothing, or what is known as ours.

mod toy;

use std::{fs, path::PathBuf};

use memascend_nvme::{
    Options, Volume,
    sim::{self, Faults, SimDisk},
};
use memascend_store::{Create, Error, Existing, Store};
use toy::Folder;

const NEVER_BEGAN: &str = "its run never began";

fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn volume(disks: &[SimDisk], stripe_bytes: u64, faults: &Faults) -> Volume {
    let mut options = Options::default();
    options.stripe_bytes = Some(stripe_bytes);
    ok(sim::open(disks, faults, &options))
}

fn how(existing: Existing, stripe_bytes: u64) -> Create {
    let mut how = Create::default();
    how.existing = existing;
    how.volume.stripe_bytes = Some(stripe_bytes);
    how
}

/// Makes a store over what is there, and ends after so many operations: what that leaves on each device, as another
/// process sees it and after losses of power. `None` where it was made.
fn died(before: &[Vec<u8>], stripe_bytes: u64, point: u64) -> Option<Vec<Vec<Vec<u8>>>> {
    let disks: Vec<SimDisk> = before.iter().map(|bytes| SimDisk::of(bytes.clone())).collect();
    let faults = Faults { dies_after: Some(point), ..Faults::default() };
    let there = volume(&disks, stripe_bytes, &faults);
    if Store::create_on(there, stripe_bytes, toy::description(), &Create::default()).is_ok() {
        return None;
    }
    // In the first operations the roots of the store that was there go, one after the other.
    let few = if point < 8 { 8 } else { u64::from(point.is_multiple_of(4)) };
    let lost =
        (0..toy::many(8, few)).map(|seed| disks.iter().map(|disk| disk.after_power_loss(seed).bytes()).collect());
    Some(std::iter::once(disks.iter().map(SimDisk::bytes).collect()).chain(lost).collect())
}

/// What a call makes of what is there; what it refuses stays as it is.
fn met(paths: &[PathBuf], left: &[Vec<u8>], how: &Create) -> Result<(Store, bool), Error> {
    paths.iter().zip(left).for_each(|(path, bytes)| ok(fs::write(path, bytes)));
    let met = Store::create(paths, toy::description(), how);
    if met.is_err() {
        assert!(paths.iter().zip(left).all(|(path, bytes)| ok(fs::read(path)) == *bytes), "a refusal changes nothing");
    }
    met
}

#[test]
fn a_store_that_was_being_made_is_replaced_and_never_resumed() {
    let folder = Folder::new("creation");
    // How many devices, the stripe of the store that was there, and that of the one that is made.
    for (count, old, new) in
        [(1, None, 8192), (2, None, 4096), (1, Some(8192), 8192), (2, Some(8192), 4096), (3, Some(4096), 4096)]
    {
        let paths = folder.paths(count);
        let disks = toy::disks(count);
        if let Some(stripe_bytes) = old {
            let there = volume(&disks, stripe_bytes, &Faults::default());
            let store = ok(Store::create_on(there, stripe_bytes, toy::description(), &toy::how()));
            (0..=2).for_each(|step| ok(toy::step(&store, step)));
        }
        let before: Vec<Vec<u8>> = disks.iter().map(SimDisk::bytes).collect();
        let mut never_began = 0;
        for (point, left) in (0..).map_while(|point| Some((point, died(&before, new, point)?))) {
            for left in left {
                let seed = format!("{count} devices, {old:?} to {new}, point {point}");
                match met(&paths, &left, &how(Existing::Resume, new)) {
                    Ok((store, is_new)) => {
                        assert_eq!((is_new, store.info().uuid, toy::check(&store, &seed)), (false, toy::UUID, 2));
                    }
                    Err(why) => {
                        assert!(why.to_string().contains(NEVER_BEGAN), "{seed}: {why}");
                        let previous = met(&paths, &left, &how(Existing::Previous, new)).map(drop);
                        assert!(
                            previous.as_ref().is_err_and(|why| why.to_string().contains(NEVER_BEGAN)),
                            "{previous:?}"
                        );
                        let begins = met(&paths, &left, &how(Existing::Refuse, new)).is_ok();
                        assert_eq!(begins, left.iter().flatten().all(|&byte| byte == 0), "{seed}");
                        never_began += 1;
                    }
                }
                let (store, is_new) =
                    met(&paths, &left, &how(Existing::Replace, new)).unwrap_or_else(|why| panic!("{seed}: {why}"));
                assert!(is_new);
                if point % toy::many(1, 8) > 0 {
                    continue;
                }
                ok(toy::step(&store, 0));
                drop(store);
                assert_eq!(toy::check(&ok(Store::open(&paths, &Create::default())), &seed), 0);
            }
        }
        assert!(never_began > 5, "{count} devices: {never_began}");
        for path in &paths {
            ok(fs::remove_file(path));
        }
    }
}

#[test]
fn an_empty_file_is_no_store_and_begins_none_unless_that_is_asked_for() {
    let folder = Folder::new("empty");
    for (count, bytes) in [(1, 0), (1, 1), (1, 4 << 20), (2, 0), (2, 4 << 20)] {
        let paths = folder.paths(count);
        let left = vec![vec![0; bytes]; count];
        for existing in [Existing::Resume, Existing::Previous] {
            let refused = met(&paths, &left, &how(existing, 8192)).map(drop);
            let named = |why: &Error| matches!(why, Error::Corrupt { .. }) && why.to_string().contains(NEVER_BEGAN);
            assert!(refused.as_ref().is_err_and(named), "{count} of {bytes} bytes: {refused:?}");
        }
        assert!(Store::open(&paths, &Create::default()).is_err_and(|why| why.to_string().contains(NEVER_BEGAN)));
        // One of two is missing: the one that is made for it is no reason to begin in the other.
        if let [_, second] = &paths[..] {
            ok(fs::remove_file(second));
            let refused = Store::create(&paths, toy::description(), &how(Existing::Resume, 8192)).map(drop);
            assert!(refused.is_err_and(|why| why.to_string().contains(NEVER_BEGAN)));
            assert!(!second.exists());
        }
        for existing in [Existing::Refuse, Existing::Replace] {
            assert!(ok(met(&paths, &left, &how(existing, 8192))).1);
        }
        for path in &paths {
            ok(fs::remove_file(path));
        }
        assert!(ok(Store::create(&paths, toy::description(), &how(Existing::Resume, 8192))).1, "nothing was there");
        for path in &paths {
            ok(fs::remove_file(path));
        }
    }
}

#[test]
fn a_device_that_is_missing_from_a_whole_store_does_not_make_it_one_that_never_began() {
    let folder = Folder::new("missing");
    let paths = folder.paths(2);
    for stripe_bytes in [4096, 8192] {
        let disks = toy::disks(2);
        let store = ok(Store::create_on(
            volume(&disks, stripe_bytes, &Faults::default()),
            stripe_bytes,
            toy::description(),
            &toy::how(),
        ));
        // Of the first commit alone, one root has its mark still.
        for step in 0..2 {
            ok(toy::step(&store, step));
            let whole: Vec<Vec<u8>> = disks.iter().map(SimDisk::bytes).collect();
            for lost in 0..2 {
                let mut left = whole.clone();
                left[lost].fill(0);
                for existing in [Existing::Refuse, Existing::Resume, Existing::Replace, Existing::Previous] {
                    let refused = met(&paths, &left, &how(existing, stripe_bytes)).map(drop);
                    let named = |why: &Error| why.to_string().contains("this one is blank");
                    assert!(refused.as_ref().is_err_and(named), "device {lost}, step {step}: {refused:?}");
                }
            }
        }
    }
}
