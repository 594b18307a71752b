//! Maps memory between two inaccessible pages. An access to these pages crashes the test.

/// Memory between two inaccessible pages.
pub(crate) struct Guarded {
    mapping: *mut u8,
    pages: usize,
}

const PAGE: usize = 4096;

impl Guarded {
    pub(crate) fn new(bytes: usize) -> Self {
        let pages = bytes.div_ceil(PAGE).max(1) + 2;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new private mapping does not affect existing memory.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, libc::PROT_NONE, flags, -1, 0) };
        assert!(mapping != libc::MAP_FAILED);
        let mapping = mapping.cast::<u8>();
        // SAFETY: the offset of one page is inside the mapping.
        let inside = unsafe { mapping.add(PAGE) };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is the mapping without its first and last page.
        assert_eq!(unsafe { libc::mprotect(inside.cast(), (pages - 2) * PAGE, protection) }, 0);
        Self { mapping, pages }
    }

    /// Returns `len` elements that begin right after the first inaccessible page. With `at_end`, returns elements that
    /// end right before the last inaccessible page.
    #[expect(clippy::mut_from_ref, reason = "each test uses one slice of a mapping at a time")]
    pub(crate) fn slice<T: Copy>(&self, len: usize, at_end: bool) -> &mut [T] {
        let bytes = len * size_of::<T>();
        let offset = if at_end { (self.pages - 1) * PAGE - bytes } else { PAGE };
        // SAFETY: `offset` is inside the mapping, because callers take at most the bytes that `new` got.
        let start = unsafe { self.mapping.add(offset) }.cast::<T>();
        // SAFETY: the range is inside the accessible pages, for the same reason. The system has filled these pages with
        // zeros, which are valid numbers. The range is aligned, because a page holds a whole number of elements.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping. Its slices borrow `self`, so no slice exists any more.
        unsafe { libc::munmap(self.mapping.cast(), self.pages * PAGE) };
    }
}
