// Streams, events and copies of the simulated CUDA, and the operations that read and write in a stream's order.
#include <pthread.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "simulated.hpp"

using namespace simulated;

// --- streams --------------------------------------------------------------------------------------------------------

namespace {

std::mutex all_lock;
std::vector<Stream*>& all() {
    static auto* made = new std::vector<Stream*>;
    return *made;
}
// The default stream of each device. Streams are never destroyed, so that their queued work still runs.
Stream* own[DEVICES_MAX];

Stream* made(int device) {
    auto* stream = new Stream(device);
    all().push_back(stream);
    return stream;
}

}  // namespace

void Stream::put(std::function<void()> work, bool works) {
    std::lock_guard guard(lock_);
    items_.push_back({std::move(work), works});
    if (!begun_) {
        begun_ = true;
        std::thread([this] { run(); }).detach();
    }
    changed_.notify_all();
}

void Stream::run() {
    pthread_setname_np(pthread_self(), "stream");
    while (true) {
        std::unique_lock guard(lock_);
        changed_.wait(guard, [this] { return !items_.empty() && !held_; });
        Item item = std::move(items_.front());
        items_.pop_front();
        busy_ = true;
        long delay = item.works ? delay_ : 0;
        guard.unlock();
        if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
        guard.lock();
        changed_.wait(guard, [this] { return !held_; });
        guard.unlock();
        item.work();
        guard.lock();
        busy_ = false;
        changed_.notify_all();
    }
}

bool Stream::idle() {
    std::lock_guard guard(lock_);
    return items_.empty() && !busy_;
}

void Stream::wait() {
    std::unique_lock guard(lock_);
    changed_.wait(guard, [this] { return items_.empty() && !busy_; });
}

void Stream::delay(long microseconds) {
    std::lock_guard guard(lock_);
    delay_ = microseconds;
}

void Stream::hold(bool held) {
    std::lock_guard guard(lock_);
    held_ = held;
    changed_.notify_all();
}

Stream* simulated::stream_of(cudaStream_t stream) {
    if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread) return (Stream*)stream;
    std::lock_guard guard(all_lock);
    if (own[current()] == nullptr) own[current()] = made(current());
    return own[current()];
}

void simulated::wait_for_all(int device) {
    std::vector<Stream*> streams;
    {
        std::lock_guard guard(all_lock);
        streams = all();
    }
    for (auto* stream : streams)
        if (device < 0 || stream->device == device) stream->wait();
}

// Delays each work item of a stream; 0 is the current device's default stream.
API void simulated_delay(cudaStream_t stream, long microseconds) { stream_of(stream)->delay(microseconds); }
// A held stream runs no work.
API void simulated_hold(cudaStream_t stream, int held) { stream_of(stream)->hold(held != 0); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
    ENTER();
    std::lock_guard guard(all_lock);
    *out = (cudaStream_t)made(current());
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* out) { return *out = 0, cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    ENTER();
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER();
    count("synchronisation");
    stream_of(stream)->wait();
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
    ENTER();
    count("synchronisation");
    wait_for_all(current());
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER();
    return stream_of(stream)->idle() ? cudaSuccess : failed(cudaErrorNotReady);
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
    ENTER();
    return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    if (id != nullptr) *id = 0;
    return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}

namespace {

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

}  // namespace

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(capture_mode, *mode);
    return cudaSuccess;
}

// --- events ---------------------------------------------------------------------------------------------------------

namespace {

struct Event {
    std::mutex lock;
    std::condition_variable changed;
    explicit Event(bool sleeps) : sleeps(sleeps) {}
    long recorded = 0, done = 0;
    int device = current();
    // True if threads sleep while they wait (cudaEventBlockingSync); otherwise CUDA's threads would spin.
    const bool sleeps;
    void wait(long number) {
        std::unique_lock guard(lock);
        changed.wait(guard, [&] { return done >= number; });
    }
    bool reached(long number) {
        std::lock_guard guard(lock);
        return done >= number;
    }
    long number() {
        std::lock_guard guard(lock);
        return recorded;
    }
};
// Queued work keeps an event alive after its owner has destroyed it.
using Shared = std::shared_ptr<Event>;

Shared& event_of(cudaEvent_t event) { return *(Shared*)event; }

}  // namespace

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    ENTER();
    *out = (cudaEvent_t) new Shared(new Event((flags & cudaEventBlockingSync) != 0));
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete &event_of(event), cudaSuccess; }

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ENTER();
    Shared shared = event_of(event);
    auto* on = stream_of(stream);
    if (on->device != shared->device) return failed(cudaErrorInvalidResourceHandle);
    long number;
    {
        std::lock_guard guard(shared->lock);
        number = ++shared->recorded;
    }
    auto reached = [shared, number] {
        {
            std::lock_guard guard(shared->lock);
            shared->done = std::max(shared->done, number);
        }
        shared->changed.notify_all();
    };
    on->put(reached, false);
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER();
    // In this mode the query would end a capture on any thread.
    if (capture_mode == cudaStreamCaptureModeGlobal) count("query in the global mode");
    std::lock_guard guard(event_of(event)->lock);
    return event_of(event)->done >= event_of(event)->recorded ? cudaSuccess : failed(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER();
    Shared shared = event_of(event);
    long number = shared->number();
    // Waiting for an event that was reached does not count as a wait.
    if (!shared->reached(number)) count(shared->sleeps ? "wait for an event" : "wait that spins");
    shared->wait(number);
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t, cudaEvent_t) { return *out = 1, cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ENTER();
    Shared shared = event_of(event);
    long number = shared->number();
    stream_of(stream)->put([shared, number] { shared->wait(number); }, false);
    return cudaSuccess;
}

