//! Begins an operation: checks first, then sends it to the devices or through a copy.

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
        let Some(end) = offset.checked_add(nbytes as u64).filter(|end| *end <= self.size_bytes) else {
            return Err(Error::PastTheEnd { offset, nbytes, size_bytes: self.size_bytes });
        };
        let whole = offset..end;
        let body = whole_blocks(context, &whole);
        let skipped = usize::try_from(body.start - whole.start).unwrap_or(usize::MAX);
        let straight = address.plus(skipped).is_aligned(context.memory_align);
        if !straight || body != whole {
            running.bounce.ready()?;
        }
        let begun = context.traffic.begin(kind.writes())?;
        let mut hold = None;
        let mut blocked = false;
        if kind.writes() && straight && context.block_bytes > 1 && !body.is_empty() {
            hold = context.traffic.try_hold_shared(&body);
            blocked = hold.is_none();
            if let Err(error) = if blocked { running.bounce.ready() } else { Ok(()) } {
                context.traffic.end(begun);
                return Err(error);
            }
        }
        Ok(Prepared { running, kind, lane, address, whole, body, straight, begun, hold, blocked })
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
    /// Those of them that make up whole blocks.
    body: Range<u64>,
    /// The body is aligned in memory too, and goes straight between there and the disk.
    straight: bool,
    begun: Begun,
    /// On the blocks of the body, for a write that goes straight.
    hold: Option<Hold>,
    /// One of those blocks is being changed, so the body waits its turn.
    blocked: bool,
}

impl Prepared<'_> {
    pub(crate) fn start(self, context: &Arc<Context>, buffer: Box<dyn Any + Send>) -> Arc<Operation> {
        let Self { running, kind, lane, address, whole, body, straight, begun, hold, blocked } = self;
        let Running { bounce, backend, .. } = running;
        let units = whole.end - whole.start;
        let all_straight = straight && body == whole && !blocked;
        let own_hold = if all_straight { hold } else { None };
        let operation =
            Operation::new(context, (kind, lane), (whole.start, units), address, (begun, own_hold), Some(buffer));
        if units == 0 {
            operation.finish_empty();
            return operation;
        }
        if all_straight {
            backend.submit(Job::new(Arc::clone(&operation)));
            return operation;
        }
        if kind == Kind::Read && !straight {
            bounce.copy(&operation, whole);
            return operation;
        }
        // The edges are transfers of their own, of a block each: neighbours that share one wait for no more than that.
        let edges = [whole.start..body.start, body.end..whole.end];
        if !body.is_empty() {
            match (straight, blocked) {
                (true, false) => backend.submit(Job::new(operation.part(body, hold))),
                (true, true) => bounce.wait_and_write(&operation, body),
                (false, _) => bounce.copy(&operation, body),
            }
        }
        for edge in edges {
            if !edge.is_empty() {
                match kind {
                    Kind::Read => bounce.copy(&operation, edge),
                    _ => bounce.change(&operation, &edge),
                }
            }
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
