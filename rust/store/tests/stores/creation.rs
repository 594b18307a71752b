//! Tests the creation of stores: killed processes, empty files, missing devices and names of files.
//!
//! A process that is killed while it creates a store must leave the former store, nothing, or an unfinished store that
//! a later call recognizes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::model::{self, Folder, check, commit, ok, striped};
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Create, Error, Existing, Store};

const NEVER_BEGAN: &str = "its first write did not finish";

fn how(existing: Existing, stripe_bytes: u64) -> Create {
    let mut how = Create::default();
    how.existing = existing;
    how.volume.stripe_bytes = Some(stripe_bytes);
    how
}

/// Creates a store on devices that contain `before`. The simulated process dies after `point` operations. Returns the
/// contents that the devices may then have: the contents that another process sees, and the contents after one or more
/// simulated losses of power. Returns `None` if the creation finished within `point` operations.
fn died(before: &[Vec<u8>], stripe_bytes: u64, point: u64) -> Option<Vec<Vec<Vec<u8>>>> {
    let disks: Vec<SimDisk> = before.iter().map(|bytes| SimDisk::of(bytes.clone())).collect();
    let faults = Faults { dies_after: Some(point), ..Faults::default() };
    let there = striped(&disks, stripe_bytes, &faults);
    if Store::create_on(there, stripe_bytes, model::description(), &Create::default()).is_ok() {
        return None;
    }
    // Among the first eight operations are the writes that overwrite the roots of a former store one by one. So without
    // `MEMASCEND_TEST_LONG`, the test simulates more losses of power after each of these operations than after a later
    // operation.
    let few = if point < 8 { 4 } else { 1 };
    let lost =
        (0..model::many(8, few)).map(|seed| disks.iter().map(|disk| disk.after_power_loss(seed).bytes()).collect());
    Some(std::iter::once(disks.iter().map(SimDisk::bytes).collect()).chain(lost).collect())
}

/// Writes `left` to the paths, calls `Store::create` and returns its result. If the call fails, checks that it left the
/// files unchanged.
fn met(paths: &[PathBuf], left: &[Vec<u8>], how: &Create) -> Result<(Store, bool), Error> {
    paths.iter().zip(left).for_each(|(path, bytes)| ok(fs::write(path, bytes)));
    let met = Store::create(paths, model::description(), how);
    if met.is_err() {
        assert!(
            paths.iter().zip(left).all(|(path, bytes)| ok(fs::read(path)) == *bytes),
            "a rejected call must change nothing"
        );
    }
    met
}

