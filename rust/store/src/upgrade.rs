//! Upgrades a store of version 1 in place.
//!
//! Values and state stay where they are. The longer description goes behind everything, then an ordinary commit writes
//! the first root of version 2: that is the moment of the upgrade. Whatever came before it, version 1 does not look at;
//! what comes after it, the other root and the labels, is done again by whoever finds it undone.

use std::{path::Path, path::PathBuf, sync::Arc};

use memascend_mem::Wait;
use memascend_nvme::{DeviceKind, Volume};

use crate::{
    Commit, Create, Description, Error, Layout, Result, Store,
    boot::is_same,
    bounds::DESCRIPTION_BYTES_MAX,
    checksum::Uuid,
    commit::Reach,
    copies::{described, of_version},
    label::{self, Found},
    layout::PAGE_BYTES,
    newest::NOT_CLOSED,
    open::bytes_at,
    path::{There, look, refused, resolve},
    places::Devices,
    root::{self, Beside, Root, UNCLOSED, UNFLUSHED},
    version_1,
};

/// What a root's page holds.
enum Page {
    New(Root),
    Old(version_1::Root),
    Blank,
}

/// A store that is not of this version yet, or not in all its parts.
struct Unfinished {
    devices: Devices,
    uuid: Uuid,
    pages: [Page; 2],
    path: Arc<Path>,
}

impl Store {
    /// Converts a store of version 1 to this version, where it is; files grow a little. `false`: it was of this version.
    ///
    /// A kill or a loss of power at any moment leaves the store of version 1, or one that another call finishes.
    pub fn upgrade(paths: &[impl AsRef<Path>], how: &Create) -> Result<bool> {
        let paths: Vec<PathBuf> = paths.iter().map(|path| resolve(path.as_ref())).collect();
        let label = match look(&paths)? {
            There::Store(_) => return Ok(false),
            There::Old(label) => label,
            There::Nothing => return refused(&paths[0], "there is no store"),
            There::Unfilled => return Err(Error::Unfilled { path: paths[0].as_path().into() }),
            There::Unusable(why) => return refused(&paths[0], &why),
        };
        let mut options = how.volume.clone();
        options.size_bytes = None;
        options.stripe_bytes = Some(label.devices.stripe_bytes);
        let volume = Volume::open(&paths, &options)?;
        let needed = Unfinished::read(&volume, label.devices)?.needed_bytes(&volume)?;
        let are_files = volume.devices().iter().all(|device| device.kind == DeviceKind::File);
        if volume.size_bytes() >= needed || !are_files {
            return Self::upgrade_volume(volume, label.devices, how);
        }
        drop(volume);
        options.size_bytes = Some(needed);
        Self::upgrade_volume(Volume::open(&paths, &options)?, label.devices, how)
    }

    /// The same on an open volume of simulated devices.
    #[cfg(feature = "sim")]
    pub fn upgrade_on(volume: Volume, stripe_bytes: u64, how: &Create) -> Result<bool> {
        let devices = Devices { count: volume.devices().len() as u32, stripe_bytes };
        Self::upgrade_volume(volume, devices, how)
    }

