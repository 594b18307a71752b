//! Fuzzes the catalog's parsers: each answers with what it found or what is wrong.
//!
//! `make fuzz` runs it for a minute, on a stable toolchain. What it finds is left beside this
//! crate's `Cargo.toml` as `crash-*`; a bounded run over random bytes is in `rust/store/tests/stores/damage.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memascend_store::{
    Description, parse_description, parse_head_fields, parse_label, parse_root, parse_root_fields,
};

/// What is let through can be laid out, or is refused for its size.
fn laid_out(description: &Description) {
    drop(description.sizes(1, None));
    drop(description.sizes(3, Some(4096)));
    let _ = description.staging_bytes();
}

fuzz_target!(|bytes: &[u8]| {
    drop(parse_label(bytes));
    if let Err(why) = parse_root_fields(bytes) {
        assert!(!why.contains("when it is written again"), "{why}");
    }
    if let Err(why) = parse_head_fields(bytes) {
        assert!(!why.contains("when it is written again"), "{why}");
    }
    if let Some((uuid, page)) = bytes.split_first_chunk::<16>() {
        drop(parse_root(page, uuid));
    }
    if let Ok(description) = parse_description(bytes) {
        laid_out(&description);
    }
});
