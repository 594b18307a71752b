//! Trains a toy on a store whose every byte at every step is known, and checks for exactly one step.

#![allow(clippy::allow_attributes, dead_code, reason = "each test file uses its part of it")]

use std::{
    cell::UnsafeCell,
    fs,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use memascend_mem::Wait;
use memascend_nvme::{
    Options, Volume,
    sim::{self, Faults, Rng, SimDisk},
};
use memascend_store::{COMPACT, Commit, Create, Description, Dtype, Entry, Error, Format, Kind, StateTensor, Store};

pub(crate) const STRIPE: u64 = 8192;
pub(crate) const UUID: [u8; 16] = *b"0123456789abcdef";

pub(crate) fn tensor(name: &str, dtype: Dtype, shape: &[u64], grain: u32) -> StateTensor {
    StateTensor { name: name.into(), dtype, shape: shape.into(), grain }
}

pub(crate) fn entry(name: &str, unit: u32, dtype: Dtype, shape: &[u64], state: &[&str]) -> Entry {
    let state = state.iter().map(|name| tensor(name, Dtype::F32, shape, 1)).collect();
    let spill = Some(Dtype::F32);
    let (name, shape, order, format) = (name.into(), shape.into(), vec![], Format::Plain);
    Entry { name, kind: Kind::Parameter, unit, dtype, shape, order, spill, format, state }
}

fn compact(name: &str, unit: u32, shape: &[u64]) -> Entry {
    let mut compact = entry(name, unit, Dtype::Bf16, shape, &[]);
    compact.state = COMPACT.map(|(name, dtype)| tensor(name, dtype, shape, 1)).to_vec();
    compact.compact_if_so()
}

/// Every kind of entry: several chunks, one element, no state, odd state, a buffer, nothing at all.
pub(crate) fn description() -> Description {
    let adam = ["master", "exp_avg", "exp_avg_sq"];
    let mut odd = entry("odd", 1, Dtype::Bf16, &[30, 70], &["exp_avg"]);
    odd.state.push(tensor("row", Dtype::F32, &[30], 0));
    odd.state.push(tensor("column", Dtype::F64, &[70], 0));
    let mut buffer = entry("running_mean", 2, Dtype::F32, &[3], &[]);
    buffer.kind = Kind::Buffer;
    Description {
        chunk_elements: 2048,
        user_bytes_max: 64,
        hyperparameters_bytes_max: 5000,
        optimizer: "AdamW".into(),
        units: vec!["embed".into(), "block".into(), "head".into()],
        entries: vec![
            entry("weight", 0, Dtype::Bf16, &[5, 1000], &adam),
            entry("scale", 0, Dtype::F32, &[], &["momentum"]),
            entry("frozen", 1, Dtype::Bf16, &[100], &[]),
            entry("expert", 1, Dtype::F16, &[2049], &adam),
            odd,
            entry("nothing", 1, Dtype::Bf16, &[0, 4], &adam),
            buffer,
            compact("compact", 2, &[40, 60]),
        ],
        first_elements: vec![],
    }
}

/// How many updates each entry has had after `step` steps: experts get a token every other time.
pub(crate) fn updates(step: u64) -> Vec<u64> {
    vec![step, step, 0, step / 2, step, step, step, step]
}

/// What a piece of an entry holds after its update number `update`.
pub(crate) fn content(entry: usize, piece: u32, update: u64, nbytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(update << 32 ^ (entry as u64) << 16 ^ u64::from(piece));
    let mut bytes: Vec<u8> = Vec::with_capacity(nbytes + 8);
    while bytes.len() < nbytes {
        bytes.extend(rng.bits().to_le_bytes());
    }
    bytes.truncate(nbytes);
    bytes
}

pub(crate) fn user(step: u64) -> String {
    format!("{{\"seen\": {step}}}")
}

/// Stages entries as their given updates.
pub(crate) fn stage(store: &Store, entry: usize, update: u64, salt: u64) -> Result<(), Error> {
    store.begin(entry, update, Wait::forever())?;
    let mut writes = Vec::new();
    for piece in 0..store.layout().pieces_of(entry) {
        let nbytes = store.layout().piece(store.description(), entry, piece).bytes();
        let bytes = content(entry, piece, update ^ salt, usize::try_from(nbytes).unwrap_or(0));
        writes.push(store.stage(entry, piece, bytes)?);
    }
    writes.into_iter().try_for_each(|write| write.wait().map(drop))
}

/// Stages and commits one step.
pub(crate) fn step(store: &Store, step: u64) -> Result<(), Error> {
    for (entry, (before, after)) in updates(step.max(1) - 1).into_iter().zip(updates(step)).enumerate() {
        if step == 0 || before != after {
            stage(store, entry, after, 0)?;
        }
    }
    let hyperparameters = Some("x".repeat(usize::try_from(step).unwrap_or(0) * 700 % 5000));
    store.commit(Commit { step, user: Some(user(step)), hyperparameters, ..Commit::default() }, Wait::forever())?;
    Ok(())
}

/// Stages some of a step and forgets it, as a skipped step does.
pub(crate) fn abandoned(store: &Store, at: u64) -> Result<(), Error> {
    stage(store, 0, at, 0xdead)?;
    stage(store, 3, at, 0xdead)?;
    store.discard(Wait::forever())
}

/// Which step a store holds; panics if it is not exactly that one.
pub(crate) fn check(store: &Store, seed: &str) -> u64 {
    let info = store.info();
    assert_eq!(info.user, user(info.step), "{seed}");
    for (entry, update) in updates(info.step).into_iter().enumerate() {
        let state = store.entry_state(entry).unwrap_or_else(|error| panic!("{seed}: {error}"));
        assert_eq!(state.step, update, "{seed}: entry {entry} at step {}", info.step);
        for piece in 0..store.layout().pieces_of(entry) {
            let nbytes = store.layout().piece(store.description(), entry, piece).bytes();
            let nbytes = usize::try_from(nbytes).unwrap_or(0);
            let read = store.read(entry, piece, vec![0; nbytes]).unwrap_or_else(|error| panic!("{seed}: {error}"));
            let (bytes, _) = read.wait().unwrap_or_else(|error| panic!("{seed}: {error}"));
            assert!(bytes == content(entry, piece, update, nbytes), "{seed}: entry {entry}, piece {piece}");
        }
    }
    info.step
}

/// Memory that a test looks at after an operation has let go of it. Clones are the same memory.
#[derive(Clone)]
pub(crate) struct Seen(Arc<[UnsafeCell<u8>]>);

impl Seen {
    pub(crate) fn new(nbytes: usize) -> Self {
        Self((0..nbytes).map(|_| UnsafeCell::new(0xee)).collect())
    }

    /// What it holds; no operation uses it now.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        // SAFETY: the tests look when the operation that had a clone is over.
        self.0.iter().map(|byte| unsafe { *byte.get() }).collect()
    }

    /// How many have it.
    pub(crate) fn clones(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

// SAFETY: one operation writes to it, and tests look when that is over.
unsafe impl Send for Seen {}
// SAFETY: as above.
unsafe impl Sync for Seen {}

// SAFETY: the bytes stay where they are while any clone lives, and may be written to through a shared reference.
unsafe impl memascend_store::Buffer for Seen {
    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    fn as_mut_ptr(&mut self) -> NonNull<u8> {
        NonNull::from(&*self.0).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// A folder of its own, gone in the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        // Not in memory, where no store can be.
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        drop(fs::remove_dir_all(&path));
        fs::create_dir_all(&path).unwrap_or_else(|error| panic!("{error}"));
        Self(path)
    }

    pub(crate) fn paths(&self, count: usize) -> Vec<PathBuf> {
        (0..count).map(|index| self.0.join(format!("device-{index}"))).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

pub(crate) fn disks(count: usize) -> Vec<SimDisk> {
    let bytes = if count == 1 { 640 << 10 } else { 400 << 10 };
    (0..count).map(|_| SimDisk::new(bytes)).collect()
}

pub(crate) fn volume(disks: &[SimDisk], faults: &Faults) -> Volume {
    let mut options = Options::default();
    options.stripe_bytes = Some(STRIPE);
    sim::open(disks, faults, &options).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn how() -> Create {
    let mut how = Create::default();
    how.uuid = Some(UUID);
    how
}

pub(crate) fn open(disks: &[SimDisk], how: &Create) -> Result<Store, Error> {
    Store::open_on(volume(disks, &Faults::default()), STRIPE, how)
}

/// All of them, or what is enough after every change: `MEMASCEND_TEST_LONG` says which.
pub(crate) fn many<T>(all: T, few: T) -> T {
    if std::env::var_os("MEMASCEND_TEST_LONG").is_some() { all } else { few }
}

/// How many pieces of work go on at a time: most of their time they wait for a simulated device.
const LANES: usize = 4;

/// Does the work of every number in a range, several at a time; a panic of any of them is a panic of this.
pub(crate) fn side_by_side(range: std::ops::Range<u64>, work: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(range.start);
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= range.end {
                        return;
                    }
                    work(number);
                }
            });
        }
    });
}
