//! Defines the formats of a record's state: where the fp32 master weights are stored, and in which form the moments are
//! stored.

use crate::{Dtype, Error, Record, Result, StateTensor};

/// The format of a record's state tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Any state tensors, each in the dtype that the description gives.
    #[default]
    Plain,
    /// float32 values, or 16-bit values that each have a float32 master weight. Moments in bfloat16.
    Bf16,
    /// float32 values, or 16-bit values that each have a float32 master weight. Moments in 8 bits.
    EightBit,
    /// A compact master weight and Adam's moments in float32. The float32 master weight is not stored. The bfloat16
    /// value is the master weight rounded to nearest even, and the state tensors [`COMPACT`] have the bits that the
    /// value lacks.
    Compact,
    /// A compact master weight and a momentum in float32. The momentum's sign bit is in use and cannot mark the values
    /// that were rounded up, so the bits of the state tensor `rounded_up` mark these values.
    CompactSingle,
    /// A compact master weight; moments in bfloat16.
    CompactBf16,
    /// A compact master weight; moments in 8 bits.
    CompactEightBit,
    /// No master weight: the 16-bit values are rounded stochastically. Moments in float32.
    Stochastic,
    /// No master weight; moments in bfloat16.
    StochasticBf16,
    /// No master weight; moments in 8 bits.
    StochasticEightBit,
}

/// Where a record's fp32 master weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Master {
    /// In the record's values if they are float32. In the state tensor `master` if the values have 16 bits.
    Own,
    /// In the bfloat16 values, the state tensor `rest`, and one bit per element that marks a value that was rounded up.
    Compact,
    /// The record has no master weights.
    None,
}

/// The form in which a record's moments are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MomentForm {
    /// float32.
    Single,
    /// bfloat16.
    Bf16,
    /// An 8-bit code for each element, and a float32 scale for each block of [`BLOCK`] elements.
    EightBit,
}

/// Number of elements that share one scale of 8-bit moments.
pub const BLOCK: u32 = 256;

/// The state tensors of a record in [`Format::Compact`]. The second moment `exp_avg_sq` is never negative; its sign bit
/// is set if the value of the same element was rounded up.
pub const COMPACT: [(&str, Dtype); 3] = [("rest", Dtype::I16), ("exp_avg", Dtype::F32), ("exp_avg_sq", Dtype::F32)];

/// The names of Adam's moments.
const ADAM: [&str; 2] = ["exp_avg", "exp_avg_sq"];
/// The name of the one moment of SGD with momentum and of Muon.
const MOMENTUM: [&str; 1] = ["momentum_buffer"];

impl Format {
    /// Each format with its name in a description, the place of its master weights and the form of its moments. The
    /// rows have the order of the enum, because `row` uses a format's number as the index of its row.
    const ALL: [(Self, &str, Master, MomentForm); 10] = [
        (Self::Plain, "", Master::Own, MomentForm::Single),
        (Self::Bf16, "bf16", Master::Own, MomentForm::Bf16),
        (Self::EightBit, "8bit", Master::Own, MomentForm::EightBit),
        (Self::Compact, "compact", Master::Compact, MomentForm::Single),
        (Self::CompactSingle, "compact fp32", Master::Compact, MomentForm::Single),
        (Self::CompactBf16, "compact bf16", Master::Compact, MomentForm::Bf16),
        (Self::CompactEightBit, "compact 8bit", Master::Compact, MomentForm::EightBit),
        (Self::Stochastic, "stochastic", Master::None, MomentForm::Single),
        (Self::StochasticBf16, "stochastic bf16", Master::None, MomentForm::Bf16),
        (Self::StochasticEightBit, "stochastic 8bit", Master::None, MomentForm::EightBit),
    ];

    fn row(self) -> (Self, &'static str, Master, MomentForm) {
        Self::ALL[self as usize]
    }

    /// Returns the format's name in a description.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns the format that a description calls `name`, or `None` if no format has this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Returns where the master weights are stored.
    #[must_use]
    pub fn master(self) -> Master {
        self.row().2
    }

