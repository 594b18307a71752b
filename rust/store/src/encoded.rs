//! A description as bytes: how it is written, and read back with every count bounded before room is made for it.

use crate::{
    Dtype,
    description::{Description, Entry, Kind, NAME_BYTES_MAX, RANK_MAX, StateTensor},
    fields::{Fields, Malformed, push_text},
};

/// The fewest bytes that a unit and an entry take: what bounds their number before room is made for them.
const UNIT_BYTES_MIN: usize = 2;
const ENTRY_BYTES_MIN: usize = 12;
const STATE_BYTES_MIN: usize = 4;

impl Description {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in [
            self.chunk_elements,
            self.user_bytes_max,
            self.hyperparameters_bytes_max,
            self.units.len() as u32,
            self.entries.len() as u32,
        ] {
            bytes.extend(number.to_le_bytes());
        }
        push_text(&mut bytes, &self.optimizer);
        self.units.iter().for_each(|name| push_text(&mut bytes, name));
        self.entries.iter().for_each(|entry| entry.encode(&mut bytes));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> std::result::Result<Self, Malformed> {
        let mut fields = Fields::new(bytes);
        let chunk_elements = fields.u32()?;
        let user_bytes_max = fields.u32()?;
        let hyperparameters_bytes_max = fields.u32()?;
        let (unit_count, entry_count) = (fields.u32()? as usize, fields.u32()? as usize);
        let optimizer = fields.text(NAME_BYTES_MAX)?;
        let units = counted(unit_count, UNIT_BYTES_MIN, &mut fields, |fields| fields.text(NAME_BYTES_MAX))?;
        let entries = counted(entry_count, ENTRY_BYTES_MIN, &mut fields, Entry::decode)?;
        if fields.left() > 0 {
            return Err(format!("{} bytes are left over", fields.left()));
        }
        let description = Self { chunk_elements, user_bytes_max, hyperparameters_bytes_max, optimizer, units, entries };
        description.checked()?;
        Ok(description)
    }
}

impl Entry {
    pub(crate) fn encode(&self, bytes: &mut Vec<u8>) {
        push_text(bytes, &self.name);
        bytes.push(self.kind as u8);
        bytes.extend(self.unit.to_le_bytes());
        bytes.push(self.spill.map_or(0, |dtype| dtype as u8));
        bytes.push(self.order.len() as u8);
        bytes.extend(&self.order);
        push_tensor(bytes, self.dtype, &self.shape);
        bytes.push(self.state.len() as u8);
        for tensor in &self.state {
            push_text(bytes, &tensor.name);
            push_tensor(bytes, tensor.dtype, &tensor.shape);
        }
    }

    pub(crate) fn decode(fields: &mut Fields<'_>) -> std::result::Result<Self, Malformed> {
        let name = fields.text(NAME_BYTES_MAX)?;
        let kind = match fields.u8()? {
            0 => Kind::Parameter,
            1 => Kind::Buffer,
            other => return Err(format!("an entry of kind {other}")),
        };
        let unit = fields.u32()?;
        let spill = match fields.u8()? {
            0 => None,
            code => Some(dtype(code)?),
        };
        let rank = usize::from(fields.u8()?);
        let order = fields.take(rank.min(RANK_MAX + 1))?.to_vec();
        let (of_values, shape) = tensor(fields)?;
        let state_count = usize::from(fields.u8()?);
        let state = counted(state_count, STATE_BYTES_MIN, fields, |fields| {
            let name = fields.text(NAME_BYTES_MAX)?;
            let (dtype, shape) = tensor(fields)?;
            Ok(StateTensor { name, dtype, shape })
        })?;
        Ok(Self { name, kind, unit, dtype: of_values, shape, order, spill, state })
    }
}

fn counted<T>(
    count: usize,
    bytes_min: usize,
    fields: &mut Fields<'_>,
    mut one: impl FnMut(&mut Fields<'_>) -> std::result::Result<T, Malformed>,
) -> std::result::Result<Vec<T>, Malformed> {
    if count > fields.left() / bytes_min {
        return Err(format!("{count} things of at least {bytes_min} bytes in {} bytes", fields.left()));
    }
    (0..count).map(|_| one(fields)).collect()
}

fn push_tensor(bytes: &mut Vec<u8>, dtype: Dtype, shape: &[u64]) {
    bytes.extend([dtype as u8, shape.len() as u8]);
    for dim in shape {
        bytes.extend(dim.to_le_bytes());
    }
}

fn tensor(fields: &mut Fields<'_>) -> std::result::Result<(Dtype, Vec<u64>), Malformed> {
    let dtype = dtype(fields.u8()?)?;
    let rank = usize::from(fields.u8()?);
    if rank > RANK_MAX {
        return Err(format!("a tensor of {rank} dimensions"));
    }
    let shape = (0..rank).map(|_| fields.u64()).collect::<std::result::Result<_, _>>()?;
    Ok((dtype, shape))
}

fn dtype(code: u8) -> std::result::Result<Dtype, Malformed> {
    Dtype::from_code(code).ok_or_else(|| format!("the unknown dtype {code}"))
}
