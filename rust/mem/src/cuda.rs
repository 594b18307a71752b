//! Pins memory for CUDA through `libcuda.so.1`. This library is loaded at run time, so that the crate also runs without
//! it.
//!
//! This file creates no CUDA context: it registers memory only in a process that has a context already. It uses the
//! current context of the calling thread. If the thread has none, it uses the primary context of the first device whose
//! primary context is active. `ignore_captures` keeps the calling thread from invalidating CUDA graphs that other
//! threads capture.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr::{self, NonNull},
};

/// `CU_MEMHOSTREGISTER_PORTABLE`: the memory is pinned for the contexts of all devices.
const REGISTER_PORTABLE: c_uint = 0x01;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: CUDA calls of this thread do not invalidate captures of other threads.
const CAPTURE_THREAD_LOCAL: c_int = 1;
const LIBRARY: &CStr = c"libcuda.so.1";

type CuResult = c_int;
type Context = *mut c_void;

/// Whether `open` may load the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Search {
    /// Use the library only if the process has loaded it already. A process that has not loaded it has no CUDA context.
    Loaded,
    /// Load the library if necessary.
    Load,
}

/// The driver functions that [`Registration`] calls.
#[derive(Clone, Copy)]
struct Driver {
    init: unsafe extern "C" fn(c_uint) -> CuResult,
    error_name: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
    device_count: unsafe extern "C" fn(*mut c_int) -> CuResult,
    current: unsafe extern "C" fn(*mut Context) -> CuResult,
    push: unsafe extern "C" fn(Context) -> CuResult,
    pop: unsafe extern "C" fn(*mut Context) -> CuResult,
    primary_state: unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> CuResult,
    primary_retain: unsafe extern "C" fn(*mut Context, c_int) -> CuResult,
    primary_release: unsafe extern "C" fn(c_int) -> CuResult,
    register: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> CuResult,
    unregister: unsafe extern "C" fn(*mut c_void) -> CuResult,
}

/// Sets the capture mode of the calling thread, so that its calls do not invalidate a CUDA graph that another thread
/// captures. In the default mode, an event query by the calling thread can make such a capture fail. Returns false if
/// the mode could not be set, for example if the process has not loaded the driver. Without the driver, no thread
/// captures a graph.
#[must_use]
pub fn ignore_captures() -> bool {
    let Ok(library) = open(Search::Loaded) else { return false };
    // SAFETY: the library is loaded and never closed; the name is null-terminated.
    let found = unsafe { libc::dlsym(library.as_ptr(), c"cuThreadExchangeStreamCaptureMode".as_ptr()) };
    let Some(found) = NonNull::new(found) else { return false };
    // SAFETY: the driver's function of this name has this type, and the library stays loaded.
    let exchange: unsafe extern "C" fn(*mut c_int) -> CuResult = unsafe { std::mem::transmute(found) };
    let mut mode = CAPTURE_THREAD_LOCAL;
    // SAFETY: `mode` is valid for reads and writes.
    unsafe { exchange(&raw mut mode) == 0 }
}

/// A CUDA host registration; dropping it unregisters the memory.
pub(crate) struct Registration {
    driver: Driver,
    start: NonNull<u8>,
    /// The device whose primary context `new` retained. `None` if the thread had a current context.
    retained: Option<c_int>,
}

// SAFETY: any thread may call the driver's functions; `start` is only passed to these functions, never dereferenced.
unsafe impl Send for Registration {}
// SAFETY: the only operation on `&Registration` is `Debug`, which prints the address.
unsafe impl Sync for Registration {}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("start", &self.start).finish_non_exhaustive()
    }
}

impl Registration {
    /// Registers the `bytes` bytes at `start` with CUDA. The error says why the registration failed.
    ///
    /// # Safety
    /// The range must stay mapped until the registration is dropped.
    pub(crate) unsafe fn new(start: NonNull<u8>, bytes: usize, search: Search) -> Result<Self, String> {
        let driver = Driver::find(search)?;
        let mut registration = Self { driver, start, retained: None };
        driver.enter(&mut registration.retained)?;
        // SAFETY: the caller keeps the range mapped; `enter` made a context current.
        let code = unsafe { (driver.register)(start.as_ptr().cast(), bytes, REGISTER_PORTABLE) };
        driver.leave(registration.retained);
        if code == 0 {
            return Ok(registration);
        }
        registration.give_up_context();
        // The registration failed, so `Drop` must not unregister the memory.
        std::mem::forget(registration);
        Err(format!("CUDA cannot pin {bytes} bytes: cuMemHostRegister: {}", driver.name_of(code)))
    }

    /// Forgets the registration without calling CUDA. A forked child calls this, because it must not use the CUDA
    /// context of its parent.
    pub(crate) fn abandon(self) {
        std::mem::forget(self);
    }

