//! Checks that a description is within bounds, before a store is created or read with this description.

use std::collections::HashSet;

use crate::{
    Description, Record, StateTensor, description::elements, dtype::Dtype, fields::Malformed, format::COMPACT,
    layout::PAGE_BYTES,
};

/// The largest size in bytes of a name. The names that torch gives to parameters are paths of modules, and are far
/// shorter than this limit.
pub(crate) const NAME_BYTES_MAX: usize = 1024;
/// The largest number of dimensions of a tensor. torch allows 64. No known model has a tensor of more than 8.
pub(crate) const RANK_MAX: usize = 16;
/// The largest number of records in a store. The number of units has the same limit. The largest mixture-of-experts
/// models have some 100,000 parameter tensors.
pub(crate) const RECORDS_MAX: usize = 1 << 20;
/// The largest number of state tensors of a record.
pub(crate) const STATES_MAX: usize = 32;
/// The largest number of elements of a tensor.
pub(crate) const ELEMENTS_MAX: u64 = 1 << 48;
/// `chunk_elements` must be a multiple of this number, so that a chunk of 16-bit values fills whole pages. For a
/// record of several chunks with 8-bit values or gradients, `Record::checked_chunks` requires a multiple of 4,096.
pub(crate) const CHUNK_ELEMENTS_GRAIN: u32 = 2048;
/// The largest number of elements of a chunk.
pub(crate) const CHUNK_ELEMENTS_MAX: u32 = 1 << 24;
/// The largest `user_bytes_max` and `hyperparameters_bytes_max` of a description.
pub(crate) const TEXT_BYTES_MAX: u32 = 1 << 24;
/// The largest size in bytes of an encoded description.
pub(crate) const DESCRIPTION_BYTES_MAX: u64 = 1 << 30;

impl Description {
    /// Rejects a description that exceeds a bound or contradicts itself.
    pub(crate) fn checked(&self) -> std::result::Result<(), Malformed> {
        let chunk = self.chunk_elements;
        if chunk == 0 || !chunk.is_multiple_of(CHUNK_ELEMENTS_GRAIN) || chunk > CHUNK_ELEMENTS_MAX {
            return Err(format!(
                "chunk_elements is {chunk}: pass a multiple of {CHUNK_ELEMENTS_GRAIN} up to {CHUNK_ELEMENTS_MAX}"
            ));
        }
        for (name, bytes) in [("user", self.user_bytes_max), ("hyperparameters", self.hyperparameters_bytes_max)] {
            if bytes > TEXT_BYTES_MAX {
                return Err(format!("{name}_bytes_max is {bytes}: pass at most {TEXT_BYTES_MAX}"));
            }
        }
        if self.units.len() > RECORDS_MAX || self.records.is_empty() || self.records.len() > RECORDS_MAX {
            let (units, records) = (self.units.len(), self.records.len());
            return Err(format!(
                "there are {records} records in {units} units: a store can have 1 to {RECORDS_MAX} of each"
            ));
        }
        let (firsts, records) = (self.first_elements.len(), self.records.len());
        if firsts != 0 && firsts != records {
            return Err(format!(
                "first_elements has {firsts} items for {records} records: give one item for each record"
            ));
        }
        if let Some(first) = self.first_elements.iter().find(|&&first| first > ELEMENTS_MAX) {
            return Err(format!(
                "a record begins at element {first}, but a parameter can have at most {ELEMENTS_MAX} elements"
            ));
        }
        named("optimizer", &self.optimizer)?;
        self.units.iter().try_for_each(|name| named("unit", name))?;
        let mut names = HashSet::with_capacity(self.records.len());
        let mut unit_before = 0;
        for record in &self.records {
            record.checked(chunk)?;
            let name = &record.name;
            if !names.insert(name.as_str()) {
                return Err(format!("two records have the name {name:?}: give each record a different name"));
            }
            if record.unit as usize >= self.units.len() {
                return Err(format!(
                    "{name:?} is in unit {}, but there are only {} units, counted from 0",
                    record.unit,
                    self.units.len()
                ));
            }
            if record.unit < unit_before {
                return Err(format!("{name:?} comes after records of a later unit: order the records by unit"));
            }
            unit_before = record.unit;
        }
        Ok(())
    }
}

