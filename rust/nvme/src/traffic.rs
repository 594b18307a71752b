//! Tracks the operations in flight on a volume, and keeps two writes to one block from undoing each other.
//!
//! `Volume::close` waits until all operations have ended. `Volume::flush` waits until the writes that began before the
//! flush have ended.
//!
//! [Note: block holds] A write that covers only a part of a block must read the block, change the part and write the
//! block back. Two of these writes to different bytes of one block would undo each other. So a write of whole blocks
//! takes a *shared* hold on these blocks, and a write that reads the block first takes an *alone* hold. An alone hold
//! excludes every other hold on its blocks; shared holds do not exclude each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use memascend_mem::{Guarded, Wait};

use crate::{Error, Result};

/// The largest number of operations in flight on one volume. Each operation costs a few hundred bytes of memory. No
/// device can use this many operations.
pub const OPERATIONS_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct Traffic(Guarded<Table>);

#[derive(Debug, Default)]
struct Table {
    closed: bool,
    next: u64,
    operations: usize,
    writes: BTreeSet<u64>,
    shared: BTreeMap<u64, Range<u64>>,
    alone: Vec<(u64, Range<u64>)>,
}

/// Identifies an operation that has begun. The caller passes this value to `Traffic::end`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun(u64);

/// Identifies a hold on a range of blocks. The caller passes this value to `Traffic::release`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hold(u64);

impl Table {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn alone_overlaps(&self, range: &Range<u64>) -> bool {
        self.alone.iter().any(|(_, held)| overlap(held, range))
    }

    fn free_of_all(&self, range: &Range<u64>) -> bool {
        !self.alone_overlaps(range) && !self.shared.values().any(|held| overlap(held, range))
    }
}

fn overlap(left: &Range<u64>, right: &Range<u64>) -> bool {
    left.start < right.end && right.start < left.end
}

impl Traffic {
    /// Registers an operation. `writes` says whether a flush must wait for the operation.
    ///
    /// # Errors
    /// [`Error::Closed`] after `close`; [`Error::TooMany`] at [`OPERATIONS_MAX`] operations.
    pub(crate) fn begin(&self, writes: bool) -> Result<Begun> {
        let mut table = self.0.lock();
        if table.closed {
            return Err(Error::Closed);
        }
        if table.operations >= OPERATIONS_MAX {
            return Err(Error::TooMany { operations_max: OPERATIONS_MAX });
        }
        let number = table.number();
        table.operations += 1;
        if writes {
            table.writes.insert(number);
        }
        Ok(Begun(number))
    }

    pub(crate) fn end(&self, begun: Begun) {
        self.change(|table| {
            table.operations -= 1;
            table.writes.remove(&begun.0);
        });
    }

    /// Takes a shared hold; `None` if an alone hold overlaps `range`. See [Note: block holds].
    pub(crate) fn try_hold_shared(&self, range: &Range<u64>) -> Option<Hold> {
        let mut table = self.0.lock();
        if table.alone_overlaps(range) {
            return None;
        }
        let number = table.number();
        table.shared.insert(number, range.clone());
        Some(Hold(number))
    }

    /// Waits until no alone hold overlaps `range`, then takes a shared hold. An operation with an alone hold waits only
    /// for the device, so this wait ends.
    pub(crate) fn hold_shared(&self, range: &Range<u64>) -> Hold {
        let mut table = self.0.when(|table| !table.alone_overlaps(range));
        let number = table.number();
        table.shared.insert(number, range.clone());
        Hold(number)
    }

    /// Waits until no hold overlaps `range`, then takes an alone hold. See [Note: block holds].
    pub(crate) fn hold_alone(&self, range: &Range<u64>) -> Hold {
        let mut table = self.0.when(|table| table.free_of_all(range));
        let number = table.number();
        table.alone.push((number, range.clone()));
        Hold(number)
    }

    pub(crate) fn release(&self, hold: Hold) {
        self.change(|table| {
            if table.shared.remove(&hold.0).is_none() {
                table.alone.retain(|(number, _)| *number != hold.0);
            }
        });
    }

    /// Makes every later `begin` fail.
    pub(crate) fn close(&self) {
        self.change(|table| table.closed = true);
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.0.lock().operations
    }

    /// Waits until every operation has ended.
    pub(crate) fn wait_for_all(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.wait(wait, "the operations in flight", |table| table.operations == 0)
    }

    /// Waits until every write that began before the call has ended.
    pub(crate) fn wait_for_writes(&self, wait: &mut Wait<'_>) -> Result<()> {
        let now = self.0.lock().next;
        self.wait(wait, "the writes before a flush", |table| table.writes.first().is_none_or(|first| *first > now))
    }

    fn wait(&self, wait: &mut Wait<'_>, what: &str, ready: impl Fn(&Table) -> bool) -> Result<()> {
        self.0.wait_until(wait, ready).map(drop).map_err(|ended| Error::of_wait(ended, || what.into()))
    }

    fn change(&self, change: impl FnOnce(&mut Table)) {
        change(&mut self.0.lock());
        self.0.notify_all();
    }
}
