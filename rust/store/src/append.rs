//! Writes a step's gradients to the write-ahead log, then the log head that names these gradients. The root of the
//! step's commit names the log head, which makes the gradients part of the committed step.

use crate::{
    Buffer, Dtype, Error, Head, Result, StepWrite, Store,
    buffer::bytes_of,
    checksum::{Subject, checksum},
    head::is_gradient,
    index::{Index, Pending},
    log::{Appended, Live},
    places::paged,
};

impl Store {
    /// Begins to append a record's gradient to the log. The caller appends every chunk ([`Store::append`]) before it
    /// commits a [`StepHead`](crate::StepHead) that names the gradient. A second call for the same record before the
    /// commit replaces the gradient of the first call.
    ///
    /// Returns `false` if the log has no room for the gradient, or if [`Store::keep_log`] has not admitted this record
    /// with this dtype. The caller then stages the whole record, with its state after this step.
    pub fn begin_append(&self, record: usize, dtype: Dtype) -> Result<bool> {
        self.known(record)?;
        let name = &self.description.records[record].name;
        let mut index = self.index.lock();
        index.writable()?;
        let log = &mut index.log;
        if log.members.get(&record).is_none_or(|member| member.dtype != dtype) {
            return Ok(false);
        }
        let chunks = self.layout.chunks_of(record);
        if let Some(appended) = log.appended.get_mut(&record) {
            if appended.writing > 0 {
                return Err(Error::Usage(format!(
                    "the gradient of {name:?} is being written already: wait for its writes first"
                )));
            }
            appended.missing = chunks;
            appended.chunks.iter_mut().for_each(|(_, sum)| *sum = None);
            return Ok(true);
        }
        let oldest = log.live.oldest();
        let mut next = log.next.unwrap_or(log.live.next);
        let mut places = Vec::with_capacity(chunks as usize);
        for chunk in 0..chunks {
            let bytes = self.chunk_of_gradient(record, dtype, chunk);
            let Some(at) = log.ring.fit(oldest, next, bytes) else { return Ok(false) };
            places.push((log.ring.place(at), None));
            next = at + bytes;
        }
        // The commit appends the log head after the gradients: leave room for the longest possible head.
        if log.ring.fit(oldest, next, log.head_bytes_max).is_none() {
            return Ok(false);
        }
        log.next = Some(next);
        let appended = Appended { dtype, chunks: places.into(), missing: chunks, writing: 0, is_spilled: false };
        log.appended.insert(record, appended);
        Ok(true)
    }

    /// Adds a record's spilled gradient to the step without copying the gradient: the log head names the place on
    /// storage to which the gradient was spilled. The commit that names the gradient ([`StepHead`](crate::StepHead))
    /// does not write the updated record. The caller must settle the record ([`Store::begin_settling`]) before it
    /// appends the record's next gradient.
    ///
    /// Returns `false` if the log head cannot name the spilled gradient, for one of these reasons:
    ///
    /// - The spilled gradient is not complete.
    /// - The gradient was spilled before the last commit.
    /// - The last commit already names the place to which this gradient was spilled. The caller can spill the gradient
    ///   again: it then goes to another place.
    /// - [`Store::defers`] is false for the record.
    pub fn append_spilled(&self, record: usize) -> Result<bool> {
        self.known(record)?;
        if !self.defers(record) {
            return Ok(false);
        }
        let mut index = self.index.lock();
        index.writable()?;
        let is_staged = matches!(index.records[record].pending, Pending::Staged);
        if is_staged || index.is_behind(record) {
            let name = &self.description.records[record].name;
            let why = if is_staged {
                "is staged already: commit or discard the step"
            } else {
                "does not have its last update yet: settle the record"
            };
            return Err(Error::Usage(format!("{name:?} {why} first")));
        }
        let (laid, dtype) = (self.laid_spill(record, index.generation + 1), self.description.records[record].spill);
        let (Some(laid), Some(dtype)) = (laid, dtype) else { return Ok(false) };
        let chunks = laid.iter().map(|&(place, sum)| (place, Some(sum))).collect();
        index.log.appended.insert(record, Appended { dtype, chunks, missing: 0, writing: 0, is_spilled: true });
        Ok(true)
    }

    /// True if a commit may name the record's spilled gradient ([`Store::append_spilled`]) instead of writing the
    /// updated record. The caller then applies the gradient when it settles the record ([`Store::begin_settling`]).
    #[must_use]
    pub fn defers(&self, record: usize) -> bool {
        let dtype = self.description.records.get(record).and_then(|record| record.spill);
        let has_place = || self.index.lock().log.deferred.binary_search(&record).is_ok();
        dtype.is_some_and(is_gradient) && has_place() && !self.is_in_ram(record)
    }

