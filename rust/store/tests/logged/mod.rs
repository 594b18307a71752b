//! Trains a toy whose entries are held in memory and logged, and knows what each commit of it is worth.

#![allow(clippy::allow_attributes, dead_code, reason = "each test file uses its part of it")]

use std::collections::BTreeMap;

use memascend_mem::Wait;
use memascend_store::{Commit, Dtype, Error, Rule, StepHead, StepWrite, Store, Update};

use crate::toy;

/// Entries whose newest state is in memory alone, and the dtype of their gradients: several chunks, one element, other
/// dtypes than the values', no elements, a compact one.
pub(crate) const HELD: [(usize, Dtype); 5] =
    [(0, Dtype::Bf16), (1, Dtype::F32), (3, Dtype::F32), (5, Dtype::Bf16), (7, Dtype::Bf16)];
/// Entries that are written each step.
const STREAMED: [usize; 2] = [4, 6];

/// An entry: its pieces, whole pages of each, and its count of updates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) pieces: Vec<Vec<u8>>,
    pub(crate) step: u64,
}

/// All entries.
pub(crate) type State = BTreeMap<usize, Held>;

/// What a commit does, which its number alone says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// A step: most entries have a gradient.
    Step,
    /// Values are written, without a step.
    Written,
    /// A step without any gradient of a held entry.
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
    act(commit) == Act::Step && !(commit + entry as u64).is_multiple_of(3)
}

/// Who is written whole by a commit without a step.
fn is_written(entry: usize, commit: u64) -> bool {
    [0, 4].contains(&entry) || commit.is_multiple_of(2) && entry == 7
}

pub(crate) fn gradient(store: &Store, entry: usize, dtype: Dtype, commit: u64) -> Vec<u8> {
    let used = store.description().entries[entry].elements() * dtype.bytes();
    toy::content(entry, 77, commit, usize::try_from(used).unwrap_or(0))
}

/// The arithmetic: what comes out depends on the order.
pub(crate) fn update(held: &mut Held, gradient: &[u8], factor: u8) {
    held.step += 1;
    for piece in &mut held.pieces {
        for (byte, place) in piece.iter_mut().zip(0..) {
            let of: u8 = gradient.get(place % gradient.len().max(1)).copied().unwrap_or(1);
            *byte = byte.wrapping_mul(31) ^ of.wrapping_mul(factor);
        }
    }
}

fn factor(commit: u64) -> u8 {
    (commit % 250) as u8 | 1
}

fn pieces_of(store: &Store, entry: usize, salt: u64) -> Vec<Vec<u8>> {
    let of = |piece| {
        let nbytes = store.layout().piece(store.description(), entry, piece).bytes();
        toy::content(entry, piece, salt, usize::try_from(nbytes).unwrap_or(0))
    };
    (0..store.layout().pieces_of(entry)).map(of).collect()
}

/// What all entries hold after each commit, up to a number.
pub(crate) fn states(store: &Store, commits: u64) -> Vec<State> {
    let entries = store.description().entries.len();
    let first: State =
        (0..entries).map(|entry| (entry, Held { pieces: pieces_of(store, entry, 0), step: 0 })).collect();
    let mut states = vec![first];
    for commit in 1..=commits {
        let mut state = states[states.len() - 1].clone();
        for (&entry, held) in &mut state {
            let dtype = HELD.iter().find(|(held, _)| *held == entry).map(|(_, dtype)| *dtype);
            match dtype {
                _ if act(commit) == Act::Written && is_written(entry, commit) => {
                    held.pieces = pieces_of(store, entry, commit << 20);
                }
                Some(dtype) if has_gradient(entry, commit) => {
                    update(held, &gradient(store, entry, dtype, commit), factor(commit));
                }
                None if act(commit) != Act::Written && STREAMED.contains(&entry) => {
                    *held = Held { pieces: pieces_of(store, entry, commit), step: held.step + 1 };
                }
                _ => {}
            }
        }
        states.push(state);
    }
    states
}

