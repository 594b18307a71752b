//! Tracks the write-ahead log of gradients: its ring on storage, the head of each step, and the records that need the
//! log.
//!
//! The log makes a step durable for records whose new state is not written to a slot: records kept in RAM, and records
//! with deferred updates.
//!
//! [Note: Newest state] To get a record's newest state, read its live slot. Then apply, in order, the record's
//! gradients from every head whose generation is that of the slot or later. So a step may write the whole record as it
//! was *before* the step, and append the step's gradient to the log. After the commit of this step, the log no longer
//! needs the record's earlier gradients.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use crate::{Dtype, Error, Head, LoggedGradient, LoggedUpdate, Replay, Result, StepHead, ring::Ring, root};

/// The index of the log: its ring, the records whose gradients may be appended, and the gradients that were appended
/// since the last commit.
#[derive(Debug, Default)]
pub(crate) struct GradientLog {
    pub(crate) ring: Ring,
    /// The records whose gradients may be appended to the ring, each with the turn in which the record is written
    /// whole.
    pub(crate) members: BTreeMap<usize, Member>,
    /// The number of turns. The turns repeat every `steps` steps, so that each member is written whole once in `steps`
    /// steps.
    pub(crate) steps: u32,
    /// The largest size in bytes of a log head.
    pub(crate) head_bytes_max: u64,
    /// The indices, in ascending order, of the records whose updates may be deferred to the next step.
    pub(crate) deferred: Vec<usize>,
    /// The number of commits that wrote a log head since the store was opened. The turn of a step is this number modulo
    /// `steps`.
    pub(crate) turn: u64,
    /// The state of the log after the last commit.
    pub(crate) live: Live,
    /// The log that the store had when it was opened. A commit sets this field to `None` once every live slot has the
    /// newest state.
    pub(crate) found: Option<Arc<Replay>>,
    /// For each record, its gradient that was appended since the last commit.
    pub(crate) appended: BTreeMap<usize, Appended>,
    /// The ring position of the next append; `None` if the ring has no append since the last commit or discard.
    pub(crate) next: Option<u64>,
    /// The sum of the checksums of the updates that the commit in progress defers to the next step.
    /// [`Store::digest`](crate::Store::digest) includes this sum.
    pub(crate) digest: u64,
}

/// The part of the log that is needed after a commit. With [`Durability::Step`](crate::Durability::Step), the commit's
/// root names the newest head of this part.
#[derive(Debug, Clone, Default)]
pub(crate) struct Live {
    /// Offset and checksum of the newest head on storage; zeros if no head is needed, or if none was written
    /// (durability "none").
    pub(crate) head: (u64, u64),
    /// The heads that are needed, the oldest first. Each item has a head's generation, and the ring position at which
    /// the gradients of that head's step begin.
    pub(crate) heads: VecDeque<(u64, u64)>,
    /// The ring position at which the next step may begin.
    pub(crate) next: u64,
    /// The records with committed gradients that are not applied in the live slot.
    pub(crate) ahead: BTreeMap<usize, Ahead>,
    /// The generation of the newest head that names spilled gradients, which are outside of the ring; 0 if no head
    /// does. After an opening with such a head, this is the generation of the root, and the head may be older.
    pub(crate) spilled_in: u64,
}

/// The committed gradients of a record that are not applied in the record's live slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// The generation of the first head that names one of these gradients.
    pub(crate) since: u64,
    /// The number of these gradients.
    pub(crate) count: u32,
    /// The record's count of updates after these gradients are applied.
    pub(crate) step: u64,
    /// True for a deferred update: a single spilled gradient that was committed after the store was opened. False for
    /// gradients in the ring, and for gradients that the log had when the store was opened, even if they were spilled.
    pub(crate) is_spilled: bool,
}

/// A record whose gradients may be appended to the log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member {
    /// The dtype of the record's gradients.
    pub(crate) dtype: Dtype,
    /// The turn in which the record is written whole, less than [`GradientLog::steps`].
    pub(crate) turn: u32,
}

/// A gradient that was appended since the last commit.
#[derive(Debug)]
pub(crate) struct Appended {
    pub(crate) dtype: Dtype,
    /// For each chunk, its offset in the volume, and its checksum once the chunk's write has begun.
    pub(crate) chunks: Box<[(u64, Option<u64>)]>,
    /// The number of chunks that are not written yet.
    pub(crate) missing: u32,
    /// The number of chunks whose write is in flight.
    pub(crate) writing: u32,
    /// True if the gradient is in one of the record's places for spilled gradients. False if the gradient is in the
    /// ring.
    pub(crate) is_spilled: bool,
}

/// The size and the contents of a store's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogState {
    /// Offset of the log's ring in the volume.
    pub offset: u64,
    /// Bytes of the ring.
    pub bytes: u64,
    /// Number of steps whose heads are needed.
    pub steps: u64,
    /// Number of records whose live slot lacks at least one gradient that the log has.
    pub records: u64,
}

impl Live {
    /// Returns the ring position of the oldest bytes that are needed.
    pub(crate) fn oldest(&self) -> u64 {
        self.heads.front().map_or(self.next, |&(_, start)| start)
    }

    /// True if a needed head names spilled gradients, which are outside of the ring.
    pub(crate) fn has_spilled(&self) -> bool {
        !self.ahead.is_empty() && self.heads.iter().any(|&(generation, _)| generation <= self.spilled_in)
    }

