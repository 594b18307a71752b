//! Writes and reads whole tensors piece by piece, for a store's first write and for inspection.

use std::ops::Range;

use memascend_mem::Wait;

use crate::{Buffer as _, Content, Error, Part, Result, Scratch, Shared, Store, buffer::bytes_of, layout::Piece};

/// Where bytes of a piece belong: which tensor (0 is the values), its bytes, and where in the piece they are.
pub(crate) type TensorRun = (usize, Range<usize>, usize);

impl Store {
    /// The bytes of an entry's tensors: its values, then its state tensors as they are described.
    pub fn tensor_bytes(&self, entry: usize) -> Result<Vec<usize>> {
        self.known(entry)?;
        let described = &self.description.entries[entry];
        let values = described.elements() * described.dtype.bytes();
        let state = described.state.iter().map(crate::StateTensor::nbytes);
        Ok(std::iter::once(values).chain(state).map(|bytes| bytes as usize).collect())
    }

    /// Stages a whole entry, as its update number `step`, from its values and its state tensors.
    pub fn stage_entry(&self, entry: usize, step: u64, tensors: &[&[u8]], wait: Wait<'_>) -> Result<()> {
        self.fitting(entry, &tensors.iter().map(|tensor| tensor.len()).collect::<Vec<_>>())?;
        let (state, values) = self.description.staging_bytes();
        let scratch = Scratch::new(state.max(values).max(1) as usize, 1, "store transfer")?;
        self.begin(entry, step, wait)?;
        for index in 0..self.layout.pieces_of(entry) {
            let piece = self.layout.piece(&self.description, entry, index);
            let mut lease = scratch.lease(Wait::forever())?;
            let bytes = lease.as_mut_slice();
            bytes.fill(0);
            for (tensor, from, at) in self.runs(entry, &piece) {
                bytes[at..at + from.len()].copy_from_slice(&tensors[tensor][from]);
            }
            let part = Shared::new(lease).part(0, piece.bytes() as usize);
            let part = part.ok_or_else(|| Error::Invalid("a piece is larger than its room".into()))?;
            self.stage(entry, index, part)?.wait()?;
        }
        Ok(())
    }

    /// Reads a whole live entry into its values and its state tensors. All of it is of one version, which is returned.
    pub fn read_entry(&self, entry: usize, tensors: &mut [&mut [u8]]) -> Result<u64> {
        self.fitting(entry, &tensors.iter().map(|tensor| tensor.len()).collect::<Vec<_>>())?;
        let version = self.entry_state(entry)?.version;
        self.scan(&[entry], &mut |_, parts| {
            for Part { tensor, start, memory } in parts {
                tensors[tensor][start..start + memory.len()].copy_from_slice(bytes_of(&memory));
            }
            true
        })?;
        Ok(version)
    }

    fn fitting(&self, entry: usize, lengths: &[usize]) -> Result<()> {
        let wanted = self.tensor_bytes(entry)?;
        if lengths == wanted {
            return Ok(());
        }
        let name = &self.description.entries[entry].name;
        Err(Error::Invalid(format!("the tensors of {name:?} have {wanted:?} bytes, not {lengths:?}")))
    }

    pub(crate) fn runs(&self, entry: usize, piece: &Piece) -> Vec<TensorRun> {
        let described = &self.description.entries[entry];
        let chunk_elements = self.description.chunk_elements as usize;
        // The index of each state tensor that lies in chunks, or by itself.
        let places = |chunked: bool| {
            let of = move |(_, tensor): &(usize, &crate::StateTensor)| (tensor.grain > 0) == chunked;
            (1..).zip(&described.state).filter(of).map(|(place, _)| place)
        };
        match piece.content {
            Content::Values { chunk } => {
                let start = chunk as usize * chunk_elements * described.dtype.bytes() as usize;
                vec![(0, start..start + piece.used_bytes as usize, 0)]
            }
            Content::State { chunk } => {
                let elements = self.description.elements_of_chunk(entry, chunk);
                let tensors = self.description.in_chunk(entry, elements);
                let run = |(tensor, (_, at, nbytes)): (usize, (crate::Dtype, usize, usize))| {
                    let before = u64::from(chunk) * chunk_elements as u64;
                    let start = described.state[tensor - 1].bytes_for(before) as usize;
                    (tensor, start..start + nbytes, at)
                };
                places(true).zip(tensors).map(run).collect()
            }
            Content::Whole { tensor, part } => {
                let start = u64::from(part) * crate::layout::WHOLE_PIECE_BYTES;
                let range = start as usize..(start + piece.used_bytes) as usize;
                places(false).nth(tensor as usize).map(|tensor| (tensor, range, 0)).into_iter().collect()
            }
        }
    }
}
