//! Models a run, for all tests of stores. [`after`] returns the contents of all records after a commit.
//!
//! The number of a commit determines what the commit changes. [`commit`] makes the commit on a store, with a gradient
//! log or without a gradient log. [`check`] compares a store with [`after`].

use std::{
    cell::UnsafeCell,
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use memascend_mem::Wait;
use memascend_nvme::{
    Options, Volume,
    sim::{self, Faults, Rng, SimDisk},
};
use memascend_store::{
    COMPACT, Commit, Create, Description, Dtype, Error, Existing, Format, Kind, LoggedRule, LoggedUpdate, Record,
    StateTensor, StepHead, StepWrite, Store,
};

/// The errno of a failed device.
pub(crate) const EIO: i32 = 5;
pub(crate) const STRIPE: u64 = 8192;
pub(crate) const UUID: [u8; 16] = *b"0123456789abcdef";
/// The last commit of the model.
pub(crate) const COMMITS: u64 = 80;
/// The records whose gradients may be logged, each with the dtype of its gradients. Some of these records have several
/// chunks, one element, no element, or gradients of another dtype than the values. One record is compact.
pub(crate) const LOGGED: [(usize, Dtype); 5] =
    [(0, Dtype::Bf16), (1, Dtype::F32), (3, Dtype::F32), (5, Dtype::Bf16), (7, Dtype::Bf16)];
/// The records that each step stages completely, without a gradient in the log.
const STREAMED: [usize; 2] = [4, 6];

pub(crate) fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

// --- records and their contents ---------------------------------------------------------

pub(crate) fn tensor(name: &str, dtype: Dtype, shape: &[u64], grain: u32) -> StateTensor {
    StateTensor { name: name.into(), dtype, shape: shape.into(), grain }
}

pub(crate) fn record(name: &str, unit: u32, dtype: Dtype, shape: &[u64], state: &[&str]) -> Record {
    let state = state.iter().map(|name| tensor(name, Dtype::F32, shape, 1)).collect();
    let spill = Some(Dtype::F32);
    let (name, shape, order, format) = (name.into(), shape.into(), vec![], Format::Plain);
    Record { name, kind: Kind::Parameter, unit, dtype, shape, order, spill, format, state }
}

/// Describes a store with records of every kind: records with several chunks, one with a single element, one without
/// state, one whose state has other shapes than the values, one without elements, a buffer, and a compact record.
pub(crate) fn description() -> Description {
    let adam = ["master", "exp_avg", "exp_avg_sq"];
    let mut odd = record("odd", 1, Dtype::Bf16, &[30, 70], &["exp_avg"]);
    odd.state.push(tensor("row", Dtype::F32, &[30], 0));
    odd.state.push(tensor("column", Dtype::F64, &[70], 0));
    let mut buffer = record("running_mean", 2, Dtype::F32, &[3], &[]);
    buffer.kind = Kind::Buffer;
    let mut compact = record("compact", 2, Dtype::Bf16, &[40, 60], &[]);
    compact.state = COMPACT.map(|(name, dtype)| tensor(name, dtype, &[40, 60], 1)).to_vec();
    Description {
        chunk_elements: 2048,
        user_bytes_max: 64,
        hyperparameters_bytes_max: 5000,
        optimizer: "AdamW".into(),
        units: vec!["embed".into(), "block".into(), "head".into()],
        records: vec![
            record("weight", 0, Dtype::Bf16, &[5, 1000], &adam),
            record("scale", 0, Dtype::F32, &[], &["momentum"]),
            record("frozen", 1, Dtype::Bf16, &[100], &[]),
            record("expert", 1, Dtype::F16, &[2049], &adam),
            odd,
            record("nothing", 1, Dtype::Bf16, &[0, 4], &adam),
            buffer,
            compact.compact_if_so(),
        ],
        first_elements: vec![],
    }
}

/// The contents of a record: the bytes of its extents, in whole pages, and the number of updates that it has had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) extents: Vec<Vec<u8>>,
    pub(crate) step: u64,
}

/// The contents of all records.
pub(crate) type State = BTreeMap<usize, Contents>;