/// Stages an entry whole.
pub(crate) fn stage(store: &Store, entry: usize, held: &Held) -> Result<(), Error> {
    store.begin(entry, held.step, Wait::forever())?;
    let mut writes = Vec::new();
    for (piece, bytes) in (0..).zip(&held.pieces) {
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
    let chunk_bytes = store.description().chunk_elements as usize * usize::try_from(dtype.bytes()).unwrap_or(1);
    let write = |(chunk, part): (u32, &[u8])| {
        let mut part = part.to_vec();
        // What fills the last page is anything.
        part.resize(part.len().next_multiple_of(4096), 0xaa);
        store.append(entry, chunk, part)
    };
    (0..).zip(bytes.chunks(chunk_bytes)).map(write).collect::<Result<_, _>>().map(Some)
}

/// What the entries hold after a commit.
pub(crate) fn after(states: &[State], commit: u64) -> &State {
    &states[usize::try_from(commit).unwrap_or(usize::MAX)]
}

/// Carries out a commit of a run whose entries hold what they did after the one before. Whoever has no room in the log is
/// written whole.
pub(crate) fn commit(store: &Store, states: &[State], commit: u64) -> Result<(), Error> {
    let (before, after) = (after(states, commit.saturating_sub(1)), after(states, commit));
    let mut said = Commit { step: commit, user: Some(toy::user(commit)), ..Commit::default() };
    match act(commit) {
        _ if commit == 0 => after.iter().try_for_each(|(&entry, held)| stage(store, entry, held))?,
        Act::Written => {
            for (&entry, held) in after.iter().filter(|(entry, _)| is_written(**entry, commit)) {
                stage(store, entry, held)?;
            }
        }
        Act::Idle | Act::Step => {
            let rule = Rule {
                name: "toy".into(),
                arithmetic: 1,
                numbers: vec![("factor".into(), u64::from(factor(commit)))],
                factors: vec![1.0_f32.to_bits()],
            };
            let (mut updates, mut writes, mut whole) = (Vec::new(), Vec::new(), Vec::new());
            for (entry, dtype) in HELD {
                if has_gradient(entry, commit) {
                    match append(store, entry, dtype, &gradient(store, entry, dtype, commit))? {
                        Some(of_entry) => {
                            writes.extend(of_entry);
                            updates.push(Update { entry, rule: 0, step: before[&entry].step + 1 });
                        }
                        None => whole.push(entry),
                    }
                }
            }
            for entry in STREAMED {
                stage(store, entry, &after[&entry])?;
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

/// Which commit a store holds.
pub(crate) fn committed(store: &Store) -> u64 {
    let info = store.info();
    assert_eq!(info.user, toy::user(info.step));
    info.step
}

/// Reads every entry as it is found, and applies what the log has of it.
pub(crate) fn replayed(store: &Store) -> Result<State, Error> {
    let replay = store.pending_replay().unwrap_or_default();
    let mut state = State::new();
    for entry in 0..store.description().entries.len() {
        let mut pieces = Vec::new();
        for piece in 0..store.layout().pieces_of(entry) {
            let nbytes = store.layout().piece(store.description(), entry, piece).bytes();
            let room = vec![0; usize::try_from(nbytes).unwrap_or(0)];
            pieces.push(store.read_slot(entry, piece, room)?.wait()?.0);
        }
        let count = replay.of(entry).count() as u64;
        let step = store.entry_state(entry)?.step - count;
        let mut held = Held { pieces, step };
        for (head, record) in replay.of(entry) {
            let mut bytes = Vec::new();
            for chunk in 0..store.layout().chunks_of(entry) {
                let elements = store.description().elements_of_chunk(entry, chunk);
                let used = elements * usize::try_from(record.dtype.bytes()).unwrap_or(0);
                let read = store.read_record(head, record, chunk, vec![0; used.next_multiple_of(4096)])?.wait()?;
                bytes.extend(&read[..used]);
            }
            let rule = &head.rules[record.rule as usize];
            assert_eq!((rule.name.as_str(), rule.arithmetic, rule.numbers.len()), ("toy", 1, 1));
            update(&mut held, &bytes, u8::try_from(rule.numbers[0].1).unwrap_or(0));
            assert_eq!(held.step, record.step, "entry {entry}");
        }
        state.insert(entry, held);
    }
    Ok(state)
}

/// Writes whole what the log has, and ends it.
pub(crate) fn settled(store: &Store, state: &State) -> Result<(), Error> {
    let Some(replay) = store.pending_replay() else { return Ok(()) };
    for entry in replay.entries() {
        stage(store, entry, &state[&entry])?;
    }
    store.commit(Commit { step: store.info().step, ..Commit::default() }, Wait::forever()).map(drop)
}
