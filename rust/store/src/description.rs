//! Describes what a store holds. Written once; the layout follows from it.

use crate::{Dtype, Error, Format, Result, bounds::ELEMENTS_MAX};

/// What a store holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Elements of a chunk: a multiple of 2,048, of every grain, and so many that the values of a chunk are whole pages.
    pub chunk_elements: u32,
    /// Bytes that the user's value may have.
    pub user_bytes_max: u32,
    /// Bytes that the hyperparameters may have.
    pub hyperparameters_bytes_max: u32,
    /// Whose state it is, such as `"AdamW"`.
    pub optimizer: String,
    /// The names of the units, in the order in which they lie.
    pub units: Vec<String>,
    /// Parameters and buffers, by unit.
    pub records: Vec<Record>,
    /// Of a store with rows of parameters that several ranks share: the number of each record's first element in the whole
    /// parameter. Empty where the parameters are whole.
    pub first_elements: Vec<u64>,
}

/// What a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A parameter.
    Parameter = 0,
    /// A persistent buffer.
    Buffer = 1,
}

/// A parameter or a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its name, which no other record has.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// The index of its unit; it never falls from one record to the next.
    pub unit: u32,
    /// The type of its values.
    pub dtype: Dtype,
    /// Its shape; none for a scalar.
    pub shape: Vec<u64>,
    /// Its dimensions from the one with the largest stride to the one with the smallest, where that is not their order.
    pub order: Vec<u8>,
    /// The type of gradients for which the spill area has room.
    pub spill: Option<Dtype>,
    /// How its state is to be read.
    pub format: Format,
    /// Its state tensors.
    pub state: Vec<StateTensor>,
}

/// A tensor of a record's optimizer state. With a grain it lies in the record's chunks, side by side with the others of
/// that kind; without one it lies by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name within the record.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// How many elements of the record share one item of it: 1 for one of the record's own shape, 256 for a scale of each
    /// block of 256, 8 for a plane of bits packed into bytes. 0: it lies by itself.
    pub grain: u32,
}

/// The product, or `None` past what a tensor may have.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    let product = shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
    product.filter(|&product| product <= ELEMENTS_MAX)
}

impl Record {
    /// How many elements; a description that was checked has no overflow.
    #[must_use]
    pub fn elements(&self) -> u64 {
        elements(&self.shape).unwrap_or(0)
    }

    /// Whether its float32 master is not stored: [`Format::Compact`].
    #[must_use]
    pub fn is_compact(&self) -> bool {
        self.format == Format::Compact
    }

    /// The same, described as compact if it is a bfloat16 record with the state tensors of [`COMPACT`].
    #[must_use]
    pub fn compact_if_so(mut self) -> Self {
        if self.checked_compact().is_ok() {
            self.format = Format::Compact;
        }
        self
    }

    /// Its state tensors that lie in chunks.
    pub fn chunked(&self) -> impl Iterator<Item = &StateTensor> {
        self.state.iter().filter(|tensor| tensor.grain > 0)
    }

    /// Its state tensors that lie by themselves.
    pub fn whole(&self) -> impl Iterator<Item = &StateTensor> {
        self.state.iter().filter(|tensor| tensor.grain == 0)
    }
}

impl StateTensor {
    /// Bytes of it.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        elements(&self.shape).unwrap_or(0) * self.dtype.bytes()
    }

    /// Bytes that belong to `elements` of the record, in a chunk; none of one that lies by itself.
    #[must_use]
    pub fn bytes_for(&self, elements: u64) -> u64 {
        if self.grain == 0 { 0 } else { elements.div_ceil(u64::from(self.grain)) * self.dtype.bytes() }
    }
}

impl Description {
    /// Checks every bound.
    pub fn check(&self) -> Result<()> {
        self.checked().map_err(Error::Invalid)
    }
}