/// The kind of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// A step in which most records of `LOGGED` have a gradient.
    Step,
    /// A commit that gives new contents to some records, without an update.
    Written,
    /// A step in which no record of `LOGGED` has a gradient.
    Idle,
}

fn act(commit: u64) -> Act {
    match commit % 9 {
        4 => Act::Written,
        7 => Act::Idle,
        _ => Act::Step,
    }
}

fn has_gradient(record: usize, commit: u64) -> bool {
    act(commit) == Act::Step && (record == 0 || !(commit + record as u64).is_multiple_of(3))
}

/// Returns true if commit number `commit` writes the record. This commit must be of the kind `Act::Written`.
fn is_written(record: usize, commit: u64) -> bool {
    [0, 4].contains(&record) || commit.is_multiple_of(2) && record == 7
}

/// Returns pseudo-random bytes that the arguments determine.
pub(crate) fn content(record: usize, extent: u32, salt: u64, nbytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(salt << 32 ^ (record as u64) << 16 ^ u64::from(extent));
    let mut bytes: Vec<u8> = Vec::with_capacity(nbytes + 8);
    while bytes.len() < nbytes {
        bytes.extend(rng.bits().to_le_bytes());
    }
    bytes.truncate(nbytes);
    bytes
}

/// Returns the bytes of a record's gradient in a commit.
pub(crate) fn gradient(store: &Store, record: usize, dtype: Dtype, commit: u64) -> Vec<u8> {
    content(record, 77, commit, size(store.description().records[record].elements() * dtype.bytes()))
}

/// Applies an update to the contents of a record. The result of several updates depends on their order.
pub(crate) fn update(contents: &mut Contents, gradient: &[u8], factor: u8) {
    contents.step += 1;
    for extent in &mut contents.extents {
        for (byte, place) in extent.iter_mut().zip(0..) {
            let of: u8 = gradient.get(place % gradient.len().max(1)).copied().unwrap_or(1);
            *byte = byte.wrapping_mul(31) ^ of.wrapping_mul(factor);
        }
    }
}

fn factor(commit: u64) -> u8 {
    (commit % 250) as u8 | 1
}

/// Returns contents of a record whose bytes are pseudo-random. `salt` determines the bytes.
pub(crate) fn contents(store: &Store, record: usize, salt: u64, step: u64) -> Contents {
    let of = |extent| content(record, extent, salt, extent_bytes(store, record, extent));
    Contents { extents: (0..store.layout().extents_of(record)).map(of).collect(), step }
}

pub(crate) fn extent_bytes(store: &Store, record: usize, extent: u32) -> usize {
    size(store.layout().extent(store.description(), record, extent).bytes())
}

/// Returns the contents of all records after each commit of the model.
fn states() -> Vec<State> {
    let store = created(&disks(1));
    let records = 0..store.description().records.len();
    let mut states: Vec<State> = vec![records.map(|record| (record, contents(&store, record, 0, 0))).collect()];
    for commit in 1..=COMMITS {
        let mut state = states[states.len() - 1].clone();
        for (&record, of) in &mut state {
            let dtype = LOGGED.iter().find(|(logged, _)| *logged == record).map(|(_, dtype)| *dtype);
            match dtype {
                _ if act(commit) == Act::Written && is_written(record, commit) => {
                    *of = contents(&store, record, commit << 20, of.step);
                }
                Some(dtype) if has_gradient(record, commit) => {
                    update(of, &gradient(&store, record, dtype, commit), factor(commit));
                }
                None if act(commit) != Act::Written && STREAMED.contains(&record) => {
                    *of = contents(&store, record, commit, of.step + 1);
                }
                _ => {}
            }
        }
        states.push(state);
    }
    states
}

/// Returns the contents of all records after a commit.
pub(crate) fn after(commit: u64) -> &'static State {
    static STATES: OnceLock<Vec<State>> = OnceLock::new();
    &STATES.get_or_init(states)[size(commit)]
}

fn user(commit: u64) -> String {
    format!("{{\"seen\": {commit}}}")
}

// --- commits and checks ------------------------------------------------------------------

