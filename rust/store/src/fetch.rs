//! Reads the values of a whole unit, ahead of all other I/O.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

use memascend_mem::Wait;
use memascend_nvme::{Lane, Ticket};

use crate::{
    Buffer, Error, Result, Shared, Store,
    buffer::bytes_of,
    holds::{Ending, Hold},
};

/// The values of a unit on their way into memory.
///
/// Until the devices are done with it nothing is staged into the slots that it reads, so a step after the next commit
/// waits for that; not for whoever waits for it, or does not. Dropping it waits for the devices.
pub struct Fetch<B: Buffer + Sync> {
    unit: usize,
    state: Arc<Mutex<State<B>>>,
    store: Arc<Store>,
}

/// Dropped in this order: the slots are held until the devices are done.
struct State<B: Buffer + Sync> {
    flying: Option<Flying<B>>,
    ended: Option<Result<u64>>,
}

struct Flying<B: Buffer + Sync> {
    tickets: Vec<Ticket<Shared<B>>>,
    holds: Vec<Hold<Arc<Store>>>,
    memory: Shared<B>,
}

impl Store {
    /// Begins to read the values of all entries of a unit, each to [`Layout::in_unit`](crate::Layout::in_unit) in
    /// `memory`. Entries that lie side by side in one slot are one read. All of them are of one commit.
    ///
    /// Memory that does not begin on a page is right, and slower.
    pub fn fetch<B: Buffer + Sync>(self: &Arc<Self>, unit: usize, memory: B) -> Result<Fetch<B>> {
        let (name, wanted) = match self.description.units.get(unit) {
            Some(name) => (name, self.layout.unit_bytes(unit)),
            None => return Err(Error::Invalid(format!("unit {unit} of {}", self.description.units.len()))),
        };
        if memory.len() as u64 != wanted {
            return Err(Error::Invalid(format!("unit {name:?} has {wanted} bytes, not {}", memory.len())));
        }
        let mut flying = Flying { tickets: Vec::new(), holds: Vec::new(), memory: Shared::new(memory) };
        {
            let mut index = self.index.lock();
            let with_values = self.entries_of(unit).filter(|&entry| self.layout.chunks_of(entry) > 0);
            let held = |entry| Hold::live(Arc::clone(self), &mut index, entry, 0..self.layout.chunks_of(entry));
            flying.holds.extend(with_values.map(held));
        }
        // Where in the unit, where in the volume, bytes.
        let mut runs: Vec<(u64, u64, u64)> = Vec::new();
        for hold in &flying.holds {
            let first = self.layout.piece(&self.description, hold.entry, 0);
            let last = self.layout.piece(&self.description, hold.entry, self.layout.chunks_of(hold.entry) - 1);
            let (from, bytes) = (self.layout.offset(&first, hold.slot), last.at + last.bytes() - first.at);
            match runs.last_mut() {
                Some((_, start, length)) if *start + *length == from => *length += bytes,
                _ => runs.push((self.layout.in_unit(hold.entry, unit), from, bytes)),
            }
        }
        for (into, from, bytes) in runs {
            let part = flying.memory.part(into as usize, bytes as usize);
            let part = part.ok_or_else(|| Error::Invalid(format!("unit {name:?} does not fit its memory")))?;
            let ticket = self.volume.read_in(Lane::First, part, from).map_err(|refused| refused.error)?;
            flying.tickets.push(ticket);
        }
        self.counters.began(wanted);
        let state = Arc::new(Mutex::new(State { flying: Some(flying), ended: None }));
        let ending: Weak<Mutex<State<B>>> = Arc::downgrade(&state);
        self.reads.add(ending);
        Ok(Fetch { unit, state, store: Arc::clone(self) })
    }
}

impl<B: Buffer + Sync> Fetch<B> {
    /// Whether the devices are done with it. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => state.flying.as_ref().is_none_or(|flying| flying.tickets.iter().all(Ticket::is_done)),
            // Somebody waits for it at this moment.
            Err(_) => false,
        }
    }

    /// Waits, checks every piece, and gives the newest version among the entries: 0 where none has values. Waiting
    /// again says the same again.
    pub fn wait(&self, mut wait: Wait<'_>) -> Result<u64> {
        let began = Instant::now();
        let deadline = wait.timeout.and_then(|timeout| began.checked_add(timeout));
        let result = self.waited(deadline, &mut wait);
        let ended = Instant::now();
        self.store.counters.waited(ended - began);
        let unit = &self.store.description.units[self.unit];
        self.store.volume.trace().span("wait for unit", unit, began, ended);
        result
    }

    fn waited(&self, deadline: Option<Instant>, wait: &mut Wait<'_>) -> Result<u64> {
        let mut state = self.lock();
        if let Some(flying) = &state.flying {
            for ticket in &flying.tickets {
                let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                let keep_waiting = wait.keep_waiting.as_mut().map(|keep| &mut **keep as &mut dyn FnMut() -> bool);
                ticket.wait_until(Wait { timeout, keep_waiting })?;
            }
            let ended = flying.ended(self.unit);
            state.flying = None;
            state.ended = Some(ended);
        }
        state.ended.clone().unwrap_or_else(|| Err(Error::Usage("this fetch never began".into())))
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Buffer + Sync> Ending for Mutex<State<B>> {
    fn release_if_ended(&self) {
        // Whoever has it locked waits for it, and lets go then.
        let Ok(state) = self.try_lock() else { return };
        if let Some(flying) = &state.flying
            && flying.tickets.iter().all(Ticket::is_done)
        {
            flying.holds.iter().for_each(Hold::release);
        }
    }
}

impl<B: Buffer + Sync> Flying<B> {
    /// What came of it, once every ticket is done.
    fn ended(&self, unit: usize) -> Result<u64> {
        for ticket in &self.tickets {
            ticket.outcome().unwrap_or(Err(memascend_nvme::Error::Closed))?;
        }
        let bytes = bytes_of(&self.memory);
        for hold in &self.holds {
            let (store, entry) = (&hold.store, hold.entry);
            let start = store.layout.in_unit(entry, unit);
            let first = store.layout.piece(&store.description, entry, 0).at;
            for piece in 0..store.layout.chunks_of(entry) {
                let layout = store.layout.piece(&store.description, entry, piece);
                let from = (start + layout.at - first) as usize;
                let place = (store.layout.offset(&layout, hold.slot), layout.bytes());
                hold.check(piece, &bytes[from..from + layout.bytes() as usize], place)?;
            }
        }
        Ok(self.holds.iter().map(|hold| hold.version).max().unwrap_or(0))
    }
}

impl<B: Buffer + Sync> Drop for Flying<B> {
    fn drop(&mut self) {
        // Also where only some of its reads were begun.
        for ticket in &self.tickets {
            while !ticket.is_done() && ticket.wait_until(Wait::forever()).is_err() {}
        }
    }
}
