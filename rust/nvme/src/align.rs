//! Finds the alignment that direct I/O on an open file needs.

use std::fs::File;

use rustix::fs::{AtFlags, StatxFlags, ioctl_blksszget, statx};

/// The alignment where the kernel does not say: what every disk and file system accepts.
const ALIGN_ASSUMED: usize = 4096;

/// What direct I/O needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of addresses.
    pub(crate) memory: usize,
    /// Of offsets and lengths.
    pub(crate) block: usize,
}

impl Alignment {
    /// What buffered I/O needs: nothing.
    pub(crate) const NONE: Self = Self { memory: 1, block: 1 };

    /// What satisfies both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { memory: self.memory.max(other.memory), block: self.block.max(other.block) }
    }
}

/// Asks `statx(STATX_DIOALIGN)`, then, for a block device, its logical block size. `None`: no direct I/O here.
pub(crate) fn direct_alignment(file: &File, is_block: bool) -> Option<Alignment> {
    match dioalign(file) {
        Some((0, _) | (_, 0)) => return None,
        Some((memory, block)) if memory.is_power_of_two() && block.is_power_of_two() => {
            // Memory at least as aligned as blocks, whatever the kernel says: zram (Linux 6.18) says 512 and 4,096, and then
            // overwrites foreign memory where a block crosses a page.
            return Some(Alignment { memory: memory.max(block), block });
        }
        _ => {}
    }
    let block = is_block.then(|| logical_block_bytes(file)).flatten().unwrap_or(ALIGN_ASSUMED);
    Some(Alignment { memory: block, block })
}

/// (memory, offset) alignments, `None` where the kernel or the file system does not say.
fn dioalign(file: &File) -> Option<(usize, usize)> {
    let answer = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let known = StatxFlags::from_bits_retain(answer.stx_mask).contains(StatxFlags::DIOALIGN);
    known.then_some((answer.stx_dio_mem_align as usize, answer.stx_dio_offset_align as usize))
}

/// The unit of a block device.
fn logical_block_bytes(file: &File) -> Option<usize> {
    let bytes = ioctl_blksszget(file).ok()? as usize;
    bytes.is_power_of_two().then_some(bytes)
}
