//! The log: gradients of records whose newest state is in memory alone, in a ring of storage, with a head for each step.
//!
//! A record's newest state is what its live slot holds, and then each gradient of it in heads of the slot's generation and
//! later ones, applied in order. So a slot may be written whole at any step, with the state before that step's gradient.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use crate::{Dtype, Error, Head, LoggedGradient, LoggedUpdate, Replay, Result, StepHead, ring::Ring, root};

/// The log as it is in memory: where it lies, who appends to it, and what was appended since the last commit.
#[derive(Debug, Default)]
pub(crate) struct GradientLog {
    pub(crate) ring: Ring,
    /// The records that may append, and the turn in which each is written whole.
    pub(crate) members: BTreeMap<usize, Member>,
    /// How many steps it takes until all of them were written whole.
    pub(crate) steps: u32,
    pub(crate) head_bytes_max: u64,
    /// Records whose updates may be left to the next step, in their order.
    pub(crate) deferred: Vec<usize>,
    /// Steps with a head since the store was opened.
    pub(crate) turn: u64,
    pub(crate) live: Live,
    /// What the store was found with, until a commit ends it.
    pub(crate) found: Option<Arc<Replay>>,
    /// What was appended since the last commit, and where the next one goes.
    pub(crate) appended: BTreeMap<usize, Appended>,
    pub(crate) next: Option<u64>,
    /// Where stores are compared: a sum over the updates that the commit that is being made leaves to the next step.
    pub(crate) digest: u64,
}

/// What the newest root names.
#[derive(Debug, Clone, Default)]
pub(crate) struct Live {
    /// Where the newest head lies, and its checksum; zeros where none is needed.
    pub(crate) head: (u64, u64),
    /// Heads that are needed, the oldest first: their generations, and where what belongs to them begins.
    pub(crate) heads: VecDeque<(u64, u64)>,
    /// Where the next step may begin.
    pub(crate) next: u64,
    /// Records whose live slot lacks gradients.
    pub(crate) ahead: BTreeMap<usize, Ahead>,
    /// The generation of the newest head with gradients outside of the ring.
    pub(crate) spilled_in: u64,
}

/// What the live slot of a record lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// The generation of the first head with a gradient that it lacks.
    pub(crate) since: u64,
    /// How many it lacks.
    pub(crate) count: u32,
    /// The record's count of updates with them.
    pub(crate) step: u64,
    /// It is one that lies where it was spilled, and this run has committed it.
    pub(crate) is_spilled: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Member {
    pub(crate) dtype: Dtype,
    /// Of the log's steps.
    pub(crate) turn: u32,
}

#[derive(Debug)]
pub(crate) struct Appended {
    pub(crate) dtype: Dtype,
    /// Where each chunk lies, and its checksum once its write was begun.
    pub(crate) chunks: Box<[(u64, Option<u64>)]>,
    /// Chunks that are not written yet, and those of which a write is in flight.
    pub(crate) missing: u32,
    pub(crate) writing: u32,
    /// It lies in a place of its record's for spilled gradients, and not in the ring.
    pub(crate) is_spilled: bool,
}

/// Size and contents of the log of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogState {
    /// Where it lies in the volume.
    pub offset: u64,
    /// Bytes that it has there.
    pub bytes: u64,
    /// Steps that are in it.
    pub steps: u64,
    /// Records whose newest state is in it.
    pub records: u64,
}

impl Live {
    /// Where what is needed begins.
    pub(crate) fn oldest(&self) -> u64 {
        self.heads.front().map_or(self.next, |&(_, start)| start)
    }

    /// Whether a head that is needed has gradients outside of the ring.
    pub(crate) fn has_spilled(&self) -> bool {
        !self.ahead.is_empty() && self.heads.iter().any(|&(generation, _)| generation <= self.spilled_in)
    }

    /// What a root says of it.
    pub(crate) fn of_root(&self, ring: Ring) -> root::LogFields {
        if self.ahead.is_empty() {
            return root::LogFields::default();
        }
        root::LogFields { offset: ring.offset, bytes: ring.bytes, head_offset: self.head.0, head_checksum: self.head.1 }
    }
}

