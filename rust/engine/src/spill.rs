//! Spills gradients to storage: writes, adds, reads back and drops them.

use std::{cell::Cell, ptr::NonNull};

use memascend_math::{Check, Exec, add, add_doubles, check, check_doubles};
use memascend_store::{Buffer, Dtype, Store};

use crate::{
    Counters, Error, Gradient, Result,
    gradient::doubles,
    job::Work,
    turn::{Leaves, Turn},
    workbench::{Read, Workbench, Write, bytes_mut, clear_from, elements_mut, floats, floats_mut},
};

/// A job that spills a gradient to its record's place for a spilled gradient.
pub(crate) struct Spill {
    /// The gradient to write. With `None`, the job copies the spilled gradient to the other place of its record.
    gradient: Option<Gradient>,
    /// True if the job first reads the spilled gradient. The job then adds `gradient`, if there is one, and rounds the
    /// sum to the dtype of the spilled gradient.
    adds: bool,
    /// The [`Check`] of the chunks computed so far: whether all elements are finite, and the sum of their squares.
    so_far: Cell<Check>,
}

impl Spill {
    pub(crate) fn new(store: &Store, record: usize, gradient: Gradient, adds: bool) -> Result<Self> {
        Self::require_fit(store, record, &gradient)?;
        Ok(Self { gradient: Some(gradient), adds, so_far: Cell::new(Check::NOTHING) })
    }

    /// Creates a job that copies the spilled gradient to the other place of its record. The next commit can name this
    /// other place.
    pub(crate) fn again(store: &Store, record: usize) -> Result<Self> {
        required(store, record)?;
        Ok(Self { gradient: None, adds: true, so_far: Cell::new(Check::NOTHING) })
    }

    /// Returns an error unless the gradient has the dtype and the number of elements for which the record's place for a
    /// spilled gradient is made.
    pub(crate) fn require_fit(store: &Store, record: usize, gradient: &Gradient) -> Result<()> {
        let described = &store.description().records[record];
        let name = &described.name;
        let dtype = spill_dtype(store, record)?;
        if gradient.dtype() != dtype || gradient.elements() != described.elements() {
            let (got, elements) = (gradient.dtype().name(), gradient.elements());
            let (wanted, room) = (dtype.name(), described.elements());
            return Err(Error::Invalid(format!(
                "the gradient of {name:?} has {elements} elements of {got}, but there is room for {room} elements of \
                 {wanted}: give a gradient that fits"
            )));
        }
        Ok(())
    }
}

impl Work for Spill {
    fn nbytes(&self) -> usize {
        self.gradient.as_ref().map_or(0, Gradient::nbytes)
    }

    fn leaves(&self) -> Leaves {
        Leaves::Gradient
    }

    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        if self.adds {
            required(bench.store, record)?;
        }
        bench.store.begin_spill(record, self.adds)?;
        // A record without elements has no chunks, so its gradient is complete at once.
        let whole = (bench.chunks_of(record) == 0).then(|| self.so_far.get());
        Ok(bench.store.set_spilled(record, whole)?)
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        if self.adds { Ok(vec![bench.read_spill(turn.record, turn.index, &turn.memory)?]) } else { Ok(Vec::new()) }
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let elements = bench.elements(record, chunk);
        let (part, used) = bench.spill_part(record, chunk, memory)?;
        let dtype = spill_dtype(bench.store, record)?;
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        unsafe { clear_from(&part, used) };
        match &self.gradient {
            None => {}
            Some(gradient) if self.adds && dtype == Dtype::F64 => {
                let given = gradient.doubles(bench.store, record, elements.start, elements.len())?;
                // SAFETY: only this turn uses the chunk now. A part begins on a page, so it is aligned for float64.
                add_doubles(unsafe { elements_mut(&part, 0, elements.len()) }, given)?;
            }
            Some(gradient) if self.adds => {
                let given = gradient.part(bench.store, record, elements.start, elements.len())?;
                // SAFETY: only this turn uses the chunk now.
                add(unsafe { floats_mut(&part, dtype, elements.len()) }, given, bench.exec)?;
            }
            Some(gradient) => {
                // SAFETY: only this turn uses the chunk now.
                let bytes = unsafe { bytes_mut(&part) };
                let size = used / elements.len().max(1);
                bytes[..used].copy_from_slice(gradient.bytes(bench.store, record, elements.start * size, used)?);
            }
        }
        let mut so_far = self.so_far.get();
        so_far.merge(&measure(&part, dtype, 0, elements.len(), bench.exec));
        self.so_far.set(so_far);
        if chunk + 1 == bench.chunks_of(record) {
            // If a write of the gradient fails later, `lose_spilled` forgets the gradient.
            bench.store.set_spilled(record, Some(so_far))?;
        }
        Ok(())
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        Ok(vec![bench.write_spill(turn.record, turn.index, &turn.memory)?])
    }

    fn counted<'a>(&self, counters: &'a mut Counters) -> Option<&'a mut u64> {
        Some(&mut counters.spills)
    }
}