/// Rejects a name that is empty, too long or has control characters. `what` is the kind of the named thing, such as
/// "unit", for the error message.
fn named(what: &str, name: &str) -> std::result::Result<(), Malformed> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(char::is_control) {
        let start: String = name.chars().take(40).collect();
        return Err(format!(
            "the {what} name {start:?} has {} bytes: use 1 to {NAME_BYTES_MAX} bytes without control characters",
            name.len()
        ));
    }
    Ok(())
}

impl Record {
    /// Rejects a record unless its values are bfloat16 and its state tensors are exactly those of [`COMPACT`].
    pub(crate) fn checked_compact(&self) -> std::result::Result<(), Malformed> {
        let wanted = COMPACT.map(|(name, dtype)| (name, dtype, self.shape.as_slice(), 1));
        let found = self.state.iter();
        let found = found.map(|of| (of.name.as_str(), of.dtype, of.shape.as_slice(), of.grain));
        if self.dtype == Dtype::Bf16 && found.eq(wanted) {
            return Ok(());
        }
        Err(format!(
            "{:?} is not compact: it needs bfloat16 values, and the state tensors {COMPACT:?} of the same shape",
            self.name
        ))
    }

    fn checked(&self, chunk: u32) -> std::result::Result<(), Malformed> {
        named("record", &self.name)?;
        let name = &self.name;
        let shapes = std::iter::once(&self.shape).chain(self.state.iter().map(|tensor| &tensor.shape));
        for shape in shapes {
            if shape.len() > RANK_MAX || elements(shape).is_none() {
                return Err(format!(
                    "{name:?} has a tensor of shape {shape:?}: a tensor can have at most {RANK_MAX} dimensions and \
                     {ELEMENTS_MAX} elements"
                ));
            }
        }
        let mut places: Vec<u8> = self.order.clone();
        places.sort_unstable();
        let permutes = places.iter().enumerate().all(|(index, &place)| usize::from(place) == index);
        if !(self.order.is_empty() || self.order.len() == self.shape.len() && permutes) {
            return Err(format!(
                "the order {:?} of {name:?} is not a permutation of the tensor's dimensions",
                self.order
            ));
        }
        if self.state.len() > STATES_MAX {
            return Err(format!(
                "{name:?} has {} state tensors: a record can have at most {STATES_MAX}",
                self.state.len()
            ));
        }
        let mut names = HashSet::new();
        for tensor in &self.state {
            named("state tensor", &tensor.name)?;
            if !names.insert(&tensor.name) {
                return Err(format!(
                    "two state tensors of {name:?} have the name {:?}: give each a different name",
                    tensor.name
                ));
            }
            self.checked_grain(tensor, chunk)?;
        }
        self.checked_chunks(chunk)?;
        self.checked_format()
    }

    /// Rejects a state tensor with a grain in two cases: the tensor's shape does not fit the grain, or the grain does
    /// not divide `chunk`. Accepts every tensor without a grain.
    ///
    /// Grain 1 needs the shape of the record. A larger grain needs one item for each `grain` elements of the record.
    fn checked_grain(&self, tensor: &StateTensor, chunk: u32) -> std::result::Result<(), Malformed> {
        let (name, of, grain) = (&self.name, &tensor.name, tensor.grain);
        let fits = match grain {
            0 => true,
            1 => tensor.shape == self.shape,
            _ => elements(&tensor.shape) == Some(self.elements().div_ceil(u64::from(grain))),
        };
        if !fits {
            return Err(format!(
                "{of:?} of {name:?} has shape {:?}, which does not fit grain {grain}: grain 1 needs the shape of the \
                 record, and a larger grain needs one item for each group of that many elements",
                tensor.shape
            ));
        }
        if grain > 1 && !chunk.is_multiple_of(grain) {
            return Err(format!(
                "{of:?} of {name:?} has one item for each {grain} elements, but chunks have {chunk} elements: pass a \
                 chunk_elements that is a multiple of {grain}"
            ));
        }
        Ok(())
    }

