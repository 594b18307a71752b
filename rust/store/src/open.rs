//! Creates and opens stores. If a call rejects a path or a store, every file and device stays unchanged.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

use memascend_mem::Wait;
use memascend_nvme::{Claim, Missing, Options, Privacy, STRIPE_BYTES_DEFAULT, Volume};

use crate::{
    Description, Durability, Error, Layout, Result, Scratch, Shared, Store, Transfer,
    buffer::{bytes_of, first},
    checksum::Uuid,
    copies::{described, read_store_uuid},
    fields::Malformed,
    label::{self, Found, Label},
    layout::PAGE_BYTES,
    newest::{KEEP, Progress, Roots},
    path::{PathState, check_place, emptied, is_left, look, names_folder, refused, resolve},
    places::Devices,
    root::{self, Root},
    store::CATALOG_CHUNK_BYTES,
    table::table_checksum,
};

/// What to do if the paths already hold a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Existing {
    /// Return an error.
    #[default]
    Refuse,
    /// Open the store at its last committed step; create a store if the paths hold no store.
    Resume,
    /// Create a new store in place of the existing store. Return an error if a file or device has other data.
    Replace,
    /// Open the commit before the last commit. If one root is damaged, open the commit of the undamaged root instead.
    /// The opening verifies every byte of the opened commit, then overwrites the other root with a mark. Fails if there
    /// is no store.
    Previous,
}

/// Options for creating or opening a store.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Create {
    /// What to do if the paths already hold a store.
    pub existing: Existing,
    /// With [`Existing::Previous`], keeps the other root until the caller calls [`Store::go_back`]. Until then nothing
    /// can be staged.
    pub goes_back_later: bool,
    /// Which commits survive a loss of power or the end of the process.
    pub durability: Durability,
    /// How to open the volume. An existing store keeps its size and its stripe size.
    pub volume: Options,
    /// The uuid of a new store, for tests that compare bytes. If `None`, the store gets a random uuid.
    pub uuid: Option<[u8; 16]>,
}

impl Store {
    /// Creates a store, or opens the existing store if `how.existing` allows this and `description` fits the existing
    /// store. Returns the store, and `true` if the store is new.
    ///
    /// The caller must fill a new store: stage every record, and commit. A store without a commit cannot be opened.
    pub fn create(paths: &[impl AsRef<Path>], description: Description, how: &Create) -> Result<(Self, bool)> {
        Self::create_watched(paths, description, how, &mut |_, _| true)
    }

    /// Does what [`Store::create`] does. During the verification of [`Existing::Previous`], `progress` receives the
    /// bytes done and the total, and returns `false` to stop.
    pub fn create_watched(
        paths: &[impl AsRef<Path>],
        description: Description,
        how: &Create,
        progress: &mut Progress<'_>,
    ) -> Result<(Self, bool)> {
        description.check()?;
        let given = paths;
        let paths: Vec<PathBuf> = given.iter().map(|path| resolve(path.as_ref())).collect();
        for (given, path) in given.iter().zip(&paths) {
            check_place(path, names_folder(given.as_ref()))?;
        }
        // Reject unusable paths before any file is created.
        match look(&paths, None)? {
            // Another process may have just created the file. In that case the claim below fails.
            PathState::Empty(_) => {}
            there => drop(decide(&there, how.existing, &paths)?),
        }
        // Only a single file is created under a pending name: several files cannot be renamed at once.
        let missing = if paths.len() == 1 { Missing::MakePending(is_left) } else { Missing::MakeInFolder };
        let claim = Claim::new(&paths, missing)?;
        // Look again: another process may have changed the files before the claim locked them.
        let there = if claim.is_pending() { PathState::Nothing } else { look(&paths, Some(&claim))? };
        if let Some(label) = decide(&there, how.existing, &paths)? {
            let fits = |found: &Description| match found.difference(&description) {
                None => Ok(()),
                Some(difference) => {
                    let name = paths[0].display();
                    Err(Error::Invalid(format!(
                        "the store at {name} does not fit: {difference}; nothing was changed. Resume with the model \
                         and the optimizer of this store, or pass existing=\"replace\" to overwrite it with a new store"
                    )))
                }
            };
            let (store, roots) = Self::prepare_claimed(claim, &label, how)?;
            store.settle(&roots, how, &fits, progress)?;
            return Ok((store, false));
        }
        let stripe_bytes = how.volume.stripe_bytes.unwrap_or(STRIPE_BYTES_DEFAULT);
        let devices = Devices { count: paths.len() as u32, stripe_bytes };
        let layout = Layout::new(&description, devices)?;
        let mut options = how.volume.clone();
        // Use existing files and devices to their end, where the second labels belong.
        options.size_bytes = Some(layout.total_bytes().max(devices.volume_bytes(&paths)));
        options.private = Some(Privacy::Fresh);
        let former = match there {
            PathState::Store(label) => Some(label),
            PathState::Nothing | PathState::Empty(_) | PathState::Unfilled | PathState::Unusable(_) => None,
        };
        let volume = claim.open(&options)?;
        let uuid = how.uuid.map_or_else(random_uuid, Ok)?;
        // If `format` fails, dropping the volume removes the files that the claim created, while these files are still
        // locked.
        let store = Self::format(volume, (devices, former), description, uuid, how)?;
        store.volume.keep();
        Ok((store, true))
    }

