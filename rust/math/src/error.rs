//! Errors of a kernel call.

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What can be wrong with a call. Nothing has been written where one is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two slices that describe the same elements differ in length.
    #[error("{name} has {len} elements and {other} has {other_len}: they must agree")]
    Length {
        /// The slice that differs.
        name: &'static str,
        /// Its length.
        len: usize,
        /// What it was compared with.
        other: &'static str,
        /// The length of that.
        other_len: usize,
    },

    /// A number outside the range where the formula means anything.
    #[error("{name} is {value}: pass {wanted}")]
    Number {
        /// The argument.
        name: &'static str,
        /// What was passed.
        value: f64,
        /// What works.
        wanted: &'static str,
    },

    /// A parameter that is to be of 16 bits is fp32.
    #[error("a parameter of float32 is its own master: pass one of 16 bits, or Weights::Single")]
    Sixteen,

    /// A compact parameter's rounding has no place.
    #[error(
        "a compact parameter needs rounded_up where no second moment of fp32 or bfloat16 has its signs, and only there"
    )]
    Signs,

    /// The optimizer and the moments do not belong together.
    #[error("{rule} keeps {wanted}")]
    Moments {
        /// The optimizer.
        rule: &'static str,
        /// What it keeps.
        wanted: &'static str,
    },

    /// Work that does not begin with a block.
    #[error("the first element is number {first} of its parameter: begin with a multiple of 256")]
    First {
        /// Which it is.
        first: u64,
    },

    /// `MEMASCEND_SIMD` names something that this processor or this crate does not have.
    #[error("MEMASCEND_SIMD is {asked:?}: pass one that this processor has ({available}), or unset it")]
    Simd {
        /// What the variable says.
        asked: String,
        /// The names that work here.
        available: String,
    },
}
