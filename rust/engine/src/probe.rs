//! Measures how fast storage is read, through the staging chunks that updates pass through.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use memascend_mem::Wait;
use memascend_store::Shared;

use crate::{Engine, Result};

/// Nothing else uses staging chunks meanwhile.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);

impl Engine {
    /// Reads live pieces that are not held, for at most so many bytes and so long: how many bytes
    /// that were, and how long it took. Nothing else is to be done meanwhile.
    pub fn probe(&self, bytes_max: u64, most: Duration) -> Result<(u64, Duration)> {
        let (store, ring, owner, chunks) = self.for_probe();
        let (layout, description) = (store.layout(), store.description());
        let streamed = (0..description.entries.len()).filter(|&entry| !store.is_held(entry));
        let pieces = streamed.flat_map(|entry| (0..layout.pieces_of(entry)).map(move |piece| (entry, piece)));
        let (began, mut done) = (Instant::now(), 0);
        let mut flying = VecDeque::with_capacity(chunks);
        for (entry, piece) in pieces {
            if done >= bytes_max || began.elapsed() >= most {
                break;
            }
            let bytes = layout.piece(description, entry, piece).bytes();
            let lease = ring.lease(owner, Wait::at_most(LEASE_TIMEOUT)).map_err(memascend_store::Error::from)?;
            let Some(part) = Shared::new(lease).part(0, usize::try_from(bytes).unwrap_or(usize::MAX)) else { continue };
            flying.push_back((store.read(entry, piece, part)?, bytes));
            if flying.len() == chunks
                && let Some((read, bytes)) = flying.pop_front()
            {
                read.wait()?;
                done += bytes;
            }
        }
        for (read, bytes) in flying {
            read.wait()?;
            done += bytes;
        }
        Ok((done, began.elapsed()))
    }
}
