//! Exposes the catalog's parsers on plain bytes, for fuzzing.

use crate::{
    Description, Head, head, label,
    root::{self, Found, Root},
};

/// Why bytes are not what the format says.
type Malformed = String;

/// What the beginning of a device says, in words.
#[must_use]
pub fn parse_label(bytes: &[u8]) -> String {
    format!("{:?}", label::read(bytes))
}

/// Whether a page holds a root of the store `uuid`: its generation, or what is wrong.
pub fn parse_root(page: &[u8], uuid: &[u8; 16]) -> Result<Option<u64>, Malformed> {
    Ok(found(page, uuid)?.map(|root| root.generation))
}

fn found(page: &[u8], uuid: &[u8; 16]) -> Result<Option<Root>, Malformed> {
    Ok(match root::read(page, uuid)? {
        Found::Root(root) => Some(*root),
        Found::Blank | Found::Mark => None,
    })
}

/// Reads bytes as the fields of a root, as if its beginning and its checksum were right: its generation, if what it
/// names is known and can be written again, or what is wrong.
pub fn parse_root_fields(bytes: &[u8]) -> Result<Option<u64>, Malformed> {
    let uuid = [0; 16];
    let read = |page: &[u8]| found(page, &uuid);
    let root = read(&root::sealed(bytes, &uuid))?;
    if let Some(root) = &root {
        if read(&root.encode())?.as_ref() != Some(root) {
            return Err("it reads otherwise when it is written again".into());
        }
        root.known()?;
    }
    Ok(root.map(|root| root.generation))
}

/// Reads bytes as the fields of a head of the log, as if its beginning were right: its generation, if it can be written
/// again, or what is wrong.
pub fn parse_head_fields(bytes: &[u8]) -> Result<u64, Malformed> {
    let head = Head::decode(&head::begun(bytes))?;
    if Head::decode(&head.encode()).as_ref() != Ok(&head) {
        return Err("it reads otherwise when it is written again".into());
    }
    Ok(head.generation)
}

/// The description that bytes hold, or what is wrong.
pub fn parse_description(bytes: &[u8]) -> Result<Description, Malformed> {
    Ok(Description::decode(bytes)?)
}
