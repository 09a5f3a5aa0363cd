// CUDA's words for a C++ compiler: a kernel's blocks one after another, a block's threads as fibers that take turns.
// Blocks that must be resident together each have a thread of the machine.
//
// It finds wrong indices, missing or divergent barriers, reads of what was never written (memory starts as NaN) and
// shuffles of threads that left. It does not find races within a barrier's interval, nor anything of time.
//
// Every kernel is compiled with this, so it includes little; what runs them is in runtime.cpp, compiled once.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __builtin_assume(condition)
#ifdef RESIDENT_TOGETHER
#define OF_ITS_BLOCK __thread
#else
#define OF_ITS_BLOCK  // such variables cost too much where one block runs at a time
#endif
#define __shared__ static OF_ITS_BLOCK

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern OF_ITS_BLOCK dim3 threadIdx, blockIdx, blockDim, gridDim;

// The host's side: a device of a few multiprocessors with room for one block each.
using cudaStream_t = void*;
#define __CUDA_ARCH_LIST__ 800
struct cudaLaunchAttribute {
  int id;
  struct {
    int cooperative, programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

extern "C" int emulated_processors;

namespace emulation {

extern OF_ITS_BLOCK uint4* room;  // what a block has of shared memory

// A kernel with its arguments, and what calls it with them.
struct Body {
  void (*call)(const void*);
  const void* kernel;

  template <typename Kernel>
  Body(const Kernel& kernel) : call([](const void* k) { (*static_cast<const Kernel*>(k))(); }), kernel(&kernel) {}
};

void launch(dim3 grid, dim3 block, size_t shared_bytes, Body body);
void launch_together(const cudaLaunchConfig_t& how, Body body);
void check_shared(int64_t bytes);
void yield();
void yield_to_other_blocks();
// `bytes` from another thread of the warp, for all of which it is a barrier.
void exchange(const void* mine, int from, void* theirs, size_t bytes);
int lane();

template <typename T>
T shuffle(T value, int from) {
  T result;
  exchange(&value, from, &result, sizeof(T));
  return result;
}

}  // namespace emulation

void __syncthreads();

template <typename T>
T __shfl_xor_sync(unsigned, T value, int bit) {
  return emulation::shuffle(value, emulation::lane() ^ bit);
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width) {
  return emulation::shuffle(value, emulation::lane() / width * width + lane % width);
}

template <typename A, typename B>
auto min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
auto max(A a, B b) {
  return a > b ? a : b;
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float float_of_half(uint16_t x) { return __builtin_bit_cast(_Float16, x); }
inline uint16_t half_of(float x) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x)); }
inline int64_t __double_as_longlong(double x) { return __builtin_bit_cast(int64_t, x); }
inline double __longlong_as_double(int64_t x) { return __builtin_bit_cast(double, x); }
inline float __fdividef(float a, float b) { return a * (1.0f / b); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }

inline void __nanosleep(unsigned) { emulation::yield_to_other_blocks(); }

enum { cudaLaunchAttributeCooperative, cudaLaunchAttributeProgrammaticStreamSerialization, cudaErrorCooperativeLaunchTooLarge = 720 };
inline int cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return 0;
}
using cudaError_t = int;
enum { cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize };
inline const char* cudaGetErrorString(int) { return "an error"; }
inline int cudaGetLastError() { return 0; }
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaSetDevice(int) { return 0; }
template <typename Kernel>
int cudaFuncSetAttribute(Kernel*, int, int64_t bytes) {
  emulation::check_shared(bytes);
  return 0;
}
template <typename Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 1;
  return 0;
}
inline int cudaDeviceGetAttribute(int* value, int, int) {
  *value = emulated_processors;
  return 0;
}