/// Stages all extents of a record and waits for the writes.
pub(crate) fn stage(store: &Store, record: usize, contents: &Contents) -> Result<(), Error> {
    store.begin(record, contents.step, Wait::forever())?;
    let mut writes = Vec::new();
    for (extent, bytes) in (0..).zip(&contents.extents) {
        writes.push(store.stage(record, extent, bytes.clone())?);
    }
    writes.into_iter().try_for_each(|write| write.wait().map(drop))
}

/// Appends a gradient to the log. Returns the writes, or `None` if the log does not accept the gradient: the log has no
/// space, or `Store::keep_log` has not admitted the record.
pub(crate) fn append<'a>(
    store: &'a Store,
    record: usize,
    dtype: Dtype,
    bytes: &[u8],
) -> Result<Option<Vec<StepWrite<'a, Vec<u8>>>>, Error> {
    if !store.begin_append(record, dtype)? {
        return Ok(None);
    }
    let chunk_bytes = store.description().chunk_elements as usize * size(dtype.bytes());
    let write = |(chunk, part): (u32, &[u8])| {
        let mut part = part.to_vec();
        // Pads the chunk to whole pages with bytes that are not 0: no code may use the padding.
        part.resize(part.len().next_multiple_of(4096), 0xaa);
        store.append(record, chunk, part)
    };
    (0..).zip(bytes.chunks(chunk_bytes)).map(write).collect::<Result<_, _>>().map(Some)
}

/// Makes commit number `commit` of the model. The store must be at the previous commit. If the log does not accept a
/// record's gradient, the commit stages the whole record.
pub(crate) fn commit(store: &Store, commit: u64) -> Result<(), Error> {
    let (before, after) = (after(commit.saturating_sub(1)), after(commit));
    let hyperparameters = Some("x".repeat(size(commit * 700 % 5000)));
    let mut said = Commit { step: commit, user: Some(user(commit)), hyperparameters, ..Commit::default() };
    match act(commit) {
        _ if commit == 0 => after.iter().try_for_each(|(&record, contents)| stage(store, record, contents))?,
        Act::Written => {
            for (&record, contents) in after.iter().filter(|(record, _)| is_written(**record, commit)) {
                stage(store, record, contents)?;
            }
        }
        Act::Idle | Act::Step => {
            let numbers = vec![("factor".into(), u64::from(factor(commit)))];
            let rule = LoggedRule { name: "toy".into(), arithmetic: 1, numbers, factors: vec![1.0_f32.to_bits()] };
            let (mut updates, mut writes, mut whole) = (Vec::new(), Vec::new(), STREAMED.to_vec());
            for (record, dtype) in LOGGED.into_iter().filter(|&(record, _)| has_gradient(record, commit)) {
                match append(store, record, dtype, &gradient(store, record, dtype, commit))? {
                    Some(of_record) => {
                        writes.extend(of_record);
                        updates.push(LoggedUpdate { record, rule: 0, step: before[&record].step + 1 });
                    }
                    None => whole.push(record),
                }
            }
            for &record in &whole {
                stage(store, record, &after[&record])?;
            }
            for record in store.due() {
                if !whole.contains(&record) {
                    stage(store, record, &before[&record])?;
                }
            }
            writes.into_iter().try_for_each(|write| write.wait().map(drop))?;
            said.log = Some(StepHead { rules: vec![rule], updates });
        }
    }
    store.commit(said, Wait::forever()).map(drop)
}

/// Appends wrong gradients and stages wrong bytes for some records, and then discards the step. A training loop also
/// discards staged data if it skips a step.
pub(crate) fn abandon(store: &Store, at: u64) -> Result<(), Error> {
    for (record, dtype) in [LOGGED[0], LOGGED[2]] {
        let garbage = vec![0x55; gradient(store, record, dtype, at).len()];
        match append(store, record, dtype, &garbage)? {
            Some(writes) => writes.into_iter().try_for_each(|write| write.wait().map(drop))?,
            None => stage(store, record, &contents(store, record, at ^ 0xdead, at))?,
        }
    }
    stage(store, 7, &contents(store, 7, at ^ 0xdead, at))?;
    store.discard(Wait::forever())
}

