//! Loads and stores blocks of an optimizer's moments in fp32, bfloat16 or 8 bits.

use crate::{
    Bf16, Error, Result,
    philox::{BLOCK, Purpose, Random},
    quantize::Map,
    weights::{Block, round_stochastic, rounded, widened},
};

/// A moment in 8 bits: a code for each element, and an absolute maximum for each block of 256 elements.
#[derive(Debug)]
pub struct Codes<'a> {
    /// Codes of the dynamic map, one per element.
    pub codes: &'a mut [u8],
    /// Absolute maxima, one per block; blocks count from the start of the parameter.
    pub absmax: &'a mut [f32],
}

/// The moments of a parameter: the first moment or the momentum, and the second moment if the optimizer has one.
#[derive(Debug)]
pub enum Moments<'a> {
    /// fp32.
    Single(&'a mut [f32], Option<&'a mut [f32]>),
    /// bfloat16. An update rounds the first moment to nearest even, and the second moment stochastically. With `beta2`
    /// 0.999, the second moment is an average over about a thousand steps. One step mostly changes it by less than half
    /// a unit in the last place, and rounding to nearest would lose this change.
    Bf16(&'a mut [Bf16], Option<&'a mut [Bf16]>),
    /// 8 bits, in the format of `bitsandbytes`.
    Blocks(Codes<'a>, Option<Codes<'a>>),
    /// No moments: SGD without momentum.
    Nothing,
}

impl Codes<'_> {
    /// Splits at element `middle`, which must be a multiple of `BLOCK`.
    fn split_at(self, middle: usize) -> (Self, Self) {
        let (codes, codes_after) = self.codes.split_at_mut(middle);
        let (absmax, absmax_after) = self.absmax.split_at_mut(middle / BLOCK);
        (Self { codes, absmax }, Self { codes: codes_after, absmax: absmax_after })
    }

    #[inline(always)]
    fn load(&self, map: &Map, at: usize, len: usize, block: &mut Block) {
        map.restored(&self.codes[at..][..len], self.absmax[at / BLOCK], block);
    }

    #[inline(always)]
    fn store(&mut self, map: &Map, at: usize, len: usize, block: &Block) {
        self.absmax[at / BLOCK] = map.quantised(block, &mut self.codes[at..][..len]);
    }
}

impl Moments<'_> {
    pub(crate) fn has_second(&self) -> bool {
        matches!(self, Self::Single(_, Some(_)) | Self::Bf16(_, Some(_)) | Self::Blocks(_, Some(_)))
    }

    /// True if the sign bits of the second moment can store rounding bits; see [Note: split masters] in `compact.rs`.
    pub(crate) fn has_signs(&self) -> bool {
        self.has_second() && !self.decays()
    }

    /// True if the update decays the first moment and then adds the gradient to it, as `bitsandbytes` does.
    pub(crate) fn decays(&self) -> bool {
        matches!(self, Self::Blocks(..))
    }

    /// Fails unless the slices have the lengths that a parameter of `len` elements needs.
    pub(crate) fn agree(&self, len: usize) -> Result<()> {
        let blocks = len.div_ceil(BLOCK);
        let of = |codes: &Codes<'_>| [("exp_avg", codes.codes.len(), len), ("absmax", codes.absmax.len(), blocks)];
        let plain = |first: usize, second: Option<usize>| {
            let second = second.map(|second| ("exp_avg_sq", second, len));
            [("exp_avg", first, len)].into_iter().chain(second).collect()
        };
        let lengths: Vec<_> = match self {
            Self::Single(first, second) => plain(first.len(), second.as_ref().map(|second| second.len())),
            Self::Bf16(first, second) => plain(first.len(), second.as_ref().map(|second| second.len())),
            Self::Blocks(first, second) => of(first).into_iter().chain(second.iter().flat_map(of)).collect(),
            Self::Nothing => Vec::new(),
        };
        match lengths.into_iter().find(|(_, len, wanted)| len != wanted) {
            None => Ok(()),
            Some((name, len, other_len)) => Err(Error::Length { name, len, other: "the parameter", other_len }),
        }
    }

    /// Splits at element `middle`, which must be a multiple of `BLOCK`.
    pub(crate) fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::Single(first, second) => {
                let (first, first_after) = first.split_at_mut(middle);
                let (second, after) = second.map(|second| second.split_at_mut(middle)).unzip();
                (Self::Single(first, second), Self::Single(first_after, after))
            }
            Self::Bf16(first, second) => {
                let (first, first_after) = first.split_at_mut(middle);
                let (second, after) = second.map(|second| second.split_at_mut(middle)).unzip();
                (Self::Bf16(first, second), Self::Bf16(first_after, after))
            }
            Self::Blocks(first, second) => {
                let (first, first_after) = first.split_at(middle);
                let (second, after) = second.map(|second| second.split_at(middle)).unzip();
                (Self::Blocks(first, second), Self::Blocks(first_after, after))
            }
            Self::Nothing => (Self::Nothing, Self::Nothing),
        }
    }

    #[inline(always)]
    pub(crate) fn load(&self, at: usize, len: usize, first: &mut Block, second: &mut Block) {
        match self {
            Self::Single(m, v) => {
                first[..len].copy_from_slice(&m[at..][..len]);
                if let Some(v) = v {
                    second[..len].copy_from_slice(&v[at..][..len]);
                }
            }
            Self::Bf16(m, v) => {
                widened(&m[at..][..len], first);
                if let Some(v) = v {
                    widened(&v[at..][..len], second);
                }
            }
            Self::Blocks(m, v) => {
                m.load(&Map::SIGNED, at, len, first);
                if let Some(v) = v {
                    v.load(&Map::UNSIGNED, at, len, second);
                }
            }
            Self::Nothing => (),
        }
    }

    #[inline(always)]
    pub(crate) fn store(
        &mut self,
        at: usize,
        len: usize,
        first: &Block,
        second: &Block,
        (random, from): (Option<Random>, u64),
    ) {
        match self {
            Self::Single(m, v) => {
                m[at..][..len].copy_from_slice(&first[..len]);
                if let Some(v) = v {
                    v[at..][..len].copy_from_slice(&second[..len]);
                }
            }
            Self::Bf16(m, v) => {
                rounded(first, &mut m[at..][..len]);
                match (v, random) {
                    (Some(v), Some(random)) => {
                        let drawn = random.elements(from, Purpose::SecondMoment);
                        round_stochastic(second, &drawn, &mut v[at..][..len]);
                    }
                    (Some(v), None) => rounded(second, &mut v[at..][..len]),
                    (None, _) => (),
                }
            }
            Self::Blocks(m, v) => {
                m.store(&Map::SIGNED, at, len, first);
                if let Some(v) = v {
                    v.store(&Map::UNSIGNED, at, len, second);
                }
            }
            Self::Nothing => (),
        }
    }
}
