//! Reads the write-ahead log of gradients. Each step in the log has a head, which names the step's gradients and the
//! head before it. The root names the newest head.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use crate::{
    Buffer, Dtype, Error, Head, LoggedGradient, Result, Scratch, Store, Transfer, Verified,
    buffer::bytes_of,
    checksum::mismatch,
    features::PLACES,
    head::{head_bytes, head_bytes_max, head_checksum},
    index::Index,
    layout::PAGE_BYTES,
    log::{Ahead, Live},
    open::bytes_at,
    ring::Ring,
    root::Root,
    verify::{DEPTH, in_flight},
};

/// The committed gradients that are not applied in live slots, and the heads of the log that name these gradients.
#[derive(Debug, Default)]
pub struct Replay {
    /// Heads from the oldest to the newest.
    heads: Vec<Head>,
    /// For each record, the gradients that are not applied in its live slot. Each item has the index of a head in
    /// `heads`, and the index of a gradient in that head's `logged_gradients`.
    records: BTreeMap<usize, Vec<(usize, usize)>>,
    /// True once these gradients, and the slots to which the gradients are applied, were verified.
    checked: AtomicBool,
}

/// The read of a chunk of a logged gradient. Dropping a `LoggedRead` waits for the device.
pub struct LoggedRead<'a, B: Buffer> {
    store: &'a Store,
    transfer: Transfer<B>,
    generation: u64,
    step: u64,
    logged: &'a LoggedGradient,
    chunk: u32,
}

impl Replay {
    /// Selects from `heads` the gradients that are not applied in the live slots of `index`. For each record,
    /// selects the gradients in heads whose generation is at least the generation of the record's live slot.
    fn of_heads(heads: Vec<Head>, index: &Index) -> Self {
        let mut records: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for (number, head) in heads.iter().enumerate() {
            for (place, logged) in head.logged_gradients.iter().enumerate() {
                let slots = &index.records[logged.record];
                if head.generation >= slots.versions[usize::from(slots.live)] {
                    records.entry(logged.record).or_default().push((number, place));
                }
            }
        }
        Self { heads, records, checked: AtomicBool::new(false) }
    }

    pub(crate) fn is_checked(&self) -> bool {
        self.checked.load(Relaxed)
    }

    pub(crate) fn note_checked(&self) {
        self.checked.store(true, Relaxed);
    }

    /// Yields the records with gradients that are not applied in the live slot.
    pub fn records(&self) -> impl Iterator<Item = usize> + '_ {
        self.records.keys().copied()
    }

    /// Returns the heads of the steps in the log, from the oldest to the newest.
    #[must_use]
    pub fn heads(&self) -> &[Head] {
        &self.heads
    }

    /// Yields the gradients that are not applied in the live slot of a record, each with its head, in the order in
    /// which they must be applied.
    pub fn of(&self, record: usize) -> impl Iterator<Item = (&Head, &LoggedGradient)> + '_ {
        let places = self.records.get(&record).into_iter().flatten();
        places.map(|&(head, logged)| (&self.heads[head], &self.heads[head].logged_gradients[logged]))
    }
}

impl Store {
    /// Returns the log that the store was opened with. Returns `None` if there was none, or once the log is ended. To
    /// end the log, the caller stages each of the log's records whole, with the gradients applied, and commits these
    /// records. The caller must end the log before the caller stages anything else.
    #[must_use]
    pub fn pending_replay(&self) -> Option<Arc<Replay>> {
        self.index.lock().log.found.clone()
    }

