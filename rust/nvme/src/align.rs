//! Finds the alignment that direct I/O on an open file needs.

use std::fs::File;

use rustix::fs::{AtFlags, StatxFlags, ioctl_blksszget, statx};

/// The alignment to use if the kernel reports no alignment. It is a multiple of the logical block size of common disks,
/// 512 or 4,096 bytes.
const ALIGN_ASSUMED: usize = 4096;

/// The alignment, in bytes, that direct I/O on a file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Memory addresses must be multiples of this value.
    pub(crate) memory: usize,
    /// Offsets and lengths must be multiples of this value.
    pub(crate) block: usize,
}

impl Alignment {
    /// The alignment of buffered I/O: every address, offset and length is allowed.
    pub(crate) const NONE: Self = Self { memory: 1, block: 1 };

    /// Returns the smallest alignment that satisfies `self` and `other`. All fields are powers of two, so this is the
    /// larger value of each field.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { memory: self.memory.max(other.memory), block: self.block.max(other.block) }
    }
}

/// Returns the alignment that `statx(STATX_DIOALIGN)` reports. If `statx` reports no usable alignment, returns the
/// logical block size of a block device. If the block size is not known either, returns [`ALIGN_ASSUMED`]. Returns
/// `None` if the kernel reports that direct I/O on the file is not possible.
pub(crate) fn direct_alignment(file: &File, is_block: bool) -> Option<Alignment> {
    match dioalign(file) {
        Some((0, _) | (_, 0)) => return None,
        Some((memory, block)) if memory.is_power_of_two() && block.is_power_of_two() => {
            // `memory` must be at least `block`, even if the kernel reports less: zram (Linux 6.18) reports a `memory`
            // of 512 and a `block` of 4,096. If a buffer is aligned to 512 bytes only, zram overwrites other memory
            // where a block crosses a page.
            return Some(Alignment { memory: memory.max(block), block });
        }
        _ => {}
    }
    let block = is_block.then(|| logical_block_bytes(file)).flatten().unwrap_or(ALIGN_ASSUMED);
    Some(Alignment { memory: block, block })
}

/// Returns the alignments that `statx` reports, as (memory, offset). Returns `None` if the kernel or the file system
/// reports no alignment.
fn dioalign(file: &File) -> Option<(usize, usize)> {
    let answer = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let known = StatxFlags::from_bits_retain(answer.stx_mask).contains(StatxFlags::DIOALIGN);
    known.then_some((answer.stx_dio_mem_align as usize, answer.stx_dio_offset_align as usize))
}

/// Returns the logical block size of a block device; `None` if the ioctl fails or the size is not a power of two.
fn logical_block_bytes(file: &File) -> Option<usize> {
    let bytes = ioctl_blksszget(file).ok()? as usize;
    bytes.is_power_of_two().then_some(bytes)
}
