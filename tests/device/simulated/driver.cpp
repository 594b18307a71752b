// Kernels, device properties, driver calls and cuBLAS of the simulated CUDA; all but three kernels compute nothing.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "simulated.hpp"

using namespace simulated;

// --- kernels --------------------------------------------------------------------------------------------------------

namespace {

struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;
// Its address stands for every opaque object that callers only pass on.
char something[64];

// torch's kernels that add fp32 gradients, fill fp32 and fill int64 do so; every other kernel computes nothing.
enum class Kernel { add, fill, fill_long };

std::map<const void*, Kernel>& kernels() {
    static auto* known = new std::map<const void*, Kernel>;
    return *known;
}

cudaError_t computed(const void* function, void** arguments, cudaStream_t stream) {
    auto found = kernels().find(function);
    if (found == kernels().end()) return launch(stream);
    int count = *(int*)arguments[0];
    auto at = (char**)arguments[2];
    bool is_long = found->second == Kernel::fill_long;
    if (!allocated(at[0], size_t(count) * (is_long ? 8 : 4))) {
        fault("a kernel writes beyond its memory");
        return cudaErrorIllegalAddress;
    }
    if (is_long) {
        auto* longs = (int64_t*)real(at[0]);
        return launch(stream, [=, number = *(int64_t*)arguments[1]] { std::fill(longs, longs + count, number); });
    }
    float number = *(float*)arguments[1];
    auto* out = (float*)real(at[0]);
    if (found->second == Kernel::fill) return launch(stream, [=] { std::fill(out, out + count, number); });
    auto *left = (const float*)real(at[1]), *right = (const float*)real(at[2]);
    return launch(stream, [=] {
        for (int index = 0; index < count; index++) out[index] = left[index] + number * right[index];
    });
}

}  // namespace

API void** __cudaRegisterFatBinary(void*) { return (void**)something; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
    std::string name = device;
    if (name.find("vectorized_elementwise_kernel") == std::string::npos) return;
    if (name.find("CUDAFunctor_addIfE") != std::string::npos) kernels()[host] = Kernel::add;
    if (name.find("FillFunctorIfE") != std::string::npos) kernels()[host] = Kernel::fill;
    if (name.find("FillFunctorIlE") != std::string::npos) kernels()[host] = Kernel::fill_long;
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (configurations.empty()) return failed(cudaErrorMissingConfiguration);
    auto last = configurations.back();
    configurations.pop_back();
    *grid = last.grid, *block = last.block, *shared = last.shared, *(cudaStream_t*)stream = last.stream;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
    return *out = (cudaKernel_t)function, cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
    return computed(kernel, arguments, stream);
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
    return computed(function, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    return launch(config->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->binaryVersion = out->ptxVersion = 90;
    return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
    return *out = 2, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
    return *out = 2, cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** out, const void*) {
    static void* made = nullptr;
    if (made == nullptr) cudaMalloc(&made, 1);
    return *out = made, cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// --- devices --------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* out) {
    *out = devices();
    return *out ? cudaSuccess : failed(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* out) { return *out = current(), cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
    current() = device;
    ENTER();
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "Simulated GPU %d", physical(device));
    out->major = 9, out->minor = 0, out->totalGlobalMem = memory_of(device), out->multiProcessorCount = 16;
    out->warpSize = 32, out->maxThreadsPerBlock = 1024, out->maxThreadsPerMultiProcessor = 2048;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536, out->maxBlocksPerMultiProcessor = 24;
    out->sharedMemPerBlock = 49152, out->sharedMemPerBlockOptin = out->sharedMemPerMultiprocessor = 101376;
    out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
    out->l2CacheSize = 32 << 20, out->unifiedAddressing = 1, out->asyncEngineCount = 2, out->canMapHostMemory = 1;
    out->textureAlignment = 512, out->memoryBusWidth = 384, out->pciDeviceID = device + 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *out = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *out = 0; break;
        case cudaDevAttrMultiProcessorCount: *out = 16; break;
        case cudaDevAttrMaxThreadsPerBlock: *out = 1024; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *out = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 101376; break;
        case cudaDevAttrMaxRegistersPerBlock: *out = 65536; break;
        case cudaDevAttrWarpSize: *out = 32; break;
        case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *out = 65535; break;
        default: *out = 1;
    }
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
    return snprintf(out, size_t(size), "0000:%02x:00.0", device + 1), cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* out) { return *out = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* out) { return *out = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) { return *out = 0, cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* found) {
    *out = dlsym(RTLD_DEFAULT, name);
    if (*out == nullptr) *out = (void*)+[]() -> int { return CUDA_ERROR_NOT_SUPPORTED; };
    if (found != nullptr) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// --- the driver: cuda.h maps its functions to versioned names --------------------------------------------------------

namespace {

thread_local std::vector<int> contexts;
char context[DEVICES_MAX];

int current_context() { return !contexts.empty() ? contexts.back() : entered() ? current() : -1; }

}  // namespace

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* out) { return *out = CUDA_VERSION, CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult, const char** out) { return *out = "CUDA_ERROR_SIMULATED", CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char** out) { return *out = "simulated", CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* out) { return *out = devices(), CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* out, int device) { return *out = device, CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char* out, int size, CUdevice device) {
    return snprintf(out, size_t(size), "Simulated GPU %d", physical(device)), CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice device) {
    return CUresult(cudaDeviceGetAttribute(out, cudaDeviceAttr(attribute), device));
}
API CUresult cuCtxGetCurrent(CUcontext* out) {
    int found = current_context();
    return *out = found < 0 ? nullptr : (CUcontext)&context[found], CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext made) {
    if (made != nullptr) current() = int((char*)made - context), entered() = true;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* out) { return *out = current(), CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent(CUcontext made) { return contexts.push_back(int((char*)made - context)), CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent(CUcontext* out) {
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *out = (CUcontext)&context[contexts.back()];
    return contexts.pop_back(), CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* out) {
    return *flags = 0, *out = active(device), CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
    return activate(device), *out = (CUcontext)&context[device], CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned) { return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* out, CUlimit) { return *out = 0, CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* out) {
    return *out = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return CUresult(cudaThreadExchangeStreamCaptureMode((cudaStreamCaptureMode*)mode));
}
API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(void**)out = context;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr*)out = address;
    else
        *(int*)out = 0;
    return CUDA_SUCCESS;
}

// Triton's kernels are loaded, launched and counted, but compute nothing.
API CUresult cuModuleLoadData(CUmodule* out, const void*) { return *out = (CUmodule)something, CUDA_SUCCESS; }
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char* name) {
    return *out = (CUfunction)strdup(name), CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction) {
    return *out = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* out, CUfunction, const CUlaunchConfig*) { return *out = 1, CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction, int, size_t) {
    return *out = 2, CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
    count((std::string("launch of ") + (const char*)function).c_str());
    return CUresult(launch((cudaStream_t)config->hStream));
}
API CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream stream, void** arguments, void** extra) {
    CUlaunchConfig config{};
    config.hStream = stream;
    return cuLaunchKernelEx(&config, function, arguments, extra);
}

