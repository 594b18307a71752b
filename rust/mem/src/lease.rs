//! Leases: an RAII hold on one slot of an arena.

use std::{ptr::NonNull, sync::Arc};

use crate::{arena::Shared, owners::OwnerId};

/// Bytes of an arena, held until dropped. Nobody else has them meanwhile.
#[derive(Debug)]
pub struct Lease {
    pub(crate) shared: Arc<Shared>,
    pub(crate) class: usize,
    pub(crate) slot: u32,
    pub(crate) asked_bytes: usize,
    pub(crate) owner: OwnerId,
}

impl Lease {
    /// The bytes that were asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.asked_bytes
    }

    /// Never: a lease has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.asked_bytes == 0
    }

    /// The bytes of the slot that holds them.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.shared.layout().classes()[self.class].bytes
    }

    /// Whether its region was closed: then the last lease to go unmaps.
    #[must_use]
    pub fn is_region_closed(&self) -> bool {
        self.shared.is_region_closed()
    }

    /// The first byte. Valid for `slot_bytes()` while the lease lives.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.shared.address(self.class, self.slot)
    }

    /// The leased bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the slot is this lease's alone, initialised (the kernel's zeros at least) and mapped while it lives;
        // writing needs `&mut self` or the unsafety of `as_ptr`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().as_ptr(), self.asked_bytes) }
    }

    /// The leased bytes, to be written.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` is the only way in.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().as_ptr(), self.asked_bytes) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.give_back(self);
    }
}
