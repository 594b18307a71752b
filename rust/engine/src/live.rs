//! Copies a record's values from the caller's memory, so that an update does not read them from storage.

use memascend_store::{Buffer, Dtype, Master, Record, Store};

use crate::{
    Error, Result,
    fill::copied,
    turn::Turn,
    workbench::{Workbench, bytes_mut, clear_from},
};

/// True if an update of the record computes with the record's values. If the record has separate master weights, the
/// update computes with the master weights instead, and only overwrites the values.
pub(crate) fn are_needed(record: &Record) -> bool {
    record.dtype == Dtype::F32 || record.format.master() != Master::Own
}

/// A record's values after the last commit, in the caller's memory.
pub(crate) struct Live(Box<dyn Buffer>);

impl Live {
    /// Returns `values` as a `Live`. Returns `None` if an update of the record does not compute with the record's
    /// values. Returns an error if `values` does not have the size of the record's values.
    pub(crate) fn new(store: &Store, record: usize, values: Box<dyn Buffer>) -> Result<Option<Self>> {
        let described = &store.description().records[record];
        let wanted = described.elements() * described.dtype.bytes();
        if values.len() as u64 != wanted {
            let (name, got) = (&described.name, values.len());
            return Err(Error::Invalid(format!(
                "the values of {name:?} have {wanted} bytes, but {got} were given: give the values of the whole record"
            )));
        }
        Ok(are_needed(described).then_some(Self(values)))
    }

    /// Copies a chunk of the values to the staging chunk. Returns an error if the copy does not have the stored
    /// checksum. Without this check, values that were changed in place, or that belong to another step, would silently
    /// corrupt the updated weights.
    pub(crate) fn take(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let (part, elements) = (bench.part(record, chunk, memory)?, bench.elements(record, chunk));
        let described = &bench.store.description().records[record];
        let element = described.dtype.bytes() as usize;
        let (start, nbytes) = (elements.start * element, elements.len() * element);
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        let bytes = unsafe { bytes_mut(&part) };
        copied(&*self.0, start, &mut bytes[..nbytes]);
        // SAFETY: only this turn uses the chunk now. The unused rest of the last page of `part` is stored as zeros.
        unsafe { clear_from(&part, nbytes) };
        if bench.store.holds(record, chunk, &part)? {
            return Ok(());
        }
        let name = &described.name;
        Err(Error::Usage(format!(
            "the values of {name:?} in memory are not those of the last commit: code may have changed them in a way \
             that torch cannot detect, such as numpy, data_ptr() or a custom kernel, and the update would lose such a \
             change. Call zero_grad(), then change the values within memascend.materialized(model, modify=True)"
        )))
    }
}
