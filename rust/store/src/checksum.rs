//! Computes checksums with XXH3-64. A checksum of data in a store also covers the store's uuid, and the kind, place and
//! version of the data.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

/// The kind of data that a checksum covers. The number of the kind is part of the checksum's seed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Subject {
    Label = 1,
    Root = 2,
    Description = 3,
    TablePage = 4,
    TablePages = 5,
    Extent = 6,
    Head = 8,
    Gradient = 9,
}

/// The identity of a store. The seed of each checksum of the store's data includes this identity.
pub(crate) type Uuid = [u8; 16];

/// Returns the XXH3-64 of `bytes`, seeded with the XXH3-64 of `uuid`, `subject`, `place` and `version`.
pub(crate) fn checksum(uuid: &Uuid, subject: Subject, place: (u64, u64), version: u64, bytes: &[u8]) -> u64 {
    let mut bound = [0; 48];
    bound[..16].copy_from_slice(uuid);
    for (field, value) in bound[16..].chunks_exact_mut(8).zip([subject as u64, place.0, place.1, version]) {
        field.copy_from_slice(&value.to_le_bytes());
    }
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&bound), bytes)
}

/// Returns the text of an error about data whose checksum is `got` instead of `wanted`. `memascend store verify` shows
/// only the text before ". Run".
pub(crate) fn mismatch(got: u64, wanted: u64) -> String {
    format!(
        "its checksum is {got:016x}, but {wanted:016x} was written: the device did not return the written data. Run \
         `memascend store verify`: if the previous commit is whole, existing=\"previous\" opens that commit"
    )
}

/// Hashes a stream of bytes with unseeded XXH3-64, so that other programs can compute the same checksum of a file.
pub struct Checksum(twox_hash::xxhash3_64::Hasher);

impl Default for Checksum {
    fn default() -> Self {
        Self(twox_hash::xxhash3_64::Hasher::new())
    }
}

impl Checksum {
    /// Appends `bytes` to the stream.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Returns the checksum of all bytes appended so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.finish()
    }
}

/// Returns the key of the random bits for stochastic rounding: the XXH3-64 of the UTF-8 of `name`, seeded with `seed`.
#[must_use]
pub fn key_of(name: &str, seed: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, name.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_depends_on_uuid_subject_place_version_and_bytes() {
        let bytes = [7; 4096];
        let all = [
            checksum(&[0; 16], Subject::Extent, (0, 0), 0, &bytes),
            checksum(&[1; 16], Subject::Extent, (0, 0), 0, &bytes),
            checksum(&[0; 16], Subject::TablePage, (0, 0), 0, &bytes),
            checksum(&[0; 16], Subject::Extent, (1, 0), 0, &bytes),
            checksum(&[0; 16], Subject::Extent, (0, 1), 0, &bytes),
            checksum(&[0; 16], Subject::Extent, (0, 0), 1, &bytes),
            checksum(&[0; 16], Subject::Extent, (0, 0), 0, &bytes[1..]),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(all[index + 1..].iter().all(|other| other != one), "{index}");
        }
    }

    #[test]
    fn checksum_of_no_bytes_is_the_xxh3_constant() {
        // The XXH3 specification gives this value for an empty input and seed 0.
        assert_eq!(XxHash3_64::oneshot(b""), 0x2D06_8005_38D3_94C2);
        assert_eq!(Checksum::default().value(), 0x2D06_8005_38D3_94C2);
    }

    #[test]
    fn checksum_updated_in_parts_equals_oneshot() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|number| (number * 31).to_le_bytes()[1]).collect();
        let mut parts = Checksum::default();
        for part in bytes.chunks(977) {
            parts.update(part);
        }
        assert_eq!(parts.value(), XxHash3_64::oneshot(&bytes));
    }
}
