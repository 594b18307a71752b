//! The model of a store that all of these tests share: a run whose commits are known byte by byte.
//!
//! The number of a commit says what it changes. [`commit`] carries it out on a store, with a log of gradients or without
//! one; [`check`] compares a store with what that commit left.

#![allow(clippy::allow_attributes, dead_code, reason = "each test file uses its part of it")]

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
    COMPACT, Commit, Create, Description, Dtype, Entry, Error, Existing, Format, Kind, LoggedUpdate, Rule, StateTensor,
    StepHead, StepWrite, Store,
};

pub(crate) const STRIPE: u64 = 8192;
pub(crate) const UUID: [u8; 16] = *b"0123456789abcdef";
/// The last commit that is known.
pub(crate) const COMMITS: u64 = 80;
/// Entries whose gradients may be logged, and the dtype of these: several chunks, one element, other dtypes than the
/// values', no elements, a compact one.
pub(crate) const LOGGED: [(usize, Dtype); 5] =
    [(0, Dtype::Bf16), (1, Dtype::F32), (3, Dtype::F32), (5, Dtype::Bf16), (7, Dtype::Bf16)];
/// Entries that each step writes whole.
const STREAMED: [usize; 2] = [4, 6];

pub(crate) fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

// --- what it holds ----------------------------------------------------------------------

pub(crate) fn tensor(name: &str, dtype: Dtype, shape: &[u64], grain: u32) -> StateTensor {
    StateTensor { name: name.into(), dtype, shape: shape.into(), grain }
}

pub(crate) fn entry(name: &str, unit: u32, dtype: Dtype, shape: &[u64], state: &[&str]) -> Entry {
    let state = state.iter().map(|name| tensor(name, Dtype::F32, shape, 1)).collect();
    let spill = Some(Dtype::F32);
    let (name, shape, order, format) = (name.into(), shape.into(), vec![], Format::Plain);
    Entry { name, kind: Kind::Parameter, unit, dtype, shape, order, spill, format, state }
}

/// Every kind of entry: several chunks, one element, no state, odd state, a buffer, nothing at all.
pub(crate) fn description() -> Description {
    let adam = ["master", "exp_avg", "exp_avg_sq"];
    let mut odd = entry("odd", 1, Dtype::Bf16, &[30, 70], &["exp_avg"]);
    odd.state.push(tensor("row", Dtype::F32, &[30], 0));
    odd.state.push(tensor("column", Dtype::F64, &[70], 0));
    let mut buffer = entry("running_mean", 2, Dtype::F32, &[3], &[]);
    buffer.kind = Kind::Buffer;
    let mut compact = entry("compact", 2, Dtype::Bf16, &[40, 60], &[]);
    compact.state = COMPACT.map(|(name, dtype)| tensor(name, dtype, &[40, 60], 1)).to_vec();
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
            compact.compact_if_so(),
        ],
        first_elements: vec![],
    }
}

/// An entry: its pieces, whole pages of each, and its count of updates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) pieces: Vec<Vec<u8>>,
    pub(crate) step: u64,
}

/// All entries.
pub(crate) type State = BTreeMap<usize, Contents>;

/// What a commit does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// A step: most entries have a gradient.
    Step,
    /// Values are written, without a step.
    Written,
    /// A step without any gradient of a logged entry.
    Idle,
}

fn act(commit: u64) -> Act {
    match commit % 9 {
        4 => Act::Written,
        7 => Act::Idle,
        _ => Act::Step,
    }
}

fn has_gradient(entry: usize, commit: u64) -> bool {
    act(commit) == Act::Step && (entry == 0 || !(commit + entry as u64).is_multiple_of(3))
}

/// Who is written whole by a commit without a step.
fn is_written(entry: usize, commit: u64) -> bool {
    [0, 4].contains(&entry) || commit.is_multiple_of(2) && entry == 7
}