/// Returns the number of the store's commit. Panics if any byte differs from the model's state after this commit.
pub(crate) fn check(store: &Store, name: &str) -> u64 {
    let info = store.info();
    assert_eq!(info.user, user(info.step), "{name}");
    assert_eq!(info.hyperparameters.len(), size(info.step * 700 % 5000), "{name}");
    let wanted = after(info.step);
    if store.pending_replay().is_some() {
        let found = replayed(store).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(found == *wanted, "{name}: commit {}", info.step);
        return info.step;
    }
    for (&record, contents) in wanted {
        let state = store.record_state(record).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(state.step, contents.step, "{name}: record {record} at commit {}", info.step);
        for (extent, bytes) in (0..).zip(&contents.extents) {
            let read = store.read(record, extent, vec![0; bytes.len()]).and_then(memascend_store::ExtentRead::wait);
            let (found, _) = read.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(found == *bytes, "{name}: record {record}, extent {extent}");
        }
    }
    info.step
}

/// Reads every record from its live slot, and applies the gradients that are only in the log. Returns the contents of
/// all records.
pub(crate) fn replayed(store: &Store) -> Result<State, Error> {
    let replay = store.pending_replay().unwrap_or_default();
    let mut state = State::new();
    for record in 0..store.description().records.len() {
        let mut extents = Vec::new();
        for extent in 0..store.layout().extents_of(record) {
            extents.push(store.read_slot(record, extent, vec![0; extent_bytes(store, record, extent)])?.wait()?.0);
        }
        let step = store.record_state(record)?.step - replay.of(record).count() as u64;
        let mut contents = Contents { extents, step };
        for (head, logged) in replay.of(record) {
            let mut bytes = Vec::new();
            for chunk in 0..store.layout().chunks_of(record) {
                let used = store.description().elements_of_chunk(record, chunk) * size(logged.dtype.bytes());
                let read = store.read_logged(head, logged, chunk, vec![0; used.next_multiple_of(4096)])?.wait()?;
                bytes.extend(&read[..used]);
            }
            let rule = &head.rules[logged.rule as usize];
            assert_eq!((rule.name.as_str(), rule.arithmetic, rule.numbers.len()), ("toy", 1, 1));
            update(&mut contents, &bytes, u8::try_from(rule.numbers[0].1).unwrap_or(0));
            assert_eq!(contents.step, logged.step, "record {record}");
        }
        state.insert(record, contents);
    }
    Ok(state)
}

/// If a replay is pending, applies the logged gradients to the records, stages these records completely, and commits.
/// The commit ends the log.
pub(crate) fn settle(store: &Store) -> Result<(), Error> {
    let Some(replay) = store.pending_replay() else { return Ok(()) };
    let state = replayed(store)?;
    for record in replay.records() {
        stage(store, record, &state[&record])?;
    }
    store.commit(Commit { step: store.info().step, ..Commit::default() }, Wait::forever()).map(drop)
}

// --- devices and files -------------------------------------------------------------------

/// Returns devices with space for a store. A single device also has space for a log of a few steps.
pub(crate) fn disks(count: usize) -> Vec<SimDisk> {
    let bytes = if count == 1 { 640 << 10 } else { 400 << 10 };
    (0..count).map(|_| SimDisk::new(bytes)).collect()
}

/// Returns devices with space for a store and for a log of many steps.
pub(crate) fn large_disks(count: usize) -> Vec<SimDisk> {
    (0..count).map(|_| SimDisk::new((4 << 20) / count)).collect()
}

pub(crate) fn volume(disks: &[SimDisk], faults: &Faults) -> Volume {
    striped(disks, STRIPE, faults)
}

pub(crate) fn striped(disks: &[SimDisk], stripe_bytes: u64, faults: &Faults) -> Volume {
    let mut options = Options::default();
    options.stripe_bytes = Some(stripe_bytes);
    ok(sim::open(disks, faults, &options))
}

pub(crate) fn how() -> Create {
    let mut how = Create::default();
    how.uuid = Some(UUID);
    how
}

pub(crate) fn existing(existing: Existing) -> Create {
    let mut how = how();
    how.existing = existing;
    how
}

/// Creates a store, without a commit.
pub(crate) fn created(disks: &[SimDisk]) -> Store {
    created_as(disks, &how())
}

