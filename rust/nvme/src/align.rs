//! Finds the alignment that direct I/O on an open file needs.

use std::{fs::File, io, mem::MaybeUninit, os::fd::AsRawFd};

/// The alignment to use where the kernel does not tell: what every disk and file system accepts.
const ALIGN_UNTOLD: usize = 4096;

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
        Ok(Some((0, _) | (_, 0))) => return None,
        Ok(Some((memory, block))) if memory.is_power_of_two() && block.is_power_of_two() => {
            // Memory at least as aligned as blocks, whatever is told: zram (Linux 6.18) says 512 and 4,096, and then
            // overwrites foreign memory where a block crosses a page.
            return Some(Alignment { memory: memory.max(block), block });
        }
        _ => {}
    }
    let block = is_block.then(|| logical_block_bytes(file).ok()).flatten().unwrap_or(ALIGN_UNTOLD);
    Some(Alignment { memory: block, block })
}

/// (memory, offset) alignments, `None` where the kernel or the file system does not say.
fn dioalign(file: &File) -> io::Result<Option<(usize, usize)>> {
    let mut answer = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an open descriptor, an empty path that ends, and room for the answer.
    let result = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, answer.as_mut_ptr())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, then filled by the kernel; every bit pattern is valid.
    let answer = unsafe { answer.assume_init() };
    let told = answer.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(told.then_some((answer.stx_dio_mem_align as usize, answer.stx_dio_offset_align as usize)))
}

/// The unit of a block device.
pub(crate) fn logical_block_bytes(file: &File) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes an int.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET, &raw mut bytes) };
    match usize::try_from(bytes) {
        Ok(bytes) if result == 0 && bytes.is_power_of_two() => Ok(bytes),
        _ => Err(io::Error::last_os_error()),
    }
}
