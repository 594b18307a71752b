//! Computes the offset of each slot of an arena. Alignment costs at most one percent of the memory.
//!
//! Every class gets the largest alignment that adds at most [`SLACK_PERCENT`] percent to its bytes. The candidates are
//! 4 KiB for direct I/O, then 64 bytes for a cache line, then 16 bytes for any dtype. If all three cost too much, the
//! alignment is the largest power of two that divides the size of a slot, so that a tensor which fills the slot is
//! aligned. The classes with the largest alignment come first, so there are no gaps between classes. If the region is
//! too small for this layout, `Layout::new` tries lower alignments. The last layout that it tries needs no bytes for
//! alignment.

use crate::{Error, Result};

/// The largest cost of alignment, in percent of the bytes of a class.
const SLACK_PERCENT: usize = 1;
/// The alignments to try, largest first: for direct I/O on any device, for a cache line, and for any dtype. The
/// last entry, 1, costs nothing: a slot is then aligned to the largest power of two, up to 4096, that divides its size.
const ALIGNMENTS: [usize; 4] = [4096, 64, 16, 1];
/// The largest number of classes in a plan. A model has tens of distinct unit sizes, so a plan with more classes is a
/// mistake.
const CLASSES_MAX: usize = 4096;
/// The largest number of slots in all classes together. This bound keeps the tables of the arena small, and every slot
/// number fits into 32 bits.
const SLOTS_MAX: usize = 1 << 24;

/// The slots of one class: their size and offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassLayout {
    /// The size of a slot in bytes, as the plan asked for.
    pub bytes: usize,
    /// Number of slots.
    pub count: usize,
    /// Bytes from one slot to the next: `bytes` rounded up to the class's alignment.
    pub stride: usize,
    /// Bytes from the region's start to the first slot.
    pub offset: usize,
}

/// The slots of an arena. Classes are sorted by size, smallest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    classes: Box<[ClassLayout]>,
    asked_bytes: usize,
    reserved_bytes: usize,
}

impl Layout {
    /// Lays out `classes` with the largest alignment that fits into `room_bytes`. Each item of `classes` is the size of
    /// a slot in bytes, and the number of slots of this size.
    pub fn new(classes: &[(usize, usize)], room_bytes: usize) -> Result<Self> {
        let classes = merged(classes)?;
        ALIGNMENTS
            .iter()
            .map(|&best| Self::aligned(&classes, best))
            .find(|layout| layout.reserved_bytes <= room_bytes)
            .ok_or_else(|| Error::RegionTooSmall { region_bytes: room_bytes, needed_bytes: asked_bytes(&classes) })
    }

    /// Lays out `classes` with the largest alignment. A region of `reserved_bytes` bytes has room for this layout.
    pub fn unbounded(classes: &[(usize, usize)]) -> Result<Self> {
        Ok(Self::aligned(&merged(classes)?, ALIGNMENTS[0]))
    }

    /// The classes, smallest first.
    #[must_use]
    pub fn classes(&self) -> &[ClassLayout] {
        &self.classes
    }

    /// The bytes that the plan asked for: the sum over all classes of slot size times number of slots.
    #[must_use]
    pub fn asked_bytes(&self) -> usize {
        self.asked_bytes
    }

    /// The bytes that the slots occupy, including alignment.
    #[must_use]
    pub fn reserved_bytes(&self) -> usize {
        self.reserved_bytes
    }

    /// Returns the index of the smallest class whose slots have at least `nbytes` bytes.
    pub fn class_for(&self, nbytes: usize) -> Result<usize> {
        if nbytes == 0 {
            return Err(Error::Invalid("a lease needs at least one byte".into()));
        }
        let index = self.classes.partition_point(|class| class.bytes < nbytes);
        if index == self.classes.len() {
            let largest_class_bytes = self.classes.last().map_or(0, |class| class.bytes);
            return Err(Error::NoSuchClass { asked_bytes: nbytes, largest_class_bytes });
        }
        Ok(index)
    }

    fn aligned(classes: &[(usize, usize)], best: usize) -> Self {
        let mut order: Vec<(usize, usize, usize)> =
            classes.iter().map(|&(bytes, count)| (alignment_of(bytes, best), bytes, count)).collect();
        order.sort_unstable_by(|left, right| right.cmp(left));
        let mut offset = 0;
        let mut laid_out: Vec<ClassLayout> = order
            .into_iter()
            .map(|(alignment, bytes, count)| {
                let class = ClassLayout { bytes, count, stride: bytes.next_multiple_of(alignment), offset };
                offset += class.stride * count;
                class
            })
            .collect();
        laid_out.sort_unstable_by_key(|class| class.bytes);
        Self { classes: laid_out.into(), asked_bytes: asked_bytes(classes), reserved_bytes: offset }
    }
}

