//! Tests file mappings. Writes of the process must reach the file, and writes of a forked child must not.

use std::{
    fs::{self, File},
    os::{fd::AsFd, unix::fs::FileExt},
    slice,
    sync::atomic::{AtomicUsize, Ordering},
};

use memascend_mem::{Error, FileMemory, page_bytes};

const BYTES: usize = 3 * 4096 + 5;

/// Returns a file whose bytes are all 7. The file's name is already removed.
fn sevens() -> File {
    // Tests of this process run in parallel, so each file needs its own name.
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let made = MADE.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("memascend-file-memory-{}-{made}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.unwrap_or_else(|error| panic!("{error}"));
    fs::remove_file(&path).and_then(|()| file.write_all_at(&[7; BYTES], 0)).unwrap_or_else(|error| panic!("{error}"));
    file
}

fn bytes(memory: &mut FileMemory) -> &mut [u8] {
    // SAFETY: the mapping is valid while `memory` is borrowed, and `&mut` excludes other references to the bytes.
    unsafe { slice::from_raw_parts_mut(memory.as_ptr().as_ptr(), memory.len()) }
}

#[test]
fn writes_of_a_forked_child_do_not_reach_the_parent_or_the_file() -> Result<(), Error> {
    let file = sevens();
    let mut memory = FileMemory::new(file.as_fd(), BYTES)?;
    // Drops a mapping before the fork. The fork handler must skip the addresses of this mapping, because the kernel may
    // have reused them.
    drop(FileMemory::new(file.as_fd(), BYTES)?);
    bytes(&mut memory)[0] = 8;
    // SAFETY: the child only accesses `memory`, drops it and exits. The lock that the drop takes is free in the child.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let mine = bytes(&mut memory);
        let right = mine[0] == 8 && mine[1..].iter().all(|&byte| byte == 7);
        mine.fill(9);
        let kept = mine.iter().all(|&byte| byte == 9);
        drop(memory);
        // SAFETY: `_exit` has no conditions.
        unsafe { libc::_exit(i32::from(!(right && kept))) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for writes, and `pid` is a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child read wrong bytes");
    let seen = bytes(&mut memory);
    assert!(seen[0] == 8 && seen[1..].iter().all(|&byte| byte == 7), "the child wrote into the parent's memory");
    seen.fill(10);
    let mut written = [0; BYTES];
    file.read_exact_at(&mut written, 0).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(written, [10; BYTES]);
    Ok(())
}

#[test]
fn a_file_that_is_too_short_is_refused() {
    let file = sevens();
    for bytes in [0, BYTES + 1, BYTES + page_bytes()] {
        assert!(matches!(FileMemory::new(file.as_fd(), bytes), Err(Error::Invalid(_))), "{bytes} bytes");
    }
}
