//! Encodes and decodes descriptions. The decoder bounds every count before it allocates.

use crate::{
    Dtype, Format,
    bounds::{NAME_BYTES_MAX, RANK_MAX},
    description::{Description, Kind, Record, StateTensor},
    features::{self, FEATURE_BYTES_MAX, FIRSTS},
    fields::{DecodeError, Fields, counted, push_text, push_texts},
};

type Result<T> = std::result::Result<T, DecodeError>;

/// An encoded unit has at least this number of bytes. `counted` uses this number to bound the count of units before it
/// allocates.
const UNIT_BYTES_MIN: usize = 2;
/// An encoded record has at least this number of bytes. `counted` uses this number to bound the count of records.
const RECORD_BYTES_MIN: usize = 12;
/// An encoded state tensor has at least this number of bytes. `counted` uses this number to bound the count of state
/// tensors.
const STATE_BYTES_MIN: usize = 4;

impl Description {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let has_firsts = !self.first_elements.is_empty();
        push_texts(&mut bytes, &has_firsts.then(|| FIRSTS.to_owned()).into_iter().collect::<Vec<_>>());
        for number in [
            self.chunk_elements,
            self.user_bytes_max,
            self.hyperparameters_bytes_max,
            self.units.len() as u32,
            self.records.len() as u32,
        ] {
            bytes.extend(number.to_le_bytes());
        }
        push_text(&mut bytes, &self.optimizer);
        self.units.iter().for_each(|name| push_text(&mut bytes, name));
        self.records.iter().for_each(|record| record.encode(&mut bytes));
        bytes.extend(self.first_elements.iter().flat_map(|first| first.to_le_bytes()));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut fields = Fields::new(bytes);
        // Read the features first: a feature may change the fields that follow.
        let features = fields.texts(FEATURE_BYTES_MAX)?;
        features::known(&features)?;
        let chunk_elements = fields.u32()?;
        let user_bytes_max = fields.u32()?;
        let hyperparameters_bytes_max = fields.u32()?;
        let (unit_count, record_count) = (fields.u32()? as usize, fields.u32()? as usize);
        let optimizer = fields.text(NAME_BYTES_MAX)?;
        let units = counted(unit_count, UNIT_BYTES_MIN, &mut fields, |fields| fields.text(NAME_BYTES_MAX))?;
        let records = counted(record_count, RECORD_BYTES_MIN, &mut fields, Record::decode)?;
        let first_count = if features.iter().any(|feature| feature == FIRSTS) { record_count } else { 0 };
        let first_elements = counted(first_count, 8, &mut fields, Fields::u64)?;
        if fields.left() > 0 {
            return Err(format!("{} bytes follow the last field", fields.left()).into());
        }
        let description = Self {
            chunk_elements,
            user_bytes_max,
            hyperparameters_bytes_max,
            optimizer,
            units,
            records,
            first_elements,
        };
        description.checked()?;
        Ok(description)
    }
}

impl Record {
    pub(crate) fn encode(&self, bytes: &mut Vec<u8>) {
        push_text(bytes, &self.name);
        bytes.push(self.kind as u8);
        bytes.extend(self.unit.to_le_bytes());
        bytes.push(self.spill.map_or(0, |dtype| dtype as u8));
        bytes.push(self.order.len() as u8);
        bytes.extend(&self.order);
        push_tensor(bytes, self.dtype, &self.shape);
        push_text(bytes, self.format.name());
        bytes.push(self.state.len() as u8);
        for tensor in &self.state {
            push_text(bytes, &tensor.name);
            push_tensor(bytes, tensor.dtype, &tensor.shape);
            bytes.extend(tensor.grain.to_le_bytes());
        }
    }

    pub(crate) fn decode(fields: &mut Fields<'_>) -> Result<Self> {
        let name = fields.text(NAME_BYTES_MAX)?;
        let kind = match fields.u8()? {
            0 => Kind::Parameter,
            1 => Kind::Buffer,
            other => return Err(DecodeError::Newer(format!("records of kind {other}"))),
        };
        let unit = fields.u32()?;
        let spill = match fields.u8()? {
            0 => None,
            code => Some(dtype(code)?),
        };
        let rank = usize::from(fields.u8()?);
        let order = fields.take(rank.min(RANK_MAX + 1))?.to_vec();
        let (of_values, shape) = tensor(fields)?;
        let format = fields.text(FEATURE_BYTES_MAX)?;
        let format = Format::from_name(&format)
            .ok_or_else(|| DecodeError::Newer(format!("the state format {format:?} for {name:?}")))?;
        let state_count = usize::from(fields.u8()?);
        let state = counted(state_count, STATE_BYTES_MIN, fields, |fields| {
            let name = fields.text(NAME_BYTES_MAX)?;
            let (dtype, shape) = tensor(fields)?;
            Ok::<_, DecodeError>(StateTensor { name, dtype, shape, grain: fields.u32()? })
        })?;
        Ok(Self { name, kind, unit, dtype: of_values, shape, order, spill, format, state })
    }
}

fn push_tensor(bytes: &mut Vec<u8>, dtype: Dtype, shape: &[u64]) {
    bytes.extend([dtype as u8, shape.len() as u8]);
    for dim in shape {
        bytes.extend(dim.to_le_bytes());
    }
}

fn tensor(fields: &mut Fields<'_>) -> Result<(Dtype, Vec<u64>)> {
    let dtype = dtype(fields.u8()?)?;
    Ok((dtype, shape(fields)?))
}

fn shape(fields: &mut Fields<'_>) -> Result<Vec<u64>> {
    let rank = usize::from(fields.u8()?);
    if rank > RANK_MAX {
        return Err(format!("a tensor has {rank} dimensions, which are too many").into());
    }
    (0..rank).map(|_| Ok(fields.u64()?)).collect()
}

fn dtype(code: u8) -> Result<Dtype> {
    Dtype::from_code(code).ok_or_else(|| DecodeError::Newer(format!("dtype {code}")))
}
