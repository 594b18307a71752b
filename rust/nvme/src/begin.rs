//! Begins an operation: everything that can fail first, then straight to the devices or by way of a copy.

use std::{any::Any, ops::Range, sync::Arc};

use crate::{
    Error, Lane, Result,
    operation::{Address, Context, Kind, Operation},
    request::Job,
    traffic::{Begun, Hold},
    volume::{Running, Volume},
};

impl Volume {
    /// Everything that can fail, before anything is begun.
    pub(crate) fn prepare<'a>(
        &self,
        running: Option<&'a Running>,
        (kind, lane): (Kind, Lane),
        address: Address,
        offset: u64,
        nbytes: usize,
    ) -> Result<Prepared<'a>> {
        let context = &self.context;
        let running = running.ok_or(Error::Closed)?;
        let Some(end) = offset.checked_add(nbytes as u64).filter(|end| *end <= self.size_bytes()) else {
            return Err(Error::PastTheEnd { offset, nbytes, size_bytes: self.size_bytes() });
        };
        let whole = offset..end;
        let mut straight = whole_blocks(context, &whole);
        let skipped = usize::try_from(straight.start - whole.start).unwrap_or(usize::MAX);
        if !address.plus(skipped).is_aligned(context.memory_align) {
            straight = whole.end..whole.end;
        }
        if straight != whole {
            running.unaligned.ready()?;
        }
        let begun = context.traffic.begin(kind.writes())?;
        let mut hold = None;
        if kind.writes() && context.block_bytes > 1 && !straight.is_empty() {
            hold = context.traffic.try_hold_shared(&straight);
            if hold.is_none() {
                // One of its blocks is being changed: those that copy wait their turn.
                straight = whole.end..whole.end;
                if let Err(error) = running.unaligned.ready() {
                    context.traffic.end(begun);
                    return Err(error);
                }
            }
        }
        Ok(Prepared { running, kind, lane, address, whole, straight, begun, hold })
    }
}

/// An operation that nothing stands in the way of.
pub(crate) struct Prepared<'a> {
    running: &'a Running,
    kind: Kind,
    lane: Lane,
    address: Address,
    /// The volume's bytes that it moves.
    whole: Range<u64>,
    /// Those of them that go straight between memory and disk: whole blocks. Empty, at the end of `whole`, for none.
    straight: Range<u64>,
    begun: Begun,
    /// On the blocks that a write goes straight to.
    hold: Option<Hold>,
}

impl Prepared<'_> {
    pub(crate) fn start(self, context: &Arc<Context>, buffer: Box<dyn Any + Send>) -> Arc<Operation> {
        let Self { running, kind, lane, address, whole, straight, begun, hold } = self;
        let Running { unaligned, backend, .. } = running;
        let units = whole.end - whole.start;
        let all = straight == whole;
        let own_hold = if all { hold } else { None };
        let operation =
            Operation::new(context, (kind, lane), (whole.start, units), address, (begun, own_hold), Some(buffer));
        if units == 0 {
            operation.finish_empty();
            return operation;
        }
        if all {
            backend.submit(Job::new(Arc::clone(&operation)));
            return operation;
        }
        let edges = [whole.start..straight.start, straight.end..whole.end];
        if !straight.is_empty() {
            backend.submit(Job::new(operation.part(straight, hold)));
        }
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            unaligned.copy(&operation, edge);
        }
        operation
    }
}

/// The part of `whole` that makes up whole blocks. Empty, at the end of `whole`, where there is none.
fn whole_blocks(context: &Context, whole: &Range<u64>) -> Range<u64> {
    let block = context.block_bytes as u64;
    match (whole.start.checked_next_multiple_of(block), whole.end / block * block) {
        (Some(start), end) if start < end => start..end,
        _ => whole.end..whole.end,
    }
}
