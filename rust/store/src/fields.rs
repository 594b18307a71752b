//! The fields of the catalog: little-endian numbers and short texts, each bounded before it is used.

/// Why bytes are not what the format says.
pub(crate) type Malformed = String;

/// Reads fields one after the other.
pub(crate) struct Fields<'a> {
    bytes: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn take(&mut self, nbytes: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.bytes.split_at_checked(nbytes).ok_or_else(|| {
            format!("a field of {nbytes} bytes goes past the end, {} bytes are left", self.bytes.len())
        })?;
        self.bytes = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// A text with its length before it, of at most `bytes_max` bytes.
    pub(crate) fn text(&mut self, bytes_max: usize) -> Result<String, Malformed> {
        let nbytes = usize::from(self.u16()?);
        if nbytes > bytes_max {
            return Err(format!("a text of {nbytes} bytes, at most {bytes_max} are allowed"));
        }
        let text = std::str::from_utf8(self.take(nbytes)?).map_err(|_| "a text that is not UTF-8".to_owned())?;
        Ok(text.to_owned())
    }
}

/// Writes a text with its length before it. The caller has bounded it.
pub(crate) fn push_text(bytes: &mut Vec<u8>, text: &str) {
    let nbytes = u16::try_from(text.len()).unwrap_or(u16::MAX);
    bytes.extend(nbytes.to_le_bytes());
    bytes.extend(&text.as_bytes()[..usize::from(nbytes)]);
}
