//! Defines the dtypes of tensors. Each dtype has a number in the catalog, a size, and a name in torch.

/// The type of a tensor's elements. The catalog stores a dtype as its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Dtype {
    F32 = 1,
    Bf16 = 2,
    F16 = 3,
    F64 = 4,
    U8 = 5,
    I8 = 6,
    I16 = 7,
    I32 = 8,
    I64 = 9,
    Bool = 10,
    U16 = 11,
    U32 = 12,
    U64 = 13,
    F8E4m3fn = 14,
    F8E5m2 = 15,
    C32 = 17,
    C64 = 18,
    C128 = 19,
    F8E4m3fnuz = 20,
    F8E5m2fnuz = 21,
    F8E8m0fnu = 22,
    F4E2m1fnX2 = 23,
}

impl Dtype {
    /// Every dtype with torch's name for it.
    const NAMES: [(Self, &str); 22] = [
        (Self::F32, "float32"),
        (Self::Bf16, "bfloat16"),
        (Self::F16, "float16"),
        (Self::F64, "float64"),
        (Self::U8, "uint8"),
        (Self::I8, "int8"),
        (Self::I16, "int16"),
        (Self::I32, "int32"),
        (Self::I64, "int64"),
        (Self::Bool, "bool"),
        (Self::U16, "uint16"),
        (Self::U32, "uint32"),
        (Self::U64, "uint64"),
        (Self::F8E4m3fn, "float8_e4m3fn"),
        (Self::F8E5m2, "float8_e5m2"),
        (Self::C32, "complex32"),
        (Self::C64, "complex64"),
        (Self::C128, "complex128"),
        (Self::F8E4m3fnuz, "float8_e4m3fnuz"),
        (Self::F8E5m2fnuz, "float8_e5m2fnuz"),
        (Self::F8E8m0fnu, "float8_e8m0fnu"),
        (Self::F4E2m1fnX2, "float4_e2m1fn_x2"),
    ];

    /// Returns the size of one element in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8
            | Self::I8
            | Self::Bool
            | Self::F8E4m3fn
            | Self::F8E5m2
            | Self::F8E4m3fnuz
            | Self::F8E5m2fnuz
            | Self::F8E8m0fnu
            | Self::F4E2m1fnX2 => 1,
            Self::Bf16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 | Self::C32 => 4,
            Self::F64 | Self::I64 | Self::U64 | Self::C64 => 8,
            Self::C128 => 16,
        }
    }

    /// Returns torch's name of the dtype.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(dtype, _)| *dtype == self).map_or("", |(_, name)| name)
    }

    /// Returns the dtype that torch calls `name`, or `None` if `Dtype` has no such dtype.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find(|(_, of)| *of == name).map(|(dtype, _)| dtype)
    }

    /// Returns the dtype that has the number `code` in the catalog, or `None` if no dtype has this number.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::NAMES.into_iter().map(|(dtype, _)| dtype).find(|dtype| *dtype as u8 == code)
    }
}
