//! The catalog's parsers on plain bytes, for whoever wants to try them on bytes that nobody wrote.

use crate::{Description, label, root};

/// Why bytes are not what the format says.
type Malformed = String;

/// What the beginning of a device says, in words.
#[must_use]
pub fn parse_label(bytes: &[u8]) -> String {
    format!("{:?}", label::read(bytes))
}

/// Whether a page holds a root of the store `uuid`: its generation, or what is wrong.
pub fn parse_root(page: &[u8], uuid: &[u8; 16]) -> Result<Option<u64>, Malformed> {
    root::read(page, uuid).map(|root| root.map(|root| root.generation))
}

/// The description that bytes hold, or what is wrong.
pub fn parse_description(bytes: &[u8]) -> Result<Description, Malformed> {
    Description::decode(bytes)
}
