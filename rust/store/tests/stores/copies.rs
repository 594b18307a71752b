//! Tests the second labels, and stores that lost one of their two roots.
//!
//! If the first labels are damaged, an opening must use the second labels and report the damage, and the next commit
//! must repair the first labels. An opening must never use the second labels of a former store.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::PathBuf,
};

use crate::model::{self, Folder, check, commit, ok};
use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, SimDisk};
use memascend_store::{Create, Durability, Error, Existing, Store};

fn how(existing: Existing, stripe_bytes: u64) -> Create {
    let mut how = Create::default();
    how.existing = existing;
    how.volume.stripe_bytes = Some(stripe_bytes);
    how
}

fn made(paths: &[PathBuf], how: &Create, steps: u64) -> [u8; 16] {
    let (store, is_new) = ok(Store::create(paths, model::description(), how));
    assert!(is_new);
    (0..=steps).for_each(|step| ok(commit(&store, step)));
    ok(store.close(Wait::forever()));
    store.info().uuid
}

fn put(path: &PathBuf, offset: u64, bytes: &[u8]) {
    ok(ok(OpenOptions::new().write(true).open(path)).write_all_at(bytes, offset));
}

fn length(path: &PathBuf) -> u64 {
    ok(fs::metadata(path)).len()
}

fn opened(paths: &[PathBuf]) -> Result<Store, Error> {
    Store::open(paths, &Create::default())
}

#[test]
fn store_opens_by_its_second_labels_and_commit_repairs_the_first() {
    for (count, stripe) in [(1, 1 << 20), (2, 4096), (3, 64 << 10)] {
        // Overwrites the first label with zeros, with other data, or with a wrong byte.
        for junk in [vec![0; 4096], vec![0xa5; 4096], b"memascnE".to_vec()] {
            let folder = Folder::new("found");
            let paths = folder.paths(count);
            let uuid = made(&paths, &how(Existing::Refuse, stripe), 2);
            for path in &paths {
                put(path, 0, &junk);
            }
            // The store must not count as blank. `Existing::Refuse` must not replace it.
            let refused = Store::create(&paths, model::description(), &how(Existing::Refuse, stripe)).map(drop);
            assert!(
                refused.as_ref().is_err_and(|why| why.to_string().contains("a store is there already")),
                "{refused:?}"
            );
            let store = ok(opened(&paths));
            assert_eq!((check(&store, "by its second labels"), store.info().uuid), (2, uuid));
            let damaged = ok(store.damaged());
            assert_eq!(damaged.len(), count, "{damaged:?}");
            assert!(damaged.iter().all(|what| what.starts_with("the first label of ")), "{damaged:?}");
            ok(commit(&store, 3));
            assert_eq!(ok(store.damaged()), Vec::<String>::new());
            drop(store);
            // Overwrites the second labels. The first labels were repaired, so the store must open without the second
            // labels.
            for path in &paths {
                put(path, length(path) - 4096, &[0; 4096]);
            }
            let store = ok(opened(&paths));
            assert_eq!((check(&store, "repaired"), ok(store.damaged()).len()), (3, count));
        }
    }
}

#[test]
fn striped_store_opens_with_damaged_first_labels() {
    let folder = Folder::new("one-of-several");
    let paths = folder.paths(2);
    made(&paths, &how(Existing::Refuse, 12_288), 1);
    put(&paths[1], 3, b"#");
    assert_eq!(check(&ok(opened(&paths)), "device 1"), 1);
    put(&paths[0], 3, b"#");
    // Both first labels are damaged now. A file ends with its last stripe, so the second label is at the end of the
    // file for every stripe size.
    assert_eq!(check(&ok(opened(&paths)), "both"), 1);
    let swapped = [paths[1].clone(), paths[0].clone()];
    assert!(opened(&swapped).is_err());
}

#[test]
fn commit_moves_the_second_label_to_the_end_of_a_grown_file() {
    for count in [1, 2] {
        let folder = Folder::new("grown");
        let paths = folder.paths(count);
        made(&paths, &how(Existing::Refuse, 8192), 1);
        for path in &paths {
            ok(ok(OpenOptions::new().write(true).open(path)).set_len(length(path) + (1 << 20)));
        }
        let store = ok(opened(&paths));
        assert_eq!(ok(store.damaged()).len(), count);
        ok(commit(&store, 2));
        assert_eq!(ok(store.damaged()), Vec::<String>::new());
        drop(store);
        for path in &paths {
            put(path, 0, &[0; 4096]);
        }
        assert_eq!(check(&ok(opened(&paths)), "grown"), 2);
    }
}

