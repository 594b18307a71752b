// A CUDA runtime and driver without a GPU: what its parts share.
//
// Memory, copies, streams and events are real and asynchronous. Kernels of torch and Triton only take their place in a
// stream. `simulated_read` and `simulated_fill` read and write, so that what they find shows what came before what.
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
// Of addresses, for all allocations of a process: none is used twice.
constexpr size_t ROOM = size_t(256) << 30;

// --- what is counted ------------------------------------------------------------------------------------------------

// So many more of `what`, by the calling thread.
void count(const char* what, long many = 1);
// Something that CUDA forbids, or that no correct program does.
void fault(const std::string& what);

// --- devices and contexts -------------------------------------------------------------------------------------------

// Those that CUDA_VISIBLE_DEVICES leaves.
int devices();
// The number that a visible device has among all.
int physical(int device);
// The calling thread's device.
int& current();
// Whether the calling thread has a context.
bool& entered();
// Whether a device has a context in this process.
bool active(int device);
// What nearly every call does first: it makes the context of the thread's device, or fails in a forked child.
cudaError_t enter();
// A context on a device, for the driver's calls.
void activate(int device);
// Keeps an error for cudaGetLastError.
cudaError_t failed(cudaError_t error);

#define ENTER()                                           \
    if (cudaError_t error_ = simulated::enter(); error_) \
    return simulated::failed(error_)

// --- memory ---------------------------------------------------------------------------------------------------------

// Whether an address is of a device: the CPU faults there.
bool on_device(const void* address);
// Where bytes of a device are in truth; other addresses as they are.
char* real(const void* address);
// Whether bytes are all of one allocation of a device.
bool allocated(const void* address, size_t bytes);
// Whether bytes are registered, or of cudaHostAlloc.
bool pinned(const void* address, size_t bytes);
cudaError_t enroll(void* address, size_t bytes);
cudaError_t strike(void* address);
size_t memory_of(int device);
// Whether a copy that was begun uses host memory.
bool copying(const void* address, size_t bytes);

// --- streams --------------------------------------------------------------------------------------------------------

class Stream {
   public:
    explicit Stream(int device) : device(device) {}
    // Queues what the stream does; `works` where it takes the time that a test gave this stream.
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

Stream* stream_of(cudaStream_t stream);
void wait_for_all(int device = -1);
cudaError_t launch(cudaStream_t stream, std::function<void()> work = [] {});

}  // namespace simulated
