//! Places logged gradients one after the other in a ring of storage, each in one piece, and none over what is still needed.
//!
//! A *position* counts the bytes from the ring's beginning, round after round, and never falls.

use crate::layout::PAGE_BYTES;

/// Where the ring lies; no bytes where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Ring {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Ring {
    /// Where a position lies in the volume.
    pub(crate) fn place(self, position: u64) -> u64 {
        self.offset + position % self.bytes
    }

    /// The first position from `next` on where `bytes` lie in one piece, if what begins at `oldest` stays whole.
    pub(crate) fn fit(self, oldest: u64, next: u64, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        if bytes > self.bytes {
            return None;
        }
        let left = self.bytes - next % self.bytes;
        let at = if bytes > left { next + left } else { next };
        (at + bytes - oldest <= self.bytes).then_some(at)
    }

    /// The first position from `since` on that lies at a place of the volume; `None` if that is not in the ring.
    pub(crate) fn position(self, since: u64, place: u64) -> Option<u64> {
        let within = place.checked_sub(self.offset).filter(|&within| within < self.bytes)?;
        let before = since % self.bytes;
        Some(since + if within >= before { within - before } else { self.bytes - before + within })
    }

    /// Bytes that hold `steps` steps, and one more that is being written, of so many bytes each, where nothing that lies
    /// in one piece has more than `extent` bytes.
    pub(crate) fn bytes_for(steps: u64, of_step: u64, extent: u64) -> Option<u64> {
        steps.checked_add(1)?.checked_mul(of_step)?.checked_add(extent)
    }

    /// The most steps that so many bytes hold, as [`Ring::bytes_for`] counts them.
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
    fn what_does_not_fit_before_the_end_goes_to_the_beginning() {
        let page = PAGE_BYTES;
        assert_eq!(RING.fit(0, 0, 8 * page), Some(0));
        assert_eq!(RING.fit(0, page, 8 * page), None);
        assert_eq!(RING.fit(4 * page, 6 * page, 3 * page), Some(8 * page));
        assert_eq!(RING.fit(4 * page, 6 * page, 4 * page + 1), None, "it would lie over the oldest");
        assert_eq!(RING.place(8 * page), RING.offset);
    }

    proptest! {
        #[test]
        fn so_many_steps_fit_as_it_says(
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
                // What the last `steps` steps began with stays whole while one more is written.
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