/// A job that reads a spilled gradient into the caller's memory.
pub(crate) struct Unspill {
    /// The address of `into`'s memory.
    first: NonNull<u8>,
    into: Box<dyn Buffer>,
}

// SAFETY: `into` may move to another thread, and `first` points into its memory.
unsafe impl Send for Unspill {}

impl Unspill {
    /// Creates a job that reads the spilled gradient into `into`. No other code may use the memory of `into` until the
    /// job has ended.
    pub(crate) fn new(store: &Store, record: usize, mut into: Box<dyn Buffer>) -> Result<Self> {
        let described = &store.description().records[record];
        let wanted = described.elements() * spill_dtype(store, record)?.bytes();
        if into.len() as u64 != wanted {
            let (name, got) = (&described.name, into.len());
            return Err(Error::Invalid(format!(
                "the gradient of {name:?} has {wanted} bytes, but the memory for it has {got}: give memory of the \
                 gradient's size"
            )));
        }
        Ok(Self { first: into.as_mut_ptr(), into })
    }
}

impl Work for Unspill {
    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        required(bench.store, record)
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        Ok(vec![bench.read_spill(turn.record, turn.index, &turn.memory)?])
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let (part, used) = bench.spill_part(turn.record, turn.index, &turn.memory)?;
        let elements = bench.elements(turn.record, turn.index);
        let start = elements.start * (used / elements.len().max(1));
        assert!(start + used <= self.into.len(), "a gradient past the end of its memory");
        // SAFETY: the assertion above keeps the range inside the memory.
        let first = unsafe { self.first.as_ptr().add(start) };
        // SAFETY: no other code uses the destination, as `new` requires. Only this turn uses the source ([Note: a turn
        // owns its staging chunk]).
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr().as_ptr(), first, used) };
        Ok(())
    }
}

/// A job that forgets the spilled gradient of its record.
pub(crate) struct Forget;

impl Work for Forget {
    fn leaves(&self) -> Leaves {
        Leaves::Nothing
    }

    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        Ok(bench.store.set_spilled(record, None)?)
    }

    fn turns(&self, _bench: &Workbench<'_>, _record: usize) -> u32 {
        0
    }

    fn compute(&self, _bench: &Workbench<'_>, _turn: &Turn) -> Result<()> {
        Ok(())
    }
}

/// Returns the [`Check`] of `count` elements of a gradient, beginning with element `start`: whether all elements are
/// finite, and the sum of their squares.
pub(crate) fn measure(memory: &dyn Buffer, dtype: Dtype, start: usize, count: usize, exec: Exec) -> Check {
    if dtype == Dtype::F64 {
        return check_doubles(doubles(memory, start, count));
    }
    check(floats(memory, dtype, start, count), exec)
}

/// Returns the dtype of the record's spilled gradients. Returns an error if the record has no place for spilled
/// gradients, or if the engine cannot compute with this dtype.
pub(crate) fn spill_dtype(store: &Store, record: usize) -> Result<Dtype> {
    let described = &store.description().records[record];
    let name = &described.name;
    match described.spill {
        Some(dtype @ (Dtype::F64 | Dtype::F32 | Dtype::Bf16 | Dtype::F16)) => Ok(dtype),
        Some(dtype) => Err(Error::Invalid(format!(
            "the engine cannot compute with the spilled gradients of {name:?}, which are {}: describe the record with \
             float64, float32, bfloat16 or float16 for spilled gradients",
            dtype.name()
        ))),
        None => Err(Error::Invalid(format!(
            "{name:?} was described without room for spilled gradients: describe the record with a dtype for spilled \
             gradients"
        ))),
    }
}

/// Returns an error if the record has no complete spilled gradient.
pub(crate) fn required(store: &Store, record: usize) -> Result<()> {
    if store.spilled(record)?.is_some() { Ok(()) } else { Err(nothing(store, record)) }
}

/// Returns the error for a record without a spilled gradient.
pub(crate) fn nothing(store: &Store, record: usize) -> Error {
    let name = &store.description().records[record].name;
    Error::Usage(format!(
        "no gradient of {name:?} is spilled, or an error or a discard removed the gradient: spill a gradient first"
    ))
}
