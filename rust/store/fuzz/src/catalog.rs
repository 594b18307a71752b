//! Fuzzes the catalog's parsers: none may panic, and a root or head that parses must encode to the same fields.
//!
//! `make fuzz` runs this target for a minute, on a stable toolchain. Inputs that fail are written to the folder of this
//! crate's `Cargo.toml`, as `crash-*`, `oom-*` or `timeout-*`. `rust/store/tests/stores/damage.rs` has a bounded run
//! over random bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memascend_store::{Description, parse_description, parse_head_fields, parse_label, parse_root, parse_root_fields};

/// Computes the layout of a parsed description. This may fail because the description is too large, but must not panic.
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
