//! Links the extension with the system's unwinder, which torch's libraries load anyway. Prints a warning if it does not
//! find the unwinder. Does nothing in a cross-build.
//!
//! If a thread returns from Rust to Python while the interpreter ends, Python before 3.14 ends the thread with
//! `pthread_exit`, which unwinds the Rust frames with the system's unwinder. Zig would link an unwinder of its own. The
//! two unwinders are incompatible, and the process would crash with a segmentation fault.

use std::{env, path::Path, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let own = |name| env::var(name).unwrap_or_default();
    if own("HOST") != own("TARGET") {
        return;
    }
    for compiler in ["cc", "gcc", "clang"] {
        let Ok(output) = Command::new(compiler).arg("-print-file-name=libgcc_s.so.1").output() else { continue };
        let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if Path::new(&path).is_absolute() {
            println!("cargo::rustc-cdylib-link-arg={path}");
            return;
        }
    }
    println!(
        "cargo::warning=libgcc_s.so.1 was not found: if zig links this extension, a thread that waits while Python \
         ends can crash the process; install cc, gcc or clang and its runtime library, then build again"
    );
}
