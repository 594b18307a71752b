//! The chunk ring: equal chunks for staging, handed between threads.

use std::sync::Arc;

use crate::{Arena, ArenaStats, Lease, OwnerId, Region, Result, Wait};

/// A bounded pool of equal chunks. An arena of one class: what holds there holds here.
#[derive(Debug, Clone)]
pub struct ChunkRing {
    arena: Arc<Arena>,
    chunk_bytes: usize,
}

impl ChunkRing {
    /// Divides `region` into `count` chunks of `chunk_bytes`.
    pub fn new(region: &Region, chunk_bytes: usize, count: usize) -> Result<Self> {
        Ok(Self { arena: Arc::new(Arena::new(region, &[(chunk_bytes, count)])?), chunk_bytes })
    }

    /// The size of a chunk.
    #[must_use]
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// The owner called `name`.
    pub fn owner(&self, name: &str) -> Result<OwnerId> {
        self.arena.owner(name)
    }

    /// Takes a chunk; see [`Arena::lease`].
    pub fn lease(&self, owner: OwnerId, wait: Wait<'_>) -> Result<Lease> {
        self.arena.lease(self.chunk_bytes, owner, wait)
    }

    /// See [`Arena::stats`].
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.arena.stats()
    }
}
