//! Tracks what is in flight in a volume: overlapping operations wait for each other.
//!
//! Three questions are answered here. Has everything ended (close)? Has every write that came before me ended (flush)?
//! May I read, change and write back this block (a transfer whose end lies inside it)? The last keeps operations on
//! different bytes of one block from undoing each other: a *shared* hold is on blocks that are written whole, an
//! *alone* hold on blocks that are read first; an alone hold admits no other beside it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use memascend_mem::{Guarded, Wait};

use crate::{Error, Result};

/// Operations that one volume keeps track of; each costs a few hundred bytes. Far more than any device can use.
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

/// The mark of an operation that has begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun(u64);

/// The mark of a hold on a range of blocks.
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
    /// Enters an operation, unless the volume is closed or full.
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

    /// A hold on blocks that will be written whole, unless one of them is being changed.
    pub(crate) fn try_hold_shared(&self, range: &Range<u64>) -> Option<Hold> {
        let mut table = self.0.lock();
        if table.alone_overlaps(range) {
            return None;
        }
        let number = table.number();
        table.shared.insert(number, range.clone());
        Some(Hold(number))
    }

    /// As above, waiting. Whoever holds waits for the device alone, so this ends.
    pub(crate) fn hold_shared(&self, range: &Range<u64>) -> Hold {
        let mut table = self.0.when(|table| !table.alone_overlaps(range));
        let number = table.number();
        table.shared.insert(number, range.clone());
        Hold(number)
    }

    /// A hold on blocks that will be read, changed and written back. Waits.
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

    /// No operation begins any more.
    pub(crate) fn close(&self) {
        self.change(|table| table.closed = true);
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.0.lock().operations
    }

    /// Waits for every operation.
    pub(crate) fn wait_for_all(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.wait(wait, "the end of all operations", |table| table.operations == 0)
    }

    /// Waits for every write that has begun before the call.
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
