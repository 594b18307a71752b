//! Sets the processor's floating-point mode to IEEE's default while a kernel runs.
//!
//! `torch.set_flush_denormal(True)` flushes denormals on the thread that called it, and threads inherit the mode. Left
//! alone, the same call would give other bits on other threads; and Rust's own arithmetic assumes the default mode.

/// Puts the caller's mode back when dropped.
pub(crate) struct DefaultMode {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    saved: Register,
}

#[cfg(target_arch = "x86_64")]
type Register = u32;
#[cfg(target_arch = "aarch64")]
type Register = u64;

/// Round to nearest, keep denormals, raise nothing.
#[cfg(target_arch = "x86_64")]
const DEFAULT: Register = 0x1F80;
#[cfg(target_arch = "aarch64")]
const DEFAULT: Register = 0;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl DefaultMode {
    pub(crate) fn enter() -> Self {
        let saved = read();
        write(DEFAULT);
        Self { saved }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Drop for DefaultMode {
    fn drop(&mut self) {
        write(self.saved);
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl DefaultMode {
    pub(crate) fn enter() -> Self {
        Self {}
    }
}

#[cfg(target_arch = "x86_64")]
fn read() -> Register {
    let mut value: Register = 0;
    // SAFETY: stores the register into `value`, which lives on this stack.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "x86_64")]
fn write(value: Register) {
    // SAFETY: loads the register from `value`, which is either the default or what the register held before.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn read() -> Register {
    let value: Register;
    // SAFETY: reads a register that user code may read.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "aarch64")]
fn write(value: Register) {
    // SAFETY: writes a register that user code may write, with the default or what it held before.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_callers_mode_comes_back() {
        // Rounding toward zero stands for any other mode: Valgrind's processor has no bits for flushing.
        const ROUNDING: Register = 0x6000;
        let before = read();
        write(before | ROUNDING);
        {
            let _mode = DefaultMode::enter();
            assert_eq!(read() & ROUNDING, DEFAULT & ROUNDING);
        }
        let after = read();
        write(before);
        assert_eq!(after & ROUNDING, ROUNDING);
    }
}
