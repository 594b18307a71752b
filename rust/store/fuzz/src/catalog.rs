//! Feeds the catalog's parsers with bytes that nobody wrote: each answers with what it found or what is wrong.
//!
//! `make fuzz` runs it for a minute, on a stable toolchain. What it finds is left beside this
//! crate's `Cargo.toml` as `crash-*`; a bounded run over random bytes is in `rust/store/tests/damage.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memascend_store::{parse_description, parse_label, parse_root};

fuzz_target!(|bytes: &[u8]| {
    drop(parse_label(bytes));
    if let Some((uuid, page)) = bytes.split_first_chunk::<16>() {
        drop(parse_root(page, uuid));
    }
    if let Ok(description) = parse_description(bytes) {
        // What is let through can be laid out, or is refused for its size.
        drop(description.sizes(1, None));
    }
});