    /// Returns the fields of a root that name this log.
    pub(crate) fn of_root(&self, ring: Ring) -> root::LogFields {
        if self.ahead.is_empty() {
            return root::LogFields::default();
        }
        root::LogFields { offset: ring.offset, bytes: ring.bytes, head_offset: self.head.0, head_checksum: self.head.1 }
    }
}

impl GradientLog {
    /// Drops the gradients appended since the last commit.
    pub(crate) fn discard(&mut self) {
        self.appended.clear();
        self.next = None;
        self.digest = 0;
    }

    /// True if the record has committed gradients that are not applied in its live slot.
    pub(crate) fn is_ahead(&self, record: usize) -> bool {
        self.live.ahead.contains_key(&record)
    }

    /// Returns the records whose appended gradient is a spilled gradient, which is outside of the ring.
    pub(crate) fn appended_spills(&self) -> BTreeSet<usize> {
        self.appended.iter().filter(|(_, appended)| appended.is_spilled).map(|(&record, _)| record).collect()
    }

    /// True if the next commit should write the record whole. False if all committed gradients are applied in the
    /// record's live slot. Otherwise true if it is the record's turn, or if `steps` heads have been written since the
    /// first gradient that is not applied.
    pub(crate) fn is_due(&self, record: usize, member: Member) -> bool {
        let Some(ahead) = self.live.ahead.get(&record) else { return false };
        let heads = self.live.heads.iter().filter(|&&(generation, _)| generation >= ahead.since).count();
        let steps = self.steps.max(1);
        heads >= steps as usize || self.turn % u64::from(steps) == u64::from(member.turn)
    }

    /// Computes the state of the log after the commit of `generation` and `step`. Also returns the head of this commit,
    /// or `None` if `listed` names no gradient. [`Store::write_head`](crate::Store::write_head) sets the head's place
    /// in the returned state. `is_staged` is true for the records that the commit writes whole. Fails if `listed`, the
    /// caller's list of the step's gradients, is invalid or does not match the appended gradients.
    pub(crate) fn after(
        &self,
        (generation, step): (u64, u64),
        is_staged: impl Fn(usize) -> bool,
        listed: Option<&StepHead>,
    ) -> Result<(Live, Option<Head>)> {
        let mut live = self.live.clone();
        live.ahead.retain(|&record, _| !is_staged(record));
        let listed = listed.filter(|listed| !listed.updates.is_empty());
        let named = listed.map_or(0, |listed| listed.updates.len());
        if named != self.appended.len() {
            let appended = self.appended.len();
            return Err(Error::Usage(format!(
                "{appended} gradients were appended, and the step names {named}: name each appended gradient once"
            )));
        }
        let Some(listed) = listed else {
            if live.ahead.is_empty() {
                live.heads.clear();
                live.head = (0, 0);
            }
            return Ok((live, None));
        };
        let mut logged_gradients = Vec::with_capacity(listed.updates.len());
        listed.rules.iter().try_for_each(|rule| rule.check().map_err(Error::Invalid))?;
        for &LoggedUpdate { record, rule, step } in &listed.updates {
            let Some(appended) = self.appended.get(&record) else {
                return Err(Error::Usage(format!(
                    "the step names record {record}, whose gradient was not appended: append the gradient first"
                )));
            };
            if rule as usize >= listed.rules.len() || step == 0 || listed.rules.len() > listed.updates.len() {
                let rules = listed.rules.len();
                return Err(Error::Invalid(format!(
                    "the step applies update {step} of record {record} by rule {rule} of {rules}: number updates from \
                     1 and rules from 0, and pass at most one rule for each update"
                )));
            }
            let sums: Option<_> = appended.chunks.iter().map(|&(place, sum)| Some((place, sum?))).collect();
            let Some(chunks) = sums.filter(|_| appended.missing == 0) else {
                let missing = appended.missing;
                return Err(Error::Usage(format!(
                    "the gradient of record {record} is appended in part, {missing} chunks are missing: append these \
                     chunks"
                )));
            };
            logged_gradients.push(LoggedGradient { record, rule, step, dtype: appended.dtype, chunks });
            let is_spilled = appended.is_spilled;
            let first = Ahead { since: generation, count: 0, step, is_spilled };
            let ahead = live.ahead.entry(record).or_insert(first);
            (ahead.count, ahead.step) = (ahead.count + 1, step);
        }
        logged_gradients.sort_unstable_by_key(|logged| logged.record);
        if logged_gradients.windows(2).any(|two| two[0].record == two[1].record) {
            return Err(Error::Invalid("the step names a record twice: name each record once".into()));
        }
        let oldest = live.ahead.values().map(|ahead| ahead.since).min().unwrap_or(generation);
        let start = if self.ring.bytes == 0 { 0 } else { self.ring.place(self.live.next) };
        live.heads.retain(|&(generation, _)| generation >= oldest);
        live.heads.push_back((generation, self.live.next));
        if self.appended.values().any(|appended| appended.is_spilled) {
            live.spilled_in = generation;
        }
        let before = if self.live.ahead.is_empty() { (0, 0) } else { self.live.head };
        let head = Head { generation, oldest, step, start, before, rules: listed.rules.clone(), logged_gradients };
        Ok((live, Some(head)))
    }

    /// Installs `live` after its commit has succeeded, and drops the list of appended gradients.
    pub(crate) fn committed(&mut self, live: Live) {
        self.turn += u64::from(live.head != self.live.head && !live.ahead.is_empty());
        self.live = live;
        if self.live.ahead.is_empty() {
            self.found = None;
        }
        self.discard();
    }
}
