//! Sets the processor's floating-point mode to IEEE's default while a kernel runs.
//!
//! `torch.set_flush_denormal(True)` makes the calling thread flush denormals, and the threads that this thread starts
//! inherit the mode. Without `DefaultMode`, the same kernel call could give different bits on different threads. Rust's
//! own arithmetic also assumes the default mode.

/// Keeps the caller's floating-point mode. Dropping this value restores the mode.
pub(crate) struct DefaultMode {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    saved: Register,
}

#[cfg(target_arch = "x86_64")]
type Register = u32;
#[cfg(target_arch = "aarch64")]
type Register = u64;

/// The default mode: rounds to nearest, keeps denormals, raises no exception.
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
    // SAFETY: `stmxcsr` writes 4 bytes to `value`.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "x86_64")]
fn write(value: Register) {
    // SAFETY: `ldmxcsr` reads 4 bytes from `value`, and every caller passes a mode without reserved bits.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn read() -> Register {
    let value: Register;
    // SAFETY: user code may read this register.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "aarch64")]
fn write(value: Register) {
    // SAFETY: user code may write this register, and `value` is a valid mode: the default, or a former value.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn default_mode_restores_the_callers_rounding_on_drop() {
        // The test sets rounding toward zero. It does not set flushing of denormals, because Valgrind's processor has
        // no bits for flushing.
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