    /// Opens an existing store.
    pub fn open(paths: &[impl AsRef<Path>], how: &Create) -> Result<Self> {
        Self::open_watched(paths, how, &mut |_, _| true)
    }

    /// Does what [`Store::open`] does. During the verification of [`Existing::Previous`], `progress` receives the bytes
    /// done and the total, and returns `false` to stop.
    pub fn open_watched(paths: &[impl AsRef<Path>], how: &Create, progress: &mut Progress<'_>) -> Result<Self> {
        let (store, roots) = Self::prepare_at(paths, how)?;
        store.settle(&roots, how, &|_| Ok(()), progress)?;
        Ok(store)
    }

    /// Opens the files of an existing store and reads the store's roots, but loads no commit. If no commit is made,
    /// dropping the store restores the length and mode that the files had before.
    pub(crate) fn prepare_at(paths: &[impl AsRef<Path>], how: &Create) -> Result<(Self, Roots)> {
        let paths: Vec<PathBuf> = paths.iter().map(|path| resolve(path.as_ref())).collect();
        require_store(&look(&paths, None)?, &paths)?;
        let claim = Claim::new(&paths, Missing::Refuse)?;
        let label = require_store(&look(&paths, None)?, &paths)?;
        Self::prepare_claimed(claim, &label, how)
    }

    fn prepare_claimed(claim: Claim, label: &Label, how: &Create) -> Result<(Self, Roots)> {
        let mut options = how.volume.clone();
        options.size_bytes = None;
        options.stripe_bytes = Some(label.devices.stripe_bytes);
        options.private = Some(Privacy::Existing);
        Self::prepare(claim.open(&options)?, label.devices, how)
    }

    /// Creates a store on an open volume of simulated devices.
    #[cfg(feature = "sim")]
    pub fn create_on(volume: Volume, stripe_bytes: u64, description: Description, how: &Create) -> Result<Self> {
        description.check()?;
        let devices = Devices { count: volume.devices().len() as u32, stripe_bytes };
        let uuid = how.uuid.map_or_else(random_uuid, Ok)?;
        Self::format(volume, (devices, None), description, uuid, how)
    }

    /// Opens a store on an open volume of simulated devices.
    #[cfg(feature = "sim")]
    pub fn open_on(volume: Volume, stripe_bytes: u64, how: &Create) -> Result<Self> {
        let (store, roots) = Self::prepare_on(volume, stripe_bytes, how)?;
        store.settle(&roots, how, &|_| Ok(()), &mut |_, _| true)?;
        Ok(store)
    }