    fn upgrade_volume(volume: Volume, devices: Devices, how: &Create) -> Result<bool> {
        if !is_old(&volume, devices)? {
            return Ok(false);
        }
        let mut unfinished = Unfinished::read(&volume, devices)?;
        if let Some(root) = unfinished.newest_new() {
            let description = described(&volume, &root, &unfinished.path)?;
            if let Ok(layout) = Layout::placed(&description, devices, root.places)? {
                let store = Self::new(volume, unfinished.uuid, description, layout, how)?;
                match store.load_table(&root) {
                    Ok(()) => return store.finish_upgrade(&root, unfinished.other(&root)).map(|()| true),
                    // Torn, and overtaken by a commit of version 1 that did not come to its end.
                    Err(_) if unfinished.newest_old().is_some() => {
                        unfinished.pages[(root.generation & 1) as usize] = Page::Blank;
                        return store.begin_upgrade(&unfinished).map(|()| true);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        let (description, layout) = unfinished.laid_out(&volume)?;
        if volume.size_bytes() < layout.total_bytes() {
            let lacking = layout.total_bytes() - volume.size_bytes();
            let why = format!(
                "version 2 of the format needs {lacking} bytes more than its devices hold, {} on each; nothing was \
                 changed. Copy the store to larger devices, and upgrade it there",
                lacking.div_ceil(u64::from(devices.count))
            );
            return refused(&unfinished.path, &why);
        }
        let store = Self::new(volume, unfinished.uuid, description, layout, how)?;
        store.begin_upgrade(&unfinished).map(|()| true)
    }

    /// From the newest root of version 1 to the end.
    fn begin_upgrade(&self, unfinished: &Unfinished) -> Result<()> {
        let old = unfinished.live()?;
        let mut root = self.of_version_2(old);
        if root.flags & UNFLUSHED != 0 && !is_same(&root.boot, &self.boot) {
            let whole = self.load_table(&root).and_then(|()| self.verify(&mut |_, _| true));
            whole.map_err(|error| self.lost_power(error))?;
        } else {
            self.load_table(&root)?;
        }
        for offset in self.layout.places.description {
            self.put(offset, &self.description.encode())?;
        }
        self.volume.flush(Wait::forever())?;
        let generation = root.generation + 1;
        let step = {
            let mut index = self.index.lock();
            index.root_pages[(root.generation & 1) as usize] = Beside::Root(root.generation);
            index.step
        };
        self.carry_out(Commit { step, ..Commit::default() }, Reach::Durable(0), &mut || true)?;
        // What it names was flushed with the new root.
        (root.flags, root.boot) = (0, [0; 16]);
        self.finish_upgrade(&Root { generation, ..root.clone() }, Page::New(root))
    }

    /// A root of version 1 as one of this.
    fn of_version_2(&self, old: &version_1::Root) -> Root {
        Root {
            uuid: self.uuid,
            generation: old.generation,
            flags: old.flags,
            boot: old.boot,
            table_bytes: old.table_bytes,
            table_checksum: old.table_checksum,
            description_bytes: self.layout.description_bytes,
            description_checksum: self.description_checksum,
            places: self.layout.places,
            beside: Beside::Root(old.generation + 1),
            ..Root::default()
        }
    }

    /// What follows the first root of this version: the other root, and the labels, the first ones last.
    fn finish_upgrade(&self, root: &Root, other: Page) -> Result<()> {
        match other {
            Page::New(other) => self.write_root(&other, true)?,
            Page::Old(old) if old.generation + 1 == root.generation => {
                let other = Root { flags: 0, boot: [0; 16], ..self.of_version_2(&old) };
                self.write_root(&other, true)?;
            }
            _ => self.write_root_page((root.generation + 1) & 1, &root::mark(&self.uuid), false)?,
        }
        self.put_second_labels()?;
        self.volume.flush(Wait::forever())?;
        self.put_first_labels(0..self.layout.devices.count)?;
        self.volume.flush(Wait::forever())?;
        Ok(())
    }
}

/// Whether a device of a volume still has a label of version 1.
fn is_old(volume: &Volume, devices: Devices) -> Result<bool> {
    for index in 0..devices.count {
        if let Found::Old(_) = label::read(&bytes_at(volume, devices.label_offset(index), PAGE_BYTES)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Unfinished {
    fn read(volume: &Volume, devices: Devices) -> Result<Self> {
        let path: Arc<Path> =
            volume.devices().first().map_or(Path::new("").into(), |device| device.path.as_path().into());
        let mut uuid = None;
        for index in 0..devices.count {
            let (path, place) = (&volume.devices()[index as usize].path, (devices.label_offset(index), PAGE_BYTES));
            let label = match label::read(&bytes_at(volume, place.0, place.1)?) {
                Found::Label(label) | Found::Old(label) => label,
                Found::Version(version) => return refused(path, &of_version(version)),
                Found::Blank | Found::Foreign => return refused(path, "there is no store"),
                Found::Damaged(why) => return Err(corrupt(&path.as_path().into(), "the label", place, why)),
            };
            if label.devices != devices || label.index != index || *uuid.get_or_insert(label.uuid) != label.uuid {
                return refused(path, "it belongs to another store, or to another place in it");
            }
        }
        let uuid = uuid.ok_or_else(|| Error::Invalid("a store needs at least one device".into()))?;
        let page = |slot: u64| {
            let place = (devices.root_offset(slot), PAGE_BYTES);
            let bytes = bytes_at(volume, place.0, place.1)?;
            let generation = |page: &Page| match page {
                Page::New(root) => Some(root.generation),
                Page::Old(root) => Some(root.generation),
                Page::Blank => None,
            };
            let page = match (root::read(&bytes, &uuid), version_1::read_root(&bytes, &uuid)) {
                (Ok(root::Found::Root(root)), _) => Page::New(*root),
                (_, Ok(Some(root))) => Page::Old(root),
                (Ok(root::Found::Mark), _) | (Ok(root::Found::Blank), Ok(None)) => Page::Blank,
                (_, Err(why)) | (Err(why), _) => return Err(corrupt(&path, "the root", place, why)),
            };
            if generation(&page).is_some_and(|generation| generation & 1 != slot) {
                return Err(corrupt(&path, "the root", place, "it belongs into the other slot".into()));
            }
            Ok(page)
        };
        Ok(Self { devices, uuid, pages: [page(0)?, page(1)?], path: Arc::clone(&path) })
    }

    fn newest_new(&self) -> Option<Root> {
        let roots = self.pages.iter().filter_map(|page| if let Page::New(root) = page { Some(root) } else { None });
        roots.max_by_key(|root| root.generation).cloned()
    }

    fn newest_old(&self) -> Option<&version_1::Root> {
        let roots = self.pages.iter().filter_map(|page| if let Page::Old(root) = page { Some(root) } else { None });
        roots.max_by_key(|root| root.generation)
    }

    /// What the slot beside a root holds.
    fn other(&mut self, root: &Root) -> Page {
        let slot = ((root.generation + 1) & 1) as usize;
        std::mem::replace(&mut self.pages[slot], Page::Blank)
    }

    /// The newest root of version 1, if it can be opened at all.
    fn live(&self) -> Result<&version_1::Root> {
        let Some(root) = self.newest_old() else {
            return Err(Error::Unfilled { path: Arc::clone(&self.path) });
        };
        if root.flags & UNCLOSED != 0 {
            return refused(&self.path, NOT_CLOSED);
        }
        Ok(root)
    }

    /// What it holds, and where that is and will be.
    fn laid_out(&self, volume: &Volume) -> Result<(Description, Layout)> {
        let root = self.live()?;
        let place = (self.devices.first_offset(), root.description_bytes);
        if place.1 > DESCRIPTION_BYTES_MAX || place.1 > volume.size_bytes().saturating_sub(place.0) {
            let why = format!("{} bytes of it are not there", place.1);
            return Err(corrupt(&self.path, "the description", place, why));
        }
        let bytes = bytes_at(volume, place.0, place.1)?;
        if !version_1::is_whole(&bytes, root, &self.uuid) {
            return Err(corrupt(&self.path, "the description", place, "its checksum is wrong".into()));
        }
        let description = version_1::decode_description(&bytes).map_err(|unread| Error::Refused {
            path: Arc::clone(&self.path),
            why: format!(
                "version 2 of the format has no place for what it holds: {}. Version 1 laid such chunks over each other, so \
                 they were damaged when they were written; begin from a checkpoint, with existing=\"replace\"",
                String::from(unread)
            ),
        })?;
        let layout = Layout::upgraded(&description, self.devices, root.description_bytes)?;
        let (needed, size) = (layout.places.description[0], volume.size_bytes());
        if size < needed {
            let why = format!("the store has {needed} bytes, and {size} are there: it was truncated");
            return Err(corrupt(&self.path, "the store", (size, needed - size), why));
        }
        Ok((description, layout))
    }

    /// Bytes that its devices need for this version.
    fn needed_bytes(&self, volume: &Volume) -> Result<u64> {
        match self.newest_new() {
            Some(_) => Ok(0),
            None => Ok(self.laid_out(volume)?.1.total_bytes()),
        }
    }
}

fn corrupt(path: &Arc<Path>, what: &str, (offset, nbytes): (u64, u64), why: String) -> Error {
    Error::Corrupt { path: Arc::clone(path), what: what.into(), offset, nbytes, why }
}
