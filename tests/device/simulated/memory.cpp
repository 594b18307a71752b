// Counts, devices, contexts and memory of the simulated CUDA.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "simulated.hpp"

using namespace simulated;

// Objects of this file are never destroyed: threads of streams still run while the process ends.
namespace {

struct Counts {
    std::mutex lock;
    std::map<std::string, long> numbers;
    std::string faults;
};

Counts& counts() {
    static Counts* made = new Counts;
    return *made;
}

bool forked = false, active_[DEVICES_MAX];
thread_local int current_ = 0;
thread_local bool entered_ = false;
thread_local cudaError_t last = cudaSuccess;

std::vector<int>& visible() {
    static std::vector<int>* made = [] {
        auto* found = new std::vector<int>;
        const char* said = getenv("CUDA_VISIBLE_DEVICES");
        for (int device = 0; said == nullptr && device < DEVICES_MAX; device++) found->push_back(device);
        // Like CUDA, stops at the first device that does not exist.
        for (const char* at = said; at != nullptr && *at;) {
            char* end;
            long device = strtol(at, &end, 10);
            if (end == at || device < 0 || device >= DEVICES_MAX) break;
            found->push_back(int(device));
            at = *end == ',' ? end + 1 : end;
        }
        pthread_atfork(nullptr, nullptr, [] { forked = true; });
        return found;
    }();
    return *made;
}

}  // namespace

void simulated::count(const char* what, long many) {
    char name[17] = {0};
    pthread_getname_np(pthread_self(), name, sizeof name);
    std::string key = std::to_string(syscall(SYS_gettid)) + "|" + name + "|" + what;
    std::lock_guard guard(counts().lock);
    counts().numbers[key] += many;
}

void simulated::fault(const std::string& what) {
    std::lock_guard guard(counts().lock);
    counts().faults += what + "\n";
}

// Writes lines of `thread id|thread name|action=count`; returns the bytes that the text needs, even beyond `size`.
API long simulated_counts(char* out, long size) {
    std::lock_guard guard(counts().lock);
    std::string text;
    for (auto& [key, number] : counts().numbers) text += key + "=" + std::to_string(number) + "\n";
    snprintf(out, size_t(size), "%s", text.c_str());
    return long(text.size()) + 1;
}

// Writes one line per fault; returns the bytes that the text needs, as above.
API long simulated_faults(char* out, long size) {
    std::lock_guard guard(counts().lock);
    snprintf(out, size_t(size), "%s", counts().faults.c_str());
    return long(counts().faults.size()) + 1;
}

API void simulated_reset() {
    std::lock_guard guard(counts().lock);
    counts().numbers.clear();
    counts().faults.clear();
}

// --- devices and contexts -------------------------------------------------------------------------------------------

int simulated::devices() { return int(visible().size()); }
int simulated::physical(int device) { return visible()[size_t(device)]; }
int& simulated::current() { return current_; }
bool& simulated::entered() { return entered_; }
bool simulated::active(int device) { return active_[device]; }
void simulated::activate(int device) { active_[device] = true; }

cudaError_t simulated::enter() {
    if (forked) return cudaErrorInitializationError;
    if (devices() == 0) return cudaErrorNoDevice;
    active_[current_] = entered_ = true;
    return cudaSuccess;
}

cudaError_t simulated::failed(cudaError_t error) { return error == cudaSuccess ? error : last = error; }

API int simulated_active(int device) { return active_[device]; }

API cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last; }

API const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInitializationError: return "initialization error";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        default: return "an error of the simulated CUDA";
    }
}
API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// --- a device's memory ----------------------------------------------------------------------------------------------

namespace {

struct Memory {
    struct Block {
        size_t bytes;
        int device;
    };
    // The addresses that callers get, which the CPU cannot access, and the memory behind them.
    char* shown = map(PROT_NONE);
    char* there = map(PROT_READ | PROT_WRITE);
    std::mutex lock;
    size_t end = 0, used[DEVICES_MAX] = {}, limit[DEVICES_MAX] = {size_t(24) << 30, size_t(24) << 30};
    std::map<size_t, Block> live;