    #[cfg(feature = "sim")]
    pub(crate) fn prepare_on(volume: Volume, stripe_bytes: u64, how: &Create) -> Result<(Self, Roots)> {
        let devices = Devices { count: volume.devices().len() as u32, stripe_bytes };
        Self::prepare(volume, devices, how)
    }

    /// Writes the labels, marks and descriptions of a new store, but no root: the store cannot be opened before its
    /// first commit.
    ///
    /// The label of device 0 is written before the rest of the new store. So if the process is killed in this function,
    /// the devices have the former store, or are blank, or have a store that counts as unfinished
    /// ([`Error::Unfilled`]).
    fn format(
        volume: Volume,
        (devices, former): (Devices, Option<Label>),
        description: Description,
        uuid: Uuid,
        how: &Create,
    ) -> Result<Self> {
        let layout = Layout::new(&description, devices)?;
        if volume.size_bytes() < layout.total_bytes() {
            let (needed, size) = (layout.total_bytes(), volume.size_bytes());
            return Err(Error::Invalid(format!(
                "the store needs {needed} bytes, but the volume has only {size}: use larger devices"
            )));
        }
        let former = former.map_or_else(|| labelled_before(&volume, devices), |label| Ok(Some(label)))?;
        let store = Self::new(volume, uuid, description, layout, how)?;
        let flush = || store.volume.flush(Wait::forever());
        // First overwrite the former store's roots with marks. The former store's second labels may stay on the
        // devices, and an opening prefers second labels whose store has a root. Overwrite the newest root last: if the
        // process is killed before that, this root still names the former store's last commit.
        if let Some(label) = former {
            let mut pages = former_root_pages(&store.volume, &label, devices);
            pages.sort_by_key(|&(generation, _)| generation);
            for (_, offset) in pages {
                store.put(offset, &root::mark(&label.uuid))?;
                flush()?;
            }
        }
        // First label only device 0. As long as both root pages are blank, `was_begun` accepts that the other devices
        // have no labels.
        store.put_first_labels(0..1)?;
        flush()?;
        store.put_first_labels(1..devices.count)?;
        flush()?;
        for slot in 0..2 {
            store.mark_no_root(slot)?;
        }
        flush()?;
        for offset in store.layout.places.description {
            store.put(offset, &store.description.encode())?;
        }
        store.put_second_labels()?;
        flush()?;
        Ok(store)
    }

    /// Reads the labels, roots and description of an open volume. Returns a store with no commit loaded, and the roots.
    fn prepare(volume: Volume, devices: Devices, how: &Create) -> Result<(Self, Roots)> {
        let path: Arc<Path> =
            volume.devices().first().map_or(Path::new("").into(), |device| device.path.as_path().into());
        let uuid = read_store_uuid(&volume, devices)?;
        let (size, roots_end) = (volume.size_bytes(), devices.root_offset(1) + PAGE_BYTES);
        if size < roots_end {
            let why = format!(
                "it has {size} bytes, but its roots end at {roots_end}: it was truncated, and there is no commit to \
                 open: {KEEP}"
            );
            return Err(Error::corrupt(&path, "the store", (size, roots_end - size), why));
        }
        let roots = Roots::read(&volume, devices, &uuid, &path);
        let root = roots.any()?;
        if let Err(unread) = root.known() {
            return refused(&path, &Malformed::from(unread));
        }
        let description = described(&volume, &root, &path)?;
        let layout = Layout::placed(&description, devices, root.places)?.map_err(|why| {
            Error::corrupt(&path, "the root", (devices.root_offset(root.generation & 1), PAGE_BYTES), why)
        })?;
        if volume.size_bytes() < layout.end() {
            let (needed, size) = (layout.end(), volume.size_bytes());
            let why = format!(
                "the store needs {needed} bytes, but has only {size}: it was truncated. Restore it from a copy"
            );
            return Err(Error::corrupt(&path, "the store", (size, needed - size), why));
        }
        Ok((Self::new(volume, uuid, description, layout, how)?, roots))
    }

