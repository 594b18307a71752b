//! Maps files as memory; what a forked child writes there stays in the child.
//!
//! A page of a shared mapping goes to the file and leaves RAM, and no memory of the file's size is ever taken. But a
//! shared mapping is shared with children, too. So each file is mapped a second time, privately, and nobody touches that
//! mapping: it takes addresses and no memory. In a child it is moved over the shared one, at the same addresses, before
//! anything of the child runs. What the child reads is the file, and what it writes is a copy of the page that it wrote.

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

/// The bytes of a file as memory; unmapped when dropped. The file lives as long, whatever becomes of its name.
#[derive(Debug)]
pub struct FileMemory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory, owned by this value; reaching the bytes is unsafe where it happens.
unsafe impl Send for FileMemory {}
// SAFETY: as above.
unsafe impl Sync for FileMemory {}

impl FileMemory {
    /// Maps the first `bytes` of a file that is open for reading and writing.
    pub fn new(file: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let failed = |call| move |source| Error::System { call, nbytes: bytes, source };
        let length = file.try_clone_to_owned().and_then(|file| File::from(file).metadata()).map_err(failed("fstat"))?;
        if bytes == 0 || u64::try_from(bytes).is_ok_and(|bytes| length.len() < bytes) {
            return Err(Error::Invalid(format!("{bytes} bytes of a file of {} cannot be mapped", length.len())));
        }
        let start =
            mapped(file, bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED).map_err(failed("mmap"))?;
        // Nothing can be written to it, so that no memory is set aside for it.
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

    /// The first byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// How many bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: a mapping has a byte at least.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// Whether a file in memory begins at this address.
#[must_use]
pub fn is_file_memory(address: usize) -> bool {
    living().files.contains_key(&address)
}

impl Drop for FileMemory {
    fn drop(&mut self) {
        // First from the list: a child must not move anything to addresses that are another's by then.
        let twins = living().files.remove(&self.start.as_ptr().addr());
        unmap(self.start, self.bytes);
        if let Some(private) = twins.and_then(|twins| twins.private) {
            unmap(private, self.bytes);
        }
    }
}

/// Both mappings of one file.
pub(crate) struct Twins {
    shared: NonNull<u8>,
    /// `None` in a child, where it has taken the other's place.
    private: Option<NonNull<u8>>,
    bytes: usize,
}

// SAFETY: addresses of mappings that belong to the `FileMemory` that entered them.
unsafe impl Send for Twins {}

impl Twins {
    /// In a forked child: puts the private mapping in the place of the shared one. Only system calls, which are allowed
    /// there.
    pub(crate) fn part(&mut self) {
        let Some(private) = self.private.take() else { return };
        let writable = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: a mapping of ours of so many bytes, which nobody else knows. Where the machine has no memory to
        // promise for it, it stays readable only: a child that writes then ends, and harms nobody.
        let _ = unsafe { mprotect(private.as_ptr().cast(), self.bytes, writable) };
        let (from, to) = (private.as_ptr().cast(), self.shared.as_ptr().cast());
        // SAFETY: both are mappings of ours of so many bytes. The target has the same contents before and after, and the
        // thread that forked is the only one.
        if unsafe { mremap_fixed(from, self.bytes, self.bytes, MremapFlags::MAYMOVE, to) }.is_err() {
            // SAFETY: as above.
            let _ = unsafe { mprotect(to, self.bytes, MprotectFlags::READ) };
        }
    }
}

fn mapped(file: BorrowedFd<'_>, bytes: usize, protection: ProtFlags, flags: MapFlags) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address that the kernel chooses; the descriptor is open.
    let start = unsafe { mmap(ptr::null_mut(), bytes, protection, flags, file, 0) }?;
    Ok(NonNull::new(start.cast()).ok_or(Errno::NOMEM)?)
}

fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: a mapping of ours of so many bytes; whoever owns it has seen to it that nothing refers to it.
    let result = unsafe { munmap(start.as_ptr().cast(), bytes) };
    debug_assert!(result.is_ok(), "munmap: {result:?}");
}
