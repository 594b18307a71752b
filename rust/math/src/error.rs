//! The errors of kernel calls.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A mistake in the arguments of a call. The call has written nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two slices that describe the same elements differ in length.
    #[error("{name} has {len} elements and {other} has {other_len}: pass equal lengths")]
    Length {
        /// The slice that differs.
        name: &'static str,
        /// The length of this slice.
        len: usize,
        /// The slice that it was compared with.
        other: &'static str,
        /// The length of `other`.
        other_len: usize,
    },

    /// A number is outside the range for which the formula is defined.
    #[error("{name} is {value}: pass {wanted}")]
    Number {
        /// The argument.
        name: &'static str,
        /// The value of the argument.
        value: f64,
        /// The accepted values.
        wanted: &'static str,
    },

    /// `Weights` that need a 16-bit parameter got a parameter in fp32.
    #[error("a float32 parameter has no separate master: pass a 16-bit parameter, or Weights::Single")]
    Sixteen,

    /// A compact parameter has no place for its rounding bits, or has two places.
    #[error("a compact parameter needs rounded_up if it has no second moment in fp32 or bfloat16: else pass None")]
    Signs,

    /// The optimizer and the state have different numbers of moments.
    #[error("{rule} needs state with {wanted}")]
    Moments {
        /// The optimizer.
        rule: &'static str,
        /// The moments that the optimizer needs.
        wanted: &'static str,
    },

    /// A shard with 8-bit moments does not begin at the start of a block.
    #[error("the shard begins at element {first} of its parameter: with 8-bit moments, begin at a multiple of 256")]
    First {
        /// The index of the first element in its parameter.
        first: u64,
    },

    /// `MEMASCEND_SIMD` names an instruction set that this processor or this crate does not have.
    #[error("MEMASCEND_SIMD is {asked:?}: set it to an instruction set of this processor ({available}), or unset it")]
    Simd {
        /// The value of the variable.
        asked: String,
        /// The names of the instruction sets that this processor has.
        available: String,
    },
}