/// Bytes that these numbers say.
pub(crate) fn content(entry: usize, piece: u32, salt: u64, nbytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(salt << 32 ^ (entry as u64) << 16 ^ u64::from(piece));
    let mut bytes: Vec<u8> = Vec::with_capacity(nbytes + 8);
    while bytes.len() < nbytes {
        bytes.extend(rng.bits().to_le_bytes());
    }
    bytes.truncate(nbytes);
    bytes
}

pub(crate) fn gradient(store: &Store, entry: usize, dtype: Dtype, commit: u64) -> Vec<u8> {
    content(entry, 77, commit, size(store.description().entries[entry].elements() * dtype.bytes()))
}

/// The arithmetic of an update: what comes out depends on the order.
pub(crate) fn update(contents: &mut Contents, gradient: &[u8], factor: u8) {
    contents.step += 1;
    for piece in &mut contents.pieces {
        for (byte, place) in piece.iter_mut().zip(0..) {
            let of: u8 = gradient.get(place % gradient.len().max(1)).copied().unwrap_or(1);
            *byte = byte.wrapping_mul(31) ^ of.wrapping_mul(factor);
        }
    }
}

fn factor(commit: u64) -> u8 {
    (commit % 250) as u8 | 1
}

/// The pieces of an entry, with bytes that the salt says.
pub(crate) fn contents(store: &Store, entry: usize, salt: u64, step: u64) -> Contents {
    let of = |piece| content(entry, piece, salt, piece_bytes(store, entry, piece));
    Contents { pieces: (0..store.layout().pieces_of(entry)).map(of).collect(), step }
}

pub(crate) fn piece_bytes(store: &Store, entry: usize, piece: u32) -> usize {
    size(store.layout().piece(store.description(), entry, piece).bytes())
}

fn states() -> Vec<State> {
    let store = created(&disks(1));
    let entries = 0..store.description().entries.len();
    let mut states: Vec<State> = vec![entries.map(|entry| (entry, contents(&store, entry, 0, 0))).collect()];
    for commit in 1..=COMMITS {
        let mut state = states[states.len() - 1].clone();
        for (&entry, of) in &mut state {
            let dtype = LOGGED.iter().find(|(logged, _)| *logged == entry).map(|(_, dtype)| *dtype);
            match dtype {
                _ if act(commit) == Act::Written && is_written(entry, commit) => {
                    *of = contents(&store, entry, commit << 20, of.step);
                }
                Some(dtype) if has_gradient(entry, commit) => {
                    update(of, &gradient(&store, entry, dtype, commit), factor(commit));
                }
                None if act(commit) != Act::Written && STREAMED.contains(&entry) => {
                    *of = contents(&store, entry, commit, of.step + 1);
                }
                _ => {}
            }
        }
        states.push(state);
    }
    states
}

/// What all entries hold after a commit.
pub(crate) fn after(commit: u64) -> &'static State {
    static STATES: OnceLock<Vec<State>> = OnceLock::new();
    &STATES.get_or_init(states)[size(commit)]
}

fn user(commit: u64) -> String {
    format!("{{\"seen\": {commit}}}")
}

// --- what is done with it ----------------------------------------------------------------

/// Stages an entry whole.
pub(crate) fn stage(store: &Store, entry: usize, contents: &Contents) -> Result<(), Error> {
    store.begin(entry, contents.step, Wait::forever())?;
    let mut writes = Vec::new();
    for (piece, bytes) in (0..).zip(&contents.pieces) {
        writes.push(store.stage(entry, piece, bytes.clone())?);
    }
    writes.into_iter().try_for_each(|write| write.wait().map(drop))
}

/// Appends a gradient; `None` where there is no room.
pub(crate) fn append<'a>(
    store: &'a Store,
    entry: usize,
    dtype: Dtype,
    bytes: &[u8],
) -> Result<Option<Vec<StepWrite<'a, Vec<u8>>>>, Error> {
    if !store.begin_append(entry, dtype)? {
        return Ok(None);
    }
    let chunk_bytes = store.description().chunk_elements as usize * size(dtype.bytes());
    let write = |(chunk, part): (u32, &[u8])| {
        let mut part = part.to_vec();
        // What fills the last page is anything.
        part.resize(part.len().next_multiple_of(4096), 0xaa);
        store.append(entry, chunk, part)
    };
    (0..).zip(bytes.chunks(chunk_bytes)).map(write).collect::<Result<_, _>>().map(Some)
}

