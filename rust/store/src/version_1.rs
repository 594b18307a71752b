//! Reads version 1 of the format as far as an upgrade needs: its roots and its description.

use crate::{
    Description, Dtype, Entry, Format, Kind, StateTensor,
    bounds::{NAME_BYTES_MAX, RANK_MAX},
    checksum::{Subject, Uuid, checksum},
    encoded::{ENTRY_BYTES_MIN, STATE_BYTES_MIN, UNIT_BYTES_MIN, counted, dtype, shape},
    fields::{Fields, Malformed, Unread},
    root::{self, UNCLOSED, UNFLUSHED},
};

const MAGIC: [u8; 8] = *b"mascroot";
/// What marked an entry as compact: the type of its first state tensor.
const REST: u8 = 16;

/// A root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Root {
    pub(crate) generation: u64,
    pub(crate) table_bytes: u64,
    pub(crate) table_checksum: u64,
    pub(crate) description_bytes: u64,
    pub(crate) description_checksum: u64,
    pub(crate) flags: u32,
    pub(crate) boot: [u8; 16],
}

/// The newest root of a page; `None` if none was ever written there.
pub(crate) fn read_root(page: &[u8], uuid: &Uuid) -> Result<Option<Root>, Malformed> {
    root::newest(page, |sector| decode_root(sector, uuid), |root| root.generation)
}

fn decode_root(sector: &[u8], uuid: &Uuid) -> Result<Root, Malformed> {
    let mut fields = root::opened(sector, MAGIC, uuid)?;
    let root = Root {
        generation: fields.u64()?,
        table_bytes: fields.u64()?,
        table_checksum: fields.u64()?,
        description_bytes: fields.u64()?,
        description_checksum: fields.u64()?,
        flags: u32::try_from(fields.u64()?).map_err(|_| "unknown flags".to_owned())?,
        boot: fields.array()?,
    };
    if root.generation == 0 || root.generation >= u64::MAX - 1 || root.flags & !(UNCLOSED | UNFLUSHED) != 0 {
        return Err(format!("generation {} with flags {:#x}", root.generation, root.flags));
    }
    Ok(root)
}

/// Whether these bytes are the description that a root names.
pub(crate) fn is_whole(bytes: &[u8], root: &Root, uuid: &Uuid) -> bool {
    checksum(uuid, Subject::Description, (0, 0), 0, bytes) == root.description_checksum
}

/// A description. Its bounds are those of now: what they refuse is no store that could be used.
pub(crate) fn decode_description(bytes: &[u8]) -> Result<Description, Unread> {
    let mut fields = Fields::new(bytes);
    let chunk_elements = fields.u32()?;
    let user_bytes_max = fields.u32()?;
    let hyperparameters_bytes_max = fields.u32()?;
    let (unit_count, entry_count) = (fields.u32()? as usize, fields.u32()? as usize);
    let optimizer = fields.text(NAME_BYTES_MAX)?;
    let units = counted(unit_count, UNIT_BYTES_MIN, &mut fields, |fields| Ok(fields.text(NAME_BYTES_MAX)?))?;
    let entries = counted(entry_count, ENTRY_BYTES_MIN, &mut fields, decode_entry)?;
    if fields.left() > 0 {
        return Err(format!("{} bytes are left over", fields.left()).into());
    }
    let description = Description {
        chunk_elements,
        user_bytes_max,
        hyperparameters_bytes_max,
        optimizer,
        units,
        entries,
        first_elements: vec![],
    };
    description.checked()?;
    Ok(description)
}

fn decode_entry(fields: &mut Fields<'_>) -> Result<Entry, Unread> {
    let name = fields.text(NAME_BYTES_MAX)?;
    let kind = match fields.u8()? {
        0 => Kind::Parameter,
        1 => Kind::Buffer,
        other => return Err(format!("an entry of kind {other}").into()),
    };
    let unit = fields.u32()?;
    let spill = match fields.u8()? {
        0 => None,
        code => Some(dtype(code)?),
    };
    let rank = usize::from(fields.u8()?);
    let order = fields.take(rank.min(RANK_MAX + 1))?.to_vec();
    let (of_values, own) = (dtype(fields.u8()?)?, shape(fields)?);
    let state_count = usize::from(fields.u8()?);
    let mut format = Format::Plain;
    let state = counted(state_count, STATE_BYTES_MIN, fields, |fields| {
        let name = fields.text(NAME_BYTES_MAX)?;
        let of_state = match fields.u8()? {
            REST => {
                format = Format::Compact;
                Dtype::I16
            }
            code => dtype(code)?,
        };
        let shape = shape(fields)?;
        let grain = u32::from(shape == own);
        Ok(StateTensor { name, dtype: of_state, shape, grain })
    })?;
    Ok(Entry { name, kind, unit, dtype: of_values, shape: own, order, spill, format, state })
}
