// fusegen 0.1.0   chain 6beb62936165   signature forward+backward: bias float32, d_bias float32, d_out float32, d_x float32, out float32, x float32; 32-bit offsets
//   add_channel(bias, axis=-1) | relu
#include <cstdint>
#include <cuda_runtime.h>

using Index = uint32_t;

// A size with what it takes to divide by it: two instructions instead of twenty, for dividends below 2^31.
struct Size {
  uint32_t value, multiplier, shift;
};

static Size size_of(int64_t value) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < static_cast<uint64_t>(value)) ++shift;
  const uint64_t excess = (uint64_t{1} << 32) * ((uint64_t{1} << shift) - value);
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(excess / value + 1), shift};
}

namespace {

[[maybe_unused]] __device__ __forceinline__ Index divide(Index n, Size d) { return (__umulhi(n,
    d.multiplier) + n) >> d.shift; }

template <typename Stored>
__device__ __forceinline__ Stored widen(Stored x) {
  return x;
}

template <typename Stored, typename Value>
__device__ __forceinline__ Stored narrow(Value x) {
  return static_cast<Stored>(x);
}

// N neighbours, moved by one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <typename T, int N>
__device__ __forceinline__ auto widen(const Pack<T, N>& pack, int lane) {
  return widen(pack.at[lane]);
}

template <int Bytes>
struct Bits;
template <>
struct Bits<16> {
  using type = uint4;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<4> {
  using type = unsigned int;
};
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<1> {
  using type = unsigned char;
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  Pack<T, N> pack;
  *reinterpret_cast<Whole*>(&pack) = *reinterpret_cast<const Whole*>(from);
  return pack;
}

// Neighbours, the first `left` of them here, the others in another row, by as few accesses as their addresses allow.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_anywhere(const T* here, const T* next = nullptr, Index left = N) {
  constexpr int kPart = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  Pack<T, N> pack;
  if (left >= N && reinterpret_cast<uintptr_t>(here) % (sizeof(T) * kPart) == 0) {
#pragma unroll
    for (int n = 0; n < N; n += kPart) *reinterpret_cast<Pack<T,
        kPart>*>(pack.at + n) = load<kPart>(here + n);
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) pack.at[n] = n < left ? here[n] : next[n - left];
  }
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(&pack);
}

template <typename T>
struct Sum {
  T total = 0;
  __device__ void add(T term) { total += term; }
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
};

// Accumulators merged along a block's y, in a fixed tree, for the threads where it is 0.
template <typename... Accumulators>
__device__ __forceinline__ void merge_trees(unsigned char* memory, Accumulators&... mine) {
  const int cell = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const auto each = [&](auto visit) {
    unsigned char* at = memory;
    ((visit(reinterpret_cast<Accumulators*>(at), mine), at += threads * sizeof(Accumulators)), ...);
  };
  each([&](auto* cells, auto& sum) { cells[cell] = sum; });
  __syncthreads();
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) each([&](auto* cells,
        auto&) { cells[cell].merge(cells[cell + half * blockDim.x]); });
    __syncthreads();
  }
  each([&](auto* cells, auto& sum) { sum = cells[cell]; });
}

// The accumulator of the thread whose number in the warp differs in one bit.
template <typename Accumulator>
__device__ __forceinline__ Accumulator across(const Accumulator& mine, int bit) {
  static_assert(sizeof(Accumulator) % 4 == 0);
  Accumulator other = mine;
  auto* const words = reinterpret_cast<unsigned int*>(&other);
#pragma unroll
  for (int word = 0; word < sizeof(Accumulator) / 4; ++word) words[word] = __shfl_xor_sync(0xffffffffu,
      words[word], bit);
  return other;
}

// The accumulators of a row's lanes merged for the first of them, in a fixed order: over its warps, then within the first.
// A row has a power of two of lanes.
template <typename Accumulator>
__device__ __forceinline__ void merge_tree(Accumulator& mine, int lane, int lanes, void* memory) {
  if (lanes > 32) {
    Accumulator* const cells = static_cast<Accumulator*>(memory) + threadIdx.y * blockDim.x + threadIdx.x;
    *cells = mine;
    __syncthreads();
    if (lane >= 32) return;
    for (int other = 32; other < lanes; other += 32) mine.merge(cells[other]);
  }
  for (int bit = min(lanes, 32) / 2; bit > 0; bit /= 2) mine.merge(across(mine, bit));
}