/// Carries out a commit on a store that holds what the one before left. An entry without room in the log is written whole.
pub(crate) fn commit(store: &Store, commit: u64) -> Result<(), Error> {
    let (before, after) = (after(commit.saturating_sub(1)), after(commit));
    let hyperparameters = Some("x".repeat(size(commit * 700 % 5000)));
    let mut said = Commit { step: commit, user: Some(user(commit)), hyperparameters, ..Commit::default() };
    match act(commit) {
        _ if commit == 0 => after.iter().try_for_each(|(&entry, contents)| stage(store, entry, contents))?,
        Act::Written => {
            for (&entry, contents) in after.iter().filter(|(entry, _)| is_written(**entry, commit)) {
                stage(store, entry, contents)?;
            }
        }
        Act::Idle | Act::Step => {
            let numbers = vec![("factor".into(), u64::from(factor(commit)))];
            let rule = Rule { name: "toy".into(), arithmetic: 1, numbers, factors: vec![1.0_f32.to_bits()] };
            let (mut updates, mut writes, mut whole) = (Vec::new(), Vec::new(), STREAMED.to_vec());
            for (entry, dtype) in LOGGED.into_iter().filter(|&(entry, _)| has_gradient(entry, commit)) {
                match append(store, entry, dtype, &gradient(store, entry, dtype, commit))? {
                    Some(of_entry) => {
                        writes.extend(of_entry);
                        updates.push(LoggedUpdate { entry, rule: 0, step: before[&entry].step + 1 });
                    }
                    None => whole.push(entry),
                }
            }
            for &entry in &whole {
                stage(store, entry, &after[&entry])?;
            }
            for entry in store.due() {
                if !whole.contains(&entry) {
                    stage(store, entry, &before[&entry])?;
                }
            }
            writes.into_iter().try_for_each(|write| write.wait().map(drop))?;
            said.log = Some(StepHead { rules: vec![rule], updates });
        }
    }
    store.commit(said, Wait::forever()).map(drop)
}

/// Begins some of a step and forgets it, as a skipped step does.
pub(crate) fn abandon(store: &Store, at: u64) -> Result<(), Error> {
    for (entry, dtype) in [LOGGED[0], LOGGED[2]] {
        let garbage = vec![0x55; gradient(store, entry, dtype, at).len()];
        match append(store, entry, dtype, &garbage)? {
            Some(writes) => writes.into_iter().try_for_each(|write| write.wait().map(drop))?,
            None => stage(store, entry, &contents(store, entry, at ^ 0xdead, at))?,
        }
    }
    stage(store, 7, &contents(store, 7, at ^ 0xdead, at))?;
    store.discard(Wait::forever())
}

/// Which commit a store holds; panics if it does not hold exactly that one.
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
    for (&entry, contents) in wanted {
        let state = store.entry_state(entry).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(state.step, contents.step, "{name}: entry {entry} at commit {}", info.step);
        for (piece, bytes) in (0..).zip(&contents.pieces) {
            let read = store.read(entry, piece, vec![0; bytes.len()]).and_then(memascend_store::PieceRead::wait);
            let (found, _) = read.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(found == *bytes, "{name}: entry {entry}, piece {piece}");
        }
    }
    info.step
}

