//! Tracks what is in flight in a volume: overlapping operations wait for each other.
//!
//! Three questions are answered here. Has everything ended (close)? Has every write that came before me ended (flush)?
//! May I read, change and write back this block (a transfer whose end lies inside it)? The last keeps operations on
//! different bytes of one block from undoing each other: a *shared* hold is on blocks that are written whole, an
//! *alone* hold on blocks that are read first; an alone hold admits no other beside it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{Condvar, Mutex, PoisonError},
};

use memascend_mem::Wait;

use crate::{
    Error, Result,
    wait::{locked, wait_until},
};

/// Operations that one volume keeps track of; each costs a few hundred bytes. Far more than any device can use.
pub const OPERATIONS_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct Traffic {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    closed: bool,
    next: u64,
    operations: usize,
    writes: BTreeSet<u64>,
    shared: BTreeMap<u64, Range<u64>>,
    alone: Vec<(u64, Range<u64>)>,
    waiting: usize,
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
        let mut table = locked(&self.table);
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
        let mut table = locked(&self.table);
        if table.alone_overlaps(range) {
            return None;
        }
        let number = table.number();
        table.shared.insert(number, range.clone());
        Some(Hold(number))
    }

    /// As above, waiting. Whoever holds waits for the device alone, so this ends.
    pub(crate) fn hold_shared(&self, range: &Range<u64>) -> Hold {
        let mut table = self.when(|table| !table.alone_overlaps(range));
        let number = table.number();
        table.shared.insert(number, range.clone());
        Hold(number)
    }

    /// A hold on blocks that will be read, changed and written back. Waits.
    pub(crate) fn hold_alone(&self, range: &Range<u64>) -> Hold {
        let mut table = self.when(|table| table.free_of_all(range));
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
        locked(&self.table).operations
    }

    /// Waits for every operation.
    pub(crate) fn wait_for_all(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.wait(wait, "the end of all operations", |table| table.operations == 0)
    }

    /// Waits for every write that has begun before the call.
    pub(crate) fn wait_for_writes(&self, wait: &mut Wait<'_>) -> Result<()> {
        let now = locked(&self.table).next;
        self.wait(wait, "the writes before a flush", |table| table.writes.first().is_none_or(|first| *first > now))
    }

    fn wait(&self, wait: &mut Wait<'_>, what: &str, ready: impl Fn(&Table) -> bool) -> Result<()> {
        locked(&self.table).waiting += 1;
        let result = wait_until(&self.table, &self.changed, wait, &|| what.into(), ready).map(drop);
        locked(&self.table).waiting -= 1;
        result
    }

    fn when(&self, ready: impl Fn(&Table) -> bool) -> std::sync::MutexGuard<'_, Table> {
        let mut table = locked(&self.table);
        table.waiting += 1;
        while !ready(&table) {
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        table.waiting -= 1;
        table
    }

    fn change(&self, change: impl FnOnce(&mut Table)) {
        let mut table = locked(&self.table);
        change(&mut table);
        let waiting = table.waiting > 0;
        drop(table);
        if waiting {
            self.changed.notify_all();
        }
    }
}
