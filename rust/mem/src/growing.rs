//! Defines an arena to which slots can be added after it was planned. Each added slot has a separate region.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};

use crate::{Arena, KeepGoing, Layout, Lease, OnFork, Pin, Region, Result, Wait, locked};

/// An arena with planned slots, and with slots that were added later.
#[derive(Debug)]
pub struct GrowingArena {
    planned: Part,
    added: Mutex<Vec<Part>>,
}

#[derive(Debug)]
struct Part {
    /// The size of an added slot in bytes. The planned part does not use this field.
    bound: usize,
    region: Region,
    arena: Arena,
}

impl Part {
    fn new(classes: &[(usize, usize)], keep_going: KeepGoing<'_>) -> Result<Self> {
        let reserved = Layout::unbounded(classes)?.reserved_bytes();
        let region = Region::interruptible(reserved, Pin::Off, OnFork::Wipe, "units", keep_going)?;
        let arena = Arena::new(&region, classes)?;
        Ok(Self { bound: classes.first().map_or(0, |&(bytes, _)| bytes), region, arena })
    }

    fn bytes(&self) -> usize {
        self.region.bytes() + self.arena.table_bytes()
    }

    fn held_bytes(&self) -> usize {
        if self.region.is_closed() { 0 } else { self.bytes() }
    }
}

impl GrowingArena {
    /// Allocates the planned slots. Each item of `classes` is the size of a slot in bytes, and the number of slots of
    /// this size.
    pub fn new(classes: &[(usize, usize)], keep_going: KeepGoing<'_>) -> Result<Self> {
        Ok(Self { planned: Part::new(classes, keep_going)?, added: Mutex::default() })
    }

    /// Adds a slot to the class that serves leases of `nbytes` bytes. Returns how many bytes the new slot and its
    /// tables take.
    pub fn add(&self, nbytes: usize, keep_going: KeepGoing<'_>) -> Result<usize> {
        let part = Part::new(&[(self.bound(nbytes)?, 1)], keep_going)?;
        let taken = part.bytes();
        self.added().push(part);
        Ok(taken)
    }

    /// Returns the number of added slots of each class. The key is the size of a slot in bytes.
    #[must_use]
    pub fn added_slots(&self) -> BTreeMap<usize, usize> {
        let mut slots = BTreeMap::new();
        for part in self.added().iter() {
            *slots.entry(part.bound).or_default() += 1;
        }
        slots
    }

    /// Returns how many bytes all added slots and their tables take.
    #[must_use]
    pub fn added_bytes(&self) -> usize {
        self.added().iter().map(Part::bytes).sum()
    }

    /// Takes a slot of the smallest planned class that fits. If no planned slot of this class is free, takes an added
    /// slot. If no added slot is free, waits for a planned slot as long as `wait` allows.
    pub fn lease(&self, nbytes: usize, owner: &str, wait: Wait<'_>) -> Result<Lease> {
        if self.planned.arena.free_slots(nbytes)? == 0 {
            let bound = self.bound(nbytes)?;
            for part in self.added().iter().filter(|part| part.bound == bound) {
                if part.arena.free_slots(nbytes)? > 0 {
                    return part.arena.lease(nbytes, part.arena.owner(owner)?, Wait::never());
                }
            }
        }
        self.planned.arena.lease(nbytes, self.planned.arena.owner(owner)?, wait)
    }

    /// Returns the number of free slots, planned and added, of the class that serves leases of `nbytes` bytes.
    pub fn free_slots(&self, nbytes: usize) -> Result<usize> {
        let planned = self.planned.arena.free_slots(nbytes)?;
        let bound = self.bound(nbytes)?;
        let added = self.added();
        let free: Result<Vec<usize>> =
            added.iter().filter(|part| part.bound == bound).map(|part| part.arena.free_slots(nbytes)).collect();
        Ok(planned + free?.into_iter().sum::<usize>())
    }

    /// Returns the bytes of all regions and tables. Returns 0 once the arena is closed.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.planned.held_bytes() + self.added().iter().map(Part::held_bytes).sum::<usize>()
    }

    /// Rejects new leases and ends every wait for a lease. Each region is unmapped at once if it has no lease, else
    /// when its last lease is dropped.
    pub fn close(&self) {
        self.planned.region.close();
        self.added().iter().for_each(|part| part.region.close());
    }

    /// Returns the size in bytes of the slot that a lease of `nbytes` bytes takes.
    fn bound(&self, nbytes: usize) -> Result<usize> {
        let layout = self.planned.arena.layout();
        Ok(layout.classes()[layout.class_for(nbytes)?].bytes)
    }

    fn added(&self) -> MutexGuard<'_, Vec<Part>> {
        locked(&self.added)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok<T>(result: Result<T>) -> T {
        result.unwrap_or_else(|error| panic!("{error}"))
    }

    fn lease(arena: &GrowingArena, nbytes: usize) -> Result<Lease> {
        arena.lease(nbytes, "test", Wait::never())
    }

    #[test]
    fn lease_takes_an_added_slot_when_the_planned_slots_are_taken() {
        let arena = ok(GrowingArena::new(&[(4096, 1), (16384, 1)], &mut || true));
        let held = arena.held_bytes();
        let planned = ok(lease(&arena, 4000));
        assert!(lease(&arena, 4000).is_err(), "no larger slot is taken");
        let taken = ok(arena.add(4000, &mut || true));
        assert_eq!((arena.added_bytes(), arena.held_bytes()), (taken, held + taken));
        assert_eq!(arena.added_slots(), BTreeMap::from([(4096, 1)]));
        assert_eq!(ok(arena.free_slots(4000)), 1);
        let added = ok(lease(&arena, 4000));
        assert_eq!(ok(arena.free_slots(1)), 0);
        drop(planned);
        assert_eq!(ok(arena.free_slots(1)), 1);
        drop(added);
        assert_eq!(ok(arena.free_slots(1)), 2);
        let _taken = [ok(lease(&arena, 4000)), ok(lease(&arena, 4000))];
        ok(arena.add(16384, &mut || true));
        assert!(lease(&arena, 4000).is_err(), "no larger slot is taken of the added ones either");
    }

    #[test]
    fn add_rejects_bytes_larger_than_every_class() {
        let arena = ok(GrowingArena::new(&[(4096, 1)], &mut || true));
        assert!(arena.add(4097, &mut || true).is_err());
        assert!(arena.free_slots(4097).is_err());
        assert_eq!(arena.added_bytes(), 0);
        arena.close();
        assert_eq!(arena.held_bytes(), 0);
        assert!(lease(&arena, 1).is_err());
    }
}
