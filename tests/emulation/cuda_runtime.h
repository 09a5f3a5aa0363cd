// CUDA's words for a C++ compiler: a kernel's blocks one after another, a block's threads as fibers that take turns.
// Blocks that must be resident together each have a thread of the machine.
//
// It finds wrong indices, missing or divergent barriers, reads of what was never written (memory starts as NaN) and
// shuffles of threads that left. It does not find races within a barrier's interval, nor anything of time.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __builtin_assume(condition)
#ifdef RESIDENT_TOGETHER
#define OF_ITS_BLOCK thread_local
#else
#define OF_ITS_BLOCK  // thread_local costs too much where one block runs at a time
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
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline OF_ITS_BLOCK dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr size_t kMostShared = 227 << 10, kStack = 64 << 10;
constexpr size_t kRoom = 256 << 10;  // with as much behind what a block asked for as tells who goes beyond it
inline OF_ITS_BLOCK uint4* const room = static_cast<uint4*>(aligned_alloc(256, kRoom));

struct Fiber {
  ucontext_t context;  // for its first turn; then it goes on where it jumped from, which needs no system call
  jmp_buf place;
  bool is_begun, is_done;
  dim3 index;
  char* stack;
};
struct Warp {
  uint64_t slots[2][32];
  int arrived;
  long phase;
};
inline OF_ITS_BLOCK std::vector<Fiber> fibers(1024);
inline OF_ITS_BLOCK Warp warps[32];
inline OF_ITS_BLOCK jmp_buf scheduler;
inline OF_ITS_BLOCK int current, alive, arrived, threads;
inline OF_ITS_BLOCK long phase, progress;
inline OF_ITS_BLOCK const std::function<void()>* kernel;

[[noreturn]] inline void fail(const char* what, int number) {
  std::fprintf(stderr, "emulation: %s (%d)\n", what, number);
  std::exit(3);
}

inline void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

inline void take_turn(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.is_begun) _longjmp(fiber.place, 1);
  fiber.is_begun = true;
  setcontext(&fiber.context);
}

inline void run_thread() {
  (*kernel)();
  fibers[current].is_done = true;
  ++progress;
  if (--alive > 0 && arrived == alive) arrived = 0, ++phase;
  yield();
}

inline void start(Fiber& fiber) {
  fiber.is_begun = fiber.is_done = false;
  if (fiber.stack == nullptr) fiber.stack = static_cast<char*>(std::malloc(kStack));
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_thread, 0);
}

inline void run_block(unsigned b, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  kernel = &body;
  gridDim = grid;
  blockDim = block;
  blockIdx = dim3(b, 0, 0);
  threads = static_cast<int>(block.x * block.y);
  std::memset(room, 0xff, kRoom);
  alive = threads;
  arrived = 0;
  for (Warp& warp : warps) warp.arrived = 0;
  for (int t = 0; t < threads; ++t) {
    fibers[t].index = dim3(t % block.x, t / block.x, 0);
    start(fibers[t]);
  }
  while (alive > 0) {
    const long before = progress;
    for (int t = 0; t < threads; ++t) {
      if (fibers[t].is_done) continue;
      current = t;
      threadIdx = fibers[t].index;
      take_turn(fibers[t]);
    }
    if (progress == before) fail("threads wait for others that will not come", alive);
  }
  const char* behind = reinterpret_cast<char*>(room) + shared_bytes;
  if (*behind != '\xff' || std::memcmp(behind, behind + 1, kRoom - shared_bytes - 1) != 0) {
    fail("shared memory written beyond the bytes asked for", static_cast<int>(shared_bytes));
  }
}

inline void check(dim3 block, size_t shared_bytes) {
  const int threads = static_cast<int>(block.x * block.y);
  if (threads < 1 || threads > 1024) fail("threads in a block", threads);
  if (shared_bytes > kMostShared) fail("bytes of shared memory", static_cast<int>(shared_bytes));
}

inline void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  check(block, shared_bytes);
  for (unsigned b = 0; b < grid.x; ++b) run_block(b, grid, block, shared_bytes, body);
}

}  // namespace emulation

inline void __syncthreads() {
  using namespace emulation;
  const long mine = phase;
  ++progress;
  if (++arrived == alive) {
    arrived = 0;
    ++phase;
    return;
  }
  while (phase == mine) yield();
  ++progress;
}

namespace emulation {

// A value from another thread of the warp, for all of which it is a barrier.
template <typename T>
T shuffle(T value, int from) {
  Warp& warp = warps[current / 32];
  const long mine = warp.phase;
  const int left = threads - current / 32 * 32, lanes = left < 32 ? left : 32;
  if (from >= lanes) fail("a shuffle with a thread that there is not", current);
  std::memcpy(&warp.slots[mine & 1][current % 32], &value, sizeof(T));
  ++progress;
  if (++warp.arrived == lanes) {
    warp.arrived = 0;
    ++warp.phase;
  }
  while (warp.phase == mine) yield();
  ++progress;
  T result;
  std::memcpy(&result, &warp.slots[mine & 1][from], sizeof(T));
  return result;
}

}  // namespace emulation

template <typename T>
T __shfl_xor_sync(unsigned, T value, int bit) {
  return emulation::shuffle(value, emulation::current % 32 ^ bit);
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width) {
  const int here = emulation::current % 32;
  return emulation::shuffle(value, here / width * width + lane % width);
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

inline void __nanosleep(unsigned) {
  ++emulation::progress;
  std::this_thread::yield();
  emulation::yield();
}

// The host's side: a device of a few multiprocessors with room for one block each.
using cudaStream_t = void*;
#ifndef PROCESSORS
#define PROCESSORS 6
#endif
constexpr unsigned kProcessors = PROCESSORS;
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
enum { cudaLaunchAttributeCooperative, cudaLaunchAttributeProgrammaticStreamSerialization, cudaErrorCooperativeLaunchTooLarge = 720 };
inline int cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return 0;
}
namespace emulation {
inline void launch_together(const cudaLaunchConfig_t& how, const std::function<void()>& body) {
  check(how.blockDim, how.dynamicSmemBytes);
  if (how.gridDim.x > kProcessors) fail("blocks that cannot be resident together", static_cast<int>(how.gridDim.x));
  std::vector<std::thread> blocks;
  for (unsigned b = 0; b < how.gridDim.x; ++b) {
    blocks.emplace_back([&how, &body, b] {
      run_block(b, how.gridDim, how.blockDim, how.dynamicSmemBytes, body);
      for (Fiber& fiber : fibers) std::free(fiber.stack);
    });
  }
  for (std::thread& block : blocks) block.join();
}
}  // namespace emulation
using cudaError_t = int;
enum { cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize };
inline const char* cudaGetErrorString(int) { return "an error"; }
inline int cudaGetLastError() { return 0; }
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaSetDevice(int) { return 0; }
template <typename Kernel>
int cudaFuncSetAttribute(Kernel*, int, int64_t bytes) {
  if (bytes > static_cast<int64_t>(emulation::kMostShared)) emulation::fail("bytes of shared memory", bytes);
  return 0;
}
template <typename Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 1;
  return 0;
}
inline int cudaDeviceGetAttribute(int* value, int, int) {
  *value = kProcessors;
  return 0;
}
