//! Identifies the machine's boot.
//!
//! What was written and not flushed is there as long as the machine has not gone down. A boot that nobody knows is never
//! the same.

use std::fs;

/// What the kernel calls a boot; zeros where it does not say.
pub(crate) type Boot = [u8; 16];

const UNKNOWN: Boot = [0; 16];

/// This boot.
pub(crate) fn now() -> Boot {
    parse(&fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default())
}

/// Whether the machine has been up since `then`, as far as that is known.
pub(crate) fn is_same(then: &Boot, now: &Boot) -> bool {
    *now != UNKNOWN && then == now
}

/// A name of 32 hexadecimal digits and hyphens between them; half of one names nothing.
fn parse(text: &str) -> Boot {
    let digits: Option<Vec<u8>> = text
        .trim()
        .chars()
        .filter(|&letter| letter != '-')
        .map(|letter| letter.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect();
    let mut boot = UNKNOWN;
    if let Some(digits) = digits.filter(|digits| digits.len() == 2 * boot.len()) {
        for (byte, pair) in boot.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
    }
    boot
}

#[cfg(test)]
mod tests {
    use super::{UNKNOWN, is_same, parse};

    #[test]
    fn a_boot_that_nobody_knows_is_never_the_same() {
        let boot = parse("0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0\n");
        assert_eq!(boot[..4], [0x0f, 0x1e, 0x2d, 0x3c]);
        assert!(is_same(&boot, &boot) && !is_same(&UNKNOWN, &boot) && !is_same(&boot, &UNKNOWN));
        assert!(!is_same(&UNKNOWN, &UNKNOWN));
    }

    #[test]
    fn half_a_name_names_nothing() {
        for text in ["", "0f1e2d3c", "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f", "zf1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"] {
            assert_eq!(parse(text), UNKNOWN, "{text:?}");
        }
    }
}