/// Reads every entry as it is found, and applies what the log has of it.
pub(crate) fn replayed(store: &Store) -> Result<State, Error> {
    let replay = store.pending_replay().unwrap_or_default();
    let mut state = State::new();
    for entry in 0..store.description().entries.len() {
        let mut pieces = Vec::new();
        for piece in 0..store.layout().pieces_of(entry) {
            pieces.push(store.read_slot(entry, piece, vec![0; piece_bytes(store, entry, piece)])?.wait()?.0);
        }
        let step = store.entry_state(entry)?.step - replay.of(entry).count() as u64;
        let mut contents = Contents { pieces, step };
        for (head, logged) in replay.of(entry) {
            let mut bytes = Vec::new();
            for chunk in 0..store.layout().chunks_of(entry) {
                let used = store.description().elements_of_chunk(entry, chunk) * size(logged.dtype.bytes());
                let read = store.read_record(head, logged, chunk, vec![0; used.next_multiple_of(4096)])?.wait()?;
                bytes.extend(&read[..used]);
            }
            let rule = &head.rules[logged.rule as usize];
            assert_eq!((rule.name.as_str(), rule.arithmetic, rule.numbers.len()), ("toy", 1, 1));
            update(&mut contents, &bytes, u8::try_from(rule.numbers[0].1).unwrap_or(0));
            assert_eq!(contents.step, logged.step, "entry {entry}");
        }
        state.insert(entry, contents);
    }
    Ok(state)
}

/// Writes whole what the log has, and ends it.
pub(crate) fn settle(store: &Store) -> Result<(), Error> {
    let Some(replay) = store.pending_replay() else { return Ok(()) };
    let state = replayed(store)?;
    for entry in replay.entries() {
        stage(store, entry, &state[&entry])?;
    }
    store.commit(Commit { step: store.info().step, ..Commit::default() }, Wait::forever()).map(drop)
}

// --- where it lies -----------------------------------------------------------------------

/// Room for a store, and on one device for a log of some steps.
pub(crate) fn disks(count: usize) -> Vec<SimDisk> {
    let bytes = if count == 1 { 640 << 10 } else { 400 << 10 };
    (0..count).map(|_| SimDisk::new(bytes)).collect()
}

/// Room for a log of many steps.
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

/// A store that nothing was written to.
pub(crate) fn created(disks: &[SimDisk]) -> Store {
    created_as(disks, &how())
}

pub(crate) fn created_as(disks: &[SimDisk], how: &Create) -> Store {
    ok(Store::create_on(volume(disks, &Faults::default()), STRIPE, description(), how))
}

/// A store after a commit.
pub(crate) fn trained(disks: &[SimDisk], last: u64) -> Store {
    let store = created(disks);
    (0..=last).for_each(|number| ok(commit(&store, number)));
    store
}

pub(crate) fn open(disks: &[SimDisk], how: &Create) -> Result<Store, Error> {
    Store::open_on(volume(disks, &Faults::default()), STRIPE, how)
}

/// Opens what is left, and says which commit it is.
pub(crate) fn opened(disks: &[SimDisk], how: &Create) -> Result<u64, String> {
    open(disks, how).map(|store| check(&store, "opened")).map_err(|error| error.to_string())
}

/// The devices after a loss of power.
pub(crate) fn after_loss(disks: &[SimDisk], seed: u64) -> Vec<SimDisk> {
    disks.iter().map(|disk| disk.after_power_loss(seed)).collect()
}

/// Other devices with the same bytes.
pub(crate) fn copies(disks: &[SimDisk]) -> Vec<SimDisk> {
    disks.iter().map(|disk| SimDisk::of(disk.bytes())).collect()
}

/// A folder of its own, gone in the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        // Not in memory, where no store can be.
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

/// Memory that a test looks at after an operation has let go of it. Clones are the same memory.
#[derive(Clone)]
pub(crate) struct Seen(Arc<[UnsafeCell<u8>]>);

impl Seen {
    pub(crate) fn new(nbytes: u64) -> Self {
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

// --- how much of it ----------------------------------------------------------------------

/// All of them, or what is enough after every change: `MEMASCEND_TEST_LONG` says which.
pub(crate) fn many<T>(all: T, few: T) -> T {
    if std::env::var_os("MEMASCEND_TEST_LONG").is_some() { all } else { few }
}

/// How many pieces of work go on at a time: most of their time they wait for a simulated device.
const LANES: usize = 4;

/// Does the work of every number in a range, several at a time; a panic of any of them is a panic of this.
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

/// Lives of many seeds; `MEMASCEND_SEED` repeats one, and `MEMASCEND_SEEDS` says how many there are.
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