    /// Returns the form of the moments.
    #[must_use]
    pub fn moments(self) -> MomentForm {
        self.row().3
    }
}

impl Record {
    /// Returns the state tensors that this record has in `format`: the state tensors of Adam or, if `momentum` is true,
    /// the state tensors of SGD with momentum and of Muon. Fails if `format` is not defined for the record's dtype
    /// and `momentum`.
    pub fn state_in(&self, format: Format, momentum: bool) -> Result<Vec<StateTensor>> {
        let wanted = named_state(self.dtype, format, momentum).ok_or_else(|| {
            let (name, dtype, of) = (&self.name, self.dtype.name(), format.name());
            Error::Invalid(format!(
                "{name:?} has values of {dtype}, which the format {of:?} does not support for this optimizer: \
                 choose another format"
            ))
        })?;
        let elements = self.elements();
        Ok(wanted
            .into_iter()
            .map(|(name, dtype, grain)| StateTensor {
                name,
                dtype,
                shape: if grain == 1 { self.shape.clone() } else { vec![elements.div_ceil(u64::from(grain))] },
                grain,
            })
            .collect())
    }

    /// True if the state has `momentum_buffer`, the one moment of SGD with momentum and of Muon.
    #[must_use]
    pub fn has_momentum(&self) -> bool {
        self.state.iter().any(|tensor| tensor.name == MOMENTUM[0])
    }

    /// Rejects a record whose state tensors are not the state tensors of its format.
    pub(crate) fn checked_format(&self) -> std::result::Result<(), String> {
        if self.format == Format::Plain {
            return Ok(());
        }
        let wanted = self.state_in(self.format, self.has_momentum()).map_err(|error| error.to_string())?;
        if self.state == wanted {
            return Ok(());
        }
        let (name, format) = (&self.name, self.format.name());
        let of = |tensor: &StateTensor| format!("{} ({} {:?})", tensor.name, tensor.dtype.name(), tensor.shape);
        let wanted = wanted.iter().map(of).collect::<Vec<_>>().join(", ");
        Err(format!(
            "the state of {name:?} does not have the format {format}: for {} values, it must have {wanted}",
            self.dtype.name()
        ))
    }
}

