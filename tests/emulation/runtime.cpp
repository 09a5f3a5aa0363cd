// What runs the kernels: fibers for threads, one block after another or each in a thread of the machine.
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

OF_ITS_BLOCK dim3 threadIdx, blockIdx, blockDim, gridDim;
int emulated_processors = 6;

namespace emulation {

constexpr size_t kMostShared = 227 << 10, kStack = 64 << 10, kMostThreads = 1024;
constexpr size_t kRoom = 256 << 10;  // with as much behind what a block asked for as tells who goes beyond it

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

OF_ITS_BLOCK uint4* room;

static OF_ITS_BLOCK Fiber* fibers;
static OF_ITS_BLOCK Warp warps[32];
static OF_ITS_BLOCK jmp_buf scheduler;
static OF_ITS_BLOCK int current, alive, arrived, threads;
static OF_ITS_BLOCK long phase, progress;
static OF_ITS_BLOCK const Body* kernel;

[[noreturn]] static void fail(const char* what, int64_t number) {
  std::fprintf(stderr, "emulation: %s (%lld)\n", what, static_cast<long long>(number));
  std::exit(3);
}

void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

void yield_to_other_blocks() {
  ++progress;
  std::this_thread::yield();
  yield();
}

static void take_turn(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.is_begun) _longjmp(fiber.place, 1);
  fiber.is_begun = true;
  setcontext(&fiber.context);
}

static void run_thread() {
  kernel->call(kernel->kernel);
  fibers[current].is_done = true;
  ++progress;
  if (--alive > 0 && arrived == alive) arrived = 0, ++phase;
  yield();
}

static void start(Fiber& fiber) {
  fiber.is_begun = fiber.is_done = false;
  if (fiber.stack == nullptr) fiber.stack = static_cast<char*>(std::malloc(kStack));
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_thread, 0);
}

static void run_block(unsigned b, dim3 grid, dim3 block, size_t shared_bytes, const Body& body) {
  if (room == nullptr) {
    room = static_cast<uint4*>(aligned_alloc(256, kRoom));
    fibers = static_cast<Fiber*>(std::calloc(kMostThreads, sizeof(Fiber)));
  }
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
    fail("shared memory written beyond the bytes asked for", shared_bytes);
  }
}

void check_shared(int64_t bytes) {
  if (bytes > static_cast<int64_t>(kMostShared)) fail("bytes of shared memory", bytes);
}

static void check(dim3 block, size_t shared_bytes) {
  const int64_t threads = int64_t{block.x} * block.y;
  if (threads < 1 || threads > static_cast<int64_t>(kMostThreads)) fail("threads in a block", threads);
  check_shared(shared_bytes);
}

void launch(dim3 grid, dim3 block, size_t shared_bytes, Body body) {
  check(block, shared_bytes);
  for (unsigned b = 0; b < grid.x; ++b) run_block(b, grid, block, shared_bytes, body);
}

void launch_together(const cudaLaunchConfig_t& how, Body body) {
  check(how.blockDim, how.dynamicSmemBytes);
  if (static_cast<int>(how.gridDim.x) > emulated_processors) fail("blocks that cannot be resident together", how.gridDim.x);
  std::vector<std::thread> blocks;
  for (unsigned b = 0; b < how.gridDim.x; ++b) {
    blocks.emplace_back([&how, &body, b] {
      run_block(b, how.gridDim, how.blockDim, how.dynamicSmemBytes, body);
      for (size_t t = 0; t < kMostThreads; ++t) std::free(fibers[t].stack);
      std::free(fibers);
      std::free(room);
    });
  }
  for (std::thread& block : blocks) block.join();
}

void exchange(const void* mine, int from, void* theirs, size_t bytes) {
  Warp& warp = warps[current / 32];
  const long before = warp.phase;
  const int left = threads - current / 32 * 32, lanes = left < 32 ? left : 32;
  if (from >= lanes) fail("a shuffle with a thread that there is not", current);
  std::memcpy(&warp.slots[before & 1][current % 32], mine, bytes);
  ++progress;
  if (++warp.arrived == lanes) {
    warp.arrived = 0;
    ++warp.phase;
  }
  while (warp.phase == before) yield();
  ++progress;
  std::memcpy(theirs, &warp.slots[before & 1][from], bytes);
}

int lane() { return current % 32; }

}  // namespace emulation

void __syncthreads() {
  using namespace emulation;
  const long before = phase;
  ++progress;
  if (++arrived == alive) {
    arrived = 0;
    ++phase;
    return;
  }
  while (phase == before) yield();
  ++progress;
}
