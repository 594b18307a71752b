//! Tests that a failed opening or replay leaves the bytes, the length and the mode of a file unchanged, and that calls
//! close their descriptors.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::model::{self, Folder, ok};
use memascend_mem::Wait;
use memascend_nvme::sim::Rng;
use memascend_store::{Create, Existing, Store};

const COMMITS: u64 = 6;

fn how(existing: Existing) -> Create {
    let mut how = Create::default();
    how.existing = existing;
    how
}

/// Creates a store with a log, and ends the run without closing the store. Returns the bytes of the store's file.
fn killed(path: &Path) -> Vec<u8> {
    let (store, _) = ok(Store::create(&[path], model::description(), &how(Existing::Replace)));
    ok(model::commit(&store, 0));
    assert_eq!(ok(store.keep_log(&model::LOGGED, 3)), 3);
    (1..=COMMITS).for_each(|commit| ok(model::commit(&store, commit)));
    store.end();
    drop(store);
    ok(fs::read(path))
}

/// Returns damaged copies of `whole`, each with a text that names its damage.
fn damaged(whole: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for length in
        [4096, 4097, 12_287, 12_288, whole.len() / 2, whole.len() / 2 + 100, whole.len() - 4096, whole.len() - 1]
    {
        all.push((format!("cut to {length}"), whole[..length].to_vec()));
    }
    let mut rng = Rng::new(7);
    let last = whole.len() - whole.iter().rev().position(|&byte| byte != 0).unwrap_or(0);
    for number in 0..model::many(400, 20) {
        let mut bytes = whole.to_vec();
        for _ in 0..=number % 3 {
            // Every second copy gets flipped bits only in the first 20 pages, which have the catalog.
            let at = if number % 2 == 0 { rng.below(last) } else { rng.below(20 * 4096) };
            bytes[at] ^= 1;
        }
        all.push((format!("flips {number}"), bytes));
    }
    let heads = (0..whole.len()).step_by(4096).filter(|&at| whole[at..].starts_with(b"mascstep"));
    for at in heads {
        let mut bytes = whole.to_vec();
        for at in [at, at + 100, at - 4096] {
            bytes[at] ^= 1;
        }
        all.push((format!("three flips of the log at {at}"), bytes));
    }
    let mut bytes = whole.to_vec();
    bytes[4096..12_288].fill(0);
    all.push(("no roots".into(), bytes));
    all
}

/// Opens a store, replays its log and closes the store, as a resumed run does.
fn gone_on(path: &PathBuf, how: &Create) -> Result<(), String> {
    let store = Store::open(std::slice::from_ref(path), how).map_err(|error| error.to_string())?;
    let settled = store.check_log(&mut || true).and_then(|()| model::settle(&store));
    let closed = store.close(Wait::forever());
    settled.and(closed).map_err(|error| error.to_string())
}

#[test]
fn failed_open_or_replay_leaves_the_file_and_its_mode_unchanged() {
    let folder = Folder::new("refusals");
    let path = folder.paths(1).remove(0);
    let mut refused = 0;
    for (way, bytes) in damaged(&killed(&path)) {
        for existing in [Existing::Resume, Existing::Previous] {
            ok(fs::write(&path, &bytes));
            ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o640)));
            if let Err(why) = gone_on(&path, &how(existing)) {
                refused += 1;
                assert!(ok(fs::read(&path)) == bytes, "{way}, {existing:?}: {why}");
                assert_eq!(ok(fs::metadata(&path)).permissions().mode() & 0o777, 0o640, "{way}: {why}");
            }
        }
    }
    assert!(refused > 30, "{refused}");
}

#[test]
fn look_examine_and_commits_leave_the_file_unchanged() {
    let folder = Folder::new("looking");
    let path = folder.paths(1).remove(0);
    let whole = killed(&path);
    // Appends bytes to the file. A copy of a store may have additional bytes at its end.
    let bytes = [&whole[..], b"tail"].concat();
    ok(fs::write(&path, &bytes));
    let paths = [&path];
    drop(ok(Store::look(&paths, &Create::default())));
    drop(ok(Store::examine(&paths, &Create::default(), &mut |_, _| true)));
    drop(ok(Store::commits(&paths, &Create::default())));
    assert!(ok(fs::read(&path)) == bytes);
}

/// Returns the number of file descriptors that this process has open on a file.
fn open_descriptors(path: &Path) -> usize {
    let all = ok(fs::read_dir("/proc/self/fd")).filter_map(Result::ok);
    all.filter(|one| fs::read_link(one.path()).is_ok_and(|of| of == path)).count()
}

#[test]
fn create_open_and_look_close_their_file_descriptors() {
    let folder = Folder::new("descriptors");
    let path = ok(fs::canonicalize(folder.paths(1)[0].parent().unwrap_or(Path::new(".")))).join("device-0");
    let bytes = killed(&path);
    assert_eq!(open_descriptors(&path), 0, "made");
    let paths = [&path];
    for existing in [Existing::Resume, Existing::Previous, Existing::Refuse, Existing::Replace] {
        let how = how(existing);
        drop(Store::create(&paths, model::description(), &how));
        assert_eq!(open_descriptors(&path), 0, "{existing:?}");
        ok(fs::write(&path, &bytes));
        drop(Store::open(&paths, &how));
        drop(Store::look(&paths, &how));
        drop(Store::commits(&paths, &how));
        drop(Store::examine(&paths, &how, &mut |_, _| true));
        assert_eq!(open_descriptors(&path), 0, "{existing:?}");
        // Cuts the file in half, so that the call fails, except with `Existing::Replace`. A failed call must also close
        // its descriptors.
        ok(fs::write(&path, &bytes[..bytes.len() / 2]));
        drop(Store::create(&paths, model::description(), &how));
        assert_eq!(open_descriptors(&path), 0, "{existing:?}, refused");
        ok(fs::write(&path, &bytes));
    }
}