/// Returns the name, dtype and grain of each state tensor. Returns `None` if `format` is not defined for the dtype
/// `values` and for `momentum`, and for [`Format::Plain`].
fn named_state(values: Dtype, format: Format, momentum: bool) -> Option<Vec<(String, Dtype, u32)>> {
    let has_16_bits = matches!(values, Dtype::Bf16 | Dtype::F16);
    let mut tensors: Vec<(String, Dtype, u32)> = match format.master() {
        Master::Own if values == Dtype::F32 => vec![],
        Master::Own if has_16_bits => vec![("master".into(), Dtype::F32, 1)],
        Master::Compact if values == Dtype::Bf16 => vec![("rest".into(), Dtype::I16, 1)],
        Master::None if has_16_bits => vec![],
        _ => return None,
    };
    let form = format.moments();
    if format == Format::Plain
        || (format == Format::Compact && momentum)
        || (format == Format::CompactSingle && !momentum)
    {
        return None;
    }
    if format.master() == Master::Compact && (momentum || form == MomentForm::EightBit) {
        // Here no moment has a free sign bit to mark a value that was rounded up: a momentum needs its sign, and an
        // 8-bit code has no sign bit. The bits of `rounded_up` mark the values that were rounded up.
        tensors.push(("rounded_up".into(), Dtype::U8, 8));
    }
    let names = if momentum { &MOMENTUM[..] } else { &ADAM[..] };
    let dtype = match form {
        MomentForm::Single => Dtype::F32,
        MomentForm::Bf16 => Dtype::Bf16,
        MomentForm::EightBit => Dtype::U8,
    };
    tensors.extend(names.iter().map(|&name| (name.into(), dtype, 1)));
    if form == MomentForm::EightBit {
        tensors.extend(names.iter().map(|name| (format!("{name}_absmax"), Dtype::F32, BLOCK)));
    }
    Some(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    fn values(dtype: Dtype) -> Record {
        Record {
            name: "weight".into(),
            kind: Kind::Parameter,
            unit: 0,
            dtype,
            shape: vec![3, 100],
            order: vec![],
            spill: None,
            format: Format::Plain,
            state: vec![],
        }
    }

    /// Returns the size in bytes of the state for 64 elements of a large record; `None` if `format` is not defined for
    /// `dtype` and `momentum`.
    fn bytes(dtype: Dtype, format: Format, momentum: bool) -> Option<u64> {
        let record = Record { shape: vec![1 << 20], ..values(dtype) };
        let state = record.state_in(format, momentum).ok()?;
        Some(state.iter().map(StateTensor::nbytes).sum::<u64>() >> 14)
    }

    #[test]
    fn record_bytes_match_the_format_and_dtype() {
        let (f32, bf16, f16) = (Dtype::F32, Dtype::Bf16, Dtype::F16);
        for (dtype, format, adam, momentum) in [
            (f32, Format::Bf16, 4 * 64, 2 * 64),
            (f32, Format::EightBit, 2 * 64 + 2, 64 + 1),
            (f16, Format::Bf16, 8 * 64, 6 * 64),
            (bf16, Format::EightBit, 6 * 64 + 2, 5 * 64 + 1),
            (bf16, Format::CompactBf16, 6 * 64, 4 * 64 + 8),
            (bf16, Format::CompactEightBit, 4 * 64 + 8 + 2, 3 * 64 + 8 + 1),
            (f16, Format::Stochastic, 8 * 64, 4 * 64),
            (bf16, Format::StochasticBf16, 4 * 64, 2 * 64),
            (f16, Format::StochasticEightBit, 2 * 64 + 2, 64 + 1),
        ] {
            assert_eq!(bytes(dtype, format, false), Some(adam), "{format:?}");
            assert_eq!(bytes(dtype, format, true), Some(momentum), "{format:?}");
        }
        assert_eq!(bytes(bf16, Format::Compact, false), Some(10 * 64));
        assert_eq!(bytes(bf16, Format::CompactSingle, true), Some(6 * 64 + 8));
        for (dtype, format) in [
            (f32, Format::CompactBf16),
            (f16, Format::CompactEightBit),
            (f32, Format::Stochastic),
            (Dtype::I8, Format::Bf16),
        ] {
            assert_eq!(bytes(dtype, format, false), None, "{format:?}");
        }
        assert_eq!(bytes(bf16, Format::Compact, true), None);
        assert_eq!(bytes(bf16, Format::CompactSingle, false), None);
    }

    #[test]
    fn checked_format_rejects_state_of_another_format() {
        for format in Format::ALL.map(|row| row.0).into_iter().filter(|format| *format != Format::Plain) {
            assert_eq!(format.row().0, format);
            assert_eq!(Format::from_name(format.name()), Some(format));
            let dtype = if format.master() == Master::Own { Dtype::F32 } else { Dtype::Bf16 };
            let mut record = Record { format, ..values(dtype) };
            record.state =
                record.state_in(format, format == Format::CompactSingle).unwrap_or_else(|error| panic!("{error}"));
            assert!(record.checked_format().is_ok());
            let mut bytes = Vec::new();
            record.encode(&mut bytes);
            assert_eq!(Record::decode(&mut crate::fields::Fields::new(&bytes)), Ok(record.clone()));
            let last = record.state.len() - 1;
            let spoilt: [fn(&mut StateTensor); 3] = [
                |tensor| tensor.dtype = Dtype::I32,
                |tensor| tensor.shape = vec![7],
                |tensor| tensor.name = "other".into(),
            ];
            for invalidate_values in spoilt {
                let mut other = record.clone();
                invalidate_values(&mut other.state[last]);
                assert!(other.checked_format().is_err(), "{other:?}");
            }
            record.state.swap(0, last);
            assert!(record.checked_format().is_err());
        }
        assert_eq!(Format::from_name("4bit"), None);
    }
}