    /// Reads the table of the commit of `root` into the index, then reads the log.
    pub(crate) fn load_table(&self, root: &Root) -> Result<()> {
        if let Err(unread) = root.known() {
            return refused(&self.path, &Malformed::from(unread));
        }
        let (slot, pages) = ((root.generation & 1) as usize, self.sections.pages());
        let whole = (self.layout.places.table[slot], pages * PAGE_BYTES);
        if root.table_bytes != whole.1 {
            let why =
                format!("the root says that it has {} bytes, but the description says {}", root.table_bytes, whole.1);
            return Err(self.corrupt("the table", whole, why));
        }
        let mut index = self.index.lock();
        (index.generation, index.found_generation) = (root.generation, root.generation);
        (index.root_is_unclosed, index.root_generation, index.run) = (root.is_unclosed, root.generation, root.run);
        let Description { user_bytes_max, hyperparameters_bytes_max, .. } = self.description;
        let mut texts = [user_bytes_max, hyperparameters_bytes_max].map(|room| Vec::with_capacity(room as usize));
        let pages_at_once = CATALOG_CHUNK_BYTES as u64 / PAGE_BYTES;
        for start in (0..pages).step_by(pages_at_once as usize) {
            let into = self.scratch.part((pages - start).min(pages_at_once) * PAGE_BYTES)?;
            let from = self.layout.places.table[slot] + start * PAGE_BYTES;
            let read = Transfer::begun(self.volume.read(into, from))?.wait()?;
            for (page, bytes) in (start..).zip(bytes_of(&read).chunks_exact(PAGE_BYTES as usize)) {
                let place = (self.layout.places.table[slot] + page * PAGE_BYTES, PAGE_BYTES);
                let sum = self.sections.decode(&mut index, &mut texts, page, (&self.uuid, bytes));
                let sum = sum.map_err(|why| self.corrupt(format!("page {page} of the table"), place, why))?;
                index.page_sums[slot][page as usize] = sum;
                index.dirty[slot].set(page as usize, false);
            }
        }
        let sum = table_checksum(&self.uuid, root.generation, &index.page_sums[slot]);
        if sum != root.table_checksum {
            let why = "some of its pages do not belong to the commit of the root";
            return Err(self.corrupt("the table", whole, why));
        }
        let text = |bytes: Vec<u8>, what: &str| {
            String::from_utf8(bytes).map_err(|_| self.corrupt(what, whole, "it is not UTF-8"))
        };
        let [user, hyperparameters] = texts;
        index.user = text(user, "the user's value")?;
        index.hyperparameters = text(hyperparameters, "the hyperparameters")?;
        drop(index);
        self.load_log(root)
    }

    /// Writes `bytes` of the catalog at `offset`, and zeros up to the end of the last page.
    pub(crate) fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        for (index, chunk) in (0_u64..).zip(bytes.chunks(CATALOG_CHUNK_BYTES)) {
            let at = offset + index * CATALOG_CHUNK_BYTES as u64;
            Transfer::begun(self.volume.write(self.padded(chunk)?, at))?.wait()?;
        }
        Ok(())
    }

    /// Copies a chunk of the catalog into memory for a write, and adds zeros up to the end of the chunk's last page.
    pub(crate) fn padded(&self, chunk: &[u8]) -> Result<Shared> {
        let mut lease = self.scratch.lease(Wait::forever())?;
        let padded = chunk.len().next_multiple_of(PAGE_BYTES as usize);
        let (used, rest) = lease.as_mut_slice()[..padded].split_at_mut(chunk.len());
        used.copy_from_slice(chunk);
        rest.fill(0);
        first(lease, padded as u64)
    }
}