// What a block's threads have of columns, N neighbours each: merged over its rows in a fixed tree, and left for as many columns
// as there are, as they lie. Of a thread's N cells each is in a part of its own, for threads beside each other to use other
// banks; all are free again afterwards.
template <typename Accumulator, int N>
__device__ __forceinline__ void leave_columns(const Accumulator (&mine)[N], void* memory,
    Accumulator* partials,
    int64_t columns) {
  Accumulator* const cells = static_cast<Accumulator*>(memory);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const int part = threads + (N < 32 ? 32 / N : 1);
#pragma unroll
  for (int n = 0; n < N; ++n) cells[n * part + thread] = mine[n];
  __syncthreads();
  for (int rows = blockDim.y; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (threadIdx.y < rows - half) {
#pragma unroll
      for (int n = 0; n < N; ++n) cells[n * part + thread].merge(cells[n * part + thread + half * blockDim.x]);
    }
    rows = half;
    __syncthreads();
  }
  for (int n = thread; n < min(columns, static_cast<int64_t>(blockDim.x * N)); n += threads) {
    partials[n] = cells[n % N * part + n / N];
  }
  __syncthreads();
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void forward_pointwise_values(const float x, const float bias, float& out) {
  // add_channel(bias, axis=-1)
  const float after_add_channel = x + bias;
  // relu
  out = after_add_channel <= 0.0f ? 0.0f : after_add_channel;
}

// Reads x, bias by (inner); writes out.
template <bool kMayCross>
__global__ void __launch_bounds__(64)
forward_pointwise(const float* x, const float* bias, float* __restrict__ out, ForwardSizes sizes,
    Index count) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<float, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
  // What element i's row has one of, where it is in what its row shares with others, and how many are left of the row.
  const auto enter_row = [&](Index i, Index& bias_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    bias_row = inner;
    return sizes.inner.value - inner;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    Index bias_here;
    const Index left = enter_row(i, bias_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      Index bias_next = bias_here;
      if (is_crossing) enter_row(i + left, bias_next);
      const auto bias_in = load_anywhere<kLanes>(bias + bias_here, bias + bias_next,
          is_crossing ? left : kLanes);
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float bias_value = widen(bias_in, lane);
        float out_value;
        forward_pointwise_values(x_value, bias_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      store(out + i, out_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, bias_here);
        const float bias_value = widen(bias[bias_here]);
        const float x_value = widen(x[j]);
        float out_value;
        forward_pointwise_values(x_value, bias_value, out_value);
        out[j] = narrow<float>(out_value);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_outer_values(const float out, const float d_out, float& d_x,
    float& total_term) {
  // backward, down to add_channel(bias, axis=-1)
  d_x = out <= 0.0f ? 0.0f : d_out;
  total_term = d_x;
}

// Reads out, d_out; leaves partials of total; writes d_x.
template <int kLanes>
__global__ void __launch_bounds__(256, 4)
backward_outer(const float* out, const float* d_out, float* __restrict__ d_x,
    Sum<float>* __restrict__ total_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  constexpr int kRows = 2;
  __shared__ alignas(16) unsigned char shared[(1024 + 32) * 4];
  const Index rows = sizes.outer.value, columns = sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index slot = task;
  Sum<float> total_sum[kLanes];
  if (column < columns) {
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<float, kLanes> out_in[kRows];
      Pack<float, kLanes> d_out_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        out_in[p] = load<kLanes>(out + (row * columns + column));
        d_out_in[p] = load<kLanes>(d_out + (row * columns + column));
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        Pack<float, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float out_value = widen(out_in[p], lane);
          const float d_out_value = widen(d_out_in[p], lane);
          float d_x_value;
          float total_term_value;
          backward_outer_values(out_value, d_out_value, d_x_value, total_term_value);
          d_x_out.at[lane] = narrow<float>(d_x_value);
          if (is_here) total_sum[lane].add(total_term_value);
        }
        if (is_here) store(d_x + ((row) * columns + column), d_x_out);
      }
    }
  }
  leave_columns(total_sum, shared, total_partials + (task * columns + strip),
      static_cast<int64_t>(columns) - strip);
}

__device__ __forceinline__ void backward_finalise_values(const float total, float& d_bias) {
  d_bias = total;
}

// Merges partials into total; writes d_bias.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_bias, const Sum<float>* total_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_sum.merge(total_next[n]);
      }
    }
  }
  merge_trees(shared, total_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_value = static_cast<float>(total_sum.sum());
  const Index inner = result;
  float d_bias_value;
  backward_finalise_values(total_value, d_bias_value);
  d_bias[inner] = narrow<float>(d_bias_value);
}

}  // namespace

