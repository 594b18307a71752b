//! Maps files as memory. Writes of a forked child to such memory do not reach the file.
//!
//! The kernel can write the pages of a shared mapping back to the file and then drop them. So even a large mapping need
//! not stay in memory. But a forked child would share this mapping with its parent, and writes of the child would reach
//! the file.
//!
//! [Note: twin mappings] So each file is mapped a second time, privately. The private mapping takes addresses, but no
//! memory, because no code accesses it. In a forked child, the fork handler moves the private mapping to the addresses
//! of the shared mapping, before `fork` returns. The child then reads the file. If the child writes to a page, it gets
//! a private copy of this page.

use std::{
    fs::File,
    io,
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
};

use rustix::{
    io::Errno,
    mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags, mmap, mprotect, mremap_fixed, munmap},
};

use crate::{Error, Result, living::living};

/// The bytes of a file, mapped as memory. Dropping this value unmaps the file. The mapping keeps the data of the file
/// alive even if the file is deleted.
#[derive(Debug)]
pub struct FileMemory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory that this value owns. Dereferencing its address needs unsafe code.
unsafe impl Send for FileMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for FileMemory {}

impl FileMemory {
    /// Maps the first `bytes` bytes of a file. The file must be open for reading and writing.
    pub fn new(file: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let failed = |call| move |source| Error::System { call, nbytes: bytes, source };
        let length = file.try_clone_to_owned().and_then(|file| File::from(file).metadata()).map_err(failed("fstat"))?;
        if bytes == 0 || u64::try_from(bytes).is_ok_and(|bytes| length.len() < bytes) {
            return Err(Error::Invalid(format!(
                "{bytes} bytes of a file of {} bytes cannot be mapped; map at least 1 byte, and at most the whole file",
                length.len()
            )));
        }
        let start =
            mapped(file, bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED).map_err(failed("mmap"))?;
        // The private mapping has no write permission, so the kernel reserves no memory for it.
        match mapped(file, bytes, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::NORESERVE) {
            Ok(private) => {
                living().files.insert(start.as_ptr().addr(), Twins { shared: start, private: Some(private), bytes });
                Ok(Self { start, bytes })
            }
            Err(error) => {
                unmap(start, bytes);
                Err(failed("mmap")(error))
            }
        }
    }

    /// The address of the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Always false: a mapping has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// True if a `FileMemory` begins at this address.
#[must_use]
pub fn is_file_memory(address: usize) -> bool {
    living().files.contains_key(&address)
}

impl Drop for FileMemory {
    fn drop(&mut self) {
        // Remove the mapping from the list before `unmap`. Otherwise the fork handler could move a private mapping to
        // addresses that the kernel has given to other code.
        let twins = living().files.remove(&self.start.as_ptr().addr());
        unmap(self.start, self.bytes);
        if let Some(private) = twins.and_then(|twins| twins.private) {
            unmap(private, self.bytes);
        }
    }
}

/// The two mappings of one file. See [Note: twin mappings].
pub(crate) struct Twins {
    shared: NonNull<u8>,
    /// `None` in a forked child, where `part` has taken the private mapping.
    private: Option<NonNull<u8>>,
    bytes: usize,
}

// SAFETY: the addresses belong to the mappings of a living `FileMemory`, which any thread may use.
unsafe impl Send for Twins {}

impl Twins {
    /// Moves the private mapping over the shared mapping. If the move fails, makes the shared mapping read-only. This
    /// runs in a forked child, where only system calls are allowed.
    pub(crate) fn part(&mut self) {
        let Some(private) = self.private.take() else { return };
        let writable = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: `private` is a mapping of `bytes` bytes that no other code uses. If the kernel cannot commit memory
        // for the mapping, the mapping stays read-only: a child that writes is killed, and the file stays intact.
        let _ = unsafe { mprotect(private.as_ptr().cast(), self.bytes, writable) };
        let (from, to) = (private.as_ptr().cast(), self.shared.as_ptr().cast());
        // SAFETY: both ranges are mappings of `bytes` bytes that `FileMemory::new` made. Both map the same file, so the
        // bytes at `to` stay the same. The child has only this thread.
        if unsafe { mremap_fixed(from, self.bytes, self.bytes, MremapFlags::MAYMOVE, to) }.is_err() {
            // SAFETY: `to` is a mapping of `bytes` bytes; making it read-only keeps the child from writing to the file.
            let _ = unsafe { mprotect(to, self.bytes, MprotectFlags::READ) };
        }
    }
}

fn mapped(file: BorrowedFd<'_>, bytes: usize, protection: ProtFlags, flags: MapFlags) -> io::Result<NonNull<u8>> {
    // SAFETY: `mmap` makes a new mapping at an address that the kernel chooses; the descriptor is open.
    let start = unsafe { mmap(ptr::null_mut(), bytes, protection, flags, file, 0) }?;
    Ok(NonNull::new(start.cast()).ok_or(Errno::NOMEM)?)
}

fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the range is a mapping of `bytes` bytes that `new` made. The `FileMemory` that owns the range is being
    // dropped, or `new` failed before it made a `FileMemory`.
    let result = unsafe { munmap(start.as_ptr().cast(), bytes) };
    debug_assert!(result.is_ok(), "munmap: {result:?}");
}
