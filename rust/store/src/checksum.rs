//! Checksums: XXH3-64, bound to the store, to the place and to the version of what they stand for.

use twox_hash::XxHash3_64;

/// What a checksum stands for; the number goes into the seed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Subject {
    Label = 1,
    Root = 2,
    Description = 3,
    TablePage = 4,
    TablePages = 5,
    Piece = 6,
    Spill = 7,
}

/// The store's identity, which every checksum is bound to.
pub(crate) type Uuid = [u8; 16];

/// XXH3-64 of `bytes` with a seed that is the XXH3-64 of identity, subject, place and version.
pub(crate) fn checksum(uuid: &Uuid, subject: Subject, place: (u64, u64), version: u64, bytes: &[u8]) -> u64 {
    let mut bound = [0; 48];
    bound[..16].copy_from_slice(uuid);
    for (field, value) in bound[16..].chunks_exact_mut(8).zip([subject as u64, place.0, place.1, version]) {
        field.copy_from_slice(&value.to_le_bytes());
    }
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&bound), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_that_a_checksum_is_bound_to_changes_it() {
        let bytes = [7; 4096];
        let all = [
            checksum(&[0; 16], Subject::Piece, (0, 0), 0, &bytes),
            checksum(&[1; 16], Subject::Piece, (0, 0), 0, &bytes),
            checksum(&[0; 16], Subject::TablePage, (0, 0), 0, &bytes),
            checksum(&[0; 16], Subject::Piece, (1, 0), 0, &bytes),
            checksum(&[0; 16], Subject::Piece, (0, 1), 0, &bytes),
            checksum(&[0; 16], Subject::Piece, (0, 0), 1, &bytes),
            checksum(&[0; 16], Subject::Piece, (0, 0), 0, &bytes[1..]),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(all[index + 1..].iter().all(|other| other != one), "{index}");
        }
    }

    #[test]
    fn it_is_xxh3() {
        // The specification's value for no input and no seed.
        assert_eq!(XxHash3_64::oneshot(b""), 0x2D06_8005_38D3_94C2);
    }
}
