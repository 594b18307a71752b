//! The description: what a store holds. Written once; the layout follows from it.

use std::collections::HashSet;

use crate::{Dtype, Error, Result, fields::Malformed};

/// Bytes of a name. torch's are paths of modules; longer ones are no names.
pub(crate) const NAME_BYTES_MAX: usize = 1024;
/// Dimensions of a tensor; torch's own bound is 64, nobody is past 8.
pub(crate) const RANK_MAX: usize = 16;
/// Entries and units. The largest mixtures of experts have some 100,000 parameters.
pub(crate) const ENTRIES_MAX: usize = 1 << 20;
/// State tensors of an entry.
pub(crate) const STATES_MAX: usize = 32;
/// Elements of a tensor.
pub(crate) const ELEMENTS_MAX: u64 = 1 << 48;
/// Elements of a chunk come in multiples of this, so that 16-bit values end on a page.
pub(crate) const CHUNK_ELEMENTS_GRAIN: u32 = 2048;
pub(crate) const CHUNK_ELEMENTS_MAX: u32 = 1 << 24;
/// Room for the user's value and for the hyperparameters.
pub(crate) const TEXT_BYTES_MAX: u32 = 1 << 24;
/// The whole description.
pub(crate) const DESCRIPTION_BYTES_MAX: u64 = 1 << 30;

/// What a store holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Elements of a chunk: a multiple of 2,048.
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
    pub entries: Vec<Entry>,
}

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A parameter.
    Parameter = 0,
    /// A persistent buffer.
    Buffer = 1,
}

/// The state of an entry that is compact. The sign of a second moment is no sign: it says that the value beside it was
/// rounded up.
pub const COMPACT: [(&str, Dtype); 3] = [("rest", Dtype::Rest), ("exp_avg", Dtype::F32), ("exp_avg_sq", Dtype::F32)];

/// A parameter or a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name, which no other entry has.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// The index of its unit; it never falls from one entry to the next.
    pub unit: u32,
    /// The type of its values.
    pub dtype: Dtype,
    /// Its shape; none for a scalar.
    pub shape: Vec<u64>,
    /// Its dimensions from the one with the largest stride to the one with the smallest, where that is not their order.
    pub order: Vec<u8>,
    /// The type of gradients for which the spill area has room.
    pub spill: Option<Dtype>,
    /// Its state tensors.
    pub state: Vec<StateTensor>,
}

/// A tensor of an entry's optimizer state. One with the entry's own shape lies in chunks, side by side with the others
/// of that kind; any other lies by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name within the entry.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
}

/// The product, or `None` past what a tensor may have.
fn elements(shape: &[u64]) -> Option<u64> {
    let product = shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
    product.filter(|&product| product <= ELEMENTS_MAX)
}

impl Entry {
    /// How many elements; a description that was checked has no overflow.
    #[must_use]
    pub fn elements(&self) -> u64 {
        elements(&self.shape).unwrap_or(0)
    }

    /// Whether its float32 master is not stored: the bfloat16 values are its upper half, rounded to nearest even, and
    /// the state is what is needed beside them, [`COMPACT`].
    #[must_use]
    pub fn is_compact(&self) -> bool {
        self.state.first().is_some_and(|tensor| tensor.dtype == Dtype::Rest)
    }

    /// The same, described as compact if it is a bfloat16 entry with the state tensors of [`COMPACT`], the rest as int16.
    #[must_use]
    pub fn compact_if_so(mut self) -> Self {
        if let Some(rest) = self.state.first_mut().filter(|rest| rest.dtype == Dtype::I16) {
            rest.dtype = Dtype::Rest;
            if self.checked_compact().is_err() {
                self.state[0].dtype = Dtype::I16;
            }
        }
        self
    }

    fn checked_compact(&self) -> std::result::Result<(), Malformed> {
        let rests = self.state.iter().filter(|tensor| tensor.dtype == Dtype::Rest).count();
        let wanted = COMPACT.map(|(name, dtype)| (name, dtype, self.shape.as_slice()));
        let found = self.state.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()));
        let others = self.dtype == Dtype::Rest || self.spill == Some(Dtype::Rest);
        if !others && (rests == 0 || self.dtype == Dtype::Bf16 && found.eq(wanted)) {
            return Ok(());
        }
        Err(format!("{:?} has a rest and is not compact: bfloat16 values with {COMPACT:?} of their shape", self.name))
    }

    /// Its state tensors that lie in chunks.
    pub fn chunked(&self) -> impl Iterator<Item = &StateTensor> {
        self.state.iter().filter(|tensor| tensor.shape == self.shape)
    }

    /// Its state tensors that lie by themselves.
    pub fn whole(&self) -> impl Iterator<Item = &StateTensor> {
        self.state.iter().filter(|tensor| tensor.shape != self.shape)
    }
}

impl StateTensor {
    /// Bytes of it.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        elements(&self.shape).unwrap_or(0) * self.dtype.bytes()
    }
}

impl Description {
    /// Checks every bound.
    pub fn check(&self) -> Result<()> {
        self.checked().map_err(Error::Invalid)
    }

