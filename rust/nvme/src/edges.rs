//! Writes parts of blocks: reads, changes and writes back a block once for all waiting parts.
//!
//! Writes that lie back to back share a block. Its two parts come moments apart, so they mostly become one change, and
//! where the parts make up the block it need not be read.

use std::{
    collections::{BTreeMap, VecDeque, btree_map::Entry},
    ops::Range,
    sync::{Arc, Condvar, Mutex, PoisonError},
};

use memascend_mem::Lease;

use crate::{
    Lane,
    backend::{Backend, block_signals},
    error::contained,
    operation::{Address, Context, Kind, Operation, transfer},
    stats::add,
    wait::locked,
};

/// Threads, each with room for a block. Each waits for the device nearly all the time, behind the large requests.
pub(crate) const EDGE_THREADS: usize = 8;

/// A part of one block that an operation writes.
struct Part {
    operation: Arc<Operation>,
    range: Range<u64>,
}

pub(crate) struct Edges {
    context: Arc<Context>,
    backend: Arc<dyn Backend>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Parts not taken yet, by the start of their block. A block is here from its first part until it has been written,
    /// so each is in at most one thread's hands.
    blocks: BTreeMap<u64, Vec<Part>>,
    /// Blocks of those in nobody's hands.
    ready: VecDeque<u64>,
    stop: bool,
}

impl Edges {
    pub(crate) fn new(context: &Arc<Context>, backend: &Arc<dyn Backend>) -> Self {
        let (context, backend) = (Arc::clone(context), Arc::clone(backend));
        Self { context, backend, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Writes `range` of an operation, cut into its blocks.
    pub(crate) fn write(&self, operation: &Arc<Operation>, range: &Range<u64>) {
        let block_bytes = self.context.block_bytes as u64;
        let mut start = range.start;
        while start < range.end {
            let block = start / block_bytes * block_bytes;
            let end = range.end.min(block + block_bytes);
            let part = Part { operation: Arc::clone(operation), range: start..end };
            let mut state = locked(&self.state);
            match state.blocks.entry(block) {
                // Whoever has it, or will have it, takes this part too.
                Entry::Occupied(mut parts) => parts.get_mut().push(part),
                Entry::Vacant(place) => {
                    place.insert(vec![part]);
                    state.ready.push_back(block);
                    self.changed.notify_one();
                }
            }
            start = end;
        }
    }

    /// The threads end when nothing is left.
    pub(crate) fn stop(&self) {
        locked(&self.state).stop = true;
        self.changed.notify_all();
    }

    /// The work of one thread, whose block is `room`.
    pub(crate) fn serve(&self, room: &Lease) {
        block_signals();
        let at = Address(room.as_ptr().as_ptr());
        while let Some(block) = self.next() {
            self.change(block, at);
        }
    }

    fn next(&self) -> Option<u64> {
        let mut state = locked(&self.state);
        loop {
            if let Some(block) = state.ready.pop_front() {
                return Some(block);
            }
            if state.stop {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reads a block unless its parts make it up, changes it and writes it back.
    #[expect(clippy::cast_possible_truncation, reason = "inside a block")]
    fn change(&self, block: u64, at: Address) {
        let context = &self.context;
        let whole = block..block + context.block_bytes as u64;
        let hold = context.traffic.hold_alone(&whole);
        let mut parts = self.take(block);
        let result = contained(|| {
            if !make_up(&whole, parts.iter().map(|part| part.range.clone()).collect()) {
                transfer(context, &*self.backend, (Kind::Read, Lane::Second), whole.clone(), at)?;
                // What came meanwhile.
                parts.append(&mut self.take(block));
            }
            // In the order in which they came. One whose operation has failed elsewhere may be what the block was not
            // read for, so it counts too.
            for Part { operation, range } in &parts {
                let bytes = (range.end - range.start) as usize;
                let to = at.plus((range.start - block) as usize);
                // SAFETY: the operation owns its buffer until this part has landed; the room is this thread's alone.
                unsafe { std::ptr::copy_nonoverlapping(operation.address_of(range.start).0, to.0, bytes) };
                add(&context.counters.bounced_bytes, bytes as u64);
            }
            let durable = parts.iter().any(|part| part.operation.kind == Kind::Write { durable: true });
            transfer(context, &*self.backend, (Kind::Write { durable }, Lane::Second), whole.clone(), at)
        });
        context.traffic.release(hold);
        self.give_back(block);
        for Part { operation, range } in parts {
            operation.landed(range.end - range.start, result.clone());
        }
    }

    fn take(&self, block: u64) -> Vec<Part> {
        locked(&self.state).blocks.get_mut(&block).map(std::mem::take).unwrap_or_default()
    }

    /// This thread is done with a block; parts that came too late have their turn after those of other blocks.
    fn give_back(&self, block: u64) {
        let mut state = locked(&self.state);
        if state.blocks.get(&block).is_some_and(|parts| !parts.is_empty()) {
            state.ready.push_back(block);
            self.changed.notify_one();
        } else {
            state.blocks.remove(&block);
        }
    }
}

/// Whether no byte of the block is in none of the ranges.
fn make_up(block: &Range<u64>, mut ranges: Vec<Range<u64>>) -> bool {
    ranges.sort_unstable_by_key(|range| range.start);
    let reached = ranges
        .iter()
        .fold(block.start, |reached, range| if range.start <= reached { reached.max(range.end) } else { reached });
    reached == block.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "one range, not its numbers")]
    fn a_gap_of_one_byte_has_the_block_read() {
        let block = 512..1024;
        assert!(make_up(&block, vec![512..1024]));
        assert!(make_up(&block, vec![600..1024, 512..600]));
        assert!(make_up(&block, vec![512..1000, 520..530, 700..1024]));
        assert!(!make_up(&block, vec![]));
        assert!(!make_up(&block, vec![512..1023]));
        assert!(!make_up(&block, vec![513..1024]));
        assert!(!make_up(&block, vec![512..600, 601..1024]));
        assert!(!make_up(&block, vec![900..1024, 512..520, 530..540]));
    }
}
