//! Encodes and decodes the catalog's fields: little-endian numbers and short strings. The decoder checks the length of
//! a string before it reads the string.

/// The reason why bytes violate the format.
pub(crate) type Malformed = String;

/// The reason why bytes cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DecodeError {
    /// The bytes violate the format.
    Malformed(Malformed),
    /// The bytes use the named feature, flag, format or code, which this version of memascend does not know.
    Newer(String),
}

impl From<Malformed> for DecodeError {
    fn from(why: Malformed) -> Self {
        Self::Malformed(why)
    }
}

impl From<DecodeError> for Malformed {
    fn from(unread: DecodeError) -> Self {
        match unread {
            DecodeError::Malformed(why) => why,
            DecodeError::Newer(what) => newer(&what),
        }
    }
}

/// Returns the error message for a store that uses `what`, which this version does not know.
pub(crate) fn newer(what: &str) -> String {
    format!("the store uses {what}, which this version of memascend does not know: install a newer version")
}

/// Reads the fields in a slice of bytes, one after the other.
pub(crate) struct Fields<'a> {
    bytes: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Returns the number of unread bytes.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len()
    }

    /// Reads the next `nbytes` bytes.
    pub(crate) fn take(&mut self, nbytes: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.bytes.split_at_checked(nbytes).ok_or_else(|| {
            format!("a field of {nbytes} bytes goes past the end: only {} bytes are left", self.bytes.len())
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

    /// Reads a length, then a string of this length. Fails if the length exceeds `bytes_max`, if fewer bytes are left,
    /// or if the string is not UTF-8.
    pub(crate) fn text(&mut self, bytes_max: usize) -> Result<String, Malformed> {
        let nbytes = usize::from(self.u16()?);
        if nbytes > bytes_max {
            return Err(format!("a string has {nbytes} bytes, but at most {bytes_max} are allowed"));
        }
        let text = std::str::from_utf8(self.take(nbytes)?).map_err(|_| "a string is not UTF-8".to_owned())?;
        Ok(text.to_owned())
    }
}

impl Fields<'_> {
    /// Reads the number of strings, then each string. Fails as [`Fields::text`] does.
    pub(crate) fn texts(&mut self, bytes_max: usize) -> Result<Vec<String>, Malformed> {
        (0..self.u8()?).map(|_| self.text(bytes_max)).collect()
    }
}

/// Calls `one` for each of `count` items, and returns the items. Each item has at least `bytes_min` bytes. If there are
/// too few unread bytes for `count` items, fails before it allocates memory.
pub(crate) fn counted<'a, T, E: From<Malformed>>(
    count: usize,
    bytes_min: usize,
    fields: &mut Fields<'a>,
    mut one: impl FnMut(&mut Fields<'a>) -> Result<T, E>,
) -> Result<Vec<T>, E> {
    if count > fields.left() / bytes_min {
        return Err(
            format!("{count} items of at least {bytes_min} bytes do not fit into {} bytes", fields.left()).into()
        );
    }
    (0..count).map(|_| one(fields)).collect()
}

/// Writes the number of strings, then each string. The number must fit into a `u8`, and each length into a `u16`.
pub(crate) fn push_texts(bytes: &mut Vec<u8>, texts: &[String]) {
    bytes.push(u8::try_from(texts.len()).unwrap_or(u8::MAX));
    texts.iter().take(usize::from(u8::MAX)).for_each(|text| push_text(bytes, text));
}

/// Writes the length of a string, then the string. The length must fit into a `u16`.
pub(crate) fn push_text(bytes: &mut Vec<u8>, text: &str) {
    let nbytes = u16::try_from(text.len()).unwrap_or(u16::MAX);
    bytes.extend(nbytes.to_le_bytes());
    bytes.extend(&text.as_bytes()[..usize::from(nbytes)]);
}
