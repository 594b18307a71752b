//! Places the gradient chunks and heads of the log one after the other in a ring of storage. Each chunk and each head
//! stays in one piece, and overwrites no bytes that are still needed.
//!
//! A *position* counts bytes from the ring's beginning, and does not return to 0 when the ring starts again at its
//! beginning. So positions only grow.

use crate::layout::PAGE_BYTES;

/// The offset and the size in bytes of the ring in the volume. The size is 0 if the store has no log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Ring {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Ring {
    /// Converts a position to an offset in the volume.
    pub(crate) fn place(self, position: u64) -> u64 {
        self.offset + position % self.bytes
    }

    /// Returns the first position at or after `next` where `bytes` bytes fit in one piece; `None` if the ring has fewer
    /// than `bytes` bytes, or if these bytes would overwrite bytes at or after the position `oldest`.
    pub(crate) fn fit(self, oldest: u64, next: u64, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        if bytes > self.bytes {
            return None;
        }
        let left = self.bytes - next % self.bytes;
        let at = if bytes > left { next + left } else { next };
        (at + bytes - oldest <= self.bytes).then_some(at)
    }

    /// Returns the first position at or after `since` whose offset in the volume is `place`; `None` if `place` is not
    /// in the ring.
    pub(crate) fn position(self, since: u64, place: u64) -> Option<u64> {
        let within = place.checked_sub(self.offset).filter(|&within| within < self.bytes)?;
        let before = since % self.bytes;
        Some(since + if within >= before { within - before } else { self.bytes - before + within })
    }

    /// Returns the size in bytes of a ring for `steps` steps of at most `of_step` bytes each, and for one more step
    /// that is being written. `extent` is the size of the largest piece, so at most `extent` bytes stay unused at the
    /// ring's end.
    pub(crate) fn bytes_for(steps: u64, of_step: u64, extent: u64) -> Option<u64> {
        steps.checked_add(1)?.checked_mul(of_step)?.checked_add(extent)
    }

    /// Returns the largest number of steps for which a ring of `bytes` bytes is large enough: the inverse of
    /// [`Ring::bytes_for`].
    pub(crate) fn steps_in(bytes: u64, of_step: u64, extent: u64) -> u64 {
        (bytes.saturating_sub(extent) / of_step.max(1)).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RING: Ring = Ring { offset: 1 << 20, bytes: 8 * PAGE_BYTES };

    #[test]
    fn fit_wraps_to_the_start_and_never_overwrites_the_oldest_bytes() {
        let page = PAGE_BYTES;
        assert_eq!(RING.fit(0, 0, 8 * page), Some(0));
        assert_eq!(RING.fit(0, page, 8 * page), None);
        assert_eq!(RING.fit(4 * page, 6 * page, 3 * page), Some(8 * page));
        assert_eq!(RING.fit(4 * page, 6 * page, 4 * page + 1), None, "it would overwrite the oldest bytes");
        assert_eq!(RING.place(8 * page), RING.offset);
    }

    proptest! {
        #[test]
        fn ring_of_bytes_for_n_steps_fits_n_steps(
            pages in proptest::collection::vec(1_u64..6, 1..5),
            steps in 1_u64..5,
            start in 0_u64..40,
        ) {
            let of_step = pages.iter().sum::<u64>() * PAGE_BYTES;
            let extent = pages.iter().max().copied().unwrap_or(0) * PAGE_BYTES;
            let bytes = Ring::bytes_for(steps, of_step, extent).unwrap_or(0);
            prop_assert_eq!(Ring::steps_in(bytes, of_step, extent), steps);
            let ring = Ring { offset: 4 * PAGE_BYTES, bytes };
            let (mut next, mut starts) = (start * PAGE_BYTES, Vec::new());
            for _ in 0..30 {
                starts.push(next);
                // The last `steps` steps stay whole while one more step is written.
                let oldest = starts[starts.len().saturating_sub(1 + usize::try_from(steps).unwrap_or(0))];
                for nbytes in pages.iter().map(|pages| pages * PAGE_BYTES) {
                    let at = ring.fit(oldest, next, nbytes);
                    prop_assert!(at.is_some(), "step {} of {}", starts.len(), steps);
                    let at = at.unwrap_or(0);
                    prop_assert!(at % bytes + nbytes <= bytes, "in one piece");
                    prop_assert_eq!(ring.position(oldest, ring.place(at)), Some(at));
                    next = at + nbytes;
                }
            }
        }
    }
}
