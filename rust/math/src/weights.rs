//! Loads and stores blocks of a parameter and of its master.

use crate::{
    Bf16, Element, Error, FloatsMut, Result,
    compact::{join_master, split_master},
    philox::{BLOCK, Purpose, Random},
    stochastic::Stochastic,
};

/// A parameter, with its master if it has one.
#[derive(Debug)]
pub enum Weights<'a> {
    /// A float32 parameter, updated directly.
    Single(&'a mut [f32]),
    /// A 16-bit parameter, rounded to nearest from a master.
    Master {
        /// The fp32 master weights, which are updated.
        master: &'a mut [f32],
        /// The parameter. Updates write the parameter, and never read it.
        values: FloatsMut<'a>,
    },
    /// A bfloat16 parameter with a split master; see [`CompactState`](crate::CompactState).
    Compact {
        /// The parameter: the upper halves of the master, rounded.
        values: &'a mut [Bf16],
        /// The lower halves of the master.
        rest: &'a mut [u16],
        /// One bit per element, lowest bit of a byte first, set if the rounding of the element went up. `None` if the
        /// signs of the second moment store these bits.
        rounded_up: Option<&'a mut [u8]>,
    },
    /// A 16-bit parameter without a master, rounded stochastically.
    Stochastic(FloatsMut<'a>),
}

/// A block of elements in fp32.
pub(crate) type Block = [f32; BLOCK];

impl Weights<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Single(values) => values.len(),
            Self::Master { master, .. } => master.len(),
            Self::Compact { values, .. } => values.len(),
            Self::Stochastic(values) => values.len(),
        }
    }

    /// True if the signs of the second moment store this parameter's rounding bits. See [Note: split masters] in
    /// `compact.rs`.
    pub(crate) fn needs_signs(&self) -> bool {
        matches!(self, Self::Compact { rounded_up: None, .. })
    }

    /// Fails unless the lengths of the slices match, and the parameter has a type that the variant allows.
    pub(crate) fn agree(&self) -> Result<()> {
        let len = self.len();
        let lengths = match self {
            Self::Single(_) | Self::Stochastic(FloatsMut::Bf16(_) | FloatsMut::F16(_)) => return Ok(()),
            Self::Stochastic(FloatsMut::F32(_)) | Self::Master { values: FloatsMut::F32(_), .. } => {
                return Err(Error::Sixteen);
            }
            Self::Master { values, .. } => [("values", values.len(), len), ("values", len, len)],
            Self::Compact { rest, rounded_up, .. } => {
                let bits = rounded_up.as_ref().map_or(len.div_ceil(8), |bits| bits.len());
                [("rest", rest.len(), len), ("rounded_up", bits, len.div_ceil(8))]
            }
        };
        match lengths.into_iter().find(|(_, len, wanted)| len != wanted) {
            None => Ok(()),
            Some((name, len, other_len)) => Err(Error::Length { name, len, other: "the parameter", other_len }),
        }
    }

    /// Splits at element `middle`, which must be a multiple of 8.
    pub(crate) fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::Single(values) => {
                let (before, after) = values.split_at_mut(middle);
                (Self::Single(before), Self::Single(after))
            }
            Self::Master { master, values } => {
                let (master, master_after) = master.split_at_mut(middle);
                let (values, values_after) = values.split_at(middle);
                (Self::Master { master, values }, Self::Master { master: master_after, values: values_after })
            }
            Self::Compact { values, rest, rounded_up } => {
                let (values, values_after) = values.split_at_mut(middle);
                let (rest, rest_after) = rest.split_at_mut(middle);
                let (rounded_up, up_after) = rounded_up.map(|bits| bits.split_at_mut(middle.div_ceil(8))).unzip();
                (
                    Self::Compact { values, rest, rounded_up },
                    Self::Compact { values: values_after, rest: rest_after, rounded_up: up_after },
                )
            }
            Self::Stochastic(values) => {
                let (before, after) = values.split_at(middle);
                (Self::Stochastic(before), Self::Stochastic(after))
            }
        }
    }

    /// Loads the `len` elements from `at` on into `block`: of the master, or of the parameter if it has no master.
    /// Clears the signs in `second` if they store the parameter's rounding bits.
    #[inline(always)]
    pub(crate) fn load(&self, at: usize, len: usize, second: &mut Block, block: &mut Block) {
        match self {
            Self::Single(values) | Self::Stochastic(FloatsMut::F32(values)) => {
                block[..len].copy_from_slice(&values[at..][..len]);
            }
            Self::Master { master, .. } => block[..len].copy_from_slice(&master[at..][..len]),
            Self::Stochastic(FloatsMut::Bf16(values)) => widened(&values[at..][..len], block),
            Self::Stochastic(FloatsMut::F16(values)) => widened(&values[at..][..len], block),
            Self::Compact { values, rest, rounded_up: None } => {
                let (values, rest) = (&values[at..][..len], &rest[at..][..len]);
                for i in 0..len {
                    (block[i], second[i]) = join_master(values[i], rest[i], second[i]);
                }
            }
            Self::Compact { values, rest, rounded_up: Some(bits) } => {
                let (values, rest) = (&values[at..][..len], &rest[at..][..len]);
                let mut signs = [0.0; BLOCK];
                for (signs, &byte) in signs.chunks_exact_mut(8).zip(&bits[at / 8..]) {
                    for (bit, sign) in signs.iter_mut().enumerate() {
                        *sign = f32::from_bits(u32::from(byte) << (31 - bit) & 0x8000_0000);
                    }
                }
                for i in 0..len {
                    (block[i], _) = join_master(values[i], rest[i], signs[i]);
                }
            }
        }
    }

    /// Stores `len` elements of `block` from `at` on, in the parameter and in its master. Sets the signs in `second` if
    /// they store the parameter's rounding bits. Stochastic rounding draws from `random` for element `from` and the
    /// next elements; without `random`, rounds to nearest.
    #[inline(always)]
    pub(crate) fn store(
        &mut self,
        at: usize,
        len: usize,
        second: &mut Block,
        block: &Block,
        (random, from): (Option<Random>, u64),
    ) {
        match self {
            Self::Single(values) => values[at..][..len].copy_from_slice(&block[..len]),
            Self::Master { master, values } => {
                master[at..][..len].copy_from_slice(&block[..len]);
                nearest(block, values, at, len);
            }
            Self::Stochastic(values) => match (values, random.map(|random| random.elements(from, Purpose::Values))) {
                (FloatsMut::Bf16(values), Some(drawn)) => round_stochastic(block, &drawn, &mut values[at..][..len]),
                (FloatsMut::F16(values), Some(drawn)) => round_stochastic(block, &drawn, &mut values[at..][..len]),
                (values, _) => nearest(block, values, at, len),
            },
            Self::Compact { values, rest, rounded_up: None } => {
                let (values, rest) = (&mut values[at..][..len], &mut rest[at..][..len]);
                for i in 0..len {
                    (values[i], rest[i], second[i]) = split_master(block[i], second[i]);
                }
            }
            Self::Compact { values, rest, rounded_up: Some(bits) } => {
                let (values, rest) = (&mut values[at..][..len], &mut rest[at..][..len]);
                let mut up = [0; BLOCK];
                for i in 0..len {
                    let sign;
                    (values[i], rest[i], sign) = split_master(block[i], 0.0);
                    up[i] = (sign.to_bits() >> 31) as u8;
                }
                for (byte, &up) in bits[at / 8..][..len.div_ceil(8)].iter_mut().zip(up.as_chunks().0) {
                    // Gathers the lowest bits of the eight bytes of `up` in the highest byte of the product, without
                    // carries.
                    *byte = (u64::from_le_bytes(up).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
                }
            }
        }
    }
}

#[inline(always)]
fn nearest(block: &Block, values: &mut FloatsMut<'_>, at: usize, len: usize) {
    match values {
        FloatsMut::F32(values) => values[at..][..len].copy_from_slice(&block[..len]),
        FloatsMut::Bf16(values) => rounded(block, &mut values[at..][..len]),
        FloatsMut::F16(values) => rounded(block, &mut values[at..][..len]),
    }
}

#[inline(always)]
pub(crate) fn widened<T: Element>(values: &[T], block: &mut Block) {
    for (wide, value) in block.iter_mut().zip(values) {
        *wide = value.to_f32();
    }
}

#[inline(always)]
pub(crate) fn rounded<T: Element>(block: &Block, values: &mut [T]) {
    for (value, &wide) in values.iter_mut().zip(block) {
        *value = T::from_f32(wide);
    }
}

#[inline(always)]
pub(crate) fn round_stochastic<T: Stochastic>(block: &Block, drawn: &[u16; BLOCK], values: &mut [T]) {
    for ((value, &wide), &drawn) in values.iter_mut().zip(block).zip(drawn) {
        *value = T::rounded(wide, drawn);
    }
}