pub(crate) fn created_as(disks: &[SimDisk], how: &Create) -> Store {
    ok(Store::create_on(volume(disks, &Faults::default()), STRIPE, description(), how))
}

/// Creates a store and makes all commits from 0 to `last`.
pub(crate) fn trained(disks: &[SimDisk], last: u64) -> Store {
    let store = created(disks);
    (0..=last).for_each(|number| ok(commit(&store, number)));
    store
}

pub(crate) fn open(disks: &[SimDisk], how: &Create) -> Result<Store, Error> {
    Store::open_on(volume(disks, &Faults::default()), STRIPE, how)
}

/// Opens a store and checks it. Returns the number of its commit, or the text of the error.
pub(crate) fn opened(disks: &[SimDisk], how: &Create) -> Result<u64, String> {
    open(disks, how).map(|store| check(&store, "opened")).map_err(|error| error.to_string())
}

/// Returns copies of the devices as a loss of power may leave them.
pub(crate) fn after_loss(disks: &[SimDisk], seed: u64) -> Vec<SimDisk> {
    disks.iter().map(|disk| disk.after_power_loss(seed)).collect()
}

/// Returns new devices with the same bytes.
pub(crate) fn copies(disks: &[SimDisk]) -> Vec<SimDisk> {
    disks.iter().map(|disk| SimDisk::of(disk.bytes())).collect()
}

/// A new folder. Dropping this value removes the folder.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        // Avoids the system's temporary folder, because that folder may be on a file system in memory. A store rejects
        // such a file system.
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        drop(fs::remove_dir_all(&path));
        ok(fs::create_dir_all(&path));
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

/// Memory that is passed to an operation. A test reads it after the operation has ended. Clones share the same memory.
#[derive(Clone)]
pub(crate) struct Seen(Arc<[UnsafeCell<u8>]>);

impl Seen {
    pub(crate) fn new(nbytes: u64) -> Self {
        Self((0..nbytes).map(|_| UnsafeCell::new(0xee)).collect())
    }

    /// Returns a copy of the bytes. Call this only while no operation uses the memory.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        // SAFETY: the tests call this only after the operation that uses a clone has ended, so no write is concurrent.
        self.0.iter().map(|byte| unsafe { *byte.get() }).collect()
    }

    /// Returns the number of living clones.
    pub(crate) fn clones(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

// SAFETY: only one operation writes to the memory, and the tests read the memory after this operation has ended.
unsafe impl Send for Seen {}
// SAFETY: the tests read the memory only after the operation has ended, so no write is concurrent with another access.
unsafe impl Sync for Seen {}

// SAFETY: the `Arc` keeps the bytes at one address while any clone lives. `UnsafeCell` allows writes through a shared
// reference.
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

// --- number and order of runs ------------------------------------------------------------

/// Returns `all` if `MEMASCEND_TEST_LONG` is set, and `few` otherwise. `few` is enough for the tests that run after
/// every change.
pub(crate) fn many<T>(all: T, few: T) -> T {
    if std::env::var_os("MEMASCEND_TEST_LONG").is_some() { all } else { few }
}

/// The number of threads of [`side_by_side`]. Each thread mostly waits for a simulated device, so the number can exceed
/// the number of cores.
const LANES: usize = 4;

/// Calls `work` with every number of `range`, on several threads. Panics if a call of `work` panics.
pub(crate) fn side_by_side(range: Range<u64>, work: impl Fn(u64) + Sync) {
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

/// Calls `life` with each seed below `seeds`. The variable `MEMASCEND_SEEDS` replaces `seeds`. With `MEMASCEND_SEED`,
/// only this seed runs.
pub(crate) fn lives(seeds: u64, life: impl Fn(u64) + Sync + std::panic::RefUnwindSafe) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("MEMASCEND_SEED") {
        return life(seed);
    }
    side_by_side(0..number("MEMASCEND_SEEDS").unwrap_or(seeds), |seed| {
        let lived = std::panic::catch_unwind(|| life(seed));
        assert!(lived.is_ok(), "run it again with MEMASCEND_SEED={seed}");
    });
}