impl GradientLog {
    /// Forgets what was appended since the last commit.
    pub(crate) fn discard(&mut self) {
        self.appended.clear();
        self.next = None;
        self.digest = 0;
    }

    pub(crate) fn is_ahead(&self, record: usize) -> bool {
        self.live.ahead.contains_key(&record)
    }

    /// The gradients of this step that lie where they were spilled.
    pub(crate) fn appended_spills(&self) -> BTreeSet<usize> {
        self.appended.iter().filter(|(_, appended)| appended.is_spilled).map(|(&record, _)| record).collect()
    }

    /// Whether a record is to be written whole by the next commit.
    pub(crate) fn is_due(&self, record: usize, member: Member) -> bool {
        let Some(ahead) = self.live.ahead.get(&record) else { return false };
        let heads = self.live.heads.iter().filter(|&&(generation, _)| generation >= ahead.since).count();
        let steps = self.steps.max(1);
        heads >= steps as usize || self.turn % u64::from(steps) == u64::from(member.turn)
    }

    /// What a root names after the commit of a generation and step, and the head that it needs. Checks what the caller said
    /// of the step; changes nothing.
    pub(crate) fn after(
        &self,
        (generation, step): (u64, u64),
        is_staged: impl Fn(usize) -> bool,
        said: Option<&StepHead>,
    ) -> Result<(Live, Option<Head>)> {
        let mut live = self.live.clone();
        live.ahead.retain(|&record, _| !is_staged(record));
        let said = said.filter(|said| !said.updates.is_empty());
        let named = said.map_or(0, |said| said.updates.len());
        if named != self.appended.len() {
            let appended = self.appended.len();
            return Err(Error::Usage(format!("{appended} gradients were appended, and the step names {named}")));
        }
        let Some(said) = said else {
            if live.ahead.is_empty() {
                live.heads.clear();
                live.head = (0, 0);
            }
            return Ok((live, None));
        };
        let mut logged_gradients = Vec::with_capacity(said.updates.len());
        said.rules.iter().try_for_each(|rule| rule.check().map_err(Error::Invalid))?;
        for &LoggedUpdate { record, rule, step } in &said.updates {
            let Some(appended) = self.appended.get(&record) else {
                return Err(Error::Usage(format!("record {record} is named, and its gradient was not appended")));
            };
            if rule as usize >= said.rules.len() || step == 0 || said.rules.len() > said.updates.len() {
                let rules = said.rules.len();
                return Err(Error::Invalid(format!("update {step} of record {record} by rule {rule} of {rules}")));
            }
            let sums: Option<_> = appended.chunks.iter().map(|&(place, sum)| Some((place, sum?))).collect();
            let Some(chunks) = sums.filter(|_| appended.missing == 0) else {
                let missing = appended.missing;
                return Err(Error::Usage(format!(
                    "the gradient of record {record} is appended in part, {missing} chunks lack"
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
            return Err(Error::Invalid("the step names a record twice".into()));
        }
        let oldest = live.ahead.values().map(|ahead| ahead.since).min().unwrap_or(generation);
        let start = if self.ring.bytes == 0 { 0 } else { self.ring.place(self.live.next) };
        live.heads.retain(|&(generation, _)| generation >= oldest);
        live.heads.push_back((generation, self.live.next));
        if self.appended.values().any(|appended| appended.is_spilled) {
            live.spilled_in = generation;
        }
        let before = if self.live.ahead.is_empty() { (0, 0) } else { self.live.head };
        let head = Head { generation, oldest, step, start, before, rules: said.rules.clone(), logged_gradients };
        Ok((live, Some(head)))
    }

    /// Takes what the next root names, once that is on storage.
    pub(crate) fn committed(&mut self, live: Live) {
        self.turn += u64::from(live.head != self.live.head && !live.ahead.is_empty());
        self.live = live;
        if self.live.ahead.is_empty() {
            self.found = None;
        }
        self.discard();
    }
}