#[test]
fn interrupted_creation_is_replaced_and_never_resumed() {
    let folder = Folder::new("creation");
    // Each case has the number of devices, the stripe size of the former store (`None` if there is no former store),
    // and the stripe size of the new store.
    for (count, old, new) in
        [(1, None, 8192), (2, None, 4096), (1, Some(8192), 8192), (2, Some(8192), 4096), (3, Some(4096), 4096)]
    {
        let paths = folder.paths(count);
        let disks = model::disks(count);
        // With an odd `count` the newest root is in one root page, and with an even `count` in the other root page.
        let last = count as u64 % 2 + 1;
        if let Some(stripe_bytes) = old {
            let there = striped(&disks, stripe_bytes, &Faults::default());
            let store = ok(Store::create_on(there, stripe_bytes, model::description(), &model::how()));
            (0..=last).for_each(|step| ok(commit(&store, step)));
        }
        let before: Vec<Vec<u8>> = disks.iter().map(SimDisk::bytes).collect();
        let mut never_began = 0;
        let points = (0..8).chain((8..).step_by(model::many(1, 4)));
        for (point, left) in points.map_while(|point| Some((point, died(&before, new, point)?))) {
            for left in left {
                let seed = format!("{count} devices, {old:?} to {new}, point {point}");
                match met(&paths, &left, &how(Existing::Resume, new)) {
                    Ok((store, is_new)) => {
                        assert_eq!((is_new, store.info().uuid, check(&store, &seed)), (false, model::UUID, last));
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
                if point % model::many(1, 8) > 0 {
                    continue;
                }
                ok(commit(&store, 0));
                drop(store);
                assert_eq!(check(&ok(Store::open(&paths, &Create::default())), &seed), 0);
            }
        }
        assert!(never_began > 5, "{count} devices: {never_began}");
        for path in &paths {
            ok(fs::remove_file(path));
        }
    }
}

#[test]
fn empty_file_becomes_a_store_only_by_refuse_or_replace() {
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
        // Removes one of the two blank files. `Resume` must not create a store, and must not create the missing file.
        if let [_, second] = &paths[..] {
            ok(fs::remove_file(second));
            let refused = Store::create(&paths, model::description(), &how(Existing::Resume, 8192)).map(drop);
            assert!(refused.is_err_and(|why| why.to_string().contains(NEVER_BEGAN)));
            assert!(!second.exists());
        }
        for existing in [Existing::Refuse, Existing::Replace] {
            assert!(ok(met(&paths, &left, &how(existing, 8192))).1);
        }
        for path in &paths {
            ok(fs::remove_file(path));
        }
        assert!(
            ok(Store::create(&paths, model::description(), &how(Existing::Resume, 8192))).1,
            "without files, the call must create a new store"
        );
        // If `Store::create` creates a single file, this file has a pending name until the first commit. Several files
        // have their final names at once.
        assert!(paths.iter().all(|path| path.exists() == (count > 1)));
        for path in &paths {
            drop(fs::remove_file(path));
        }
    }
}

#[test]
fn create_rejects_a_store_with_one_blank_device() {
    let folder = Folder::new("missing");
    let paths = folder.paths(2);
    for stripe_bytes in [4096, 8192] {
        let disks = model::disks(2);
        let store = ok(Store::create_on(
            striped(&disks, stripe_bytes, &Faults::default()),
            stripe_bytes,
            model::description(),
            &model::how(),
        ));
        // `Store::create_on` has written a mark to each root page. The first commit overwrites one mark, and the second
        // commit overwrites the other mark.
        for step in 0..2 {
            ok(commit(&store, step));
            let whole: Vec<Vec<u8>> = disks.iter().map(SimDisk::bytes).collect();
            for lost in 0..2 {
                let mut left = whole.clone();
                left[lost].fill(0);
                for existing in [Existing::Refuse, Existing::Resume, Existing::Replace, Existing::Previous] {
                    let refused = met(&paths, &left, &how(existing, stripe_bytes)).map(drop);
                    let named = |why: &Error| why.to_string().contains("it is missing or blank");
                    assert!(refused.as_ref().is_err_and(named), "device {lost}, step {step}: {refused:?}");
                }
            }
        }
    }
}

/// Returns three things: whether the file exists under its final name, whether it exists under its pending name, and
/// the number of files in its folder.
fn names(path: &Path) -> (bool, bool, usize) {
    let folder = path.parent().unwrap_or(path);
    (path.exists(), pending(path).exists(), ok(fs::read_dir(folder)).count())
}

fn pending(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

#[test]
fn store_file_takes_its_final_name_at_the_first_commit() {
    let folder = Folder::new("named");
    let path = &folder.paths(1)[0];
    for existing in [Existing::Refuse, Existing::Resume, Existing::Replace] {
        let (store, is_new) = ok(Store::create(&[path], model::description(), &how(existing, 8192)));
        assert!(is_new && store.volume().lost().is_none());
        assert_eq!(names(path), (false, true, 1));
        assert!(ok(Store::commits(&[path], &Create::default())).is_none(), "there is no store yet");
        // Another call of `Store::create` must fail with an error that names `path`, not the pending name.
        for others in [Existing::Refuse, Existing::Resume, Existing::Replace] {
            let refused = Store::create(&[path], model::description(), &how(others, 8192)).map(drop);
            let said = refused.err().map(|why| why.to_string()).unwrap_or_default();
            assert!(said.starts_with(&format!("{}: this process", path.display())), "{said}");
        }
        ok(commit(&store, 0));
        assert!(store.volume().lost().is_none());
        assert_eq!(names(path), (true, false, 1));
        ok(commit(&store, 1));
        drop(store);
        assert_eq!(check(&ok(Store::open(&[path], &Create::default())), ""), 1);
        ok(fs::remove_file(path));
        // Drops a store without a commit, which must leave no file.
        drop(ok(Store::create(&[path], model::description(), &how(existing, 8192))));
        assert_eq!(names(path), (false, false, 0));
        // Drops a store after `Volume::forsake`. It must leave no file, although it has a commit.
        let (store, _) = ok(Store::create(&[path], model::description(), &how(existing, 8192)));
        ok(commit(&store, 0));
        store.volume().forsake();
        drop(store);
        assert_eq!(names(path), (false, false, 0));
    }
}

#[test]
fn resume_replaces_the_pending_file_of_a_killed_process() {
    let folder = Folder::new("left");
    let path = &folder.paths(1)[0];
    let blank: Vec<Vec<u8>> = model::disks(1).iter().map(SimDisk::bytes).collect();
    let mut tried = 0;
    for point in 0.. {
        let (left, done) = left_at(&blank[0], point);
        for bytes in left {
            ok(fs::write(pending(path), &bytes));
            let (store, is_new) = Store::create(&[path], model::description(), &how(Existing::Resume, 8192))
                .unwrap_or_else(|why| panic!("point {point}: {why}"));
            assert!(is_new);
            assert_eq!(names(path), (false, true, 1));
            if point % model::many(1, 8) == 0 {
                ok(commit(&store, 0));
                assert_eq!((names(path), check(&store, "")), ((true, false, 1), 0));
                store.volume().forsake();
            }
            drop(store);
            assert_eq!(names(path), (false, false, 0));
            tried += 1;
        }
        // At the last point, all operations have run except the renaming of the file. Simulated devices cannot rename a
        // file.
        if done {
            break;
        }
    }
    assert!(tried > 40, "{tried}");
}

/// Creates a store and makes its first commit. The simulated process dies after `point` operations. Returns the
/// contents that the device may then have, and whether the commit succeeded.
fn left_at(blank: &[u8], point: u64) -> (Vec<Vec<u8>>, bool) {
    let disk = SimDisk::of(blank.to_vec());
    let faults = Faults { dies_after: Some(point), ..Faults::default() };
    let there = striped(std::slice::from_ref(&disk), 8192, &faults);
    let store = Store::create_on(there, 8192, model::description(), &Create::default());
    let done = store.is_ok_and(|store| commit(&store, 0).is_ok());
    let lost = (0..2).map(|seed| disk.after_power_loss(seed).bytes());
    (std::iter::once(disk.bytes()).chain(lost).collect(), done)
}

#[test]
fn create_rejects_and_keeps_a_trained_store_with_the_pending_name() {
    let folder = Folder::new("trained");
    let path = &folder.paths(1)[0];
    let theirs = pending(path);
    let store = ok(Store::create(&[&theirs], model::description(), &how(Existing::Refuse, 8192))).0;
    ok(commit(&store, 0));
    ok(commit(&store, 1));
    let refused = Store::create(&[path], model::description(), &how(Existing::Resume, 8192)).map(drop);
    assert!(refused.is_err_and(|why| why.to_string().contains("has it open already")));
    drop(store);
    let bytes = ok(fs::read(&theirs));
    for existing in [Existing::Refuse, Existing::Resume, Existing::Replace] {
        let refused = Store::create(&[path], model::description(), &how(existing, 8192)).map(drop);
        let named = |why: &Error| why.to_string().contains(&format!("{}: a new store has this name", theirs.display()));
        assert!(refused.as_ref().is_err_and(named), "{refused:?}");
    }
    // Two kinds of files with the pending name must not be removed: a file with other data, and a store in which an
    // opening with `Existing::Previous` left a mark in a root page.
    let mut previous = Create::default();
    previous.existing = Existing::Previous;
    let store = ok(Store::open(&[&theirs], &how(Existing::Resume, 8192)));
    ok(commit(&store, 2));
    ok(commit(&store, 3));
    drop(store);
    drop(ok(Store::open(&[&theirs], &previous)));
    for bytes in [ok(fs::read(&theirs)), b"somebody's".to_vec(), [vec![0; 5000], vec![1], vec![0; 5000]].concat()] {
        ok(fs::write(&theirs, &bytes));
        assert!(Store::create(&[path], model::description(), &how(Existing::Resume, 8192)).is_err());
        assert_eq!((ok(fs::read(&theirs)) == bytes, names(path)), (true, (false, true, 1)));
    }
    assert!(!bytes.is_empty());
}

#[test]
fn first_commit_error_names_the_file_that_took_the_name() {
    let folder = Folder::new("taken");
    let path = &folder.paths(1)[0];
    let store = ok(Store::create(&[path], model::description(), &how(Existing::Resume, 8192))).0;
    ok(fs::write(path, b"theirs"));
    let refused = commit(&store, 0);
    let named =
        |why: &Error| why.to_string().starts_with(&format!("{}: another program created a file here", path.display()));
    assert!(refused.as_ref().is_err_and(named), "{refused:?}");
    assert_eq!((ok(fs::read(path)), store.info().generation), (b"theirs".to_vec(), 0));
    // Removes the other file. Afterwards, the same commit must succeed.
    ok(fs::remove_file(path));
    ok(store.discard(memascend_mem::Wait::forever()));
    ok(commit(&store, 0));
    assert_eq!(names(path), (true, false, 1));
    drop(store);
    ok(fs::remove_file(path));
    let store = ok(Store::create(&[path], model::description(), &how(Existing::Resume, 8192))).0;
    ok(fs::write(path, b"theirs"));
    assert!(commit(&store, 0).is_err());
    drop(store);
    assert_eq!((ok(fs::read(path)), names(path)), (b"theirs".to_vec(), (true, false, 1)));
}

#[test]
fn store_of_several_files_has_its_final_names_at_creation() {
    let folder = Folder::new("several");
    let paths = folder.paths(2);
    let (store, _) = ok(Store::create(&paths, model::description(), &how(Existing::Resume, 8192)));
    assert!(paths.iter().all(|path| path.exists() && !pending(path).exists()));
    drop(store);
    let refused = Store::create(&paths, model::description(), &how(Existing::Resume, 8192)).map(drop);
    assert!(refused.is_err_and(|why| why.to_string().contains(NEVER_BEGAN)));
}
