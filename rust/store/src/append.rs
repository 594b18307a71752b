//! Appends gradients to the log, and the head that makes a step of them.

use memascend_nvme::Ticket;

use crate::{
    Buffer, Dtype, Error, Head, Result, Shared, Store,
    buffer::bytes_of,
    checksum::{Subject, checksum},
    index::Index,
    log::{Appended, Live},
    places::paged,
};

/// A gradient that is being appended. Waiting for it, or dropping it, settles it.
pub struct LogWrite<'a, B: Buffer + Sync> {
    store: &'a Store,
    entry: usize,
    tickets: Vec<Ticket<Shared<B>>>,
    gradient: Option<Shared<B>>,
}

impl Store {
    /// Begins to append the gradient of an entry to the step: whole pages of [`Store::gradient_bytes`], of which what fills
    /// the last one is no part. It belongs to the step once a [`StepHead`] names it. Appended again before that, it takes
    /// the place of the one before, once that is written.
    ///
    /// `None` where the log has no room for it: the entry has to be staged whole, with its state after this step.
    pub fn append<B: Buffer + Sync>(
        &self,
        entry: usize,
        dtype: Dtype,
        gradient: Shared<B>,
    ) -> Result<Option<LogWrite<'_, B>>> {
        let wanted = self.gradient_bytes(entry, dtype)?;
        let name = &self.description.entries[entry].name;
        if gradient.len() as u64 != wanted {
            let got = gradient.len();
            return Err(Error::Invalid(format!("the gradient of {name:?} has {wanted} bytes in the log, not {got}")));
        }
        // Once with the lock to know the version, once to take the place.
        let generation = self.index.lock().generation + 1;
        let (mut parts, mut sums) = (Vec::new(), Vec::new());
        for chunk in 0..self.layout.chunks_of(entry) {
            let (start, used, bytes) = self.part_of_gradient(entry, dtype, chunk);
            let part = gradient.part(start as usize, bytes as usize);
            let part = part.ok_or_else(|| Error::Invalid(format!("the gradient of {name:?} is cut short")))?;
            sums.push(self.gradient_sum((entry, chunk), generation, &bytes_of(&part)[..used as usize]));
            parts.push(part);
        }
        let places = {
            let mut index = self.index.lock();
            index.writable()?;
            if index.generation + 1 != generation {
                return Err(Error::Usage(format!("a commit came while the gradient of {name:?} was appended")));
            }
            let Some(places) = self.place(&mut index, entry, dtype, &sums)? else { return Ok(None) };
            index.writing += 1;
            places
        };
        let mut write =
            LogWrite { store: self, entry, tickets: Vec::with_capacity(parts.len()), gradient: Some(gradient) };
        for (part, place) in parts.into_iter().zip(places) {
            match self.volume.write(part, place) {
                Ok(ticket) => write.tickets.push(ticket),
                Err(refused) => {
                    let error = Error::from(refused.error);
                    self.index.lock().failed.get_or_insert_with(|| error.clone());
                    drop(write);
                    return Err(error);
                }
            }
        }
        Ok(Some(write))
    }

    /// Takes places for the chunks of a gradient; `None` where there is no room.
    fn place(&self, index: &mut Index, entry: usize, dtype: Dtype, sums: &[u64]) -> Result<Option<Vec<u64>>> {
        let name = &self.description.entries[entry].name;
        let log = &mut index.log;
        let Some(member) = log.members.get(&entry) else {
            return if log.steps == 0 {
                Ok(None)
            } else {
                Err(Error::Usage(format!("the log has no room for gradients of {name:?}: it was not made for them")))
            };
        };
        if member.dtype != dtype {
            let (got, wanted) = (dtype.name(), member.dtype.name());
            return Err(Error::Invalid(format!(
                "the log has room for gradients of {name:?} in {wanted}, not in {got}"
            )));
        }
        if let Some(appended) = log.appended.get_mut(&entry) {
            if appended.writing {
                return Err(Error::Usage(format!("the gradient of {name:?} is being appended already")));
            }
            appended.writing = true;
            for (chunk, &sum) in appended.chunks.iter_mut().zip(sums) {
                chunk.1 = sum;
            }
            return Ok(Some(appended.chunks.iter().map(|&(place, _)| place).collect()));
        }
        let oldest = log.live.oldest();
        let mut next = log.next.unwrap_or(log.live.next);
        let mut places = Vec::with_capacity(sums.len());
        for chunk in 0..self.layout.chunks_of(entry) {
            let bytes = self.chunk_of_gradient(entry, dtype, chunk);
            let Some(at) = log.ring.fit(oldest, next, bytes) else { return Ok(None) };
            places.push(log.ring.place(at));
            next = at + bytes;
        }
        // The head comes after it, however long it will be.
        if log.ring.fit(oldest, next, log.head_bytes_max).is_none() {
            return Ok(None);
        }
        log.next = Some(next);
        let chunks = places.iter().copied().zip(sums.iter().copied()).collect();
        log.appended.insert(entry, Appended { dtype, chunks, writing: true });
        Ok(Some(places))
    }

    /// Where a chunk of a gradient begins in it, its bytes, and the whole pages that they lie in.
    pub(crate) fn part_of_gradient(&self, entry: usize, dtype: Dtype, chunk: u32) -> (u64, u64, u64) {
        let start = u64::from(chunk) * u64::from(self.description.chunk_elements) * dtype.bytes();
        let used = self.description.elements_of_chunk(entry, chunk) as u64 * dtype.bytes();
        (start, used, paged(used))
    }

    pub(crate) fn chunk_of_gradient(&self, entry: usize, dtype: Dtype, chunk: u32) -> u64 {
        self.part_of_gradient(entry, dtype, chunk).2
    }

    pub(crate) fn gradient_sum(&self, (entry, chunk): (usize, u32), generation: u64, bytes: &[u8]) -> u64 {
        checksum(&self.uuid, Subject::Gradient, (entry as u64, u64::from(chunk)), generation, bytes)
    }

    /// Writes the head of the commit that is being made.
    pub(crate) fn write_head(&self, live: &mut Live, head: &Head) -> Result<()> {
        let bytes = head.encode();
        let (ring, at) = {
            let index = self.index.lock();
            let log = &index.log;
            let at = log.ring.fit(log.live.oldest(), log.next.unwrap_or(log.live.next), bytes.len() as u64);
            (log.ring, at.ok_or_else(|| Error::Usage("the log has no room for the head of the step".into()))?)
        };
        let place = ring.place(at);
        live.head = (place, crate::head::head_checksum(&self.uuid, place, &bytes));
        live.next = at + paged(bytes.len() as u64);
        self.put(place, &bytes)
    }
}
impl<B: Buffer + Sync> LogWrite<'_, B> {
    /// Whether it has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.tickets.iter().all(Ticket::is_done)
    }

    /// Waits for the end and gives the gradient back. A failure also keeps the step from being committed.
    pub fn wait(mut self) -> Result<Shared<B>> {
        match self.settle() {
            Some((gradient, result)) => result.map(|()| gradient),
            None => Err(Error::Usage("this write was waited for already".into())),
        }
    }

    fn settle(&mut self) -> Option<(Shared<B>, Result<()>)> {
        let gradient = self.gradient.take()?;
        let mut result = Ok(());
        for ticket in self.tickets.drain(..) {
            result = result.and(ticket.wait().result.map(drop).map_err(Error::from));
        }
        let mut index = self.store.index.lock();
        index.writing -= 1;
        if let Some(appended) = index.log.appended.get_mut(&self.entry) {
            appended.writing = false;
        }
        if let Err(error) = &result {
            index.failed.get_or_insert_with(|| error.clone());
        }
        drop(index);
        self.store.index.notify_all();
        Some((gradient, result))
    }
}

impl<B: Buffer + Sync> Drop for LogWrite<'_, B> {
    fn drop(&mut self) {
        drop(self.settle());
    }
}