    /// Begins to read a chunk of `logged`, a gradient that `head` names, into a buffer that has the size of the chunk's
    /// whole pages.
    pub fn read_logged<'a, B: Buffer>(
        &'a self,
        head: &Head,
        logged: &'a LoggedGradient,
        chunk: u32,
        buffer: B,
    ) -> Result<LoggedRead<'a, B>> {
        let Some(&(offset, _)) = logged.chunks.get(chunk as usize) else {
            return Err(Error::Invalid(format!(
                "the gradient has only {} chunks, counted from 0: there is no chunk {chunk}",
                logged.chunks.len()
            )));
        };
        let (_, _, wanted) = self.part_of_gradient(logged.record, logged.dtype, chunk);
        if buffer.len() as u64 != wanted {
            return Err(Error::Invalid(format!(
                "chunk {chunk} of the gradient needs a buffer of {wanted} bytes, not {}",
                buffer.len()
            )));
        }
        let transfer = Transfer::begun(self.volume.read(buffer, offset))?;
        Ok(LoggedRead { store: self, transfer, generation: head.generation, step: head.step, logged, chunk })
    }

    /// Reads and checks every gradient of [`Store::pending_replay`] that is not applied in a live slot. The heads were
    /// checked when the store was opened.
    ///
    /// `keep_going` is called after each chunk and returns `false` to stop. `damaged` receives the error of each
    /// damaged or unreadable chunk, and returns an error to stop.
    pub(crate) fn verify_log(
        &self,
        keep_going: &mut dyn FnMut() -> bool,
        damaged: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Verified> {
        let mut done = Verified::default();
        let Some(replay) = self.pending_replay() else { return Ok(done) };
        let chunk = (u64::from(self.description.chunk_elements) * Dtype::F32.bytes()) as usize;
        let scratch = Scratch::new(chunk, DEPTH, "store verification")?;
        let logged_gradients = replay.records().flat_map(|record| replay.of(record));
        let chunks = logged_gradients.flat_map(|(head, logged)| {
            (0..self.layout.chunks_of(logged.record)).map(move |chunk| (head, logged, chunk))
        });
        in_flight(
            DEPTH,
            chunks,
            |(head, logged, chunk)| {
                let (_, _, bytes) = self.part_of_gradient(logged.record, logged.dtype, chunk);
                Ok((self.read_logged(head, logged, chunk, scratch.part(bytes)?)?, bytes))
            },
            |(read, bytes)| {
                match read.wait() {
                    Ok(_) => done.add(bytes),
                    Err(error) => damaged(error)?,
                }
                if keep_going() { Ok(()) } else { Err(Error::Interrupted("verification")) }
            },
        )?;
        Ok(done)
    }

    /// Loads the log that a root names: reads the heads of the log, and finds the gradients that are not applied in
    /// live slots. The root's table must be loaded already.
    pub(crate) fn load_log(&self, root: &Root) -> Result<()> {
        let fields = root.log;
        if fields == crate::root::LogFields::default() {
            return Ok(());
        }
        let ring = Ring { offset: fields.offset, bytes: fields.bytes };
        let end = ring.offset.checked_add(ring.bytes);
        let is_paged = [fields.offset, fields.bytes, fields.head_offset].iter().all(|at| at.is_multiple_of(PAGE_BYTES));
        let before_labels = self.layout.devices.before_second_labels(self.volume.size_bytes());
        if end.is_none_or(|end| end > before_labels) || ring.offset < self.layout.end() || !is_paged {
            let why = format!(
                "it says that the log lies in {} bytes from offset {}, where no log can lie: the store was truncated, \
                 or the root is wrong",
                ring.bytes, ring.offset
            );
            let place = (self.layout.devices.root_offset(root.generation & 1), PAGE_BYTES);
            return Err(self.corrupt("the root", place, why));
        }
        let head = (fields.head_offset, fields.head_checksum);
        let heads = self.chain(root.generation, head, ring)?;
        let mut index = self.index.lock();
        let replay = Replay::of_heads(heads, &index);
        let mut live = Live { head, ..Live::default() };
        for &record in replay.records.keys() {
            for (head, logged) in replay.of(record) {
                let first = Ahead { since: head.generation, count: 0, step: logged.step, is_spilled: false };
                let ahead = live.ahead.entry(record).or_insert(first);
                (ahead.count, ahead.step) = (ahead.count + 1, logged.step);
            }
        }
        let heads = &replay.heads;
        // Ring positions are not stored: compute them from the start of the oldest head on.
        let mut since = heads.first().map_or(0, |head| head.start - ring.offset);
        for head in heads {
            since = ring.position(since, head.start).unwrap_or(since);
            live.heads.push_back((head.generation, since));
        }
        if let Some(newest) = heads.last() {
            let at = ring.position(since, fields.head_offset).unwrap_or(since);
            live.next = at + (newest.encode().len() as u64).next_multiple_of(PAGE_BYTES);
        }
        if root.features.iter().any(|feature| feature == PLACES) {
            live.spilled_in = root.generation;
        }
        if !live.ahead.is_empty() {
            (index.log.ring, index.log.live) = (ring, live);
            index.log.found = Some(Arc::new(replay));
        }
        Ok(())
    }

    /// Reads the log of the last commit, and returns the gradients that are not applied in live slots.
    pub(crate) fn committed_log(&self) -> Result<Replay> {
        let (generation, head, ring) = {
            let index = self.index.lock();
            (index.generation, index.log.live.head, index.log.ring)
        };
        let heads = self.chain(generation, head, ring)?;
        Ok(Replay::of_heads(heads, &self.index.lock()))
    }

    /// Follows the chain of heads back from the newest head, at `place` (offset, checksum), to the oldest head that the
    /// newest head needs. Returns the heads from the oldest to the newest. `newest` is the generation of the commit.
    fn chain(&self, newest: u64, mut place: (u64, u64), ring: Ring) -> Result<Vec<Head>> {
        let mut heads: Vec<Head> = Vec::new();
        loop {
            let head = self.head_at(place, ring)?;
            let newer = heads.last().map_or(newest + 1, |head| head.generation);
            if head.generation >= newer {
                let why = format!("it has generation {}, but must have a generation before {newer}", head.generation);
                return Err(self.corrupt("the head of a step of the log", (place.0, PAGE_BYTES), why));
            }
            let oldest = heads.first().map_or(head.oldest, |newest| newest.oldest);
            let (generation, before) = (head.generation, head.before);
            heads.push(head);
            if generation == oldest {
                heads.reverse();
                return Ok(heads);
            }
            if generation < oldest || before == (0, 0) {
                let why = format!("the heads from generation {oldest} on are needed, but no head has that generation");
                return Err(self.corrupt(named(&heads[heads.len() - 1]), (place.0, PAGE_BYTES), why));
            }
            place = before;
        }
    }

    /// Reads a head, checks its checksum, and checks that the gradients that the head names fit the store.
    fn head_at(&self, (offset, sum): (u64, u64), ring: Ring) -> Result<Head> {
        let corrupt = |nbytes: u64, why: String| self.corrupt("the head of a step of the log", (offset, nbytes), why);
        let end = ring.offset + ring.bytes;
        if offset < ring.offset || offset >= end || !offset.is_multiple_of(PAGE_BYTES) {
            return Err(corrupt(PAGE_BYTES, "its offset is not a page of the log".into()));
        }
        let before_labels = self.layout.devices.before_second_labels(self.volume.size_bytes());
        let records = &self.description.records;
        let chunks = (0..records.len()).map(|record| u64::from(self.layout.chunks_of(record))).sum();
        let bytes_max = head_bytes_max(records.len() as u64, chunks).min(end - offset);
        let page = bytes_at(&self.volume, offset, PAGE_BYTES)?;
        let nbytes = head_bytes(&page, bytes_max).map_err(|why| corrupt(PAGE_BYTES, why))?;
        let bytes = bytes_at(&self.volume, offset, nbytes)?;
        if head_checksum(&self.uuid, offset, &bytes) != sum {
            return Err(corrupt(nbytes, "its checksum is wrong".into()));
        }
        let head = Head::decode(&bytes).map_err(|why| corrupt(nbytes, why))?;
        let fits = |logged: &LoggedGradient| {
            logged.record < records.len()
                && logged.chunks.len() == self.layout.chunks_of(logged.record) as usize
                && (0..).zip(&logged.chunks).all(|(chunk, &(at, _))| {
                    let (_, _, bytes) = self.part_of_gradient(logged.record, logged.dtype, chunk);
                    let to = at.checked_add(bytes);
                    let is_in = |from: u64, until: u64| at >= from && to.is_some_and(|to| to <= until);
                    let spilled = self.layout.spill_offset(logged.record);
                    at.is_multiple_of(PAGE_BYTES)
                        && (is_in(spilled, self.layout.end()) || is_in(self.layout.end(), before_labels))
                })
        };
        let starts_inside = ring.position(0, head.start).is_some() && head.start.is_multiple_of(PAGE_BYTES);
        if !starts_inside || !head.logged_gradients.iter().all(fits) {
            return Err(corrupt(
                nbytes,
                "its start, or a gradient that it names, does not fit the records or the areas of the store".into(),
            ));
        }
        Ok(head)
    }
}

/// Describes a head in an error.
fn named(head: &Head) -> String {
    format!("the head of step {} of the log", head.step)
}

impl<B: Buffer> LoggedRead<'_, B> {
    /// Waits for the device, checks the chunk, and returns the buffer.
    pub fn wait(self) -> Result<B> {
        let Self { store, transfer, generation, step, logged, chunk } = self;
        let buffer = transfer.wait()?;
        let (offset, wanted) = logged.chunks[chunk as usize];
        let (_, used, bytes) = store.part_of_gradient(logged.record, logged.dtype, chunk);
        let got = store.gradient_sum((logged.record, chunk), generation, &bytes_of(&buffer)[..used as usize]);
        if got == wanted {
            return Ok(buffer);
        }
        let name = &store.description.records[logged.record].name;
        let what = format!("chunk {chunk} of the gradient of {name:?} in step {step} of the log");
        Err(store.corrupt(what, (offset, bytes), mismatch(got, wanted)))
    }
}