/// Validates the plan, merges classes of equal size, and sorts the classes by size.
fn merged(classes: &[(usize, usize)]) -> Result<Vec<(usize, usize)>> {
    if classes.is_empty() || classes.len() > CLASSES_MAX {
        return Err(Error::Invalid(format!(
            "an arena needs 1 to {CLASSES_MAX} classes, but the plan {{bytes: count}} has {}",
            classes.len()
        )));
    }
    let mut sorted = classes.to_vec();
    sorted.sort_unstable();
    sorted.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 = kept.1.saturating_add(next.1);
        }
        same
    });
    let mut slots = 0_usize;
    let mut total = 0_usize;
    for &(bytes, count) in &sorted {
        if bytes == 0 || count == 0 {
            return Err(Error::Invalid(format!("a class of {bytes} bytes and {count} slots is empty; omit it")));
        }
        slots = slots.saturating_add(count);
        total = bytes
            .checked_next_multiple_of(ALIGNMENTS[0])
            .and_then(|stride| stride.checked_mul(count))
            .and_then(|class_total| total.checked_add(class_total))
            .filter(|&total| isize::try_from(total).is_ok())
            .ok_or_else(|| Error::Invalid(format!("{count} slots of {bytes} bytes are too much memory: plan less")))?;
    }
    if slots > SLOTS_MAX {
        return Err(Error::Invalid(format!("an arena has at most {SLOTS_MAX} slots; plan fewer than {slots}")));
    }
    Ok(sorted)
}

fn asked_bytes(classes: &[(usize, usize)]) -> usize {
    classes.iter().map(|(bytes, count)| bytes * count).sum()
}

/// Returns the largest of [`ALIGNMENTS`] that does not exceed `best` and adds at most [`SLACK_PERCENT`] percent to a
/// slot of `bytes` bytes. If a larger power of two, up to 4096, divides `bytes`, returns this power of two.
fn alignment_of(bytes: usize, best: usize) -> usize {
    let own = 1 << bytes.trailing_zeros().min(ALIGNMENTS[0].trailing_zeros());
    let affordable = |alignment: &usize| {
        *alignment <= best && bytes.next_multiple_of(*alignment) - bytes <= bytes / 100 * SLACK_PERCENT
    };
    ALIGNMENTS.into_iter().find(affordable).map_or(own, |alignment| alignment.max(own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn stride_of_a_large_class_is_a_multiple_of_4096() {
        let layout = Layout::unbounded(&[(1_000_003, 3)]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(layout.classes()[0].stride, 1_003_520);
    }

    #[test]
    fn a_tight_region_gets_the_layout_without_slack() {
        let layout = Layout::new(&[(1_000_003, 3)], 3_000_009).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(layout.reserved_bytes(), 3_000_009);
        let error = Layout::new(&[(1_000_003, 3)], 3_000_008).err();
        assert!(matches!(error, Some(Error::RegionTooSmall { needed_bytes: 3_000_009, .. })), "{error:?}");
    }

    #[test]
    fn impossible_plans_are_refused() {
        for plan in [&[][..], &[(0, 1)], &[(1, 0)], &[(usize::MAX, 2)], &[(1 << 60, 1 << 10)], &[(1, usize::MAX)]] {
            assert!(matches!(Layout::unbounded(plan), Err(Error::Invalid(_))), "{plan:?}");
        }
    }

    proptest! {
        #[test]
        fn slots_never_overlap_and_waste_at_most_two_percent(
            plan in prop::collection::vec((1_usize..3_000_000, 1_usize..40), 1..20),
            spare in 0_usize..10_000,
        ) {
            let asked: usize = plan.iter().map(|(bytes, count)| bytes * count).sum();
            for layout in [Layout::unbounded(&plan), Layout::new(&plan, asked + spare)] {
                let layout = layout.map_err(|error| TestCaseError::fail(error.to_string()))?;
                prop_assert_eq!(layout.asked_bytes(), asked);
                prop_assert!((layout.reserved_bytes() - asked) * 100 <= asked * SLACK_PERCENT);
                let mut slots: Vec<(usize, usize)> = layout
                    .classes()
                    .iter()
                    .flat_map(|class| (0..class.count).map(|slot| (class.offset + slot * class.stride, class.bytes)))
                    .collect();
                slots.sort_unstable();
                let mut end = 0;
                for (start, bytes) in slots {
                    prop_assert!(start >= end);
                    let own = 1_usize << bytes.trailing_zeros().min(12);
                    prop_assert_eq!(start % own, 0, "a tensor that fills its slot is aligned");
                    end = start + bytes;
                }
                prop_assert!(end <= layout.reserved_bytes());
            }
        }
    }
}
