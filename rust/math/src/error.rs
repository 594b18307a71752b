//! The errors of kernel calls.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A mistake in the arguments of a call or in `MEMASCEND_SIMD`. The call has written nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The lengths of two slices that describe the same elements do not match.
    #[error("{name} has {len} elements but needs {other_len} to match {other}: pass slices that match")]
    Length {
        /// The slice that does not match `other`.
        name: &'static str,
        /// The length of `name`.
        len: usize,
        /// The slice, or the parameter, that gives the length.
        other: &'static str,
        /// The length that `name` needs.
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
    #[error("only Weights::Single takes a float32 parameter: pass a 16-bit parameter, or Weights::Single")]
    Sixteen,

    /// A compact parameter has no place for its rounding bits, or has two places.
    #[error("rounded_up does not fit the moments: pass None with a second moment in fp32 or bfloat16, else a slice")]
    Signs,

    /// The state does not have the moments that the optimizer or an argument needs.
    #[error("{rule} needs state with {wanted}: pass state with these moments")]
    Moments {
        /// The optimizer or the argument.
        rule: &'static str,
        /// The moments that `rule` needs.
        wanted: &'static str,
    },

    /// A shard with 8-bit moments does not begin at the start of a block.
    #[error("the shard begins at element {first} of its parameter: with 8-bit moments, begin at a multiple of 256")]
    First {
        /// The index of the shard's first element in the whole parameter.
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