#[test]
fn second_labels_of_a_replaced_store_are_ignored() {
    // If the new store has another stripe size than the former store, the former store's second labels can stay in the
    // files. With the same stripe size, the new store overwrites these labels.
    for (before, after) in [(4096, 64 << 10), (64 << 10, 4096), (8192, 8192)] {
        let folder = Folder::new("replaced");
        let paths = folder.paths(2);
        let old = made(&paths, &how(Existing::Refuse, before), 2);
        for path in &paths {
            ok(ok(OpenOptions::new().write(true).open(path)).set_len((length(path) + (1 << 20)) / 4096 * 4096));
        }
        let grown = ok(opened(&paths));
        ok(commit(&grown, 3));
        drop(grown);
        let new = made(&paths, &how(Existing::Replace, after), 1);
        assert_ne!(old, new);
        let store = ok(opened(&paths));
        assert_eq!((store.info().uuid, check(&store, "replaced")), (new, 1));
        drop(store);
        for path in &paths {
            put(path, 0, &[0x11; 4096]);
        }
        let store = ok(opened(&paths));
        assert_eq!((store.info().uuid, check(&store, "replaced, by its second labels")), (new, 1));
        drop(store);
        // Overwrites the new store's second labels, too. Now the opening must fail, because the former store's
        // second labels do not count.
        let end = paths.iter().map(length).min().unwrap_or(0) / after * after;
        for path in &paths {
            put(path, end - 4096, &[0x11; 4096]);
        }
        assert!(opened(&paths).is_err());
    }
}

#[test]
fn create_rejects_a_store_that_other_data_overwrote() {
    let folder = Folder::new("put-over");
    let paths = folder.paths(1);
    made(&paths, &how(Existing::Refuse, 8192), 1);
    // Overwrites the first 64 KiB, which have the first label and the roots, with other data. The second label stays
    // whole.
    put(&paths[0], 0, &[b"somebody's file ".repeat(16 * 256)].concat());
    for existing in [Existing::Refuse, Existing::Resume, Existing::Replace] {
        let refused = Store::create(&paths, model::description(), &how(existing, 8192)).map(drop);
        assert!(refused.as_ref().is_err_and(|why| why.to_string().contains("not a memascend store")), "{refused:?}");
    }
    assert!(opened(&paths).is_err());
}

#[test]
fn previous_opens_the_commit_of_each_root_when_the_other_is_lost() {
    let (step, none) = (Durability::Step, Durability::None);
    // Each case has the number of devices, the durability, the last step, and the steps of the roots in slots 1 and 0.
    for (count, durability, steps, says) in
        [(1, step, 2, [2, 1]), (2, step, 2, [2, 1]), (3, step, 3, [2, 3]), (1, none, 4, [4, 4])]
    {
        let disks = model::disks(count);
        let mut how = model::how();
        how.durability = durability;
        let store = model::created_as(&disks, &how);
        (0..=steps).for_each(|step| ok(commit(&store, step)));
        ok(store.close(Wait::forever()));
        drop(store);
        let at = if count == 1 { 4096 } else { model::size(model::STRIPE) };
        for (slot, step) in [0, 1].into_iter().zip(says) {
            let mut left = model::copies(&disks);
            let mut bytes = left[0].bytes();
            bytes[at + slot * 4096..][..4096].fill(0);
            left[0] = SimDisk::of(bytes);
            // A root of zeros counts as lost. Only `Existing::Previous` may open the store, at the commit of the other
            // root.
            assert!(matches!(model::open(&left, &model::how()), Err(Error::Corrupt { .. })));
            let store = ok(model::open(&left, &model::existing(Existing::Previous)));
            assert_eq!(check(&store, "one root"), step);
            ok(store.verify(&mut |_, _| true));
        }
    }
}

#[test]
fn crash_during_the_label_repair_keeps_the_last_commit() {
    let whole = model::disks(2);
    ok(model::trained(&whole, 2).close(Wait::forever()));
    let mut ended = false;
    for point in (0..).step_by(model::many(1, 5)) {
        let disks = model::copies(&whole);
        for disk in &disks {
            disk.flip(40, 4);
        }
        let faults = Faults { dies_after: Some(point), ..Faults::default() };
        if let Ok(store) = Store::open_on(model::volume(&disks, &faults), model::STRIPE, &model::how()) {
            ended = commit(&store, 3).is_ok();
        }
        for loss in 0..4 {
            let step = model::opened(&model::after_loss(&disks, loss), &model::how());
            assert!([Ok(2), Ok(3)].contains(&step), "{point}: {step:?}");
        }
        if ended {
            break;
        }
    }
}
