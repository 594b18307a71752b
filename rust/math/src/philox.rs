//! Draws random bits from counters. An element's bits depend only on seed, parameter, step, index and purpose, so the
//! division into shards and threads does not change them.
//!
//! The generator is Philox4x32-10 by Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as easy as 1, 2, 3",
//! 2011), which also passes `BigCrush` for regular patterns of keys and counters. Here the patterns are regular,
//! because the numbers of steps and elements grow by one. A cheaper hash may fail for regular patterns.

/// The number of elements that draw their bits together. A block of 8-bit moments has the same number of elements.
pub(crate) const BLOCK: usize = 256;
/// The number of counters of a block. Each counter is a vector lane and gives 16 bits to each of eight elements.
const LANES: usize = BLOCK / 8;
const ROUNDS: usize = 10;
const MULTIPLIERS: (u64, u64) = (0xD251_1F53, 0xCD9E_8D57);
const WEYL: (u32, u32) = (0x9E37_79B9, 0xBB67_AE85);

/// Identifies a seed, a parameter and its update. The random bits of an element also depend on the index of the element
/// and on the purpose of the bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Random {
    /// A hash of the seed and the parameter.
    pub key: u64,
    /// The parameter's own count of updates.
    pub step: u64,
}

/// The purpose of drawn bits. Each purpose has its own counters, so two purposes never draw from the same counter.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    SecondMoment = 0,
    Values = 1,
}

impl Random {
    /// Returns 16 bits for each of `BLOCK` elements, beginning at element `first` of the whole parameter.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "below 256")]
    pub(crate) fn elements(self, first: u64, purpose: Purpose) -> [u16; BLOCK] {
        let (block, within) = (first / BLOCK as u64, (first % BLOCK as u64) as usize);
        let mut drawn = self.block(block, purpose);
        if within > 0 {
            drawn.copy_within(within.., 0);
            drawn[BLOCK - within..].copy_from_slice(&self.block(block + 1, purpose)[..within]);
        }
        drawn
    }

    /// Returns 16 bits for each element of a block; blocks count from the start of the whole parameter.
    ///
    /// The 128-bit counter has `32 * block + lane` in its lowest 60 bits, then 4 bits of `purpose`, then 64 bits of
    /// `step`. The output has eight groups of 16 bits. From the lowest group on, the groups go to the elements `lane`,
    /// `32 + lane`, and so on.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "keeps the lower halves")]
    fn block(self, block: u64, purpose: Purpose) -> [u16; BLOCK] {
        let first = block * LANES as u64;
        let upper = first >> 32 | (purpose as u64) << 28;
        let keys = self.round_keys();
        let mut words = [[0_u32; LANES]; 4];
        for lane in 0..LANES {
            // The words have 64 bits, because the vector instruction multiplies the lower halves of 64-bit words. The
            // upper halves have no meaning. `first` is a multiple of `LANES`, so adding `lane` carries nothing into the
            // upper word.
            let (mut a, mut b, mut c, mut d) = (first + lane as u64, upper, self.step, self.step >> 32);
            for (key_0, key_1) in keys {
                let (one, two) = (u64::from(a as u32) * MULTIPLIERS.0, u64::from(c as u32) * MULTIPLIERS.1);
                (a, b, c, d) = (two >> 32 ^ b ^ key_0, two, one >> 32 ^ d ^ key_1, one);
            }
            (words[0][lane], words[1][lane]) = (a as u32, b as u32);
            (words[2][lane], words[3][lane]) = (c as u32, d as u32);
        }
        let mut drawn = [0; BLOCK];
        for (pair, word) in drawn.chunks_exact_mut(2 * LANES).zip(&words) {
            for lane in 0..LANES {
                pair[lane] = word[lane] as u16;
                pair[LANES + lane] = (word[lane] >> 16) as u16;
            }
        }
        drawn
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "keeps the lower halves")]
    fn round_keys(self) -> [(u64, u64); ROUNDS] {
        let (mut key_0, mut key_1) = (self.key as u32, (self.key >> 32) as u32);
        [(); ROUNDS].map(|()| {
            let keys = (u64::from(key_0), u64::from(key_1));
            (key_0, key_1) = (key_0.wrapping_add(WEYL.0), key_1.wrapping_add(WEYL.1));
            keys
        })
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "keeps the lower halves")]
mod tests {
    use super::*;

    /// Computes Philox as the paper writes it, one counter at a time.
    fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
        let halves = |a: u32, b: u32| {
            let product = u64::from(a) * u64::from(b);
            ((product >> 32) as u32, product as u32)
        };
        (0..10).fold(counter, |[a, b, c, d], round: u32| {
            let key = [
                key[0].wrapping_add(round.wrapping_mul(0x9E37_79B9)),
                key[1].wrapping_add(round.wrapping_mul(0xBB67_AE85)),
            ];
            let ((high_0, low_0), (high_1, low_1)) = (halves(0xD251_1F53, a), halves(0xCD9E_8D57, c));
            [high_1 ^ b ^ key[0], low_1, high_0 ^ d ^ key[1], low_0]
        })
    }

    #[test]
    fn philox_matches_the_known_answers() {
        let max = u32::MAX;
        for (counter, key, answer) in [
            ([0; 4], [0; 2], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([max; 4], [max; 2], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ] {
            assert_eq!(philox(counter, key), answer);
        }
    }

    #[test]
    fn random_block_takes_its_bits_from_philox_of_its_counters() {
        for (key, step, block) in [(0, 0, 0), (0x0123_4567_89AB_CDEF, 0x1_0000_0002, 7), (u64::MAX, 3, (1 << 40) - 1)] {
            for purpose in [Purpose::SecondMoment, Purpose::Values] {
                let drawn = Random { key, step }.block(block, purpose);
                for (index, &bits) in drawn.iter().enumerate() {
                    let at = block * 32 + index as u64 % 32;
                    let counter =
                        [at as u32, (at >> 32) as u32 | (purpose as u32) << 28, step as u32, (step >> 32) as u32];
                    let words = philox(counter, [key as u32, (key >> 32) as u32]);
                    assert_eq!(bits, (words[index / 64] >> (index / 32 % 2 * 16)) as u16, "{index}");
                }
            }
        }
    }
}