    /// True if [`Store::keep_log`] has admitted the record's gradients to the log.
    #[must_use]
    pub fn is_logged(&self, record: usize) -> bool {
        self.index.lock().log.members.contains_key(&record)
    }

    /// Begins to write one chunk of a gradient after [`Store::begin_append`]. `buffer` must have
    /// [`Store::gradient_chunk_bytes`] bytes, which are whole pages. The checksum does not cover the padding of the
    /// last page.
    pub fn append<B: Buffer>(&self, record: usize, chunk: u32, buffer: B) -> Result<StepWrite<'_, B>> {
        self.known(record)?;
        let name = &self.description.records[record].name;
        let unknown =
            || Error::Usage(format!("no append of the gradient of {name:?} is open: call begin_append first"));
        let (generation, dtype) = {
            let index = self.index.lock();
            (index.generation + 1, index.log.appended.get(&record).ok_or_else(unknown)?.dtype)
        };
        let (_, used, wanted) = self.part_of_gradient(record, dtype, chunk);
        if chunk >= self.layout.chunks_of(record) || buffer.len() as u64 != wanted {
            let (got, chunks) = (buffer.len(), self.layout.chunks_of(record));
            return Err(Error::Invalid(format!(
                "chunk {chunk} of the gradient of {name:?} needs a buffer of {wanted} bytes, not {got}; the gradient \
                 has {chunks} chunks, counted from 0"
            )));
        }
        let sum = self.gradient_sum((record, chunk), generation, &bytes_of(&buffer)[..used as usize]);
        let place = {
            let mut index = self.index.lock();
            index.writable()?;
            let is_now = index.generation + 1 == generation;
            let appended = index.log.appended.get_mut(&record).filter(|_| is_now).ok_or_else(unknown)?;
            let (place, of_chunk) = &mut appended.chunks[chunk as usize];
            if of_chunk.is_some() {
                return Err(Error::Usage(format!(
                    "chunk {chunk} of the gradient of {name:?} is appended already: append each chunk once"
                )));
            }
            *of_chunk = Some(sum);
            appended.writing += 1;
            let place = *place;
            index.writing += 1;
            place
        };
        self.write_of_step(buffer, place, record, Self::appended)
    }

    /// Returns the size in bytes of one chunk of a gradient in the log, rounded up to whole pages.
    pub fn gradient_chunk_bytes(&self, record: usize, dtype: Dtype, chunk: u32) -> Result<u64> {
        self.known(record)?;
        Ok(self.chunk_of_gradient(record, dtype, chunk))
    }

    /// Notes in the index that the write of one chunk ended. `is_whole` is false if the write failed.
    fn appended(index: &mut Index, record: usize, is_whole: bool) {
        if let Some(appended) = index.log.appended.get_mut(&record) {
            appended.writing -= 1;
            appended.missing = appended.missing.saturating_sub(u32::from(is_whole));
        }
    }

    /// Returns a chunk's offset in its gradient, the chunk's size, and this size rounded up to whole pages, all in
    /// bytes.
    pub(crate) fn part_of_gradient(&self, record: usize, dtype: Dtype, chunk: u32) -> (u64, u64, u64) {
        let start = u64::from(chunk) * u64::from(self.description.chunk_elements) * dtype.bytes();
        let used = self.description.elements_of_chunk(record, chunk) as u64 * dtype.bytes();
        (start, used, paged(used))
    }

    pub(crate) fn chunk_of_gradient(&self, record: usize, dtype: Dtype, chunk: u32) -> u64 {
        self.part_of_gradient(record, dtype, chunk).2
    }

    /// Returns the checksum of a chunk of a gradient, bound to the generation of the commit that may name the gradient.
    pub(crate) fn gradient_sum(&self, (record, chunk): (usize, u32), generation: u64, bytes: &[u8]) -> u64 {
        checksum(&self.uuid, Subject::Gradient, (record as u64, u64::from(chunk)), generation, bytes)
    }

    /// Writes the log head of the commit in progress. Stores the head's place and checksum, and the ring position after
    /// the head, in `live`.
    pub(crate) fn write_head(&self, live: &mut Live, head: &Head) -> Result<()> {
        let bytes = head.encode();
        let (ring, at) = {
            let index = self.index.lock();
            let log = &index.log;
            let at = log.ring.fit(log.live.oldest(), log.next.unwrap_or(log.live.next), bytes.len() as u64);
            (log.ring, at.ok_or_else(|| Error::Usage("the log has no space for the head: discard the step".into()))?)
        };
        let place = ring.place(at);
        live.head = (place, crate::head::head_checksum(&self.uuid, place, &bytes));
        live.next = at + paged(bytes.len() as u64);
        self.put(place, &bytes)
    }
}
