//! Stages whole records from tensors in memory, and reads whole records into tensors in memory.

use std::ops::Range;

use memascend_mem::Wait;

use crate::{
    Buffer as _, Content, Error, Part, Result, Scratch, Store,
    buffer::{bytes_of, first},
    layout::Extent,
};

/// Bytes of an extent that belong to one tensor: the number of the tensor (0: the values), the range of these bytes in
/// the tensor, and the offset of these bytes in the extent.
pub(crate) type TensorRun = (usize, Range<usize>, usize);

impl Store {
    /// Returns the size in bytes of each of a record's tensors: first its values, then its state tensors in the order
    /// of the description.
    pub fn tensor_bytes(&self, record: usize) -> Result<Vec<usize>> {
        self.known(record)?;
        let described = &self.description.records[record];
        let values = described.elements() * described.dtype.bytes();
        let state = described.state.iter().map(crate::StateTensor::nbytes);
        Ok(std::iter::once(values).chain(state).map(|bytes| bytes as usize).collect())
    }

    /// Stages a whole record. `tensors` has the record's tensors after update number `step`, in the order of
    /// [`Store::tensor_bytes`].
    pub fn stage_record(&self, record: usize, step: u64, tensors: &[&[u8]], wait: Wait<'_>) -> Result<()> {
        self.fitting(record, &tensors.iter().map(|tensor| tensor.len()).collect::<Vec<_>>())?;
        let (state, values) = self.description.staging_bytes();
        let scratch = Scratch::new(state.max(values).max(1) as usize, 1, "store transfer")?;
        self.begin(record, step, wait)?;
        for index in 0..self.layout.extents_of(record) {
            let extent = self.layout.extent(&self.description, record, index);
            let mut lease = scratch.lease(Wait::forever())?;
            let bytes = lease.as_mut_slice();
            bytes.fill(0);
            for (tensor, from, at) in self.runs(record, &extent) {
                bytes[at..at + from.len()].copy_from_slice(&tensors[tensor][from]);
            }
            self.stage(record, index, first(lease, extent.bytes())?)?.wait()?;
        }
        Ok(())
    }

    /// Reads a whole live record into its tensors, in the order of [`Store::tensor_bytes`]. Returns the version of the
    /// record.
    pub fn read_record(&self, record: usize, tensors: &mut [&mut [u8]]) -> Result<u64> {
        self.fitting(record, &tensors.iter().map(|tensor| tensor.len()).collect::<Vec<_>>())?;
        self.settled([record])?;
        let version = self.record_state(record)?.version;
        self.scan(&[record], &mut |_, parts| {
            for Part { tensor, start, memory } in parts {
                tensors[tensor][start..start + memory.len()].copy_from_slice(bytes_of(&memory));
            }
            true
        })?;
        Ok(version)
    }

    /// Fails if `lengths` are not the sizes in bytes of the record's tensors.
    fn fitting(&self, record: usize, lengths: &[usize]) -> Result<()> {
        let wanted = self.tensor_bytes(record)?;
        if lengths == wanted {
            return Ok(());
        }
        let name = &self.description.records[record].name;
        Err(Error::Invalid(format!(
            "the tensors of {name:?} need {wanted:?} bytes, not {lengths:?}: give each tensor with the shape and dtype \
             of the description"
        )))
    }

    /// For each tensor with bytes in an extent, returns the range of these bytes.
    pub(crate) fn runs(&self, record: usize, extent: &Extent) -> Vec<TensorRun> {
        let described = &self.description.records[record];
        let chunk_elements = self.description.chunk_elements as usize;
        // Yields the numbers, counted from 1, of the state tensors with a grain if `chunked` is true, and of the state
        // tensors without a grain if it is false.
        let places = |chunked: bool| {
            let of = move |(_, tensor): &(usize, &crate::StateTensor)| (tensor.grain > 0) == chunked;
            (1..).zip(&described.state).filter(of).map(|(place, _)| place)
        };
        match extent.content {
            Content::Values { chunk } => {
                let start = chunk as usize * chunk_elements * described.dtype.bytes() as usize;
                vec![(0, start..start + extent.used_bytes as usize, 0)]
            }
            Content::State { chunk } => {
                let elements = self.description.elements_of_chunk(record, chunk);
                let tensors = self.description.in_chunk(record, elements);
                let run = |(tensor, (_, at, nbytes)): (usize, (crate::Dtype, usize, usize))| {
                    let before = u64::from(chunk) * chunk_elements as u64;
                    let start = described.state[tensor - 1].bytes_for(before) as usize;
                    (tensor, start..start + nbytes, at)
                };
                places(true).zip(tensors).map(run).collect()
            }
            Content::Whole { tensor, part } => {
                let start = u64::from(part) * crate::layout::WHOLE_EXTENT_BYTES;
                let range = start as usize..(start + extent.used_bytes) as usize;
                places(false).nth(tensor as usize).map(|tensor| (tensor, range, 0)).into_iter().collect()
            }
        }
    }
}
