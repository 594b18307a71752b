//! Verifies a store: reads and checks every live extent, and the gradients of a log that is not replayed yet.

use std::collections::VecDeque;

use crate::{Error, ExtentRead, Result, Scratch, Shared, Store};

/// The largest number of reads in flight. Each read is of an extent, or of a chunk of the log.
pub(crate) const DEPTH: usize = 4;

/// The amount of data that a verification found whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// The number of whole extents, plus the number of whole chunks of logged gradients.
    pub extents: u64,
    /// The bytes of these extents and chunks, in whole pages.
    pub bytes: u64,
}

impl Store {
    /// Reads and checks every live extent, and every gradient of [`Store::pending_replay`]. `progress` receives the
    /// bytes done and the total, and returns `false` to stop.
    ///
    /// # Errors
    /// Fails at the first extent or gradient that is damaged or cannot be read, and with [`Error::Interrupted`] if
    /// `progress` returns `false`.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Verified> {
        let verified = self.verify_each(progress, &mut Err)?;
        self.pending_replay().iter().for_each(|replay| replay.note_checked());
        Ok(verified)
    }

    /// Does what [`Store::verify`] does, but passes the error of each damaged or unreadable extent or chunk of a
    /// gradient to `damaged`, which returns `Ok` to continue. Does not note that the gradients were checked.
    pub(crate) fn verify_each(
        &self,
        progress: &mut dyn FnMut(u64, u64) -> bool,
        damaged: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Verified> {
        let records = 0..self.description.records.len();
        let all = self.layout.slot_bytes();
        let extents = self.verify_slots(records, &mut |done| progress(done, all), damaged)?;
        // `progress` does not count the log, because the number of bytes that are needed from the log is not known in
        // advance.
        let logged = self.verify_log(&mut || progress(all, all), damaged)?;
        Ok(Verified { extents: extents.extents + logged.extents, bytes: extents.bytes + logged.bytes })
    }

    /// Reads and checks the gradients of [`Store::pending_replay`] and the live slots of their records. Does nothing if
    /// an earlier call of this function or of [`Store::verify`] has checked these gradients. `keep_going` is called
    /// after each extent and each chunk of a gradient, and returns `false` to stop.
    ///
    /// A caller that replays the log must call this before it stages anything, because staging overwrites the previous
    /// commit. If the log is damaged, the previous commit is all that is left of the run.
    pub fn check_log(&self, keep_going: &mut dyn FnMut() -> bool) -> Result<()> {
        let Some(replay) = self.pending_replay().filter(|replay| !replay.is_checked()) else { return Ok(()) };
        self.verify_slots(replay.records(), &mut |_| keep_going(), &mut Err)?;
        self.verify_log(keep_going, &mut Err)?;
        replay.note_checked();
        Ok(())
    }

    /// Reads and checks the live slots of records. `progress` receives the bytes done, and returns `false` to stop.
    fn verify_slots(
        &self,
        records: impl Iterator<Item = usize>,
        progress: &mut dyn FnMut(u64) -> bool,
        damaged: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Verified> {
        let (state, values) = self.description.staging_bytes();
        let chunk = state.max(values).max(1) as usize;
        let scratch = Scratch::new(chunk, DEPTH, "store verification")?;
        let extents =
            records.flat_map(|record| (0..self.layout.extents_of(record)).map(move |extent| (record, extent)));
        let (mut done, mut read_bytes) = (Verified::default(), 0);
        let begin = |(record, extent)| {
            let bytes = self.layout.extent(&self.description, record, extent).bytes();
            Ok((self.read_slot(record, extent, scratch.part(bytes)?)?, bytes))
        };
        in_flight(DEPTH, extents, begin, |(read, bytes): (ExtentRead<'_, Shared>, u64)| {
            match read.wait() {
                Ok(_) => done.add(bytes),
                Err(error) => damaged(error)?,
            }
            read_bytes += bytes;
            if progress(read_bytes) { Ok(()) } else { Err(Error::Interrupted("verification")) }
        })?;
        Ok(done)
    }
}

impl Verified {
    /// Counts one more extent.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.extents += 1;
        self.bytes += bytes;
    }
}

/// Begins one operation for each item, and ends the operations in the order of the items. At most `depth` operations
/// are in flight.
pub(crate) fn in_flight<T, O>(
    depth: usize,
    items: impl Iterator<Item = T>,
    mut begin: impl FnMut(T) -> Result<O>,
    mut end: impl FnMut(O) -> Result<()>,
) -> Result<()> {
    let mut flying = VecDeque::with_capacity(depth);
    for item in items {
        if flying.len() == depth
            && let Some(first) = flying.pop_front()
        {
            end(first)?;
        }
        flying.push_back(begin(item)?);
    }
    flying.into_iter().try_for_each(end)
}