    /// Rejects chunks that end inside a page: a record's chunks follow each other without gaps, so each chunk except
    /// the last must fill whole pages.
    fn checked_chunks(&self, chunk: u32) -> std::result::Result<(), Malformed> {
        if self.elements() <= u64::from(chunk) {
            return Ok(());
        }
        let dtypes = std::iter::once(self.dtype).chain(self.spill);
        let Some(dtype) =
            dtypes.into_iter().find(|dtype| !(u64::from(chunk) * dtype.bytes()).is_multiple_of(PAGE_BYTES))
        else {
            return Ok(());
        };
        Err(format!(
            "a chunk of {chunk} elements of {:?} ends inside a page, because {} takes {} byte for each element: pass a \
             chunk_elements that is a multiple of {}",
            self.name,
            dtype.name(),
            dtype.bytes(),
            PAGE_BYTES / dtype.bytes()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Format, Kind};

    fn described(dtype: Dtype, state: &[(&str, Dtype, u64)]) -> Record {
        let tensor = |&(name, dtype, numel): &(&str, Dtype, u64)| StateTensor {
            name: name.into(),
            dtype,
            shape: vec![numel],
            grain: u32::from(numel == 5),
        };
        Record {
            name: "weight".into(),
            kind: Kind::Parameter,
            unit: 0,
            dtype,
            shape: vec![5],
            order: vec![],
            spill: None,
            format: Format::Plain,
            state: state.iter().map(tensor).collect(),
        }
    }

    #[test]
    fn only_bfloat16_with_the_moments_of_adam_is_compact() {
        let (i16, f32) = (Dtype::I16, Dtype::F32);
        let whole = [("rest", i16, 5), ("exp_avg", f32, 5), ("exp_avg_sq", f32, 5)];
        let compact = described(Dtype::Bf16, &whole).compact_if_so();
        assert!(compact.is_compact() && compact.checked(2048).is_ok());
        assert_eq!(compact.chunked().map(|tensor| tensor.dtype.bytes()).sum::<u64>(), 10);
        let mut bytes = Vec::new();
        compact.encode(&mut bytes);
        assert_eq!(Record::decode(&mut crate::fields::Fields::new(&bytes)), Ok(compact));
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
            assert!(!found.is_compact() && found == other && found.checked(2048).is_ok(), "{found:?}");
            other.format = Format::Compact;
            assert!(other.checked(2048).is_err(), "{other:?}");
        }
    }

    #[test]
    fn chunk_that_ends_inside_a_page_is_rejected_unless_it_is_the_last() {
        let bool_of = |numel: u64| Record { shape: vec![numel], ..described(Dtype::Bool, &[]) };
        // 51,200 elements of 16 bits fill 25 pages. 51,200 elements of 8 bits fill 12.5 pages.
        assert!(bool_of(51_200).checked(51_200).is_ok());
        let why = bool_of(51_201).checked(51_200);
        assert!(why.as_ref().is_err_and(|why| why.contains("multiple of 4096")), "{why:?}");
        assert!(bool_of(51_201).checked(49_152).is_ok());
        let mut spilling = Record { shape: vec![51_201], ..described(Dtype::F32, &[]) };
        assert!(spilling.checked(51_200).is_ok());
        spilling.spill = Some(Dtype::F8E5m2);
        assert!(spilling.checked(51_200).is_err());
    }

    #[test]
    fn checked_rejects_a_state_length_that_does_not_match_its_grain() {
        let with = |grain: u32, numel: u64| {
            let mut record = described(Dtype::Bf16, &[("scale", Dtype::F32, numel)]);
            record.state[0].grain = grain;
            record.checked(4096).is_ok()
        };
        assert!(with(0, 3) && with(1, 5) && with(2, 3) && with(4, 2) && with(256, 1));
        assert!(!with(1, 3) && !with(2, 2) && !with(256, 2) && !with(3, 2), "3 divides no chunk");
    }
}
