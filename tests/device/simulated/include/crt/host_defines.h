/* Defines the compiler macros that CUDA's headers need. nvcc has the original; torch's wheels leave it out. */
#pragma once
#define __no_return__ __attribute__((noreturn))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __annotate__(a)
#define __location__(a)
#define __specialization_static static
#define __cluster_dims__(...)
#define __CUDA_ARCH_HAS_FEATURE__(a) 0
#define __thread__ __thread
#define __import__
#define __export__
#define __cdecl
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__
#define __nv_pure__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