// --- copies ---------------------------------------------------------------------------------------------------------

namespace {

std::mutex flying_lock;
std::map<long, std::pair<uintptr_t, size_t>>& flying() {
    static auto* made = new std::map<long, std::pair<uintptr_t, size_t>>;
    return *made;
}

// Notes host memory that a copy uses, until the last reference to the result is dropped.
std::shared_ptr<void> noted(const void* address, size_t bytes) {
    static long last = 0;
    std::lock_guard guard(flying_lock);
    long number = ++last;
    flying()[number] = {uintptr_t(address), bytes};
    return {nullptr, [number](void*) {
                std::lock_guard inner(flying_lock);
                flying().erase(number);
            }};
}

// CUDA buffers this many bytes of a copy from pageable memory; a larger copy waits until all of it has been read.
constexpr size_t PAGEABLE_AT_ONCE = 64 << 10;

cudaError_t copied(void* target, const void* source, size_t bytes, cudaStream_t stream, bool waits) {
    ENTER();
    bool out = !on_device(target), in = !on_device(source);
    bool pageable = (out && !pinned(target, bytes)) || (in && !pinned(source, bytes));
    auto* on = stream_of(stream);
    std::string what = std::string("copy ") + (in ? "host" : "device") + " to " + (out ? "host" : "device");
    count((what + (pageable ? ", pageable" : "")).c_str());
    count(("bytes of " + what).c_str(), long(bytes));
    if (pageable && in && !waits) {
        auto held = std::make_shared<std::vector<char>>((const char*)source, (const char*)source + bytes);
        on->put([=] { memcpy(real(target), held->data(), bytes); });
        waits = bytes > PAGEABLE_AT_ONCE;
    } else {
        auto reads = in ? noted(source, bytes) : nullptr, writes = out ? noted(target, bytes) : nullptr;
        on->put([=] { memmove(real(target), real(source), bytes), (void)reads, (void)writes; });
        waits = waits || pageable;
    }
    if (waits) {
        // Counted apart from synchronisations: if the caller must wait, torch synchronises the stream itself, too.
        count("wait within a copy");
        on->wait();
    }
    return cudaSuccess;
}

}  // namespace

bool simulated::copying(const void* address, size_t bytes) {
    std::lock_guard guard(flying_lock);
    auto begin = uintptr_t(address);
    for (auto& [_, range] : flying())
        if (range.first < begin + bytes && begin < range.first + range.second) return true;
    return false;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return copied(to, from, bytes, stream, false);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return copied(to, from, bytes, nullptr, true);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return copied(to, from, bytes, stream, false);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
    return launch(stream, [=] {
        for (size_t row = 0; row < height; row++)
            memcpy(real(to) + row * to_pitch, real(from) + row * from_pitch, width);
    });
}
API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
    return launch(stream, [=] { memset(real(at), value, bytes); });
}
API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
    cudaMemsetAsync(at, value, bytes, nullptr);
    return cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return launch(stream, [=] { function(data); });
}

// --- operations that read and write ---------------------------------------------------------------------------------

cudaError_t simulated::launch(cudaStream_t stream, std::function<void()> work) {
    ENTER();
    count("launch");
    stream_of(stream)->put(std::move(work));
    return cudaSuccess;
}

namespace {

uint64_t results[1 << 18];

uint64_t hashed(const char* at, size_t bytes) {
    uint64_t found = 1469598103934665603u, word;
    for (; bytes >= sizeof word; at += sizeof word, bytes -= sizeof word) {
        memcpy(&word, at, sizeof word);
        found = (found ^ word) * 1099511628211u;
    }
    for (; bytes; at++, bytes--) found = (found ^ uint8_t(*at)) * 1099511628211u;
    return found;
}

}  // namespace

// Stores the hash of the bytes that the stream finds when it reaches this read; `simulated_hash` hashes host memory.
API void simulated_read(cudaStream_t stream, const void* at, size_t bytes, int result) {
    launch(stream, [=] { results[result] = hashed(real(at), bytes); });
}
API uint64_t simulated_result(int result) { return results[result]; }
API uint64_t simulated_hash(const void* at, size_t bytes) { return hashed((const char*)at, bytes); }
// Fills memory with an element of two bytes, in stream order.
API void simulated_fill(cudaStream_t stream, void* at, size_t bytes, uint16_t element) {
    launch(stream, [=] {
        auto* out = (uint16_t*)real(at);
        std::fill(out, out + bytes / sizeof element, element);
    });
}
// Adds the squares of finite fp32 values to a row of sums, as the check of gradients does (see memascend.kernels.sums).
// A sum is an integer in units of 2^-298, in digits of 28 bits; a square's lower 24 bits are added apart from the rest.
API void simulated_check(cudaStream_t stream, const void* at, size_t bytes, void* sums) {
    launch(stream, [=] {
        auto* row = (int64_t*)real(sums);
        for (size_t index = 0; index < bytes / 4; index++) {
            uint32_t bits = ((const uint32_t*)real(at))[index] & 0x7FFFFFFF;
            uint64_t significand = (bits & 0x7FFFFF) | (bits >> 23 ? 0x800000 : 0), square = significand * significand;
            if (bits >= 0x7F800000) {
                row[bits == 0x7F800000 ? 22 : 23]++;
                continue;
            }
            for (int half = 0; half < 2; half++) {
                unsigned power = 2 * (std::max(bits >> 23, 1u) - 1) + 24 * half;
                uint64_t part = ((square >> (24 * half)) & 0xFFFFFF) << power % 28;
                row[power / 28] += int64_t(part & 0xFFFFFFF);
                row[power / 28 + 1] += int64_t(part >> 28);
            }
        }
    });
}
