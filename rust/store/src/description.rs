//! Describes the records and units of a store. The description of a store never changes, and determines the length of
//! each part of the store.

use crate::{Dtype, Error, Format, Result, bounds::ELEMENTS_MAX};

/// The records and units of a store, and the sizes on which the store's layout depends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The number of elements of a chunk. It is a multiple of 2,048 and of every grain. Each chunk of a record's
    /// values, except the last chunk, fills whole pages.
    pub chunk_elements: u32,
    /// The largest size in bytes of the user's value.
    pub user_bytes_max: u32,
    /// The largest size in bytes of the hyperparameters.
    pub hyperparameters_bytes_max: u32,
    /// The name of the optimizer whose state the records hold, such as `"AdamW"`.
    pub optimizer: String,
    /// The names of the units, in storage order.
    pub units: Vec<String>,
    /// Parameters and buffers, in ascending order of their units.
    pub records: Vec<Record>,
    /// For each record, the index of the record's first element in the whole parameter. Used only in a run of several
    /// ranks, where the records of a store have some rows of each parameter. Empty if the records are whole parameters.
    pub first_elements: Vec<u64>,
}

/// Whether a record is a parameter or a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A parameter.
    Parameter = 0,
    /// A persistent buffer.
    Buffer = 1,
}

/// A parameter or a buffer, with its optimizer state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The record's name, unique in the store.
    pub name: String,
    /// Parameter or buffer.
    pub kind: Kind,
    /// The index of the record's unit. Records are in ascending order of this index.
    pub unit: u32,
    /// The dtype of the values.
    pub dtype: Dtype,
    /// The shape of the values; empty for a scalar.
    pub shape: Vec<u64>,
    /// The dimensions from the largest stride to the smallest; empty if the values are stored in row-major order.
    pub order: Vec<u8>,
    /// The dtype of the gradients that the record may spill; `None` if the spill area has no room for the record.
    pub spill: Option<Dtype>,
    /// The format of the state tensors.
    pub format: Format,
    /// The tensors of the optimizer state.
    pub state: Vec<StateTensor>,
}

/// A tensor of a record's optimizer state. A tensor with a grain (`grain > 0`) is cut into pieces, one for
/// each chunk of the record. A chunk of state holds, side by side, the pieces of all tensors with a grain. A tensor
/// without a grain (`grain == 0`) is stored in extents of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateTensor {
    /// The tensor's name, unique in its record.
    pub name: String,
    /// The dtype of the tensor's elements.
    pub dtype: Dtype,
    /// The shape of the tensor.
    pub shape: Vec<u64>,
    /// The number of the record's elements that share one item of the tensor. It is 1 for a tensor of the record's
    /// shape, 8 for bits that are packed into bytes, and 256 for one scale per block of 256 elements. It is 0 for a
    /// tensor that is not cut into chunks.
    pub grain: u32,
}

/// Returns the product of `shape`, or `None` if the product exceeds [`ELEMENTS_MAX`].
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    let product = shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
    product.filter(|&product| product <= ELEMENTS_MAX)
}

impl Record {
    /// Returns the number of elements of the record; 0 if the product of the shape is too large. [`Description::check`]
    /// rejects a record whose product is too large.
    #[must_use]
    pub fn elements(&self) -> u64 {
        elements(&self.shape).unwrap_or(0)
    }

    /// True for [`Format::Compact`]. False for the other formats with a compact master weight.
    #[must_use]
    pub fn is_compact(&self) -> bool {
        self.format == Format::Compact
    }

    /// Sets the format to [`Format::Compact`] if this is a bfloat16 record with the state tensors of
    /// [`COMPACT`](crate::COMPACT).
    #[must_use]
    pub fn compact_if_so(mut self) -> Self {
        if self.checked_compact().is_ok() {
            self.format = Format::Compact;
        }
        self
    }

    /// Iterates over the state tensors with a grain, which are cut into chunks.
    pub fn chunked(&self) -> impl Iterator<Item = &StateTensor> {
        self.state.iter().filter(|tensor| tensor.grain > 0)
    }

    /// Iterates over the state tensors without a grain, which have separate extents.
    pub fn whole(&self) -> impl Iterator<Item = &StateTensor> {
        self.state.iter().filter(|tensor| tensor.grain == 0)
    }
}

impl StateTensor {
    /// Returns the size of the tensor in bytes.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        elements(&self.shape).unwrap_or(0) * self.dtype.bytes()
    }

    /// Returns the size in bytes of the tensor's items for `elements` elements of the record; 0 for a tensor without a
    /// grain.
    #[must_use]
    pub fn bytes_for(&self, elements: u64) -> u64 {
        if self.grain == 0 { 0 } else { elements.div_ceil(u64::from(self.grain)) * self.dtype.bytes() }
    }
}

impl Description {
    /// Fails with [`Error::Invalid`] if the description exceeds a bound or contradicts itself.
    pub fn check(&self) -> Result<()> {
        self.checked().map_err(Error::Invalid)
    }
}