// --- cuBLAS: products compute nothing --------------------------------------------------------------------------------

namespace {
struct Blas {
    cudaStream_t stream = nullptr;
};
}  // namespace

API int cublasCreate_v2(void** out) { return *out = new Blas, 0; }
API int cublasDestroy_v2(void*) { return 0; }
API int cublasSetStream_v2(Blas* blas, cudaStream_t stream) { return blas->stream = stream, 0; }
API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
API int cublasSetMathMode(void*, int) { return 0; }
API int cublasGetMathMode(void*, int* out) { return *out = 0, 0; }
API int cublasSetPointerMode_v2(void*, int) { return 0; }
API int cublasGetPointerMode_v2(void*, int* out) { return *out = 0, 0; }
API int cublasSetSmCountTarget(void*, int) { return 0; }
#define PRODUCT(name) \
    API int name(Blas* blas) { return int(launch(blas->stream)); }
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasGemmEx) PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2) PRODUCT(cublasDgemv_v2) PRODUCT(cublasDotEx) PRODUCT(cublasSdot_v2)
#define MADE(name) \
    API int name(void** out) { return *out = something, 0; }
MADE(cublasLtCreate) MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatrixLayoutCreate)
MADE(cublasLtMatmulPreferenceCreate)
#define FINE(name) \
    API int name() { return 0; }
FINE(cublasLtMatmulDescDestroy) FINE(cublasLtMatmulDescSetAttribute) FINE(cublasLtMatmulPreferenceDestroy)
FINE(cublasLtMatmulPreferenceSetAttribute) FINE(cublasLtMatrixLayoutDestroy) FINE(cublasLtMatrixLayoutSetAttribute)
FINE(cublasLtMatmulAlgoInit) FINE(cublasLtMatmulAlgoCheck) FINE(cublasLtMatmulAlgoConfigSetAttribute)
API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* out) {
    // Gives one result, with an empty algorithm and the status success.
    return memset(results, 0, 96), *out = 1, 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                       void*, void*, const void*, void*, size_t, cudaStream_t stream) {
    return int(launch(stream));
}
