//! Verifies a store: reads and checks every live piece.

use std::collections::VecDeque;

use memascend_mem::{ChunkRing, OnFork, Pin, Region, Wait};

use crate::{Error, Result, Shared, Store};

/// Pieces in flight.
const DEPTH: usize = 4;

/// What a verification found to be whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// Pieces.
    pub pieces: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Store {
    /// Reads every live piece and checks it. `progress` hears of bytes done and of all, and ends it by `false`.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Verified> {
        self.verify_each(progress, &mut Err)
    }

    /// The same; `damaged` hears of each piece that is not whole, or cannot be read, and says whether to go on.
    pub(crate) fn verify_each(
        &self,
        progress: &mut dyn FnMut(u64, u64) -> bool,
        damaged: &mut dyn FnMut(Error) -> Result<()>,
    ) -> Result<Verified> {
        let (state, values) = self.description.staging_bytes();
        let chunk = state.max(values).max(1) as usize;
        let region = Region::new(DEPTH * chunk, Pin::Off, OnFork::Wipe, "store verification")?;
        let ring = ChunkRing::new(&region, chunk, DEPTH)?;
        let owner = ring.owner("verification")?;
        let pieces = (0..self.description.entries.len())
            .flat_map(|entry| (0..self.layout.pieces_of(entry)).map(move |piece| (entry, piece)));
        let mut flying = VecDeque::with_capacity(DEPTH);
        let (mut done, mut read_bytes) = (Verified::default(), 0);
        let mut finish = |flying: &mut VecDeque<(crate::PieceRead<'_, Shared>, u64)>| -> Result<()> {
            let Some((read, bytes)) = flying.pop_front() else { return Ok(()) };
            match read.wait() {
                Ok(_) => {
                    done.pieces += 1;
                    done.bytes += bytes;
                }
                Err(error) => damaged(error)?,
            }
            read_bytes += bytes;
            if progress(read_bytes, self.layout.slot_bytes()) {
                Ok(())
            } else {
                Err(Error::Interrupted("verification"))
            }
        };
        for (entry, piece) in pieces {
            if flying.len() == DEPTH {
                finish(&mut flying)?;
            }
            let bytes = self.layout.piece(&self.description, entry, piece).bytes();
            let memory = Shared::new(ring.lease(owner, Wait::forever())?).part(0, bytes as usize);
            let memory = memory.ok_or_else(|| Error::Invalid("a piece is larger than a chunk".into()))?;
            flying.push_back((self.read_slot(entry, piece, memory)?, bytes));
        }
        while !flying.is_empty() {
            finish(&mut flying)?;
        }
        drop(flying);
        let logged = self.verify_log(progress, damaged)?;
        Ok(Verified { pieces: done.pieces + logged.pieces, bytes: done.bytes + logged.bytes })
    }
}
