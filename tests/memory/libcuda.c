/* Simulates the CUDA driver: counts contexts, and logs registrations and capture modes to the file FAKE_CUDA_LOG.
   FAKE_CUDA=nocontext: no device has an active primary context. FAKE_CUDA=refuse: registering fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int pushed, retained;
static char context;

static int is(const char *mode) {
    const char *set = getenv("FAKE_CUDA");
    return set && strcmp(set, mode) == 0;
}

static void note(const char *call, const void *start, size_t bytes) {
    FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    fprintf(log, "%d %s %p %zu\n", (int)getpid(), call, start, bytes);
    fclose(log);
}

int cuInit(unsigned flags) { return flags; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : 0;
    return *name ? 0 : 1;
}
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuCtxGetCurrent(void **current) { *current = pushed ? &context : 0; return 0; }
int cuCtxPushCurrent_v2(void *pushes) { pushed++; return pushes == &context ? 0 : 1; }
int cuCtxPopCurrent_v2(void **popped) { pushed--; *popped = &context; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = device == 1 && !is("nocontext");
    return 0;
}
int cuDevicePrimaryCtxRetain(void **retains, int device) { retained++; *retains = &context; return device == 1 ? 0 : 1; }
int cuDevicePrimaryCtxRelease_v2(int device) { retained--; return device == 1 ? 0 : 1; }
int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    if (!pushed || flags != 1) return 201;
    if (is("refuse")) return 2;
    note("register", start, bytes);
    return 0;
}
int cuMemHostUnregister(void *start) {
    if (!pushed) return 201;
    /* The memory must still be mapped: otherwise this write ends the process. */
    *(volatile char *)start = 1;
    note("unregister", start, retained);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int now;
    int before = now;
    now = *mode;
    *mode = before;
    note("capture", 0, (size_t)now);
    return 0;
}
int fakeRetained(void) { return retained; }