    static char* map(int allowed) {
        return (char*)mmap(nullptr, ROOM, allowed, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    std::map<size_t, Block>::iterator at(const void* address) {
        auto found = live.upper_bound(size_t((char*)address - shown));
        return found == live.begin() ? live.end() : --found;
    }
};

Memory& memory() {
    static Memory* made = new Memory;
    return *made;
}

struct Pins {
    std::mutex lock;
    std::map<uintptr_t, size_t> ranges;
};

Pins& pins() {
    static Pins* made = new Pins;
    return *made;
}

constexpr size_t GRAIN = size_t(2) << 20;

}  // namespace

bool simulated::on_device(const void* address) {
    char* shown = memory().shown;
    return (char*)address >= shown && (char*)address < shown + ROOM;
}

char* simulated::real(const void* address) {
    return on_device(address) ? memory().there + ((char*)address - memory().shown) : (char*)address;
}

bool simulated::allocated(const void* address, size_t bytes) {
    std::lock_guard guard(memory().lock);
    auto found = memory().at(address);
    size_t at = size_t((char*)address - memory().shown);
    return found != memory().live.end() && at + bytes <= found->first + found->second.bytes;
}

size_t simulated::memory_of(int device) { return memory().limit[device]; }

API cudaError_t cudaMalloc(void** out, size_t bytes) {
    ENTER();
    count("allocation");
    auto& all = memory();
    std::lock_guard guard(all.lock);
    size_t whole = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    *out = nullptr;
    if (all.used[current_] + whole > all.limit[current_] || all.end + whole > ROOM)
        return failed(cudaErrorMemoryAllocation);
    *out = all.shown + all.end;
    all.live[all.end] = {whole, current_};
    all.end += whole;
    all.used[current_] += whole;
    return cudaSuccess;
}

API cudaError_t cudaFree(void* address) {
    ENTER();
    if (address == nullptr) return cudaSuccess;
    count("free");
    // Like CUDA, waits for all queued work before it frees memory.
    wait_for_all();
    auto& all = memory();
    std::lock_guard guard(all.lock);
    auto found = all.live.find(size_t((char*)address - all.shown));
    if (found == all.live.end()) return failed(cudaErrorInvalidValue);
    all.used[found->second.device] -= found->second.bytes;
    madvise(all.there + found->first, found->second.bytes, MADV_DONTNEED);
    all.live.erase(found);
    return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    ENTER();
    auto& all = memory();
    std::lock_guard guard(all.lock);
    *total = all.limit[current_];
    *free = *total > all.used[current_] ? *total - all.used[current_] : 0;
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
    if (cudaError_t error = enter()) return failed(error);
    memset(out, 0, sizeof *out);
    out->type = cudaMemoryTypeUnregistered;
    out->device = -1;
    out->hostPointer = (void*)address;
    if (on_device(address)) {
        std::lock_guard guard(memory().lock);
        auto found = memory().at(address);
        *out = {cudaMemoryTypeDevice, found == memory().live.end() ? 0 : found->second.device, (void*)address, nullptr};
    } else if (pinned(address, 1)) {
        *out = {cudaMemoryTypeHost, current_, (void*)address, (void*)address};
    }
    return cudaSuccess;
}

// --- host memory ----------------------------------------------------------------------------------------------------

bool simulated::pinned(const void* address, size_t bytes) {
    std::lock_guard guard(pins().lock);
    auto found = pins().ranges.upper_bound(uintptr_t(address));
    if (found == pins().ranges.begin()) return false;
    --found;
    return uintptr_t(address) + bytes <= found->first + found->second;
}

cudaError_t simulated::enroll(void* address, size_t bytes) {
    count("registration");
    std::lock_guard guard(pins().lock);
    if (bytes == 0) return cudaErrorInvalidValue;
    auto& ranges = pins().ranges;
    auto next = ranges.lower_bound(uintptr_t(address));
    if (next != ranges.end() && next->first < uintptr_t(address) + bytes) return cudaErrorHostMemoryAlreadyRegistered;
    if (next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > uintptr_t(address))
        return cudaErrorHostMemoryAlreadyRegistered;
    ranges[uintptr_t(address)] = bytes;
    return cudaSuccess;
}

cudaError_t simulated::strike(void* address) {
    size_t bytes;
    {
        std::lock_guard guard(pins().lock);
        auto found = pins().ranges.find(uintptr_t(address));
        if (found == pins().ranges.end()) return cudaErrorHostMemoryNotRegistered;
        bytes = found->second;
        pins().ranges.erase(found);
    }
    if (copying(address, bytes)) {
        fault("memory was unregistered while a copy used it");
        // Waits for the copy, so that the process survives to report the fault.
        while (copying(address, bytes)) usleep(1000);
    }
    return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
    ENTER();
    *out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return failed(enroll(*out, bytes));
}
API cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

API cudaError_t cudaFreeHost(void* address) {
    ENTER();
    wait_for_all();
    size_t bytes;
    {
        std::lock_guard guard(pins().lock);
        auto found = pins().ranges.find(uintptr_t(address));
        if (found == pins().ranges.end()) return failed(cudaErrorInvalidValue);
        bytes = found->second;
    }
    strike(address);
    munmap(address, bytes);
    return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    ENTER();
    return failed(enroll(address, bytes));
}
API cudaError_t cudaHostUnregister(void* address) {
    ENTER();
    return failed(strike(address));
}

// The driver's calls for the same registration; they need a current context.
API CUresult cuMemHostRegister(void* address, size_t bytes, unsigned) {
    if (enter() || !entered_) return CUDA_ERROR_INVALID_CONTEXT;
    return CUresult(enroll(address, bytes));
}
API CUresult cuMemHostUnregister(void* address) { return CUresult(strike(address)); }