    fn give_up_context(&mut self) {
        if let Some(device) = self.retained.take() {
            // SAFETY: `enter` retained this context, and `take` ensures a single release.
            unsafe { (self.driver.primary_release)(device) };
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The thread that drops this value may have no CUDA context, for example a thread of autograd or a finalizer.
        // `enter` finds a context of this process, and every context can unregister portable memory. If `enter` fails,
        // for example because the driver is shutting down, no context can unregister the memory.
        let mut entered = None;
        if self.driver.enter(&mut entered).is_ok() {
            // SAFETY: `new` registered the memory, and only this `drop` unregisters it.
            unsafe { (self.driver.unregister)(self.start.as_ptr().cast()) };
            self.driver.leave(entered);
            if let Some(device) = entered {
                // SAFETY: `enter` retained this context just above.
                unsafe { (self.driver.primary_release)(device) };
            }
        }
        self.give_up_context();
    }
}

/// Returns the library, which is never closed. The error says why the library is not available.
fn open(search: Search) -> Result<NonNull<c_void>, String> {
    let mode = libc::RTLD_NOW | libc::RTLD_LOCAL | if search == Search::Loaded { libc::RTLD_NOLOAD } else { 0 };
    // SAFETY: the name is null-terminated, and libcuda's initialisers are safe to run.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), mode) };
    NonNull::new(library).ok_or_else(|| match search {
        Search::Loaded => "this process does not use CUDA (libcuda.so.1 is not loaded)".into(),
        Search::Load => {
            "libcuda.so.1 cannot be loaded: install the NVIDIA driver, or add its folder to LD_LIBRARY_PATH".into()
        }
    })
}

impl Driver {
    fn find(search: Search) -> Result<Self, String> {
        let library = open(search)?;
        let symbol = |name: &CStr| {
            // SAFETY: the library is loaded and never closed; the name is null-terminated.
            let found = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
            NonNull::new(found)
                .ok_or_else(|| format!("libcuda.so.1 has no {}: update the driver", name.to_string_lossy()))
        };
        // SAFETY: the driver API has a function of each name, with the type of the field; the library stays loaded.
        #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one reason holds for every field")]
        #[expect(clippy::missing_transmute_annotations, reason = "the fields have the types")]
        unsafe {
            Ok(Self {
                init: std::mem::transmute(symbol(c"cuInit")?),
                error_name: std::mem::transmute(symbol(c"cuGetErrorName")?),
                device_count: std::mem::transmute(symbol(c"cuDeviceGetCount")?),
                current: std::mem::transmute(symbol(c"cuCtxGetCurrent")?),
                push: std::mem::transmute(symbol(c"cuCtxPushCurrent_v2")?),
                pop: std::mem::transmute(symbol(c"cuCtxPopCurrent_v2")?),
                primary_state: std::mem::transmute(symbol(c"cuDevicePrimaryCtxGetState")?),
                primary_retain: std::mem::transmute(symbol(c"cuDevicePrimaryCtxRetain")?),
                primary_release: std::mem::transmute(symbol(c"cuDevicePrimaryCtxRelease_v2")?),
                register: std::mem::transmute(symbol(c"cuMemHostRegister_v2")?),
                unregister: std::mem::transmute(symbol(c"cuMemHostUnregister")?),
            })
        }
    }

    /// Ensures that this thread has a current context. If the thread has none, looks for a device whose primary context
    /// is active, retains and pushes this context, and stores the device in `retained`. `leave` pops the pushed
    /// context, and the caller releases it.
    fn enter(&self, retained: &mut Option<c_int>) -> Result<(), String> {
        let mut context = ptr::null_mut();
        // SAFETY: `context` is valid for writes.
        let code = unsafe { (self.current)(&raw mut context) };
        if code == 0 && !context.is_null() {
            return Ok(());
        }
        let mut devices = 0;
        // SAFETY: `cuInit` accepts flags of 0.
        let mut code = unsafe { (self.init)(0) };
        if code == 0 {
            // SAFETY: `devices` is valid for writes.
            code = unsafe { (self.device_count)(&raw mut devices) };
        }
        if code != 0 {
            return Err(format!("CUDA cannot be used: {}; check the driver with nvidia-smi", self.name_of(code)));
        }
        for device in 0..devices {
            let (mut flags, mut active) = (0, 0);
            // SAFETY: `flags` and `active` are valid for writes, and the device exists.
            let code = unsafe { (self.primary_state)(device, &raw mut flags, &raw mut active) };
            // SAFETY: `context` is valid for writes, and the device exists.
            if code != 0 || active == 0 || unsafe { (self.primary_retain)(&raw mut context, device) } != 0 {
                continue;
            }
            // SAFETY: the call above retained `context`.
            if unsafe { (self.push)(context) } == 0 {
                *retained = Some(device);
                return Ok(());
            }
            // SAFETY: this call releases the context that `primary_retain` retained just above.
            unsafe { (self.primary_release)(device) };
        }
        Err("no CUDA context in this process: call torch.cuda.init() first, and move a tensor to the device".into())
    }

    fn leave(&self, entered: Option<c_int>) {
        if entered.is_some() {
            let mut context = ptr::null_mut();
            // SAFETY: this call pops the context that `enter` pushed on this thread.
            unsafe { (self.pop)(&raw mut context) };
        }
    }

    fn name_of(&self, code: CuResult) -> String {
        let mut name = ptr::null();
        // SAFETY: `name` is valid for writes.
        let known = unsafe { (self.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        if !known {
            return format!("CUDA error {code}");
        }
        // SAFETY: the driver returned a static null-terminated string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