    pub(crate) fn checked(&self) -> std::result::Result<(), Malformed> {
        let chunk = self.chunk_elements;
        if chunk == 0 || !chunk.is_multiple_of(CHUNK_ELEMENTS_GRAIN) || chunk > CHUNK_ELEMENTS_MAX {
            return Err(format!(
                "chunk_elements is {chunk}: pass a multiple of {CHUNK_ELEMENTS_GRAIN} up to {CHUNK_ELEMENTS_MAX}"
            ));
        }
        for (name, bytes) in [("user", self.user_bytes_max), ("hyperparameters", self.hyperparameters_bytes_max)] {
            if bytes > TEXT_BYTES_MAX {
                return Err(format!("{name}_bytes_max is {bytes}: at most {TEXT_BYTES_MAX} are kept"));
            }
        }
        if self.units.len() > ENTRIES_MAX || self.entries.is_empty() || self.entries.len() > ENTRIES_MAX {
            let (units, entries) = (self.units.len(), self.entries.len());
            return Err(format!("{entries} entries in {units} units: a store has 1 to {ENTRIES_MAX} of each"));
        }
        named("optimizer", &self.optimizer)?;
        self.units.iter().try_for_each(|name| named("unit", name))?;
        let mut names = HashSet::with_capacity(self.entries.len());
        let mut unit_before = 0;
        for entry in &self.entries {
            entry.checked()?;
            let name = &entry.name;
            if !names.insert(name.as_str()) {
                return Err(format!("two entries are called {name:?}"));
            }
            if entry.unit as usize >= self.units.len() {
                return Err(format!("{name:?} is in unit {}, and there are {}", entry.unit, self.units.len()));
            }
            if entry.unit < unit_before {
                return Err(format!("{name:?} comes after entries of a later unit; order the entries by unit"));
            }
            unit_before = entry.unit;
        }
        Ok(())
    }
}

fn named(what: &str, name: &str) -> std::result::Result<(), Malformed> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(char::is_control) {
        let start: String = name.chars().take(40).collect();
        return Err(format!(
            "the {what} name {start:?} has {} bytes: 1 to {NAME_BYTES_MAX} printable ones work",
            name.len()
        ));
    }
    Ok(())
}

impl Entry {
    fn checked(&self) -> std::result::Result<(), Malformed> {
        named("entry", &self.name)?;
        let name = &self.name;
        let shapes = std::iter::once(&self.shape).chain(self.state.iter().map(|tensor| &tensor.shape));
        for shape in shapes {
            if shape.len() > RANK_MAX || elements(shape).is_none() {
                return Err(format!(
                    "{name:?} has a tensor of shape {shape:?}: at most {RANK_MAX} dimensions and {ELEMENTS_MAX} elements are kept"
                ));
            }
        }
        let mut places: Vec<u8> = self.order.clone();
        places.sort_unstable();
        let permutes = places.iter().enumerate().all(|(index, &place)| usize::from(place) == index);
        if !(self.order.is_empty() || self.order.len() == self.shape.len() && permutes) {
            return Err(format!("the order {:?} of {name:?} is no permutation of its dimensions", self.order));
        }
        if self.state.len() > STATES_MAX {
            return Err(format!("{name:?} has {} state tensors, at most {STATES_MAX} are kept", self.state.len()));
        }
        let mut names = HashSet::new();
        for tensor in &self.state {
            named("state tensor", &tensor.name)?;
            if !names.insert(&tensor.name) {
                return Err(format!("two state tensors of {name:?} are called {:?}", tensor.name));
            }
        }
        self.checked_compact()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(dtype: Dtype, state: &[(&str, Dtype, u64)]) -> Entry {
        let tensor =
            |&(name, dtype, numel): &(&str, Dtype, u64)| StateTensor { name: name.into(), dtype, shape: vec![numel] };
        Entry {
            name: "weight".into(),
            kind: Kind::Parameter,
            unit: 0,
            dtype,
            shape: vec![5],
            order: vec![],
            spill: None,
            state: state.iter().map(tensor).collect(),
        }
    }

    #[test]
    fn only_bfloat16_with_the_moments_of_adam_is_compact() {
        let (i16, f32) = (Dtype::I16, Dtype::F32);
        let whole = [("rest", i16, 5), ("exp_avg", f32, 5), ("exp_avg_sq", f32, 5)];
        let compact = described(Dtype::Bf16, &whole).compact_if_so();
        assert!(compact.is_compact() && compact.checked().is_ok());
        assert_eq!(compact.chunked().map(|tensor| tensor.dtype.bytes()).sum::<u64>(), 10);
        let mut bytes = Vec::new();
        compact.encode(&mut bytes);
        assert_eq!(Entry::decode(&mut crate::fields::Fields::new(&bytes)), Ok(compact));
        let others = [
            described(Dtype::F16, &whole),
            described(Dtype::Bf16, &whole[..2]),
            described(Dtype::Bf16, &[whole[1], whole[0], whole[2]]),
            described(Dtype::Bf16, &[("rest", i16, 4), whole[1], whole[2]]),
            described(Dtype::Bf16, &[whole[0], whole[1], ("exp_avg_sq", Dtype::F64, 5)]),
            described(Dtype::Bf16, &[("more", i16, 5), whole[1], whole[2]]),
        ];
        for mut other in others {
            let found = other.clone().compact_if_so();
            assert!(!found.is_compact() && found == other && found.checked().is_ok(), "{found:?}");
            for index in 0..other.state.len() {
                let dtype = std::mem::replace(&mut other.state[index].dtype, Dtype::Rest);
                assert!(other.checked().is_err(), "{other:?}");
                other.state[index].dtype = dtype;
            }
        }
        assert!(described(Dtype::Rest, &[]).checked().is_err());
    }
}
