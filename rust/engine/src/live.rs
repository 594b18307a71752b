//! Copies a record's values from the caller's memory, so that an update does not read them from storage.

use memascend_store::{Buffer, Dtype, Master, Record, Store};

use crate::{
    Error, Result,
    fill::copied,
    turn::Turn,
    workbench::{Workbench, bytes_mut, clear_from},
};

/// True if an update starts from the record's values: they are the master weights, or the upper half of them, or the
/// record's only weights.
pub(crate) fn are_needed(record: &Record) -> bool {
    record.dtype == Dtype::F32 || record.format.master() != Master::Own
}

/// A record's values in the caller's memory, as the last commit left them.
pub(crate) struct Live(Box<dyn Buffer>);

impl Live {
    /// Returns `None` if the update does not start from values.
    pub(crate) fn new(store: &Store, record: usize, values: Box<dyn Buffer>) -> Result<Option<Self>> {
        let described = &store.description().records[record];
        let wanted = described.elements() * described.dtype.bytes();
        if values.len() as u64 != wanted {
            let (name, got) = (&described.name, values.len());
            return Err(Error::Invalid(format!("the values of {name:?} have {wanted} bytes, not {got}")));
        }
        Ok(are_needed(described).then_some(Self(values)))
    }

    /// Copies a chunk of the values to its part of the staging chunk, and compares it with its checksum, as a read
    /// does: values that were changed in place, or belong to another step, would silently corrupt the master weights.
    pub(crate) fn take(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let (part, elements) = (bench.part(record, chunk, memory)?, bench.elements(record, chunk));
        let described = &bench.store.description().records[record];
        let element = described.dtype.bytes() as usize;
        let (start, nbytes) = (elements.start * element, elements.len() * element);
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        let bytes = unsafe { bytes_mut(&part) };
        copied(&*self.0, start, &mut bytes[..nbytes]);
        // SAFETY: as above. The rest of the last page is stored as zeros.
        unsafe { clear_from(&part, nbytes) };
        if bench.store.holds(record, chunk, &part)? {
            return Ok(());
        }
        let name = &described.name;
        Err(Error::Usage(format!(
            "the values of {name:?} in memory are not those of its last commit: something wrote to them past torch's \
             counters (numpy, data_ptr(), a kernel of its own?), which its update would lose: call zero_grad(), and change \
             them within memascend.materialized(model, modify=True)"
        )))
    }
}
