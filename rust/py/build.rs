//! Links the extension with the system's unwinder, which torch's libraries have loaded anyway.
//!
//! A thread that comes back from us while the interpreter is ending is ended by Python, by `pthread_exit`, and that
//! unwinds our frames with the system's unwinder. Zig links one of its own beside it; the two do not understand each
//! other, and the process ended with a segmentation fault.

use std::{env, path::Path, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let own = |name| env::var(name).unwrap_or_default();
    if own("HOST") != own("TARGET") {
        return;
    }
    for compiler in ["cc", "gcc", "clang"] {
        let Ok(told) = Command::new(compiler).arg("-print-file-name=libgcc_s.so.1").output() else { continue };
        let path = String::from_utf8_lossy(&told.stdout).trim().to_owned();
        if Path::new(&path).is_absolute() {
            println!("cargo::rustc-cdylib-link-arg={path}");
            return;
        }
    }
    println!(
        "cargo::warning=libgcc_s.so.1 was not found: built with zig, a thread that waits while Python ends will crash it"
    );
}