// Scratch memory, handed out piece by piece; with no base it only counts.
struct Scratch {
  char* base;
  int64_t used = 0;
  template <typename T>
  T* take(int64_t count) {
    T* const piece = reinterpret_cast<T*>(base + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
};

// The caller's device stays current.
struct DeviceGuard {
  int previous = 0;
  explicit DeviceGuard(int device) {
    cudaGetDevice(&previous);
    if (previous != device) cudaSetDevice(device);
    else previous = -1;
  }
  ~DeviceGuard() {
    if (previous >= 0) cudaSetDevice(previous);
  }
};

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest power of two that is at least n, between two others.
static int64_t power_of_two(int64_t n, int64_t least, int64_t most) {
  int64_t power = least;
  while (power < n && power < most) power *= 2;
  return power;
}

// How many blocks of a kernel the device works on at once, each with so much shared memory of its own, and at most so much
// in any launch. Asked once for each kernel, device and size of block: the runtime takes microseconds to answer.
template <typename Kernel>
static int64_t resident_blocks(Kernel* kernel, dim3 block, int64_t shared_bytes, int64_t most_bytes,
    int device) {
  struct Answer {
    Kernel* kernel;
    int64_t shared_bytes;
    int threads, device;
    int64_t blocks;
  };
  thread_local Answer answers[16] = {};
  thread_local int next = 0;
  const int threads = static_cast<int>(block.x * block.y);
  for (const Answer& known : answers) {
    if (known.kernel == kernel && known.shared_bytes == shared_bytes && known.threads == threads && known.device == device) {
      return known.blocks;
    }
  }
  int on_each = 0, processors = 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most_bytes));
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, threads, shared_bytes);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (on_each == 0) return 1;  // the launch will say why
  Answer& oldest = answers[next];
  next = (next + 1) % 16;
  oldest = {kernel, shared_bytes, threads, device, static_cast<int64_t>(on_each) * processors};
  return oldest.blocks;
}

// How many packs wide strips are that go down columns: as wide as is usual, and all the same. Where those leave a tenth of
// the blocks without work that the device has room for, in all of their turns, so many as leave none.
static unsigned strip_width(int64_t packs, int64_t usual, int64_t most, int64_t room) {
  int64_t strips = ceil_divide(packs, usual);
  if (room > 0 && strips < 4 * room) {
    const int64_t each = room / strips, blocks = strips * (each > 0 ? each : 1);
    if (10 * blocks < 9 * room * ceil_divide(blocks,
        room)) strips = each > 0 ? room / each : (strips + room / 2) / room * room;
  }
  const int64_t width = ceil_divide(packs, strips);
  return static_cast<unsigned>(width < most ? width : most);
}

// Sets a kernel up while the one before it in the stream ends, where devices can: it waits for that itself.
template <typename... Parameters, typename... Arguments>
static void follow(void (*kernel)(Parameters...), dim3 blocks, dim3 block, int64_t shared_bytes,
    cudaStream_t stream,
    Arguments... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = blocks;
  launch.blockDim = block;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &early;
  launch.numAttrs = __CUDA_ARCH_LIST__ >= 900;
  cudaLaunchKernelEx(&launch, kernel, static_cast<Parameters>(arguments)...);
}

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[7]);
  const int device = static_cast<int>(a[6]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 512));
    // Packs that lie in two rows: none where rows are whole packs, and few where they are long.
    const bool may_cross = sizes.inner.value % 4 != 0 && sizes.inner.value < 4096;
    const auto run = may_cross ? forward_pointwise<true> : forward_pointwise<false>;
    follow(run, blocks, 64, 0, stream, x, bias, out, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: out, d_out, d_x, d_bias, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const out = reinterpret_cast<const float*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  auto* const d_bias = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const BackwardSizes sizes{ size_of(a[5]), size_of(a[6]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[8]);
  const int device = static_cast<int>(a[7]);
  const DeviceGuard guard(device);
  const int64_t backward_outer_rows = static_cast<int64_t>(sizes.outer.value),
      backward_outer_columns = static_cast<int64_t>(sizes.inner.value), backward_outer_kept = 1;
  const bool backward_outer_is_packed = backward_outer_columns % 4 == 0;
  const auto backward_outer_kernel = backward_outer_is_packed ? &backward_outer<4> : &backward_outer<1>;
  // Some 32 threads side by side, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t backward_outer_along = power_of_two(ceil_divide(backward_outer_rows, 8), 1, 8);
  const int64_t backward_outer_packs = ceil_divide(backward_outer_columns, backward_outer_is_packed ? 4 : 1),
      backward_outer_widest = 256 / backward_outer_along;
  const int64_t backward_outer_room = resident_blocks(backward_outer_kernel, dim3(256), 0, 0,
      device) / backward_outer_kept;
  const unsigned backward_outer_width = strip_width(backward_outer_packs, backward_outer_widest, 256,
      backward_outer_room);
  const dim3 backward_outer_block(backward_outer_width, 256 / backward_outer_width);
  const int64_t backward_outer_strips = ceil_divide(backward_outer_columns,
      backward_outer_width * (backward_outer_is_packed ? 4 : 1));
  const int64_t backward_outer_most = ceil_divide(backward_outer_rows, backward_outer_block.y * 2);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t backward_outer_wanted = backward_outer_room < backward_outer_strips ? 1 : backward_outer_room / backward_outer_strips;
  const int64_t backward_outer_slots = backward_outer_wanted < backward_outer_most ? backward_outer_wanted : backward_outer_most;
  const int64_t total_partials_slots = backward_outer_slots;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    const auto blocks = static_cast<unsigned>(backward_outer_kept * backward_outer_slots * backward_outer_strips);
    follow(backward_outer_kernel, blocks, backward_outer_block, 0, stream, out, d_out, d_x, total_partials,
        sizes, static_cast<Index>(backward_outer_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value),
        results = static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise, blocks, block, 0, stream, d_bias, total_partials, sizes,
        static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