/// Returns the label of the store to open, or `None` if a store is to be created.
fn decide(there: &PathState, existing: Existing, paths: &[PathBuf]) -> Result<Option<Label>> {
    match (there, existing) {
        (PathState::Nothing, Existing::Previous) => refused(&paths[0], "there is no store to open: check the path"),
        (PathState::Nothing, _) | (PathState::Empty(_), Existing::Refuse) | (_, Existing::Replace) => Ok(None),
        (PathState::Empty(path), _) => emptied(path),
        (PathState::Unusable(why), _) => refused(&paths[0], why),
        (PathState::Unfilled, _) => Err(Error::Unfilled { path: paths[0].as_path().into() }),
        (PathState::Store(_), Existing::Refuse) => Err(Error::Invalid(format!(
            "a store is there already, at {}: pass existing=\"resume\" to open it, or \
             existing=\"replace\" to overwrite it",
            paths[0].display()
        ))),
        (PathState::Store(label), Existing::Resume | Existing::Previous) => Ok(Some(*label)),
    }
}

/// Returns the label of the store at `paths`. Fails if there is no store.
fn require_store(there: &PathState, paths: &[PathBuf]) -> Result<Label> {
    let label = decide(there, Existing::Previous, paths)?;
    Ok(label.unwrap_or_else(|| unreachable!("`decide` rejects paths without a store")))
}

/// Returns the label of a former store that had the same number of devices. Reads only the first label of each device.
/// Returns `None` if no device has such a label.
fn labelled_before(volume: &Volume, devices: Devices) -> Result<Option<Label>> {
    for index in 0..devices.count {
        let found = label::read(&bytes_at(volume, devices.label_offset(index), PAGE_BYTES)?);
        if let Found::Label(label) = found
            && label.devices.count == devices.count
        {
            return Ok(Some(label));
        }
    }
    Ok(None)
}

/// For each root page of a former store, returns the generation of its root (0 if it has no whole root), and the offset
/// of the page. Leaves out a page that is outside the volume.
fn former_root_pages(volume: &Volume, label: &Label, devices: Devices) -> Vec<(u64, u64)> {
    let offsets = [0, 1].map(|slot| {
        let (device, offset) = label.devices.on_device(label.devices.root_offset(slot));
        devices.in_volume(device, offset)
    });
    let generation = |offset| match root::read(&bytes_at(volume, offset, PAGE_BYTES).ok()?, &label.uuid) {
        Ok(root::Found::Root(root)) => Some(root.generation),
        _ => None,
    };
    let reached = offsets.into_iter().filter(|offset| offset + PAGE_BYTES <= volume.size_bytes());
    reached.map(|offset| (generation(offset).unwrap_or(0), offset)).collect()
}

/// Reads `nbytes` of the volume from `offset`, a multiple of [`PAGE_BYTES`]. The caller bounds `nbytes`.
///
/// Reads through aligned memory: an unaligned read would start the volume's copy threads, which stay until the volume
/// closes.
pub(crate) fn bytes_at(volume: &Volume, offset: u64, nbytes: u64) -> Result<Vec<u8>> {
    let scratch = Scratch::new(CATALOG_CHUNK_BYTES, 1, "store catalog")?;
    let mut bytes = Vec::with_capacity(nbytes as usize);
    while (bytes.len() as u64) < nbytes {
        let from = offset + bytes.len() as u64;
        let wanted = (nbytes - bytes.len() as u64).min(CATALOG_CHUNK_BYTES as u64);
        let whole = wanted.next_multiple_of(PAGE_BYTES).min(volume.size_bytes().saturating_sub(from));
        let read = Transfer::begun(volume.read(scratch.part(whole.max(wanted))?, from))?.wait()?;
        bytes.extend_from_slice(&bytes_of(&read)[..wanted as usize]);
    }
    Ok(bytes)
}

fn random_uuid() -> Result<Uuid> {
    let mut uuid = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut uuid));
    read.map_err(|error| Error::Invalid(format!("/dev/urandom cannot be read for the uuid of the store: {error}")))?;
    Ok(uuid)
}
