// Declares what the files of the simulated CUDA share: a CUDA runtime and driver that need no GPU.
//
// Memory, copies, streams and events are real and asynchronous. Kernels of torch and Triton are queued in a stream; all
// but three (see driver.cpp) compute nothing. `simulated_read` and `simulated_fill` read and write in stream order, so
// that the values that a read finds show which work ran before it.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace simulated {

constexpr int DEVICES_MAX = 2;
// Bytes of address space for all allocations of a process; no address is used twice.
constexpr size_t ROOM = size_t(256) << 30;

// --- counts and faults ----------------------------------------------------------------------------------------------

// Adds `many` to the calling thread's count of the action `what`.
void count(const char* what, long many = 1);
// Records a use that CUDA forbids, or that no correct program makes.
void fault(const std::string& what);

// --- devices and contexts -------------------------------------------------------------------------------------------

// Returns the number of devices that CUDA_VISIBLE_DEVICES leaves visible.
int devices();
// Returns the index among all devices of a visible device.
int physical(int device);
// The calling thread's current device.
int& current();
// True if the calling thread has a context.
bool& entered();
// True if a device has a context in this process.
bool active(int device);
// Makes the context of the thread's device; fails in a forked child. Nearly every call begins with it.
cudaError_t enter();
// Makes the context of a device, for the driver's calls.
void activate(int device);
// Stores an error for cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t error);

#define ENTER()                                           \
    if (cudaError_t error_ = simulated::enter(); error_) \
    return simulated::failed(error_)

// --- memory ---------------------------------------------------------------------------------------------------------

// True for an address of a device, which the CPU cannot access.
bool on_device(const void* address);
// Returns the memory behind an address of a device; returns other addresses unchanged.
char* real(const void* address);
// True if all bytes are in one live allocation of a device.
bool allocated(const void* address, size_t bytes);
// True if all bytes are in one range that was registered, or allocated by cudaHostAlloc.
bool pinned(const void* address, size_t bytes);
// Registers a range of host memory.
cudaError_t enroll(void* address, size_t bytes);
// Unregisters a range of host memory; records a fault if a copy in flight uses it.
cudaError_t strike(void* address);
// Returns the bytes of memory that a device has.
size_t memory_of(int device);
// True if a copy in flight uses any of these bytes of host memory.
bool copying(const void* address, size_t bytes);

// --- streams --------------------------------------------------------------------------------------------------------

class Stream {
   public:
    explicit Stream(int device) : device(device) {}
    // Queues work; with `works`, the delay that a test set for this stream precedes it.
    void put(std::function<void()> work, bool works = true);
    bool idle();
    void wait();
    void delay(long microseconds);
    void hold(bool held);
    const int device;

   private:
    struct Item {
        std::function<void()> work;
        bool works;
    };
    void run();
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<Item> items_;
    bool busy_ = false, begun_ = false, held_ = false;
    long delay_ = 0;
};

// Returns the stream of a handle; null and CUDA's special handles mean the current device's default stream.
Stream* stream_of(cudaStream_t stream);
// Waits for all streams of a device, or of all devices (-1).
void wait_for_all(int device = -1);
// Counts a launch, and queues its work in a stream.
cudaError_t launch(cudaStream_t stream, std::function<void()> work = [] {});

}  // namespace simulated
