//! Exposes the catalog's parsers for fuzzing. Each parser takes plain bytes.

use crate::{
    Description, Head, head, label,
    root::{self, Found, Root},
};

/// The reason why bytes violate the format.
type Malformed = String;

/// Parses the first page of a device as a label, and returns the result as text.
#[must_use]
pub fn parse_label(bytes: &[u8]) -> String {
    format!("{:?}", label::read(bytes))
}

/// Parses a root page of the store `uuid`. Returns the generation of the root, or `None` if the page is blank or has a
/// mark. A mark states that the page holds no root. Fails with the reason if the page is malformed.
pub fn parse_root(page: &[u8], uuid: &[u8; 16]) -> Result<Option<u64>, Malformed> {
    Ok(found(page, uuid)?.map(|root| root.generation))
}

/// Returns the root in a page, or `None` if the page is blank or has a mark.
fn found(page: &[u8], uuid: &[u8; 16]) -> Result<Option<Root>, Malformed> {
    Ok(match root::read(page, uuid)? {
        Found::Root(root) => Some(*root),
        Found::Blank | Found::Mark => None,
    })
}

/// Adds a valid magic, uuid and checksum to `bytes`, so that fuzzing reaches the parser of the fields. Parses `bytes`
/// as the fields of a root, and returns the root's generation as [`parse_root`] does. Fails if the fields are
/// malformed, if the root uses an unknown feature or flag, or if the root changes when it is encoded and read again.
pub fn parse_root_fields(bytes: &[u8]) -> Result<Option<u64>, Malformed> {
    let uuid = [0; 16];
    let read = |page: &[u8]| found(page, &uuid);
    let root = read(&root::sealed(bytes, &uuid))?;
    if let Some(root) = &root {
        if read(&root.encode())?.as_ref() != Some(root) {
            return Err("it reads differently when it is written again".into());
        }
        root.known()?;
    }
    Ok(root.map(|root| root.generation))
}

/// Adds a valid magic and length to `bytes`, so that fuzzing reaches the parser of the fields. Parses `bytes` as the
/// fields of a log head, and returns the head's generation. Fails if the fields are malformed, or if the head changes
/// when it is encoded and read again.
pub fn parse_head_fields(bytes: &[u8]) -> Result<u64, Malformed> {
    let head = Head::decode(&head::begun(bytes))?;
    if Head::decode(&head.encode()).as_ref() != Ok(&head) {
        return Err("it reads differently when it is written again".into());
    }
    Ok(head.generation)
}

/// Decodes a description and checks its bounds. Fails with the reason if the bytes are malformed, or use a feature,
/// format or code that this version does not know.
pub fn parse_description(bytes: &[u8]) -> Result<Description, Malformed> {
    Ok(Description::decode(bytes)?)
}
