//! Tracks one write that a commit waits for: the write of a staged extent, or of a chunk of a gradient in the log.

use memascend_nvme::Ticket;

use crate::{Buffer, Error, Result, Store, index::Index};

/// A write that a commit waits for. The index counts the write as ended once the owner waits for the `StepWrite` or
/// drops it.
pub struct StepWrite<'a, B: Buffer> {
    store: &'a Store,
    ticket: Option<Ticket<B>>,
    record: usize,
    count: Count,
}

/// A function that notes in the index that a write of a record ended. The `bool` is true if the write succeeded.
type Count = fn(&mut Index, usize, bool);

impl Store {
    /// Begins a write that the index already counts as in flight. If the volume rejects the write, calls `count` at
    /// once. Otherwise the `StepWrite` calls `count` when its owner waits for it or drops it.
    pub(crate) fn write_of_step<B: Buffer>(
        &self,
        buffer: B,
        place: u64,
        record: usize,
        count: Count,
    ) -> Result<StepWrite<'_, B>> {
        match self.volume.write(buffer, place) {
            Ok(ticket) => Ok(StepWrite { store: self, ticket: Some(ticket), record, count }),
            Err(refused) => {
                let error = Error::from(refused.error);
                self.written(record, count, Err(error.clone()));
                Err(error)
            }
        }
    }

    /// Notes in the index that a write ended, and wakes the threads that wait for writes to end.
    fn written(&self, record: usize, count: Count, result: Result<()>) {
        let mut index = self.index.lock();
        index.writing -= 1;
        count(&mut index, record, result.is_ok());
        if let Err(error) = result {
            index.failed.get_or_insert(error);
        }
        drop(index);
        self.index.notify_all();
    }
}

impl<B: Buffer> StepWrite<'_, B> {
    /// True if the write has ended on the device.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.ticket.as_ref().is_none_or(Ticket::is_done)
    }

    /// Waits for the write and returns the buffer. After a failed write, the step can only be discarded.
    pub fn wait(mut self) -> Result<B> {
        match self.settle() {
            Some((buffer, result)) => result.map(|()| buffer),
            None => Err(Error::Usage("this write was waited for already: wait for each write once".into())),
        }
    }

    /// Waits for the write and notes the end of the write in the index. Returns `None` if an earlier call has waited
    /// for the write.
    fn settle(&mut self) -> Option<(B, Result<()>)> {
        let finished = self.ticket.take()?.wait();
        let result = finished.result.map(drop).map_err(Error::from);
        self.store.written(self.record, self.count, result.clone());
        Some((finished.buffer, result))
    }
}

impl<B: Buffer> Drop for StepWrite<'_, B> {
    fn drop(&mut self) {
        drop(self.settle());
    }
}
